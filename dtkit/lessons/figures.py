"""Figures of lessons, for light and dark pages: one of durations, and those that a notebook draws."""

from __future__ import annotations

import dataclasses
import io
import sys
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from dtkit._util.arguments import suggest_arguments
from dtkit.dashboard.figures.neutral import make_neutral

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.lessons.claims import Limit

_GRAY, _BLUE, _ORANGE = "#808080", "#3b8ec2", "#e08214"  # readable on white and on black
_DPI = 110
_SHORTEST = 1e-3  # a logarithmic axis has no zero


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure that notebooks show, also if pyplot was never imported. It has no background of its own."""

    figure: Figure
    description: str

    def __repr__(self) -> str:
        return f"Picture: {self.description}"

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.figure.savefig(data, format="png", dpi=_DPI, facecolor="none")
        return data.getvalue()


@suggest_arguments
def adapt_to_themes(figure: Figure, description: str = "a figure of this lesson") -> Picture:
    """Return a figure in colors for light and dark pages. Changes the figure.

    `description` is for readers who don't see it. Pyplot forgets the figure, so that a notebook shows it once.
    """
    if not hasattr(figure, "savefig"):
        raise TypeError(f"figure={figure!r}; it must be a matplotlib Figure, such as run.figure()")
    make_neutral(figure)
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(figure)
    return Picture(figure, description)


def draw_durations(results: Sequence[Limit]) -> Picture:
    """Draw one row for each duration, the first at the top."""
    if not results:
        raise ValueError("this lesson has no durations; make some with lesson.at_most(..., unit='s')")
    figure = Figure(figsize=(7.5, 1.0 + 0.36 * len(results)), layout="constrained", facecolor="none")
    ax = figure.subplots()
    rows = range(len(results))
    ax.hlines(rows, _SHORTEST, [result.limit for result in results], color=_GRAY, linewidth=1, alpha=0.5)
    ax.plot([result.limit for result in results], rows, "|", color=_GRAY, markersize=12, label="limit")
    measured = [max(result.measured, _SHORTEST) for result in results]
    ax.plot(measured, rows, "D", color=_ORANGE, markersize=7, label="measured")
    guessed = [(max(result.guess, _SHORTEST), row) for row, result in enumerate(results) if result.guess is not None]
    if guessed:
        ax.plot(*zip(*guessed, strict=True), "o", color=_BLUE, fillstyle="none", markersize=9, label="your guess")
    ax.set_yticks(rows, [result.quantity for result in results])
    ax.set_ylim(len(results) - 0.4, -0.6)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlabel("seconds", color=_GRAY)
    ax.set_facecolor("none")
    ax.grid(axis="x", color=_GRAY, alpha=0.3)
    ax.tick_params(colors=_GRAY, which="both")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(_GRAY)
    figure.legend(loc="outside upper left", ncols=3, frameon=False, labelcolor=_GRAY)
    return Picture(figure, "; ".join(f"{result.quantity}: {result.measured_text}" for result in results))

"""A lesson: its claims are shown as they are made, and counted in a score at the end."""

from __future__ import annotations

import dataclasses
import html
from typing import TYPE_CHECKING, SupportsFloat

from dtkit._util.arguments import explain_arguments
from dtkit._util.attributes import suggest_attributes
from dtkit._util.notebook import show_value
from dtkit.lessons.claims import Claim, Limit, Measurement, parse_guess, parse_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.lessons.figures import Picture


@suggest_attributes("score")
@explain_arguments
@dataclasses.dataclass(frozen=True)
class Score:
    """All claims of a lesson, with the number that hold and the number of right guesses."""

    results: Sequence[Measurement]

    @property
    def num_held(self) -> int:
        """Number of claims that hold."""
        return sum(result.holds for result in self.results)

    @property
    def num_guesses(self) -> int:
        """Number of claims with a guess."""
        return sum(result.guess is not None for result in self.results)

    @property
    def num_right(self) -> int:
        """Number of right guesses."""
        return sum(result.is_guess_right for result in self.results)

    def __repr__(self) -> str:
        held = f"{self.num_held} of {len(self.results)} claims hold"
        if not self.num_guesses:
            return (
                f"{held}; you made no guess. To make some, replace None by a number in cells such as "
                "guess_rows = None, and run all cells again"
            )
        return f"{held}; {self.num_right} of your {self.num_guesses} guesses are right"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{'✓' if result.holds else '✗'}</td><td>{html.escape(result.quantity)}</td>"
            f"<td>{html.escape(result.measured_text)}</td><td>{html.escape(result.theory)}</td>"
            f"<td>{html.escape(result.guess_text)}</td></tr>"
            for result in self.results
        )
        head = "".join(f"<th>{name}</th>" for name in ("", "claim", "measured", "theory", "guess"))
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        return f"<p><b>{html.escape(repr(self))}.</b></p><details><summary>All claims</summary>{table}</details>"


@suggest_attributes("lesson")
@explain_arguments
class Lesson:
    """Claims of one notebook. It can be pickled, so a score survives a kernel restart."""

    def __init__(self) -> None:
        self.results: list[Measurement] = []

    def claim(
        self,
        quantity: str,
        measured: SupportsFloat,
        formula: str,
        expected: SupportsFloat,
        tolerance: float = 0.0,
        *,
        guess: SupportsFloat | None = None,
        unit: str = "",
    ) -> None:
        """Show whether `measured` equals `expected` within `tolerance`, and the error of the reader's `guess`.

        `formula` is the source of `expected`, such as "2 (N - 1) / N S". The verdict never depends on the guess.
        """
        if parse_number(tolerance, "tolerance") < 0:
            raise ValueError(f"tolerance={tolerance!r}; it must be 0 or more")
        self._add(
            Claim(
                quantity=quantity,
                measured=parse_number(measured, f"the measurement of {quantity!r}"),
                guess=parse_guess(guess, quantity),
                unit=unit,
                formula=formula,
                expected=parse_number(expected, f"the expected value of {quantity!r}"),
                tolerance=float(tolerance),
            )
        )

    def at_most(
        self,
        quantity: str,
        measured: SupportsFloat,
        limit: float,
        *,
        guess: SupportsFloat | None = None,
        unit: str = "",
    ) -> None:
        """Show whether `measured` is at most `limit`, and the error of the reader's `guess`.

        A guess within a factor of two is right. No factor leads from 0 to another number: if one of the two is 0, the
        guess is right if both are 0 up to rounding.
        """
        self._add(
            Limit(
                quantity=quantity,
                measured=parse_number(measured, f"the measurement of {quantity!r}"),
                guess=parse_guess(guess, quantity),
                unit=unit,
                limit=parse_number(limit, f"the limit of {quantity!r}"),
            )
        )

    def _add(self, result: Measurement) -> None:
        """Keep a result and show it. A repeated claim, as when a cell is run twice, replaces the old one."""
        self.results = [old for old in self.results if old.quantity != result.quantity]
        self.results.append(result)
        show_value(result)

    def score(self) -> Score:
        """Return the numbers of claims that hold and of right guesses."""
        return Score(tuple(self.results))

    def draw_durations(self) -> Picture:
        """Return a picture of all durations in seconds: measured, guessed and their limits."""
        from dtkit.lessons.figures import draw_durations

        return draw_durations([result for result in self.results if isinstance(result, Limit) and result.unit == "s"])

"""Figures as notebooks show them."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from PIL import Image

import dtkit
from dtkit.dashboard import display
from dtkit.dashboard.figures import render
from dtkit.dashboard.figures.run_figure import draw_run
from dtkit.types import Evaluation
from tests.support.comparison_sources import make_source
from tests.support.fake_source import FakeSource


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict, dict]]:
    """Data and metadata of what is displayed."""
    displayed: list[tuple[dict, dict]] = []
    monkeypatch.setattr(
        "IPython.display.display", lambda data, *, metadata, raw: displayed.append((data, metadata)) if raw else None
    )
    return displayed


@pytest.mark.parametrize("knows_pyplot", [True, False])
def test_a_figure_is_a_picture_that_fits_any_theme_and_keeps_its_own_colors(
    shown: list[tuple[dict, dict]],
    knows_pyplot: bool,  # noqa: FBT001
):
    formatter = DisplayFormatter()
    if knows_pyplot:
        formatter.formatters["image/png"].for_type(Figure, lambda _figure: b"white")
    source = FakeSource(ranks=2, strips=True)
    source.advance(50)
    figure = draw_run(source)
    assert formatter.format(figure) == ({}, {})
    ((data, metadata),) = shown
    with Image.open(io.BytesIO(base64.b64decode(data["image/png"]))) as image:
        pixels = np.asarray(image.convert("RGBA"))
    assert pixels[0, 0, 3] == 0  # a round corner of a card, which a rule makes dark in a dark theme
    assert (pixels.min(axis=-1) > 250).mean() > 0.7
    assert (
        f'<div class="dtkit-picture"><div style="overflow-x: auto"><img src="data:image/png;base64,{data["image/png"]}"'
        in (data["text/html"])
    )
    assert metadata["image/png"]["width"] == render.get_css_width(figure)
    assert figure.get_facecolor() == to_rgba("white")


def read_pixels(png: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image.convert("RGBA")).astype(int)


def test_saved_notebooks_keep_dark_text_on_a_white_card():
    """Gray text on a transparent picture is readable in any theme, and pale in each."""
    source = FakeSource(ranks=2)
    source.advance(50)
    data, _ = display.make_static_output(source)
    comparison = dtkit.compare([make_source(), make_source()])
    for png in (base64.b64decode(data["image/png"]), comparison._repr_png_()):
        assert len(png) < 200_000
        pixels = read_pixels(png)
        assert pixels[0, 0, 3] == 0  # a round corner
        card = pixels[pixels[..., 3] > 250][:, :3]
        assert len(card) > 0.75 * pixels[..., 3].size  # the rest is between and below cards
        assert (card.min(axis=1) > 250).mean() > 0.7
        assert (card.max(axis=1) < 50).mean() > 0.005  # black text


@pytest.mark.parametrize("num_metrics", [0, 1, 2])
def test_a_comparison_has_no_empty_place_between_its_charts(num_metrics: int):
    runs = [make_source(), make_source()]
    for run in runs:
        run.history.add(Evaluation(80, 10, {f"metric {k}": 0.5 for k in range(num_metrics)}))
    figure = dtkit.compare(runs).figure()
    figure.canvas.draw()
    places = [ax.get_subplotspec() for ax in figure.axes]
    rows = places[0].get_gridspec().nrows
    assert sum(len(place.colspan) for place in places) == 2 * rows

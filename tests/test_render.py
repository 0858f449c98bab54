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

from dtkit.dashboard.figures import render
from dtkit.dashboard.figures.run_figure import draw_run
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
        alpha = np.asarray(image.convert("RGBA"))[..., 3]
    assert (alpha < 10).mean() > 0.4
    assert metadata["image/png"]["width"] == render.get_css_width(figure)
    assert figure.get_facecolor() == to_rgba("white")

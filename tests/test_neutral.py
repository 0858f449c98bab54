"""Figures for a notebook of any theme."""

import io

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from dtkit.dashboard.figures.neutral import NEUTRAL_COLOR
from dtkit.dashboard.figures.render import create_figure, render_notebook_png
from dtkit.dashboard.figures.run_figure import draw_run
from dtkit.data.partition import Partition
from dtkit.schedules.schedule import Schedule
from tests.support.fake_source import FakeSource


def compute_contrast(color, ground):
    def luminance(rgb):
        linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in rgb]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    light, dark = sorted((luminance(to_rgb(color)), luminance(to_rgb(ground))), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_neutral_color_is_readable_on_white_and_on_black():
    assert compute_contrast(NEUTRAL_COLOR, "white") > 4.5
    assert compute_contrast(NEUTRAL_COLOR, "black") > 4.5


def test_picture_of_a_run_has_no_background_and_no_black_text():
    source = FakeSource(ranks=4, strips=True)
    source.advance(50)
    figure = draw_run(source)
    png = render_notebook_png(figure)
    assert len(png) < 200_000
    with Image.open(io.BytesIO(png)) as image:
        pixels = np.asarray(image.convert("RGBA")).reshape(-1, 4)
    assert (pixels[:, 3] < 10).mean() > 0.4  # the background lets the theme through
    opaque = pixels[pixels[:, 3] > 200, :3]
    assert (opaque.max(1) < 60).mean() < 0.02  # but for text on boxes of its own
    titles = [text for ax in figure.axes for text in (ax.title, ax._left_title, ax.xaxis.label) if text.get_text()]
    assert {text.get_color() for text in titles} == {NEUTRAL_COLOR}


@pytest.mark.parametrize(
    "shown",
    [Schedule.from_name("1F1B", 2, 4), Partition(9, 2)],
    ids=["schedule", "partition"],
)
def test_pictures_of_results_let_the_theme_through(shown):
    with Image.open(io.BytesIO(shown._repr_png_())) as image:
        alpha = np.asarray(image.convert("RGBA"))[..., 3]
    assert (alpha < 10).mean() > 0.2


def test_text_on_a_box_keeps_its_color():
    figure = create_figure(3, 2)
    ax = figure.add_subplot()
    boxed = ax.text(0.5, 0.5, "boxed", color="#1a1a1a", bbox={"facecolor": "white"})
    inside = ax.text(0.2, 0.2, "7", color="#000000", ha="center", va="center")
    beside = ax.text(0.8, 0.2, "beside", color="#1a1a1a")
    render_notebook_png(figure)
    assert [text.get_color() for text in (boxed, inside, beside)] == ["#1a1a1a", "#000000", NEUTRAL_COLOR]

"""Colors of a kept picture in a dark theme, next to those of the live view."""

from __future__ import annotations

import base64
import colorsys
import io
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from dtkit.dashboard import kept_picture
from dtkit.dashboard.figures import style
from dtkit.dashboard.figures.render import create_figure
from dtkit.dashboard.live.bundle import STATIC_FOLDER
from dtkit.dashboard.live.placement import DARK_FILTER, DARK_WORDS

LUMA = np.array([0.213, 0.715, 0.072])
"""Weights of red, green and blue in the CSS filter `hue-rotate`."""


def apply_dark_filter(color: str) -> np.ndarray:
    """Return a color as a browser shows it below the filter of a dark theme."""
    inverted, rotated, brightness = re.findall(r"(?:invert|hue-rotate|brightness)\(([\d.]+)", DARK_FILTER)
    assert rotated == "180"
    share = float(inverted)
    color = share + (1 - 2 * share) * np.array(to_rgb(color))
    return np.clip(np.clip(2 * color @ LUMA - color, 0, 1) * float(brightness), 0, 1)


def read_live_colors(theme: str) -> list[str]:
    """Return the colors of nodes in the live view."""
    css = (STATIC_FOLDER / "dashboard.css").read_text(encoding="utf-8")
    start = css.index('.dtkit[data-theme="dark"]') if theme == "dark" else 0
    return re.findall(r"--n\d: (#\w{6})", css[start:])[: len(style.COLORS)]


def get_hue(color: object) -> float:
    """Return the hue of a color in degrees."""
    return 360 * colorsys.rgb_to_hsv(*to_rgb(color))[0]


def compute_contrast(color: object, ground: object) -> float:
    first, second = sorted((compute_luminance(color), compute_luminance(ground)), reverse=True)
    return (first + 0.05) / (second + 0.05)


def compute_luminance(color: object) -> float:
    parts = np.array(to_rgb(color))
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize(("node", "degrees"), [(0, 5), (1, 5), (2, 10), (3, 10)])
def test_nodes_have_the_hue_of_the_live_view_in_both_themes(node: int, degrees: float):
    assert get_hue(style.COLORS[node]) == pytest.approx(get_hue(read_live_colors("light")[node]), abs=degrees)
    assert get_hue(apply_dark_filter(style.COLORS[node])) == pytest.approx(
        get_hue(read_live_colors("dark")[node]), abs=degrees
    )


@pytest.mark.parametrize("color", [*style.COLORS[:4], style.TEXT_COLOR, style.MUTED_COLOR, style.ALERT_COLOR])
def test_colors_of_a_picture_are_readable_on_a_dark_card(color: str):
    assert compute_contrast(apply_dark_filter(color), apply_dark_filter("#ffffff")) >= 4.5


def test_the_documentation_has_the_same_filter_and_words():
    css = (Path(__file__).parents[1] / "docs" / "_static" / "dtkit.css").read_text(encoding="utf-8")
    assert f"filter: {DARK_FILTER};" in css
    assert [
        name for name, color in DARK_WORDS.items() if f".dtkit-{name} {{ color: {color} !important; }}" not in css
    ] == []


def test_words_have_the_colors_of_the_live_view_in_a_dark_theme():
    css = (STATIC_FOLDER / "dashboard.css").read_text(encoding="utf-8")
    dark = css[css.index('.dtkit[data-theme="dark"]') :]
    assert {name: re.findall(rf"--{name}: (#\w{{6}})", dark)[0] for name in DARK_WORDS} == DARK_WORDS


@pytest.mark.parametrize("name", kept_picture.COLORS)
def test_words_are_readable_in_both_themes(name: str):
    assert compute_contrast(kept_picture.COLORS[name], "#ffffff") >= 4.5
    assert compute_contrast(DARK_WORDS[name], "#111111") >= 4.5
    assert compute_contrast(kept_picture.COLORS[name], "#111111") >= 4  # a front end may remove dtkit's rule


def test_a_figure_is_a_white_card_that_a_dark_theme_makes_dark(monkeypatch: pytest.MonkeyPatch):
    """Text in one gray for both themes had a contrast of 4.1 on JupyterLab's dark."""
    shown: list[dict[str, str]] = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, **_options: shown.append(bundle))
    figure = create_figure(4, 2)
    text = figure.add_subplot().set_title("Loss <1>", loc="left", color=style.TEXT_COLOR)
    figure._ipython_display_()
    page, png = shown[0]["text/html"], base64.b64decode(shown[0]["image/png"])
    assert "[data-jp-theme-light=false] .dtkit-picture img, [data-vscode-theme-kind$=dark]" in page
    assert DARK_FILTER in page
    assert 'alt="Loss &lt;1&gt;"' in page
    with Image.open(io.BytesIO(png)) as image:
        pixels = np.asarray(image.convert("RGBA")).reshape(-1, 4)
    pixels = pixels[pixels[:, 3] > 250][:, :3]  # without the round corners
    assert (pixels.min(axis=1) > 250).mean() > 0.5  # white
    assert pixels.max(axis=1).min() < 60  # and black, of which the filter makes white
    assert text.get_color() == style.TEXT_COLOR  # the figure itself is as it was

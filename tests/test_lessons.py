"""Claims, scores and drawings of lessons."""

from __future__ import annotations

import io
import math
import pickle
import re
import threading
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dtkit import lessons
from dtkit.dashboard.figures.neutral import NEUTRAL_COLOR
from dtkit.types import State

# -- claims ---------------------------------------------------------------------------------------------------


@pytest.fixture
def lesson() -> lessons.Lesson:
    return lessons.Lesson()


@pytest.mark.parametrize(
    ("measured", "guess", "verdict", "comment"),
    [
        (1 / 8, 1 / 8, "theory holds ✓", "your guess: 0.125, right"),
        (0.126, 0.5, "theory holds ✓", "your guess: 0.5, off by 0.374"),
        (0.2, 0.2, "theory fails ✗", "your guess: 0.2, right"),
        (0.126, None, "theory holds ✓", "no guess"),
        (math.nan, 1 / 8, "theory fails ✗", "your guess: 0.125, off by nan"),
    ],
)
def test_a_claim_is_judged_by_its_formula_not_by_the_guess(
    lesson: lessons.Lesson,
    capsys: pytest.CaptureFixture[str],
    measured: float,
    guess: float | None,
    verdict: str,
    comment: str,
):
    lesson.claim("bytes", measured, "1 / k", 1 / 8, 0.005, guess=guess)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{verdict}  bytes: measured ")
    assert first.endswith("; 1 / k = 0.125 (± 0.005)")
    assert second.strip() == comment
    assert "(±&nbsp;0.005)" in lesson.results[0]._repr_html_()  # never at the end of a line


@pytest.mark.parametrize(
    ("measured", "guess", "verdict", "comment"),
    [
        (1.5, 1, "limit kept ✓", "your guess: 1 s, right"),
        (2, 0.5, "limit kept ✓", "your guess: 0.5 s, off by 1.5 s"),
        (2.5, None, "limit exceeded ✗", "no guess"),
        (0, 0, "limit kept ✓", "your guess: 0 s, right"),
        (math.nan, None, "limit exceeded ✗", "no guess"),
    ],
)
def test_a_limit_is_kept_and_a_guess_within_a_factor_of_two_is_right(
    lesson: lessons.Lesson,
    capsys: pytest.CaptureFixture[str],
    measured: float,
    guess: float | None,
    verdict: str,
    comment: str,
):
    lesson.at_most("wait", measured, 2, guess=guess, unit="s")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{verdict}  wait: measured ")
    assert first.endswith("; at most 2 s")
    assert second.strip() == comment


@pytest.mark.parametrize(
    ("measured", "guess", "is_right"),
    [(0, 0, True), (0, 1, False), (1, 0, False), (0, 1e-16, True), (3e-17, 0, True), (1e-16, 4e-16, False)],
)
def test_a_guess_next_to_0_is_right_if_both_are_0_up_to_rounding(
    lesson: lessons.Lesson, measured: float, guess: float, *, is_right: bool
):
    """No factor of two leads from 0 to another number."""
    lesson.at_most("steps missing", measured, 0, guess=guess)
    assert lesson.score().num_right == is_right


def test_a_guess_that_rounds_to_the_measurement_is_right(lesson: lessons.Lesson):
    lesson.claim("difference", 1e-17, "equal", 0, 1e-12, guess=0)
    lesson.claim("share", 0.66667, "2 / 3", 2 / 3, 1e-4, guess=0.667)
    assert lesson.score().num_right == 2


def test_numpy_and_torch_numbers_are_measurements(lesson: lessons.Lesson):
    lesson.claim("array", np.int64(3), "3", torch.tensor(3), guess=np.float32(3))
    assert lesson.score().num_right == lesson.score().num_held == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"guess": "many"}, TypeError, "your guess of 'rows' is 'many'; it must be a number"),
        ({"guess": math.inf}, ValueError, "your guess of 'rows' is inf; type a finite number, or None for no guess"),
        ({"measured": None}, TypeError, "the measurement of 'rows' is None; it must be a number"),
        ({"tolerance": -1}, ValueError, "tolerance=-1; it must be 0 or more"),
    ],
)
def test_bad_numbers_are_refused_and_not_counted(
    lesson: lessons.Lesson, arguments: dict[str, object], error: type[Exception], message: str
):
    options = {"measured": 1, "formula": "n", "expected": 1} | arguments
    with pytest.raises(error, match=re.escape(message)):
        lesson.claim("rows", **options)
    assert lesson.results == []


def test_html_of_claims_escapes_text_and_needs_no_color(lesson: lessons.Lesson):
    lesson.claim("a < b", 1, "x > 0", 1)
    page = lesson.results[0]._repr_html_()
    assert "a &lt; b" in page
    assert "x &gt; 0 = 1" in page
    assert "theory holds ✓" in page
    assert "no guess" in page


# -- score ----------------------------------------------------------------------------------------------------


def test_a_score_counts_theory_and_guesses_apart(lesson: lessons.Lesson):
    lesson.claim("first", 1, "n", 1, guess=2)
    lesson.claim("second", 1, "n", 2, guess=1)
    lesson.claim("third", 1, "n", 1)
    assert repr(lesson.score()) == "2 of 3 claims hold; 1 of your 2 guesses are right"
    page = lesson.score()._repr_html_()
    assert page.count("<tr>") == 4
    assert "off by 1" in page


def test_a_score_without_guesses_invites_to_make_some(lesson: lessons.Lesson):
    lesson.claim("first", 1, "n", 1)
    assert repr(lesson.score()).startswith(
        "1 of 1 claims hold; you made no guess. To make some, replace None by a number"
    )


def test_a_cell_that_runs_twice_counts_once(lesson: lessons.Lesson):
    lesson.claim("first", 1, "n", 1, guess=3)
    lesson.claim("first", 1, "n", 1, guess=1)
    assert repr(lesson.score()) == "1 of 1 claims hold; 1 of your 1 guesses are right"


def test_a_lesson_survives_a_kernel_restart(lesson: lessons.Lesson):
    lesson.at_most("first", 1, 2, guess=1, unit="s")
    restored = pickle.loads(pickle.dumps(lesson))
    assert repr(restored.score()) == repr(lesson.score())


def test_durations_are_drawn_with_guesses_and_limits(lesson: lessons.Lesson):
    lesson.at_most("noticed", 0.2, 2, guess=1, unit="s")
    lesson.at_most("replaced", 1, 15, unit="s")
    lesson.at_most("steps lost", 0, 1, unit="steps")
    picture = lesson.draw_durations()
    (ax,) = picture.figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["noticed", "replaced"]
    points = {line.get_label(): list(line.get_xdata()) for line in ax.lines}
    assert points == {"limit": [2, 15], "measured": [0.2, 1], "your guess": [1]}
    assert picture.figure.get_facecolor()[3] == 0  # no slab behind it in a dark notebook
    assert picture._repr_png_().startswith(b"\x89PNG")
    assert repr(picture) == "Picture: noticed: 0.2 s; replaced: 1 s"


def test_a_lesson_without_durations_raises_with_the_remedy(lesson: lessons.Lesson):
    with pytest.raises(ValueError, match=r"make some with lesson\.at_most"):
        lesson.draw_durations()


# -- drawings -------------------------------------------------------------------------------------------------

DRAWINGS = {
    "data parallel": lessons.draw_data_parallel(3),
    "ring of 2": lessons.draw_ring_all_reduce(2),
    "ring of 4": lessons.draw_ring_all_reduce(4),
    "pipeline": lessons.draw_pipeline(3, 4),
    "short pipeline": lessons.draw_pipeline(2, 1),
    "tensor parallel": lessons.draw_tensor_parallel(),
    "FSDP": lessons.draw_fsdp(4),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_described_and_stays_within_its_frame(name: str):
    drawing = DRAWINGS[name]
    root = ET.fromstring(drawing._repr_html_())
    assert root.get("role") == "img"
    (title,) = [element for element in root if element.tag.endswith("title")]
    assert title.text == drawing.description
    for box in (element for element in root if element.tag.endswith("rect")):
        x, y, width, height = (float(box.get(key)) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + width <= drawing.width
        assert 0 <= y <= y + height <= drawing.height
    for text in (element for element in root if element.tag.endswith("text")):
        width = 7.6 * len(text.text)  # of 14 px sans-serif, at most
        left = float(text.get("x")) - (width / 2 if text.get("text-anchor") == "middle" else 0)
        assert -6 <= left <= left + width <= drawing.width + 6, text.text


def test_labels_have_the_page_color_so_that_dark_themes_work():
    svg = DRAWINGS["ring of 4"].to_svg()
    assert 'fill="currentColor">node 0' in svg
    assert "id=" not in svg  # two drawings on a page can't collide


def test_the_pipeline_drawing_has_each_micro_batch_once_a_stage():
    svg = lessons.draw_pipeline(2, 3).to_svg()
    assert {name: svg.count(f">{name}<") for name in ("F0", "F2", "B2", "F3")} == {"F0": 2, "F2": 2, "B2": 2, "F3": 0}


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: lessons.draw_fsdp(9), "ranks=9; the drawing has room for 2 to 4"),
        (lambda: lessons.draw_pipeline(1), "stages=1; the drawing has room for 2 to 4"),
        (lambda: lessons.draw_pipeline(2, 9), "micro_batches=9; the drawing has room for 1 to 8"),
    ],
    ids=["ranks", "stages", "micro-batches"],
)
def test_a_drawing_that_would_not_fit_is_refused(draw, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        draw()


# -- waiting --------------------------------------------------------------------------------------------------


class Steps:
    """A run that reports changes from another thread."""

    status = SimpleNamespace(state=State.RUNNING)

    def __init__(self) -> None:
        self.step = 0
        self.callbacks: list = []

    def subscribe(self, callback):
        self.callbacks.append(callback)
        threading.Thread(target=self.advance).start()
        return lambda: self.callbacks.remove(callback)

    def advance(self) -> None:
        self.step += 1
        for callback in list(self.callbacks):
            callback()


def test_wait_until_returns_after_the_change_and_unsubscribes():
    run = Steps()
    lessons.wait_until(run, lambda: run.step > 0, timeout=30)
    assert run.callbacks == []


def test_wait_until_raises_after_its_timeout():
    run = Steps()
    with pytest.raises(TimeoutError, match=r"still false after 0\.01 s; the run is running"):
        lessons.wait_until(run, lambda: False, timeout=0.01)
    assert run.callbacks == []


def test_a_figure_of_a_notebook_is_shown_once_and_fits_both_themes():
    from matplotlib import pyplot as plt
    from PIL import Image

    figure, ax = plt.subplots()
    ax.plot([1, 2], color="black")
    ax.set_xlabel("memory")
    picture = lessons.adapt_to_themes(figure, "memory of a schedule")
    assert not plt.fignum_exists(figure.number)
    assert repr(picture) == "Picture: memory of a schedule"
    with Image.open(io.BytesIO(picture._repr_png_())) as image:
        assert image.convert("RGBA").getpixel((0, 0))[3] == 0  # no white ground
    assert ax.xaxis.label.get_color() == ax.get_lines()[0].get_color() == NEUTRAL_COLOR

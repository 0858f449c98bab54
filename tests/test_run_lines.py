"""Lines of the runs of a comparison: each has its own pair of color and dashes, the same in every view."""

import re

import dtkit
from dtkit.dashboard.figures import comparison_figure, style
from dtkit.dashboard.summary.run_lines import NUM_COLORS, NUM_DASHES, choose_dash
from dtkit.dashboard.svg_chart import COLORS
from dtkit.types import Evaluation
from tests.support.fake_source import FakeSource
from tests.support.node import evaluate_page_code

NUM_RUNS = 16


def make_comparison(num_runs):
    runs = [FakeSource(steps=20, seed=k, name=f"run {k}") for k in range(num_runs)]
    for run in runs:
        run.advance(20)
        for step in (10, 20):
            run.history.add(Evaluation(step, 100, {"loss": 1.0}))
    return dtkit.compare(*runs)


def test_colors_that_are_alike_have_other_dashes():
    looks = [(run % NUM_COLORS, choose_dash(run)) for run in range(32)]
    assert len(set(looks)) == 32
    alike = [(run % (NUM_COLORS // 2), choose_dash(run)) for run in range(NUM_RUNS)]
    assert len(set(alike)) == NUM_RUNS


def test_the_dashes_are_those_that_the_views_have():
    assert len(style.COLORS) == len(COLORS["light"]) == NUM_COLORS
    assert len(comparison_figure._LINE_STYLES) == NUM_DASHES


def test_every_panel_of_the_picture_has_a_look_for_each_run():
    for ax in make_comparison(NUM_RUNS).figure().axes:
        lines = ax.get_lines()
        looks = [(line.get_color(), str(line._unscaled_dash_pattern)) for line in lines]
        assert len(lines) == len(set(looks)) == NUM_RUNS, ax.get_title(loc="left")
        alike = [(style.COLORS.index(color) % 4, dash) for color, dash in looks]
        assert len(set(alike)) == NUM_RUNS


def test_every_chart_of_the_report_has_a_look_for_each_run(tmp_path):
    make_comparison(NUM_RUNS).report(tmp_path / "runs.html")
    page = (tmp_path / "runs.html").read_text(encoding="utf-8")
    for figure in re.findall(r"<figure>.*?</figure>", page, re.DOTALL):
        looks = re.findall(r'<path class="series s(\d)((?: dash\d)?) line', figure)
        assert len({(int(color) % 4, dash) for color, dash in looks}) == len(looks) == NUM_RUNS


def test_the_live_view_has_the_same_dashes(tmp_path):
    expression = "Array.from({ length: 32 }, (_, run) => runDash(run))"
    dashes = evaluate_page_code(tmp_path, "chart/lines.js", ["runDash"], expression)
    assert dashes == [choose_dash(run) for run in range(32)]

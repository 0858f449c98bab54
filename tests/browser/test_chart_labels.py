"""Labels, legends and scales of the live charts in a real browser: each is told once, readably, and doesn't flip."""

from __future__ import annotations

import re

import numpy as np
import pytest
from playwright.sync_api import Page, expect

import dtkit
from dtkit.dashboard.live.comparison_messages import ComparisonMessageBuilder
from dtkit.dashboard.live.comparison_widget import ComparisonWidget
from dtkit.dashboard.live.series_feed import SeriesFeed
from dtkit.history.scalars import CORE_WAIT_NAME, ScalarRecord
from dtkit.types import Evaluation, Event
from tests.support.fake_source import FakeSource
from tests.support.static_view import StaticView, encode_message, list_overflowing, load_widget

pytestmark = pytest.mark.browser

LOSS = "loss-chart"
_OVERLAPPING = """(chart) => {
  const labels = [...chart.querySelectorAll(".dtk-labels text")];
  const boxes = labels.map((el) => [el.textContent, el.getBoundingClientRect()]);
  const isOver = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3; // a line is a little higher than its letters
  return boxes.flatMap(([name, a], k) => boxes.slice(k + 1).filter(([, b]) => isOver(a, b)).map(([b]) => [name, b]));
}"""
_BEYOND = """(chart) => {
  const { top, bottom } = chart.querySelector("svg.dtk-chart").getBoundingClientRect();
  return [...chart.querySelectorAll(".dtk-labels text")].map((text) => text.getBoundingClientRect())
    .filter((box) => box.top < top - 2 || box.bottom > bottom).length;
}"""


# Returns the names within the plot that lie on a line.
_CROSSED = """(chart) => {
  const lines = [...chart.querySelectorAll(".dtk-lines path.dtk-line[d^=M]")];
  const edge = Math.max(...lines.map((line) => line.getBoundingClientRect().right));
  const points = lines.flatMap((line) => {
    const scale = line.getScreenCTM(), length = line.getTotalLength();
    return Array.from({ length: 2000 }, (_, k) => line.getPointAtLength((k / 2000) * length).matrixTransform(scale));
  });
  return [...chart.querySelectorAll(".dtk-labels g:not(.dtk-badge) text")].filter((text) => {
    const { left, right, top, bottom } = text.getBoundingClientRect();
    return left < edge && points.some(({ x, y }) => x > left && x < right && y > top + 2 && y < bottom - 2);
  }).map((text) => text.textContent);
}"""


@pytest.mark.parametrize("num_runs", [3, 8, 13])
def test_names_of_runs_that_end_early_lie_on_no_line(page: Page, num_runs: int):
    """Where they would, the end of a line has the run's number in the legend, in a box."""
    page.set_viewport_size({"width": 1400, "height": 900})
    runs = [FakeSource(steps=400, seed=k, name=f"ParameterAveraging(every={k + 1})") for k in range(num_runs)]
    for k, run in enumerate(runs):
        steps = np.arange(400 if k % 4 == 0 else 90 + (53 * k) % 290)
        run.advance(len(steps), loss=np.repeat(2.3 * np.exp(-steps * (0.004 + 0.0012 * k)) + 0.3, run.spec.world_size))
    message = ComparisonMessageBuilder(dtkit.compare(*runs)).build_snapshot()
    load_widget(page, str(ComparisonWidget._esm), message, "light")
    for name in ("comparison-chart", "time-chart", "rate-chart"):
        chart = page.get_by_test_id(name)
        expect(chart.locator(".dtk-labels text").first).to_be_visible()
        assert chart.evaluate(_CROSSED) == []
        assert chart.evaluate(_OVERLAPPING) == []
        numbers = chart.locator(".dtk-badge text").all_text_contents()
        titles = chart.locator(".dtk-badge title").all_text_contents()
        assert titles == [f"{number}: ParameterAveraging(every={number})" for number in numbers]
        assert len(numbers) in {0, num_runs - -(-num_runs // 4)}


def test_scale_that_was_chosen_by_itself_stays_until_a_value_is_negative(page: Page):
    run = FakeSource(ranks=1)
    run.advance(60)
    run.advance(1, loss=5000.0)
    view = StaticView(page, run)
    caption = view.root.get_by_test_id(LOSS).locator("h3 .dtk-note")
    expect(caption).to_contain_text("log scale")
    run.advance(300, loss=50.0)  # buckets grow: their means span fewer orders
    view.update()
    expect(caption).to_contain_text("log scale")
    run.advance(30, loss=-1.0)
    view.update()
    expect(caption).not_to_contain_text("log scale")
    run.advance(30, loss=5e4)
    view.update()
    expect(caption).not_to_contain_text("log scale")


def test_one_label_for_lines_that_are_equal_has_the_word_of_the_legend(page: Page):
    run = FakeSource(ranks=3)
    run.advance(60, loss=1.0)
    view = StaticView(page, run)
    assert view.root.get_by_test_id(LOSS).locator(".dtk-labels text").all_text_contents() == ["mean 1.00"]
    assert view.root.get_by_test_id("legend").locator("button").all_text_contents()[-1] == "mean"


def test_the_mean_loss_is_one_number_in_tile_and_chart(page: Page):
    """The tile had the mean of 20 steps, and the line's end that of the last one, both as "mean"."""
    run = FakeSource(ranks=2)
    run.advance(19, loss=0.25)
    run.advance(1, loss=1.0)
    view = StaticView(page, run)
    label = view.root.get_by_test_id(LOSS).locator(".dtk-labels text", has_text="mean")
    tile = view.root.get_by_test_id("tiles").locator("> div", has_text="mean loss").locator(".dtk-value")
    expect(tile).to_have_text("0.287")
    expect(label).to_have_text("mean 0.287")
    run.advance(20, loss=0.5)
    view.send_text()  # the tiles are ahead of the curves
    expect(tile).to_have_text("0.500")
    expect(label).to_have_text("mean 0.500")


def test_bars_and_timeline_share_a_legend(page: Page):
    run = FakeSource(ranks=2, strips=True)
    run.advance(60)
    view = StaticView(page, run)
    bars, timeline = (view.root.get_by_test_id(name) for name in ("time-panel", "timeline-panel"))
    legends = [panel.locator(".dtk-legend") for panel in (bars, timeline)]
    expect(legends[0]).to_be_visible()
    expect(legends[1]).to_be_hidden()
    timeline.hover()
    timeline.get_by_test_id("full-screen").click()
    expect(legends[1]).to_be_visible()
    page.keyboard.press("Escape")
    page.evaluate("() => document.fullscreenElement && document.exitFullscreen()")
    expect(legends[1]).to_be_hidden()
    view.root.get_by_test_id("panels-menu").click()
    view.root.locator('[data-panel="Where a step\'s time goes"]').click()
    expect(bars).to_be_hidden()
    expect(legends[1]).to_be_visible()


def test_shared_legend_has_the_kinds_of_both_panels(page: Page):
    run = FakeSource(ranks=2, stages=2, strips=True)
    run.advance(60)
    view = StaticView(page, run)
    panels = [view.root.get_by_test_id(name) for name in ("time-panel", "timeline-panel")]
    bars, timeline = (set(panel.locator(".dtk-legend li").all_text_contents()) for panel in panels)
    assert timeline <= bars


def send_series(page: Page, run: FakeSource) -> None:
    """Send the numbers of a run, as the widget does beside its changes."""
    message = SeriesFeed(run.history).build_message()
    assert message is not None
    page.evaluate("([content, buffers]) => window.receive(content, buffers)", encode_message(message))


def test_short_waits_for_a_core_take_a_line(page: Page):
    run = FakeSource(ranks=2)
    run.advance(50)
    rows = [(step, 2.0, 1.0) for step in range(5, 50, 5)]
    for rank in range(2):
        run.history.add(ScalarRecord(rank, {CORE_WAIT_NAME: rows}))
    view = StaticView(page, run)
    send_series(page, run)
    chart = view.root.get_by_test_id("system-chart")
    expect(chart.locator("h3")).to_contain_text("Waiting for a core (%) last 2.00, mean of the nodes")
    expect(chart.locator("svg.dtk-chart")).to_be_hidden()
    chart.scroll_into_view_if_needed()  # one out of sight is drawn each minute
    run.history.add(ScalarRecord(1, {CORE_WAIT_NAME: [(50, 30.0, 1.0)]}))
    send_series(page, run)
    expect(chart.locator("svg.dtk-chart")).to_be_visible()


def test_the_last_number_of_machines_is_that_at_the_end_of_its_line(page: Page):
    """A caption said "last 0.0116" next to a line that ended at 0.16: a point is the mean of several samples."""
    run = FakeSource(ranks=2)
    run.advance(3000)
    for rank in range(2):
        rows = [(step, 0.1 if step % 2 else 0.3, 1.0) for step in range(1, 3000)]
        run.history.add(ScalarRecord(rank, {"system/CPU (cores)": rows}))
    view = StaticView(page, run)
    send_series(page, run)
    chart = view.root.get_by_test_id("system-chart")
    chart.scroll_into_view_if_needed()
    expect(chart.locator("h3")).to_contain_text(re.compile(r"last 0\.(19|20)\d, mean of the nodes"))


def test_a_single_sample_is_a_point_next_to_a_line_and_else_a_line_of_text(page: Page):
    """A use of the CPU is known from the second sample on, and a short run has no third one."""
    run = FakeSource(ranks=2)
    run.advance(30)
    for rank in range(2):
        run.history.add(ScalarRecord(rank, {"system/memory (MB)": [(1, 222.0, 1.0)]}))
    view = StaticView(page, run)
    send_series(page, run)
    charts = view.root.get_by_test_id("system-chart")
    cpu, memory = charts.filter(has_text="CPU"), charts.filter(has_text="Memory")
    expect(memory.locator("h3")).to_contain_text("last 222")
    expect(memory.locator("svg.dtk-chart")).to_be_hidden()
    for rank in range(2):
        rows = {"system/memory (MB)": [(25, 223.0, 1.0)], "system/CPU (cores)": [(25, 0.3 + rank / 10, 1.0)]}
        run.history.add(ScalarRecord(rank, rows))
    memory.scroll_into_view_if_needed()  # one out of sight is drawn each minute
    send_series(page, run)
    expect(memory.locator("svg.dtk-chart")).to_be_visible()
    expect(cpu.locator("svg.dtk-chart")).to_be_visible()
    expect(cpu.locator("path.dtk-dot")).to_have_count(3)  # of the nodes and of their mean


def test_the_log_stays_at_its_end_in_another_width_unless_a_reader_scrolled(page: Page):
    page.set_viewport_size({"width": 1400, "height": 900})
    run = FakeSource(ranks=2)
    run.advance(50)
    for k in range(12):
        run.event(
            "print", f"line {k} of a node, which is so long that a narrow page has to break it into several lines", 1
        )
    view = StaticView(page, run)
    log = view.root.get_by_test_id("log")
    at_end = "(log) => log.scrollTop + log.clientHeight >= log.scrollHeight - 8"
    page.set_viewport_size({"width": 400, "height": 900})
    page.wait_for_function(at_end, arg=log.element_handle())
    run.event("print", "one more", 1)
    view.update()
    assert log.evaluate(at_end)
    log.evaluate("(log) => new Promise((done) => { log.onscroll = done; log.scrollTop = 0; })")
    run.event("print", "and another", 1)
    view.update()
    assert log.evaluate("(log) => log.scrollTop") == 0


@pytest.mark.parametrize("num_steps", [999, 1001])
def test_tiles_keep_their_height_when_steps_have_another_digit(page: Page, num_steps: int):
    page.set_viewport_size({"width": 950, "height": 900})
    run = FakeSource(ranks=2, steps=2000)
    run.advance(num_steps)
    run.history.add(Evaluation(num_steps, 100, {"loss": 0.7, "accuracy": 0.5}))
    notes = StaticView(page, run).root.get_by_test_id("tiles").locator(".dtk-tile > .dtk-note:last-child")
    assert (
        len({note.evaluate("(note) => Math.round(note.getBoundingClientRect().height)") for note in notes.all()}) == 1
    )


@pytest.mark.parametrize("width", [600, 1400])
def test_labels_of_many_nodes_stay_next_to_their_lines(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 900})
    run = FakeSource(ranks=8)
    run.advance(100)
    view = StaticView(page, run)
    chart = view.root.get_by_test_id(LOSS)
    labels = chart.locator(".dtk-labels text")
    assert [re.sub(r"(?<=mean) [\d.]+", "", text) for text in sorted(labels.all_text_contents())] == ["8 nodes", "mean"]
    run.slowness = {1: 2.0}
    run.advance(60)
    view.update()
    names = ["7 others", "mean", "▲ node 1"]
    assert [re.sub(r"(?<=mean) [\d.]+", "", text) for text in sorted(labels.all_text_contents())] == names
    run.advance(60, loss=[0.5 * rank + 0.5 for rank in range(8)] * 60)  # now all have room
    view.update()
    assert sum("node" in text for text in labels.all_text_contents()) == 8
    assert chart.evaluate(_OVERLAPPING) == []


@pytest.mark.parametrize("width", [600, 1400])
@pytest.mark.parametrize("num_runs", [13, 24])
def test_labels_of_many_runs_do_not_overlap_and_those_left_out_are_counted(page: Page, width: int, num_runs: int):
    page.set_viewport_size({"width": width, "height": 900})
    runs = [FakeSource(steps=200, seed=k, name=f"ParameterAveraging(every={k + 1})") for k in range(num_runs)]
    for k, run in enumerate(runs):
        run.advance(200 - (7 * k if k % 2 else 0))
    message = ComparisonMessageBuilder(dtkit.compare(*runs)).build_snapshot()
    load_widget(page, str(ComparisonWidget._esm), message, "light")
    for name in ("comparison-chart", "time-chart"):
        chart = page.get_by_test_id(name)
        expect(chart.locator(".dtk-labels text").first).to_be_visible()
        assert chart.evaluate(_OVERLAPPING) == []
        assert chart.evaluate(_BEYOND) == 0
        texts = chart.locator(".dtk-labels text").all_text_contents()
        left_out = [int(found[1]) for text in texts if (found := re.fullmatch(r"\+(\d+) more", text))]
        assert len(texts) - len(left_out) + sum(left_out) == num_runs
        assert {str(k + 1) for k in range(10)} <= {text.split(":")[0] for text in texts}


def make_run_with_an_early_end(marked_step: int) -> FakeSource:
    """Return a run of 10 steps with finite gradients, and measurements of the machines, in the first 5."""
    run = FakeSource(ranks=2)
    run.advance(10)
    for rank in (0, 1):
        rows = [(step, 0.5 + 0.001 * rank, 1.0) for step in range(1, 6)]
        run.history.add(ScalarRecord(rank, {"system/CPU (cores)": rows}))
    run.history.rows()["grad_norm"][10:] = np.nan
    run.history._table._totals.read(0, 10)["grad_norm"][5:] = np.nan
    run.history.add(Event(marked_step, "diverged", "the loss grew 3e8 times", 0.0, None))
    return run


_ENDS = """(chart) => {
  const edges = (el) => (({ left, right }) => ({ left, right }))(el.getBoundingClientRect());
  const [labels, marks, leaders] = [".dtk-labels text", ".dtk-sign text, .dtk-mark line", ".dtk-labels path"]
    .map((which) => [...chart.querySelectorAll(which)].map(edges));
  const lines = [...chart.querySelectorAll(".dtk-lines path.dtk-line[d^=M]")].map(edges);
  return { labels, marks, leaders, end: Math.max(...lines.map(({ right }) => right)) };
}"""


@pytest.mark.parametrize("testid", ["gradient-norm-chart", "system-chart"])
@pytest.mark.parametrize("width", [800, 1400])
def test_a_label_is_at_the_end_of_its_line_and_touches_no_mark(page: Page, width: int, testid: str):
    page.set_viewport_size({"width": width, "height": 2000})
    for marked_step in (6, 10):
        run = make_run_with_an_early_end(marked_step)
        view = StaticView(page, run)
        send_series(page, run)
        chart = view.root.get_by_test_id(testid)
        expect(chart.locator(".dtk-labels text").first).to_be_visible()
        found = chart.evaluate(_ENDS)
        apart = [label["left"] - found["end"] for label in found["labels"]]
        is_near = all(0 < gap < 15 for gap in apart)
        assert is_near or len(found["leaders"]) == len(found["labels"])
        if width == 800 or marked_step == 10:  # a wide chart has room between two steps
            assert is_near == (marked_step == 10), apart
        assert not any(
            mark["left"] < label["right"] and label["left"] < mark["right"]
            for label in found["labels"]
            for mark in found["marks"]
        )


def test_the_losses_of_the_nodes_have_equally_many_decimals(page: Page):
    run = FakeSource(ranks=2)
    run.advance(50, loss=[0.00187, 0.0006] * 50)
    view = StaticView(page, run)
    losses = view.root.get_by_test_id("nodes-table").locator("tbody td:nth-child(8)")
    expect(losses).to_have_text(["0.00187", "0.00060"])


def test_the_log_writes_steps_as_the_head_does(page: Page):
    run = FakeSource(ranks=2, steps=8000)
    run.advance(3418)
    run.event("pause", "paused at step 3,418")
    view = StaticView(page, run)
    expect(view.root.get_by_test_id("log").locator(".dtk-at")).to_have_text("step 3,418")


@pytest.mark.parametrize("width", [580, 640, 700, 800, 880])
def test_no_note_of_a_tile_has_a_second_line(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 900})
    run = FakeSource(ranks=2)
    run.advance(60)
    view = StaticView(page, run)
    notes = view.root.get_by_test_id("tiles").locator(".dtk-tile > .dtk-note:last-child")
    for slowness in (1.0, 2.0):
        run.slowness = {1: slowness}
        run.advance(60)
        view.update()
        heights = notes.evaluate_all("(all) => all.map((el) => el.getBoundingClientRect().height)")
        assert max(heights) < 20, heights
    expect(notes.nth(2)).to_have_text("▲ slowest: node 1", use_inner_text=False)
    assert list_overflowing(page) == []


def test_a_line_without_a_verdict_is_no_box_and_moves_nothing(page: Page):
    run = FakeSource(ranks=2)
    view = StaticView(page, run)
    box = view.root.locator(".dtk-verdict")
    expect(view.root.get_by_test_id("verdict")).to_have_text("no verdict on the speed yet")
    background = "(el) => getComputedStyle(el).backgroundColor"
    assert box.evaluate(background) == "rgba(0, 0, 0, 0)"
    height = box.evaluate("(el) => el.offsetHeight")
    run.advance(60)
    view.update()
    expect(view.root.get_by_test_id("verdict")).not_to_contain_text("no verdict")
    assert box.evaluate(background) != "rgba(0, 0, 0, 0)"
    assert box.evaluate("(el) => el.offsetHeight") == height

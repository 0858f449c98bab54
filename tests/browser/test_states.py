"""What the live view says in every state: recovering, stuck, repaired; and that messages don't move it."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time

import pytest
from playwright.sync_api import Page, expect

import dtkit
from dtkit._util import timeouts
from dtkit.dashboard.figures import panel_frame
from dtkit.dashboard.live.comparison_messages import ComparisonMessageBuilder
from dtkit.dashboard.live.comparison_widget import ComparisonWidget
from dtkit.dashboard.live.series_feed import SeriesFeed
from dtkit.dashboard.summary.curves import MAX_BUCKETS
from dtkit.dashboard.summary.ended_engines import describe_ended_engines
from dtkit.dashboard.summary.verdict import Verdict
from dtkit.errors import EngineError, NonFiniteError
from dtkit.history.scalars import ScalarRecord
from dtkit.types import Evaluation, Event, Failure, ReplicaCheckResult, State
from tests.support.fake_source import FakeSource
from tests.support.lab import Look
from tests.support.marks import slow
from tests.support.static_view import StaticView, encode_message, list_overflowing, load_widget

pytestmark = pytest.mark.browser


def make_run() -> FakeSource:
    run = FakeSource(ranks=3)
    run.advance(50)
    return run


def test_recovery_is_shown_with_seconds_and_nothing_stale(page: Page):
    run = make_run()
    view = StaticView(page, run)
    chip, tile = view.root.locator(".dtk-chip"), view.root.get_by_test_id("tiles").locator(".dtk-tile").first
    expect(view.root.locator(".dtk-ends")).to_contain_text("left")
    run.history.add(Event(50, "lost", "node 1 lost", time.time() - 4, 1))
    view.update()
    expect(chip).to_have_text(re.compile(r"^↻ recovering node 1, \d+ s$"))
    expect(view.root.locator(".dtk-ends")).not_to_contain_text("left")
    expect(tile).to_have_text("throughput—no steps are taken")
    place = view.root.get_by_test_id("loss-chart").bounding_box()
    text = "node 1 replaced: all go on from step 50 8.7 s after the loss, no step lost"
    run.history.add(Event(50, "repair", text, time.time() + 5, None, "node 1 replaced in 8.7 s, no step lost"))
    run.advance(5)
    view.update()
    expect(chip).to_have_text("▶ running")
    expect(view.root.get_by_test_id("alert")).to_be_hidden()
    expect(view.root.get_by_test_id("notices")).to_have_text("+ node 1 replaced in 8.7 s, no step lost")
    assert view.root.get_by_test_id("loss-chart").bounding_box() == place
    run.event("lr", "learning rate 0.01")
    view.update()
    expect(view.root.get_by_test_id("notices")).to_have_text("")
    assert view.root.get_by_test_id("loss-chart").bounding_box() == place


def test_stuck_node_is_in_the_head(page: Page):
    run = make_run()
    view = StaticView(page, run)
    run.stick(1)
    view.update()
    expect(view.root.get_by_test_id("alert")).to_contain_text("node 1 is stuck")
    expect(view.root.get_by_test_id("verdict")).to_be_hidden()  # the alert has its place
    expect(view.root.locator(".dtk-chip")).to_have_text(re.compile(r"^⊘ stuck: node 1 in forward, 1\d s$"))
    expect(view.root.locator(".dtk-ends")).not_to_contain_text("left")


def test_a_stopped_node_is_stopped_in_all_words_and_its_remedy_stays_whole(page: Page):
    page.set_viewport_size({"width": 800, "height": 900})
    run = make_run()
    view = StaticView(page, run)
    run.stick(1)
    assert run.stall_report is not None
    for length in (0, 4, 8, 12, 16, 20):  # the command comes at several places of a line
        remedy = f"{'x' * length} `kill -CONT 12345` on host0 lets it go on"
        run.stall_report = dataclasses.replace(run.stall_report, is_stopped=True, remedy=remedy)
        view.update()
        command = view.root.get_by_test_id("alert").locator(".dtk-command")
        expect(command).to_have_text("`kill -CONT 12345`")
        assert command.evaluate("(el) => el.getClientRects().length === 1 && el.offsetHeight < 30")
    expect(view.root.locator(".dtk-chip")).to_contain_text("⊘ stopped: node 1")
    button = view.root.get_by_test_id("nodes-table").locator("tr[data-rank='1'] button")
    expect(button).to_have_attribute("aria-label", "highlight node 1, stopped")


def test_paused_run_without_a_verdict_has_no_line_for_it(page: Page):
    run = make_run()
    view = StaticView(page, run)
    expect(view.root.get_by_test_id("verdict")).to_be_visible()
    run.lose(1)
    run.state = State.PAUSED
    view.update()
    expect(view.root.get_by_test_id("verdict")).to_be_hidden()


@pytest.mark.parametrize("width", [600, 1400])
def test_an_error_takes_the_place_of_the_verdict_and_moves_the_charts_once(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 900})
    run = make_run()
    view = StaticView(page, run)
    line, chart = view.root.get_by_test_id("verdict"), view.root.get_by_test_id("loss-chart")
    before = chart.bounding_box()
    run.exception = NonFiniteError([Failure(0, "here", "NonFinite", "the loss is NaN", "", step=50)])
    run.state = State.PAUSED
    view.update()
    expect(view.root.get_by_test_id("error")).to_contain_text("the loss is NaN")
    expect(line).to_be_hidden()
    place = chart.bounding_box()
    for _ in range(2):
        view.update()
        expect(line).to_be_hidden()
        assert chart.bounding_box() == place
    run.exception, run.state = None, State.RUNNING  # resumed
    view.update()
    expect(line).to_be_visible()
    assert chart.bounding_box() == before


def test_a_run_without_a_kernel_has_no_line_for_a_verdict_that_there_is_not(page: Page):
    view = StaticView(page, FakeSource(ranks=2))
    expect(view.root.get_by_test_id("verdict")).to_have_text("no verdict on the speed yet")
    page.evaluate("window.cutOff()")
    expect(view.root.get_by_test_id("error")).to_contain_text("The kernel doesn't answer")
    expect(view.root.get_by_test_id("verdict")).to_be_hidden()


def test_confirmation_of_a_command_disappears_when_something_newer_happens(page: Page):
    run = make_run()
    view = StaticView(page, run)
    effect = view.root.get_by_test_id("effect")
    run.event("pause", "paused at step 50")
    view.report_effect("paused at step 50 on all nodes")
    expect(effect).to_have_text("✓ paused at step 50 on all nodes")
    run.event("resume", "resume at step 50")  # from a cell
    view.update()
    expect(effect).to_have_text("")


def test_confirmation_of_a_command_disappears(page: Page):
    page.clock.install()
    view = StaticView(page, make_run())
    effect = view.root.get_by_test_id("effect")
    view.report_effect(f"checkpoint saved: {'/a-long-folder' * 12}")
    expect(effect).to_contain_text("✓ checkpoint saved")
    box, root = effect.bounding_box(), view.root.bounding_box()
    assert box
    assert root
    assert box["x"] + box["width"] <= root["x"] + root["width"]
    page.clock.fast_forward(16_000)
    expect(effect).to_have_text("")


def read_plots(view: StaticView) -> list[dict[str, float]]:
    """Return {left, right, height} of all charts over steps: ends of the plots in the page, height of the charts."""
    plots: list[dict[str, float]] = view.root.locator("svg.dtk-lines-chart:visible").evaluate_all("""(all) => all
      .filter((svg) => svg.querySelector(".dtk-grid line")).map((svg) => {
        const [line, chart] = [svg.querySelector(".dtk-grid line"), svg].map((el) => el.getBoundingClientRect());
        return { left: line.left - chart.left, right: chart.right - line.right, height: chart.height };
      })""")
    return plots


def test_charts_have_their_steps_below_each_other(page: Page):
    page.set_viewport_size({"width": 1280, "height": 900})
    run = make_run()
    run.history.add(Evaluation(50, 100, {"loss": 0.7, "accuracy": 0.5}))
    plots = read_plots(StaticView(page, run))
    assert len(plots) == 4
    assert {name: len({round(plot[name]) for plot in plots}) for name in ("left", "right")} == {"left": 1, "right": 1}


def test_panels_of_a_row_are_equally_high(page: Page):
    page.set_viewport_size({"width": 1280, "height": 900})
    run = make_run()
    view = StaticView(page, run)  # loss and throughput, gradient norm and learning rate
    assert [plot["height"] for plot in read_plots(view)] == [200, 200, 130, 130]
    view.root.get_by_test_id("panels-menu").click()
    view.root.locator("[data-panel='Learning rate']").uncheck()
    draw = panel_frame.draw_png(lambda ax, history: ax.plot(*history.loss()), run.history)
    view.show_picture("own", draw)  # beside the norm
    image = view.root.get_by_test_id("custom-panel").locator("img")
    expect(image).to_be_visible()
    page.wait_for_function(
        """() => Math.abs(document.querySelector('[data-testid="gradient-norm-chart"] svg.dtk-chart').clientHeight
          - document.querySelector('[data-testid="custom-panel"] img').clientHeight) < 1"""
    )
    view.root.locator("[data-panel='Throughput']").uncheck()  # the loss gets the norm beside it, the picture is alone
    page.wait_for_function(
        """() => [...document.querySelectorAll("svg.dtk-lines-chart")]
          .filter((svg) => svg.clientHeight === 200).length === 2"""
    )
    page.set_viewport_size({"width": 700, "height": 900})  # one column
    page.wait_for_function(
        """() => document.querySelector('[data-testid="gradient-norm-chart"] svg.dtk-chart').clientHeight === 130"""
    )


def test_labels_of_close_lines_stand_as_the_lines_end_and_equal_ones_merge(page: Page):
    run = FakeSource(ranks=2)
    run.advance(20)
    view = StaticView(page, run)
    labels = view.root.get_by_test_id("loss-chart").locator(".dtk-labels text")
    mean = re.compile(r"mean \d")
    for losses, names in (
        ([2.0, 2.1], ["node 1", mean, "node 0"]),
        ([2.1, 2.0], ["node 0", mean, "node 1"]),
    ):
        run.advance(10, loss=losses * 10)
        view.update()
        expect(labels).to_have_text(names)
        heights = labels.evaluate_all("(all) => all.map((label) => Number(label.getAttribute('y')))")
        assert heights == sorted(heights)
    run.advance(10, loss=1.0)
    view.update()
    expect(labels).to_have_text([re.compile(r"mean \d")])


def test_notices_of_a_wider_page_keep_no_room_for_a_narrow_one(page: Page):
    page.set_viewport_size({"width": 260, "height": 900})
    run = make_run()
    run.delay_factors = {0: 1.5, 1: 1.5}
    view = StaticView(page, run)
    quiet = view.root.get_by_test_id("notices")
    narrow = quiet.bounding_box()
    page.set_viewport_size({"width": 1280, "height": 900})
    view.update()
    box = quiet.bounding_box()
    assert narrow
    assert box
    assert box["height"] < narrow["height"]


@pytest.mark.parametrize("width", [1280, slow(600)])
def test_alternating_messages_do_not_move_the_charts(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 900})
    run = make_run()
    view = StaticView(page, run)
    chart = view.root.get_by_test_id("loss-chart")
    places = set()
    for k in range(6):
        run.message = "a rank compiles its model, which may take a minute, and says so at length" if k % 2 else ""
        run.delay_factors = {1: 1.5} if k % 2 else {}
        view.update()
        if k:
            box = chart.bounding_box()
            assert box
            places.add(box["y"])
    assert len(places) == 1


def test_log_is_filtered_and_evaluations_have_a_table(page: Page):
    run = make_run()
    run.event("print", "hello from a rank", rank=1)
    run.event("lr", "learning rate 0.01")
    run.history.add(Evaluation(50, 100, {"loss": 0.7, "accuracy": 0.5}))
    view = StaticView(page, run)
    log, kind = view.root.get_by_test_id("log"), view.root.get_by_test_id("log-kind")
    expect(log).to_contain_text("hello from a rank")
    kind.select_option("control")
    expect(log).not_to_contain_text("hello")
    expect(log).to_contain_text("learning rate 0.01")
    kind.select_option("all")
    view.root.get_by_test_id("log-filter").fill("HELLO")
    expect(log).not_to_contain_text("learning rate")
    expect(log).to_contain_text("hello from a rank")
    view.root.get_by_test_id("tab-evaluations").press("Enter")
    expect(log).to_be_hidden()
    table = view.root.get_by_test_id("evaluations")
    assert table.locator("th").all_text_contents() == ["step", "loss", "accuracy", "50"]
    assert table.locator("td").all_text_contents() == ["0.700", "0.500"]


def test_a_shorter_verdict_moves_nothing_below_it(page: Page, monkeypatch: pytest.MonkeyPatch):
    texts = iter(["short", "a line that is much too long for one line " * 3, "short"])
    find = "dtkit.dashboard.live.messages.find_shown_verdict"
    monkeypatch.setattr(find, lambda _run: Verdict("diverged", next(texts), 0.0))  # which shows at once
    monkeypatch.setattr(timeouts, "VERDICT_INTERVAL_S", 0.0)
    page.set_viewport_size({"width": 800, "height": 900})
    run = FakeSource(ranks=2)
    run.advance(50)
    view = StaticView(page, run)
    tops = []
    for _ in range(3):
        expect(view.root.get_by_test_id("verdict")).to_contain_text("short" if len(tops) != 1 else "much too long")
        box = view.root.get_by_test_id("loss-chart").bounding_box()
        assert box
        tops.append(box["y"])
        if len(tops) < 3:
            view.update()
    assert tops[0] < tops[1] == tops[2]


def test_verdict_has_its_arithmetic_on_demand(page: Page):
    run = FakeSource(ranks=2)
    run.slowness = {1: 1.6}
    run.advance(50)
    view = StaticView(page, run)
    line = view.root.get_by_test_id("verdict")
    expect(line).to_contain_text("without the straggler (node 1) 1.5 times as fast")
    arithmetic = view.root.locator(".dtk-arithmetic")
    expect(arithmetic).to_be_hidden()
    line.press("Enter")
    expect(arithmetic).to_contain_text("ms")


def test_run_that_failed_before_its_first_step_has_no_empty_charts(page: Page):
    run = FakeSource(ranks=2)
    view = StaticView(page, run)
    expect(view.root.get_by_test_id("loss-chart")).to_contain_text("no step yet")
    frames = (("train.py", 12, "loss", "raise ValueError('no rank 1 here')"),)
    failure = Failure(1, "host0", "ValueError", "no rank 1 here", "Traceback", step=0, user_frames=frames)
    run.exception = EngineError([failure, Failure(0, "host0", "PeerLost", "gone", "", step=0, victim=True)])
    run.end(State.FAILED)
    view.update()
    for name in ("loss-chart", "throughput-chart"):
        expect(view.root.get_by_test_id(name)).to_be_hidden()
    assert view.root.get_by_test_id("error").inner_text().splitlines() == [
        "EngineError: node 1 on host0, step 0: ValueError: no rank 1 here",
        "  File train.py, line 12, in loss",
        "    raise ValueError('no rank 1 here')",
        "node 0 only lost its peer.",
        "(The error's .full has the whole traceback.)",
    ]


def test_lines_of_source_in_an_error_are_in_the_font_of_code(page: Page):
    run = make_run()
    view = StaticView(page, run)
    lines = ["loss = criterion(model(x), `y`)", "raise ValueError('no rank 1 here')"]
    frames = tuple(("train.py", 12 + k, f"loss_{k}", line) for k, line in enumerate(lines))
    message = "no rank 1 here\n    indented by the user"
    run.exception = EngineError([Failure(1, "host0", "ValueError", message, "Traceback", step=50, user_frames=frames)])
    run.state = State.PAUSED
    view.update()
    error = view.root.get_by_test_id("error")
    source = error.locator(".dtk-source")
    expect(source).to_have_text([f"    {line}" for line in lines], use_inner_text=False)
    fonts = "(all) => all.map((el) => getComputedStyle(el).fontFamily + ' ' + getComputedStyle(el).fontSize)"
    assert set(source.evaluate_all(fonts)) == set(view.root.locator(".dtk-log").evaluate_all(fonts))
    assert "monospace" not in error.evaluate("(el) => getComputedStyle(el).fontFamily")
    assert error.inner_text().splitlines() == [
        "EngineError: node 1 on host0, step 50: ValueError: no rank 1 here",
        "    indented by the user",
        "  File train.py, line 12, in loss_0",
        f"    {lines[0]}",
        "  File train.py, line 13, in loss_1",
        f"    {lines[1]}",
        "(The error's .full has the whole traceback.)",
    ]
    assert list_overflowing(page) == []


def test_memory_is_that_of_the_process_before_and_after_the_first_step(page: Page):
    run = FakeSource(ranks=2)
    view = StaticView(page, run)
    memory = view.root.get_by_test_id("nodes-table").locator("tbody tr").first.locator("td").nth(4)
    expect(memory).to_have_text("— of 8 GB")
    run.advance(1)
    view.update()
    expect(memory).to_have_text("315 MB of 8 GB")


@pytest.mark.parametrize("width", [600, 800, 1400])
def test_charts_side_by_side_begin_at_one_height(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 900})
    view = StaticView(page, make_run())
    boxes = [
        view.root.get_by_test_id(f"{name}-chart").locator("svg.dtk-lines-chart").bounding_box()
        for name in ("loss", "throughput")
    ]
    assert boxes[0]
    assert boxes[1]
    assert boxes[0]["x"] == boxes[1]["x"] or boxes[0]["y"] == boxes[1]["y"]
    note = view.root.get_by_test_id("throughput-chart").locator("h3 .dtk-note")
    expect(note).to_contain_text(re.compile(r"· with\s+waiting\s+3\s.\s\d+$"))
    assert note.evaluate("(note) => note.parentElement.scrollWidth <= note.parentElement.clientWidth")
    tools = view.root.get_by_test_id("toolbar").locator(".dtk-toolset > *:visible")
    if width >= 600:
        expect(tools.get_by_text("refresh", exact=True)).to_be_visible()  # "live" alone says nothing
    assert len({round(box["y"] + box["height"] / 2) for tool in tools.all() if (box := tool.bounding_box())}) == 1


@pytest.mark.parametrize("width", [480, 620, 800])
@pytest.mark.parametrize("num_metrics", [0, 2])
def test_each_row_of_tiles_is_whole_and_its_tiles_are_equally_wide(page: Page, width: int, num_metrics: int):
    page.set_viewport_size({"width": width, "height": 900})
    run = make_run()
    if num_metrics:
        run.history.add(Evaluation(50, 100, {"loss": 0.7, "accuracy": 0.5, "top 5": 0.9}))
    tiles = StaticView(page, run).root.get_by_test_id("tiles").locator(".dtk-tile")
    boxes = [box for tile in tiles.all() if (box := tile.bounding_box())]
    assert len(boxes) == 5 + num_metrics
    rows = [list(row) for _, row in itertools.groupby(boxes, lambda box: round(box["y"]))]
    assert len({(round(row[0]["x"]), round(row[-1]["x"] + row[-1]["width"])) for row in rows}) == 1
    assert all(max(box["width"] for box in row) - min(box["width"] for box in row) < 1 for row in rows)
    assert max(len(row) for row in rows) - min(len(row) for row in rows) <= 1
    if len(boxes) == 5 and width >= 620:
        assert len(rows) == 1  # rows of three and of two would have tiles of two widths


def test_a_diverged_run_does_not_end_green(page: Page):
    run = make_run()
    run.advance(40, loss=1e4)
    view = StaticView(page, run)
    chip, bar = view.root.locator(".dtk-chip"), view.root.locator(".dtk-bar")
    expect(chip).to_have_text("↗ running, diverged")
    alert = chip.evaluate("(el) => getComputedStyle(el).color")
    run.end()
    view.update()
    expect(chip).to_have_text("✕ diverged")
    expect(chip).to_have_css("color", alert)
    expect(bar).to_have_css("background-color", alert)


def test_an_ended_run_without_commands_keeps_no_room_for_them(page: Page):
    run = make_run()
    view = StaticView(page, run)
    controls = view.root.get_by_role("group", name="controls")
    expect(controls).to_be_visible()
    run.end()
    view.update()
    expect(controls).to_be_hidden()
    progress, tiles = (view.root.locator(place).bounding_box() for place in (".dtk-progress", ".dtk-tiles"))
    assert progress
    assert tiles
    assert tiles["y"] - progress["y"] - progress["height"] < 20


def test_resume_takes_a_click_before_the_pause_after_a_step(page: Page):
    run = make_run()
    run.state = State.PAUSED
    view = StaticView(page, run)
    resume = view.root.get_by_test_id("resume")
    view.root.get_by_test_id("step").click()
    run.state, run.is_stepping = State.RUNNING, True
    run.advance(1)
    view.update()  # the new step's number comes before the state "paused"
    expect(resume).to_be_enabled()
    expect(resume).to_have_class(re.compile("dtk-primary"))
    expect(view.root.get_by_test_id("step")).to_be_disabled()
    expect(view.root.locator(".dtk-chip")).to_have_text("▸| stepping")  # and not "running" for a moment
    resume.evaluate("(button) => button.click()")  # at once, as a script does
    assert [message["command"] for message in view.sent] == ["step", "resume"]
    expect(resume).to_have_text("▶Resuming…")
    run.is_stepping = False
    view.report_effect("resumed at step 51 on all nodes")
    expect(resume).to_have_text("▶Resume")
    expect(resume).to_be_disabled()


def test_an_ended_run_offers_what_it_can_still_do(page: Page):
    run = make_run()
    view = StaticView(page, run, offers=["save", "kill", "slow"])
    run.end()
    view.update()
    for name in ("pause", "resume", "step", "stop", "lr", "kill", "slow"):
        expect(view.root.get_by_test_id(name)).to_be_hidden()
    view.root.get_by_test_id("save").click()
    assert view.sent == [{"command": "save", "value": None}]
    run.end(State.FAILED)
    view.update()
    expect(view.root.get_by_test_id("save")).to_be_hidden()


@pytest.mark.parametrize("look", [Look("light", 240, 900), Look("light", 320, 900)], indirect=True, ids=str)
def test_a_sidebar_cuts_no_number(page: Page):
    run = make_run()
    run.consistency = ReplicaCheckResult(50, (), None)
    run.history.add(Evaluation(40, 100, {"loss": 0.7, "accuracy": 0.75}))
    view = StaticView(page, run, offers=["save"])
    assert list_overflowing(page) == []
    run.stick(1)
    view.update()
    assert list_overflowing(page) == []
    overfitting = make_run()
    for k in range(30):  # its notice has a long word without a blank
        overfitting.advance(10, loss=0.5 / (k + 1))
        overfitting.history.add(Evaluation(overfitting.step, 100, {"loss": 0.2 + abs(k - 8) / 20}))
    StaticView(page, overfitting)
    expect(page.get_by_text("▲ overfitting since")).to_be_visible()
    assert list_overflowing(page) == []


@pytest.mark.parametrize("steps", [40, 400])
def test_steps_without_rows_are_a_gap_in_line_and_band(page: Page, steps: int):
    run = FakeSource(ranks=3, steps=3 * steps)
    run.advance(steps)
    run.lose(1)
    run.advance(steps)  # without rows of node 1
    run.event("repair", "node 1 replaced")
    run.advance(steps)
    chart = StaticView(page, run).root.get_by_test_id("loss-chart")
    drawn = {k: (chart.locator(f"path.dtk-line[data-rank='{k}']").get_attribute("d") or "").count("M") for k in (0, 1)}
    assert drawn == {0: 1, 1: 2}
    bands = {k: (chart.locator(f"path.dtk-band.dtk-n{k}").get_attribute("d") or "").count("M") for k in (0, 1)}
    assert bands == ({0: 1, 1: 2} if 3 * steps > MAX_BUCKETS else {0: 0, 1: 0})


def test_logged_numbers_have_a_gap_where_the_node_lost_its_rows(page: Page):
    run = FakeSource(ranks=2)
    run.advance(10)
    run.lose(1)
    run.advance(5)  # without rows of node 1
    run.event("repair", "node 1 replaced")
    run.advance(10)
    for rank, steps in enumerate(([*range(1, 26)], [*range(1, 11), *range(16, 26)])):
        rows = [(step, float(step), 1.0) for step in steps if step % 3]
        run.history.add(ScalarRecord(rank, {"kl": rows, "system/CPU (cores)": rows}))
    view = StaticView(page, run)
    message = SeriesFeed(run.history).build_message()
    assert message
    page.evaluate("([content, buffers]) => window.receive(content, buffers)", encode_message(message))
    for name in ("scalars-chart", "system-chart"):
        chart = view.root.get_by_test_id(name)
        for rank, parts in ((0, 1), (1, 2)):
            line = chart.locator(f"path.dtk-line[data-rank='{rank}']")
            expect(line).to_have_attribute("d", re.compile(f"^(M[^M]+){{{parts}}}$"))
        expect(chart.locator("path.dtk-line[data-rank='all']")).to_have_attribute("d", re.compile("^M[^M]+$"))


_FILL = "(el) => getComputedStyle(el).fill"


@pytest.mark.parametrize("steps", [100, 3000])
def test_marks_at_one_step_show_all_their_signs(page: Page, steps: int):
    run = FakeSource(ranks=3, steps=steps)
    run.advance(steps // 2)
    run.lose(1)
    run.event("repair", "node 1 replaced")
    run.advance(steps // 4)
    run.event("save", "saved")
    run.advance(steps // 4)
    chart = StaticView(page, run).root.get_by_test_id("loss-chart")
    expect(chart.locator(".dtk-sign text")).to_have_text(["†\u00a0·\u00a0+", "↓"])
    lost, repaired = (chart.locator(f".dtk-sign .dtk-mark-{kind}") for kind in ("lost", "repair"))
    assert lost.evaluate(_FILL) != repaired.evaluate(_FILL)  # each has its color, although they are one text
    key = chart.page.get_by_test_id("marks-key")
    expect(key).to_have_text("marks:  † node 1 lost · + repaired · ↓ saved", use_inner_text=False)


def test_a_timeline_older_than_the_run_says_so(page: Page):
    """After an attach, a run has the rows of all steps, but a timeline only of what its engines kept."""
    run = FakeSource(ranks=2, strips=True)
    run.advance(20)
    old = run.timeline
    run.state = State.PAUSED
    run.advance(30)
    run.__class__ = type("Attached", (FakeSource,), {"timeline": old})
    view = StaticView(page, run)
    note = view.root.get_by_test_id("timeline-panel").locator("h3 .dtk-note")
    expect(note).to_have_text("step 20 (21 to 50 have no timeline), what each node did when")


@pytest.mark.parametrize("width", [600, 1280])
def test_a_longer_state_in_the_head_moves_nothing(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 900})
    run = FakeSource(ranks=2, name="MultiLayerPerceptron")
    run.advance(50)
    view = StaticView(page, run)
    progress, places = view.root.get_by_test_id("progress"), set()
    for state, error in ((State.RUNNING, None), (State.PAUSED, None), (State.PAUSED, "NaN"), (State.COMPLETED, None)):
        run.state = state
        run.exception = NonFiniteError([Failure(0, "here", "NonFinite", error, "", step=20)]) if error else None
        view.update()
        box = progress.bounding_box()
        assert box
        places.add(box["y"])
    assert len(places) == 1


def test_a_narrow_head_and_its_tiles_keep_all_words_in_few_lines(page: Page):
    page.set_viewport_size({"width": 480, "height": 900})
    run = FakeSource(ranks=2, steps=1_000_000)
    run.remaining_s = 2320.0
    run.advance(1)
    view = StaticView(page, run)
    tile = view.root.get_by_test_id("tiles").locator(".dtk-tile").nth(1)
    before = tile.bounding_box()
    run.advance(60)
    view.update()
    expect(tile).to_contain_text("spread 0.")
    assert tile.bounding_box() == before  # the charts below stay where they are
    texts = view.root.locator(".dtk-ends > span")
    expect(texts.last).to_contain_text("38 min")
    assert texts.evaluate_all("(all) => all.every((el) => el.scrollWidth <= el.clientWidth)")


def test_names_of_short_runs_are_at_the_ends_of_their_lines(page: Page):
    lengths = [400, 60, 200, 120, 350, 30, 280, 390]
    runs = [FakeSource(steps=400, seed=k, name=f"run {k}") for k in range(len(lengths))]
    for run, steps in zip(runs, lengths, strict=True):
        run.advance(steps)
    builder = ComparisonMessageBuilder(dtkit.compare(runs))
    load_widget(page, str(ComparisonWidget._esm), builder.build_snapshot(), "light")
    chart = page.get_by_test_id("comparison-chart").locator("svg.dtk-chart")
    expect(chart.locator(".dtk-labels text")).to_have_count(len(lengths))
    boxes = dict(chart.locator(".dtk-labels text").evaluate_all(_BOXES))
    for k in range(len(lengths)):
        left, top, right, bottom = boxes[f"{k + 1}: run {k}"]
        x, y = chart.locator(f".dtk-lines path.dtk-n{k}").evaluate(_LINE_END)
        assert max(left - x, x - right) < 30, k  # beside the end, or above or below it
        assert abs((top + bottom) / 2 - y) < 50, k
        others = [box for name, box in boxes.items() if name != f"{k + 1}: run {k}"]
        assert not [b for b in others if b[0] < right and left < b[2] and b[1] < bottom - 3 and top + 3 < b[3]], k


_BOXES = """(all) => all.map((el) => {
  const { left, top, right, bottom } = el.getBoundingClientRect();
  return [el.textContent, [left, top, right, bottom]];
})"""
_LINE_END = """(el) => {
  const { x, y } = el.getPointAtLength(el.getTotalLength()).matrixTransform(el.getScreenCTM());
  return [x, y];
}"""


def test_an_engine_that_ends_after_its_run_is_named_with_the_remedy(page: Page):
    run = make_run()
    run.slowness = {1: 2.0}
    run.advance(200)
    run.end()
    run.ended_engines = {}
    view = StaticView(page, run)
    table = view.root.get_by_test_id("nodes-table")
    told, button = table.get_by_test_id("ended-engines"), table.locator("tr[data-rank='1'] button")
    table.scroll_into_view_if_needed()
    expect(button).to_have_text("▲ 1")
    expect(told).to_be_hidden()
    remedy = "its process has ended. cluster.repair() starts another one in its place"
    run.ended_engines = {1: f"the engine of rank 1 on host0 is gone: {remedy}"}
    view.update()
    expect(told).to_have_text(f"✕ the engine of node 1 on host0 is gone: {remedy}")
    expect(button).to_have_text("✕ 1")
    expect(button).to_have_attribute("aria-label", "highlight node 1, its engine has ended")
    expect(view.root.locator(".dtk-chip")).to_have_text("✓ completed")  # and its loss, and all else
    expect(view.root.get_by_test_id("alert")).to_be_hidden()
    notices, tiles = view.root.get_by_test_id("notices"), view.root.get_by_test_id("tiles")
    expect(notices).to_contain_text(f"✕ the engine of node 1 on host0 is gone: {remedy}")
    expect(tiles).to_contain_text("nodes2 / 3✕ node 1 ended since")
    run.ended_engines = {}  # repaired
    view.update()
    expect(told).to_be_hidden()
    expect(notices).not_to_contain_text("gone")
    expect(tiles).to_contain_text("nodes3 / 3on 1 host")
    expect(button).to_have_text("▲ 1")


@pytest.mark.parametrize("ranks", [1, 4, 5])
def test_a_few_engines_that_ended_are_explained_and_the_others_counted(ranks: int):
    run = FakeSource(ranks=8)
    run.ended_engines = {rank: f"the engine of rank {rank} is gone" for rank in range(ranks)}
    run.end()
    lines = describe_ended_engines(run).splitlines()
    assert lines[0] == "the engine of node 0 is gone"
    assert lines[3:] == {1: [], 4: ["and 1 more engine"], 5: ["and 2 more engines"]}[ranks]

"""The live view without JupyterLab, in a real browser: numbers of nodes, themes, widths, mouse and keyboard."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

import dtkit
from dtkit.dashboard.figures import render
from dtkit.dashboard.live.comparison_messages import ComparisonMessageBuilder
from dtkit.dashboard.live.comparison_widget import ComparisonWidget
from dtkit.dashboard.live.messages import MessageBuilder
from dtkit.dashboard.live.widget import Dashboard
from dtkit.dashboard.summary.timing import PHASES, compute_step_timing
from dtkit.types import Evaluation, ReplicaCheckResult, State
from tests.support.fake_source import FakeSource
from tests.support.lab import Look
from tests.support.marks import slow
from tests.support.static_view import StaticView, add_widget, encode_message, list_overflowing, load_widget

pytestmark = pytest.mark.browser

NARROW, WIDE = Look("light", 600, 900), Look("dark", 1400, 900)


def make_source(ranks: int, *, slow: bool = True) -> FakeSource:
    """Return a run with content for each panel."""
    run = FakeSource(ranks=ranks, strips=True)
    if slow:
        run.slowness = run.delay_factors = {1: 1.6}
    run.consistency = ReplicaCheckResult(300, (), None)
    run.event("start", "the parameters were broadcast from node 0")
    run.advance(200)
    run.history.add(Evaluation(200, 100, {"loss": 0.7}))
    run.lr = 0.01
    run.event("lr", "learning rate set to 0.01")
    run.advance(100)
    if ranks > 8:
        run.lose(11)
    run.advance(40)
    return run


@pytest.mark.parametrize("ranks", [slow(1), slow(2), 4, slow(8), slow(16), slow(256)])
@pytest.mark.parametrize("look", [NARROW, slow(WIDE)], indirect=True, ids=["light-narrow", "dark-wide"])
def test_dashboard_fits_its_width_and_draws_every_panel(page: Page, look: Look, ranks: int, tmp_path: Path):
    view = StaticView(page, make_source(ranks, slow=ranks > 1), look.theme)
    shots = Path(os.environ.get("DTKIT_SCREENSHOTS", tmp_path))
    view.screenshot(shots / f"dashboard-{ranks}-{look.theme}-{look.width}.png")
    assert list_overflowing(page) == []
    assert page.locator(".dtk-broken").count() == 0
    expect(view.root).to_have_attribute("data-theme", look.theme)
    assert page.locator(".dtk-tile").count() == 5
    bars = ranks if ranks <= 8 else 3
    assert view.root.get_by_test_id("time-panel").locator(".dtk-row").count() == bars
    lines = view.root.get_by_test_id("loss-chart").locator("path.dtk-line:not([d=''])")
    # Many nodes: only the mean, the slow node and the lost node.
    assert lines.count() == (1 if ranks == 1 else ranks + 1 if ranks <= 8 else 3)
    for chart in ("gradient-norm-chart", "learning-rate-chart"):
        assert view.root.get_by_test_id(chart).locator("path.dtk-line.dtk-only").get_attribute("d")


def test_table_of_nodes_fits_the_cell_of_a_narrow_notebook(page: Page):
    page.set_viewport_size({"width": 440, "height": 900})
    table = StaticView(page, make_source(4)).root.get_by_test_id("nodes-table").locator(".dtk-scroll")
    assert table.evaluate("(box) => box.scrollWidth <= box.clientWidth")


def test_bars_show_the_same_numbers_as_the_saved_picture(page: Page):
    run = make_source(4)
    view = StaticView(page, run)
    timing = compute_step_timing(run.history, 4)
    for rank in range(4):
        row = view.root.locator(f".dtk-row[data-rank='{rank}']")
        widths = [float(row.locator(f"[data-phase={phase}]").get_attribute("width") or 0) for phase in PHASES]
        shares = timing.seconds[rank] / timing.seconds[rank].sum()
        assert [width / sum(widths) for width in widths] == pytest.approx(list(shares), abs=2e-3)
    expect(view.root.get_by_test_id("straggler")).to_have_text(f"▲ {timing.straggler.text}")
    assert view.root.locator(".dtk-slow").get_attribute("data-rank") == "1"


@pytest.mark.slow
def test_pipeline_stages_show_no_loss_and_no_straggler(page: Page):
    run = FakeSource(ranks=2, stages=2)
    run.slowness = {1: 2.0}
    run.advance(60)
    run.nodes = [dataclasses.replace(node, memory_total=4_630_000) for node in run.nodes]
    view = StaticView(page, run)
    losses = view.root.get_by_test_id("loss-chart")
    assert losses.locator("path.dtk-line:not([d=''])").count() == 2
    labels = losses.locator(".dtk-labels text").all_text_contents()
    assert sorted(re.sub(r"(?<=mean) [\d.]+", "", label) for label in labels) == ["mean", "node 1"]
    assert "all" in view.root.get_by_test_id("throughput-chart").locator(".dtk-labels text").all_text_contents()
    expect(view.root.get_by_test_id("throughput-chart").locator(".dtk-note")).to_have_text("samples/s without waiting")
    rows = view.root.get_by_test_id("nodes-table").locator("tbody tr")
    assert [row.locator("td").nth(6).text_content() == "—" for row in rows.all()] == [True, False]
    assert rows.first.locator("td").nth(4).text_content() == "315 MB of 4.63 MB"
    expect(view.root.get_by_test_id("straggler")).to_be_hidden()


@pytest.mark.slow
def test_each_phase_has_its_own_texture(page: Page):
    view = StaticView(page, make_source(2))
    fills = view.root.locator(".dtk-row[data-rank='0'] .dtk-phase").evaluate_all(
        "(all) => all.map((el) => getComputedStyle(el).fill)"
    )
    assert len(set(fills)) == len(PHASES)
    assert sum(fill.startswith("url(") for fill in fills) == 5


@pytest.mark.slow
def test_straggler_line_is_hidden_without_a_straggler(page: Page):
    view = StaticView(page, make_source(4, slow=False))
    expect(view.root.get_by_test_id("time-panel")).to_be_visible()
    expect(view.root.get_by_test_id("straggler")).to_be_hidden()


@pytest.mark.slow
def test_replica_check_is_shown_and_a_difference_is_an_alert(page: Page):
    run = make_source(4)
    view = StaticView(page, run)
    alert, notices = view.root.get_by_test_id("alert"), view.root.get_by_test_id("notices")
    expect(alert).to_be_hidden()
    expect(notices.locator("li")).to_have_text(
        ["✓ parameters identical on 4 nodes, checked at step 300", "▼ node 1 slowed 1.6x on purpose"]
    )
    run.consistency, run.delay_factors = ReplicaCheckResult(350, (3,), 310), {}
    view.update()
    expect(alert).to_be_visible()
    expect(alert).to_have_attribute("role", "alert")
    expect(alert).to_have_text("✕ node 3 differs since step 310: parameters are no longer equal")
    expect(notices.locator("li")).to_have_count(0)


@pytest.mark.slow
def test_stuck_node_is_shown_in_every_panel_and_announced(page: Page):
    run = make_source(4, slow=False)
    view = StaticView(page, run)
    tile, row = view.root.get_by_test_id("tiles").locator(".dtk-tile").last, "tbody tr[data-rank='2']"
    run.stick(2)
    view.update()
    expect(tile).to_have_text("nodes4 / 4⊘ node 2 stuck: forward")
    expect(tile.locator(".dtk-alert")).to_be_visible()
    expect(view.root.get_by_test_id("alert")).to_contain_text("⊘ node 2 is stuck in forward of step 341")
    expect(view.root.get_by_test_id("nodes-table").locator(row).get_by_role("button")).to_have_text("⊘ 2")
    for chart in ("loss-chart", "throughput-chart"):
        panel = view.root.get_by_test_id(chart)
        assert panel.locator(".dtk-sign .dtk-mark-stuck").text_content() == "⊘"
        assert "⊘ node 2" in panel.locator(".dtk-labels text").all_text_contents()
    expect(view.root.get_by_test_id("summary")).to_contain_text("⊘ node 2 stuck: forward")  # without delay
    assert list_overflowing(page) == []
    run.stall_report = None
    view.update()
    expect(view.root.get_by_test_id("alert")).to_be_hidden()
    expect(view.root.get_by_test_id("summary")).not_to_contain_text("stuck")


@pytest.mark.slow
def test_removed_nodes_are_no_longer_counted(page: Page):
    run = make_source(4, slow=False)
    run.shrink(3)
    run.advance(60)
    view = StaticView(page, run, offers=["slow", "kill"])
    expect(view.root.locator("header .dtk-note")).to_contain_text("3 nodes (was 4)")
    expect(view.root.get_by_test_id("tiles").locator(".dtk-tile").last).to_have_text("nodes3 / 3was 4: 1 left out")
    assert view.root.get_by_test_id("fault-node").locator("option").count() == 3
    assert view.root.get_by_test_id("nodes-table").locator("tbody tr").count() == 3
    assert view.root.get_by_test_id("time-panel").locator(".dtk-row").count() == 3
    assert "○ node 3" in view.root.get_by_test_id("loss-chart").locator(".dtk-labels text").all_text_contents()


@pytest.mark.slow
def test_bars_can_be_read_with_the_keyboard(page: Page):
    view = StaticView(page, make_source(4))
    panel = view.root.get_by_test_id("time-panel")
    note = panel.locator("h3 .dtk-note")
    expect(note).to_have_text("ms, mean of steps 291 to 340")
    rows = panel.locator(".dtk-row")
    assert rows.evaluate_all("(all) => all.map((el) => el.tabIndex)") == [0, -1, -1, -1]  # one tab stop
    rows.first.focus()
    for rank in (1, 2):
        page.keyboard.press("ArrowDown")
        expect(note).to_have_text(re.compile(rf"^node {rank}: \d+ ms a step: data .* · waiting|^node 1: \d+ ms"))
        expect(rows.nth(rank)).to_be_focused()
    page.keyboard.press("End")
    expect(rows.nth(3)).to_be_focused()
    label = rows.nth(1).get_attribute("aria-label") or ""
    assert re.match(r"straggler, node 1: \d+ ms a step: data \d+\.?\d* ms \(\d+ %\) · forward", label)


@pytest.mark.slow
def test_bar_keeps_the_focus_during_updates(page: Page):
    run = make_source(4)
    view = StaticView(page, run)
    row = view.root.locator(".dtk-row[data-rank='2']")
    row.focus()
    for _ in range(3):
        run.advance(5)
        view.update()
    expect(row).to_be_focused()


@pytest.mark.slow
def test_arrow_keys_select_a_step_in_all_charts(page: Page):
    view = StaticView(page, make_source(2))
    page.locator("[data-testid=loss-chart] svg.dtk-chart").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    for chart in ("loss-chart", "gradient-norm-chart"):
        expect(view.root.get_by_test_id(chart).locator("h3 .dtk-note")).to_have_text(re.compile(r"^step 2: [\d.]+"))
    page.keyboard.press("Escape")
    expect(view.root.get_by_test_id("loss-chart").locator("h3 .dtk-note")).to_have_text("per node and mean")


def test_buttons_send_commands_by_mouse_and_keyboard(page: Page):
    run = make_source(2)
    view = StaticView(page, run)
    view.root.get_by_test_id("pause").click()
    expect(view.root.get_by_test_id("pause")).to_have_text(re.compile("Pausing"))
    run.state = State.PAUSED
    view.update()
    view.root.get_by_test_id("step").focus()
    page.keyboard.press("Enter")
    rate = view.root.get_by_test_id("lr")
    rate.fill("0.002")
    rate.press("Enter")
    assert view.sent == [
        {"command": "pause", "value": None},
        {"command": "step", "value": None},
        {"command": "lr", "value": 0.002},
    ]


@pytest.mark.slow
def test_empty_panels_are_hidden_before_the_first_step(page: Page):
    run = FakeSource(ranks=2)
    run.state = State.PENDING
    view = StaticView(page, run)
    expect(view.root.get_by_test_id("time-panel")).to_be_hidden()
    assert view.root.get_by_test_id("loss-chart").locator("text").all_text_contents() == ["no step yet"]
    run.state = State.RUNNING
    run.advance(10)
    view.update()
    for panel in ("time-panel", "gradient-norm-chart"):
        expect(view.root.get_by_test_id(panel)).to_be_visible()


def test_text_from_engines_is_escaped(page: Page):
    run = make_source(2)
    run.spec = type(run.spec)(**{**run.spec.__dict__, "name": "<img src=x onerror=alert(1)>"})
    run.event("print", "<script>alert(1)</script>", rank=1)
    view = StaticView(page, run)
    expect(view.root.locator("h2")).to_have_text("<img src=x onerror=alert(1)>")
    expect(view.root.get_by_test_id("log")).to_contain_text("[1] <script>alert(1)</script>")
    assert view.root.locator("img, script").count() == 0


@pytest.mark.slow
def test_error_in_a_panel_does_not_affect_the_others(page: Page):
    run = make_source(2)
    view = StaticView(page, run)
    page.evaluate("""() => {
      const real = window.real = Element.prototype.setAttribute;
      Element.prototype.setAttribute = function (name, value) {
        if (this.dataset?.phase && this.closest("[data-testid=time-panel]")) throw new Error("drawing failed");
        return real.call(this, name, value);
      };
    }""")
    run.slowness = {0: 3.0}
    run.advance(60)
    view.update()
    expect(page.locator(".dtk-broken")).to_have_text("this panel failed: drawing failed")
    assert view.root.get_by_test_id("time-panel").locator(".dtk-broken").count() == 1
    expect(view.root).to_have_attribute("data-step", str(run.step))
    page.evaluate("() => { Element.prototype.setAttribute = window.real; }")
    run.advance(5)
    view.update()
    expect(page.locator(".dtk-broken")).to_have_count(0)


# -- many nodes, and a selected node ------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [16, slow(256)])
def test_many_nodes_are_drawn_as_labeled_squares(page: Page, ranks: int):
    view = StaticView(page, make_source(ranks))
    cells = view.root.get_by_test_id("waffle").get_by_role("option")
    assert cells.count() == ranks
    assert [cells.nth(k).text_content() for k in (0, 1, 11, ranks - 1)] == ["0", "▲", "✕", str(ranks - 1)]
    assert cells.nth(11).get_attribute("aria-label") == "node 11, lost"
    names = view.root.get_by_test_id("throughput-chart").locator(".dtk-labels text").all_text_contents()
    assert {"✕ node 11", "▲ node 1"} < set(names)
    expect(view.root.get_by_test_id("alert")).to_have_text(
        f"✕ node 11 was lost at step 300; {ranks - 1} nodes of {ranks} left"
    )
    assert view.root.get_by_test_id("timeline-panel").locator(".dtk-name").count() == 16
    assert view.root.get_by_test_id("memory-panel").get_by_role("listitem").count() == 3


@pytest.mark.slow
def test_selected_node_is_highlighted_in_all_panels(page: Page):
    view = StaticView(page, make_source(16))
    waffle = view.root.get_by_test_id("waffle")
    waffle.get_by_role("option").nth(5).click()
    assert page.evaluate("() => window.sent.at(-1)") == {"select": 5}
    view.select_rank(5)  # the kernel answers with the node's lines
    for chart in ("loss-chart", "throughput-chart"):
        line = view.root.get_by_test_id(chart).locator("path.dtk-picked")
        expect(line).to_have_attribute("data-rank", "5")
        assert line.get_attribute("d")
    for panel in ("nodes-table", "memory-panel", "time-panel", "timeline-panel"):
        assert view.root.get_by_test_id(panel).locator(".dtk-picked").count() == 1
    waffle.focus()
    for key in ("Home", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert page.evaluate("() => window.sent.at(-1)") == {"select": 2}
    expect(waffle.get_by_role("option").nth(2)).to_have_attribute("aria-selected", "true")
    expect(waffle).to_have_attribute("aria-activedescendant", re.compile("-2$"))
    expect(view.root.get_by_test_id("waffle-panel").locator("h3 .dtk-note")).to_have_text(
        re.compile(r"^node 2 on host0: \d+ samples/s · loss [\d.]+ · 317 MB$")
    )
    page.keyboard.press("Escape")
    assert page.evaluate("() => window.sent.at(-1)") == {"select": None}


@pytest.mark.slow
def test_few_nodes_are_selected_by_name_or_row(page: Page):
    view = StaticView(page, make_source(4))
    expect(view.root.get_by_test_id("waffle-panel")).to_be_hidden()
    view.root.get_by_test_id("nodes-table").get_by_role("button", name="highlight node 2").press("Enter")
    lines = view.root.get_by_test_id("loss-chart")
    expect(lines.locator("path.dtk-picked")).to_have_attribute("data-rank", "2")
    expect(lines.locator("path.dtk-faded")).to_have_count(3)
    veils = view.root.get_by_test_id("timeline-panel").locator(".dtk-veil")  # over the strips of the others
    expect(veils).to_have_count(3)
    view.root.get_by_test_id("time-panel").locator(".dtk-row[data-rank='2']").press(
        "Enter"
    )  # a second press clears the selection
    expect(lines.locator("path.dtk-picked")).to_have_count(0)
    expect(veils).to_have_count(0)


# -- the timeline -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_micro_batches_of_a_pipeline_are_numbered(page: Page):
    run = FakeSource(ranks=4, stages=4, strips=True)
    run.advance(30)
    view = StaticView(page, run)
    panel = view.root.get_by_test_id("timeline-panel")
    assert panel.locator(".dtk-name").all_text_contents() == [f"node {k}" for k in range(4)]
    assert panel.locator("[data-phase=forward]").count() == 2  # one path for all boxes of a kind, and one in the legend
    assert panel.locator(".dtk-strip-numbers text").all_text_contents() == ["0", "1", "2", "3"] * 8
    expect(panel.locator("h3 .dtk-note")).to_have_text(
        re.compile(r"^step 30\b.* · bubble \d+ % measured, 43 % by formula")
    )
    label = panel.locator("svg[role=img]").get_attribute("aria-label") or ""
    assert re.search(r"node 0 works 5\d %, node 1 works", label)


@pytest.mark.slow
def test_failing_timeline_shows_an_error_in_its_panel(page: Page, monkeypatch: pytest.MonkeyPatch):
    run = make_source(2)
    monkeypatch.setattr(FakeSource, "timeline", property(lambda _: 1 / 0))
    view = StaticView(page, run)
    panel = view.root.get_by_test_id("timeline-panel")
    expect(panel.locator(".dtk-broken")).to_have_text("this panel failed: ZeroDivisionError: division by zero")
    assert page.locator(".dtk-broken").count() == 1


# -- controls -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fault_controls_are_shown_only_when_offered(page: Page):
    run = make_source(4)
    view = StaticView(page, run)
    for name in ("fault-node", "slow", "kill", "save"):
        expect(view.root.get_by_test_id(name)).to_be_hidden()
    view = StaticView(page, run, offers=["slow", "kill", "save"])
    view.root.get_by_test_id("fault-node").select_option("3")
    view.root.get_by_test_id("fault-factor").select_option("4")
    view.root.get_by_test_id("slow").click()
    view.root.get_by_test_id("kill").click()
    expect(view.root.get_by_test_id("kill")).to_have_text("✕ Kill node 3?")
    view.root.get_by_test_id("kill").press("Enter")
    view.root.get_by_test_id("save").press("Space")
    assert view.sent == [
        {"command": "slow", "value": {"rank": 3, "factor": 4}},
        {"command": "kill", "value": {"rank": 3}},
        {"command": "save", "value": None},
    ]
    expect(view.root.get_by_test_id("save")).to_be_disabled()
    assert list_overflowing(page) == []


@pytest.mark.parametrize(("name", "asked", "text"), [("kill", "Kill node 0?", "✕ Kill"), ("stop", "Stop?", "Stop")])
def test_a_question_stays_until_it_is_answered_or_taken_back(page: Page, name: str, asked: str, text: str):
    """It lapsed after five seconds without a word, and the next click asked again."""
    page.clock.install()
    view = StaticView(page, make_source(4), offers=["slow", "kill", "save"])
    button = view.root.get_by_test_id(name)
    take_backs = (
        lambda: button.press("Escape"),
        lambda: view.root.locator("h2").click(),
        lambda: button.press("Tab"),
    )
    for take_back in take_backs:
        button.click()
        expect(button).to_contain_text(asked)
        page.clock.run_for(60_000)
        expect(button).to_contain_text(asked)
        take_back()
        page.clock.run_for(100)
        expect(button).to_contain_text(text)
    assert view.sent == []
    button.click()
    button.press("Enter")
    assert [message["command"] for message in view.sent] == [name]


@pytest.mark.slow
def test_effect_of_a_command_is_announced(page: Page):
    view = StaticView(page, make_source(2))
    effect = view.root.get_by_test_id("effect")
    expect(effect).to_have_text("")
    view.root.get_by_test_id("pause").click()
    view.report_effect("paused at step 340 on all nodes")
    expect(effect).to_have_text("✓ paused at step 340 on all nodes")
    expect(effect).to_have_attribute("role", "status")
    expect(view.root.get_by_test_id("pause")).to_have_text(re.compile("Pause"))  # the command has been answered


# -- custom panels ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_custom_panel_and_its_error_are_shown_separately(page: Page):
    view = StaticView(page, make_source(2))
    figure = render.create_figure(6, 2.3)
    view.show_picture("Mine", render.render_png(figure))
    view.show_picture("<b>Broken</b>", b"", "RuntimeError: <script>")
    panels = view.root.get_by_test_id("custom-panel")
    expect(panels).to_have_count(2)
    page.wait_for_function("() => document.querySelector('[data-name=Mine] img').naturalWidth > 500")
    expect(panels.nth(1).locator("h3")).to_have_text("<b>Broken</b> ")
    expect(panels.nth(1).locator("p")).to_have_text("this panel failed: RuntimeError: <script>")
    expect(panels.nth(1).get_by_test_id("full-screen")).to_be_hidden()
    assert view.root.locator("script, b").count() == 0
    error_color = panels.nth(1).locator("p").evaluate("p => getComputedStyle(p).color")
    view.show_picture("<b>Broken</b>", render.render_png(figure))
    expect(panels.nth(1).locator("p")).to_be_hidden()
    view.show_picture("<b>Broken</b>", b"", note="nothing was logged as 'conf' in this run")
    note = panels.nth(1).locator("p")
    expect(note).to_have_text("nothing was logged as 'conf' in this run")
    assert note.evaluate("p => getComputedStyle(p).color") != error_color
    expect(panels.nth(1).get_by_test_id("full-screen")).to_be_hidden()


# -- accessibility ----------------------------------------------------------------------


@pytest.mark.slow
def test_panels_have_accessible_names_and_respect_reduced_motion(page: Page):
    page.emulate_media(reduced_motion="reduce")
    view = StaticView(page, make_source(16))
    moving = view.root.locator("*").evaluate_all(
        "(all) => [...new Set(all.map((el) => getComputedStyle(el).transitionDuration))]"
    )
    assert all(float(duration.removesuffix("s")) < 1e-3 for duration in moving), moving
    unnamed = page.evaluate("""() => [...document.querySelectorAll(
      ".dtkit :is([role=img], [role=listbox], [role=group], [role=region], [role=list], select, input)")]
      .filter((el) => !el.getAttribute("aria-label") && !el.labels?.length && !el.closest(".dtk-tiles, .dtk-memory"))
      .map((el) => el.outerHTML.slice(0, 80))""")
    assert unnamed == []
    expect(view.root.get_by_test_id("summary")).to_have_attribute("aria-live", "polite")
    expect(view.root.get_by_test_id("summary")).to_contain_text("node 11 was lost at step 300")


# -- several runs -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_comparison_shows_live_runs_with_distinct_lines(page: Page):
    runs = [FakeSource(steps=400, seed=k, name=f"<i>Run</i> {k}") for k in range(3)]
    for k, run in enumerate(runs):
        run.advance(300 - 100 * k)
        for step in (50, 100):
            run.history.add(Evaluation(step, 100, {"loss": 1.0 / (step + k), "accuracy": 0.5 + 0.1 * k}))
    comparison = dtkit.compare(runs, labels=["one", "<b>two</b>", "three"])
    builder = ComparisonMessageBuilder(comparison)
    load_widget(page, str(ComparisonWidget._esm), builder.build_snapshot(), "light")
    root = page.get_by_test_id("dtkit-comparison")
    expect(root).to_have_attribute("data-state", "running")
    rows = root.get_by_test_id("runs-table").locator("tbody tr")
    expect(rows.locator("th")).to_have_text([" 1: one", " 2: <b>two</b>", " 3: three"])
    lines = root.get_by_test_id("comparison-chart").locator(".dtk-lines path:not([d=''])")
    assert lines.count() == 3
    dashes = lines.evaluate_all("(all) => all.map((el) => getComputedStyle(el).strokeDasharray)")
    assert len(set(dashes)) == 3  # distinguishable without colors, too
    assert sorted(root.get_by_test_id("comparison-chart").locator(".dtk-labels text").all_text_contents()) == [
        "1: one", "2: <b>two</b>", "3: three",
    ]  # fmt: skip
    titles = root.locator(".dtk-title").all_text_contents()
    assert titles == ["Loss against steps", "Loss against time", "Validation loss", "Validation accuracy", "Throughput"]
    widths = [chart.bounding_box()["width"] for chart in root.locator("[data-name]").all()]
    assert len(set(widths)) == 1  # also of the last one, which has no neighbor
    page.get_by_test_id("time-chart").locator("svg.dtk-chart").hover()
    expect(page.get_by_test_id("time-chart").get_by_test_id("tooltip")).to_contain_text(re.compile(r"^\d+ s.*one"))
    runs[0].advance(50)
    message = builder.build_snapshot()
    page.evaluate("([content, buffers]) => window.receive(content, buffers)", encode_message(message))
    expect(rows.first.locator("td").nth(1)).to_have_text("350")  # after its state; all have as many nodes
    assert root.locator("th b, td b, .dtk-labels b").count() == 0


def test_names_of_runs_are_in_the_order_of_their_lines(page: Page):
    runs = [FakeSource(steps=400, seed=k, name=f"run {k}") for k in range(2)]
    for run, accuracy in zip(runs, (0.92, 0.93), strict=True):
        run.advance(100)
        for step, value in ((50, 0.1), (100, accuracy)):
            run.history.add(Evaluation(step, 100, {"accuracy": value}))
    builder = ComparisonMessageBuilder(dtkit.compare(runs, labels=["lower", "higher"]))
    load_widget(page, str(ComparisonWidget._esm), builder.build_snapshot(), "light")
    labels = page.get_by_test_id("dtkit-comparison").locator("[data-name='Validation accuracy'] .dtk-labels text")
    expect(labels).to_have_text(["2: higher", "1: lower"])


def receive(page: Page, content: dict[str, Any]) -> None:
    page.evaluate("(content) => window.receive(content, [])", content)


def test_view_reports_a_kernel_that_is_gone_and_recovers(page: Page):
    """The page misses signs of life; without the first one it expects none."""
    page.clock.install()
    run = make_source(2)
    view = StaticView(page, run)
    page.clock.run_for(20_000)
    expect(view.root).to_have_attribute("data-state", "running")
    receive(page, {"kind": "alive"})
    page.clock.run_for(7_000)
    expect(view.root).to_have_attribute("data-state", "lost")
    expect(view.root.get_by_test_id("error")).to_contain_text("call dtkit.attach(): it takes the engines over")
    expect(view.root.locator(".dtk-chip")).to_have_text("✕ kernel gone")
    shown = view.root.locator(".dtk-ends").text_content()
    page.clock.run_for(5_000)
    assert view.root.locator(".dtk-ends").text_content() == shown
    for button in ("pause", "stop"):
        expect(view.root.get_by_test_id(button)).to_be_disabled()
    receive(page, {"kind": "alive"})
    page.clock.run_for(1_500)
    expect(view.root).to_have_attribute("data-state", "running")
    expect(view.root.get_by_test_id("error")).to_be_hidden()


def test_an_ended_run_can_not_be_saved_by_a_kernel_that_was_restarted(page: Page):
    run = make_source(2)
    run.end()
    view = StaticView(page, run, offers=["save"])
    save = view.root.get_by_test_id("save")
    expect(save).to_have_attribute("title", re.compile("^Save writes a checkpoint"))  # and no report
    save.click()
    expect(save).to_contain_text("Saving")
    page.evaluate("window.cutOff()")
    expect(save).to_be_disabled()
    expect(save).not_to_contain_text("Saving")
    expect(save).to_have_attribute("title", "the kernel that had the run was restarted")


@pytest.mark.parametrize("ranks", [2, 8, 12, 40])
def test_up_to_eight_nodes_are_all_in_sight_and_more_say_to_scroll(page: Page, ranks: int):
    page.set_viewport_size({"width": 1280, "height": 900})
    panel = StaticView(page, make_source(ranks)).root.get_by_test_id("nodes-table")
    beyond = panel.locator(".dtk-scroll").evaluate("(el) => el.scrollHeight - el.clientHeight")
    assert (beyond <= 0) == (ranks <= 8)
    assert ("scroll for all" in panel.locator("h3").inner_text()) == (ranks > 8)


def test_view_reports_a_restarted_kernel_at_once(page: Page):
    """JupyterLab cuts its models off at a restart, long before signs of life are missing."""
    page.clock.install()
    view = StaticView(page, make_source(2))
    receive(page, {"kind": "alive"})
    page.evaluate("window.cutOff()")
    page.clock.run_for(100)
    expect(view.root).to_have_attribute("data-state", "lost")
    receive(page, {"kind": "alive"})  # only the connection was lost for a while
    page.clock.run_for(1_500)
    expect(view.root).to_have_attribute("data-state", "running")


def test_a_view_without_its_kernel_leads_to_the_one_that_shows_the_run(page: Page):
    run = make_source(2)
    run.event("start", "training begins")
    old = StaticView(page, run).root.element_handle()
    page.evaluate("() => { document.getElementById('view').id = 'old'; window.cutOff(); }")
    page.wait_for_function("(old) => old.dataset.state === 'lost'", arg=old)
    error = page.locator("#old").get_by_test_id("error")
    expect(error).to_contain_text("dtkit.attach()")
    page.evaluate("""() => { const space = document.createElement("div"), place = document.createElement("div");
      [space.style.height, place.id] = ["3000px", "view"];
      document.body.append(space, place); }""")
    add_widget(page, str(Dashboard._esm), MessageBuilder(run, itertools.count().__next__).build_snapshot())
    expect(error).to_contain_text("Another cell of this notebook shows the run live")
    expect(error).not_to_contain_text("dtkit.attach()")
    new = page.locator("#view").get_by_test_id("dtkit-dashboard")
    expect(new).not_to_be_in_viewport()
    error.get_by_role("button", name="show it").click()
    expect(new).to_be_in_viewport()
    page.evaluate("() => window.cutOff()")  # the next kernel is gone, too
    expect(error).to_contain_text("dtkit.attach()")
    expect(error.get_by_role("button")).to_have_count(0)


def test_the_counter_the_tiles_and_the_charts_show_the_same_step(page: Page):
    page.clock.install()
    run = make_source(2)
    run.nodes = [dataclasses.replace(node, host=socket.gethostname(), threads=999) for node in run.nodes]
    view = StaticView(page, run)
    counter = view.root.get_by_test_id("progress")
    loss = view.root.get_by_test_id("loss-chart").locator("path.dtk-line").first
    for _ in range(3):
        drawn = loss.get_attribute("d")
        run.advance(7)
        view.update(is_drawn=False)
        page.clock.run_for(100)
        assert counter.get_attribute("aria-valuenow") == view.root.get_attribute("data-step")
        page.clock.run_for(1_000)
        expect(counter).to_have_attribute("aria-valuenow", str(run.status.step))
        expect(view.root).to_have_attribute("data-step", str(run.status.step))
        assert loss.get_attribute("d") != drawn


def test_the_first_step_after_a_resume_is_drawn_at_once_on_busy_cores(page: Page):
    page.clock.install()
    run = make_source(2)
    run.nodes = [dataclasses.replace(node, host=socket.gethostname(), threads=999) for node in run.nodes]
    view = StaticView(page, run)
    run.state = State.PAUSED
    run.event("pause", "paused at step 160")
    view.update()
    run.state = State.RUNNING
    view.update()
    run.advance(1)
    view.update(is_drawn=False)
    page.clock.run_for(200)
    expect(view.root).to_have_attribute("data-step", str(run.step))


def test_stop_keeps_its_width_when_it_asks(page: Page):
    view = StaticView(page, make_source(2))
    stop = view.root.get_by_test_id("stop")
    before = stop.bounding_box()
    captions = [caption.bounding_box() for caption in view.root.locator(".dtk-controls > button > span").all()]
    assert len({round(box["y"] + box["height"] / 2) for box in captions if box is not None}) == 1  # on one line
    stop.click()
    expect(stop).to_contain_text("Stop?")
    assert stop.bounding_box() == before
    assert list_overflowing(page) == []


def test_stop_asks_once_and_a_bad_learning_rate_is_refused(page: Page):
    view = StaticView(page, make_source(2))
    stop, rate = view.root.get_by_test_id("stop"), view.root.get_by_test_id("lr")
    stop.click()
    expect(stop).to_contain_text("Stop?")
    expect(view.root.get_by_test_id("effect")).to_have_text("Stop ends the run; run.extend() can continue it later.")
    expect(stop).to_have_attribute("title", re.compile("run.extend"))
    assert view.sent == []
    stop.click()
    expect(view.root.get_by_test_id("effect")).to_have_text("")
    assert [message["command"] for message in view.sent] == ["stop"]
    rate.fill("-1")
    expect(view.root.get_by_test_id("lr-unsent")).to_have_text("Enter sends it")
    rate.press("Enter")
    expect(view.root.locator(".dtk-answer .dtk-refusal")).to_contain_text("it must be 0 or more")
    rate.press("Escape")
    expect(view.root.get_by_test_id("lr-unsent")).to_be_hidden()
    expect(view.root.locator(".dtk-answer .dtk-refusal")).to_have_text("")
    assert len(view.sent) == 1


def test_the_learning_rate_that_a_run_has_already_is_answered(page: Page):
    view = StaticView(page, make_source(2))
    rate, note = view.root.get_by_test_id("lr"), view.root.get_by_test_id("lr-unsent")
    value = rate.input_value()
    rate.fill(value)
    rate.press("Enter")
    expect(note).to_have_text(f"already {value}")
    rate.fill(f"{value}1")
    expect(note).to_have_text("Enter sends it")
    rate.fill(value)
    rate.press("Enter")
    rate.press("Escape")
    expect(note).to_be_hidden(timeout=8000)
    rate.press("Enter")  # untouched
    expect(note).to_have_text(f"already {value}")
    assert view.sent == []


def test_a_refused_learning_rate_is_marked_and_has_no_check_mark(page: Page):
    run = make_source(2)
    view = StaticView(page, run)
    rate, answer = view.root.get_by_test_id("lr"), view.root.locator(".dtk-answer")
    view.report_effect("resumed at step 50 on all nodes")
    expect(answer).to_contain_text("✓ resumed at step 50")
    rate.fill("-3")
    rate.press("Enter")
    text = "✕ -3 is not a learning rate: it must be 0 or more, such as 0.01. It stays 0.01."
    expect(answer).to_have_text(text)
    expect(rate).to_have_attribute("aria-invalid", "true")
    expect(view.root.get_by_test_id("lr-unsent")).to_be_hidden()  # one refusal says it all
    view.root.get_by_test_id("scale").focus()  # and the box shows the rate in use
    expect(rate).to_have_value("0.01")
    expect(rate).to_have_attribute("aria-invalid", "false")
    expect(answer).to_contain_text("-3 is not a learning rate")
    view.report_effect("paused at step 50 on all nodes")
    assert (answer.inner_text()).strip() == "✓ paused at step 50 on all nodes"
    assert "dispatch" not in (rate.get_attribute("title") or "")
    rate.fill("-3")
    rate.press("Enter")
    expect(answer).to_contain_text("-3 is not a learning rate")
    run.end()
    view.update()
    expect(answer).not_to_contain_text("learning rate")


@pytest.mark.parametrize(
    ("typed", "rule"),
    [
        ("1e400", "it must be 0 or more, and less than 1.8e308, such as 0.01. It stays 0.01."),
        ("0,005", "use a point, as in 0.005. It stays 0.01."),
        ("1,2,3", "it must be 0 or more, such as 0.01. It stays 0.01."),
        ("fast", "it must be 0 or more, such as 0.01. It stays 0.01."),
    ],
)
def test_a_refused_learning_rate_is_named_as_it_was_typed(page: Page, typed: str, rule: str):
    view = StaticView(page, make_source(2))
    rate = view.root.get_by_test_id("lr")
    rate.click()
    rate.press("Control+a")
    rate.press_sequentially(typed)
    rate.press("Enter")
    expect(view.root.locator(".dtk-answer .dtk-refusal")).to_have_text(f"✕ {typed} is not a learning rate: {rule}")
    assert view.sent == []


def test_a_far_higher_learning_rate_asks_once(page: Page):
    view = StaticView(page, make_source(2))
    rate, unsent = view.root.get_by_test_id("lr"), view.root.get_by_test_id("lr-unsent")
    asked = view.root.locator(".dtk-answer .dtk-refusal")
    rate.fill("1000")
    rate.press("Enter")
    expect(asked).to_have_text("▲ 100,000 times as much? Enter again, or Escape")
    rate.fill("2000")  # another number asks again
    expect(unsent).to_have_text("Enter sends it")
    rate.press("Enter")
    expect(asked).to_have_text("▲ 200,000 times as much? Enter again, or Escape")
    assert view.sent == []
    assert list_overflowing(page) == []
    rate.press("Enter")
    expect(unsent).to_be_hidden()
    rate.fill("0.5")  # 50 times as much
    rate.press("Enter")
    assert [message["value"] for message in view.sent] == [2000, 0.5]


def test_a_far_lower_learning_rate_asks_once_and_the_way_back_does_not(page: Page):
    run = make_source(2)
    run.advance(5)
    view = StaticView(page, run)
    rate, asked = view.root.get_by_test_id("lr"), view.root.locator(".dtk-answer .dtk-refusal")
    for typed, question in (("0.00002", "1/500 of that"), ("1e-40", "below a millionth of that")):
        rate.fill(typed)
        rate.press("Enter")
        expect(asked).to_have_text(f"▲ {question}? Enter again, or Escape")
    assert view.sent == []
    assert list_overflowing(page) == []
    rate.press("Enter")
    assert [message["value"] for message in view.sent] == [1e-40]
    run.lr = 1e-40
    run.event("lr", "learning rate 1e-40")
    view.report_effect("learning rate 1e-40")
    rate.fill("1e9")
    rate.press("Enter")
    expect(asked).to_have_text("▲ over a million times as much? Enter again, or Escape")
    for near in ("0.05", "0.0001", "0"):  # the way back, one hundredth of it, and a rest
        rate.fill(near)
        rate.press("Enter")
        view.report_effect(f"learning rate {near}")
    assert [message["value"] for message in view.sent] == [1e-40, 0.05, 0.0001, 0]


def test_a_far_higher_learning_rate_than_before_a_pause_of_learning_asks_too(page: Page):
    run = make_source(2)
    view = StaticView(page, run)
    rate = view.root.get_by_test_id("lr")
    run.lr = 0.0
    view.update()
    expect(rate).to_have_value("0")
    rate.fill("1000")
    rate.press("Enter")
    expect(view.root.locator(".dtk-answer .dtk-refusal")).to_contain_text("times as much? Enter again, or Escape")
    assert view.sent == []


@pytest.mark.parametrize("width", [600, 800, 1000, 1400])
def test_the_field_of_the_learning_rate_stays_where_it_is_when_it_asks(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 900})
    view = StaticView(page, make_source(2))
    rate, tiles = view.root.get_by_test_id("lr"), view.root.get_by_test_id("tiles")
    places = rate.bounding_box(), tiles.bounding_box()
    rate.fill("1000")
    rate.press("Enter")
    expect(view.root.locator(".dtk-answer .dtk-refusal")).to_contain_text("Enter again")
    assert (rate.bounding_box(), tiles.bounding_box()) == places


def test_a_wrong_learning_rate_during_a_change_says_what_goes_on(page: Page):
    run = make_source(2)
    view = StaticView(page, run)
    rate, refusal = view.root.get_by_test_id("lr"), view.root.locator(".dtk-answer .dtk-refusal")
    rate.fill("0.05")
    rate.press("Enter")
    rate.fill("-3")
    rate.press("Enter")
    start = "✕ -3 is not a learning rate: it must be 0 or more, such as 0.01."
    expect(refusal).to_have_text(f"{start} The change to 0.05 goes on.")
    run.lr = 0.05
    view.report_effect("learning rate 0.05 from step 51 on, on all nodes")
    rate.fill("-3")
    rate.press("Enter")
    expect(refusal).to_have_text(f"{start} It stays 0.05.")
    rate.fill("")
    rate.press("Enter")
    expect(refusal).to_contain_text("✕ nothing is not a learning rate")
    assert [message["value"] for message in view.sent] == [0.05]


@pytest.mark.parametrize(
    ("lr", "text"),
    [
        (1e9, "1e+9"), (1.23456e10, "1.235e+10"), (0.05, "0.05"), (0.0123457, "0.0123457"), (0.00123457, "1.235e-3"),
        (1e-5, "0.00001"), (123456.0, "123456"), (0.0, "0"),
    ],
)  # fmt: skip
def test_any_learning_rate_fits_its_box(page: Page, lr: float, text: str):
    run = make_source(2)
    run.lr = lr
    view = StaticView(page, run)
    rate = view.root.get_by_test_id("lr")
    expect(rate).to_have_value(text)
    widths = """(el) => {
        const context = document.createElement("canvas").getContext("2d"), style = getComputedStyle(el);
        context.font = style.font;
        return [context.measureText(el.value).width, el.clientWidth - 2 * parseFloat(style.paddingLeft)];
    }"""
    needed, room = rate.evaluate(widths)
    assert needed <= room
    rate.press("Enter")
    assert view.sent == []  # what nobody typed is not sent, rounded


def test_run_that_has_not_started_is_ready(page: Page):
    run = FakeSource(ranks=2)
    run.state = State.PAUSED
    view = StaticView(page, run)
    expect(view.root.locator(".dtk-chip")).to_contain_text("ready")
    expect(view.root.get_by_test_id("resume")).to_contain_text("Start")


def test_loss_has_a_logarithmic_scale(page: Page, tmp_path: Path):
    view = StaticView(page, make_source(2))
    line = view.root.get_by_test_id("loss-chart").locator("path.dtk-line[data-rank='0']")
    rates = view.root.get_by_test_id("throughput-chart").locator("path.dtk-line[data-rank='0']")
    before, rates_before = line.get_attribute("d"), rates.get_attribute("d")
    scale = view.root.get_by_test_id("scale")
    scale.click()
    expect(scale).to_have_attribute("aria-pressed", "true")
    page.wait_for_function("([line, before]) => line.getAttribute('d') !== before", arg=[line.element_handle(), before])
    assert "NaN" not in (line.get_attribute("d") or "")
    assert rates.get_attribute("d") == rates_before  # starts from zero
    view.screenshot(Path(os.environ.get("DTKIT_SCREENSHOTS", tmp_path)) / "log-scale.png")
    scale.click()
    page.wait_for_function("([line, before]) => line.getAttribute('d') === before", arg=[line.element_handle(), before])


def test_bands_that_reach_zero_have_a_logarithmic_scale(page: Page):
    """A scale without zero gave a path without a number, and browsers drew wedges across the chart."""
    run = FakeSource(ranks=2, steps=5000)
    for _ in range(40):
        run.advance(99)
        run.advance(1, loss=0.0)
    view = StaticView(page, run)
    view.root.get_by_test_id("scale").click()
    band = view.root.get_by_test_id("loss-chart").locator("path.dtk-band[d]:not([d=''])").first
    expect(band).to_be_attached()
    paths = (
        view.root.get_by_test_id("loss-chart")
        .locator("path")
        .evaluate_all("all => all.map((p) => p.getAttribute('d'))")
    )
    assert not [path for path in paths if "NaN" in (path or "")]


def test_an_evaluation_after_the_last_step_is_in_sight(page: Page):
    """It is made after as many steps, one more than the last step's number."""
    run = FakeSource(ranks=2)
    run.advance(100)
    for step, accuracy in ((50, 0.5), (100, 0.75)):
        run.history.add(Evaluation(step, 100, {"loss": 1.0, "accuracy": accuracy}))
    view = StaticView(page, run)
    expect(view.root.get_by_test_id("metric-chart").locator(".dtk-labels text")).to_have_text("0.750")


def test_evaluations_have_a_tab_apart_from_events(page: Page):
    run = make_source(2)
    run.history.add(Evaluation(100, 100, {"loss": 1.0}))
    run.event("evaluation", "validation loss 1.00")
    run.event("note", "hello")
    view = StaticView(page, run)
    expect(view.root.get_by_test_id("log")).to_contain_text("hello")
    expect(view.root.get_by_test_id("log")).not_to_contain_text("validation")
    expect(view.root.get_by_test_id("tab-evaluations")).to_have_text("evaluations 2")


def test_throughput_of_nodes_adds_up_to_that_of_the_tile(page: Page):
    run = FakeSource(ranks=4)
    run.advance(100)
    view = StaticView(page, run)
    note = view.root.get_by_test_id("throughput-chart").locator(".dtk-note").text_content() or ""
    nodes, each = note.split("with waiting")[1].split("\N{MULTIPLICATION SIGN}")
    total = view.root.get_by_test_id("tiles").locator(".dtk-value").first.text_content() or ""
    assert int(nodes) * int(each.replace(",", "")) == pytest.approx(int(total.replace(",", "")), abs=2)


def test_headings_and_notices_keep_their_place_in_jupyterlab(page: Page):
    """JupyterLab has margins for headings and lists in outputs."""
    run = FakeSource(ranks=2)
    run.advance(60)
    run.consistency = ReplicaCheckResult(60, (), None)
    view = StaticView(page, run)
    page.add_style_tag(content=".jp-RenderedHTMLCommon h3:first-child { margin-top: 9px }")
    page.add_style_tag(content=".jp-RenderedHTMLCommon ul:not(.list-inline) { padding-left: 2em }")
    page.evaluate("() => { document.getElementById('view').className = 'jp-RenderedHTMLCommon'; }")
    left = view.root.get_by_test_id("notices").evaluate("(el) => getComputedStyle(el).paddingLeft")
    top = view.root.get_by_test_id("loss-chart").locator("h3").evaluate("(el) => getComputedStyle(el).marginTop")
    assert (left, top) == ("0px", "0px")


def test_a_drawing_keeps_the_elements_of_axes_and_labels(page: Page):
    """New elements in each drawing cost the browser far more than new numbers in the same ones."""
    run = FakeSource(ranks=2)
    run.advance(200)
    view, texts = StaticView(page, run), "document.querySelectorAll('.dtk-grid text, .dtk-labels text')"
    page.evaluate(f"() => {{ for (const text of {texts}) text.isKept = true; }}")
    run.advance(1)
    view.update()
    assert page.evaluate(f"() => [...{texts}].filter((text) => text.isKept).length") > 10


def test_a_notice_with_another_number_is_not_measured_again(page: Page):
    """To read its height would make the browser lay out the page in the middle of a drawing."""
    run = FakeSource(ranks=2)
    run.advance(60)
    run.consistency = ReplicaCheckResult(60, (), None)
    view = StaticView(page, run)
    expect(view.root.get_by_test_id("notices")).to_contain_text("checked at step 60")
    page.evaluate("""() => {
      const height = Object.getOwnPropertyDescriptor(HTMLElement.prototype, "offsetHeight");
      const get = function () { window.measured = 1 + (window.measured ?? 0); return height.get.call(this); };
      Object.defineProperty(document.querySelector("[data-testid=notices]"), "offsetHeight", { get });
    }""")
    for step, is_measured in ((70, False), (100, True)):  # a longer text may be higher
        run.advance(10)
        run.consistency = ReplicaCheckResult(step, (), None)
        view.update()
        expect(view.root.get_by_test_id("notices")).to_contain_text(f"checked at step {step}")
        assert page.evaluate("() => (window.measured ?? 0) > 0") == is_measured


def test_each_metric_has_a_chart(page: Page, tmp_path: Path):
    run = make_source(2)
    for step in (50, 100, 150):
        run.history.add(Evaluation(step, 100, {"loss": 1.0, "accuracy": step / 200, "<b>f1</b>": 0.5}))
    view = StaticView(page, run)
    charts = view.root.get_by_test_id("metric-chart")
    expect(charts).to_have_count(2)
    expect(charts.first.locator("h3")).to_contain_text("accuracy validation, last 0.750, from 0.250 to 0.750")
    expect(charts.last.locator("h3")).to_contain_text("<b>f1</b>")
    path = charts.first.locator("path.dtk-line")
    assert len(re.findall("[ML]", path.get_attribute("d") or "")) == 3
    run.history.add(Evaluation(220, 100, {"accuracy": 0.9}))
    view.update()
    expect(charts.first.locator("h3")).to_contain_text("last 0.900")
    assert list_overflowing(page) == []
    view.screenshot(Path(os.environ.get("DTKIT_SCREENSHOTS", tmp_path)) / "metrics.png")


def test_an_evaluation_ahead_of_the_curves_is_drawn_with_them(page: Page):
    """Its line left the chart at the top, and the label was another point's."""
    run = make_source(2)
    for step, accuracy in ((50, 0.25), (100, 0.5), (run.step + 40, 0.75)):
        run.history.add(Evaluation(step, 100, {"accuracy": accuracy}))
    view = StaticView(page, run)
    metric = view.root.get_by_test_id("metric-chart")
    assert len(re.findall("[ML]", metric.locator("path.dtk-line").get_attribute("d") or "")) == 2
    expect(metric.locator(".dtk-labels text")).to_have_text("0.750")
    expect(metric.locator("h3")).to_contain_text("last 0.750")  # as the tile
    run.advance(60)
    view.update()
    assert len(re.findall("[ML]", metric.locator("path.dtk-line").get_attribute("d") or "")) == 3
    expect(metric.locator("h3")).to_contain_text("last 0.750")


def test_all_evaluations_are_drawn(page: Page):
    """The last ones alone would make a long run look as if it had begun late."""
    run = make_source(2)
    for step in range(1, 321):
        run.history.add(Evaluation(step, 1, {"loss": 1 / step}))
    view = StaticView(page, run)
    for step in range(321, 341):
        run.history.add(Evaluation(step, 1, {"loss": 1 / step}))
        view.update()
    drawn = view.root.get_by_test_id("loss-chart").locator("path.dtk-chain").get_attribute("d") or ""
    assert len(re.findall("[ML]", drawn)) == 340


def test_patterns_of_two_modules_have_different_names(page: Page):
    """The view after a kernel restart has a module of its own, next to the old view."""
    names = []
    for _ in range(2):
        StaticView(page, make_source(2))
        names.append(page.eval_on_selector_all("pattern", "(all) => all.map((pattern) => pattern.id)"))
    assert names[0]
    assert not set(names[0]) & set(names[1])


def test_the_focus_stays_in_the_view_after_stop(page: Page):
    source = FakeSource(ranks=2)
    source.advance(20)
    view = StaticView(page, source)
    stop = view.root.get_by_test_id("stop")
    stop.click()
    stop.click()

    expect(view.root.get_by_test_id("pause")).to_be_focused()
    source.end(State.STOPPED)
    view.update()
    page.wait_for_function("(root) => root.getRootNode().activeElement === root", arg=view.root.element_handle())

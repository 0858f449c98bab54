"""The live view by itself, in a real browser: any number of nodes, both themes, narrow and wide, mouse and keyboard."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

import dtkit
from dtkit.dashboard.figures import render
from dtkit.dashboard.live.comparison_widget import ComparisonMessageBuilder, ComparisonWidget
from dtkit.dashboard.summary.timing import PHASES, compute_step_timing
from dtkit.types import Evaluation, ReplicaCheckResult, State
from tests.support.fake_source import FakeSource
from tests.support.lab import Look
from tests.support.marks import slow
from tests.support.still import Still, plain, put

pytestmark = pytest.mark.browser

NARROW, WIDE = Look("light", 600, 900), Look("dark", 1400, 900)


def source(ranks: int, *, slow: bool = True) -> FakeSource:
    """A run with something in every panel."""
    made = FakeSource(ranks=ranks, strips=True)
    if slow:
        made.slowness = made.delay_factors = {1: 1.6}
    made.consistency = ReplicaCheckResult(300, (), None)
    made.event("start", "the parameters were broadcast from node 0")
    made.advance(200)
    made.history.add(Evaluation(200, 100, {"loss": 0.7}))
    made.lr = 0.01
    made.event("lr", "learning rate set to 0.01")
    made.advance(100)
    if ranks > 8:
        made.lose(11)
    made.advance(40)
    return made


def overflowing(page: Page) -> list[str]:
    """What stands out of the dashboard on either side, or is cut off where it stands."""
    found: list[str] = page.evaluate("""() => {
      const root = document.querySelector(".dtkit").getBoundingClientRect();
      const out = [...document.querySelectorAll(".dtkit :is(text, button, li, h2, h3, p, .dtk-value, .dtk-note)")]
        .filter((el) => el.getClientRects().length && !el.closest(".dtk-scroll, .dtk-hidden"))
        .filter((el) => {
          const box = el.getBoundingClientRect();
          const cut = !el.closest("svg") && el.clientWidth && el.scrollWidth > el.clientWidth + 1;
          return cut || box.left < root.left || box.right > root.right;
        });
      return out.map((el) => el.textContent);
    }""")
    return found


@pytest.mark.parametrize("ranks", [slow(1), slow(2), 4, slow(8), slow(16), slow(256)])
@pytest.mark.parametrize("look", [NARROW, slow(WIDE)], indirect=True, ids=["light-narrow", "dark-wide"])
def test_it_fits_and_is_drawn(page: Page, look: Look, ranks: int, tmp_path: Path):
    view = Still(page, source(ranks, slow=ranks > 1), look.theme)
    shots = Path(os.environ.get("DTKIT_SCREENSHOTS", tmp_path))
    view.screenshot(shots / f"dashboard-{ranks}-{look.theme}-{look.width}.png")
    assert overflowing(page) == []
    assert page.locator(".dtk-broken").count() == 0
    expect(view.root).to_have_attribute("data-theme", look.theme)
    assert page.locator(".dtk-tile").count() == 5
    bars = ranks if ranks <= 8 else 3
    assert view.root.get_by_test_id("time-panel").locator(".dtk-row").count() == bars
    lines = view.root.get_by_test_id("loss-chart").locator("path.dtk-line:not([d=''])")
    # Of many nodes the mean, the one that is slow and the one that is lost.
    assert lines.count() == (1 if ranks == 1 else ranks + 1 if ranks <= 8 else 3)
    for chart in ("gradient-norm-chart", "learning-rate-chart"):
        assert view.root.get_by_test_id(chart).locator("path.dtk-line.dtk-only").get_attribute("d")


def test_the_bars_are_the_numbers_of_the_kept_picture(page: Page):
    made = source(4)
    view = Still(page, made)
    found = compute_step_timing(made.history, 4)
    for rank in range(4):
        row = view.root.locator(f".dtk-row[data-rank='{rank}']")
        wide = [float(row.locator(f"[data-phase={phase}]").get_attribute("width") or 0) for phase in PHASES]
        shares = found.seconds[rank] / found.seconds[rank].sum()
        assert [part / sum(wide) for part in wide] == pytest.approx(list(shares), abs=2e-3)
    expect(view.root.get_by_test_id("straggler")).to_have_text(f"▲ {found.straggler.text}")
    assert view.root.locator(".dtk-slow").get_attribute("data-rank") == "1"


@pytest.mark.slow
def test_stages_of_a_pipeline_have_no_loss_and_are_not_slow(page: Page):
    made = FakeSource(ranks=2, stages=2)
    made.slowness = {1: 2.0}
    made.advance(60)
    made.nodes = [dataclasses.replace(node, memory_total=4_630_000) for node in made.nodes]
    view = Still(page, made)
    losses = view.root.get_by_test_id("loss-chart")
    assert losses.locator("path.dtk-line:not([d=''])").count() == 2
    assert losses.locator(".dtk-labels text").all_text_contents() in (["node 1", "mean"], ["mean", "node 1"])
    assert "all" in view.root.get_by_test_id("throughput-chart").locator(".dtk-labels text").all_text_contents()
    expect(view.root.get_by_test_id("throughput-chart").locator(".dtk-note")).to_have_text(
        "samples/s without waiting, and all"
    )
    rows = view.root.get_by_test_id("nodes-table").locator("tbody tr")
    assert [row.locator("td").nth(6).text_content() == "—" for row in rows.all()] == [True, False]
    assert rows.first.locator("td").nth(4).text_content() == "315 MB of 4.63 MB"
    expect(view.root.get_by_test_id("straggler")).to_be_hidden()


@pytest.mark.slow
def test_phases_have_textures_of_their_own(page: Page):
    view = Still(page, source(2))
    fills = view.root.locator(".dtk-row[data-rank='0'] .dtk-phase").evaluate_all(
        "(all) => all.map((el) => getComputedStyle(el).fill)"
    )
    assert len(set(fills)) == len(PHASES)
    assert sum(fill.startswith("url(") for fill in fills) == 5


@pytest.mark.slow
def test_no_straggler_no_words(page: Page):
    view = Still(page, source(4, slow=False))
    expect(view.root.get_by_test_id("time-panel")).to_be_visible()
    expect(view.root.get_by_test_id("straggler")).to_be_hidden()


@pytest.mark.slow
def test_whether_the_ranks_agree_is_said_and_a_difference_is_an_alert(page: Page):
    made = source(4)
    view = Still(page, made)
    alert, remarks = view.root.get_by_test_id("alert"), view.root.get_by_test_id("remarks")
    expect(alert).to_be_hidden()
    expect(remarks.locator("li")).to_have_text(
        ["✓ parameters identical on 4 nodes, checked at step 300", "▼ node 1 slowed 1.6x on purpose"]
    )
    made.consistency, made.delay_factors = ReplicaCheckResult(350, (3,), 310), {}
    view.update()
    expect(alert).to_be_visible()
    expect(alert).to_have_attribute("role", "alert")
    expect(alert).to_have_text("✕ node 3 differs since step 310: parameters are no longer equal")
    expect(remarks).to_be_hidden()


@pytest.mark.slow
def test_a_stuck_node_is_seen_everywhere_and_told_politely(page: Page):
    made = source(4, slow=False)
    view = Still(page, made)
    tile, row = view.root.get_by_test_id("tiles").locator(".dtk-tile").last, "tbody tr[data-rank='2']"
    made.stick(2)
    view.update()
    expect(tile).to_have_text("nodes4 / 4⊘ node 2 stuck: forward, 12 s")
    expect(tile.locator(".dtk-alert")).to_be_visible()
    expect(view.root.get_by_test_id("alert")).to_contain_text("⊘ node 2 is stuck in forward of step 341")
    expect(view.root.get_by_test_id("nodes-table").locator(row).get_by_role("button")).to_have_text("⊘ 2")
    for chart in ("loss-chart", "throughput-chart"):
        panel = view.root.get_by_test_id(chart)
        assert panel.locator(".dtk-mark-stuck text").text_content() == "⊘"
        assert "⊘ node 2" in panel.locator(".dtk-labels text").all_text_contents()
    expect(view.root.get_by_test_id("summary")).to_contain_text("⊘ node 2 stuck: forward, 12 s")  # at once
    assert overflowing(page) == []
    made.stall_report = None
    view.update()
    expect(view.root.get_by_test_id("alert")).to_be_hidden()
    expect(view.root.get_by_test_id("summary")).not_to_contain_text("stuck")


@pytest.mark.slow
def test_nodes_that_were_left_out_are_no_longer_counted(page: Page):
    made = source(4, slow=False)
    made.shrink(3)
    made.advance(60)
    view = Still(page, made, offers=["slow", "kill"])
    expect(view.root.locator("header .dtk-note")).to_contain_text("3 nodes (was 4)")
    expect(view.root.get_by_test_id("tiles").locator(".dtk-tile").last).to_have_text("nodes3 / 3was 4: 1 left out")
    assert view.root.get_by_test_id("drill-node").locator("option").count() == 3
    assert view.root.get_by_test_id("nodes-table").locator("tbody tr").count() == 3
    assert view.root.get_by_test_id("time-panel").locator(".dtk-row").count() == 3
    assert "○ node 3" in view.root.get_by_test_id("loss-chart").locator(".dtk-labels text").all_text_contents()


@pytest.mark.slow
def test_bars_are_read_with_the_keyboard(page: Page):
    view = Still(page, source(4))
    panel = view.root.get_by_test_id("time-panel")
    note = panel.locator("h3 .dtk-note")
    expect(note).to_have_text("ms, mean of the last 50 steps")
    rows = panel.locator(".dtk-row")
    assert rows.evaluate_all("(all) => all.map((el) => el.tabIndex)") == [0, -1, -1, -1]  # one stop for Tab
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
def test_a_bar_keeps_the_focus_while_steps_come_in(page: Page):
    made = source(4)
    view = Still(page, made)
    row = view.root.locator(".dtk-row[data-rank='2']")
    row.focus()
    for _ in range(3):
        made.advance(5)
        view.update()
    expect(row).to_be_focused()


@pytest.mark.slow
def test_a_step_is_pointed_at_with_arrow_keys_in_all_charts(page: Page):
    view = Still(page, source(2))
    page.locator("[data-testid=loss-chart] svg").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    for chart in ("loss-chart", "gradient-norm-chart"):
        expect(view.root.get_by_test_id(chart).locator("h3 .dtk-note")).to_have_text(re.compile(r"^step 2: [\d.]+"))
    page.keyboard.press("Escape")
    expect(view.root.get_by_test_id("loss-chart").locator("h3 .dtk-note")).to_have_text("per node and mean")


def test_buttons_ask_by_mouse_and_by_keyboard(page: Page):
    made = source(2)
    view = Still(page, made)
    view.root.get_by_test_id("pause").click()
    expect(view.root.get_by_test_id("pause")).to_have_text(re.compile("Pausing"))
    made.state = State.PAUSED
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
def test_before_the_first_step_only_what_is_known_is_shown(page: Page):
    made = FakeSource(ranks=2)
    made.state = State.PENDING
    view = Still(page, made)
    for panel in ("time-panel", "gradient-norm-chart", "learning-rate-chart"):
        expect(view.root.get_by_test_id(panel)).to_be_hidden()
    assert view.root.get_by_test_id("loss-chart").locator("text").all_text_contents() == ["no step yet"]
    made.state = State.RUNNING
    made.advance(10)
    view.update()
    for panel in ("time-panel", "gradient-norm-chart"):
        expect(view.root.get_by_test_id(panel)).to_be_visible()


def test_text_of_engines_is_shown_as_text(page: Page):
    made = source(2)
    made.spec = type(made.spec)(**{**made.spec.__dict__, "name": "<img src=x onerror=alert(1)>"})
    made.event("print", "<script>alert(1)</script>", rank=1)
    view = Still(page, made)
    expect(view.root.locator("h2")).to_have_text("<img src=x onerror=alert(1)>")
    expect(view.root.get_by_test_id("log")).to_contain_text("[1] <script>alert(1)</script>")
    assert view.root.locator("img, script").count() == 0


@pytest.mark.slow
def test_an_error_in_a_panel_stays_in_it(page: Page):
    made = source(2)
    view = Still(page, made)
    page.evaluate("""() => {
      const real = window.real = Element.prototype.setAttribute;
      Element.prototype.setAttribute = function (name, value) {
        if (this.dataset?.phase) throw new Error("drawn wrongly");
        return real.call(this, name, value);
      };
    }""")
    made.slowness = {0: 3.0}
    made.advance(60)
    view.update()
    expect(page.locator(".dtk-broken")).to_have_text("this panel failed: drawn wrongly")
    assert view.root.get_by_test_id("time-panel").locator(".dtk-broken").count() == 1
    expect(view.root).to_have_attribute("data-step", str(made.step))
    page.evaluate("() => { Element.prototype.setAttribute = window.real; }")
    made.advance(5)
    view.update()
    expect(page.locator(".dtk-broken")).to_have_count(0)


# -- many nodes, and one that is looked at ------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [16, slow(256)])
def test_many_nodes_are_squares_with_signs(page: Page, ranks: int):
    view = Still(page, source(ranks))
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
def test_a_node_is_highlighted_in_all_panels_by_mouse_and_keyboard(page: Page):
    view = Still(page, source(16))
    waffle = view.root.get_by_test_id("waffle")
    waffle.get_by_role("option").nth(5).click()
    assert page.evaluate("() => window.sent.at(-1)") == {"select": 5}
    view.choose(5)  # the kernel answers with the node's lines
    for chart in ("loss-chart", "throughput-chart"):
        line = view.root.get_by_test_id(chart).locator("path.dtk-picked")
        expect(line).to_have_attribute("data-rank", "5")
        assert line.get_attribute("d")
    for place in ("nodes-table", "memory-panel", "time-panel", "timeline-panel"):
        assert view.root.get_by_test_id(place).locator(".dtk-picked").count() == 1
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
def test_of_few_nodes_a_name_or_a_row_is_pressed(page: Page):
    view = Still(page, source(4))
    expect(view.root.get_by_test_id("waffle-panel")).to_be_hidden()
    view.root.get_by_test_id("nodes-table").get_by_role("button", name="highlight node 2").press("Enter")
    lines = view.root.get_by_test_id("loss-chart")
    expect(lines.locator("path.dtk-picked")).to_have_attribute("data-rank", "2")
    expect(lines.locator("path.dtk-faded")).to_have_count(3)
    view.root.get_by_test_id("time-panel").locator(".dtk-row[data-rank='2']").press("Enter")  # once more: no longer
    expect(lines.locator("path.dtk-picked")).to_have_count(0)


# -- the timeline -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pipelines_micro_batches_are_numbered(page: Page):
    made = FakeSource(ranks=4, stages=4, strips=True)
    made.advance(30)
    view = Still(page, made)
    panel = view.root.get_by_test_id("timeline-panel")
    assert panel.locator(".dtk-name").all_text_contents() == [f"node {k}" for k in range(4)]
    assert panel.locator("[data-phase=forward]").count() == 2  # all boxes of a kind are one path; and the legend's
    assert panel.locator(".dtk-strip-numbers text").all_text_contents() == ["0", "1", "2", "3"] * 8
    expect(panel.locator("h3 .dtk-note")).to_have_text(re.compile(r"^step 30 · bubble \d+ % measured, 43 % by formula"))
    label = panel.locator("svg[role=img]").get_attribute("aria-label") or ""
    assert re.search(r"node 0 works 5\d %, node 1 works", label)


@pytest.mark.slow
def test_a_timeline_that_fails_says_so_in_its_panel(page: Page, monkeypatch: pytest.MonkeyPatch):
    made = source(2)
    monkeypatch.setattr(FakeSource, "timeline", property(lambda _: 1 / 0))
    view = Still(page, made)
    panel = view.root.get_by_test_id("timeline-panel")
    expect(panel.locator(".dtk-broken")).to_have_text("this panel failed: ZeroDivisionError: division by zero")
    assert page.locator(".dtk-broken").count() == 1


# -- controls -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_drills_are_there_where_they_are_offered(page: Page):
    made = source(4)
    view = Still(page, made)
    for name in ("drill-node", "slow", "kill", "save"):
        expect(view.root.get_by_test_id(name)).to_be_hidden()
    view = Still(page, made, offers=["slow", "kill", "save"])
    view.root.get_by_test_id("drill-node").select_option("3")
    view.root.get_by_test_id("drill-factor").select_option("4")
    view.root.get_by_test_id("slow").click()
    view.root.get_by_test_id("kill").click()
    expect(view.root.get_by_test_id("kill")).to_have_text("✕ Really kill node 3?")
    view.root.get_by_test_id("kill").press("Enter")
    view.root.get_by_test_id("save").press("Space")
    assert view.sent == [
        {"command": "slow", "value": {"rank": 3, "factor": 4}},
        {"command": "kill", "value": {"rank": 3}},
        {"command": "save", "value": None},
    ]
    expect(view.root.get_by_test_id("save")).to_be_disabled()
    assert overflowing(page) == []


@pytest.mark.slow
def test_what_took_effect_is_said_politely(page: Page):
    view = Still(page, source(2))
    effect = view.root.get_by_test_id("effect")
    expect(effect).to_have_text("")
    view.root.get_by_test_id("pause").click()
    view.effect("paused at step 340 on all nodes")
    expect(effect).to_have_text("✓ paused at step 340 on all nodes")
    expect(effect).to_have_attribute("role", "status")
    expect(view.root.get_by_test_id("pause")).to_have_text(re.compile("Pause"))  # no longer asking


# -- the user's own panels ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_users_panel_and_its_error_are_shown_apart(page: Page):
    view = Still(page, source(2))
    figure = render.create_figure(6, 2.3)
    view.show("Mine", render.render_png(figure))
    view.show("<b>Broken</b>", b"", "RuntimeError: <script>")
    own = view.root.get_by_test_id("custom-panel")
    expect(own).to_have_count(2)
    page.wait_for_function("() => document.querySelector('[data-name=Mine] img').naturalWidth > 500")
    expect(own.nth(1)).to_have_text("<b>Broken</b>: this panel failed: RuntimeError: <script>")
    assert view.root.locator("script, b").count() == 0
    view.show("<b>Broken</b>", render.render_png(figure))
    expect(own.nth(1).locator("p")).to_be_hidden()


# -- what asks for less, or for other senses ----------------------------------------------------------------------


@pytest.mark.slow
def test_every_panel_has_a_name_and_nothing_moves_where_that_is_asked_for(page: Page):
    page.emulate_media(reduced_motion="reduce")
    view = Still(page, source(16))
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
def test_runs_are_compared_live_with_a_legend_that_tells_them_apart(page: Page):
    runs = [FakeSource(steps=400, seed=k, name=f"<i>Run</i> {k}") for k in range(3)]
    for k, run in enumerate(runs):
        run.advance(300 - 100 * k)
    found = dtkit.compare(runs, labels=["one", "<b>two</b>", "three"])
    feed = ComparisonMessageBuilder(found)
    put(page, str(ComparisonWidget._esm), feed.build_snapshot(), "light")
    root = page.get_by_test_id("dtkit-comparison")
    expect(root).to_have_attribute("data-state", "running")
    rows = root.get_by_test_id("runs-table").locator("tbody tr")
    expect(rows.locator("th")).to_have_text([" 1: one", " 2: <b>two</b>", " 3: three"])
    lines = root.locator(".dtk-lines path:not([d=''])")
    assert lines.count() == 3
    looks = lines.evaluate_all("(all) => all.map((el) => getComputedStyle(el).strokeDasharray)")
    assert len(set(looks)) == 3  # without colours too
    assert root.locator(".dtk-labels text").all_text_contents() == ["run 3", "run 2", "run 1"]
    runs[0].advance(50)
    message = feed.build_snapshot()
    page.evaluate("([content, buffers]) => window.hear(content, buffers)", plain(message))
    expect(rows.first.locator("td").nth(1)).to_have_text("350")
    assert root.locator("b, i").count() == 0

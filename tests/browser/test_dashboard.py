"""The live view by itself, in a real browser: any number of nodes, both themes, narrow and wide, mouse and keyboard."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from dtkit.dashboard.timing import PHASES, timing
from dtkit.records import Consistency, Evaluation, State
from tests.browser.lab import Look
from tests.browser.still import Still
from tests.fake_source import FakeSource

pytestmark = pytest.mark.browser

NARROW, WIDE = Look("light", 600, 900), Look("dark", 1400, 900)


def source(ranks: int, *, slow: bool = True) -> FakeSource:
    """A run with something in every panel."""
    made = FakeSource(ranks=ranks)
    if slow:
        made.slow = made.slowed = {1: 1.6}
    made.consistency = Consistency(300, (), None)
    made.event("start", "the parameters were broadcast from node 0")
    made.advance(200)
    made.history.add(Evaluation(200, 100, {"loss": 0.7}))
    made.lr = 0.01
    made.event("lr", "learning rate set to 0.01")
    made.advance(140)
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


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 256])
@pytest.mark.parametrize("look", [NARROW, WIDE], indirect=True, ids=["light-narrow", "dark-wide"])
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
    assert lines.count() == (1 if ranks == 1 or ranks > 8 else ranks + 1)
    for chart in ("gradient-norm-chart", "learning-rate-chart"):
        assert view.root.get_by_test_id(chart).locator("path.dtk-line.dtk-only").get_attribute("d")


def test_the_bars_are_the_numbers_of_the_kept_picture(page: Page):
    made = source(4)
    view = Still(page, made)
    found = timing(made.history, 4)
    for rank in range(4):
        row = view.root.locator(f".dtk-row[data-rank='{rank}']")
        wide = [float(row.locator(f"[data-phase={phase}]").get_attribute("width") or 0) for phase in PHASES]
        shares = found.seconds[rank] / found.seconds[rank].sum()
        assert [part / sum(wide) for part in wide] == pytest.approx(list(shares), abs=2e-3)
    expect(view.root.get_by_test_id("straggler")).to_have_text(f"▲ {found.straggler.text}")
    assert view.root.locator(".dtk-slow").get_attribute("data-rank") == "1"


def test_stages_of_a_pipeline_have_no_loss_and_are_not_slow(page: Page):
    made = FakeSource(ranks=2, stages=2)
    made.slow = {1: 2.0}
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


def test_phases_have_textures_of_their_own(page: Page):
    view = Still(page, source(2))
    fills = view.root.locator(".dtk-row[data-rank='0'] .dtk-phase").evaluate_all(
        "(all) => all.map((el) => getComputedStyle(el).fill)"
    )
    assert len(set(fills)) == len(PHASES)
    assert sum(fill.startswith("url(") for fill in fills) == 5


def test_no_straggler_no_words(page: Page):
    view = Still(page, source(4, slow=False))
    expect(view.root.get_by_test_id("time-panel")).to_be_visible()
    expect(view.root.get_by_test_id("straggler")).to_be_hidden()


def test_whether_the_ranks_agree_is_said_and_a_difference_is_an_alert(page: Page):
    made = source(4)
    view = Still(page, made)
    alert, remarks = view.root.get_by_test_id("alert"), view.root.get_by_test_id("remarks")
    expect(alert).to_be_hidden()
    expect(remarks.locator("li")).to_have_text(
        ["✓ parameters identical on 4 nodes, checked at step 300", "▼ node 1 slowed 1.6x on purpose"]
    )
    made.consistency, made.slowed = Consistency(350, (3,), 310), {}
    view.update()
    expect(alert).to_be_visible()
    expect(alert).to_have_attribute("role", "alert")
    expect(alert).to_have_text("✕ node 3 differs since step 310: parameters are no longer equal")
    expect(remarks).to_be_hidden()


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


def test_a_bar_keeps_the_focus_while_steps_come_in(page: Page):
    made = source(4)
    view = Still(page, made)
    row = view.root.locator(".dtk-row[data-rank='2']")
    row.focus()
    for _ in range(3):
        made.advance(5)
        view.update()
    expect(row).to_be_focused()


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


def test_before_the_first_step_only_what_is_known_is_shown(page: Page):
    made = FakeSource(ranks=2)
    made.state = State.PENDING
    view = Still(page, made)
    for panel in ("time-panel", "gradient-norm-chart", "learning-rate-chart"):
        expect(view.root.get_by_test_id(panel)).to_be_hidden()
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
    made.slow = {0: 3.0}
    made.advance(60)
    view.update()
    expect(page.locator(".dtk-broken")).to_have_text("this panel failed: drawn wrongly")
    assert view.root.get_by_test_id("time-panel").locator(".dtk-broken").count() == 1
    expect(view.root).to_have_attribute("data-step", str(made.step))
    page.evaluate("() => { Element.prototype.setAttribute = window.real; }")
    made.advance(5)
    view.update()
    expect(page.locator(".dtk-broken")).to_have_count(0)

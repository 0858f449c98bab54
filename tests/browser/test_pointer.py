"""What the live view draws while a person points at it, and the order in which it draws what they wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from dtkit.dashboard.live import messages
from dtkit.types import State
from tests.support.fake_source import FakeSource
from tests.support.static_view import StaticView, encode_message

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

_PAINTED = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
_WATCH = """() => {
  window.changes = [];
  const note = (records) => {
    for (const { target, attributeName } of records) {
      const el = target.nodeType === Node.ELEMENT_NODE ? target : target.parentElement;
      if (!el || el.closest(".dtk-tip, h3 .dtk-note")) continue;
      window.changes.push(`${el.tagName.toLowerCase()}.${el.getAttribute("class")} ${attributeName ?? "children"}`);
    }
  };
  const all = { subtree: true, childList: true, attributes: true, characterData: true };
  new MutationObserver(note).observe(document.querySelector(".dtkit"), all);
}"""


def make_view(page: Page, run: FakeSource | None = None, *, ticks: bool = False) -> StaticView:
    """Return the view of a run after 300 steps, whose clock stands still unless it ticks."""
    if not ticks:
        page.evaluate("() => { window.setInterval = () => 0; }")
    run = run or FakeSource(ranks=2, strips=True)
    run.advance(300)
    return StaticView(page, run)


def find_box(view: StaticView, panel: str) -> dict[str, Any]:
    """Return the place of a panel's picture in the page."""
    svg = view.root.get_by_test_id(panel).locator("svg.dtk-chart")
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    assert box
    return dict(box)


@pytest.mark.parametrize("panel", ["loss-chart", "time-panel"])
def test_a_moving_pointer_draws_no_picture_again(page: Page, panel: str):
    """Each move drew all panels in sight: half a core while a person pointed at a chart."""
    view = make_view(page)
    box = find_box(view, panel)
    page.mouse.move(box["x"] + 100, box["y"] + 20)
    expect(view.root.get_by_test_id(panel).get_by_test_id("tooltip")).to_be_visible()
    page.evaluate(_PAINTED)
    page.evaluate(_WATCH)
    for moved in range(10):
        page.mouse.move(box["x"] + 110 + 10 * moved, box["y"] + 20)
        page.evaluate(_PAINTED)
    changes = set(page.evaluate("() => window.changes"))
    assert changes <= {"i.dtk-cross style", "i.dtk-dot-at style"}
    assert bool(changes) == (panel == "loss-chart")


def test_the_cursor_is_at_the_pointed_step_in_all_charts(page: Page):
    view = make_view(page)
    box = find_box(view, "loss-chart")
    x = box["x"] + 200
    page.mouse.move(x, box["y"] + 40)
    for chart in ("loss-chart", "throughput-chart"):
        cross = view.root.get_by_test_id(chart).locator(".dtk-cross")
        expect(cross).to_be_visible()
        svg, line = view.root.get_by_test_id(chart).locator("svg.dtk-chart").bounding_box(), cross.bounding_box()
        assert svg
        assert line
        assert abs(line["x"] - svg["x"] - 200) < 3
        assert abs(line["y"] - svg["y"] - 14) < 1.5
        assert abs(line["y"] + line["height"] - (svg["y"] + svg["height"] - 22)) < 1.5
    path = view.root.get_by_test_id("loss-chart").locator("path.dtk-line.dtk-all").bounding_box()
    dot = view.root.get_by_test_id("loss-chart").locator(".dtk-dot-at").bounding_box()
    assert path
    assert dot
    assert path["y"] - 1 <= dot["y"] + dot["height"] / 2 <= path["y"] + path["height"] + 1
    page.mouse.move(2, 2)
    expect(view.root.locator(".dtk-cross").first).to_be_hidden()


def test_the_chart_at_the_pointer_is_drawn_more_often_than_the_others(page: Page, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(messages, "has_spare_core", lambda _run: False)
    run = FakeSource(ranks=2, strips=True)
    view = make_view(page, run, ticks=True)
    box = find_box(view, "loss-chart")
    page.mouse.move(box["x"] + 200, box["y"] + 40)
    page.context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": 4})  # drawings that take long
    for _ in range(6):  # which the page measures
        run.advance(30)
        view.update()
    page.evaluate("""() => {
      window.drawn = {};
      for (const name of ["loss-chart", "throughput-chart"]) {
        window.drawn[name] = 0;
        const line = document.querySelector(`[data-testid=${name}] path.dtk-line[data-rank='0']`);
        const count = new MutationObserver(() => { window.drawn[name] += 1; });
        count.observe(line, { attributes: true, attributeFilter: ["d"] });
      }
    }""")
    for _ in range(12):
        run.advance(30)
        view.update(is_drawn=False)
        # sleeps: messages come while drawings wait
        page.wait_for_timeout(800)
    drawn = page.evaluate("() => window.drawn")
    assert drawn["loss-chart"] >= drawn["throughput-chart"] + 2, drawn


def test_a_new_state_is_drawn_before_the_charts(page: Page):
    """All panels took a tenth of a second and more, and the header waited for them."""
    run = FakeSource(ranks=2, strips=True)
    view = make_view(page, run)
    page.evaluate(_PAINTED)
    page.evaluate("""() => {
      const drawn = () => ({
        state: document.querySelector(".dtk-chip").textContent,
        chart: document.querySelector("[data-testid=loss-chart] path.dtk-line[data-rank='0']").getAttribute("d"),
      });
      window.before = drawn();
      window.when = {};
      let frames = 0;
      const note = () => {
        frames += 1;
        for (const [name, value] of Object.entries(drawn())) {
          if (value !== window.before[name]) window.when[name] ??= frames;
        }
        requestAnimationFrame(note);
      };
      requestAnimationFrame(note);
    }""")
    run.advance(30)
    run.state = State.PAUSED
    view.update()
    page.wait_for_function("() => window.when.state && window.when.chart")
    when = page.evaluate("() => window.when")
    assert when["state"] < when["chart"], when


def test_a_new_text_is_written_into_the_node_of_the_last_one(page: Page):
    """A new node made the browser look for rules on children again: 6 to 15 ms in JupyterLab."""
    run = FakeSource(ranks=2, strips=True)
    view = make_view(page, run)
    page.evaluate("() => { window.node = document.querySelector('.dtk-ends span').firstChild; }")
    before = page.evaluate("() => window.node.data")
    run.advance(30)
    view.update()
    assert page.evaluate("(before) => [window.node.isConnected, window.node.data !== before]", before) == [True, True]


def test_a_text_changes_numbers_and_draws_no_line(page: Page):
    run = FakeSource(ranks=2, strips=True)
    view = make_view(page, run)
    page.evaluate(_PAINTED)
    run.advance(30)
    page.evaluate(_WATCH)
    text = encode_message(view._feed.build_text())
    page.evaluate("([content, buffers]) => window.receive(content, buffers)", text)
    expect(view.root.locator(".dtk-ends")).to_contain_text("step 330 of")
    page.evaluate(_PAINTED)
    changes = page.evaluate("() => window.changes")
    drawn = [change for change in changes if change.startswith(("path", "text", "svg", "g", "line", "rect"))]
    assert set(drawn) <= {
        "text.dtk-only children",
        "text.dtk-all children",
    }  # numbers at the ends of lines, as in tiles
    view.update()  # the next change applies
    assert view.root.get_attribute("data-step") == "330"


def test_a_view_that_is_scrolled_out_of_sight_is_reported_as_hidden(page: Page):
    make_view(page)
    page.evaluate("() => { document.body.style.paddingBottom = '5000px'; }")
    listed = "(level) => window.sent.filter(({ attention }) => attention).at(-1)?.attention.level === level"
    page.wait_for_function(listed, arg="watched", timeout=10_000)
    page.evaluate("() => scrollTo(0, 100_000)")
    page.wait_for_function(listed, arg="hidden", timeout=10_000)
    page.evaluate("() => scrollTo(0, 0)")
    page.wait_for_function(listed, arg="watched", timeout=10_000)

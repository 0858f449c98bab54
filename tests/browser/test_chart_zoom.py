"""What a zoomed chart shows: lines within the plot, names beside it, and no selected text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from dtkit.dashboard.live.series_feed import SeriesFeed
from dtkit.history.scalars import ScalarRecord
from tests.support.fake_source import FakeSource
from tests.support.static_view import StaticView, encode_message

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.browser

PLOT_LEFT, LABEL_ROOM = 50, 16 + 6.9 * len("with waiting")  # as in chart.js


def show_samples(page: Page, theme: str = "light") -> StaticView:
    """Return the view of a run with samples of the machines' use at each 50th of its 300 steps."""
    run = FakeSource(ranks=2, strips=True)
    run.advance(300)
    for rank in (0, 1):
        cpu = [(step, 0.5 + 0.2 * rank + step / 1000, 1.0) for step in range(1, 301, 50)]
        run.history.add(ScalarRecord(rank, {"system/CPU (cores)": cpu}))
    view = StaticView(page, run, theme)
    message = SeriesFeed(run.history).build_message(is_last=True)
    assert message
    page.evaluate("([content, buffers]) => window.receive(content, buffers)", encode_message(message))
    view.update()
    return view


def drag(page: Page, svg: Locator, shares: tuple[float, float]) -> tuple[float, float]:
    """Drag over a part of a chart; return the left and right end of its plot, in pixels of the page."""
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    assert box
    left, right = box["x"] + PLOT_LEFT, box["x"] + box["width"] - LABEL_ROOM
    page.mouse.move(left + shares[0] * (right - left), box["y"] + 40)
    page.mouse.down()
    page.mouse.move(left + sum(shares) / 2 * (right - left), box["y"] + box["height"] - 4, steps=4)
    page.mouse.move(left + shares[1] * (right - left), box["y"] + box["height"] - 4, steps=4)
    page.mouse.up()
    return left, right


def test_dragging_over_a_chart_selects_no_text(page: Page):
    view = show_samples(page)
    page.evaluate(
        "() => { window.begun = []; document.addEventListener('selectstart', (e) => window.begun.push(e.type)); }"
    )
    drag(page, view.root.get_by_test_id("loss-chart").locator("svg.dtk-chart"), (0.3, 0.7))
    assert page.evaluate("() => [...window.begun, String(getSelection())]") == [""]


def test_the_range_that_is_dragged_stands_out_until_it_is_in_sight(page: Page):
    view = show_samples(page)
    svg = view.root.get_by_test_id("loss-chart").locator("svg.dtk-chart")
    box = svg.bounding_box()
    assert box
    page.mouse.move(box["x"] + 100, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 60, steps=4)
    dragged = svg.locator(".dtk-dragged rect")
    expect(dragged).to_have_attribute("width", "100")
    # All that makes it pale, of the element and those around it.
    share = dragged.evaluate("""(el) => { let share = Number(getComputedStyle(el).fillOpacity);
      for (let at = el; at; at = at.parentElement) share *= Number(getComputedStyle(at).opacity);
      return share; }""")
    assert share >= 0.2
    page.mouse.up()
    expect(dragged).to_be_hidden()


def test_titles_of_zoomed_charts_have_no_values_of_the_end(page: Page):
    run = FakeSource(ranks=2)
    run.advance(200)
    run.lr = 0.01
    run.event("lr", "learning rate 0.01")
    run.advance(100)
    view = StaticView(page, run)
    rate = view.root.get_by_test_id("learning-rate-chart").locator("h3 .dtk-note")
    speed = view.root.get_by_test_id("throughput-chart").locator("h3 .dtk-note")
    expect(rate).to_contain_text("0.01 since step 201")
    expect(speed).to_contain_text("with waiting 2")
    drag(page, view.root.get_by_test_id("loss-chart").locator("svg.dtk-chart"), (0.1, 0.5))
    page.mouse.move(0, 0)  # a title with the pointer in its chart is that of a step
    expect(rate).to_have_text("the same on all nodes")
    expect(speed).not_to_contain_text("with waiting")
    told = view.root.get_by_test_id("range")
    expect(told).to_have_text(re.compile(r"^only steps \d+ to \d+; newer hidden$"))
    view.root.get_by_test_id("reset-zoom").click()
    expect(told).to_have_text("")
    expect(rate).to_contain_text("0.01 since step 201")


def test_zoomed_lines_end_at_the_plot_and_their_name_is_beside_it(page: Page):
    view = show_samples(page)
    svg = view.root.get_by_test_id("system-chart").first.locator("svg.dtk-chart")
    left, right = drag(page, svg, (0.25, 0.62))
    view.root.get_by_test_id("reset-zoom").wait_for()
    clip = svg.locator("clipPath rect").evaluate("(r) => [r.x.baseVal.value, r.width.baseVal.value]")
    assert clip == pytest.approx([PLOT_LEFT, right - left], abs=1)
    # In one call: a chart that is drawn between two would replace its labels.
    starts = svg.locator(".dtk-labels text").evaluate_all(
        "(texts) => texts.map((text) => text.getBoundingClientRect().left)"
    )
    assert starts
    assert min(starts) > right


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_mean_stands_out_from_the_lines_of_its_nodes(page: Page, theme: str):
    view = show_samples(page, theme)
    chart = view.root.get_by_test_id("loss-chart")
    styles = """(path) => { const style = getComputedStyle(path);
      return [parseFloat(style.strokeWidth), Number(style.opacity), style.strokeDasharray]; }"""
    mean, node = (chart.locator(f"path.dtk-line{name}").evaluate(styles) for name in (".dtk-all", ".dtk-n0"))
    assert mean[0] >= 1.5 * node[0]
    assert mean[1:] == [1, "none"]
    assert 0.4 < node[1] < 0.8  # pale, and still seen
    drawn = chart.locator(".dtk-lines path").evaluate_all("(paths) => paths.map((path) => path.dataset.rank)")
    assert drawn[-1] == "all"  # a mean below lines of other colors has none of the legend's
    total = view.root.get_by_test_id("throughput-chart").locator("path.dtk-line.dtk-all").evaluate(styles)
    assert total[2] != "none"  # it may lie on the line of the slowest node


def test_the_mean_of_many_nodes_is_solid_as_that_of_few(page: Page):
    run = FakeSource(ranks=12)
    run.advance(60)
    view = StaticView(page, run)
    mean = view.root.get_by_test_id("loss-chart").locator("path.dtk-line.dtk-all")
    assert mean.evaluate("(path) => getComputedStyle(path).strokeDasharray") == "none"


def test_a_product_in_a_caption_stays_on_one_line(page: Page):
    note = show_samples(page).root.get_by_test_id("throughput-chart").locator("h3 .dtk-note")
    text = note.text_content() or ""
    assert re.search(r"\d\u00a0\W\u00a0\d", text)


def test_escape_leaves_the_full_screen_and_the_focus_returns(page: Page):
    view = show_samples(page)
    chart = view.root.get_by_test_id("loss-chart")
    chart.hover()
    button = chart.get_by_test_id("full-screen")
    button.click()
    page.wait_for_function("() => document.fullscreenElement !== null")
    chart.locator("svg.dtk-chart").focus()
    page.keyboard.press("Escape")
    page.wait_for_function("() => document.fullscreenElement === null", timeout=5000)
    expect(button).to_be_focused()
    expect(button).to_have_attribute("aria-pressed", "false")

"""The tools of the live charts in a real browser: zoom, smoothing, axes, limits, legend, tooltip, downloads, panels."""

from __future__ import annotations

import csv
import itertools
import os
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from dtkit.dashboard.live.series_feed import SeriesFeed
from dtkit.history.scalars import ScalarRecord
from dtkit.types import Evaluation, Event, State
from tests.support.fake_source import FakeSource
from tests.support.lab import Look
from tests.support.marks import slow
from tests.support.static_view import StaticView, encode_message

pytestmark = pytest.mark.browser

LOSS, LINE = "loss-chart", "path.dtk-line[data-rank='0']"
_PAINTED = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def make_view(page: Page, theme: str = "light", ranks: int = 2) -> StaticView:
    """Return the view of a run after 300 steps, with an evaluation."""
    run = FakeSource(ranks=ranks, strips=True)
    run.advance(300)
    run.history.add(Evaluation(200, 100, {"loss": 0.7, "accuracy": 0.5}))
    return StaticView(page, run, theme)


def list_ticks(view: StaticView, chart: str = LOSS) -> list[str]:
    """Return the texts of both axes."""
    view.page.evaluate(_PAINTED)
    return view.root.get_by_test_id(chart).locator(".dtk-grid text").all_text_contents()


def get_plot(view: StaticView, chart: str = LOSS) -> tuple[float, float, float]:
    """Return the left and right end of a chart's plot, and a height within it, in pixels of the page."""
    svg = view.root.get_by_test_id(chart).locator("svg.dtk-chart")
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    assert box
    return box["x"] + 50, box["x"] + box["width"] - 99, box["y"] + 60


def test_dragging_zooms_all_charts_and_a_double_click_resets(page: Page):
    view = make_view(page)
    whole = list_ticks(view), list_ticks(view, "throughput-chart")
    left, right, y = get_plot(view)
    reset = view.root.get_by_test_id("reset-zoom")
    expect(reset).to_be_hidden()
    page.mouse.move(left + (right - left) / 3, y)
    page.mouse.down()
    page.mouse.move(left + (right - left) / 2, y, steps=4)
    page.mouse.move(left + (right - left) * 2 / 3, y, steps=4)
    page.mouse.up()
    expect(reset).to_be_visible()
    for chart, before in zip((LOSS, "throughput-chart"), whole, strict=True):
        steps = [int(text) for text in list_ticks(view, chart) if text.isdigit() and 90 <= int(text) <= 210]
        assert len(steps) >= 2, list_ticks(view, chart)
        assert list_ticks(view, chart) != before
    page.mouse.dblclick(left + 100, y)
    expect(reset).to_be_hidden()
    assert (list_ticks(view), list_ticks(view, "throughput-chart")) == whole


def test_keys_zoom_into_the_selected_step_and_back(page: Page):
    view = make_view(page)
    whole = list_ticks(view)
    chart = view.root.get_by_test_id(LOSS).locator("svg.dtk-chart")
    chart.focus()
    page.keyboard.press("Home")
    page.keyboard.press("+")
    expect(view.root.get_by_test_id("reset-zoom")).to_be_visible()
    assert "300" not in list_ticks(view)
    page.keyboard.press("0")
    expect(view.root.get_by_test_id("reset-zoom")).to_be_hidden()
    assert list_ticks(view) == whole


def test_smoothing_keeps_the_raw_line_pale(page: Page):
    view = make_view(page)
    chart = view.root.get_by_test_id(LOSS)
    raw = chart.locator(LINE).get_attribute("d")
    slider = view.root.get_by_test_id("smoothing")
    slider.fill("0.8")
    expect(slider).to_have_attribute("aria-valuetext", "0.96")
    expect(chart.locator(f"{LINE}.dtk-raw")).to_have_attribute("d", raw or "")
    smooth = chart.locator("path.dtk-smooth.dtk-n0").get_attribute("d") or ""
    heights = [[float(point.split(",")[1]) for point in d.lstrip("M").split("L")] for d in (raw or "", smooth)]
    jumps = [sum(abs(a - b) for a, b in itertools.pairwise(ys)) for ys in heights]
    assert jumps[1] < jumps[0] / 3
    dashed = (
        view.root.get_by_test_id("throughput-chart")
        .locator("path.dtk-all.dtk-smooth, path.dtk-dashed.dtk-smooth")
        .first
    )
    expect(dashed).to_have_css("stroke-dasharray", "5px, 4px")  # as without smoothing
    slider.fill("0")
    expect(chart.locator("path.dtk-raw")).to_have_count(0)


def test_smoothed_line_stays_in_sight_when_zoomed(page: Page):
    run = FakeSource(ranks=2)
    run.advance(40, loss=100.0)
    run.advance(160, loss=1.0)
    view = StaticView(page, run)
    view.root.get_by_test_id("smoothing").fill("1")
    chart = view.root.get_by_test_id(LOSS).locator("svg.dtk-chart")
    chart.focus()
    page.keyboard.press("End")
    page.keyboard.press("+")
    expect(view.root.get_by_test_id("reset-zoom")).to_be_visible()
    page.evaluate(_PAINTED)
    smooth = chart.locator("path.dtk-smooth.dtk-n0").get_attribute("d") or ""
    last = float(smooth.rsplit(",", 1)[1])
    box = chart.bounding_box()
    assert box
    assert 0 < last < box["height"]
    labels = [
        float(y) for y in chart.locator(".dtk-labels text").evaluate_all("all => all.map((t) => t.getAttribute('y'))")
    ]
    assert min(abs(y - 4 - last) for y in labels) <= 12, "the label isn't at the line's end"


@pytest.mark.parametrize(
    ("axis", "texts"), [("epoch", {"0.5", "1", "1.5"}), slow("time", {"10 s", "20 s"}), slow("samples", {"10k", "20k"})]
)
def test_axis_has_steps_epochs_time_or_samples(page: Page, axis: str, texts: set[str]):
    view = make_view(page)
    view.root.get_by_test_id("x-axis").select_option(axis)
    assert {axis, *texts} <= set(list_ticks(view)), list_ticks(view)


def test_limits_can_ignore_outliers(page: Page):
    run = FakeSource(ranks=1)
    run.advance(150)
    run.advance(1, loss=5000.0)
    run.advance(150)
    view = StaticView(page, run)
    view.root.get_by_test_id("scale").click()  # the axis was logarithmic by itself
    expect(view.root.get_by_test_id("scale")).to_have_attribute("aria-pressed", "false")
    assert "4,000" in list_ticks(view)
    view.root.get_by_test_id("robust").click()
    expect(view.root.get_by_test_id("robust")).to_have_attribute("aria-pressed", "true")
    assert "2" in list_ticks(view)
    assert "4,000" not in list_ticks(view)


def test_legend_hides_lines_by_mouse_and_keyboard(page: Page):
    view = make_view(page)
    entry = view.root.get_by_test_id("legend").locator("[data-key=n0]")
    lines = [view.root.get_by_test_id(chart).locator(LINE) for chart in (LOSS, "throughput-chart")]
    entry.click()
    expect(entry).to_have_attribute("aria-pressed", "false")
    for line in lines:
        expect(line).to_have_attribute("d", "")
    entry.press("Enter")
    for line in lines:
        expect(line).not_to_have_attribute("d", "")
    assert "node 0" in view.root.get_by_test_id(LOSS).locator(".dtk-labels text").all_text_contents()


def test_a_node_at_the_pointer_in_the_legend_stands_out_in_its_charts(page: Page):
    view = make_view(page)
    node = view.root.get_by_test_id("legend").locator("[data-key='n1']")
    classes = "(paths) => paths.map((path) => [path.dataset.rank, path.classList.contains('dtk-unpointed')])"
    lines, norms = (
        view.root.get_by_test_id(name).locator(".dtk-lines path.dtk-line[data-rank]")
        for name in (LOSS, "gradient-norm-chart")
    )
    node.hover()
    expect(view.root.get_by_test_id(LOSS).locator("path.dtk-line.dtk-pointed")).to_have_attribute("data-rank", "1")
    assert all(is_pale == (rank != "1") for rank, is_pale in lines.evaluate_all(classes))
    assert not any(is_pale for _, is_pale in norms.evaluate_all(classes))  # one line for all nodes
    view.root.get_by_test_id(LOSS).hover()
    expect(view.root.locator(".dtk-unpointed")).to_have_count(0)
    page.keyboard.press("Tab")
    node.focus()
    expect(view.root.get_by_test_id(LOSS).locator("path.dtk-line.dtk-pointed")).to_have_attribute("data-rank", "1")
    node.evaluate("(el) => el.blur()")
    expect(view.root.locator(".dtk-unpointed")).to_have_count(0)


def test_tooltip_names_every_line_with_its_value_and_unit(page: Page):
    view = make_view(page)
    for chart, row in ((LOSS, "mean"), ("throughput-chart", "node 1")):
        left, right, y = get_plot(view, chart)
        page.mouse.move((left + right) / 2, y)
        tip = view.root.get_by_test_id(chart).get_by_test_id("tooltip")
        expect(tip).to_be_visible()
        expect(tip).to_contain_text("step")
        expect(tip).to_contain_text("node 0")
        expect(tip).to_contain_text(row)
    expect(tip).to_contain_text("samples/s")
    expect(view.root.get_by_test_id(LOSS).get_by_test_id("tooltip")).to_be_hidden()


def test_the_tooltip_has_the_validation_that_is_nearest(page: Page):
    """It was there at some places of the pointer and gone between them, though a line joins the validations."""
    run = FakeSource(ranks=2, strips=True)
    run.advance(300)
    for step in (100, 200):
        run.history.add(Evaluation(step, 100, {"loss": 100 / step}))
    view = StaticView(page, run)
    left, right, y = get_plot(view)
    tip = view.root.get_by_test_id(LOSS).get_by_test_id("tooltip")
    for share, text in (
        (0.1, "validation at step 100"),
        (0.45, "validation at step 100"),
        (0.8, "validation at step 200"),
    ):
        page.mouse.move(left + share * (right - left), y)
        expect(tip).to_contain_text(text)


def test_bars_and_timeline_have_tooltips(page: Page):
    view = make_view(page)
    bars = view.root.get_by_test_id("time-panel")
    bars.locator(".dtk-row[data-rank='1'] [data-phase=forward]").hover()
    expect(bars.get_by_test_id("tooltip")).to_contain_text("node 1: ")
    expect(bars.get_by_test_id("tooltip")).to_contain_text("forward")
    expect(bars.get_by_test_id("tooltip")).to_contain_text(" ms · ")
    strip = view.root.get_by_test_id("timeline-panel")
    svg = strip.locator("svg[role=img]")
    svg.hover(position={"x": 300, "y": 12})
    expect(strip.get_by_test_id("tooltip")).to_contain_text("node 0")
    expect(strip.get_by_test_id("tooltip")).to_contain_text(" ms")


def test_numbers_below_a_thousandth_are_readable(page: Page):
    run = FakeSource(ranks=1)
    run.lr = 2e-5
    for k in range(100):
        run.advance(1, loss=3e-6 * (1 + k / 20))
    view = StaticView(page, run)
    texts = list_ticks(view)
    assert {"5e-6", "0.00001"} & set(texts), texts
    assert max(map(len, texts)) <= 7, texts  # they fit beside the axis
    _left, right, y = get_plot(view)
    page.mouse.move(right - 5, y)
    expect(view.root.get_by_test_id(LOSS).get_by_test_id("tooltip")).to_contain_text("e-5")
    expect(view.root.get_by_test_id("learning-rate-chart")).to_contain_text("0.00002")


def test_hidden_panels_are_remembered_by_the_page(page: Page):
    page.route("**/page", lambda route: route.fulfill(body="<!doctype html>", content_type="text/html"))
    page.goto("http://127.0.0.1:9/page")  # a page with an origin has a storage
    view = make_view(page)
    menu = view.root.get_by_test_id("panels-menu")
    expect(menu).to_have_text("panels ▾")
    menu.press("Enter")
    view.root.locator("[data-panel=Throughput]").uncheck()
    expect(menu).to_have_text("panels · 1 hidden ▾")
    expect(view.root.get_by_test_id("throughput-chart")).to_be_hidden()
    page.keyboard.press("Escape")
    expect(menu).to_be_focused()
    expect(menu).to_have_attribute("aria-expanded", "false")
    again = make_view(page)
    expect(again.root.get_by_test_id(LOSS)).to_be_visible()
    expect(again.root.get_by_test_id("throughput-chart")).to_be_hidden()
    again_menu = again.root.get_by_test_id("panels-menu")
    expect(again_menu).to_have_text("panels · 1 hidden ▾")  # so that a reader of the next run finds it
    expect(again_menu).to_have_attribute("aria-label", "choose panels: 1 hidden")
    again_menu.click()
    again.root.locator("[data-panel=Throughput]").check()
    expect(again_menu).to_have_text("panels ▾")
    expect(again_menu).to_have_attribute("aria-label", "choose panels")


def test_chart_is_saved_as_table_and_pictures(page: Page):
    view = make_view(page)
    chart = view.root.get_by_test_id(LOSS)
    view.root.get_by_test_id("smoothing").fill("0.8")
    kept = {}
    for ending in ("csv", "svg", "png"):
        chart.hover()
        chart.get_by_test_id("download").click()
        with page.expect_download() as download:
            chart.get_by_test_id(f"save-{ending}").click()
        smooth = "" if ending == "csv" else "-smooth-0-96"  # the table has the values as they were measured
        assert download.value.suggested_filename == f"loss-convnet{smooth}.{ending}"
        kept[ending] = Path(download.value.path()).read_bytes()
    rows = list(csv.reader(kept["csv"].decode().splitlines()))
    assert rows[0] == ["step", "node 0", "node 1", "mean", "validation", "validation after steps"]
    assert len(rows) == 301
    assert [[row[0], *row[-2:]] for row in rows[1:] if row[-1]] == [["199", "0.7", "200"]]  # the first step is step 0
    assert kept["svg"].startswith(b"<svg")
    assert "Loss · ConvNet · smooth 0.96".encode() in kept["svg"]
    assert b"stroke-width: 1.8" in kept["svg"]  # its styles are in the file
    assert kept["png"].startswith(b"\x89PNG")


def save(page: Page, view: StaticView, chart: str, ending: str) -> str:
    """Return the text of a chart's download."""
    view.root.get_by_test_id(chart).hover()
    view.root.get_by_test_id(chart).get_by_test_id("download").click()
    with page.expect_download() as download:
        view.root.get_by_test_id(chart).get_by_test_id(f"save-{ending}").click()
    return Path(download.value.path()).read_text()


def test_a_saved_picture_has_a_key_of_what_it_shows(page: Page):
    """The legend is above all charts, and the words of the marks are in tooltips: a file had neither."""
    run = FakeSource(ranks=3, strips=True)
    run.advance(1500)
    run.lose(1)
    run.history.add(Evaluation(700, 100, {"loss": 0.7}))
    view = StaticView(page, run)
    texts = re.findall(r"<text[^>]*>(.*?)</text>", save(page, view, LOSS, "svg"))
    key = [re.sub("<[^>]*>", "", text) for text in texts[texts.index("mean") - 3 :]]
    assert key[:5] == ["node 0", "✕ node 1", "node 2", "mean", "bands: lowest to highest of 4 steps at a point"]
    assert key[5:] == ["validation", "†", "node 1 lost"]
    expect(view.root.locator("svg.dtk-chart").first.locator("text", has_text="node 1 lost")).to_have_count(0)
    times = save(page, view, "time-panel", "svg")
    assert all(f">{phase}</text>" in times for phase in ("forward", "backward", "update"))
    view.root.get_by_test_id("legend").locator("[data-key=n0]").click()
    assert ">node 0</text>" not in save(page, view, LOSS, "svg")


def test_a_saved_table_has_each_step_that_the_page_has(page: Page):
    """Rates are drawn in merged buckets, and losses were said to be of two steps without what their values are."""
    run = FakeSource(ranks=2)
    run.advance(300)
    rows = list(csv.reader(save(page, StaticView(page, run), "throughput-chart", "csv").splitlines()))
    assert (rows[0][:3], len(rows)) == (["step", "node 0", "node 1"], 301)
    run.advance(700)
    run.history.add(Evaluation(24, 100, {"loss": 0.9}))
    run.history.add(Evaluation(25, 100, {"loss": 0.8}))
    rows = list(csv.reader(save(page, StaticView(page, run), LOSS, "csv").splitlines()))
    assert rows[0][:5] == ["first step", "last step", "node 0 mean", "node 0 lowest", "node 0 highest"]
    assert [[*row[:2], *row[-2:]] for row in rows if row[-1].isdigit()] == [
        ["23", "24", "0.9", "24"],
        ["23", "24", "0.8", "25"],
    ]


def test_the_table_of_a_zoom_has_no_later_validation(page: Page):
    """Its last row had all validations after the zoom."""
    run = FakeSource(ranks=2)
    run.advance(300)
    for step in (150, 280):
        run.history.add(Evaluation(step, 100, {"loss": 0.7}))
    view = StaticView(page, run)
    left, right, y = get_plot(view)
    page.mouse.move(left + (right - left) / 3, y)
    page.mouse.down()
    page.mouse.move(left + (right - left) * 2 / 3, y, steps=4)
    page.mouse.up()
    expect(view.root.get_by_test_id("reset-zoom")).to_be_visible()
    rows = list(csv.reader(save(page, view, LOSS, "csv").splitlines()))
    assert len(rows) < 200
    assert [row[-1] for row in rows[1:] if row[-1]] == ["150"]


def test_panel_fills_the_screen_and_returns(page: Page):
    view = make_view(page)
    view.root.get_by_test_id("smoothing").fill("0.8")
    chart = view.root.get_by_test_id(LOSS)
    chart.hover()
    chart.get_by_test_id("full-screen").click()
    svg = chart.locator("svg.dtk-chart")
    page.wait_for_function("(svg) => svg.getBoundingClientRect().height > 400", arg=svg.element_handle())
    page.evaluate(_PAINTED)
    expect(view.root.get_by_test_id("smoothing")).to_have_count(2)
    expect(chart.get_by_test_id("smoothing")).to_have_value("0.8")
    chart.get_by_test_id("legend").get_by_text("node 1", exact=True).click()
    expect(chart.locator("path.dtk-line[data-rank='1']")).to_have_attribute("d", "")
    chart.get_by_test_id("scale").click()
    expect(chart.locator("h3 .dtk-note")).to_contain_text("log scale")
    chart.get_by_test_id("scale").click()
    expect(chart.locator("h3 .dtk-note")).not_to_contain_text("log scale")
    labels = chart.locator(".dtk-labels text")
    expect(labels.filter(has_text="validation")).to_be_visible()
    right = page.evaluate("innerWidth")
    # In one call: a chart that is drawn between two would replace its labels.
    ends = labels.evaluate_all("(texts) => texts.map((text) => [text.textContent, text.getBoundingClientRect().right])")
    assert [name for name, end in ends if end > right - 20] == []
    chart.get_by_test_id("full-screen").press("Enter")
    page.wait_for_function("(svg) => svg.getBoundingClientRect().height < 300", arg=svg.element_handle())
    expect(view.root.get_by_test_id("smoothing")).to_have_count(1)


def test_chart_that_turns_logarithmic_by_itself_says_so(page: Page):
    run = FakeSource(ranks=1)
    run.advance(150)
    view = StaticView(page, run)
    caption = view.root.get_by_test_id(LOSS).locator("h3 .dtk-note")
    expect(caption).not_to_contain_text("log scale")
    run.advance(1, loss=5000.0)
    view.update()
    expect(caption).to_contain_text("log scale")


def test_a_scale_that_charts_chose_is_called_automatic_until_a_person_chooses(page: Page):
    """Nothing said that it was not the reader who had pressed the button."""
    run = FakeSource(ranks=1)
    run.event("start", "training begins")
    run.advance(150)
    run.advance(1, loss=5000.0)
    view = StaticView(page, run)
    scale, own = view.root.get_by_test_id("scale"), view.root.get_by_test_id(LOSS).get_by_test_id("chart-scale")
    expect(scale).to_have_text("log y (1 of 2)")  # the loss, and not the norm
    expect(scale).to_have_attribute("title", re.compile("chosen by itself.*your choice stays"))
    clicks = "1 of 2 charts has it now. A click makes all charts linear, and another one all logarithmic"
    expect(scale).to_have_attribute("title", re.compile(clicks))
    expect(own).to_have_attribute("title", re.compile("chosen by itself"))
    scale.click()
    expect(scale).to_have_text("log y")
    expect(scale).to_have_attribute("aria-pressed", "false")
    run.advance(10, loss=9000.0)
    view.update()
    expect(scale).to_have_attribute("aria-pressed", "false")
    again = StaticView(page, run)  # in the same page
    expect(again.root.get_by_test_id("scale")).to_have_attribute("aria-pressed", "false")
    again.root.get_by_test_id("scale").click()
    expect(again.root.get_by_test_id("scale")).to_have_text("log y")
    expect(again.root.get_by_test_id("scale")).to_have_attribute("aria-pressed", "true")


@pytest.mark.parametrize("look", [Look(width=1400), Look(width=600)], indirect=True)
@pytest.mark.parametrize("panel", [LOSS, "time-panel"])
def test_caption_ends_before_the_tools_of_its_panel(page: Page, panel: str):
    view = make_view(page)
    part = view.root.get_by_test_id(panel)
    part.locator("h3 .dtk-note").evaluate("(note) => { note.textContent = 'a caption as long as it gets '.repeat(9); }")
    part.locator("h3").hover()
    tools = part.locator(".dtk-tools").bounding_box()
    inner = part.locator("h3").evaluate(
        "(h) => h.getBoundingClientRect().right - parseFloat(getComputedStyle(h).paddingRight)"
    )
    assert tools
    assert inner <= tools["x"]


def test_label_is_next_to_a_line_that_ends_before_the_axis(page: Page):
    run = FakeSource(ranks=2, strips=True)
    run.advance(300)
    for rank in (0, 1):
        cpu = [(step, 0.5 + 0.2 * rank, 1.0) for step in (50, 100, 150)]
        run.history.add(ScalarRecord(rank, {"system/CPU (cores)": cpu}))
    view = StaticView(page, run)
    message = SeriesFeed(run.history).build_message(is_last=True)
    assert message
    page.evaluate("([content, buffers]) => window.receive(content, buffers)", encode_message(message))
    view.update()
    chart = view.root.get_by_test_id("system-chart").first
    expect(chart.locator(".dtk-labels text").first).to_be_visible()
    # in one call, since a drawing replaces the labels
    apart = chart.evaluate("""(el) => el.querySelector(".dtk-labels text").getBoundingClientRect().left
      - el.querySelector("path.dtk-line").getBoundingClientRect().right""")
    assert 0 < apart < 15


def test_constant_rate_and_low_memory_take_a_line(page: Page):
    view = make_view(page, ranks=4)
    for panel in ("learning-rate-chart", "memory-panel"):
        box = view.root.get_by_test_id(panel).bounding_box()
        assert box
        assert box["height"] < 50
    expect(view.root.get_by_test_id("learning-rate-chart")).to_contain_text("0.1, the same since the first step")


def test_new_rate_of_a_paused_run_is_not_said_to_be_old(page: Page):
    run = FakeSource(ranks=2)
    run.advance(20)
    view = StaticView(page, run)
    run.lr = 0.02
    view.update()
    rate = view.root.get_by_test_id("learning-rate-chart")
    expect(rate).to_contain_text("0.02 from the next step on, 0.1 until now")


def test_a_step_of_the_rate_to_0_is_told_next_to_a_far_larger_rate(page: Page):
    run = FakeSource(ranks=2)
    for run.lr in (3.0, 0.0001, 0.0):
        run.advance(20)
    view = StaticView(page, run)
    rate = view.root.get_by_test_id("learning-rate-chart")
    expect(rate).to_contain_text("0 since step 41, the same on all nodes")
    run.lr = 0.1
    run.advance(1)
    view.update()
    expect(rate.locator(".dtk-note")).to_have_text("the same on all nodes")  # as while it changes in each step


@pytest.mark.slow
@pytest.mark.parametrize(
    "look", [Look("light", 600, 900), Look("dark", 800, 900), Look("dark", 1400, 900)], indirect=True
)
def test_tools_fit_every_width(page: Page, look: Look, tmp_path: Path):
    view = make_view(page, look.theme, ranks=8)
    view.root.get_by_test_id("smoothing").fill("0.5")
    _left, right, y = get_plot(view)
    page.mouse.move(right - 4, y)
    tip = view.root.get_by_test_id(LOSS).get_by_test_id("tooltip")
    expect(tip).to_be_visible()
    box, root = tip.bounding_box(), view.root.bounding_box()
    assert box
    assert root
    assert box["x"] >= root["x"]
    assert box["x"] + box["width"] <= root["x"] + root["width"]
    view.screenshot(Path(os.environ.get("DTKIT_SCREENSHOTS", tmp_path)) / f"tools-{look.theme}-{look.width}.png")


def test_an_axis_from_zero_has_a_number_beside_its_largest_value(page: Page):
    run = FakeSource(ranks=2)
    run.advance(60)
    for rank in range(2):
        run.history.add(ScalarRecord(rank, {"system/memory (MB)": [(step, 361.0, 1.0) for step in range(1, 60)]}))
    view = StaticView(page, run)
    message = SeriesFeed(run.history).build_message()
    assert message
    page.evaluate("([content, buffers]) => window.receive(content, buffers)", encode_message(message))
    chart = view.root.get_by_test_id("system-chart").first
    expect(chart.locator(".dtk-grid text[text-anchor='end']").filter(has_text="400")).to_be_visible()
    above = chart.evaluate("""(el) => el.querySelector("path.dtk-line").getBoundingClientRect().top
      - Math.min(...[...el.querySelectorAll(".dtk-grid line")].map((line) => line.getBoundingClientRect().top))""")
    assert above > 4


def show_numbers(page: Page, samples: slice) -> StaticView:
    """Return the view of a run with numbers of the user's own, and these of 60 samples of the machines' use."""
    run = FakeSource(ranks=2)
    run.advance(60)
    for rank in range(2):
        rows = [(step, float(step), 1.0) for step in range(1, 60)]
        numbers = {"kl": rows, "system/CPU (cores)": rows[samples], "system/network cards (MB/s)": rows[samples]}
        run.history.add(ScalarRecord(rank, numbers))
    view = StaticView(page, run)
    message = SeriesFeed(run.history).build_message()
    assert message
    view.page.evaluate("([content, buffers]) => window.receive(content, buffers)", encode_message(message))
    return view


def test_one_sample_of_the_machines_use_takes_a_line(page: Page):
    chart = show_numbers(page, slice(1)).root.get_by_test_id("system-chart").first
    expect(chart.locator("h3")).to_contain_text("CPU (cores) last 1.00, mean of the nodes")
    expect(chart.locator("svg.dtk-chart")).to_be_hidden()


def test_logged_numbers_and_the_machines_use_have_charts(page: Page):
    view = show_numbers(page, slice(None, None, 10))
    own = view.root.get_by_test_id("scalars-chart")
    expect(own).to_have_count(1)
    expect(own.locator("h3")).to_contain_text("kl last 59.0, mean of the nodes")
    charts = view.root.get_by_test_id("system-chart")
    expect(charts).to_have_count(2)
    expect(charts.first.locator("h3")).to_contain_text("CPU (cores) last 51.0, mean of the nodes")
    assert charts.first.locator("path.dtk-line:not([d=''])").count() == 3
    charts.first.locator("svg.dtk-chart").hover(position={"x": 200, "y": 40})
    expect(charts.first.get_by_test_id("tooltip")).to_contain_text("cores")


def count_points(view: StaticView) -> int:
    """Return the number of points of the mean loss that are drawn."""
    path = view.root.get_by_test_id("loss-chart").locator("path.dtk-line.dtk-all").first.get_attribute("d") or ""
    return len(re.findall(r"[ML]", path))


def test_zoom_fetches_finer_data_for_its_range(page: Page):
    run = FakeSource(ranks=2, steps=8000)
    run.advance(8000)
    view = StaticView(page, run)
    chart = view.root.get_by_test_id("loss-chart").locator("svg.dtk-lines-chart")
    whole = count_points(view)
    chart.focus()
    first, last = 1, 8000
    for _ in range(10):  # a press before the chart is drawn again has no effect
        if last - first > 510:
            chart.press("+")
            first, last = view.sent[-1]["zoom"]
    coarse = count_points(view)
    view.answer_zoom()
    view.update()
    assert (first > 3000, last < 5000, last - first <= 510) == (True, True, True)
    assert coarse <= whole <= 512
    assert count_points(view) >= last - first  # each step has a point
    chart.press("0")
    assert whole <= count_points(view) <= 512


def test_zoom_rules_the_bars_and_the_timeline_until_its_reset(page: Page):
    run = FakeSource(ranks=2, strips=True)
    for steps, slowness in ((60, {}), (180, {1: 3.0}), (60, {})):
        run.slowness = slowness
        run.advance(steps)
    view = StaticView(page, run)
    chart = view.root.get_by_test_id("loss-chart").locator("svg.dtk-lines-chart")
    bars, strip = (view.root.get_by_test_id(name) for name in ("time-panel", "timeline-panel"))
    expect(bars.locator(".dtk-note")).to_have_text("ms, mean of steps 251 to 300")
    chart.focus()
    chart.press("+")
    expect(view.root.get_by_test_id("reset-zoom")).to_be_visible()
    first, last = view.sent[-1]["zoom"]
    view.answer_zoom()
    expect(bars.locator(".dtk-note")).to_have_text(f"ms, mean of steps {first} to {last}")
    expect(bars.get_by_test_id("straggler")).to_contain_text("node 1 keeps the others waiting")
    expect(strip.locator(".dtk-note")).to_contain_text(f"step 300 ({first} to {last} have no timeline)")
    run.advance(10)
    view.update()
    expect(bars.locator(".dtk-note")).to_have_text(f"ms, mean of steps {first} to {last}")
    view.screenshot(Path(os.environ.get("DTKIT_SCREENSHOTS", "/tmp")) / "zoomed.png")
    chart.press("0")
    expect(bars.locator(".dtk-note")).to_have_text("ms, mean of steps 261 to 310")
    expect(bars.get_by_test_id("straggler")).to_be_hidden()
    strip.scroll_into_view_if_needed()  # a panel out of sight is drawn later
    expect(strip.locator(".dtk-note")).to_have_text("step 310, what each node did when")


def test_zoom_is_asked_for_again_after_a_snapshot(page: Page):
    run = FakeSource(ranks=2)
    run.advance(100)
    view = StaticView(page, run)
    chart = view.root.get_by_test_id("loss-chart").locator("svg.dtk-lines-chart")
    chart.focus()
    chart.press("+")
    view.answer_zoom()
    (asked,) = view.sent
    view.send_snapshot()
    assert view.sent == [asked, asked]


def test_a_changed_rate_begins_at_the_step_of_its_event(page: Page):
    run = FakeSource(ranks=2, steps=4000)
    run.advance(1666)
    run.event("pause", "paused at step 1666")
    run.event("lr", "learning rate 0.05")
    run.event("resume", "resume at step 1666")
    run.lr = 0.05
    run.advance(300)
    view = StaticView(page, run)
    chart = view.root.get_by_test_id("learning-rate-chart")
    expect(chart).to_contain_text("0.05 since step 1,666, the same on all nodes")
    expect(chart.locator(".dtk-marks text")).to_have_text("‖ · lr · ▶")
    texts = "step 1666: paused at step 1666\nstep 1666: learning rate 0.05\nstep 1666: resume at step 1666"
    expect(chart.locator(".dtk-marks g:has(text) title")).to_have_text(texts, use_inner_text=False)


def make_mixed_view(page: Page) -> StaticView:
    """Return a view whose loss chose its scale, while the gradient norm has another."""
    run = FakeSource(ranks=1)
    run.advance(150)
    run.advance(1, loss=5000.0)
    run.advance(150)
    return StaticView(page, run)


def test_each_chart_shows_and_changes_its_own_scale(page: Page):
    view = make_mixed_view(page)
    loss, norm = (view.root.get_by_test_id(name) for name in (LOSS, "gradient-norm-chart"))
    scales = [chart.get_by_test_id("chart-scale") for chart in (loss, norm)]
    expect(scales[0]).to_have_attribute("aria-pressed", "true")
    expect(scales[1]).to_have_attribute("aria-pressed", "false")
    expect(view.root.get_by_test_id("scale")).to_have_attribute("aria-pressed", "mixed")
    norm.hover()
    scales[1].click()
    expect(scales[1]).to_have_attribute("aria-pressed", "true")
    expect(norm.locator("h3 .dtk-note")).to_contain_text("log scale")
    expect(view.root.get_by_test_id("scale")).to_have_attribute("aria-pressed", "true")
    loss.hover()
    scales[0].click()
    expect(loss.locator("h3 .dtk-note")).not_to_contain_text("log scale")
    expect(norm.locator("h3 .dtk-note")).to_contain_text("log scale")
    view.root.get_by_test_id("scale").click()
    view.root.get_by_test_id("scale").click()
    for chart, scale in zip((loss, norm), scales, strict=True):
        expect(scale).to_have_attribute("aria-pressed", "true")
        expect(chart.locator("h3 .dtk-note")).to_contain_text("log scale")


def test_a_full_screen_shows_the_scale_of_its_chart(page: Page):
    view = make_mixed_view(page)
    norm = view.root.get_by_test_id("gradient-norm-chart")
    norm.hover()
    norm.get_by_test_id("full-screen").click()
    scale = norm.get_by_test_id("scale")
    expect(scale).to_have_attribute("aria-pressed", "false")
    scale.click()
    expect(scale).to_have_attribute("aria-pressed", "true")
    expect(norm.locator("h3 .dtk-note")).to_contain_text("log scale")
    page.evaluate("() => document.exitFullscreen()")


def test_a_person_chooses_how_often_all_is_drawn(page: Page):
    run = FakeSource(ranks=2)
    run.advance(59)
    view = StaticView(page, run)
    run.advance(1)  # the first step is awaited
    view.update()
    refresh, step = view.root.get_by_test_id("refresh"), view.root.get_by_test_id("progress")
    refresh.select_option("15 s")
    assert page.evaluate("() => window.sent.at(-1).attention.refresh") == 15
    run.advance(1)
    view.update(is_drawn=False)
    page.evaluate("() => new Promise((call) => setTimeout(call, 1500))")
    expect(step).to_have_attribute("aria-valuenow", "60")
    run.state = State.PAUSED
    run.event("pause", "paused at step 61")
    view.update()  # drawn at once
    expect(step).to_have_attribute("aria-valuenow", "61")
    run.state = State.RUNNING
    run.event("resume", "resumed at step 61")
    run.advance(1)
    view.update()
    run.advance(1)
    view.update(is_drawn=False)
    refresh.select_option("live")
    view.update()
    expect(step).to_have_attribute("aria-valuenow", "63")
    run.end()
    view.update()
    expect(refresh).to_be_hidden()


def choose_settings(view: StaticView) -> None:
    """Choose other settings than those that a view begins with."""
    view.root.get_by_test_id("smoothing").fill("0.8")
    view.root.get_by_test_id("x-axis").select_option("epoch")
    view.root.get_by_test_id("legend").get_by_text("node 1", exact=True).click()
    view.root.get_by_test_id("robust").click()
    view.root.get_by_test_id("refresh").select_option("5 s")


def test_another_view_of_the_run_keeps_what_a_person_chose(page: Page):
    run = FakeSource(ranks=2)
    run.event("start", "training begins")
    run.advance(60)
    first = StaticView(page, run)
    choose_settings(first)
    first.root.get_by_test_id("scale").click()
    again = StaticView(page, run)  # in the same page
    expect(again.root.get_by_test_id("refresh")).to_have_value("5")
    assert page.evaluate("() => window.sent.findLast((message) => message.attention).attention.refresh") == 5
    expect(again.root.get_by_test_id("smoothing")).to_have_value("0.8")
    expect(again.root.get_by_test_id("x-axis")).to_have_value("epoch")
    expect(again.root.locator("[data-key='n1']")).to_have_attribute("aria-pressed", "false")
    for name in ("robust", "scale"):
        expect(again.root.get_by_test_id(name)).to_have_attribute("aria-pressed", "true")
    other = FakeSource(ranks=2, name="Another")
    other.event("start", "training begins")
    other.advance(60)
    expect(StaticView(page, other).root.get_by_test_id("smoothing")).to_have_value("0")


def test_a_reload_of_the_page_keeps_what_a_person_chose_for_the_last_runs(page: Page):
    address = "http://127.0.0.1:9/page"  # a page with an origin has a storage
    page.route("**/page", lambda route: route.fulfill(body="<!doctype html>", content_type="text/html"))
    page.goto(address)
    page.evaluate(
        "() => localStorage.setItem('dtkit-views', JSON.stringify([...Array(30).keys()].map((k) => [`${k}`, '{}'])))"
    )
    run = FakeSource(ranks=2)
    run.event("start", "training begins")
    run.advance(60)
    view = StaticView(page, run)
    choose_settings(view)
    loss = view.root.get_by_test_id(LOSS)
    loss.hover()
    loss.get_by_test_id("chart-scale").click()
    page.evaluate(_PAINTED)
    page.goto(address)
    again = StaticView(page, run)
    expect(again.root.get_by_test_id("smoothing")).to_have_value("0.8")
    expect(again.root.get_by_test_id("x-axis")).to_have_value("epoch")
    expect(again.root.locator("[data-key='n1']")).to_have_attribute("aria-pressed", "false")
    expect(again.root.get_by_test_id("robust")).to_have_attribute("aria-pressed", "true")
    expect(again.root.get_by_test_id("refresh")).to_have_value("5")
    expect(again.root.get_by_test_id(LOSS).get_by_test_id("chart-scale")).to_have_attribute("aria-pressed", "true")
    assert page.evaluate("() => window.sent.findLast((message) => message.attention).attention.refresh") == 5
    assert page.evaluate("() => JSON.parse(localStorage.getItem('dtkit-views')).length") == 20


def test_a_rate_chart_shows_no_mean_of_two_rates(page: Page):
    """The last bucket has two steps, one of each rate: their mean was never set."""
    run = FakeSource(ranks=2)
    run.advance(1023)
    run.lr = 0.05
    run.advance(1)
    chart = StaticView(page, run).root.get_by_test_id("learning-rate-chart")
    expect(chart.locator("svg text", has_text=re.compile(r"^0\.05$")).last).to_be_visible()
    expect(chart).not_to_contain_text("0.075")
    plot = chart.locator(".dtk-line[data-rank=all]").bounding_box()
    assert plot is not None
    page.mouse.move(plot["x"] + plot["width"], plot["y"] + plot["height"] / 2)
    expect(chart.get_by_test_id("tooltip")).to_contain_text("0.05 to 0.1")


def test_charts_with_one_line_for_all_nodes_stay_where_one_node_is_shown_alone(page: Page):
    view = make_view(page)
    view.root.get_by_test_id("legend").get_by_role("button", name="node 1").click(modifiers=["Shift"])
    expect(view.root.get_by_test_id(LOSS).locator("path.dtk-line[data-rank=all]")).to_have_attribute("d", "")
    norm = view.root.get_by_test_id("gradient-norm-chart")
    norm.scroll_into_view_if_needed()
    expect(norm.locator("path.dtk-line")).to_have_attribute("d", re.compile("^M.{100}"))


def test_the_mark_of_an_event_after_the_last_values_is_at_their_end(page: Page):
    run = FakeSource(ranks=2)
    run.advance(20)
    run.history.add(Event(23, "error", "the loss is inf", 1_700_000_100.0))
    view = StaticView(page, run)
    expect(view.root.get_by_test_id("marks-key")).to_contain_text("✕ error")
    expect(view.root.get_by_test_id(LOSS).locator(".dtk-sign .dtk-mark-error")).to_have_text("✕")


def test_the_learning_rate_is_drawn_in_steps(page: Page):
    source = FakeSource(ranks=2)
    for source.lr in (0.1, 2.0, 0.05):
        source.advance(20)
    path = StaticView(page, source).root.get_by_test_id("learning-rate-chart").locator("path.dtk-line[data-rank=all]")
    heights = [float(y) for y in re.findall(r"[ML][\d.]+,([\d.]+)", path.get_attribute("d"))]
    rises = [float(y) for y in re.findall(r"H[\d.]+V([\d.]+)L", path.get_attribute("d"))]
    assert len(set(heights)) == 3
    assert rises == heights[1:]  # each line to a point begins at its height


def test_the_learning_rate_has_no_value_between_two_that_were_set(page: Page):
    source = FakeSource(ranks=2, steps=4_000)
    source.advance(1203)
    source.lr = 0.005
    source.advance(802)
    path = StaticView(page, source).root.get_by_test_id("learning-rate-chart").locator("path.dtk-line[data-rank=all]")
    assert len(set(re.findall(r"[ML][\d.]+,([\d.]+)", path.get_attribute("d")))) == 2

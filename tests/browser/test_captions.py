"""Captions of the panels in a real browser: what is read is whole, beside its tools, and says what it is."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

import dtkit
from dtkit.dashboard.figures import render
from dtkit.dashboard.live import messages
from dtkit.dashboard.live.comparison_messages import ComparisonMessageBuilder
from dtkit.dashboard.live.comparison_widget import ComparisonWidget
from dtkit.dashboard.live.series_feed import SeriesFeed
from dtkit.history.scalars import CORE_WAIT_NAME, ScalarRecord
from dtkit.types import Evaluation
from tests.support.comparison_sources import build_message_of_named
from tests.support.fake_source import FakeSource
from tests.support.static_view import StaticView, encode_message, load_widget

if TYPE_CHECKING:
    from dtkit.dashboard.live.messages import Message

pytestmark = pytest.mark.browser

# Returns the captions whose text is cut or reaches the tools, whether or not the tools show.
_CUT = """() => [...document.querySelectorAll(".dtk-panel:has(> .dtk-tools) > h3")]
  .filter((head) => head.getClientRects().length).flatMap((head) => {
    const range = document.createRange();
    range.selectNodeContents(head);
    const right = Math.max(...[...range.getClientRects()].map((box) => box.right));
    const tools = head.parentElement.querySelector(".dtk-tools").getBoundingClientRect();
    const isBeside = range.getBoundingClientRect().top < tools.bottom;
    return isBeside && right > tools.left - 4 ? [head.textContent] : [];
  })"""


def make_run() -> FakeSource:
    """Return a run of two nodes with numbers of its own and of the machines."""
    run = FakeSource(ranks=2, steps=20_000)
    run.slowness = {0: 0.02, 1: 0.02}  # tens of thousands of samples a second
    run.advance(300)
    for rank in range(2):
        rows = [(step, 40.0 + rank, 1.0) for step in range(5, 300, 5)]
        run.history.add(ScalarRecord(rank, {CORE_WAIT_NAME: rows, "entropy": rows}))
    return run


@pytest.mark.parametrize("width", [600, 810, 900, 1000, 1200, 1400])
def test_caption_is_whole_and_ends_before_the_tools_of_its_panel(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 2000})
    run = make_run()
    view = StaticView(page, run)
    message = SeriesFeed(run.history).build_message(is_last=True)
    assert message
    page.evaluate("([content, buffers]) => window.receive(content, buffers)", encode_message(message))
    view.update()
    expect(view.root.get_by_test_id("system-chart").locator("h3")).to_be_visible()
    note = view.root.get_by_test_id("throughput-chart").locator("h3 .dtk-note")
    expect(note).to_contain_text("\u00d7")
    # In one call, because the next drawing shows the run's own number again.
    longer = "el.textContent = el.textContent.replace(/\u00d7.[\\d,.]+/, '\u00d7\u00a032,590')"
    text, cut = note.evaluate(f"(el) => [{longer}, ({_CUT})()]")
    assert "32,590" in text
    assert cut == []


def test_caption_of_a_comparison_ends_before_the_tools(page: Page):
    page.set_viewport_size({"width": 830, "height": 1200})
    message = build_message_of_named(["run 0", "run 1"], 100)
    message.content["head"]["most"] = 7.37
    load_widget(page, str(ComparisonWidget._esm), message, "light")
    note = page.get_by_test_id("comparison-chart").locator("h3 .dtk-note")
    expect(note).to_have_text("above 7.37 left out")
    assert page.evaluate(_CUT) == []


@pytest.mark.parametrize("width", [600, 800, 1400])
def test_captions_of_a_comparison_are_whole_on_each_axis(page: Page, width: int):
    """One was "mean over all nod…" at 800 pixels."""
    page.set_viewport_size({"width": width, "height": 1600})
    runs = [FakeSource(steps=100, seed=k, name=f"run {k}") for k in range(2)]
    for run in runs:
        run.advance(100)
        run.history.add(ScalarRecord(0, {"entropy": [(step, 0.5, 1.0) for step in range(1, 100)]}))
    message = ComparisonMessageBuilder(dtkit.compare(*runs)).build_snapshot()
    load_widget(page, str(ComparisonWidget._esm), message, "light")
    notes = page.locator(".dtk-lines-chart").locator("xpath=..").locator("h3 .dtk-note")
    for axis in ("step", "epoch", "time", "samples"):
        page.get_by_test_id("x-axis").select_option(axis)
        expect(page.get_by_test_id("comparison-chart").locator("h3")).to_contain_text("mean of nodes")
        assert [text for text in notes.all_text_contents() if "…" in text] == []


@pytest.mark.parametrize("width", [600, 800, 1400])
def test_bands_of_the_throughput_have_a_key_and_a_row_at_the_pointer(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 900})
    run = FakeSource(ranks=2, steps=20_000)
    run.advance(12_345)
    view = StaticView(page, run)
    throughput, loss = (view.root.get_by_test_id(f"{name}-chart") for name in ("throughput", "loss"))
    key = throughput.locator(".dtk-grid text").last
    expect(key).to_have_text("10\u201390 %")
    expect(loss.locator(".dtk-grid").get_by_text("%")).to_have_count(0)
    boxes = [text.bounding_box() for text in throughput.locator(".dtk-grid text").all()]
    swatch, svg = (throughput.locator(name).bounding_box() for name in (".dtk-band-key", "svg.dtk-lines-chart"))
    assert swatch
    assert svg
    assert boxes[-1]
    assert boxes[-1]["x"] + boxes[-1]["width"] <= svg["x"] + svg["width"] + 1
    beside = [box for box in boxes[:-1] if box and abs(box["y"] - boxes[-1]["y"]) < 5]
    assert len(beside) > 1
    assert all(box["x"] + box["width"] < swatch["x"] for box in beside)
    for chart, words in ((throughput, "bands10 to 90 % of 256 steps"), (loss, "bandslowest to highest of 32 steps")):
        chart.locator("svg.dtk-lines-chart").hover(position={"x": 200, "y": 60})
        expect(chart.get_by_test_id("tooltip").locator(".dtk-tip-rows > div").last).to_have_text(words)


def test_columns_of_the_log_are_aligned_from_step_10000_on(page: Page):
    run = FakeSource(ranks=2, steps=2_000_000)
    run.advance(300)
    run.event("lr", "learning rate set to 0.01")
    for step in (10_000, 1_234_567):
        run.history.events.append(dataclasses.replace(run.history.events[-1], step=step))
    view = StaticView(page, run)
    steps = view.root.locator(".dtk-log .dtk-at")
    expect(steps).to_have_count(3)
    ends = steps.evaluate_all("(all) => all.map((el) => el.getBoundingClientRect().right)")
    assert max(ends) - min(ends) < 1


def test_tooltips_of_merged_numbers_name_the_steps_that_others_are_at(page: Page):
    page.set_viewport_size({"width": 1400, "height": 2400})
    run = FakeSource(ranks=2, steps=400)
    run.advance(398)
    for rank in range(2):
        run.history.add(ScalarRecord(rank, {"kl": [(step, float(step), 1.0) for step in range(1, 399)]}))
    view = StaticView(page, run)
    message = SeriesFeed(run.history).build_message(is_last=True)
    assert message
    page.evaluate("([content, buffers]) => window.receive(content, buffers)", encode_message(message))
    view.update()
    chart, loss = (view.root.get_by_test_id(name) for name in ("scalars-chart", "loss-chart"))
    for x in (120, 251, 389):  # pixels
        merged, single = captions = [part.locator("h3 .dtk-note") for part in (chart, loss)]
        before = [caption.inner_text() for caption in captions]
        chart.locator("svg.dtk-chart").hover(position={"x": x, "y": 40})
        for caption, text in zip(captions, before, strict=True):  # they follow a pointer that rests
            expect(caption).not_to_have_text(text)
        expect(merged).to_contain_text("steps ")
        expect(single).to_contain_text("step ")
        first, last = (int(n) for n in re.findall(r"\d+", merged.inner_text())[:2])
        (step,) = re.findall(r"step (\d+):", single.inner_text())
        assert first <= int(step) <= last
        assert last - first == 4
    chart.locator("svg.dtk-chart").press("End")
    expect(merged).to_contain_text("steps 396\u2013398")


@pytest.mark.parametrize("width", [600, 800, 900])
def test_no_caption_is_cut_or_has_a_second_line(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 2500})
    run = FakeSource(ranks=12)
    run.advance(200)
    for step in (50, 100, 150):
        run.history.add(Evaluation(step, 1000, {"loss": 1.5, "accuracy": 0.625}))
    view = StaticView(page, run)
    view.root.get_by_test_id("scale").click()
    expect(view.root.get_by_test_id("loss-chart").locator(".dtk-note")).to_contain_text("log scale")
    heads = view.root.locator(".dtk-panel:not(.dtk-wide) > h3").evaluate_all("""(heads) => heads
      .filter((el) => el.clientHeight)
      .map((el) => [el.textContent, el.clientHeight > 25, el.scrollWidth > el.clientWidth])""")
    assert len(heads) >= 4
    assert [text for text, is_high, is_cut in heads if is_high or is_cut] == []
    long = view.root.locator("h3", has_text="accuracy").inner_text()
    assert long.startswith("accuracy validation, last 0.625")
    assert "from 0.625" in long or width > 600


def test_a_caption_that_has_no_room_in_a_sidebar_is_cut_and_whole_as_a_tooltip(page: Page):
    page.set_viewport_size({"width": 320, "height": 2500})
    run = FakeSource(ranks=2)
    run.advance(100)
    run.lr = 0.01
    run.advance(100)
    view = StaticView(page, run)
    for name in ("loss-chart", "throughput-chart", "gradient-norm-chart", "learning-rate-chart"):
        head = view.root.get_by_test_id(name).locator("h3")
        assert head.evaluate("(el) => [el.clientHeight > 25, el.scrollWidth > el.clientWidth]") == [False, False], name
    note = view.root.get_by_test_id("learning-rate-chart").locator("h3 .dtk-note")
    expect(note).to_have_text(re.compile("…$"))
    expect(note).to_have_attribute("title", "0.01 since step 101, the same on all nodes")


def log_confidence(run: FakeSource, value: float, first: int) -> None:
    """Log a number in the steps from `first` on."""
    rows = [(step, value, 1.0) for step in range(first, run.step + 1)]
    for rank in range(2):
        run.history.add(ScalarRecord(rank, {"confidence": rows}))


def receive(page: Page, message: Message | None) -> None:
    assert message
    page.evaluate("([content, buffers]) => window.receive(content, buffers)", encode_message(message))


def test_titles_follow_the_tiles_before_the_lines_do(page: Page):
    """A tile of 0.900 was next to a chart with "last 0.500", since charts are sent and drawn less often."""
    run = FakeSource(ranks=2)
    run.advance(120)
    log_confidence(run, 0.25, 1)
    for step in (50, 100):
        run.history.add(Evaluation(step, 100, {"accuracy": step / 200}))
    view, feed = StaticView(page, run), SeriesFeed(run.history, itertools.count().__next__)
    receive(page, feed.build_message())
    charts = [view.root.get_by_test_id(name) for name in ("metric-chart", "scalars-chart")]
    metric, own = [chart.locator("h3") for chart in charts]
    expect(metric).to_contain_text("last 0.500, from 0.250 to 0.500")
    expect(own).to_contain_text("last 0.250")
    drawn = [chart.locator("path.dtk-line").last.get_attribute("d") for chart in charts]
    run.advance(5)
    log_confidence(run, 0.75, 121)
    run.history.add(Evaluation(run.step, 100, {"accuracy": 0.9}))
    view.send_text()
    expect(metric).to_contain_text("last 0.900, from 0.250 to 0.900")
    expect(charts[0].locator(".dtk-labels text")).to_have_text("0.900")
    expect(own).to_contain_text("last 0.750")
    assert drawn == [chart.locator("path.dtk-line").last.get_attribute("d") for chart in charts]
    view.update()
    receive(page, feed.build_message())
    expect(metric).to_contain_text("last 0.900, from 0.250 to 0.900")
    expect(own).to_contain_text("last 0.750")


def test_a_caption_says_why_a_line_of_means_ends_elsewhere(page: Page):
    """A norm was "last 65.5", after a short batch, next to a line that ended at 110."""
    for num_steps, is_told in ((90, False), (380, True)):
        run = FakeSource(ranks=1)
        run.advance(num_steps)
        rows = [(step, 65.5 if step == num_steps else 110.0, 1.0) for step in range(1, num_steps + 1)]
        run.history.add(ScalarRecord(0, {"output_norm": rows}))
        view = StaticView(page, run)
        receive(page, SeriesFeed(run.history, itertools.count().__next__).build_message())
        note = view.root.get_by_test_id("scalars-chart").locator("h3 .dtk-note")
        expect(note).to_contain_text("last 65.5")
        reason = "The last value is that of one step; a point of the line is the mean of up to 4 steps"
        expect(note).to_have_attribute("title", re.compile(reason if is_told else r"last 65\.5$"))


def test_a_text_leaves_labels_alone_that_it_has_no_number_for(page: Page):
    """The learning rate's was "NaN", and that of the gradients' norm a dash, half of the time."""
    run = FakeSource(ranks=2)
    for run.lr in (0.1, 0.05):
        run.advance(60)
    view = StaticView(page, run)
    labels = [
        view.root.get_by_test_id(name).locator(".dtk-labels text")
        for name in ("learning-rate-chart", "gradient-norm-chart")
    ]
    expect(labels[0]).to_have_text("0.05")
    before = [label.text_content() for label in labels]
    run.advance(5)
    view.send_text()
    expect(view.root.locator(".dtk-ends")).to_contain_text("step 125 of")
    assert [label.text_content() for label in labels] == before


def test_the_label_of_a_zoomed_line_is_the_value_where_it_ends(page: Page):
    run = FakeSource(ranks=2)
    run.advance(120)
    for step in (20, 40, 60, 80, 100, 120):
        run.history.add(Evaluation(step, 100, {"accuracy": step / 200}))
    view = StaticView(page, run)
    label = view.root.get_by_test_id("metric-chart").locator(".dtk-labels text")
    expect(label).to_have_text("0.600")
    chart = view.root.get_by_test_id("metric-chart").locator("svg.dtk-lines-chart")
    box = chart.bounding_box()
    assert box
    page.mouse.move(box["x"] + 60, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 80, steps=4)
    page.mouse.up()
    expect(label).not_to_have_text("0.600")
    view.send_text()
    expect(label).not_to_have_text("0.600")


def test_a_panel_of_ones_own_does_not_wait_for_the_charts(page: Page, monkeypatch: pytest.MonkeyPatch):
    """A picture waited for the next drawing of the charts, up to 2.5 s."""
    monkeypatch.setattr(messages, "has_spare_core", lambda _run: False)
    run = FakeSource(ranks=2)
    run.advance(120)
    view = StaticView(page, run)
    view.show_picture("mine", render.render_png(render.create_figure(6, 2.3)))
    image = view.root.locator("[data-name=mine] img")
    page.wait_for_function("() => document.querySelector('[data-name=mine] img')?.naturalWidth > 0")
    page.evaluate("() => new Promise((call) => setTimeout(call, 1000))")  # until its size has been noted
    before = image.get_attribute("src")
    view.root.evaluate("(root) => root.setAttribute('data-seq', 'as it was')")  # which charts write
    view.show_picture("mine", render.render_png(render.create_figure(6, 2.3)))
    page.wait_for_function("(before) => document.querySelector('[data-name=mine] img').src !== before", arg=before)
    expect(view.root).to_have_attribute("data-seq", "as it was")

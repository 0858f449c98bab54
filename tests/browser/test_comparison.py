"""A comparison in a page: nothing is cut off or on top of another, at any width."""

from __future__ import annotations

import csv
import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from playwright.sync_api import Locator, Page, expect

import dtkit
from dtkit.dashboard.live.comparison_messages import ComparisonMessageBuilder
from dtkit.dashboard.live.comparison_widget import ComparisonWidget
from dtkit.history.scalars import ScalarRecord
from dtkit.types import Evaluation, State
from tests.support.comparison_sources import build_message_of_named, make_diverging_pair, make_logging_runs
from tests.support.fake_source import FakeSource
from tests.support.static_view import encode_message, load_widget

if TYPE_CHECKING:
    from dtkit.dashboard.compare import Comparison

pytestmark = pytest.mark.browser

_CUT_CELLS = """(table) => {
  const { right } = table.closest(".dtk-scroll").getBoundingClientRect();
  return [...table.querySelectorAll("th, td")].filter((cell) => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    const text = range.getBoundingClientRect(), box = cell.getBoundingClientRect();
    return text.right > box.right + 1 || text.right > right + 1;
  }).map((cell) => cell.textContent);
}"""
_JUPYTERLAB = (
    "() => document.head.insertAdjacentHTML('beforeend', '<style>svg { max-width: 100%; height: auto; }</style>')"
)


def show_runs(page: Page) -> None:
    """Show a short run next to a longer one. As in a real run, the last evaluation counts the steps before it."""
    runs = [
        FakeSource(steps=400, seed=k, name=name) for k, name in enumerate(["wide net, learning rate 0.05", "second"])
    ]
    for run, steps, rate in zip(runs, (120, 200), (0.05, 0.1), strict=True):
        optimizer = f"lambda p: torch.optim.SGD(p, lr={rate}, momentum=0.9)"
        run.spec = dataclasses.replace(run.spec, optimizer=optimizer, strategy=f"ParameterAveraging(every={steps})")
        run.sends = lambda step, steps=steps: 1000 * steps + 0 * step
        run.advance(steps)
        for step in range(40, steps + 2, 40):
            run.history.add(Evaluation(step + 1, 100, {"loss": 1.0 / step, "accuracy": step / 400}))
    load_widget(
        page, str(ComparisonWidget._esm), ComparisonMessageBuilder(dtkit.compare(*runs)).build_snapshot(), "light"
    )
    page.evaluate(_JUPYTERLAB)


@pytest.mark.parametrize("width", [1040, 1400])
def test_no_chart_of_a_wide_comparison_is_beside_an_empty_half(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 900})
    show_runs(page)
    rows = """(charts) => {
      const rows = {};
      for (const chart of charts) {
        const { top, right } = chart.getBoundingClientRect();
        rows[top] = Math.max(rows[top] ?? 0, right);
      }
      return Object.values(rows);
    }"""
    charts = page.locator(".dtk-panel:not(.dtk-wide):visible")
    expect(charts).to_have_count(5)
    ends = charts.evaluate_all(rows)
    assert len(ends) == 2
    assert max(ends) - min(ends) < 2


@pytest.mark.parametrize("width", [600, 800, 1400])
def test_tables_of_runs_are_neither_cut_nor_overlap(page: Page, width: int):
    page.set_viewport_size({"width": width - 130, "height": 900})  # JupyterLab's own margins
    show_runs(page)
    for testid in ("runs-table", "settings-table"):
        table = page.get_by_test_id(testid).locator("table")
        expect(table).to_be_visible()
        assert table.evaluate(_CUT_CELLS) == [], testid
    table = page.get_by_test_id("runs-table")
    expect(table.get_by_text("1: wide net, learning rate 0.05")).to_be_visible()
    expect(table.locator(".dtk-best").first).to_be_visible()
    assert table.locator("thead th").count() == (3 if width < 1400 else 10)  # a column for each run, or a row


def test_the_longer_run_ends_at_its_last_evaluation(page: Page):
    show_runs(page)
    chart = page.locator("[data-name='Validation accuracy'] svg.dtk-lines-chart")
    expect(chart.locator(".dtk-labels text")).to_have_text(["2: second", "1"])  # a small chart has no room for it
    ends = chart.evaluate("""(svg) => [...svg.querySelectorAll(".dtk-lines path")].map((path) => path.getBBox())
      .map(({ x, width }) => x + width)""")
    plot = chart.locator(".dtk-grid line").first.evaluate("(line) => line.x2.baseVal.value")
    assert ends[1] == pytest.approx(plot, abs=1)
    assert chart.locator(".dtk-labels circle").count() == 1  # the longer run needs no dot within the plot


_LABELS_IN_SIGHT = """(svg) => {
  const { left, right, top, bottom } = svg.getBoundingClientRect();
  const boxes = [...svg.querySelectorAll(".dtk-labels text")].map((text) => text.getBoundingClientRect());
  return boxes.every((box) => box.left >= left && box.right <= right + 1)
    && boxes.every((box) => box.top >= top - 1 && box.bottom <= bottom + 1)
    && boxes.every((a, k) => boxes.every((b, other) => other <= k || a.bottom <= b.top + 2 || b.bottom <= a.top + 2
      || a.right <= b.left || b.right <= a.left));
}"""


@pytest.mark.parametrize("width", [600, 1400])
@pytest.mark.parametrize("num_runs", [2, 8])
def test_long_names_wrap_and_a_pointer_shows_the_whole(
    page: Page, width: int, num_runs: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")  # several test processes have narrower terminals
    names = [f"ParameterAveraging(every={k}), warm-up of a tenth of it all" for k in range(1, num_runs + 1)]
    runs = [FakeSource(steps=200, seed=k, name=name) for k, name in enumerate(names)]
    for run in runs:
        run.advance(200)
    page.set_viewport_size({"width": width - 130, "height": 900})  # JupyterLab's own margins
    load_widget(
        page, str(ComparisonWidget._esm), ComparisonMessageBuilder(dtkit.compare(*runs)).build_snapshot(), "light"
    )
    chart = page.get_by_test_id("comparison-chart").locator("svg.dtk-lines-chart")
    expect(chart.locator(".dtk-labels text")).to_have_count(num_runs)
    assert chart.evaluate(_LABELS_IN_SIGHT)
    titles = chart.locator(".dtk-labels title").all_text_contents()
    assert sorted(titles) == [f"{k}: {name}" for k, name in enumerate(dtkit.compare(*runs).labels, 1)]
    chart.hover(position={"x": 200, "y": 100})
    expect(page.get_by_test_id("comparison-chart").get_by_test_id("tooltip")).to_contain_text(names[0])
    assert all(name in repr(dtkit.compare(*runs)) for name in names)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["DataParallel(), lr 0.1", "DataParallel(), lr 0.02", "Sharded(stage=3)"], ["1: lr 0.1", "2: lr 0.02", "3"]),
        (["Averaging(every=4), lr 1", "Averaging(every=8), lr 1"], ["1: every=4", "2: every=8"]),
        (["wide", "narrow"], ["1: wide", "2: narrow"]),
        (["ResNet of 50 layers", "ResNet of 18 layers, pretrained"], ["1", "2"]),
        (["a run of a name", "a run of a name"], ["1: name", "2: name"]),
    ],
)
@pytest.mark.parametrize("width", [400, 600])
def test_a_small_chart_has_what_is_distinct_in_names_or_numbers(
    page: Page, names: list[str], shown: list[str], width: int
):
    page.set_viewport_size({"width": width - 20, "height": 900})
    runs = [FakeSource(steps=200, seed=k, name=name) for k, name in enumerate(names)]
    for run in runs:
        run.advance(200)
    comparison = dtkit.compare(*runs, **({"labels": names} if len(set(names)) > 1 else {}))
    load_widget(page, str(ComparisonWidget._esm), ComparisonMessageBuilder(comparison).build_snapshot(), "light")
    for name in ("comparison-chart", "time-chart", "rate-chart"):
        chart = page.get_by_test_id(name).locator("svg.dtk-lines-chart")
        expect(chart.locator(".dtk-labels text")).to_have_count(len(runs))
        texts = sorted(chart.locator(".dtk-labels text").all_text_contents())
        room = [text if width == 600 or len(text) < 9 else text[0] for text in shown]
        assert texts == room
        assert chart.evaluate(_LABELS_IN_SIGHT)
        share = chart.evaluate("(svg) => 1 - svg.querySelector('.dtk-grid line').x2.baseVal.value / svg.clientWidth")
        assert share <= 0.2
    legend = page.get_by_test_id("dtkit-comparison").get_by_role("button").filter(has_text=re.compile(r"^\s*\d: "))
    expect(legend).to_have_text([f"{number}: {name}" for number, name in enumerate(comparison.short_names, 1)])


def test_a_setting_and_its_number_are_on_one_line_at_the_end_of_a_run(page: Page):
    page.set_viewport_size({"width": 700, "height": 900})
    message = build_message_of_named(["DataParallel(), lr 0.02", "DataParallel(), lr 0.12"], 200)
    load_widget(page, str(ComparisonWidget._esm), message, "light")
    lines = page.get_by_test_id("comparison-chart").locator(".dtk-labels tspan")
    expect(lines).to_have_count(4)
    texts = [text.strip() for text in lines.all_text_contents()]
    assert sorted(texts) == ["1: DataParallel(),", "2: DataParallel(),", "lr 0.02", "lr 0.12"]


@pytest.mark.parametrize("width", [600, 800])
def test_labels_of_runs_with_a_common_beginning_are_told_apart(page: Page, width: int):
    names = [f"resnet50 on imagenet, cosine warm-up, label smoothing, seed {k}" for k in range(8)]
    runs = [FakeSource(steps=200, seed=k, name=name) for k, name in enumerate(names)]
    for run in runs:
        run.advance(200)
    page.set_viewport_size({"width": width - 130, "height": 900})  # JupyterLab's own margins
    comparison = dtkit.compare(*runs)
    load_widget(page, str(ComparisonWidget._esm), ComparisonMessageBuilder(comparison).build_snapshot(), "light")
    labels = page.get_by_test_id("comparison-chart").locator(".dtk-labels text")
    expect(labels).to_have_count(8)
    texts = [text.replace("\xa0", " ") for text in labels.all_text_contents()]
    assert all(any(f"seed {k}" in text for text in texts) for k in range(8)), texts
    titles = page.get_by_test_id("comparison-chart").locator(".dtk-labels title").all_text_contents()
    assert sorted(titles) == [f"{k}: {name}" for k, name in enumerate(names, 1)]
    cell = page.get_by_test_id("runs-table").locator("tbody th").first
    expect(cell).to_have_attribute("title", names[0])
    assert page.evaluate("document.documentElement.scrollWidth") <= width - 130


@pytest.mark.parametrize("width", [600, 800])
def test_a_table_of_four_runs_fits_and_none_is_out_of_sight(page: Page, width: int):
    show_named_runs(page, 4, width)
    region = page.get_by_test_id("runs-table").locator(".dtk-scroll")
    assert region.evaluate("(el) => el.scrollWidth - el.clientWidth") <= 0
    assert region.locator("table").evaluate(_CUT_CELLS) == []
    for k in range(1, 5):
        expect(region.get_by_text(f"{k}: ParameterAveraging(every={k})")).to_be_visible()


_EDGE = """(el) => {
  const { backgroundAttachment, backgroundImage } = getComputedStyle(el);
  const covered = [...el.querySelectorAll("th, td")].filter((cell) => getComputedStyle(cell).backgroundImage !== "none"
    || !["rgba(0, 0, 0, 0)", "transparent"].includes(getComputedStyle(cell).backgroundColor));
  return [backgroundAttachment, backgroundImage.split("linear-gradient").length - 1, covered.length];
}"""


def test_a_table_that_scrolls_has_a_shadow_where_it_goes_on(page: Page):
    show_named_runs(page, 16, 430)
    region = page.get_by_test_id("runs-table").locator(".dtk-scroll")
    assert region.evaluate("(el) => el.scrollWidth - el.clientWidth") > 0
    assert region.evaluate(_EDGE) == ["local, local, scroll, scroll", 4, 0]


def show_named_runs(page: Page, num_runs: int, width: int) -> None:
    """Show runs of different strategies in a window of a width."""
    runs = [FakeSource(steps=200, seed=k, name=f"ParameterAveraging(every={k + 1})") for k in range(num_runs)]
    for k, run in enumerate(runs):
        run.sends = lambda step, k=k: 12_345 * (k + 1) + 0 * step
        run.advance(200 - 10 * k)
        run.history.add(Evaluation(180 - 10 * k, 100, {"loss": 0.123 + k, "accuracy": 0.9 - k / 100}))
    page.set_viewport_size({"width": width - 130, "height": 900})  # JupyterLab's own margins
    message = ComparisonMessageBuilder(dtkit.compare(*runs)).build_snapshot()
    load_widget(page, str(ComparisonWidget._esm), message, "light")
    page.evaluate(_JUPYTERLAB)
    expect(page.get_by_test_id("runs-table").locator("table")).to_be_visible()


@pytest.mark.parametrize("testid", ["comparison-chart", "time-chart", "metric-chart"])
def test_a_run_that_diverged_leaves_room_for_the_others(page: Page, testid: str):
    page.set_viewport_size({"width": 1200, "height": 900})
    message = ComparisonMessageBuilder(dtkit.compare(*make_diverging_pair())).build_snapshot()
    load_widget(page, str(ComparisonWidget._esm), message, "light")
    panel = page.get_by_test_id(testid).first
    expect(panel.locator("h3")).to_contain_text("left out")
    assert panel.locator("h3").evaluate("(h) => h.scrollWidth <= h.clientWidth")  # the caption is whole
    plot = "(svg) => svg.querySelector('clipPath rect').getBBox().height"
    line = "(svg) => svg.querySelector('.dtk-lines path').getBBox().height"
    chart = panel.locator("svg.dtk-lines-chart")
    assert chart.evaluate(line) > 0.3 * chart.evaluate(plot)
    assert chart.evaluate(_LABELS_IN_SIGHT)
    expect(chart.get_by_text("↑ 2: diverged")).to_be_visible()
    expect(chart.get_by_text("diverged at step 2")).to_be_visible()
    tops = "(els) => els.map((el) => el.getBBox().y)"
    assert min(chart.locator(".dtk-labels :is(path, circle, text)").evaluate_all(tops)) >= 0


def test_numbers_that_two_runs_logged_have_a_chart(page: Page):
    page.set_viewport_size({"width": 1200, "height": 900})
    message = ComparisonMessageBuilder(dtkit.compare(*make_logging_runs())).build_snapshot()
    load_widget(page, str(ComparisonWidget._esm), message, "light")
    chart = page.get_by_test_id("logged-chart")
    expect(chart.locator(".dtk-title")).to_have_text("entropy")
    expect(chart.locator(".dtk-labels text")).to_have_count(2)


def make_paced_pair() -> tuple[FakeSource, FakeSource]:
    """Return two runs of 200 steps; the second one has smaller epochs, fewer samples in a step, and shorter steps."""
    runs = FakeSource(steps=200, name="slow"), FakeSource(steps=200, seed=1, name="quick")
    runs[1].spec = dataclasses.replace(runs[1].spec, samples=runs[1].spec.samples // 2, batch_size=128)
    runs[0].slowness = dict.fromkeys(range(4), 3.0)
    for run in runs:
        run.advance(200)
        run.history.add(Evaluation(200, 100, {"loss": 0.5, "accuracy": 0.9}))
    return runs


@pytest.mark.parametrize(("axis", "title"), [("time", "time"), ("epoch", "epochs"), ("samples", "samples")])
def test_all_charts_follow_the_axis_of_the_runs(page: Page, axis: str, title: str):
    runs = make_paced_pair()
    load_widget(
        page, str(ComparisonWidget._esm), ComparisonMessageBuilder(dtkit.compare(*runs)).build_snapshot(), "light"
    )
    root, chart = page.get_by_test_id("dtkit-comparison"), page.get_by_test_id("comparison-chart")
    expect(root.get_by_role("toolbar", name="chart tools")).to_be_visible()
    root.get_by_test_id("x-axis").focus()
    root.get_by_label("x axis").select_option(axis)
    expect(chart.get_by_role("heading")).to_contain_text(f"Loss against {title}")
    expect(chart.locator(".dtk-grid text").filter(has_text=axis)).to_have_count(1)
    expect(page.get_by_test_id("time-chart")).to_be_visible(visible=axis != "time")
    ends = chart.locator("svg.dtk-lines-chart").evaluate(
        """(svg) => [...svg.querySelectorAll(".dtk-lines path:not([d=''])")].map((path) => path.getBBox())
          .map(({ x, width }) => x + width)"""
    )
    ratio = (ends[1] - 50) / (ends[0] - 50)  # the plot begins at 50
    slow_s, quick_s = (run.history.totals()["step_s"].sum() for run in runs)
    assert ratio == pytest.approx({"time": quick_s / slow_s, "samples": 0.5, "epoch": 1}[axis], abs=0.03)
    svg = chart.locator("svg.dtk-lines-chart")
    svg.focus()
    page.keyboard.press("+")
    expect(root.get_by_test_id("reset-zoom")).to_be_visible()
    expect(svg).to_have_attribute("aria-label", re.compile("1: slow .*; 2: quick "))
    root.get_by_label("x axis").select_option("step")
    expect(root.get_by_test_id("reset-zoom")).to_be_hidden()


def test_an_axis_that_a_history_lacks_is_not_offered(page: Page):
    first, second = make_paced_pair()
    message = ComparisonMessageBuilder(dtkit.compare(first, second.history)).build_snapshot()
    load_widget(page, str(ComparisonWidget._esm), message, "light")
    options = page.get_by_test_id("x-axis").locator("option")
    expect(options).to_have_count(4)
    assert [option.is_enabled() for option in options.all()] == [True, False, True, False]


def test_the_legend_hides_runs_in_all_charts(page: Page):
    message = ComparisonMessageBuilder(dtkit.compare(*make_paced_pair())).build_snapshot()
    load_widget(page, str(ComparisonWidget._esm), message, "light")
    button = page.get_by_role("button", name="1: slow")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "false")
    for chart in ("comparison-chart", "metric-chart"):
        expect(page.get_by_test_id(chart).first.locator(".dtk-lines path:not([d=''])")).to_have_count(1)


def test_names_are_numbered_in_all_charts_and_lie_on_no_number_of_an_axis(page: Page):
    page.set_viewport_size({"width": 1400, "height": 1600})
    runs = [FakeSource(steps=400, seed=k, name=name) for k, name in enumerate(["wide", "narrow", "fails"])]
    for run, steps in zip(runs, (400, 400, 8), strict=True):
        run.advance(steps)
        run.history.add(Evaluation(min(steps, 20), 100, {"accuracy": 0.4}))
        if steps > 20:
            run.history.add(Evaluation(steps, 100, {"accuracy": 0.9}))
    cause = "the shapes of the parameter and of its gradient differ, " * 5 + "in the last layer"
    runs[2].state, runs[2].exception = State.FAILED, ValueError(cause)
    message = ComparisonMessageBuilder(dtkit.compare(*runs)).build_snapshot()
    load_widget(page, str(ComparisonWidget._esm), message, "light")
    charts = page.locator(".dtk-panel:has(svg.dtk-lines-chart)")
    expect(charts.locator(".dtk-labels text").first).to_be_visible()
    texts = charts.locator(".dtk-labels text").all_text_contents()
    assert all(re.match(r"\d", text) for text in texts), texts
    on_axis = charts.evaluate_all("""(charts) => charts.flatMap((chart) => {
      const ticks = [...chart.querySelectorAll(".dtk-grid text")].map((el) => el.getBoundingClientRect());
      return [...chart.querySelectorAll(".dtk-labels text")].filter((el) => {
        const a = el.getBoundingClientRect();
        return ticks.some((b) => a.left < b.right && b.left < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom);
      }).map((el) => el.textContent);
    })""")
    assert on_axis == []
    line = page.get_by_test_id("runs-table").get_by_test_id("causes").locator("li")
    expect(line).to_contain_text("in the last layer")
    assert line.evaluate("(li) => li.scrollWidth <= li.clientWidth")


@pytest.mark.parametrize("width", [400, 1400])  # narrow: a column for each run
def test_the_table_of_runs_stays_sorted_by_a_click_or_a_key(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 900})
    runs = [FakeSource(steps=400, seed=seed, name=name) for seed, name in enumerate(["c", "a", "b"])]
    for run, steps, accuracy in zip(runs, (120, 40, 80), (0.9, 0.7, 0.8), strict=True):
        run.advance(steps)
        run.history.add(Evaluation(steps, 100, {"accuracy": accuracy}))
    builder = ComparisonMessageBuilder(dtkit.compare(*runs))
    load_widget(page, str(ComparisonWidget._esm), builder.build_snapshot(), "light")
    table = page.get_by_test_id("runs-table")
    names, lines = table.locator(".dtk-run > span"), table.locator(".dtk-run path")
    head = table.locator("[aria-sort]").filter(has_text=re.compile("^steps$"))
    expect(head).to_have_attribute("aria-sort", "none")
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    expect(names).to_have_text(["2: a", "3: b", "1: c"])
    assert [re.findall(r"dtk-n(\d)", str(line.get_attribute("class"))) for line in lines.all()] == [["1"], ["2"], ["0"]]
    runs[1].advance(60)  # more steps than another run has
    page.evaluate("([content, buffers]) => window.receive(content, buffers)", encode_message(builder.build_snapshot()))
    expect(names).to_have_text(["3: b", "2: a", "1: c"])
    expect(head.get_by_role("button")).to_be_focused()
    page.keyboard.press("Enter")
    expect(head).to_have_attribute("aria-sort", "descending")
    expect(names).to_have_text(["1: c", "2: a", "3: b"])
    page.keyboard.press("Space")
    expect(head).to_have_attribute("aria-sort", "none")
    expect(names).to_have_text(["1: c", "2: a", "3: b"])
    best = table.locator("[aria-sort]").filter(has_text="best validation accuracy")
    best.get_by_role("button").click()
    expect(best).to_have_attribute("aria-sort", "descending")  # the best first
    expect(names).to_have_text(["1: c", "3: b", "2: a"])
    assert table.locator("table").evaluate(_CUT_CELLS) == []


@pytest.mark.parametrize("width", [400, 1400])  # narrow: a column for each run
def test_sorted_runs_have_the_numbers_and_colors_of_their_lines(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 900})
    runs = [FakeSource(steps=400, seed=seed, name=name) for seed, name in enumerate("abc")]
    for run, steps in zip(runs, (120, 40, 80), strict=True):
        run.advance(steps)
        run.spec = dataclasses.replace(
            run.spec, settings=tuple((name, str(steps)) for name in ("lr", "warm-up", "seed"))
        )
    message = ComparisonMessageBuilder(dtkit.compare(*runs, sort_by="steps")).build_snapshot()
    load_widget(page, str(ComparisonWidget._esm), message, "light")
    for testid in ("runs-table", "settings-table"):
        table = page.get_by_test_id(testid)
        expect(table.locator(".dtk-run > span")).to_have_text(["2: b", "3: c", "1: a"])
        looks = [str(line.get_attribute("class")) for line in table.locator(".dtk-run path").all()]
        assert [re.findall(r"dtk-n(\d) dtk-dash(\d)", look) for look in looks] == [
            [("1", "1")],
            [("2", "2")],
            [("0", "0")],
        ]
    table = page.get_by_test_id("runs-table")
    assert table.locator("table").text_content().index("40") < table.locator("table").text_content().index("120")
    head = table.locator("[aria-sort]").filter(has_text=re.compile("^run$"))
    for names in (["1: a", "2: b", "3: c"], ["3: c", "2: b", "1: a"], ["2: b", "3: c", "1: a"]):  # then as written
        head.get_by_role("button").click()
        expect(table.locator(".dtk-run > span")).to_have_text(names)
    buttons = page.get_by_test_id("dtkit-comparison").locator(".dtk-lines-legend button")
    expect(buttons).to_have_text(["2: b", "3: c", "1: a"])
    buttons.first.click()  # hides its run
    labels = page.get_by_test_id("comparison-chart").locator(".dtk-labels g")
    expect(labels).to_have_count(2)
    assert "2: b" not in labels.locator("title").all_text_contents()
    buttons.first.click()
    expect(labels).to_have_count(3)
    hues = {label.locator("title").text_content(): label.inner_html() for label in labels.all()}
    assert all(f"dtk-n{k}" in hues[f"{k + 1}: {name}"] for k, name in enumerate("abc"))


@pytest.mark.parametrize("place", ["live view", "report"])
def test_the_column_of_runs_sorts_by_their_numbers(page: Page, tmp_path: Path, place: str):
    """A live view sorted by names, and a report by numbers."""
    runs = [FakeSource(steps=40, seed=seed, name=name) for seed, name in enumerate("kjihgfedcba")]
    for run in runs:
        run.advance(40)
    comparison = dtkit.compare(*runs)
    if place == "report":
        comparison.report(tmp_path / "comparison.html")
        page.goto(f"file://{tmp_path / 'comparison.html'}")
        table = page.locator(".sortable table")
    else:
        load_widget(page, str(ComparisonWidget._esm), ComparisonMessageBuilder(comparison).build_snapshot(), "light")
        table = page.get_by_test_id("runs-table").locator("table")
    head = table.locator("[aria-sort]").filter(has_text=re.compile("^run$"))
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    first = table.locator("tbody tr > :first-child")
    expected = [re.compile(rf"^\s*{k}:\s*{run.spec.name}$") for k, run in enumerate(runs, 1)]
    expect(first).to_have_text(expected)
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "descending")
    expect(first).to_have_text(expected[::-1])


@pytest.mark.parametrize("place", ["report", "live view", "narrow live view"])
@pytest.mark.parametrize(
    ("column", "orders"),
    [
        ("steps", {"ascending": "bca", "descending": "acb"}),
        ("best validation accuracy", {"descending": "acb", "ascending": "bca"}),
    ],
)
def test_the_column_of_sort_by_is_marked_and_a_click_goes_on_from_it(
    page: Page, tmp_path: Path, place: str, column: str, orders: dict[str, str]
):
    page.set_viewport_size({"width": 400 if place.startswith("narrow") else 1400, "height": 900})
    runs = make_runs_of_lengths()
    table = show_table(page, dtkit.compare(*runs, sort_by=column), tmp_path if place == "report" else None)
    head = table.locator("[aria-sort]").filter(has_text=re.compile(f"^{column}$"))
    names = table.get_by_text(re.compile(r"^\s*\d:\s*[abc]$"))
    for order in (*orders, *orders):  # the order as written has a mark, too
        expect(head).to_have_attribute("aria-sort", order)
        expect(table.locator("[aria-sort$=ending]")).to_have_count(1)
        expect(names).to_have_text([re.compile(f"{name}$") for name in orders[order]])
        arrow = head.get_by_role("button").evaluate("(button) => getComputedStyle(button, '::after').content")
        assert {"ascending": "▲", "descending": "▼"}[order] in arrow
        head.get_by_role("button").click()
    other = table.locator("[aria-sort]").filter(has_text=re.compile("^samples/s$"))
    for order in ("descending", "ascending", "none"):
        other.get_by_role("button").click()
        expect(other).to_have_attribute("aria-sort", order)
    expect(head).to_have_attribute("aria-sort", next(iter(orders)))  # as written again


@pytest.mark.parametrize("place", ["report", "live view"])
@pytest.mark.parametrize("settings", [2, 5])  # five: a column for each run
def test_the_table_of_settings_follows_the_order_of_the_table_of_runs(
    page: Page, tmp_path: Path, place: str, settings: int
):
    runs = make_runs_of_lengths()
    for run in runs:
        names = ("lr", "warm-up", "decay", "weights", "dropout")[:settings]
        run.spec = dataclasses.replace(run.spec, settings=tuple((name, str(run.step)) for name in names))
    comparison = dtkit.compare(*runs, sort_by="accuracy")
    table = show_table(page, comparison, tmp_path if place == "report" else None)
    shown = page.locator(".follows table") if place == "report" else page.get_by_test_id("settings-table")
    head = table.get_by_role("columnheader", name=re.compile("^steps$"))
    for order in ("acb", "bca", "acb", "acb"):  # the last one is as written
        expect(shown.get_by_text(re.compile(r"^\s*\d:\s*[abc]$"))).to_have_text([re.compile(f"{k}$") for k in order])
        values = re.findall(r"\b(?:120|40|80)\b", "|".join(shown.locator("td, th").all_text_contents()))
        expected = [{"a": "120", "b": "40", "c": "80"}[name] for name in order]
        assert values == (expected * 5 if settings == 5 else [value for value in expected for _ in range(2)])
        head.get_by_role("button").click()


def make_runs_of_lengths() -> list[FakeSource]:
    """Return three runs whose order of steps, accuracies and settings is other than that of their names."""
    runs = [FakeSource(steps=400, seed=seed, name=name) for seed, name in enumerate("abc")]
    for run, steps in zip(runs, (120, 40, 80), strict=True):
        run.advance(steps)
        run.history.add(Evaluation(steps, 100, {"accuracy": steps / 400}))
        settings = tuple((name, str(steps)) for name in ("lr", "warm-up", "seed"))
        run.spec = dataclasses.replace(run.spec, settings=settings)
    return runs


def show_table(page: Page, comparison: Comparison, folder: Path | None) -> Locator:
    """Show a comparison live, or its report in a folder. Return its table of runs."""
    if folder is None:
        load_widget(page, str(ComparisonWidget._esm), ComparisonMessageBuilder(comparison).build_snapshot(), "light")
        return page.get_by_test_id("runs-table").locator("table")
    comparison.report(folder / "comparison.html")
    page.goto(f"file://{folder / 'comparison.html'}")
    return page.locator(".sortable table")


def show_equal_pair(page: Page, theme: str = "light") -> None:
    """Show three runs of which the first and the last have the same losses."""
    runs = [FakeSource(steps=400, seed=seed, name=f"lr {lr}") for lr, seed in ((0.02, 0), (0.1, 1), (0.5, 0))]
    for run in runs:
        run.advance(200)
    load_widget(
        page, str(ComparisonWidget._esm), ComparisonMessageBuilder(dtkit.compare(*runs)).build_snapshot(), theme
    )


def test_runs_whose_lines_are_equal_take_turns_and_are_named(page: Page):
    show_equal_pair(page)
    chart = page.get_by_test_id("comparison-chart")
    expect(chart.locator("h3 .dtk-note")).to_contain_text("equal lines: 1 = 3")
    read = """(paths) => paths.slice(0, 3).map((path) => {
      const { strokeDasharray, strokeDashoffset, strokeLinecap } = getComputedStyle(path);
      return [strokeDasharray, strokeDashoffset, strokeLinecap];
    })"""
    first, own, last = chart.locator(".dtk-lines path").evaluate_all(read)
    assert (first[0], last[0]) == ("9px, 9px", "9px, 9px")
    assert (first[1], last[1]) == ("18px", "9px")
    assert own[2] == "round"
    page.get_by_role("button", name="3: lr 0.5").click()  # which hides it
    expect(chart.locator("h3 .dtk-note")).not_to_contain_text("equal lines")
    assert chart.locator(".dtk-lines path").evaluate_all(read)[0][0] == "none"


def test_the_tooltip_of_runs_has_their_numbers_and_dashes(page: Page):
    show_equal_pair(page)
    chart = page.get_by_test_id("comparison-chart")
    chart.locator("svg.dtk-lines-chart").hover(position={"x": 200, "y": 100})
    rows = chart.get_by_test_id("tooltip").locator(".dtk-tip-rows > div")
    expect(rows.locator("span")).to_have_text(["1: lr 0.02", "2: lr 0.1", "3: lr 0.5"])
    looks = rows.locator("path").evaluate_all("(paths) => paths.map((path) => path.getAttribute('class'))")
    assert [re.findall(r"dtk-n(\d) dtk-dash(\d)", look) for look in looks] == [[("0", "0")], [("1", "1")], [("2", "2")]]


def test_the_values_of_runs_are_saved_with_their_numbers_and_without_an_empty_mean(page: Page):
    show_equal_pair(page)
    chart = page.get_by_test_id("comparison-chart")
    chart.hover()
    chart.get_by_test_id("download").click()
    with page.expect_download() as download:
        chart.get_by_test_id("save-csv").click()
    header, *lines = csv.reader(Path(download.value.path()).read_text(encoding="utf-8").splitlines())
    assert header == ["step", "1: lr 0.02", "2: lr 0.1", "3: lr 0.5"]
    assert all(all(line) for line in lines)


@pytest.mark.parametrize("width", [400, 450, 1400])
def test_a_setting_and_its_number_are_on_one_line_of_the_table(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 900})
    show_equal_pair(page)
    names = page.get_by_test_id("runs-table").locator(".dtk-run > span")
    expect(names.first).to_be_visible()
    heights = names.evaluate_all("(names) => names.map((name) => name.getBoundingClientRect().height)")
    assert max(heights) < 20


def test_the_legend_follows_the_order_of_the_table(page: Page, tmp_path: Path):
    runs = [FakeSource(steps=400, seed=seed, name=name) for seed, name in enumerate("abc")]
    for run, steps in zip(runs, (120, 40, 80), strict=True):
        run.advance(steps)
    comparison = dtkit.compare(*runs)
    load_widget(page, str(ComparisonWidget._esm), ComparisonMessageBuilder(comparison).build_snapshot(), "light")
    legend = page.get_by_test_id("legend").locator("button")
    page.get_by_test_id("runs-table").get_by_role("button", name="steps", exact=True).click()
    expect(legend).to_have_text(["2: b", "3: c", "1: a"])
    looks = [str(path.get_attribute("class")) for path in legend.locator("path").all()]
    assert [re.findall(r"dtk-n(\d)", look) for look in looks] == [["1"], ["2"], ["0"]]
    comparison.report(tmp_path / "comparison.html")
    page.goto(f"file://{tmp_path / 'comparison.html'}")
    expect(legend).to_have_text(["1: a", "2: b", "3: c"])
    page.locator(".sortable").get_by_role("button", name="steps", exact=True).click()
    expect(legend).to_have_text(["2: b", "3: c", "1: a"])


def test_the_legend_of_runs_has_their_dashes(page: Page):
    runs = [FakeSource(steps=40, seed=seed, name=name) for seed, name in enumerate("abcd")]
    for run in runs:
        run.advance(40)
    builder = ComparisonMessageBuilder(dtkit.compare(*runs))
    load_widget(page, str(ComparisonWidget._esm), builder.build_snapshot(), "light")
    dashes = """(paths) => paths.map((path) => getComputedStyle(path).strokeDasharray)"""
    in_legend = page.get_by_test_id("legend").locator("svg path").evaluate_all(dashes)
    assert in_legend == page.get_by_test_id("runs-table").locator("svg path").evaluate_all(dashes)
    assert len(set(in_legend)) == len(runs)


def test_the_tables_are_above_the_charts(page: Page):
    show_runs(page)
    places = [page.get_by_test_id(name).first.bounding_box() for name in ("runs-table", "settings-table")]
    chart = page.get_by_test_id("comparison-chart").bounding_box()
    assert chart
    assert all(place and place["y"] + place["height"] <= chart["y"] for place in places)


def test_shares_stay_linear_and_other_small_numbers_become_logarithmic(page: Page):
    runs = [FakeSource(steps=40, seed=k, name=f"run {k}") for k in range(2)]
    for run in runs:
        run.advance(40)
        falling = 10.0 ** (-np.arange(40) / 10)
        values = {"accuracy": falling[::-1], "my_loss": falling, "lr": falling / 50}
        rows = {name: [(k + 1, value, 1.0) for k, value in enumerate(line)] for name, line in values.items()}
        run.history.add(ScalarRecord(0, rows))
    message = ComparisonMessageBuilder(dtkit.compare(*runs)).build_snapshot()
    load_widget(page, str(ComparisonWidget._esm), message, "light")
    charts = page.locator("[data-testid=logged-chart]")
    expect(charts.filter(has_text="my_loss")).to_contain_text("log scale")
    expect(charts.filter(has_text="lr")).to_contain_text("log scale")
    accuracy = charts.filter(has_text="accuracy")
    expect(accuracy).not_to_contain_text("log scale")
    page.get_by_test_id("scale").click()
    expect(charts.filter(has_text="my_loss")).not_to_contain_text("log scale")
    page.get_by_test_id("scale").click()
    expect(charts.filter(has_text="my_loss")).to_contain_text("log scale")
    expect(accuracy).not_to_contain_text("log scale")


@pytest.mark.parametrize(("width", "columns"), [(1330, 2), (960, 2), (600, 1), (360, 1)])
def test_a_saved_comparison_fills_the_width_with_charts(page: Page, width: int, columns: int):
    runs = make_paced_pair()
    page.set_viewport_size({"width": width, "height": 900})
    page.set_content(f"<body style='margin: 0'>{dtkit.compare(*runs)._repr_html_()}</body>")
    assert page.locator("img[src*=png]").first.get_attribute("alt").startswith("the lines of ")
    images = page.locator("div:has(> img)").last.locator("img")
    boxes = [image.bounding_box() for image in images.all()]
    assert len(boxes) == 4  # loss against steps and time, validation loss and accuracy
    assert len({box and box["x"] for box in boxes}) == columns
    assert sum(box["width"] for box in boxes[:columns] if box) > 0.98 * width
    assert max(box["x"] + box["width"] for box in boxes if box) <= width
    assert images.first.get_attribute("alt")

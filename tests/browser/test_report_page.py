"""Reports in a browser: nothing is cut off in a narrow window, and charts zoom as in the live views."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

import dtkit
from dtkit._util import resources
from dtkit.dashboard.report import write_report
from dtkit.history.scalars import ScalarRecord
from dtkit.rpc.reference import StepTimes
from dtkit.types import Evaluation
from tests.support.fake_source import FakeSource
from tests.support.lab import Look
from tests.support.verification import make_verification

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser


def make_source(name: str = "ConvNet", seed: int = 0) -> FakeSource:
    """Return a run of four nodes with a straggler, validation and a metric."""
    source = FakeSource(name=name, seed=seed)
    source.slowness = {1: 1.6}
    source.advance(200)
    source.history.add(Evaluation(200, 100, {"loss": 0.5, "accuracy": 0.9}))
    source.event("lost", "node 1 lost at step 30: the engine of node 1 is gone", 1)
    source.event("repair", "node 1 replaced: all go on from step 30, no step lost")
    return source


@pytest.mark.parametrize("look", [Look(width=600), Look(width=1200), Look(width=1400)], indirect=True)
def test_no_table_of_a_report_is_cut_off(page: Page, tmp_path: Path):
    write_report(make_source(), tmp_path / "run.html")
    runs = make_source("first"), make_source("second", 1)
    dtkit.compare(*runs).report(tmp_path / "comparison.html")
    for name in ("run", "comparison"):
        page.goto(f"file://{tmp_path / name}.html")
        assert page.locator("table").count() > 0
        cut: list[str] = page.evaluate(
            """() => [...document.querySelectorAll(".scroll"), document.documentElement]
                 .filter((el) => el.scrollWidth > el.clientWidth).map((el) => el.textContent.slice(0, 60))"""
        )
        assert cut == []


def test_the_mean_loss_is_one_number_in_card_and_chart(page: Page, tmp_path: Path):
    source = FakeSource(ranks=2)
    source.advance(19, loss=0.25)
    source.advance(1, loss=1.0)
    write_report(source, tmp_path / "run.html")
    page.goto(f"file://{tmp_path / 'run.html'}")
    expect(page.locator(".card", has_text="training loss")).to_contain_text("0.287")
    expect(page.locator("#dtk-live .dtk-labels text", has_text="mean")).to_have_text("mean 0.287")


@pytest.mark.parametrize("look", [Look(width=1400)], indirect=True)
def test_no_large_gap_is_left_below_a_column_of_a_report(page: Page, tmp_path: Path):
    """Up to 300 px were empty beside the settings."""
    source = make_source()
    for num_settings in (0, 6, 12, 18, 30):
        settings = tuple((f"setting {k}", "a value") for k in range(num_settings))
        source.spec = dataclasses.replace(source.spec, settings=settings)
        write_report(source, tmp_path / "run.html")
        page.goto(f"file://{tmp_path / 'run.html'}")
        bottoms: dict[str, float] = page.evaluate(_ENDS)
        assert len(bottoms) == 2
        most = 130 if num_settings < 30 else 180  # four sections; a very long table goes on in the next column
        assert abs(bottoms["0"] - bottoms["1"]) < most, f"{num_settings} settings"


_ENDS = """() => {
  const bottoms = {};
  for (const row of document.querySelectorAll(".columns :is(tr, p)")) {
    const box = row.getBoundingClientRect(), column = Math.floor(2 * box.left / innerWidth);
    bottoms[column] = Math.max(bottoms[column] ?? 0, box.bottom);
  }
  return bottoms;
}"""


@pytest.mark.parametrize("look", [Look(width=1400)], indirect=True)
def test_the_tables_of_a_report_keep_their_order_in_a_narrow_page_and_on_paper(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(resources, "name_processor", lambda: "a processor")  # a long name may leave no hole
    source = make_source()
    source.spec = dataclasses.replace(source.spec, settings=tuple((f"setting {k}", "a value") for k in range(8)))
    write_report(source, tmp_path / "run.html")
    page.set_viewport_size({"width": 700, "height": 800})
    page.goto(f"file://{tmp_path / 'run.html'}")
    read_order = """() => [...document.querySelectorAll(".columns h2")].filter((el) => el.getClientRects().length)
      .sort((a, b) => a.getBoundingClientRect().y - b.getBoundingClientRect().y).map((el) => el.textContent)"""
    order: list[str] = page.evaluate(read_order)
    assert order[0] == "Settings, as typed"
    page.set_viewport_size({"width": 1400, "height": 800})
    expect(page.locator(".columns.balanced")).to_have_count(1)
    page.set_viewport_size({"width": 700, "height": 800})
    assert page.evaluate(read_order) == order
    page.emulate_media(media="print")
    assert page.evaluate(read_order) == order


@pytest.mark.parametrize("look", [Look(width=1400)], indirect=True)
def test_no_short_table_of_a_report_is_split_over_two_columns(page: Page, tmp_path: Path):
    source = make_source()
    for step in range(201, 210):
        source.history.add(Evaluation(step, 100, {"loss": 0.5}))
    source.verification = make_verification(StepTimes(17, all_ranks_s=0.100, single_process_s=0.125))
    for num_settings in (3, 6, 9):  # at which the middle is within different tables
        settings = tuple((f"setting {k}", "a value") for k in range(num_settings))
        source.spec = dataclasses.replace(source.spec, settings=settings)
        write_report(source, tmp_path / "run.html")
        page.goto(f"file://{tmp_path / 'run.html'}")
        split: list[str] = page.evaluate(
            """() => [...document.querySelectorAll(".columns section")]
                 .filter((el) => el.getClientRects().length > 1).map((el) => el.textContent.slice(0, 40))"""
        )
        assert split == [], f"{num_settings} settings"


@pytest.mark.parametrize("look", [Look(width=600), Look(width=800), Look(width=1400)], indirect=True)
def test_no_card_of_a_report_is_alone_beside_an_empty_row(page: Page, tmp_path: Path):
    source = make_source()
    source.verification = make_verification(StepTimes(17, all_ranks_s=0.100, single_process_s=0.125))
    write_report(source, tmp_path / "run.html")
    page.goto(f"file://{tmp_path / 'run.html'}")
    rows: dict[str, int] = page.evaluate(
        """() => {
          const rows = {};
          for (const card of document.querySelectorAll(".card")) {
            const top = card.getBoundingClientRect().top;
            rows[top] = (rows[top] ?? 0) + 1;
          }
          return rows;
        }"""
    )
    assert page.locator(".card").count() == 8
    width = page.viewport_size["width"]  # type: ignore[index]
    assert list(rows.values()) == ([3, 3, 2] if width == 600 else [4, 4])


@pytest.mark.parametrize("look", [Look(width=1400)], indirect=True)
def test_a_number_that_is_logged_and_validated_has_one_chart(page: Page, tmp_path: Path):
    source = make_source()
    source.history.add(ScalarRecord(0, {"accuracy": [(step, 0.5, 1.0) for step in range(1, 100)]}))
    write_report(source, tmp_path / "run.html")
    page.goto(f"file://{tmp_path / 'run.html'}")
    expect(page.get_by_test_id("metric-chart")).to_have_count(0)
    expect(page.get_by_test_id("scalars-chart").locator("h3")).to_contain_text("◇ validation")
    drawn = page.locator(".drawn h3").all_text_contents()
    assert [text.strip() for text in drawn if "accuracy" in text] == ["accuracy logged, and its validation"]


@pytest.mark.parametrize("name", ["run", "comparison"])
@pytest.mark.parametrize("look", [Look(width=600), Look(width=1400)], indirect=True)
def test_charts_of_a_report_zoom_by_pointer_and_keys(page: Page, tmp_path: Path, name: str):
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "request", lambda request: request.url.startswith(("file:", "data:", "blob:")) or errors.append(request.url)
    )
    write_report(make_source(), tmp_path / "run.html")
    dtkit.compare(make_source("first"), make_source("second", 1)).report(tmp_path / "comparison.html")
    page.goto(f"file://{tmp_path / name}.html")
    chart, reset = page.locator("#dtk-live svg.dtk-lines-chart").first, page.get_by_test_id("reset-zoom")
    expect(chart).to_be_visible()
    expect(page.locator(".drawn")).to_be_hidden()
    expect(reset).to_be_hidden()
    box = chart.bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= page.viewport_size["width"]  # type: ignore[index]
    page.mouse.move(box["x"] + 120, box["y"] + 90)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 95, steps=4)
    page.mouse.up()
    expect(reset).to_be_visible()
    expect(page.get_by_test_id("tooltip").first).to_contain_text("step")
    reset.click()
    expect(reset).to_be_hidden()
    chart.focus()
    page.keyboard.press("+")
    expect(reset).to_be_visible()
    page.keyboard.press("0")
    expect(reset).to_be_hidden()
    page.get_by_test_id("smoothing").fill("0.8")
    expect(page.locator(".dtk-smooth").first).to_be_attached()
    page.get_by_role("button", name="log y").click()
    expect(page.locator("#dtk-live h3").first).to_contain_text("log scale")
    page.emulate_media(media="print")
    expect(page.locator("#dtk-live")).to_be_hidden()
    expect(page.locator(".drawn svg.chart").first).to_be_visible()
    assert errors == []


@pytest.mark.parametrize("look", [Look(width=1400)], indirect=True)
def test_charts_of_a_report_follow_the_choice_of_colors(page: Page, tmp_path: Path):
    write_report(make_source(), tmp_path / "run.html")
    page.goto(f"file://{tmp_path}/run.html")
    charts = page.get_by_test_id("report-charts")
    expect(charts).to_have_attribute("data-theme", "light")
    page.get_by_text("dark", exact=True).click()
    expect(charts).to_have_attribute("data-theme", "dark")
    page.get_by_text("auto", exact=True).click()
    expect(charts).to_have_attribute("data-theme", "light")


def test_a_report_without_scripts_keeps_its_charts(browser: Browser, tmp_path: Path):
    write_report(make_source(), tmp_path / "run.html")
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(f"file://{tmp_path}/run.html")
        expect(page.locator(".drawn svg.chart").first).to_be_visible()


@pytest.mark.parametrize("look", [Look(width=1400)], indirect=True)
def test_a_wide_page_has_tables_in_two_columns_of_about_one_height(page: Page, tmp_path: Path):
    write_report(make_source(), tmp_path / "run.html")
    page.goto(f"file://{tmp_path}/run.html")
    boxes: list[list[float]] = page.evaluate(
        """() => [...document.querySelectorAll(".columns section")].map((el) => el.getBoundingClientRect())
             .map(({ x, width, bottom }) => [x, width, bottom])"""
    )
    left, right = ([box for box in boxes if (box[0] > 600) is is_right] for is_right in (False, True))
    assert len(left) >= 2
    assert len(right) >= 2
    assert min(width for _, width, _ in boxes) > 500
    assert abs(left[-1][2] - right[-1][2]) < 150
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("look", [Look(width=1400)], indirect=True)
def test_machines_of_a_short_run_are_values_in_one_row(page: Page, tmp_path: Path):
    source = FakeSource(ranks=2, strips=True)
    source.advance(12)
    for name in ("CPU (cores)", "network cards (MB/s)", "memory (MB)", "waiting for a core (%)"):
        source.history.add(ScalarRecord(0, {f"system/{name}": [(1, 2.0, 1.0)]}))
    write_report(source, tmp_path / "run.html")
    page.goto(f"file://{tmp_path}/run.html")
    values = page.get_by_test_id("system").locator(".dtk-flat")
    expect(values).to_have_count(4)
    places = [values.nth(k).bounding_box() for k in range(4)]
    assert len({place and place["y"] for place in places}) == 1
    assert all(place and 250 < place["width"] < 320 for place in places)
    assert values.first.locator(".dtk-note").evaluate("(el) => getComputedStyle(el).fontSize") == "12px"


@pytest.mark.parametrize("look", [Look(width=1400)], indirect=True)
def test_a_learning_rate_has_a_chart_in_a_report_once_it_changes(page: Page, tmp_path: Path):
    source = FakeSource(ranks=2, strips=True)
    source.advance(12)
    write_report(source, tmp_path / "run.html")
    page.goto(f"file://{tmp_path}/run.html")
    rate, norm, loss = (page.get_by_test_id(f"{name}-chart") for name in ("learning-rate", "gradient-norm", "loss"))
    expect(norm).to_be_visible()
    expect(rate).to_be_hidden()
    expect(page.get_by_text("learning rate 0.1 throughout")).to_be_visible()
    wide, half = norm.bounding_box(), loss.bounding_box()
    assert wide
    assert half
    assert wide["width"] > 1.9 * half["width"]  # no half of the row is empty
    source.lr = 0.01
    source.advance(12)
    write_report(source, tmp_path / "run.html")
    page.reload()
    expect(rate).to_contain_text("0.01 since step 13")
    expect(page.get_by_text("throughout")).to_have_count(0)
    beside, left = rate.bounding_box(), norm.bounding_box()
    assert beside
    assert left
    assert (beside["y"], beside["height"]) == (left["y"], left["height"])


@pytest.mark.parametrize("look", [Look(width=1400)], indirect=True)
def test_the_report_of_a_pipeline_has_the_timeline_of_its_last_step(page: Page, tmp_path: Path):
    source = FakeSource(ranks=2, stages=2, strips=True)
    source.advance(12)
    write_report(source, tmp_path / "run.html")
    page.goto(f"file://{tmp_path}/run.html")
    expect(page.get_by_test_id("timeline-panel")).to_contain_text("bubble")
    assert page.locator(".dtk-strip-boxes path").count() > 1


@pytest.mark.parametrize("look", [Look(width=600)], indirect=True)
def test_a_table_that_goes_on_beyond_the_page_has_a_shadow(page: Page, tmp_path: Path):
    runs = make_source("a-run-with-a-long-name"), make_source("another-run-with-a-long-name", 1)
    dtkit.compare(*runs).report(tmp_path / "comparison.html")
    page.goto(f"file://{tmp_path}/comparison.html")
    table = page.locator(".scroll").first
    assert table.evaluate("(el) => getComputedStyle(el).backgroundAttachment") == "local, local, scroll, scroll"


@pytest.mark.parametrize("look", [Look(width=600)], indirect=True)
def test_the_arithmetic_has_no_blank_line_and_wrapped_lines_are_told_apart(page: Page, tmp_path: Path):
    source = FakeSource()
    source.slowness = {1: 1.6}
    source.advance(200)
    write_report(source, tmp_path / "run.html")
    page.goto(f"file://{tmp_path / 'run.html'}")
    verdict = page.locator(".verdict")
    below = "(all) => all[0].getBoundingClientRect().bottom - all[0].querySelector('%s').getBoundingClientRect().bottom"
    assert verdict.evaluate_all(below % "summary") <= 6
    verdict.locator("summary").click()
    lines = verdict.locator("details > div")
    assert lines.count() >= 3
    assert verdict.evaluate_all(below % "details > div:last-child") <= 6
    first, second = lines.nth(0).evaluate(
        """(line) => {
          const range = document.createRange();
          range.selectNodeContents(line);
          return [...range.getClientRects()].slice(0, 2).map((box) => box.left);
        }"""
    )
    assert second > first


@pytest.mark.parametrize("look", [Look(width=1400)], indirect=True)
def test_the_subtitle_of_a_report_has_the_width_of_the_page(page: Page, tmp_path: Path):
    source = make_source()
    source.spec = dataclasses.replace(source.spec, strategy="Pipeline(2, 8, schedule='1F1B', replicas=2, " + "a" * 60)
    write_report(source, tmp_path / "run.html")
    page.goto(f"file://{tmp_path}/run.html")
    lines: int = page.locator(".lead").evaluate(
        "(el) => Math.round(el.getBoundingClientRect().height / parseFloat(getComputedStyle(el).lineHeight))"
    )
    assert lines == 2


@pytest.mark.parametrize("look", [Look(width=800)], indirect=True)
def test_the_table_of_a_comparison_is_sorted_by_a_click_or_a_key(page: Page, tmp_path: Path):
    runs = [make_source(name, seed) for seed, name in enumerate(["c", "a", "b"])]
    for run, steps in zip(runs, (1000, 0, 20), strict=True):
        run.advance(steps)
    dtkit.compare(*runs).report(tmp_path / "comparison.html")
    page.goto(f"file://{tmp_path}/comparison.html")
    names = page.locator(".sortable tbody td:first-child")
    head = page.get_by_role("columnheader", name="steps", exact=True)
    expect(head).to_have_attribute("aria-sort", "none")
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    expect(names).to_have_text(["2: a", "3: b", "1: c"])  # 200, 220 and 1,200
    page.keyboard.press("Enter")  # the button has the focus
    expect(head).to_have_attribute("aria-sort", "descending")
    expect(names).to_have_text(["1: c", "3: b", "2: a"])
    page.keyboard.press("Space")
    expect(head).to_have_attribute("aria-sort", "none")
    expect(names).to_have_text(["1: c", "2: a", "3: b"])
    loss = page.get_by_role("columnheader", name="final training loss")
    loss.get_by_role("button").click()
    expect(loss).to_have_attribute("aria-sort", "ascending")
    losses = [float(text) for text in page.locator(".sortable td").evaluate_all(_LOSSES)]
    assert losses == sorted(losses)
    speed = page.get_by_role("columnheader", name="samples/s")
    speed.get_by_role("button").click()
    expect(speed).to_have_attribute("aria-sort", "descending")  # the best first


_LOSSES = """(cells) => {
  const column = cells[0].closest("table").tHead.rows[0].querySelector("[aria-sort=ascending]").cellIndex;
  return cells.filter((cell) => cell.cellIndex === column).map((cell) => cell.dataset.value);
}"""


def test_the_best_validation_has_a_ring_with_its_word_in_the_charts_of_a_report(page: Page, tmp_path: Path):
    source = FakeSource(steps=40)
    source.advance(40)
    for step, loss, accuracy in ((10, 0.9, 0.5), (20, 0.4, 0.8), (40, 0.6, 0.9)):
        source.history.add(Evaluation(step, 100, {"loss": loss, "accuracy": accuracy}))
    write_report(source, tmp_path / "run.html")
    page.goto(f"file://{tmp_path / 'run.html'}")
    for testid, word, step in (("loss-chart", "lowest", 20), ("metric-chart", "highest", 40)):
        chart = page.get_by_test_id(testid)
        expect(chart.locator(".dtk-best text")).to_have_text(word)
        assert str(chart.locator(".dtk-best title").text_content()).endswith(f"at step {step}")
        centers = chart.evaluate("""(chart) => {
          const middle = (el) => { const { x, width } = el.getBoundingClientRect(); return x + width / 2; };
          const points = [...chart.querySelectorAll(".dtk-points path")].map(middle);
          return [middle(chart.querySelector(".dtk-ring")), ...points];
        }""")
        assert any(abs(centers[0] - center) < 1 for center in centers[1:])

"""Nothing moves under the pointer: marks, notices, answers and a zoom have places that are there from the start."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

from dtkit.types import Event, ReplicaCheckResult, State
from tests.support.fake_source import FakeSource
from tests.support.static_view import StaticView, list_overflowing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Locator

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("width", [800, 950, 1400])
@pytest.mark.parametrize("compared", [[ReplicaCheckResult(1, (), None)], []])
def test_pauses_marks_notices_and_answers_leave_the_charts_in_place(page: Page, width: int, compared: list[object]):
    page.set_viewport_size({"width": width, "height": 900})
    run = FakeSource(ranks=2)
    for result in compared:
        run.consistency = result
    view = StaticView(page, run, offers=("save",))
    chart = view.root.get_by_test_id("loss-chart")
    tops = [get_top(chart)]
    for text in make_events(run):
        view.report_effect(text)
        tops.append(get_top(chart))
    assert len(set(tops)) == 1, tops
    expect(view.root.get_by_test_id("marks-key")).to_contain_text("lr new learning rate")


def get_top(chart: Locator) -> float:
    box = chart.bounding_box()
    assert box
    return box["y"]


def make_events(run: FakeSource) -> Iterator[str]:
    """Let a run be paused, lose and get back a node, and be changed. Yield the answer to each command."""
    run.advance(5)
    yield ""
    run.advance(100)
    yield ""
    run.event("pause", "paused at step 105")
    run.state = State.PAUSED
    yield "paused at step 105 on all nodes"
    run.event("lr", "learning rate 0.01")
    yield "learning rate 0.01 from step 106 on, on all nodes"
    run.event("resume", "resume at step 105")
    run.state = State.RUNNING
    run.advance(50)
    yield "resume at step 105 on all nodes"
    run.lose(1)
    yield ""
    text = "node 1 replaced: all go on from step 155 8.7 s after the loss, no step lost"
    run.history.add(Event(run.step, "repair", text, time.time() + 5, None))
    run.advance(50)
    yield ""
    run.event("save", "saved")
    yield ""
    run.event("stop", "stopped")
    yield ""


def test_a_place_that_is_kept_is_never_an_empty_line(page: Page):
    page.set_viewport_size({"width": 800, "height": 900})
    run = FakeSource(ranks=2)
    run.advance(50)
    view = StaticView(page, run)
    expect(view.root.get_by_test_id("marks-key")).to_have_text("drag over a chart to zoom in")
    words = view.root.get_by_test_id("notices").evaluate("(el) => getComputedStyle(el, '::before').content")
    assert words == '"no notices"'
    field = view.root.get_by_test_id("lr").bounding_box()
    view.report_effect("saved")
    answer = view.root.get_by_test_id("effect").bounding_box()
    assert field
    assert answer
    assert field["y"] <= answer["y"] < field["y"] + field["height"]  # beside the field
    assert list_overflowing(page) == []


@pytest.mark.parametrize("width", [600, 800, 1400])
def test_how_to_zoom_is_said_until_a_reader_has_zoomed_and_has_no_row_of_its_own(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 900})
    run = FakeSource(ranks=2)
    run.advance(50)
    open_with_storage(page)
    view = StaticView(page, run)
    root, key = view.root, view.root.get_by_test_id("marks-key")
    expect(key).to_have_text("drag over a chart to zoom in")
    hint, legend = key.bounding_box(), root.get_by_test_id("legend").bounding_box()
    assert hint
    assert legend
    assert hint["y"] < legend["y"] + legend["height"]  # in the line of the legend
    assert hint["x"] >= legend["x"] + legend["width"]
    tops = [get_top(root.get_by_test_id("loss-chart"))]
    chart = root.get_by_test_id("loss-chart").locator("svg.dtk-chart")
    chart.press("+")
    expect(root.get_by_test_id("range")).to_be_visible()
    tops.append(get_top(root.get_by_test_id("loss-chart")))
    chart.press("0")
    expect(root.get_by_test_id("range")).to_be_hidden()
    expect(key).not_to_be_visible()
    tops.append(get_top(root.get_by_test_id("loss-chart")))
    page.reload()
    view = StaticView(page, run)  # of a page that was loaded again
    expect(view.root.get_by_test_id("marks-key")).not_to_be_visible()
    run.event("pause", "paused at step 50")
    view.update()
    expect(view.root.get_by_test_id("marks-key")).to_have_text("marks:  ‖ paused", use_inner_text=False)
    tops.append(get_top(view.root.get_by_test_id("loss-chart")))
    assert len(set(tops)) == 1, tops


def open_with_storage(page: Page) -> None:
    """Open an empty page that may keep something in the browser; a page without an address may not."""
    page.route("http://view.test/", lambda route: route.fulfill(body="<!doctype html>", content_type="text/html"))
    page.goto("http://view.test/")


def test_a_zoom_and_the_key_of_the_marks_fit_beside_each_other(page: Page):
    page.set_viewport_size({"width": 1150, "height": 900})
    run = FakeSource(ranks=2)
    view = StaticView(page, run)
    for _ in make_events(run):
        view.update()
    view.root.get_by_test_id("loss-chart").locator("svg.dtk-chart").press("+")
    expect(view.root.get_by_test_id("range")).to_be_visible()
    assert list_overflowing(page) == []
    texts = view.root.locator(".dtk-toolline > span:visible").evaluate_all(
        "(all) => all.filter((el) => el.scrollHeight > el.clientHeight + 1).map((el) => el.textContent)"
    )
    assert texts == []

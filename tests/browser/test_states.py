"""What the live view says in every state: recovering, stuck, repaired; and that messages don't move it."""

from __future__ import annotations

import re
import time

import pytest
from playwright.sync_api import Page, expect

from dtkit.types import Evaluation, Event
from tests.support.fake_source import FakeSource
from tests.support.marks import slow
from tests.support.static_view import StaticView

pytestmark = pytest.mark.browser


def make_run() -> FakeSource:
    run = FakeSource(ranks=3)
    run.advance(50)
    return run


def test_recovery_is_shown_with_seconds_and_nothing_stale(page: Page):
    run = make_run()
    view = StaticView(page, run)
    chip, tile = view.root.locator(".dtk-chip"), view.root.get_by_test_id("tiles").locator(".dtk-tile").first
    expect(view.root.locator(".dtk-ends")).to_contain_text("left")
    run.history.add(Event(50, "lost", "node 1 lost", time.time() - 4, 1))
    view.update()
    expect(chip).to_have_text(re.compile(r"^↻ recovering node 1, \d+ s$"))
    expect(view.root.locator(".dtk-ends")).not_to_contain_text("left")
    expect(tile).to_have_text("throughput—no steps are taken")
    text = "node 1 replaced: all go on from step 50 after 8.7 s, no step lost"
    run.history.add(Event(50, "repair", text, time.time() + 5, None))
    run.advance(5)
    view.update()
    expect(chip).to_have_text("▶ running")
    expect(view.root.get_by_test_id("remarks")).to_contain_text("+ node 1 replaced in 9 s, no step lost")
    run.event("lr", "learning rate 0.01")
    view.update()
    expect(view.root.get_by_test_id("remarks")).not_to_contain_text("replaced")


def test_stuck_node_is_in_the_head(page: Page):
    run = make_run()
    run.stick(1)
    view = StaticView(page, run)
    expect(view.root.locator(".dtk-chip")).to_have_text(re.compile(r"^⊘ stuck: node 1 in forward, 1\d s$"))
    expect(view.root.locator(".dtk-ends")).not_to_contain_text("left")


@pytest.mark.parametrize("width", [1280, slow(600)])
def test_alternating_messages_do_not_move_the_charts(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 900})
    run = make_run()
    view = StaticView(page, run)
    chart = view.root.get_by_test_id("loss-chart")
    places = set()
    for k in range(6):
        run.message = "a rank compiles its model, which may take a minute, and says so at length" if k % 2 else ""
        run.delay_factors = {1: 1.5} if k % 2 else {}
        view.update()
        if k:
            box = chart.bounding_box()
            assert box
            places.add(box["y"])
    assert len(places) == 1


def test_log_is_filtered_and_evaluations_have_a_table(page: Page):
    run = make_run()
    run.event("print", "hello from a rank", rank=1)
    run.event("lr", "learning rate 0.01")
    run.history.add(Evaluation(50, 100, {"loss": 0.7, "accuracy": 0.5}))
    view = StaticView(page, run)
    log, kind = view.root.get_by_test_id("log"), view.root.get_by_test_id("log-kind")
    expect(log).to_contain_text("hello from a rank")
    kind.select_option("control")
    expect(log).not_to_contain_text("hello")
    expect(log).to_contain_text("learning rate 0.01")
    kind.select_option("all")
    view.root.get_by_test_id("log-filter").fill("HELLO")
    expect(log).not_to_contain_text("learning rate")
    expect(log).to_contain_text("hello from a rank")
    view.root.get_by_test_id("tab-evaluations").press("Enter")
    expect(log).to_be_hidden()
    table = view.root.get_by_test_id("evaluations")
    assert table.locator("th").all_text_contents() == ["step", "loss", "accuracy", "50"]
    assert table.locator("td").all_text_contents() == ["0.700", "0.500"]


def test_verdict_has_its_arithmetic_on_demand(page: Page):
    run = FakeSource(ranks=2)
    run.slowness = {1: 1.6}
    run.advance(50)
    view = StaticView(page, run)
    line = view.root.get_by_test_id("verdict")
    expect(line).to_contain_text("→ without the straggler (node 1) 1.5 times as fast")
    arithmetic = view.root.locator(".dtk-arithmetic")
    expect(arithmetic).to_be_hidden()
    line.press("Enter")
    expect(arithmetic).to_contain_text("ms")

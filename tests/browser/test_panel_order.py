"""The order of panels: the same in all runs, and a late panel moves few others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from dtkit.dashboard.figures import panel_frame
from dtkit.dashboard.live.series_feed import SeriesFeed
from dtkit.history.scalars import ScalarRecord
from dtkit.types import Evaluation, State
from tests.support.fake_source import FakeSource
from tests.support.lab import Look
from tests.support.static_view import StaticView, encode_message

if TYPE_CHECKING:
    from playwright.sync_api import Locator

pytestmark = pytest.mark.browser

MACHINES = ("network cards (MB/s)", "waiting for a core (%)", "memory (MB)", "CPU (cores)")


def make_run(machines: tuple[str, ...] = MACHINES) -> FakeSource:
    run = FakeSource(ranks=2)
    run.advance(50)
    for name in machines:
        for rank in range(2):
            run.history.add(ScalarRecord(rank, {f"system/{name}": [(step, 50.0, 1.0) for step in range(1, 50, 5)]}))
    return run


def show_series(view: StaticView, run: FakeSource) -> None:
    """Send the numbers of the machines and the logged ones."""
    message = SeriesFeed(run.history).build_message()
    assert message
    view.page.evaluate("([content, buffers]) => window.receive(content, buffers)", encode_message(message))
    view.update()


def read_places(view: StaticView) -> dict[str, tuple[float, float]]:
    """Return the left and the upper edge of each panel by its name."""
    places: list[tuple[str, float, float]] = view.root.locator(".dtk-panel[data-name]:visible").evaluate_all(
        """(all) => all.map((el) => {
          const { x, y } = el.getBoundingClientRect();
          return [el.dataset.name, Math.round(x), Math.round(y)];
        })"""
    )
    return {name: (x, y) for name, x, y in places}


@pytest.mark.parametrize("width", [800, 1100, 1400])
def test_no_panel_moves_when_the_learning_rate_gets_a_chart(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 2600})
    run = make_run()
    view = StaticView(page, run)
    show_series(view, run)
    rate = view.root.get_by_test_id("learning-rate-chart")
    expect(rate).to_contain_text("Learning rate 0.1")
    expect(rate.locator("svg.dtk-chart")).to_be_visible()  # also while it is constant: no half of a row is empty
    before, table = read_places(view), get_box(view, "nodes-table")
    assert len(before) == 8
    change_rate(run, view)
    assert read_places(view) == before
    assert get_box(view, "nodes-table") == table


def change_rate(run: FakeSource, view: StaticView) -> None:
    run.lr = 0.01
    run.advance(50)
    view.update()
    expect(view.root.get_by_test_id("learning-rate-chart").locator("svg.dtk-chart")).to_be_visible()


def test_a_rate_without_a_place_beside_a_chart_opens_below_the_charts(page: Page):
    page.set_viewport_size({"width": 1280, "height": 2000})
    run = make_run(())
    run.history.add(Evaluation(50, 100, {"loss": 0.7, "accuracy": 0.5}))
    view = StaticView(page, run)
    view.update()
    names = ("Loss", "Throughput", "Gradient norm", "accuracy", "Learning rate")
    before = read_places(view)
    assert before["accuracy"][1] == before["Gradient norm"][1]  # side by side: no half of a row is empty
    assert get_box(view, "learning-rate-chart")["width"] == get_box(view, "nodes-table")["width"]
    change_rate(run, view)
    after = read_places(view)
    assert {name: after[name] for name in names} == {name: before[name] for name in names}


@pytest.mark.parametrize("width", [800, 1100, 1400])
def test_no_panel_is_wider_for_want_of_a_neighbor(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 2600})
    run = make_run(MACHINES[1:])
    view = StaticView(page, run)
    for name, is_wide in (("own", False), ("wide", True)):
        draw = panel_frame.draw_png(lambda ax, history: ax.plot(*history.loss()), run.history)
        view.show_picture(name, draw, is_wide=is_wide)
    show_series(view, run)
    change_rate(run, view)
    expect(view.root.get_by_test_id("custom-panel").locator("img:visible")).to_have_count(2)
    widths = {
        name: get_width(panel)
        for panel in view.root.locator(".dtk-panel[data-name]:visible").all()
        if (name := panel.get_attribute("data-name"))
    }
    half = widths.pop("Loss")
    assert widths.pop("wide") > 2 * half
    assert set(widths.values()) == {half}, widths
    memory, limits = get_box(view, "system-chart"), get_box(view, "memory-panel")
    assert limits["x"] > memory["x"]  # beside the last chart of the machines
    assert limits["y"] == memory["y"]


def get_box(view: StaticView, testid: str) -> dict[str, float]:
    """Return the edges of the last panel with this id, without its height."""
    box = view.root.get_by_test_id(testid).last.bounding_box()
    assert box
    return {"x": box["x"], "y": box["y"], "width": box["width"]}


def get_width(panel: Locator) -> float:
    box = panel.bounding_box()
    assert box
    return box["width"]


def test_late_validation_moves_no_chart_to_another_column(page: Page):
    page.set_viewport_size({"width": 1280, "height": 2000})
    run = make_run()
    for rank in range(2):
        run.history.add(ScalarRecord(rank, {"entropy": [(step, 0.5, 1.0) for step in range(1, 50, 5)]}))
    view = StaticView(page, run)
    show_series(view, run)
    columns = {name: x for name, (x, _) in read_places(view).items()}
    del columns["Learning rate"]  # a strip, which makes room
    run.history.add(Evaluation(50, 100, {"loss": 0.7, "accuracy": 0.5}))
    run.advance(1)
    view.update()
    expect(view.root.get_by_test_id("metric-chart")).to_be_visible()
    after = {name: x for name, (x, _) in read_places(view).items()}
    assert {name: after[name] for name in columns} == columns


def test_numbers_of_the_machines_have_one_order_and_are_in_the_menu(page: Page):
    page.set_viewport_size({"width": 1280, "height": 500})  # the machines are below what is in sight
    for names in (MACHINES, MACHINES[::-1]):
        run = make_run(names)
        view = StaticView(page, run)
        show_series(view, run)
        expect(view.root.get_by_test_id("system-chart")).to_have_count(4)
        titles = view.root.locator("[data-testid=system-chart]").evaluate_all(
            "(all) => all.map((el) => el.dataset.name)"
        )
        assert [title.split(" (")[0] for title in titles] == ["CPU", "Waiting for a core", "Memory", "Network cards"]
        view.root.get_by_test_id("panels-menu").click()
        for title in titles:
            expect(view.root.locator(f"[data-panel='{title}']")).to_be_visible()
        listed = view.root.locator("[data-panel]").evaluate_all("(all) => all.map((box) => box.dataset.panel)")
        assert [name for name in listed if name in titles] == titles
        assert "Nodes at a glance" not in listed  # a run of two nodes has no such panel


@pytest.mark.parametrize("width", [420, 520, 1280])
def test_the_menu_of_panels_is_within_the_view(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 900})
    view = StaticView(page, make_run())
    view.root.get_by_test_id("panels-menu").click()
    box, root = view.root.get_by_role("group", name="choose panels").bounding_box(), view.root.bounding_box()
    assert box
    assert root
    assert root["x"] <= box["x"]
    assert box["x"] + box["width"] <= root["x"] + root["width"]


def test_scale_button_counts_the_charts_that_are_logarithmic(page: Page):
    run = make_run(())
    for rank in range(2):
        run.history.add(ScalarRecord(rank, {"norm": [(step, 2.0**step, 1.0) for step in range(1, 50)]}))
    view = StaticView(page, run)
    show_series(view, run)
    scale = view.root.get_by_test_id("scale")
    expect(scale).to_have_text("log y (1 of 3)")  # loss, gradient norm
    expect(scale).to_have_attribute("aria-pressed", "mixed")
    scale.click()
    expect(scale).not_to_contain_text("of")


@pytest.mark.parametrize("look", [Look(width=460), Look(width=500)], indirect=True)
def test_narrow_view_shows_the_amount_of_smoothing_in_one_line_of_tools(page: Page):
    view = StaticView(page, make_run(()))
    amount = view.root.locator(".dtk-toolset .dtk-amount")
    expect(amount).to_have_text("off")
    expect(amount).to_be_visible()
    tops = view.root.locator(".dtk-toolset > :visible").evaluate_all(
        "(all) => all.map((el) => { const box = el.getBoundingClientRect(); return box.y + box.height / 2; })"
    )
    assert np.ptp(tops) < 6


def test_stopped_run_says_how_to_train_on(page: Page):
    run = make_run(())
    view = StaticView(page, run)
    run.state = State.STOPPED
    view.update()
    expect(view.root.get_by_test_id("notices")).to_have_text("■ run.extend(epochs=1) trains on from here")
    run.is_released = True  # by a later training
    view.update()
    expect(view.root.get_by_test_id("notices")).not_to_contain_text("run.extend")


def test_a_number_that_is_logged_and_validated_has_one_chart(page: Page):
    """Two charts had to be told apart by their titles, while the loss had its validations in one."""
    run = make_run()
    run.history.add(Evaluation(50, 10, {"loss": 1.0, "confidence": 0.9}))
    view = StaticView(page, run)
    view.update()
    titles = view.root.get_by_test_id("metric-chart").locator(".dtk-title")
    expect(titles).to_have_text(["confidence"])
    run.history.add(ScalarRecord(0, {"confidence": [(step, 0.5, 1.0) for step in range(1, 50)]}))
    show_series(view, run)
    expect(titles).to_have_count(0)
    chart = view.root.get_by_test_id("scalars-chart")
    expect(chart.locator("h3")).to_contain_text("last 0.500, ◇ validation 0.900")
    expect(chart.locator(".dtk-points path")).to_have_count(1)
    expect(chart.locator(".dtk-labels")).to_contain_text("◇ validation")
    view.root.get_by_test_id("panels-menu").click()
    menu = view.root.get_by_role("group", name="choose panels")
    expect(menu.get_by_text("confidence", exact=True)).to_have_count(1)
    view.root.get_by_test_id("legend").get_by_text("◇ validation").click()
    expect(chart.locator(".dtk-points path")).to_have_count(0)

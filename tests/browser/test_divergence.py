"""A diverged loss in a page: the head says so, and the axis becomes logarithmic by itself."""

from __future__ import annotations

import re

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from dtkit.errors import NonFiniteError
from dtkit.types import Failure, State
from tests.support.fake_source import FakeSource
from tests.support.static_view import StaticView, list_overflowing

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("width", [470, 1270])
def test_a_diverging_run_says_so_in_its_head(page: Page, width: int):
    page.set_viewport_size({"width": width, "height": 900})
    run = FakeSource(ranks=1, name="A network")
    run.advance(120, loss=np.geomspace(2.0, 0.05, 120))
    view = StaticView(page, run)
    chip, scale = view.root.locator(".dtk-chip"), view.root.get_by_test_id("scale")
    expect(chip).to_have_text("▶ running")
    expect(scale).to_have_attribute("aria-pressed", "false")
    run.advance(30, loss=2.2e7)
    run.event("diverged", "the loss grew 3e8 times since step 120")
    view.update()
    expect(chip).to_have_text("↗ running, diverged")  # one place has the number, which changes
    expect(view.root.get_by_test_id("alert")).to_contain_text("times since step 121")
    view.root.get_by_test_id("log").scroll_into_view_if_needed()
    expect(view.root.get_by_test_id("log").locator(".dtk-event-diverged")).to_be_visible()
    expect(view.root.get_by_test_id("loss-chart").locator(".dtk-sign .dtk-mark-diverged")).to_have_text("↗")
    expect(scale).to_have_attribute("aria-pressed", "mixed")
    ticks = view.root.get_by_test_id("loss-chart").locator(".dtk-grid text").all_text_contents()
    assert {"1", "10k"} <= set(ticks) or {"0.1", "100"} <= set(ticks), ticks
    assert list_overflowing(page) == []
    scale.click()  # the user's choice counts
    expect(scale).to_have_attribute("aria-pressed", "false")
    view.update()
    expect(scale).to_have_attribute("aria-pressed", "false")


def test_a_run_that_completed_after_a_divergence_has_no_tick(page: Page):
    """A red "✓ completed" contradicted itself."""
    run = FakeSource(ranks=2)
    run.advance(6, loss=np.repeat([2.32, 1e3, 1.75e4, 9e3, 2e3, 900.0], 2))
    run.event("diverged", "the loss grew 400 times")
    run.advance(294, loss=6.0)
    view = StaticView(page, run)
    expect(view.root.locator(".dtk-chip")).to_have_text("▶ running")
    run.end()
    view.update()
    expect(view.root.locator(".dtk-chip")).to_have_text("✕ completed, diverged")
    expect(view.root).to_have_attribute("data-bad", "true")


def test_a_run_that_paused_because_of_nan_says_so_in_its_head(page: Page):
    run = FakeSource(ranks=2)
    run.advance(20)
    run.state = State.PAUSED
    run.exception = NonFiniteError([Failure(0, "here", "NonFinite", "the loss is NaN", "", step=20)])
    view = StaticView(page, run)
    expect(view.root.locator(".dtk-chip")).to_have_text("✕ paused, not finite")
    expect(view.root).to_have_attribute("data-bad", "true")


@pytest.mark.parametrize(
    ("remedy", "primary", "end"),
    [
        ("lr", "lower", "at this learning rate"),
        ("data", "stop", "unless its data or the loss change"),
        ("train", "stop", "with these parameters"),
    ],
)
def test_the_first_action_after_nan_is_what_the_message_advises(page: Page, remedy: str, primary: str, end: str):
    run = FakeSource(ranks=2)
    run.advance(20)
    run.state = State.PAUSED
    run.exception = NonFiniteError([Failure(0, "here", "NonFinite", "the loss is NaN", "", step=20)], remedy)
    run.event("error", "not finite at step 20")
    view = StaticView(page, run)
    marked = view.root.locator(".dtk-controls .dtk-primary")
    expect(marked).to_have_attribute("data-testid", primary)
    expect(view.root.get_by_test_id("resume")).to_be_enabled()
    for command in ("resume", "step"):
        expect(view.root.get_by_test_id(command)).to_have_attribute("title", re.compile("the step that was not finite"))
    told = f"Resume and Step take step 20 again, which fails again {end}."  # before they are pressed
    effect = view.root.get_by_test_id("effect")
    expect(effect).to_have_text(told)
    lower = view.root.get_by_test_id("lower")
    if remedy != "lr":
        expect(lower).to_be_hidden()
        return
    expect(lower).to_have_text("↓Lower rate to 0.01")
    lower.click()
    assert page.evaluate("window.sent.at(-1)") == {"command": "lr", "value": 0.01}
    run.event("lr", "learning rate 0.01")
    run.lr = 0.01
    view.update()
    expect(marked).to_have_attribute("data-testid", "resume")
    expect(effect).not_to_contain_text("again")
    expect(lower).to_be_hidden()


def test_a_logarithmic_axis_has_few_numbers(page: Page):
    """A low panel over ten orders: numbers that touch can't be read."""
    run = FakeSource(ranks=1)
    run.advance(100)
    run.history.rows()["grad_norm"][:] = np.geomspace(1e-4, 1e6, 100)
    run.history._table._totals.read(0, 100)["grad_norm"][:] = np.geomspace(1e-4, 1e6, 100)
    view = StaticView(page, run)
    places = (
        view.root.get_by_test_id("gradient-norm-chart")
        .locator(".dtk-grid text[text-anchor='end']")
        .evaluate_all("(all) => all.map((el) => el.getBoundingClientRect().top)")
    )
    heights = np.sort(places)
    assert len(heights) >= 3
    assert np.diff(heights).min() >= 13


def test_the_place_of_the_learning_rate_is_kept_before_the_first_step(page: Page):
    run = FakeSource(ranks=2)
    view = StaticView(page, run)
    place = view.root.get_by_test_id("learning-rate-chart").bounding_box()
    assert place
    run.advance(3)
    view.update()
    now = view.root.get_by_test_id("learning-rate-chart").bounding_box()
    assert now
    assert now["height"] == place["height"]


def test_a_page_whose_kernel_was_shut_down_throws_nothing(page: Page):
    view = StaticView(page, FakeSource(ranks=2))
    page.evaluate("() => { window.sent.push = () => { throw new Error('Cannot send'); }; }")
    view.root.get_by_test_id("pause").click()  # the page fixture reports errors
    expect(view.root.get_by_test_id("pause")).to_contain_text("Pausing")

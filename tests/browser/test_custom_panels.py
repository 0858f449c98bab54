"""The user's own panels in a real browser: title, full screen and download like those of other panels."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from playwright.sync_api import Page, expect

from dtkit.dashboard.figures import panel_frame, render
from tests.support.fake_source import FakeSource
from tests.support.lab import Look
from tests.support.static_view import StaticView

pytestmark = pytest.mark.browser


def test_custom_panel_has_a_title_and_fills_the_screen(page: Page):
    view = StaticView(page, FakeSource(ranks=2))
    view.show_picture("Weight norms", render.render_png(render.create_figure(6, 2.3)))
    panel = view.root.get_by_test_id("custom-panel")
    expect(panel.get_by_role("heading", name="Weight norms")).to_be_visible()
    image = panel.locator("img")
    page.wait_for_function("(image) => image.naturalWidth > 500", arg=image.element_handle())
    panel.hover()
    panel.get_by_test_id("full-screen").click()
    page.wait_for_function("() => document.fullscreenElement?.dataset.name === 'Weight norms'")
    page.wait_for_function("(image) => image.getBoundingClientRect().width > 1000", arg=image.element_handle())
    assert image.evaluate("(image) => image.getBoundingClientRect().bottom <= innerHeight")
    panel.get_by_test_id("full-screen").press("Enter")
    page.wait_for_function("() => document.fullscreenElement === null")


def test_custom_panel_is_saved_below_its_title(page: Page):
    view = StaticView(page, FakeSource(ranks=2))
    drawn = render.render_png(render.create_figure(6, 2.3))
    view.show_picture("Weight norms", drawn)
    panel = view.root.get_by_test_id("custom-panel")
    page.wait_for_function("(image) => image.naturalWidth > 500", arg=panel.locator("img").element_handle())
    panel.hover()
    panel.get_by_test_id("download").click()
    with page.expect_download() as download:
        panel.get_by_test_id("save-png").click()
    assert download.value.suggested_filename == "weight-norms.png"
    saved, original = imread(io.BytesIO(Path(download.value.path()).read_bytes())), imread(io.BytesIO(drawn))
    assert saved.shape[1] == original.shape[1]
    head = saved[: saved.shape[0] - original.shape[0], :, :3]
    assert head.min() < 0.3  # the letters of the title
    assert head.max() == 1


def test_page_reports_which_custom_panels_are_out_of_sight(page: Page):
    source = FakeSource(ranks=2)
    source.advance(20)
    view = StaticView(page, source)
    picture = render.render_png(render.create_figure(6, 2.3))
    for name in ("first", "second"):
        view.show_picture(name, picture)
        view.update()
    panels = view.root.get_by_test_id("custom-panel")
    expect(panels).to_have_count(2)
    panels.nth(1).scroll_into_view_if_needed()

    def wait_for_report(*away: str) -> None:
        page.wait_for_function(
            "(away) => JSON.stringify(window.sent.findLast((m) => m.sight)?.sight.away) === JSON.stringify(away)",
            arg=list(away),
        )

    page.evaluate("scrollTo(0, 0)")
    page.set_viewport_size({"width": 800, "height": 300})
    wait_for_report("first", "second")
    panels.nth(1).scroll_into_view_if_needed()
    panels.nth(0).scroll_into_view_if_needed()
    page.set_viewport_size({"width": 800, "height": 1000})
    wait_for_report()
    view.root.get_by_test_id("panels-menu").click()  # a panel that the reader has hidden
    view.root.locator("[data-panel='second']").uncheck()
    wait_for_report("second")
    expect(panels.nth(0)).to_be_visible()
    expect(panels.nth(1)).to_be_hidden()
    view.root.locator("[data-panel='second']").check()
    wait_for_report()


def test_custom_panel_has_the_background_of_a_dark_page(page: Page):
    source = FakeSource(ranks=2)
    source.advance(20)
    view = StaticView(page, source, "dark")
    view.show_picture("Loss", panel_frame.draw_png(lambda ax, history: ax.plot(*history.loss()), source.history))
    panel = view.root.get_by_test_id("custom-panel")
    page.wait_for_function("(image) => image.naturalWidth > 500", arg=panel.locator("img").element_handle())
    pixels = imread(io.BytesIO(panel.screenshot()))[..., :3]
    assert pixels.mean() < 0.35
    assert pixels.max() > 0.4  # lines and numbers
    drawn = imread(io.BytesIO(panel.locator("img").screenshot()))[..., :3]
    grays = drawn[np.ptp(drawn, axis=-1) < 0.03].mean(axis=-1)
    luminance = ((grays + 0.055) / 1.055) ** 2.4
    assert (luminance.max() + 0.05) / (luminance.min() + 0.05) > 5.5, "the numbers at the ticks are pale"


def test_a_removed_panel_leaves_the_page_and_the_menu(page: Page):
    source = FakeSource(ranks=2)
    source.advance(20)
    view = StaticView(page, source)
    picture = render.render_png(render.create_figure(6, 2.3))
    for name in ("old title", "Loss"):  # the second is named as one of dtkit's
        view.show_picture(name, picture)
    panels, entries = view.root.get_by_test_id("custom-panel"), view.root.locator("[data-panel='old title']")
    expect(panels).to_have_count(2)
    expect(entries).to_have_count(1)
    expect(view.root.locator("[data-panel='Loss']")).to_have_count(2)
    page.evaluate("window.receive({ kind: 'no picture', name: 'old title' }, [])")
    expect(panels).to_have_count(1)
    expect(entries).to_have_count(0)


@pytest.mark.parametrize("look", [Look("light", 1400, 900)], indirect=True)
def test_a_custom_panel_keeps_its_size_when_another_chart_comes_or_goes(page: Page):
    source = FakeSource(ranks=2)
    source.advance(20)
    view = StaticView(page, source)
    view.show_picture("mine", render.render_png(render.create_figure(6, 2.3)))
    image = view.root.get_by_test_id("custom-panel").locator("img")
    page.wait_for_function("(image) => image.naturalWidth > 500", arg=image.element_handle())
    view.root.get_by_test_id("panels-menu").click()
    loss = view.root.locator("[data-panel='Loss']")
    sizes = []
    for change in (loss.check, loss.uncheck, loss.check):
        change()
        expect(view.root.get_by_test_id("loss-chart")).to_be_visible(visible=loss.is_checked())
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        box = image.bounding_box()
        assert box
        sizes.append((box["width"], box["height"]))
    assert len(set(sizes)) == 1
    assert sizes[0][0] < 700  # half of the page


@pytest.mark.parametrize("look", [Look("light", 1400, 900)], indirect=True)
def test_a_page_reports_how_wide_it_shows_panels_which_fill_that(page: Page):
    source = FakeSource(ranks=2)
    source.advance(20)
    view = StaticView(page, source)
    drawn = panel_frame.draw_png(lambda ax, _history: ax.plot([1, 2]), source.history, 1300)
    view.show_picture("alone", drawn)
    panel = view.root.get_by_test_id("custom-panel")

    def wait_for_width(low: int, high: int) -> None:
        page.wait_for_function(
            """([low, high]) => {
              const width = window.sent.findLast((m) => m.sight)?.sight.widths?.alone;
              return width > low && width < high;
            }""",
            arg=[low, high],
        )
        box, image = panel.bounding_box(), panel.locator("img").bounding_box()
        assert box
        assert image
        assert image["width"] == pytest.approx(box["width"], abs=1)

    wait_for_width(500, 700)
    view.show_picture("alone", drawn, is_wide=True)
    wait_for_width(1250, 1400)
    page.set_viewport_size({"width": 600, "height": 900})
    wait_for_width(500, 600)

"""Reports in a browser: nothing is cut off in a narrow window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import dtkit
from dtkit.dashboard.report import write_report
from dtkit.types import Evaluation
from tests.support.fake_source import FakeSource
from tests.support.lab import Look

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page

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


@pytest.mark.parametrize("look", [Look(width=600)], indirect=True)
def test_no_table_of_a_report_is_cut_off_in_600_px(page: Page, tmp_path: Path):
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

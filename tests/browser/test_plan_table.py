"""The tables of a plan in a page: strategies in the first column, at the widths of narrow notebooks."""

from __future__ import annotations

import dataclasses

import pytest
from playwright.sync_api import Page, expect

from dtkit.dashboard.text.plan_text import format_html
from tests.support.plans import make_plan

pytestmark = pytest.mark.browser

NAMES = (
    "DataParallel()",
    "ParameterAveraging(every=8, outer=OuterSGD(lr=0.7, momentum=0.9))",
    "Pipeline(stages=2, schedule='interleaved1f1b', micro_batches=8)",
)
JUPYTERLAB = "table { border-collapse: collapse; font-size: 12px } td, th { line-height: normal }"


@pytest.mark.parametrize("width", [600, 800])
def test_strategies_are_in_the_first_column_and_nothing_overflows(page: Page, width: int):
    page.set_viewport_size({"width": width - 130, "height": 900})  # JupyterLab's own margins
    plan = make_plan(free=1_234_567_000)
    first = [row for row in plan.rows if row.strategy == plan.strategies[0]]
    rows = tuple(dataclasses.replace(row, strategy=name) for name in NAMES for row in first)
    style = f"body {{ margin: 0; font: 13px 'DejaVu Sans' }} {JUPYTERLAB}"
    page.set_content(f"<style>{style}</style>{format_html(dataclasses.replace(plan, rows=rows))}")
    tables = page.locator("table")
    expect(tables).to_have_count(3)
    for table in tables.all():
        cells = table.locator("tbody tr td:first-child").all_text_contents()
        assert cells == list(NAMES)
    assert page.evaluate("document.documentElement.scrollWidth") == width - 130

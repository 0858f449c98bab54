"""Modules of the page on their own, without a browser: numbers as text, buckets of curves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.node import evaluate_page_code

if TYPE_CHECKING:
    from pathlib import Path


def test_numbers_of_any_size_are_short(tmp_path: Path):
    values = [5e19, 1e11, 1.25e9, 2.5e6, 30_000, 0.25, 2e-5]
    ticks, numbers = evaluate_page_code(
        tmp_path, "numbers.js", ["number", "tick"], f"[{values}.map((v) => tick(v)), {values}.map((v) => number(v))]"
    )
    assert ticks == ["5e19", "1e11", "1.25e9", "2.5M", "30k", "0.25", "2e-5"]
    assert numbers == ["5e19", "1e11", "1.3e9", "2,500,000", "30,000", "0.250", "2.0e-5"]

"""The rule for a learning rate that is far above the last one."""

from __future__ import annotations

import re
from pathlib import Path

import dtkit
from dtkit.history.history import History
from dtkit.history.rate_jump import MAX_FACTOR, describe_rate_jump
from tests.support.phase_rows import make_phase_rows


def make_history(*rates: float) -> History:
    history = History()
    rows = make_phase_rows([{"forward": 1.0}], len(rates))
    rows["lr"] = rates
    history.append(rows)
    return history


def test_a_hundredfold_rate_is_far_above_the_present_one():
    assert describe_rate_jump(History(), 0.1, 10) == "100 times the 0.1 before"
    assert describe_rate_jump(History(), 0.1, 9.9) == ""


def test_after_a_rate_of_0_the_last_other_one_counts():
    assert describe_rate_jump(make_history(0.1, 0.2, 0, 0), 0.0, 1e9) == "5e+09 times the 0.2 before"
    assert describe_rate_jump(make_history(0, 0), 0.0, 1e9) == ""


def test_pages_have_the_same_factor():
    page = Path(dtkit.__file__).parent / "dashboard" / "live" / "static" / "panels" / "controls.js"
    found = re.search(r"const SURE_FACTOR = (\d+);", page.read_text(encoding="utf-8"))
    assert found is not None
    assert int(found[1]) == MAX_FACTOR

"""The rule for a learning rate that is far from the last one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dtkit
from dtkit.history.history import History
from dtkit.history.rate_jump import MAX_FACTOR, describe_rate_jump
from dtkit.types import Event
from tests.support.phase_rows import make_phase_rows


def make_history(*rates: float) -> History:
    history = History()
    rows = make_phase_rows([{"forward": 1.0}], len(rates))
    rows["lr"] = rates
    history.append(rows)
    history.add(Event(len(rates), "lr", "learning rate", 1.0, None))
    return history


@pytest.mark.parametrize(
    ("lr", "text"),
    [
        (10, "100 times the 0.1 before"),
        (9.9, ""),
        (12345, "123,000 times the 0.1 before"),
        (1e9, "more than a million times the 0.1 before"),
        (0.001, ""),  # a usual step down
        (0.0009, "1/111 of the 0.1 before"),
        (1e-40, "less than a millionth of the 0.1 before"),
        (5e-324, "less than a millionth of the 0.1 before"),
        (0.0, ""),
    ],
)
def test_a_hundredfold_rate_and_less_than_a_hundredth_are_far(lr: float, text: str):
    assert describe_rate_jump(History(), 0.1, lr) == text


def test_one_hundredth_is_near_whatever_its_rounding():
    assert not any(describe_rate_jump(History(), k / 1000, k / 100_000) for k in range(1, 1000))


def test_after_a_rate_of_0_the_last_other_one_counts():
    assert describe_rate_jump(make_history(0.1, 0.2, 0, 0), 0.0, 200) == "1,000 times the 0.2 before"
    assert describe_rate_jump(make_history(0, 0), 0.0, 1e9) == ""


def test_the_way_back_from_a_slip_is_no_jump():
    history = make_history(0.02, 0.02, 1e-40)
    assert describe_rate_jump(history, 1e-40, 0.05) == ""
    assert describe_rate_jump(history, 1e-40, 1e-40) == ""
    assert describe_rate_jump(history, 1e-40, 20) == "1,000 times the 0.02 before"
    assert describe_rate_jump(make_history(0.02, 50), 50, 1e-3) == ""


def test_pages_have_the_same_factor():
    page = Path(dtkit.__file__).parent / "dashboard" / "live" / "static" / "panels" / "controls.js"
    found = re.search(r"const SURE_FACTOR = (\d+);", page.read_text(encoding="utf-8"))
    assert found is not None
    assert int(found[1]) == MAX_FACTOR

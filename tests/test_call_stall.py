"""Ranks of a user's function that wait in vain for another one, without engines."""

from __future__ import annotations

from typing import Any

from dtkit.training.call_stall import describe_stall
from tests.support.observations import seen

WAITING: dict[str, Any] = {"op": "call", "job": None, "stalled_s": 12.0}
RETURNED: dict[str, Any] = {"op": None, "job": None, "is_blocked": False, "stalled_s": 13.0, "stack": ()}


def test_a_rank_that_has_returned_is_named():
    text = describe_stall([seen(0, **RETURNED), seen(1, **WAITING), seen(2, **WAITING)])
    assert text is not None
    assert "rank 0 keeps the others waiting: it has returned from the call" in text
    assert "Call the same collectives on every rank" in text


def test_a_rank_that_waits_in_an_earlier_collective_is_named():
    text = describe_stall(
        [seen(0, **WAITING), seen(1, **WAITING | {"collective_counts": {"0": 4}}), seen(2, **WAITING)]
    )
    assert text is not None
    assert "rank 1 keeps the others waiting: it has been in another collective" in text


def test_ranks_that_may_go_on_are_not_reported():
    computing = WAITING | {"is_blocked": False}
    assert describe_stall([seen(0, **RETURNED), seen(1, **computing), seen(2, **WAITING)]) is None
    assert describe_stall([seen(0, **RETURNED), seen(1, **WAITING), seen(2, **WAITING | {"stalled_s": 3.0})]) is None
    assert describe_stall([seen(k, **RETURNED) for k in range(3)]) is None
    assert describe_stall([seen(k, **WAITING) for k in range(3)]) is None  # one long collective

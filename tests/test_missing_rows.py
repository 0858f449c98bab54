"""Steps whose measurements were lost with an engine."""

from __future__ import annotations

import numpy as np

from dtkit.history.history import ROW_DTYPE, History
from dtkit.training.failures import describe_missing_rows, measure_since_loss
from dtkit.types import Event


def make_history(steps_by_rank: dict[int, int]) -> History:
    """Return a history in which each rank has reported that many steps."""
    history = History()
    for rank, num_steps in steps_by_rank.items():
        rows = np.zeros(num_steps, ROW_DTYPE)
        rows["step"], rows["rank"], rows["loss"], rows["weight"] = np.arange(num_steps), rank, 1.0, 1.0
        history.append(rows)
    return history


def test_steps_that_a_lost_engine_did_not_report_are_named():
    history = make_history({0: 300, 1: 170})
    assert describe_missing_rows(history, [1], 294) == (
        "what node 1 measured in steps 170 to 293 went with its engine: losses and times there are those of the other "
        "nodes"
    )


def test_a_single_step_that_a_lost_engine_did_not_report_is_named():
    told = describe_missing_rows(make_history({0: 13, 1: 12}), [1], 13)
    assert told is not None
    assert told.startswith("what node 1 measured in step 12 went with its engine")


def test_nothing_is_said_where_nothing_is_missing():
    history = make_history({0: 300, 1: 170})
    assert describe_missing_rows(history, [0], 300) is None
    assert describe_missing_rows(history, [1], 170) is None  # all went back to the last step that it reported
    assert describe_missing_rows(make_history({0: 5}), [1], 5) is None


def test_repair_is_timed_from_the_first_loss_as_on_the_dashboard():
    kinds_and_times = [("lost", 10.0), ("repair", 20.0), ("lost", 30.0), ("lost", 31.0), ("note", 32.0)]
    events = [Event(5, kind, "", moment) for kind, moment in kinds_and_times]
    assert measure_since_loss(events, 35.0, at_least_s=0.7) == 5.0
    assert measure_since_loss(events[:2], 35.0, at_least_s=0.7) == 0.7

"""Phase times of a step, and the part spent waiting for others, computed from marks."""

from __future__ import annotations

import numpy as np
import pytest

from dtkit.engine.observe.clock import Clock
from dtkit.engine.observe.phase_timer import (
    BETWEEN_PHASES,
    PhaseTimer,
    build_blocked_times,
    build_messages,
    build_spans,
    group_steps,
    sum_durations,
)
from dtkit.history import comm_time
from dtkit.history.timeline import SPAN_DTYPE


class Ticking(Clock):
    """A clock that shows the given times, one a mark."""

    def __init__(self, times):
        self._times = iter(times)

    def record_mark(self):
        return next(self._times)


def steps(*marked):
    """Phases of one step each, from (phase, time) pairs and the end."""
    phases = PhaseTimer(Ticking([time for step in marked for _, time in step]))
    found = []
    for step in marked:
        for phase, _ in step[:-1]:
            phases.enter(phase)
        found.append(phases.end_step())
    return found


def sum_up(marks) -> dict[str, float]:
    """Seconds of one step by phase."""
    return {phase: float(seconds[0]) for phase, seconds in sum_durations(group_steps([marks]), 1).items()}


STEP = [("data", 0), ("forward", 1), ("backward", 3), ("sync", 7), ("update", 12), ("end", 13)]


def test_phases_add_up_to_the_step():
    [marks] = steps(STEP)
    found = sum_up(marks)
    assert found == {"data": 1, "forward": 2, "backward": 4, "sync": 5, "update": 1, "step": 13}


def test_durations_of_a_repeated_phase_are_added():
    [marks] = steps([("forward", 0), ("backward", 1), ("forward", 3), ("backward", 6), ("end", 10)])
    found = sum_up(marks)
    assert found["forward"] == 1 + 3
    assert found["backward"] == 2 + 4


def test_a_collective_during_a_phase_is_subtracted_from_it():
    phases = PhaseTimer(Ticking([0, 2, 5, 6]))
    phases.enter("forward")
    phases.begin_collective()
    assert (phases.current_phase, phases.enclosing_phase) == ("sync", "forward")
    phases.end_collective()
    assert (phases.current_phase, phases.enclosing_phase) == ("forward", "forward")
    marks = phases.end_step()
    assert sum_up(marks) == {"forward": 2 + 1, "sync": 3, "step": 6}
    assert build_blocked_times(group_steps([marks]), 1).tolist() == [[[2, 5, -1]]]


def test_a_collective_between_steps_is_not_marked():
    phases = PhaseTimer(Ticking([0, 1]))
    phases.begin_collective()
    phases.end_collective()
    assert phases.get_progress() == ("", 0)
    phases.enter("backward")
    phases.begin_collective()
    phases.reset()
    assert phases.enclosing_phase == ""


def test_a_failed_step_leaves_no_mark_in_the_next():
    phases = PhaseTimer(Ticking([0, 1, 2]))
    phases.enter("forward")
    phases.reset()
    phases.enter("data")
    assert [phase for phase, *_ in phases.end_step()] == ["data", "end"]


def test_blocked_times_are_padded_to_the_same_length():
    twice = [("sync", 1), ("backward", 2), ("sync", 5), ("update", 6), ("end", 7)]
    found = build_blocked_times(group_steps(steps(STEP, twice, STEP)), 3)
    assert found.shape == (3, 2, 3)
    assert found[0, 0].tolist() == [7, 12, -1]
    assert np.isnan(found[0, 1]).all()
    assert found[1].tolist() == [[1, 2, -1], [5, 6, -1]]
    assert found[2, 0].tolist() == found[0, 0].tolist()  # in the same group of steps as the first


def test_messages_are_listed_by_step_without_the_time_between_phases():
    phases = PhaseTimer(Ticking([1, 2, 4, 7, 9]))
    phases.enter("send forward", (1, 0))
    phases.enter(BETWEEN_PHASES)
    phases.enter("receive backward", (1, 2))
    phases.continue_phase("receive backward", (1, 2))  # continues
    phases.continue_phase("receive backward", (1, 3))
    marks = phases.end_step()
    rows = build_messages(group_steps([marks]), [5])
    assert rows.tolist() == [(5, 0, 1, 0, 1, 2), (5, 3, 1, 2, 4, 7), (5, 3, 1, 3, 7, 9)]
    assert build_spans([(5, marks)], 0, Clock())["phase"].tolist() == ["send forward", *["receive backward"] * 2]
    assert not len(build_messages(group_steps(steps(STEP)), [0]))


def test_a_step_without_collectives_has_no_blocked_times():
    [marks] = steps([("forward", 0), ("end", 1)])
    assert build_blocked_times(group_steps([marks]), 1).shape == (1, 0, 3)


def test_a_slowed_rank_sleeps_in_proportion_to_its_compute_time(monkeypatch):
    slept = sleeping(monkeypatch, late=0.0)
    phases = PhaseTimer(Ticking(range(100)))
    phases.delay_factor = 3.0
    for phase in ("data", "forward", "backward", "sync", "update"):
        phases.enter(phase)
    phases.end_step()
    assert slept == [2.0, 2.0]  # two more ticks for forward and for backward, none for the rest


def test_waiting_in_a_collective_is_not_slowed(monkeypatch):
    slept = sleeping(monkeypatch, late=0.0)
    phases = PhaseTimer(Ticking([0, 1, 2, 3, 100, 101, 102, 103]))
    phases.delay_factor = 3.0
    phases.enter("forward")
    phases.begin_collective()
    phases.end_collective()
    phases.end_step()
    assert slept == [2.0, 2.0]


def test_a_slowed_rank_sleeps_before_operations_that_others_wait_for(monkeypatch):
    slept = sleeping(monkeypatch, late=0.0)
    phases = PhaseTimer(Ticking(range(100)))
    phases.apply_delay()  # between steps
    phases.enter("forward", (0, 1))
    phases.apply_delay()  # not slowed
    phases.delay_factor = 3.0
    phases.apply_delay()
    assert slept == [2.0]
    phases.enter("sync")
    phases.apply_delay()
    marks = phases.end_step()
    assert slept == [2.0, 2.0]  # each part of the pass once
    assert [(phase, where) for phase, _, where in marks] == [
        ("forward", (0, 1)), ("sync", None), ("end", None)
    ]  # fmt: skip


def test_oversleeping_is_subtracted_from_later_delays(monkeypatch):
    slept = sleeping(monkeypatch, late=3.0)
    phases = PhaseTimer(Ticking(range(100)))
    phases.delay_factor = 3.0
    for phase in ("forward", "sync") * 6:
        phases.enter(phase)
    phases.end_step()
    assert sum(slept) + 3.0 * len(slept) == pytest.approx(2.0 * 6, abs=3.0)
    assert len(slept) < 6


def sleeping(monkeypatch, late):
    """Return the list of requested sleeping times; each sleep takes `late` seconds longer."""
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        return seconds + late

    monkeypatch.setattr("dtkit.engine.observe.phase_timer._sleep_measured", sleep)
    return slept


def test_a_collective_of_a_subgroup_names_its_ranks():
    phases = PhaseTimer(Ticking([0, 1, 2, 4, 5, 7]))
    phases.enter("forward")
    phases.begin_collective((2, 3))
    phases.end_collective()
    phases.enter("sync")
    phases.begin_collective((2, 3))  # during a collective, which continues
    phases.end_collective()
    marks = phases.end_step()
    assert [(s["phase"], s["begin"], s["end"]) for s in build_spans([(0, marks)], 2, Clock())] == [
        ("forward", 0, 1), ("sync 2-3", 1, 2), ("forward", 2, 4), ("sync", 4, 5)
    ]  # fmt: skip
    assert {(int(s["stage"]), int(s["micro_batch"])) for s in build_spans([(0, marks)], 2, Clock())} == {(-1, -1)}
    [[[*inner, number], [*all_, everybody]]] = build_blocked_times(group_steps([marks]), 1).tolist()
    assert (inner, all_) == ([1, 2], [4, 5])
    assert everybody == -1 != number


def of_rank(*spans):
    """One rank's blocked times: one collective a step."""
    return np.array([(*span, -1) for span in spans], float).reshape(len(spans), 1, 3)


def test_the_last_rank_to_arrive_does_not_wait():
    waits, transfers = comm_time.split_blocked_time([of_rank((0.0, 5.0)), of_rank((3.0, 5.0)), of_rank((2.0, 5.5))])
    assert waits[:, 0].tolist() == [3.0, 0.0, 1.0]
    assert transfers[:, 0].tolist() == [2.0, 2.0, 2.5]


def test_a_rank_released_before_the_last_arrival_waits_only_until_its_release():
    """In a tree, a rank leaves when its own part of the collective is done."""
    waits, transfers = comm_time.split_blocked_time([of_rank((0.0, 2.0)), of_rank((3.0, 5.0))])
    assert waits[:, 0].tolist() == [2.0, 0.0]
    assert transfers[:, 0].tolist() == [0.0, 2.0]


def test_clock_offsets_between_hosts_are_corrected():
    ahead = of_rank((103.0, 105.0))
    waits, transfers = comm_time.split_blocked_time([of_rank((0.0, 5.0)), ahead], clock_offsets=[0.0, 100.0])
    assert waits[:, 0].tolist() == [3.0, 0.0]
    assert transfers[:, 0].tolist() == [2.0, 2.0]


def test_waiting_times_of_several_collectives_in_a_step_are_added():
    one = np.array([[[0, 2, -1], [4, 6, -1]], [[0, 1, -1], [np.nan] * 3]], float)
    other = np.array([[[1, 2, -1], [3, 6, -1]], [[0.5, 1, -1], [np.nan] * 3]], float)
    waits, transfers = comm_time.split_blocked_time([one, other])
    assert waits.tolist() == [[1, 0.5], [1, 0]]
    assert transfers.tolist() == [[3, 0.5], [3, 0.5]]


@pytest.mark.parametrize("steps", [0, 3])
def test_ranks_without_collectives_have_no_waiting_time(steps):
    waits, transfers = comm_time.split_blocked_time([np.empty((steps, 0, 3))] * 2)
    assert waits.shape == transfers.shape == (2, steps)
    assert not waits.any()


LEFT, RIGHT, ALL = 1, 2, -1
REPLICAS = [
    [(0, 2, LEFT), (10, 12, ALL)],
    [(1, 2, LEFT), (9, 12, ALL)],
    [(5, 7, RIGHT), (7.5, 8, RIGHT), (8, 12, ALL)],  # a micro-batch more
    [(5, 7, RIGHT), (7, 8, RIGHT), (11, 12, ALL)],
]
"""Blocked intervals of each rank, in two replicas of two ranks each: begin, end, group."""


def test_ranks_wait_for_the_ranks_of_their_own_replica():
    waits, transfers = comm_time.split_blocked_time([np.array([rank], float) for rank in REPLICAS])
    assert waits[:, 0].tolist() == [1 + 1, 0 + 2, 0 + 0 + 3, 0 + 0.5 + 0]
    assert transfers[:, 0].tolist() == [1 + 1, 1 + 1, 2 + 0.5 + 1, 2 + 0.5 + 1]


def as_spans(ranks):
    """Return the blocked intervals as spans of a timeline."""
    names = {LEFT: "sync 0-1", RIGHT: "sync 2-3", ALL: "sync"}
    found = [(5, r, names[who], -1, -1, begin, end) for r, own in enumerate(ranks) for begin, end, who in own]
    return np.array([*found, (5, 0, "forward", -1, -1, 2, 10)], SPAN_DTYPE)


def test_waiting_is_split_from_the_spans_of_collectives():
    found = comm_time.split_collective_waits(as_spans(REPLICAS))
    told = [[(s["phase"], s["begin"], s["end"]) for s in found[found["rank"] == rank]] for rank in (0, 3)]
    assert told[0] == [
        ("wait", 0, 1), ("sync 0-1", 1, 2), ("forward", 2, 10), ("wait", 10, 11), ("sync", 11, 12)
    ]  # fmt: skip
    assert told[1] == [("sync 2-3", 5, 7), ("wait", 7, 7.5), ("sync 2-3", 7.5, 8), ("sync", 11, 12)]
    assert np.array_equal(comm_time.split_collective_waits(found), found)
    lengths = [float((found["end"] - found["begin"])[found["rank"] == r].sum()) for r in (1, 2, 3)]
    assert lengths == [4, 6.5, 4]


def test_spans_of_a_failed_rank_are_not_split():
    found = as_spans([REPLICAS[0], REPLICAS[1][:1]])
    assert comm_time.split_collective_waits(found)["phase"].tolist().count("wait") == 1  # only where both joined
    alone = found[found["rank"] == 0]
    assert "wait" not in comm_time.split_collective_waits(alone)["phase"]
    assert not len(comm_time.split_collective_waits(found[:0]))

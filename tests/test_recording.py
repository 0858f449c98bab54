"""What ranks report, made into a run's history."""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest

from dtkit.history import ROW, History
from dtkit.messages import MESSAGE, PHASES
from dtkit.recording import Recorder
from dtkit.records import Advance, Failure, Reply


def advance(rank: int, steps: int, begun: float) -> Advance:
    """Each step is blocked for a second from `begun` on, on the rank's own clock."""
    rows = np.zeros(steps, ROW)
    rows["step"], rows["rank"] = range(steps), rank
    blocked = np.array([[[begun + step, begun + step + 1.0]] for step in range(steps)])
    return Advance(rows, steps, 0.1, blocked=blocked)


@pytest.fixture
def history() -> History:
    return History()


@pytest.fixture
def recorder(history: History) -> Recorder:
    ranks = types.SimpleNamespace(clock_offsets=[0.0, 100.0, 200.0])  # three hosts, whose clocks differ
    return Recorder(ranks, history)


def test_waiting_is_told_on_one_clock(recorder: Recorder, history: History):
    recorder.steps([(advance(rank, 2, 100.0 * rank + 0.25 * rank), []) for rank in range(3)])
    assert history.rows()["wait_s"].reshape(2, 3) == pytest.approx(np.array([[0.5, 0.25, 0.0]] * 2))


def test_waiting_for_another_stage_is_no_communication():
    history = History(copies=2)
    recorder = Recorder(types.SimpleNamespace(clock_offsets=[0.0, 100.0]), history)
    advances = []
    for rank, (phase, begin, end) in enumerate([("send forward", 3.0, 4.0), ("receive forward", 101.0, 103.5)]):
        sent = [(step, PHASES.index(phase), rank, 0, begin + 10 * step, end + 10 * step) for step in range(3)]
        steps = 3 - rank  # one of them is a step further
        found = advance(rank, steps, 200.0)
        advances.append(dataclasses.replace(found, messages=np.array(sent, MESSAGE), blocked=np.empty((steps, 0, 2))))
    recorder.steps([(one, []) for one in advances])
    rows = history.rows()
    for rank, wait, comm in ((0, 0.0, 1.0), (1, 2.0, 0.5)):
        own = rows[(rows["rank"] == rank) & (rows["step"] < 2)]
        assert own["wait_s"].tolist() == [wait] * 2
        assert own["comm_s"].tolist() == [comm] * 2


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_of_a_lost_rank_the_others_are_recorded_each_on_its_own_clock(recorder: Recorder, history: History, lost: int):
    replies = {rank: Reply((advance(rank, 3 - rank % 2, 100.0 * rank), [("text", "hello")])) for rank in range(3)}
    replies[lost] = Reply(failure=Failure(lost, "?", "EngineLost", "gone", "", kind="lost"))
    left = [rank for rank in range(3) if rank != lost]
    assert recorder.common(replies) == min(3 - rank % 2 for rank in left)
    rows = history.rows()
    assert sorted(set(rows["rank"].tolist())) == left
    assert (rows["wait_s"] == 0).all()  # by their own clocks all began at the same time
    assert (rows["comm_s"] == 1).all()
    assert [event.rank for event in history.events] == left

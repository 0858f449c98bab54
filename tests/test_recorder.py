"""Recorder: the reports of ranks become a run's history."""

from __future__ import annotations

import dataclasses
import types
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dtkit.history.comm_time import MESSAGE_DTYPE, MESSAGE_PHASES
from dtkit.history.engine_outbox import ResultOutbox
from dtkit.history.history import ROW_DTYPE, History
from dtkit.history.run_log import RUNS_FOLDER, RunLog
from dtkit.messages import DispatchResult, Reply
from dtkit.training.recorder import Recorder
from dtkit.types import Evaluation, Failure

if TYPE_CHECKING:
    from pathlib import Path


def advance(rank: int, steps: int, begun: float) -> DispatchResult:
    """Each step is blocked for a second from `begun` on, on the rank's own clock."""
    rows = np.zeros(steps, ROW_DTYPE)
    rows["step"], rows["rank"] = range(steps), rank
    blocked = np.array([[[begun + step, begun + step + 1.0, -1]] for step in range(steps)])
    return DispatchResult(rows, steps, 0.1, blocked_spans=blocked)


@pytest.fixture
def history() -> History:
    return History()


@pytest.fixture
def recorder(history: History) -> Recorder:
    membership = types.SimpleNamespace(clock_offsets=[0.0, 100.0, 200.0])  # three hosts, whose clocks differ
    return Recorder(types.SimpleNamespace(membership=membership), history)


def test_waiting_times_are_computed_on_a_common_clock(recorder: Recorder, history: History):
    recorder.record_steps([(advance(rank, 2, 100.0 * rank + 0.25 * rank), []) for rank in range(3)])
    assert history.rows()["wait_s"].reshape(2, 3) == pytest.approx(np.array([[0.5, 0.25, 0.0]] * 2))


def test_waiting_for_another_stage_is_not_counted_as_communication():
    history = History(ranks_per_replica=2)
    recorder = Recorder(types.SimpleNamespace(membership=types.SimpleNamespace(clock_offsets=[0.0, 100.0])), history)
    advances = []
    for rank, (phase, begin, end) in enumerate([("send forward", 3.0, 4.0), ("receive forward", 101.0, 103.5)]):
        sent = [(step, MESSAGE_PHASES.index(phase), rank, 0, begin + 10 * step, end + 10 * step) for step in range(3)]
        steps = 3 - rank  # one of them is a step further
        found = advance(rank, steps, 200.0)
        advances.append(
            dataclasses.replace(found, messages=np.array(sent, MESSAGE_DTYPE), blocked_spans=np.empty((steps, 0, 3)))
        )
    recorder.record_steps([(one, []) for one in advances])
    rows = history.rows()
    for rank, wait, comm in ((0, 0.0, 1.0), (1, 2.0, 0.5)):
        own = rows[(rows["rank"] == rank) & (rows["step"] < 2)]
        assert own["wait_s"].tolist() == [wait] * 2
        assert own["comm_s"].tolist() == [comm] * 2


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_steps_of_surviving_ranks_are_recorded_each_on_its_own_clock(recorder: Recorder, history: History, lost: int):
    replies = {rank: Reply((advance(rank, 3 - rank % 2, 100.0 * rank), [("text", "hello")])) for rank in range(3)}
    replies[lost] = Reply(failure=Failure(lost, "?", "EngineLost", "gone", "", kind="lost"))
    left = [rank for rank in range(3) if rank != lost]
    assert recorder.record_common_steps(replies) == min(3 - rank % 2 for rank in left)
    rows = history.rows()
    assert sorted(set(rows["rank"].tolist())) == left
    assert (rows["wait_s"] == 0).all()  # by their own clocks all began at the same time
    assert (rows["comm_s"] == 1).all()
    assert [event.rank for event in history.events] == left


def left(rank: int, start: int, stop: int, said: str = "") -> tuple[DispatchResult, list[tuple[str, str]]]:
    """An unread dispatch: each step is blocked from a quarter of a second per rank on."""
    rows = np.zeros(stop - start, ROW_DTYPE)
    rows["step"], rows["rank"] = range(start, stop), rank
    blocked = np.array([[[step + 0.25 * rank, step + 1.0, -1]] for step in range(start, stop)]).reshape(-1, 1, 3)
    return DispatchResult(rows, stop, 0.1, blocked_spans=blocked), [("text", said)] if said else []


def cells(history: History) -> list[tuple[int, int]]:
    return [(step, rank) for step, rank in history.rows()[["step", "rank"]].tolist()]


@pytest.fixture
def one_host(history: History) -> Recorder:
    """A recorder on one host, of a run with 4 steps already read."""
    for rank in range(2):
        history.append(np.asarray(left(rank, 0, 4)[0].rows))
    return Recorder(types.SimpleNamespace(membership=types.SimpleNamespace(clock_offsets=None)), history)


def test_unread_steps_are_recorded_once(one_host: Recorder, history: History):
    before = len(history)
    unread = {rank: [left(rank, 2, 4, "read"), left(rank, 4, 6, "hello"), left(rank, 6, 7)] for rank in range(2)}
    one_host.record_unread(unread, 7)
    one_host.record_extra_rows(7)
    assert cells(history)[before:] == [(step, rank) for step in (4, 5, 6) for rank in range(2)]
    assert history.rows()["wait_s"][before:].reshape(3, 2) == pytest.approx(np.array([[0.25, 0.0]] * 3))
    assert [(event.step, event.text, event.rank) for event in history.events] == [(4, "hello", 0), (4, "hello", 1)]


def test_unread_steps_of_a_lost_rank_are_recorded_up_to_the_common_step(one_host: Recorder, history: History):
    """Rank 1 ended before it wrote its last steps; rank 2 ended one step ahead of the others."""
    before = len(history)
    unread = {
        0: [left(0, 4, 6), left(0, 6, 9)],
        1: [left(1, 4, 6)],
        2: [left(2, 4, 6), left(2, 6, 10)],
    }
    one_host.record_unread(unread, 9)
    one_host.record_extra_rows(9)
    expected = [(step, rank) for step in (4, 5) for rank in range(3)] + [(s, r) for s in (6, 7, 8) for r in (0, 2)]
    assert cells(history)[before:] == expected
    assert list(history.totals()["step"][-5:]) == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(("on", "more"), [(5, []), (6, [(5, 0)]), (3, [])])
def test_extra_steps_of_one_rank_are_recorded_only_if_the_run_resumes_after_them(
    one_host: Recorder, history: History, on: int, more: list[tuple[int, int]]
):
    before = len(history)
    one_host.record_unread({0: [left(0, 4, 6)], 1: [left(1, 4, 5)]}, 5)
    assert cells(history)[before:] == [(4, 0), (4, 1)]
    one_host.record_extra_rows(on)
    assert cells(history)[before + 2 :] == more


def test_the_unread_rest_of_a_partly_read_dispatch_is_recorded(one_host: Recorder, history: History):
    before = len(history)
    one_host.record_unread({0: [left(0, 2, 6)], 1: [left(1, 2, 4)]}, 4)
    one_host.record_extra_rows(6)
    assert cells(history)[before:] == [(4, 0), (5, 0)]


def test_unread_evaluations_are_recorded_once_if_all_ranks_have_them(one_host: Recorder, history: History):
    history.add(Evaluation(4, 8, {"loss": 0.5}))
    mine, theirs, other = (4, {"loss": (2.0, 4.0)}), (2, {"loss": (4.0, 2.0)}), (2, {"hits": (4.0, 2.0)})
    left = {0: {4: mine, 8: mine, 12: mine, 16: mine}, 1: {4: theirs, 8: theirs, 16: other}}
    one_host.record_unread_evaluations(left, [4, 8, 12, 16], 20)
    assert [(e.step, e.samples, e.values) for e in history.evaluations] == [
        (4, 8, {"loss": 0.5}),
        (8, 6, {"loss": 1.0}),
    ]
    note = (20, "note", "what evaluations found after these steps was lost: 12, 16")
    assert [(e.step, e.kind, e.text) for e in history.events if e.kind == "note"] == [note]


def make_recorder_after_four_steps(folder: Path) -> tuple[Recorder, History]:
    """Return the recorder of two ranks, whose cluster has its files in `folder`, and its history."""
    history = History()
    group = types.SimpleNamespace(membership=types.SimpleNamespace(clock_offsets=None), folder=folder, world_size=2)
    recorder = Recorder(group, history)
    recorder.record_steps([left(rank, 0, 4) for rank in range(2)])
    RunLog(folder / RUNS_FOLDER / "job").close()
    return recorder, history


def test_gap_is_filled_from_the_results_that_engines_keep(tmp_path: Path):
    """All ranks took the steps, but their replies were lost, as after a call that failed beside them."""
    recorder, history = make_recorder_after_four_steps(tmp_path)
    for rank in range(2):
        ResultOutbox(tmp_path, "job", rank).store_dispatch(*left(rank, 4, 20))
    recorder.fill_gap("job", 20)
    assert history.totals()["step"].tolist() == list(range(20))
    assert history.totals()["ranks"].tolist() == [2] * 20
    assert not history.events


def test_unread_steps_are_recorded_once_before_a_recovery_ends_what_engines_keep(tmp_path: Path):
    """Rank 0 was ahead and has replied; the results of rank 1 reached no reply."""
    recorder, history = make_recorder_after_four_steps(tmp_path)
    for rank in range(2):
        for start in (0, 4):  # the first ones are read, and not yet removed
            ResultOutbox(tmp_path, "job", rank).store_dispatch(*left(rank, start, start + 8 * (start > 0) + 4))
    recorder._record_until(4, {0: left(0, 4, 16)})
    recorder.record_before_rebuild("job", 12)
    recorder.record_extra_rows(16)
    totals = history.totals()
    assert totals["step"].tolist() == list(range(12))
    assert totals["ranks"].tolist() == [2] * 12


def test_missing_steps_are_named_once_in_the_log_and_in_the_history(tmp_path: Path):
    history = History()
    group = types.SimpleNamespace(membership=types.SimpleNamespace(clock_offsets=None), folder=tmp_path, world_size=2)
    recorder = Recorder(group, history)
    recorder.record_steps([left(rank, 0, 4) for rank in range(2)])
    recorder.fill_gap("job", 20)
    recorder.note_missing_steps(20)
    recorder.record_steps([left(rank, 20, 22) for rank in range(2)])
    (event,) = history.events
    assert event.text == "the history lacks steps 4 to 19: the ranks took them, and their results were lost"
    assert "6 steps, 2 ranks, steps 4 to 19 missing, last loss" in repr(history)


def test_steps_that_no_reply_brought_are_named_when_the_run_goes_on():
    history = History()
    recorder = Recorder(types.SimpleNamespace(membership=types.SimpleNamespace(clock_offsets=None)), history)
    for start, stop in ((0, 4), (20, 22), (22, 24)):
        recorder.record_steps([left(rank, start, stop) for rank in range(2)])
    assert [event.text.partition(":")[0] for event in history.events] == ["the history lacks steps 4 to 19"]

"""Dispatch results on disk until they are read: written by an engine, read by a notebook that takes over."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dtkit.history import engine_outbox
from dtkit.history.comm_time import MESSAGE_DTYPE
from dtkit.history.engine_outbox import ResultOutbox
from dtkit.history.history import ROW_DTYPE
from dtkit.messages import DispatchResult

if TYPE_CHECKING:
    from pathlib import Path

JOB, RANK = "job-1", 1
SAID: list[Any] = [("text", "h\xe9llo"), ("row", {"loss": 0.25, "far": float("inf")})]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder in a cluster's."""
    found = tmp_path / "runs" / JOB
    found.mkdir(parents=True)
    return found


@pytest.fixture
def kept(tmp_path: Path, run: Path) -> ResultOutbox:
    return ResultOutbox(tmp_path, JOB, RANK)


def advance(start: int, stop: int, places: int = 2, rank: int = RANK) -> DispatchResult:
    rows = np.zeros(stop - start, ROW_DTYPE)
    rows["step"], rows["rank"], rows["loss"], rows["lr"] = range(start, stop), rank, np.nan, 0.1
    blocked = np.arange((stop - start) * places * 3, dtype="f8").reshape(stop - start, places, 3)
    return DispatchResult(rows, stop, 0.1, blocked_spans=blocked)


def piped(result: DispatchResult) -> DispatchResult:
    """Return the same result with one message per step, as in a pipeline."""
    sent = np.zeros(len(np.asarray(result.rows)), MESSAGE_DTYPE)
    sent["step"], sent["phase"], sent["end"] = np.asarray(result.rows)["step"], 2, 0.5
    return dataclasses.replace(result, messages=sent)


def steps(folder: Path, rank: int = RANK) -> list[int]:
    return [
        int(step)
        for one, _ in engine_outbox.read_dispatches(folder, JOB, rank)
        for step in np.asarray(one.rows)["step"]
    ]


def test_dispatches_are_read_as_they_were_stored(tmp_path: Path, kept: ResultOutbox):
    first, second = piped(advance(8, 12)), advance(12, 14, places=0)
    kept.store_dispatch(first, SAID)
    kept.store_dispatch(second, [])
    found = engine_outbox.read_dispatches(tmp_path, JOB, RANK)
    for (back, _), one in zip(found, (first, second), strict=True):
        assert np.asarray(back.rows).tobytes() == np.asarray(one.rows).tobytes()
        assert np.array_equal(np.asarray(back.blocked_spans), np.asarray(one.blocked_spans))
        assert np.array_equal(np.asarray(back.messages), np.asarray(one.messages))
        assert back.step == one.step
    assert [items for _, items in found] == [[("text", "h\xe9llo"), ("text", "loss=0.25 far=inf")], []]
    np.asarray(found[0][0].rows)["wait_s"] += 1  # the comparison of ranks writes to these rows
    assert engine_outbox.read_dispatches(tmp_path, JOB, 0) == []


def test_dispatches_are_read_in_the_order_of_their_steps(tmp_path: Path, kept: ResultOutbox):
    for start in (8, 9, 10, 99, 100):
        kept.store_dispatch(advance(start, start + 1), [])
    assert steps(tmp_path) == [8, 9, 10, 99, 100]


def test_each_rank_has_its_own_files(tmp_path: Path, kept: ResultOutbox):
    kept.store_dispatch(advance(0, 2), [])
    ResultOutbox(tmp_path, JOB, 11).store_dispatch(advance(5, 6, rank=11), [])
    assert (steps(tmp_path, 1), steps(tmp_path, 11)) == ([0, 1], [5])


def test_files_are_private(run: Path, kept: ResultOutbox):
    kept.store_dispatch(advance(0, 3), [])
    assert [path.stat().st_mode & 0o777 for path in run.iterdir()] == [0o600]


def test_files_are_removed_after_they_were_read(tmp_path: Path, run: Path, kept: ResultOutbox):
    for start in (0, 4, 8):
        kept.store_dispatch(advance(start, start + 4), [])
    kept.discard_read(3)
    assert steps(tmp_path) == list(range(12))
    kept.discard_read(8)
    assert steps(tmp_path) == [8, 9, 10, 11]
    kept.discard_read()
    assert list(run.iterdir()) == []


def test_remove_all_deletes_files_of_lost_ranks(tmp_path: Path, run: Path, kept: ResultOutbox):
    kept.store_dispatch(advance(0, 4), [])
    ResultOutbox(tmp_path, JOB, 7).store_dispatch(advance(0, 4, rank=7), [])
    (run / "rows.bin").touch()
    engine_outbox.remove_all(tmp_path, JOB)
    assert [path.name for path in run.iterdir()] == ["rows.bin"]
    engine_outbox.remove_all(tmp_path, "job-2")  # nothing is there
    kept.discard_read()


def test_a_dispatch_without_a_step_stores_nothing(run: Path, kept: ResultOutbox):
    kept.store_dispatch(advance(4, 4), SAID)
    assert list(run.iterdir()) == []


def test_nothing_is_written_without_a_run_folder(tmp_path: Path):
    kept = ResultOutbox(tmp_path, "job-2", 0)
    kept.store_dispatch(advance(0, 4), [])
    assert list(tmp_path.iterdir()) == []
    assert kept._files == []


def test_a_file_that_was_cut_off_is_left_out(tmp_path: Path, run: Path, kept: ResultOutbox):
    kept.store_dispatch(advance(0, 4), SAID)
    kept.store_dispatch(advance(4, 8), SAID)
    last = run / "unread-1.4"
    whole = last.read_bytes()
    for size in range(len(whole)):
        last.write_bytes(whole[:size])
        assert steps(tmp_path) == [0, 1, 2, 3]
    last.write_bytes(whole)
    assert steps(tmp_path) == list(range(8))


FOUND: engine_outbox.EvaluationSums = (4, {"loss": (2.0, 4.0), "hits": (float("inf"), 4.0)})


def test_evaluations_stay_until_a_later_dispatch_was_read(tmp_path: Path, run: Path, kept: ResultOutbox):
    for step in (4, 8):
        kept.store_evaluation(step, FOUND)
    kept.store_dispatch(advance(8, 12), [])
    kept.discard_read(8)  # all earlier steps were read, but perhaps not the evaluation after them
    assert engine_outbox.read_evaluations(tmp_path, JOB, RANK) == {8: FOUND}
    assert engine_outbox.read_evaluations(tmp_path, JOB, 0) == {}
    assert steps(tmp_path) == [8, 9, 10, 11]
    assert {path.stat().st_mode & 0o777 for path in run.iterdir()} == {0o600}
    kept.discard_read(12)
    assert list(run.iterdir()) == []
    kept.store_evaluation(12, FOUND)
    engine_outbox.remove_all(tmp_path, JOB)
    assert list(run.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [*(json.dumps(FOUND)[:size] for size in (0, 1, 10, -1)), json.dumps(FOUND), "[" * 100_000 + "\n"]
    + [
        f"{json.dumps(content)}\n"
        for content in (4, {}, [4], [4, [1]], ["x", {}], [4, {"loss": 1}], [4, {"loss": [1, None]}])
    ],
)
def test_a_malformed_evaluation_is_left_out(tmp_path: Path, run: Path, text: str):
    (run / "unread-evaluation-1.4").write_text(text)
    assert engine_outbox.read_evaluations(tmp_path, JOB, RANK) == {}


def _head(**changed: Any) -> bytes:
    return json.dumps({"rows": 4, "places": 2, "messages": 4, "lines": [], "scalars": {}, **changed}).encode()


WHOLE = piped(advance(4, 8))
REST = np.asarray(WHOLE.blocked_spans).tobytes() + np.asarray(WHOLE.messages).tobytes()
BODY = np.asarray(WHOLE.rows).tobytes() + REST


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x95\x0b.",  # a pickle
        b"\xff\xfe\n" + BODY,
        b"[" * 100_000 + b"\n" + BODY,
        b"[4, 2, []]\n" + BODY,
        b"{}\n" + BODY,
        _head() + b"\n" + BODY + b"\0",
        *(_head(rows=count) + b"\n" + BODY for count in (0, -4, 3, 2**62, 4.0, "4", None, [4])),
        *(_head(places=count) + b"\n" + BODY for count in (0, -2, 3, 2**62, 2.5, "2", None)),
        *(_head(messages=count) + b"\n" + BODY for count in (0, -4, 3, 2**62, 4.5, "4", None)),
        *(_head(lines=lines) + b"\n" + BODY for lines in (None, "text", [["text", "hello"]], [4])),
        *(_head(scalars=found) + b"\n" + BODY for found in (None, [], {"x": 1}, {"x": [[0, 1]]}, {"x": [[0, 1, "a"]]})),
        _head() + b"\n" + np.asarray(advance(4, 8, rank=0).rows).tobytes() + REST,  # another rank's
        _head() + b"\n" + np.asarray(advance(4, 8).rows)[::-1].tobytes() + REST,
        _head() + b"\n" + bytes(len(BODY)),
    ],
)
def test_a_malformed_dispatch_is_left_out(tmp_path: Path, run: Path, data: bytes):
    path = run / "unread-1.4"
    path.write_bytes(_head() + b"\n" + BODY)
    assert steps(tmp_path) == [4, 5, 6, 7]
    path.write_bytes(data)
    assert steps(tmp_path) == []


def test_a_full_disk_raises_no_error_and_storing_is_retried(small_disk: Path):
    (small_disk / "runs" / JOB).mkdir(parents=True)
    kept, filler = ResultOutbox(small_disk, JOB, RANK), small_disk / "filler"
    kept.store_dispatch(advance(0, 100), [])
    with contextlib.suppress(OSError):
        filler.write_bytes(bytes(2**20))
    kept.store_dispatch(advance(100, 200), [])
    kept.store_dispatch(advance(200, 300), [])
    assert steps(small_disk) == list(range(100))
    filler.unlink()
    kept.discard_read(100)
    kept.store_dispatch(advance(300, 301), [])
    assert steps(small_disk) == list(range(100, 301))

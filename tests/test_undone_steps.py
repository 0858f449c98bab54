"""A history of a run that went back to a snapshot: what a user reads has each step once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from dtkit.dashboard.summary.comparison import make_row
from dtkit.dashboard.summary.curves import LOSS, Curves, downsample
from dtkit.dashboard.summary.metrics import compute_run_metrics
from dtkit.history import run_log
from dtkit.history.divergence import find_divergence
from dtkit.history.history import History
from dtkit.history.scalars import ScalarRecord
from dtkit.history.undone_steps import UndoneSteps
from dtkit.types import Evaluation, StepRecord

if TYPE_CHECKING:
    from pathlib import Path


def append(history: History, first: int, stop: int, loss: float, ranks: tuple[int, ...] = (0, 1)) -> None:
    """Append the steps `first` to `stop` of all ranks, as one dispatch."""
    history.append(
        [
            StepRecord(step, 0, rank, 4, loss, 4.0, 0.1, *[0.0] * 4, 0.5, 0, sent_bytes=8)
            for rank in ranks
            for step in range(first, stop)
        ]
    )


def make_history() -> History:
    """Return a history of 12 steps; of the first 10, the last 4 were undone."""
    history = History()
    append(history, 0, 10, 1.0)
    append(history, 6, 12, 2.0)
    return history


def check_each_step_once(history: History) -> None:
    totals, frame = history.totals(), history.to_pandas()
    assert totals["step"].tolist() == list(range(12))
    assert history.num_steps == 12
    assert totals["loss"].tolist() == [1.0] * 6 + [2.0] * 6
    assert totals["samples"].sum() == 12 * 8
    assert not frame.duplicated(["step", "rank"]).any()
    assert frame.groupby("step")["samples"].sum().tolist() == [8] * 12
    assert history.column("samples").sum() == 12 * 8
    for rank in (None, 0, 1):
        assert history.loss(rank)[0].tolist() == history.throughput(rank)[0].tolist() == list(range(12))
    assert history.loss(1)[1].tolist() == [1.0] * 6 + [2.0] * 6
    assert history.totals(5, 8)["loss"].tolist() == [1.0, 2.0, 2.0]


def test_each_step_is_read_once_after_the_run_went_back():
    history = make_history()
    check_each_step_once(history)
    assert len(history) == len(history.rows()) == 32  # charts and the log need all in order of arrival
    assert history.read_totals()["step"].tolist() == [*range(10), *range(6, 12)]


def test_what_a_user_writes_into_the_arrays_changes_no_history():
    history = History()
    append(history, 0, 10, 1.0)
    for array in (history.totals()["loss"], history.column("loss"), history.loss()[1], history.loss(1)[1]):
        array[:] = 7
    assert history.loss()[1].tolist() == [1.0] * 10


def test_undone_steps_that_were_not_taken_again_are_left_out():
    history = History()
    append(history, 0, 10, 1.0)
    append(history, 6, 8, 2.0)
    append(history, 3, 4, 3.0)
    assert history.totals()["step"].tolist() == [0, 1, 2, 3]
    assert history.totals()["loss"].tolist() == [1.0, 1.0, 1.0, 3.0]
    assert history.position == (4, pytest.approx(13 * 0.5))  # also the undone steps took time


def test_copies_and_files_keep_what_was_undone(tmp_path: Path):
    history = make_history()
    history.to_jsonl(tmp_path / "history.jsonl")
    check_each_step_once(History.from_jsonl(tmp_path / "history.jsonl"))
    check_each_step_once(history.copy_until(len(history), 0, 0))
    continued = History()
    continued.extend(history)
    check_each_step_once(continued)


def test_a_comparison_counts_each_step_once():
    row = make_row("a", make_history(), "DataParallel()")
    assert (row.steps, row.sent_bytes, row.bytes_per_step) == (12, 12 * 8, 8)


def test_rows_that_one_rank_had_kept_undo_nothing():
    history = History()
    append(history, 0, 5, 1.0)
    append(history, 5, 10, 1.0, ranks=(0,))
    append(history, 5, 10, 1.0, ranks=(1,))
    assert np.bincount(history.to_pandas()["step"]).tolist() == [2] * 10


def evaluate(history: History, step: int, loss: float) -> None:
    history.add(Evaluation(step, 8, {"loss": loss}))


def write_evaluated(folder: Path) -> History:
    """Return a history, also written to `folder`, that lost the evaluation at step 9 and made that at 7 again."""
    history = History()
    run_log.RunLog(folder).start_recording(history)
    append(history, 0, 10, 1.0)
    history.add(ScalarRecord(0, {"kl": [(step, 1.0, 1.0) for step in (4, 9)]}))
    for step in (3, 6, 7, 9):
        evaluate(history, step, 1.0)
    append(history, 6, 8, 2.0)
    evaluate(history, 7, 2.0)
    return history


def check_evaluated(history: History) -> None:
    found = [(evaluation.step, evaluation["loss"]) for evaluation in history.evaluations]
    assert found == [(3, 1.0), (6, 1.0), (7, 2.0)]
    assert history.scalar("kl")[0].tolist() == [4]


def test_evaluations_and_numbers_of_undone_steps_are_gone(tmp_path: Path):
    history = write_evaluated(tmp_path / "run")
    check_evaluated(history)
    assert repr(history) == "History(16 rows, 8 steps, 2 ranks, last loss 2)"
    check_evaluated(history.copy_until(len(history), 0, 3))
    history.to_jsonl(tmp_path / "history.jsonl")
    check_evaluated(History.from_jsonl(tmp_path / "history.jsonl"))
    continued = History()
    continued.extend(history)
    check_evaluated(continued)


def test_a_notebook_that_takes_over_finds_no_undone_evaluation(tmp_path: Path):
    write_evaluated(tmp_path / "run")
    found = run_log.read_history(tmp_path / "run", ranks_per_replica=1)
    check_evaluated(found)
    run_log.RunLog(tmp_path / "run").start_recording(found)
    evaluate(found, 8, 2.0)
    again = run_log.read_history(tmp_path / "run", ranks_per_replica=1)
    assert [evaluation.step for evaluation in again.evaluations] == [3, 6, 7, 8]


def test_a_reader_knows_that_logged_numbers_were_dropped(tmp_path: Path):
    history = write_evaluated(tmp_path / "run")
    assert history.count_scalar_records("kl") == 2
    history.add(UndoneSteps(2))
    assert history.count_scalar_records("kl") == 3
    assert history.scalar("kl")[0].tolist() == []
    assert (history.evaluations, history.list_scalar_records()) == ([], [])


def make_undone(folder: Path | None = None) -> History:
    """Return a history of 10 steps that went back to step 6, and took none since."""
    history = History()
    if folder is not None:
        run_log.RunLog(folder).start_recording(history)
    append(history, 0, 10, 1.0)
    history.add(UndoneSteps(6))
    return history


def check_undone(history: History) -> None:
    assert repr(history) == "History(12 rows, 6 steps, 2 ranks, last loss 1)"
    assert history.totals()["step"].tolist() == list(range(6))
    assert history.position[0] == 6
    assert len(history.to_pandas()) == 12
    assert downsample(history, LOSS, 2).values.shape[0] == 6
    row = make_row("a", history, "DataParallel()")
    assert (row.steps, row.sent_bytes) == (6, 6 * 8)
    append(history, 6, 8, 2.0)
    assert history.totals()["loss"].tolist() == [1.0] * 6 + [2.0] * 2
    assert [back.first for back in history.returns] == [6]  # the first redone row is not another return


def test_steps_count_no_more_before_the_first_one_is_taken_again(tmp_path: Path):
    check_undone(make_undone())
    check_undone(make_undone().copy_until(20, 0, 0))
    make_undone().to_jsonl(tmp_path / "history.jsonl")
    check_undone(History.from_jsonl(tmp_path / "history.jsonl"))
    continued = History()
    continued.extend(make_undone())
    check_undone(continued)


def test_a_notebook_that_takes_over_finds_no_undone_step(tmp_path: Path):
    make_undone(tmp_path / "run")
    found = run_log.read_history(tmp_path / "run", ranks_per_replica=1)
    run_log.RunLog(tmp_path / "run").start_recording(found)
    check_undone(found)
    again = run_log.read_history(tmp_path / "run", ranks_per_replica=1)
    assert again.totals()["loss"].tolist() == [1.0] * 6 + [2.0] * 2


def test_curves_of_undone_steps_are_gone():
    history = make_undone()
    curves = Curves((LOSS,), 2)
    append(history, 6, 12, 1.0)
    curves.update(history)
    history.add(UndoneSteps(3))
    curves.update(history)
    assert curves.has_changes
    assert curves.get_all().values.shape[0] == 3
    append(history, 3, 5, 2.0)
    curves.update(history)
    assert curves.get_all().values[:, 2, :].tolist() == [[1.0] * 3] * 3 + [[2.0] * 3] * 2


def test_ranges_of_valid_rows_are_read_across_their_borders():
    history = History()
    append(history, 0, 10, 1.0, ranks=(0,))
    append(history, 5, 10, 1.0, ranks=(1,))  # which this rank had kept
    history.add(UndoneSteps(7))
    append(history, 7, 9, 2.0)
    assert history.read_valid_rows()["step"].tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 6, 7, 7, 8, 8]
    assert history.read_valid_rows(5, 10)["step"].tolist() == [5, 6, 5, 6, 7]
    assert history.num_valid_rows == 13
    assert history.read_valid_rows(13)["step"].tolist() == history.read_valid_rows(3, 3)["step"].tolist() == []


def test_a_history_counts_in_words():
    history = History()
    history.append([StepRecord(0, 0, 0, 8, 2.0, 8, 0.1, 0, 0, 0, 0, 0.1, 1)])
    assert repr(history) == "History(1 row, 1 step, 1 rank, last loss 2)"


def test_steps_undone_to_the_start_leave_an_empty_history():
    history = History()
    append(history, 0, 3, 1.0)
    history.add(UndoneSteps(0))
    assert repr(history) == "History(empty)"
    assert (history.num_steps, history.position[0], find_divergence(history)) == (0, 0, None)
    assert compute_run_metrics(history, 2).loss is None

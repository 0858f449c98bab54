"""Trackers without a cluster: the records that they get, their parameters, and how they are made."""

from __future__ import annotations

import builtins
import math
import pickle
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dtkit.history.history import ROW_DTYPE, History
from dtkit.history.scalars import ScalarRecord
from dtkit.integrations import timeouts
from dtkit.integrations.trackers import MLflow, TensorBoard, Trackio, Wandb
from dtkit.integrations.trackers.feed import TIME_SHARE, TimeBudget
from dtkit.integrations.trackers.parameters import _flatten, read_git_commit
from dtkit.integrations.trackers.records import Position, RecordReader
from dtkit.types import Evaluation

if TYPE_CHECKING:
    from pathlib import Path


def make_rows(first: int, stop: int, ranks: int = 2) -> np.ndarray:
    """Return rows of some steps; the loss is the step, and a tenth more on each further rank."""
    rows = np.zeros((stop - first) * ranks, ROW_DTYPE)
    rows["step"] = np.repeat(np.arange(first, stop), ranks)
    rows["rank"] = np.tile(np.arange(ranks), stop - first)
    rows["loss"] = rows["step"] + rows["rank"] / 10
    rows["weight"] = rows["samples"] = 8
    rows["step_s"], rows["lr"], rows["memory_bytes"], rows["grad_norm"] = 0.5, 0.1, 3_000_000, math.nan
    return rows


def make_history(steps: int) -> History:
    history = History()
    history.append(make_rows(0, steps))
    return history


# -- records ---------------------------------------------------------------------------------------------------


def test_points_have_the_numbers_of_all_nodes_together_and_of_each():
    reader = RecordReader(make_history(3), Position(), per_node=True)
    points = reader.read(3)
    assert [point.step for point in points] == [0, 1, 2]
    assert points[2].values == {
        "train/loss": pytest.approx(2.05),
        "train/samples_per_s": 32.0,
        "train/step_s": 0.5,
        "train/learning_rate": 0.1,
        "node_0/loss": 2.0,
        "node_0/samples_per_s": 16.0,
        "node_0/step_s": 0.5,
        "node_0/wait_s": 0.0,
        "node_0/memory_mb": 3.0,
        "node_1/loss": pytest.approx(2.1),
        "node_1/samples_per_s": 16.0,
        "node_1/step_s": 0.5,
        "node_1/wait_s": 0.0,
        "node_1/memory_mb": 3.0,
    }
    assert points[2].time - points[0].time == pytest.approx(1.0)


def test_each_record_is_read_once():
    history = make_history(4)
    reader = RecordReader(history, Position(), per_node=False)
    assert len(reader.read(100)) == 4
    assert not reader.has_new
    history.append(make_rows(4, 6))
    history.add(Evaluation(6, 10, {"loss": 0.5}))
    assert reader.has_new
    points = reader.read(100)
    assert [point.step for point in points] == [4, 5, 6]
    assert points[2].values == {"validation/loss": 0.5}
    assert reader.read(100) == []


def test_fewer_steps_are_spread_evenly_and_end_with_the_last():
    points = RecordReader(make_history(100), Position(), per_node=False).read(10)
    assert [point.step for point in points] == list(range(9, 100, 10))
    points = RecordReader(make_history(100), Position(), per_node=False).read(1, every=30)
    assert [point.step for point in points] == [0, 30, 60, 90]


def test_steps_that_were_taken_again_are_read_again():
    history = make_history(5)
    reader = RecordReader(history, Position(), per_node=False)
    reader.read(100)
    history.append(make_rows(3, 6))
    assert [point.step for point in reader.read(100)] == [3, 4, 5]


def test_evaluations_of_steps_that_were_taken_again_are_read_again():
    history = make_history(5)
    reader = RecordReader(history, Position(), per_node=False)
    for step in (2, 4, 5):
        history.add(Evaluation(step, 1, {"loss": 1.0}))
    reader.read(100)
    assert not reader.has_new
    history.append(make_rows(3, 5))
    history.add(Evaluation(4, 1, {"loss": 2.0}))
    assert reader.has_new
    assert {p.step: p.values.get("validation/loss") for p in reader.read(100)} == {3: None, 4: 2.0}
    assert not reader.has_new
    assert reader.position.evaluations == 2


def test_logged_numbers_are_read_also_where_they_come_late():
    history = make_history(3)
    reader = RecordReader(history, Position(), per_node=False)
    assert "logged/kl" not in reader.read(100)[0].values
    history.add(ScalarRecord(0, {"kl": [(1, 6.0, 2.0)]}))
    history.append(make_rows(3, 4))
    history.add(ScalarRecord(1, {"kl": [(3, 8.0, 2.0)]}))
    assert {p.step: p.values.get("logged/kl") for p in reader.read(100)} == {1: 3.0, 3: 4.0}


def test_a_reader_continues_where_another_has_stopped():
    history = make_history(5)
    first = RecordReader(history, Position(), per_node=False)
    first.read(100)
    history.append(make_rows(5, 7))
    second = RecordReader(history, first.position, per_node=False)
    assert second.next_step == 5
    assert [point.step for point in second.read(100)] == [5, 6]
    assert Position.at_end(history) == second.position
    history.add(Evaluation(7, 1, {"loss": 1.0}))
    assert Position.at_end(history).evaluations == 0  # it is of the step that comes next


def test_scalars_since_a_step_are_those_of_all_steps_from_there():
    history = make_history(4)
    history.add(ScalarRecord(0, {"kl": [(0, 1.0, 1.0), (1, 2.0, 1.0)]}))
    history.add(ScalarRecord(0, {"kl": [(2, 3.0, 1.0), (3, 4.0, 1.0)]}))
    steps, values = history.scalar("kl", since=1)
    assert (steps.tolist(), values.tolist()) == ([1, 2, 3], [2.0, 3.0, 4.0])
    assert history.scalar("kl", since=9)[0].tolist() == []


# -- time ------------------------------------------------------------------------------------------------------


def test_writing_takes_its_share_of_the_time_and_a_credit():
    budget, spent = TimeBudget(0.0), 0.0
    for now in range(0, 10_000, 2):
        remaining = budget.get_remaining_s(float(now))
        if remaining > 0:
            budget.spend(0.05)  # one write, whatever remains
            spent += 0.05
    assert spent <= timeouts.TRACKER_TIME_CREDIT_S + TIME_SHARE * 10_000 + 0.05
    assert spent >= 0.9 * TIME_SHARE * 10_000


# -- parameters ------------------------------------------------------------------------------------------------


def test_parameters_become_plain_values_with_flat_names():
    nested = {"model": {"width": 8, "act": len}, "tags": ("a", "b"), "lr": 0.1, "none": None, "on": True}
    values = dict(_flatten(nested))
    assert values == {
        "model.width": 8,
        "model.act": str(len),
        "tags": "a, b",
        "lr": 0.1,
        "none": "None",
        "on": True,
    }


def test_commit_of_a_repository_and_no_error_outside_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert read_git_commit(tmp_path) == {}

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.example")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()

    git("init", "-q")
    assert read_git_commit(tmp_path) == {}  # no commit yet
    (tmp_path / "a.txt").write_text("1")
    git("add", "a.txt")
    git("commit", "-q", "-m", "one")
    assert read_git_commit(tmp_path) == {"git_commit": git("rev-parse", "HEAD"), "git_changed": False}
    (tmp_path / "a.txt").write_text("2")
    assert read_git_commit(tmp_path)["git_changed"] is True
    monkeypatch.setenv("PATH", "")
    assert read_git_commit(tmp_path) == {}


# -- construction ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "extra"), [(TensorBoard, "tensorboard"), (MLflow, "mlflow"), (Wandb, "wandb"), (Trackio, "trackio")]
)
def test_a_missing_package_is_reported_with_the_extra(make: Any, extra: str, monkeypatch: pytest.MonkeyPatch):
    real_import = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == extra:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr("importlib.import_module", refuse)
    with pytest.raises(ImportError, match=rf"{make.__name__} needs the package {extra}.*dtkit-jupyter\[{extra}\]"):
        make()


@pytest.mark.parametrize("every", [0, -1, True, 1.5])
def test_a_wrong_interval_is_refused(every: Any):
    with pytest.raises(ValueError, match="every="):
        TensorBoard(every=every)


def test_a_wrong_mode_of_wandb_is_refused():
    with pytest.raises(ValueError, match="mode='on'"):
        Wandb(mode="on")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Wandb("a/b"), r"project='a/b'; it must be a name without / "),
        (lambda: Wandb(""), "project=''; it must be a name"),
        (lambda: MLflow(3), "experiment=3; it must be a name"),  # type: ignore[arg-type]
        (lambda: TensorBoard(params=[1]), r"params=\[1\]; give parameters by name"),  # type: ignore[arg-type]
        (lambda: TensorBoard(per_node="no"), "per_node='no'; it must be True or False"),  # type: ignore[arg-type]
    ],
)
def test_options_of_another_kind_are_refused(make: Any, message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_tracker_can_be_pickled_for_another_notebook(tmp_path: Path):
    pytest.importorskip("tensorboard")
    tracker = TensorBoard(tmp_path, params={"a": 1})
    copy = pickle.loads(pickle.dumps(tracker))
    assert (copy.folder, copy._key, copy._options) == (tracker.folder, tracker._key, tracker._options)
    assert repr(copy) == f"TensorBoard({str(tmp_path)!r})"

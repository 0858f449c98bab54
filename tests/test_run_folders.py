"""Checkpoints of different runs never mix: each has a folder of its own, and a mixed folder is refused."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

import dtkit
from dtkit.dashboard.live.commands import CommandHandler
from dtkit.testing.in_process import InProcessTransport
from tests.support.small import data, train
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dtkit.Cluster]:
    monkeypatch.chdir(tmp_path)
    with dtkit.Cluster.from_transport(InProcessTransport(), device="cpu", threads=1) as made:
        yield made


def test_save_without_a_path_goes_where_the_button_saves(cluster: dtkit.Cluster, tmp_path: Path):
    run = train(cluster, start=False)
    run.step(2)
    saved = run.save()
    assert saved.path.parent.parent == tmp_path / "checkpoints"
    assert saved.path.parent.name.startswith("Sequential-")
    run.step(2)
    reports: list[tuple[str, str, str]] = []
    CommandHandler(run, lambda *words: reports.append(words)).handle("save", None)
    wait_until(lambda: bool(reports))
    assert f"checkpoints/{saved.path.parent.name}/step-00000004" in reports[0][2]


def test_two_runs_of_one_class_have_two_folders(cluster: dtkit.Cluster, tmp_path: Path):
    paths = []
    for _ in range(2):
        run = train(cluster, steps=2)
        run.wait(60)
        paths.append(run.save())
    assert paths[0].path.parent != paths[1].path.parent
    with pytest.raises(dtkit.errors.CheckpointError, match="Give one of the folders of runs in it: Sequential-"):
        train(cluster, resume_from=tmp_path / "checkpoints")
    resumed = train(cluster, steps=4, resume_from=paths[0])
    resumed.wait(60)
    assert len(resumed.history) == 4


def test_folder_with_two_runs_is_refused(cluster: dtkit.Cluster, tmp_path: Path):
    for steps in (2, 3):
        run = train(cluster, steps=steps)
        run.wait(60)
        run.save(tmp_path / "mixed")
    with pytest.raises(
        dtkit.errors.CheckpointError, match=r"different runs.* step-00000003 is the newest, .*-00000002"
    ):
        train(cluster, resume_from=tmp_path / "mixed")
    train(cluster, resume_from=tmp_path / "mixed" / "step-00000002").wait(60)


def test_folder_of_a_run_and_its_continuation_has_a_newest(cluster: dtkit.Cluster, tmp_path: Path):
    train(cluster, steps=2, checkpoint_dir=tmp_path / "one").wait(60)
    train(cluster, steps=4, checkpoint_dir=tmp_path / "one", resume_from=tmp_path / "one").wait(60)
    shutil.copytree(tmp_path / "one" / "step-00000002", tmp_path / "one" / "step-00000002.2")
    assert dtkit.Checkpoint(tmp_path / "one").step in (2, 4)


def test_released_run_names_a_remedy_that_works(cluster: dtkit.Cluster):
    run = train(cluster, start=False)
    run.step(3)
    saved = run.save()
    train(cluster, steps=1).wait(60)
    for command in (run.resume, lambda: run.extend(epochs=1)):
        with pytest.raises(dtkit.errors.RunError) as caught:
            command()
        assert "run.extend" not in str(caught.value)
        assert f"resume_from={str(saved.path)!r}" in str(caught.value)
    assert train(cluster, resume_from=saved.path).result(60) is not None


def test_released_run_without_a_checkpoint_names_its_weights(cluster: dtkit.Cluster):
    run = train(cluster, steps=3)
    run.wait(60)
    train(cluster, steps=1).wait(60)
    with pytest.raises(
        dtkit.errors.RunError,
        match=r"Its weights are in run\.model, which this notebook can use; cluster\.train\(run\.model",
    ):
        run.resume()
    train(cluster, run.model, steps=1).wait(60)


def test_metrics_without_validation_are_told(cluster: dtkit.Cluster, capsys: pytest.CaptureFixture[str]):
    metrics = {"mean": lambda output, _target: output.mean()}
    train(cluster, steps=1, metrics=metrics).wait(60)
    assert "metrics= are computed on validation=, and there is none" in capsys.readouterr().out
    train(cluster, steps=1, metrics=metrics, validation=data()).wait(60)
    assert "metrics=" not in capsys.readouterr().out

"""What remains of a run that was paused when a later training took its place."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch

import dtkit
from dtkit.errors import NonFiniteError
from dtkit.testing.in_process import InProcessTransport
from dtkit.types import State
from tests.support.small import train

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def cluster() -> Iterator[dtkit.Cluster]:
    with dtkit.Cluster.from_transport(InProcessTransport(), device="cpu", threads=1) as made:
        yield made


def pause_at(cluster: dtkit.Cluster, step: int, **options: object) -> dtkit.Run:
    run = train(cluster, start=False, name="first", **options)
    run.step(step)
    return run


def test_replaced_run_is_named_and_its_weights_outlive_its_variable(
    cluster: dtkit.Cluster, capsys: pytest.CaptureFixture[str]
):
    run = pause_at(cluster, 3)
    weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run = train(cluster, steps=1)
    gc.collect()
    line = capsys.readouterr().out
    assert "first was paused at step 3 of 20" in line
    assert "cluster.earlier_runs.replaced.model" in line
    assert "run.save()" in line
    replaced = cluster.earlier_runs.replaced
    assert replaced is not None
    assert replaced.status.state is State.STOPPED
    assert "a later training" in " ".join(event.text for event in replaced.history.events)
    torch.testing.assert_close(dict(replaced.model.state_dict()), weights, rtol=0, atol=0)
    run.wait(60)


def test_ruined_weights_of_a_replaced_run_are_not_offered(cluster: dtkit.Cluster, capsys: pytest.CaptureFixture[str]):
    run = train(cluster, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e30), name="first")
    with pytest.raises(NonFiniteError) as caught:
        run.wait(60)
    assert caught.value.remedy == "train"
    train(cluster, steps=1).wait(60)
    line = capsys.readouterr().out
    assert "Its parameters are ruined" in line
    assert "earlier_runs.replaced" not in line
    assert "run.save()" not in line


def test_replaced_run_with_a_checkpoint_dir_can_be_continued(
    cluster: dtkit.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    whole = train(cluster, name="whole")
    expected = whole.result(60).state_dict()
    pause_at(cluster, 3, checkpoint_dir=tmp_path)
    train(cluster, steps=1).wait(60)
    line = capsys.readouterr().out
    assert f"resume_from='{tmp_path}" in line
    resumed = train(cluster, resume_from=line.split("resume_from='")[1].split("'")[0])
    torch.testing.assert_close(dict(resumed.result(60).state_dict()), dict(expected), rtol=0, atol=0)


def test_line_names_an_older_checkpoint_of_a_replaced_run(
    cluster: dtkit.Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = pause_at(cluster, 3)
    saved = run.save(tmp_path / "by-hand")
    run.step(2)
    train(cluster, steps=1).wait(60)
    assert f"Its last checkpoint is '{saved.path}'" in capsys.readouterr().out


def test_nothing_is_printed_for_runs_that_lose_nothing(cluster: dtkit.Cluster, capsys: pytest.CaptureFixture[str]):
    train(cluster, start=False)
    run = train(cluster, steps=4, start=False)
    run.step(2)
    run.stop()
    train(cluster, steps=1).wait(60)
    assert "takes its place" not in capsys.readouterr().out
    assert cluster.earlier_runs.replaced is None


def test_the_last_measurement_of_memory_stays_after_the_next_training(cluster: dtkit.Cluster):
    measured = train(cluster, steps=1)
    measured.wait(60)
    memory = measured.memory()
    other = train(cluster, steps=2)
    other.wait(60)
    assert repr(measured.memory()) == repr(memory)
    train(cluster, steps=1).wait(60)
    released = r"this run was released by a later training\. Call run\.memory\(\) before that"
    with pytest.raises(dtkit.errors.RunError, match=released):
        other.memory()


def test_the_error_of_a_released_run_names_what_released_it(cluster: dtkit.Cluster):
    first = train(cluster, steps=1)
    first.wait(60)
    second = train(cluster, steps=1)
    second.wait(60)
    for run, cause in ((first, "by a later training, and its data were freed since"), (second, r"by run\.release\(\)")):
        run.release()
        with pytest.raises(dtkit.errors.RunError, match=rf"extend needs .* was released {cause}\. "):
            run.extend(steps=1)

"""All engines end at once, as when memory runs out: the run continues from its last snapshot on disk."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dtkit
from dtkit._util import timeouts
from dtkit.dashboard.summary.notices import list_error_lines
from dtkit.training import recovered_data
from tests.support.oracle import BOUND, max_difference, momentum
from tests.support.recovery import list_loss_events
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster

STEPS = 400


@pytest.fixture(scope="module")
def cluster() -> Iterator[dtkit.Cluster]:
    with dtkit.Cluster(2, threads=1, spares=2) as started:
        yield started


def make_rows(count: int = 4000) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows that are too large to travel inline."""
    inputs = torch.randn(count, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return inputs, inputs[:, :1].sin()


def start(cluster: dtkit.Cluster, **options: Any) -> dtkit.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1)).double()
    arguments: dict[str, Any] = {"optimizer": momentum, "loss": nn.MSELoss(), "batch_size": 32, "steps": STEPS}
    return cluster.train(model, make_rows(), **{**arguments, **options})


def exit_on_engines(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if torch.distributed.is_initialized():  # not in the trial in the notebook
        os._exit(3)
    return nn.functional.mse_loss(output, target)


def test_error_of_engines_that_all_end_in_a_step_says_how_they_ended(cluster: dtkit.Cluster):
    run = start(cluster, loss=exit_on_engines)
    with pytest.raises(dtkit.errors.EmptyEnginesError, match=r"How an engine ended: .*exit status 3.*correct it first"):
        run.wait(60)


def end_all_engines(cluster: dtkit.Cluster) -> None:
    for node in cluster.nodes:
        os.kill(node.pid, signal.SIGKILL)


def is_kept(run: dtkit.Run) -> bool:
    folder = run._driver.snapshot_folder
    return recovered_data.is_stored(folder) and any(folder.glob("step-*"))


def test_run_goes_on_by_default_after_all_engines_ended(cluster: dtkit.Cluster, monkeypatch: pytest.MonkeyPatch):
    undisturbed = start(cluster)
    undisturbed.wait(60)
    expected = undisturbed.model.state_dict()
    monkeypatch.setattr(timeouts, "DEFAULT_SNAPSHOT_INTERVAL_S", 0.05)
    run = start(cluster, validation=make_rows(50), start=False)
    while not is_kept(run):
        run.step(5)
    at = run.step(5)
    assert at < STEPS
    end_all_engines(cluster)
    run.resume()
    run.wait(120)
    assert list_loss_events(run) == ["lost", "lost", "repair"]
    (text,) = (event.text for event in run.history.events if event.kind == "repair")
    assert "the last snapshot, from disk" in text
    assert max_difference(run.model.state_dict(), expected) <= BOUND
    assert sorted(set(run.history.totals()["step"])) == list(range(STEPS))
    assert run.evaluate(make_rows(50)).values["loss"] > 0


def test_snapshot_every_counts_for_replicas_too(cluster: dtkit.Cluster):
    run = start(cluster, snapshot_every=20, start=False)
    run.step(20)
    run.step(5)
    wait_until(lambda: is_kept(run))
    end_all_engines(cluster)
    run.resume()
    run.wait(120)
    (text,) = (event.text for event in run.history.events if event.kind == "repair")
    assert "from step 20 (the last snapshot, from disk)" in text


def test_last_snapshot_becomes_a_checkpoint_where_data_were_not_kept(
    cluster: dtkit.Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recovered_data, "MAX_BYTES", 100)
    run = start(cluster, snapshot_every=20, start=False)
    assert "keeps no copy of the engines' data" in run.history.events[0].text
    run.step(20)
    run.step(5)
    wait_until(lambda: any(run._driver.snapshot_folder.glob("step-*")))
    end_all_engines(cluster)
    run.resume()
    with pytest.raises(dtkit.errors.ClusterError, match="all engines ended") as caught:
        run.wait(120)
    (path,) = (tmp_path / "checkpoints").glob("Sequential-*/step-00000020")
    assert f"resume_from='{path}') continues from step 20" in str(caught.value)
    resumed = start(cluster, resume_from=path)
    resumed.wait(60)
    assert resumed.history.totals()["step"][0] == 20
    assert "were not kept" not in caplog.text


def test_new_training_needs_nothing_of_an_earlier_run_whose_engines_all_ended(
    cluster: dtkit.Cluster, capsys: pytest.CaptureFixture[str]
):
    run = start(cluster, steps=3)
    run.wait(60)
    end_all_engines(cluster)
    wait_until(lambda: cluster._engine_group.membership.find_lost_ranks() == [0, 1])
    again = start(cluster, steps=3)
    again.wait(60)
    assert "the earlier run can't go on: all engines ended" in capsys.readouterr().out
    with pytest.raises(dtkit.errors.RunError, match=r"It has no checkpoint; cluster\.train"):
        run.resume()


def test_lost_engines_of_a_run_that_pauses_name_host_and_remedy(cluster: dtkit.Cluster):
    run = start(cluster, on_failure="pause", start=False)
    run.step(5)
    os.kill(cluster.nodes[1].pid, signal.SIGKILL)
    run.resume()
    with pytest.raises(dtkit.errors.PausedError):
        run.wait(60)
    shown = "\n".join(list_error_lines(run.exception))
    assert f"node 1 on {cluster.nodes[1].host}: the engine of node 1 is gone" in shown
    assert "run.resume(), or the button Resume, starts another one" in shown
    assert not re.search(r"\brank|repair|EngineLost|\?", shown)
    run.resume()
    run.wait(60)

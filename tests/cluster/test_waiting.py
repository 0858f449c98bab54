"""Ranks that compute layers together: what each waits for the others within forward and backward, and who is slow."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtkit
from dtkit.history.comm_time import SYNC_PHASE, WAIT_PHASE, get_phase_kind
from dtkit.history.timeline import COMPUTE_PHASES
from tests.support.oracle import data, mlp, momentum

if TYPE_CHECKING:
    from pathlib import Path

    from dtkit.strategies.base import Strategy
    from dtkit.training.run import Run

pytestmark = pytest.mark.cluster

STRATEGIES = {"tensor": dtkit.TensorParallel(2), "sharded": dtkit.Sharded()}
of_each = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)

COST = 0.02
UNEVEN = 0.08


def costly(model: nn.Module, batch: Any) -> torch.Tensor:
    """A step of a declared cost, before what ranks compute together."""
    # sleeps: a declared cost
    time.sleep(COST)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def uneven(model: nn.Module, batch: Any) -> torch.Tensor:
    """A step that costs rank 0 more."""
    # sleeps: a declared cost that differs between ranks
    time.sleep(UNEVEN if dist.get_rank() == 0 else 0.0)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def slowed(cluster: dtkit.Cluster, strategy: Strategy, step: Any, rank: int) -> Run:
    """A run of some steps, in which one rank takes four times as long to compute."""
    run = cluster.train(
        mlp(), data(), training_step=step, optimizer=momentum, batch_size=16, steps=20, strategy=strategy, start=False
    )
    run.inject_delay(rank, 4)
    run.step(12)
    return run


def seconds(run: Run, *phases: str) -> list[float]:
    """Of each rank, the median step's seconds in these phases together, but for the first steps."""
    rows = run.history.rows()
    rows = rows[rows["step"] >= 2]
    total = sum(rows[f"{phase}_s"] for phase in phases)
    return [float(np.median(total[rows["rank"] == rank])) for rank in np.unique(rows["rank"])]


@of_each
def test_who_waits_within_layers_for_a_slowed_rank_does_not_compute(cluster2: dtkit.Cluster, strategy: Strategy):
    run = slowed(cluster2, strategy, costly, 1)
    computing, waiting = seconds(run, "forward", "backward"), seconds(run, "wait")
    assert COST <= computing[0] < 2 * COST
    assert 4 * COST <= computing[1] < 6 * computing[0]
    assert waiting[0] > 2.5 * COST
    assert waiting[1] < COST / 2
    run.stop()


@of_each
def test_the_waiting_of_a_slowed_rank_is_not_slowed(cluster2: dtkit.Cluster, strategy: Strategy):
    """It fed on itself: what it waited within a layer counted as computing, and took four times as long."""
    run = slowed(cluster2, strategy, uneven, 1)
    assert seconds(run, "forward", "backward")[1] < UNEVEN / 2
    assert seconds(run, "wait")[1] > UNEVEN / 2
    assert max(seconds(run, "step")) < 2 * UNEVEN
    run.stop()


@of_each
def test_the_timeline_tells_computing_collectives_and_waiting_apart(
    cluster2: dtkit.Cluster, strategy: Strategy, tmp_path: Path
):
    run = slowed(cluster2, strategy, costly, 1)
    timeline = run.timeline
    for step in timeline.steps:
        found = [order(timeline.select_spans(step, rank)) for rank in (0, 1)]
        assert [phase for phase in found[0] if phase != WAIT_PHASE] == [
            phase for phase in found[1] if phase != WAIT_PHASE
        ]
        assert {"data", "forward", SYNC_PHASE, WAIT_PHASE, "backward", "update"} <= set(found[0])
        assert found[0].index("forward") < found[0].index(WAIT_PHASE) < found[0].index("backward")
        lengths = timeline.select_spans(step)["end"] - timeline.select_spans(step)["begin"]
        assert (lengths >= 0).all()
    waited = [longest(timeline.select_spans(timeline.steps[-1], rank), WAIT_PHASE) for rank in (0, 1)]
    assert waited[0] > max(1.5 * COST, waited[1])
    run.timeline.export_chrome_trace(tmp_path / "trace.json")
    assert f'"cat": "{WAIT_PHASE}"' in (tmp_path / "trace.json").read_text()
    run.stop()


def order(spans: np.ndarray) -> list[str]:
    """What a rank did, one after the other."""
    return [get_phase_kind(str(phase)) for phase in spans["phase"]]


def longest(spans: np.ndarray, phase: str) -> float:
    """The longest span of a phase; 0 without any."""
    own = spans[spans["phase"] == phase]
    return float((own["end"] - own["begin"]).max(initial=0.0))


@pytest.mark.parametrize("cluster", [4], indirect=True)
@pytest.mark.parametrize("strategy", [dtkit.TensorParallel(2, replicas=2), dtkit.Sharded(replicas=2)], ids=STRATEGIES)
def test_replicas_wait_for_each_other_only_where_they_meet(cluster: dtkit.Cluster, strategy: Strategy):
    run = slowed(cluster, strategy, costly, 3)
    assert np.argmin(seconds(run, "wait")) == 3
    spans = run.timeline.select_spans(run.timeline.steps[-1])
    for rank, (mates, alike) in enumerate([("0-1", "0-2"), ("0-1", "1-3"), ("2-3", "0-2"), ("2-3", "1-3")]):
        own = spans[spans["rank"] == rank]
        expected = {mates, alike} if isinstance(strategy, dtkit.TensorParallel) else {mates}  # FSDP2 sums unseen
        assert expected == {str(phase).split()[1] for phase in own["phase"] if str(phase).startswith(f"{SYNC_PHASE} ")}
    before = [spans[(spans["rank"] == r) & (spans["begin"] < first_backward(spans, r))] for r in range(4)]
    # For what the slowed rank has of its replica; the other replica waits once gradients are summed.
    assert longest(before[2], WAIT_PHASE) > max(1.5 * COST, longest(before[0], WAIT_PHASE))
    run.stop()


def first_backward(spans: np.ndarray, rank: int) -> float:
    """When it began."""
    own = spans[(spans["rank"] == rank) & (spans["phase"] == "backward")]
    return float(own["begin"].min())


def test_a_step_that_is_explained_is_marked_too(cluster2: dtkit.Cluster):
    run = slowed(cluster2, dtkit.TensorParallel(2), costly, 1)
    run.explain_step()
    assert longest(run.timeline.select_spans(run.timeline.steps[-1], 0), WAIT_PHASE) > 1.5 * COST
    assert {str(phase) for phase in run.timeline.spans["phase"]} & set(COMPUTE_PHASES)
    run.stop()

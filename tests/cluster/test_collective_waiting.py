"""Ranks that compute layers together: waiting times within forward and backward, and slow ranks."""

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
from tests.support.marks import slow
from tests.support.oracle import data, mlp, momentum

if TYPE_CHECKING:
    from pathlib import Path

    from dtkit.strategies.base import Strategy
    from dtkit.training.run import Run

pytestmark = pytest.mark.cluster

STRATEGIES = {"tensor": dtkit.TensorParallel(2), "sharded": dtkit.Sharded()}


def for_each_strategy(daily: str) -> Any:
    """Return a parametrize mark over strategies. `make test` takes one of them."""
    cases = [
        pytest.param(strategy, id=name) if name == daily else slow(strategy, id=name)
        for name, strategy in STRATEGIES.items()
    ]
    return pytest.mark.parametrize("strategy", cases)


COST = 0.02
UNEVEN = 0.2  # four times the computing of a slow machine is far less


def costly(model: nn.Module, batch: Any) -> torch.Tensor:
    """Take a step of a declared cost, before the ranks compute together."""
    # sleeps: a declared cost
    time.sleep(COST)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def uneven(model: nn.Module, batch: Any) -> torch.Tensor:
    """Take a step that costs rank 0 more."""
    # sleeps: a declared cost that differs between ranks
    time.sleep(UNEVEN if dist.get_rank() == 0 else 0.0)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def start_slowed(cluster: dtkit.Cluster, strategy: Strategy, step: Any, rank: int) -> Run:
    """Take 12 steps in which one rank computes four times as long."""
    run = cluster.train(
        mlp(), data(), training_step=step, optimizer=momentum, batch_size=16, steps=20, strategy=strategy, start=False
    )
    run.inject_delay(rank, 4)
    run.step(12)
    return run


def measure_seconds(run: Run, *phases: str) -> list[float]:
    """Return for each rank the median seconds per step in these phases together, without the first steps."""
    rows = run.history.rows()
    rows = rows[rows["step"] >= 2]
    total = sum(rows[f"{phase}_s"] for phase in phases)
    return [float(np.median(total[rows["rank"] == rank])) for rank in np.unique(rows["rank"])]


@for_each_strategy("tensor")
def test_waiting_for_a_slowed_rank_does_not_count_as_computing(cluster2: dtkit.Cluster, strategy: Strategy):
    run = start_slowed(cluster2, strategy, costly, 1)
    computing, waiting = measure_seconds(run, "forward", "backward"), measure_seconds(run, "wait")
    assert COST <= computing[0] < 2 * COST
    assert 4 * COST <= computing[1] < 6 * computing[0]
    assert waiting[0] > 2.5 * COST
    assert waiting[1] < COST / 2
    run.stop()


@for_each_strategy("sharded")
def test_waiting_of_a_slowed_rank_is_not_slowed(cluster2: dtkit.Cluster, strategy: Strategy):
    """Waiting within a layer must not count as computing, which is multiplied by the delay factor."""
    run = start_slowed(cluster2, strategy, uneven, 1)
    assert measure_seconds(run, "forward", "backward")[1] < UNEVEN / 2
    assert measure_seconds(run, "wait")[1] > UNEVEN / 2
    assert max(measure_seconds(run, "step")) < 2 * UNEVEN
    run.stop()


@for_each_strategy("tensor")
def test_timeline_separates_computing_collectives_and_waiting(
    cluster2: dtkit.Cluster, strategy: Strategy, tmp_path: Path
):
    run = start_slowed(cluster2, strategy, costly, 1)
    timeline = run.timeline
    for step in timeline.steps:
        kinds = [list_kinds(timeline.select_spans(step, rank)) for rank in (0, 1)]
        assert [phase for phase in kinds[0] if phase != WAIT_PHASE] == [
            phase for phase in kinds[1] if phase != WAIT_PHASE
        ]
        assert {"data", "forward", SYNC_PHASE, WAIT_PHASE, "backward", "update"} <= set(kinds[0])
        assert kinds[0].index("forward") < kinds[0].index(WAIT_PHASE) < kinds[0].index("backward")
        lengths = timeline.select_spans(step)["end"] - timeline.select_spans(step)["begin"]
        assert (lengths >= 0).all()
    waited = [get_longest(timeline.select_spans(timeline.steps[-1], rank), WAIT_PHASE) for rank in (0, 1)]
    assert waited[0] > max(1.5 * COST, waited[1])
    run.timeline.export_chrome_trace(tmp_path / "trace.json")
    assert f'"cat": "{WAIT_PHASE}"' in (tmp_path / "trace.json").read_text()
    run.stop()


def list_kinds(spans: np.ndarray) -> list[str]:
    """Return the kinds of a rank's phases, in order."""
    return [get_phase_kind(str(phase)) for phase in spans["phase"]]


def get_longest(spans: np.ndarray, phase: str) -> float:
    """Return the longest span of a phase, or 0 without any."""
    phase_spans = spans[spans["phase"] == phase]
    return float((phase_spans["end"] - phase_spans["begin"]).max(initial=0.0))


@pytest.mark.parametrize("cluster", [4], indirect=True)
@pytest.mark.parametrize(
    "strategy", [dtkit.TensorParallel(2, replicas=2), slow(dtkit.Sharded(replicas=2))], ids=STRATEGIES
)
def test_replicas_wait_for_each_other_only_in_shared_collectives(cluster: dtkit.Cluster, strategy: Strategy):
    run = start_slowed(cluster, strategy, costly, 3)
    assert np.argmin(measure_seconds(run, "wait")) == 3
    spans = run.timeline.select_spans(run.timeline.steps[-1])
    for rank, (replica_group, slice_group) in enumerate(
        [("0-1", "0-2"), ("0-1", "1-3"), ("2-3", "0-2"), ("2-3", "1-3")]
    ):
        rank_spans = spans[spans["rank"] == rank]
        expected = (
            {replica_group, slice_group} if isinstance(strategy, dtkit.TensorParallel) else {replica_group}
        )  # FSDP2's sums are not recorded
        assert expected == {
            str(phase).split()[1] for phase in rank_spans["phase"] if str(phase).startswith(f"{SYNC_PHASE} ")
        }
    before = [spans[(spans["rank"] == r) & (spans["begin"] < get_backward_begin(spans, r))] for r in range(4)]
    # Rank 2 waits for the slowed rank of its replica. The other replica waits only when gradients are summed.
    assert get_longest(before[2], WAIT_PHASE) > max(1.5 * COST, get_longest(before[0], WAIT_PHASE))
    run.stop()


def get_backward_begin(spans: np.ndarray, rank: int) -> float:
    """Return the begin of a rank's first backward phase."""
    backward = spans[(spans["rank"] == rank) & (spans["phase"] == "backward")]
    return float(backward["begin"].min())


def test_explained_step_has_a_timeline(cluster2: dtkit.Cluster):
    run = start_slowed(cluster2, dtkit.TensorParallel(2), costly, 1)
    run.explain_step()
    assert get_longest(run.timeline.select_spans(run.timeline.steps[-1], 0), WAIT_PHASE) > 1.5 * COST
    assert {str(phase) for phase in run.timeline.spans["phase"]} & set(COMPUTE_PHASES)
    run.stop()

"""Explained steps of pipelines, tensor parallelism and sharding, and the memory report of a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dtkit
from dtkit.explain.pipeline import PipelineExplanation
from dtkit.explain.sharded import ShardedExplanation
from tests.support.marks import slow
from tests.support.small import data, sgd, train

pytestmark = pytest.mark.cluster

WIDTH = 8
PIPELINES = [
    dtkit.Pipeline(2, 4, balance_by="parameters", clip_grad_norm=0.1),
    dtkit.Pipeline(2, 3, "GPipe", balance_by="parameters"),
    dtkit.Pipeline(2, 4, "ZBVZeroBubble", balance_by="parameters"),
]
WITH_REPLICAS = [
    dtkit.Pipeline(2, 2, replicas=2, balance_by="parameters"),
    dtkit.TensorParallel(2, replicas=2),
    dtkit.Sharded(replicas=2),
]
SHARDING = [dtkit.TensorParallel(2), dtkit.Sharded(clip_grad_norm=0.1)]


def net() -> nn.Module:
    torch.manual_seed(0)
    hidden = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), *hidden, nn.Linear(WIDTH, 3)).double()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    return data()[0].double(), data()[1]


def sum_losses(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return nn.functional.cross_entropy(output, target, reduction="sum"), torch.tensor(float(len(target)))


def explain_second_step(cluster: dtkit.Cluster, strategy: Any, **options: Any) -> tuple[dtkit.Run, Any]:
    """Take two steps and explain the second one. Check that the parameters are not changed by that."""
    plain = train(cluster, net(), rows(), steps=2, strategy=strategy, **options)
    plain.wait(60)
    expected = plain.model.state_dict()
    run = train(cluster, net(), rows(), steps=2, strategy=strategy, start=False, **options)
    run.step()
    explanation = run.explain_step()
    state = run.model.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert explanation.step == 1
    assert explanation.loss == pytest.approx(float(run.history.totals()["loss"][1]))
    return run, explanation


@pytest.mark.parametrize("strategy", PIPELINES, ids=str)
def test_transfers_between_stages_arrive_unchanged_and_add_up(cluster2: dtkit.Cluster, strategy: Any):
    run, explanation = explain_second_step(cluster2, strategy)
    assert isinstance(explanation, PipelineExplanation)
    boundaries, m = strategy.pipeline_schedule.stages - 1, strategy.micro_batches
    assert len(explanation.transfers) == 2 * boundaries * m
    assert {(c.kind, c.micro_batch) for c in explanation.transfers} == {
        (kind, k) for kind in ("activation", "gradient") for k in range(m)
    }
    assert all(c.shape == (-(-16 // m), WIDTH) and c.dtype == "float64" for c in explanation.transfers)
    assert explanation.is_intact
    assert explanation.is_sum_of_micro_batches
    assert max(stage.gap / stage.norm for stage in explanation.stages) < 1e-14
    forward_transfers = [c for c in explanation.transfers if c.kind == "activation" and c.sender != c.receiver]
    assert explanation.sent_bytes("activation") == sum(8 * WIDTH * c.shape[0] for c in forward_transfers)
    norm = sum(stage.norm**2 for stage in explanation.stages) ** 0.5
    assert norm == pytest.approx(float(run.history.rows()["grad_norm"][-1]))


def test_step_with_a_summed_loss_is_explained(cluster2: dtkit.Cluster):
    _, explanation = explain_second_step(cluster2, PIPELINES[0], loss=sum_losses)
    assert explanation.is_intact
    assert explanation.is_sum_of_micro_batches
    assert sum(rank.weight for rank in explanation.ranks) == 16


@pytest.mark.parametrize("strategy", SHARDING, ids=str)
def test_explanation_lists_sums_by_sockets(cluster2: dtkit.Cluster, strategy: Any):
    _, explanation = explain_second_step(cluster2, strategy, loss=sum_losses)
    direct = [collective for collective in explanation.collectives if collective.is_direct]
    numbers = [collective.nbytes for collective in direct if collective.nbytes == 8]
    assert len(numbers) == 2  # of the weights, and of the gradients' squares
    if isinstance(strategy, dtkit.TensorParallel):
        assert direct == list(explanation.collectives)
        assert len(direct) > 2  # those of the layers
    else:
        assert len(direct) == 2
    assert explanation.is_agreed


@pytest.mark.parametrize("strategy", SHARDING, ids=str)
def test_explanation_lists_collectives_with_their_bytes(cluster2: dtkit.Cluster, strategy: Any):
    run, explanation = explain_second_step(cluster2, strategy)
    assert isinstance(explanation, ShardedExplanation)
    assert explanation.is_agreed
    assert {c.ranks for c in explanation.collectives} == {(0, 1)}
    assert explanation.sent_bytes == int(run.history.rows()["sent_bytes"][-1])
    numbers = sum(p.numel() for p in net().parameters())
    by_kind = {
        kind: sum(c.nbytes for c in explanation.collectives if c.operation == kind)
        for kind in ("all_gather", "all_reduce")
    }
    if isinstance(strategy, dtkit.Sharded):
        padded = 8 * (numbers + 1)  # the last layer's 3 rows and 3 biases are padded to halves of 2
        assert by_kind["all_gather"] == pytest.approx(2 * padded, rel=0.15)
        assert {c.phase for c in explanation.collectives if c.operation == "all_gather"} == {"forward", "backward"}
        assert all(rank.held_bytes < 0.6 * rank.whole_bytes for rank in explanation.ranks)
    else:  # two pairs of layers: two outputs forward, and the gradient of one input backward, of 16 rows
        within = [c for c in explanation.collectives if c.phase in ("forward", "backward")]
        assert sorted(c.nbytes for c in within) == [8 * 16 * 3, 8 * 16 * WIDTH, 8 * 16 * WIDTH]
        assert {c.operation for c in within} == {"all_reduce"}


@pytest.mark.parametrize("cluster", [4], indirect=True)
@pytest.mark.parametrize("strategy", WITH_REPLICAS, ids=str)
@pytest.mark.slow
def test_explanation_distinguishes_replicas(cluster: dtkit.Cluster, strategy: Any):
    """Batches of 17 samples, which replicas share unequally, and of one sample, which only one replica has."""
    _, explanation = explain_second_step(cluster, strategy, batch_size=17)
    check_replicas(explanation)
    assert explanation.samples == 17
    run = train(cluster, net(), rows(), steps=4, strategy=strategy, start=False, batch_size=21)
    run.step(3)
    explanation = run.explain_step()
    check_replicas(explanation)
    assert explanation.samples == 1
    assert explanation.loss == pytest.approx(float(run.history.totals()["loss"][3]))


def check_replicas(explanation: PipelineExplanation | ShardedExplanation) -> None:
    """Check the explanation, its text and its figure for each replica and between them."""
    text = " ".join(repr(explanation).split())
    if isinstance(explanation, PipelineExplanation):
        assert explanation.replicas == ((0, 1), (2, 3))
        assert {frozenset((c.sender, c.receiver)) for c in explanation.transfers} <= {
            frozenset(r) for r in explanation.replicas
        }
        assert explanation.is_intact
        assert explanation.is_sum_of_micro_batches
        assert explanation.identical
        assert "All replicas have the same stages, bit by bit." in text
        assert "replica 1 of 2" in explanation.figure().axes[0].get_title(loc="left")
    else:
        assert explanation.is_agreed
        assert {c.ranks for c in explanation.collectives} == {(0, 1), (0, 2), (0, 1, 2, 3)}
        assert "The nodes of each group made the same collectives" in text
        labels = [label.get_text() for label in explanation.figure().axes[0].get_yticklabels()]
        assert labels[0].endswith("nodes 0, 1")
        assert "nodes 0, 2" in "".join(labels)


# -- memory ---------------------------------------------------------------------------------------------------


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "part"),
    [
        (dtkit.DataParallel(), 1),
        slow(dtkit.Pipeline(2, 4, balance_by="parameters"), 1 / 2),
        slow(dtkit.TensorParallel(2), 1 / 2),
        slow(dtkit.Sharded(), 1 / 2),
    ],
    ids=str,
)
def test_memory_report_compares_each_rank_with_the_plan(cluster2: dtkit.Cluster, strategy: Any, part: float):
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    inputs = torch.randn(32, 256), torch.randint(256, (32,))
    options: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "optimizer": adam, "batch_size": 16}
    plan = cluster2.plan(model, inputs, strategies=[strategy], **options)
    run = cluster2.train(model, inputs, steps=3, strategy=strategy, **options)
    run.wait(60)
    report = run.memory(plan)
    size = 4 * sum(p.numel() for p in model.parameters())
    for row in report.rows:
        assert row.parameters == pytest.approx(part * size, rel=0.02)
        assert row.gradients == pytest.approx(part * size, rel=0.02)
        assert row.optimizer == pytest.approx(2 * part * size, rel=0.02)
        assert row.sent_model == (size if part == 1 else 0)
        assert row.peak is not None
        assert row.planned is not None
        assert row.planned.optimizer == pytest.approx(2 * part * size, rel=0.02)
    assert "planned" in repr(report)


def test_memory_has_no_peak_before_the_first_step(cluster2: dtkit.Cluster):
    run = train(cluster2, optimizer=sgd, start=False)
    memory = run.memory()
    assert memory.peak is None
    run.stop()
    run.release()
    assert run.memory().rows == memory.rows  # the last measurement


def test_memory_of_a_released_run_that_was_never_measured_raises(cluster2: dtkit.Cluster):
    run = train(cluster2, optimizer=sgd, start=False)
    run.stop()
    run.release()
    with pytest.raises(dtkit.errors.RunError, match="memory needs the job on the engines"):
        run.memory()

"""Tensor parallelism: sharded outputs, placement, random numbers, and wrong plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtkit
from dtkit.strategies.tensor.tensor_parallel import TensorParallel
from tests.support.marks import slow
from tests.support.nets import (
    GPT,
    IN_PROJECTIONS,
    Attention,
    Decoder,
    Encoder,
    accuracy,
    adamw,
    get_slice,
    get_worker,
    list_attention_rows,
    make_net,
    measure_local_bytes,
)
from tests.support.oracle import CLASSES, FEATURES, data, max_difference, train
from tests.support.small import check_usable
from tests.support.waiting import ends_soon

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster


@pytest.fixture
def strategy(cluster: dtkit.Cluster) -> TensorParallel:
    """Tensor parallelism over two ranks, with two replicas on four engines."""
    return TensorParallel(2, replicas=cluster.world_size // 2)


def test_evaluation_of_sharded_outputs_is_exact(cluster: dtkit.Cluster):
    """The metric and the loss get whole outputs. (test_oracle.py checks the training.)"""
    inputs, targets = data()
    strategy = TensorParallel(2, {"2": "loss"}, cluster.world_size // 2)
    run = train(cluster, make_net("wide"), strategy=strategy, steps=3, metrics={"accuracy": accuracy})
    with torch.no_grad():
        output = run.model.eval()(inputs)
    values = run.evaluate((inputs, targets)).values
    assert values["accuracy"] == pytest.approx(accuracy(output, targets).item(), abs=1e-12)
    assert values["loss"] == pytest.approx(F.cross_entropy(output, targets).item(), abs=1e-12)


def test_each_rank_holds_only_its_slices(cluster: dtkit.Cluster, strategy: TensorParallel):
    model = make_net("decoder")
    run = train(cluster, model, strategy=strategy, optimizer=adamw, steps=3)
    expected = 8 * sum(row.local_parameters for row in strategy.plan_for(model).rows)
    assert repr(run.placement()) == repr(strategy.plan_for(model))
    parameters, state = zip(*cluster.run(measure_local_bytes), strict=True)
    assert set(parameters) == {expected}
    assert set(state) == {2 * expected}
    assert run.history.totals()["samples"].tolist() == [24, 24, 24]  # several ranks report them; they count once


@pytest.mark.parametrize("kind", [slow("encoder"), "gpt"])
def test_each_rank_holds_the_rows_of_its_heads(cluster: dtkit.Cluster, strategy: TensorParallel, kind: str):
    """Each rank holds the queries, keys and values of half of the heads, and so computes half of them."""
    model = make_net(kind)
    plan = strategy.plan_for(model)
    run = train(cluster, model, strategy=strategy, optimizer=adamw, steps=3)
    assert len(list_attention_rows(plan)) == 2
    expected = 8 * sum(row.local_parameters for row in plan.rows)
    assert set(cluster.run(measure_local_bytes)) == {(expected, 2 * expected)}
    for parameter in ("weight", "bias"):
        name = IN_PROJECTIONS[kind].replace("weight", parameter)
        whole = run.model.state_dict()[name].chunk(3)
        for rank, local in enumerate(cluster.run(get_slice, name)):
            assert torch.equal(local, torch.cat([third.chunk(2)[rank % 2] for third in whole]))


@pytest.mark.parametrize("kind", ["encoder", slow("gpt"), slow("translator")])
def test_attention_needs_one_all_reduce_forward_and_one_backward(
    cluster: dtkit.Cluster, strategy: TensorParallel, kind: str
):
    """Attention has the same collectives as an MLP. Keys from another layer need one more for their gradient."""
    run = train(cluster, make_net(kind), strategy=strategy, start=False)
    tensor_collectives = [c for c in run.explain_step().collectives if c.ranks == (0, 1) and len(c.shape) > 1]
    kinds = [(c.operation, c.phase) for c in tensor_collectives]
    pairs, more = {"encoder": (4, 0), "gpt": (4, 0), "translator": (6, 1)}[kind]
    assert {kind for kind, _ in kinds} == {"all_reduce"}
    assert kinds.count(("all_reduce", "forward")) == pairs + (kind == "translator")  # its attention weights are used
    assert kinds.count(("all_reduce", "backward")) == pairs + more


@pytest.mark.parametrize("kind", [slow("encoder"), "gpt"])
def test_evaluation_with_sharded_attention_equals_the_whole_model(
    cluster: dtkit.Cluster, strategy: TensorParallel, kind: str
):
    """torch's fast path for encoders must not bypass the sharded layers."""
    inputs, targets = data()
    run = train(cluster, make_net(kind), strategy=strategy, steps=3)
    with torch.no_grad():
        expected = F.cross_entropy(run.model.eval()(inputs), targets).item()
    assert run.evaluate((inputs, targets)).values["loss"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["encoder", slow("gpt")])
def test_checkpoint_joins_the_heads_of_all_ranks(
    cluster: dtkit.Cluster, strategy: TensorParallel, kind: str, tmp_path: Path
):
    """The checkpoint has the whole model's tensors and optimizer state, so another layout can resume it."""
    options: dict[str, Any] = {"optimizer": adamw, "shuffle": "global"}
    undisturbed = train(cluster, make_net(kind), strategy=strategy, steps=12, **options)
    run = train(cluster, make_net(kind), strategy=strategy, steps=6, **options)
    saved = run.save(tmp_path)
    state = dtkit.Checkpoint(saved.path).state_dict()
    assert all(torch.equal(value, state[name]) for name, value in run.model.state_dict().items())
    others = (dtkit.Sharded(), TensorParallel(cluster.world_size), strategy)
    for other in others[:1] if cluster.world_size == 2 else others:
        resumed = train(cluster, make_net(kind), strategy=other, steps=9, resume_from=saved.path, **options)
        second = resumed.save(tmp_path / type(other).__name__)
        run = train(cluster, make_net(kind), strategy=strategy, steps=12, resume_from=second.path, **options)
        assert max_difference(run.model.state_dict(), undisturbed.model.state_dict()) <= 1e-10


DROPOUT_NETS = {
    "decoder": lambda: Decoder(dropout=0.3),
    "encoder": lambda: Encoder(dropout=0.3),
    "gpt": lambda: GPT(lambda: Attention(dropout=0.3), dropout=0.3),
    "gpt by hand": lambda: GPT(lambda: Attention(dropout=0.3, flash=False), dropout=0.3),
}


@pytest.mark.parametrize("kind", ["gpt", *(slow(kind) for kind in DROPOUT_NETS if kind != "gpt")])
def test_dropout_draws_the_same_on_ranks_of_one_replica(cluster: dtkit.Cluster, strategy: TensorParallel, kind: str):
    """Replicated parameters stay equal on all ranks, and slices in all replicas, attention included."""
    model = make_net(DROPOUT_NETS[kind])
    run = train(cluster, model, strategy=strategy, optimizer=adamw, steps=20)
    assert run.consistency == dtkit.types.ReplicaCheckResult(20, (), None, num_holders=strategy.replicas)
    fingerprints = cluster.run(lambda: get_worker().compute_fingerprint())
    assert [set(fingerprint) for fingerprint in fingerprints] == strategy.replicas * [{(), (0,)}, {(), (1,)}]


class LearnedActivation(nn.Module):
    """Model with a learned activation between two layers, whose gradient would be partial if divided."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(FEATURES, 8), nn.PReLU(), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(self.first(x)))


@pytest.mark.parametrize("cluster", [2], indirect=True)
@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"first": "colwise", "second": "rowwise"}, r"computes something else: the gradients of act.weight differ"),
        ({"first": "colwise"}, r"in . slices can't compute .*After a colwise layer"),
        ({"second": "rowwise"}, r"in . slices can't compute"),
        ({"first": "colwise", "thrid": "rowwise"}, r"'thrid': no such module"),
        ({"second": "colwise"}, r"3 outputs can't be cut into . equal parts"),
        (None, r"finds nothing to shard in Learned"),
    ],
)
def test_invalid_plan_is_refused_before_training(cluster: dtkit.Cluster, plan: dict[str, str] | None, message: str):
    with ends_soon(), pytest.raises((ValueError, dtkit.errors.EngineError), match=f"(?s){message}"):
        train(cluster, make_net(LearnedActivation), strategy=TensorParallel(2, plan))
    check_usable(cluster)


class ReorderedFeatures(nn.Module):
    """Model that reads features by their index in the whole layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)[:, torch.arange(7, -1, -1)])


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_plan_is_named_whatever_error_the_slices_raise(cluster: dtkit.Cluster):
    """An IndexError of torch said neither that slices were tried, nor what to do."""
    plan = {"first": "colwise", "second": "rowwise"}
    with ends_soon(), pytest.raises(dtkit.errors.EngineError, match=r"(?s)can't compute \(IndexError: .*The plan was"):
        train(cluster, make_net(ReorderedFeatures), strategy=TensorParallel(2, plan))

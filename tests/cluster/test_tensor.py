"""What is particular to tensor parallelism: cut outputs, what lies where, random numbers, and plans that are wrong."""

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
    cut_by_heads,
    held,
    net,
    slices,
    worker,
)
from tests.support.oracle import CLASSES, FEATURES, data, difference, train
from tests.support.small import check_usable
from tests.support.waiting import soon

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster


@pytest.fixture
def strategy(cluster: dtkit.Cluster) -> TensorParallel:
    """Two ways; on four engines, two replicas of that."""
    return TensorParallel(2, replicas=cluster.world_size // 2)


def test_evaluation_of_cut_outputs(cluster: dtkit.Cluster):
    """The metric and the loss get them whole; that the training is exact stands in the table of all strategies."""
    inputs, targets = data()
    strategy = TensorParallel(2, {"2": "loss"}, cluster.world_size // 2)
    run = train(cluster, net("wide"), strategy=strategy, steps=3, metrics={"accuracy": accuracy})
    with torch.no_grad():
        output = run.model.eval()(inputs)
    found = run.evaluate((inputs, targets)).values
    assert found["accuracy"] == pytest.approx(accuracy(output, targets).item(), abs=1e-12)
    assert found["loss"] == pytest.approx(F.cross_entropy(output, targets).item(), abs=1e-12)


def test_each_rank_holds_its_slices(cluster: dtkit.Cluster, strategy: TensorParallel):
    model = net("decoder")
    run = train(cluster, model, strategy=strategy, optimizer=adamw, steps=3)
    expected = 8 * sum(row.local_parameters for row in strategy.plan_for(model).rows)
    assert repr(run.placement()) == repr(strategy.plan_for(model))
    parameters, state = zip(*cluster.run(held), strict=True)
    assert set(parameters) == {expected}
    assert set(state) == {2 * expected}
    assert run.history.totals()["samples"].tolist() == [24, 24, 24]  # told by several ranks, counted once


@pytest.mark.parametrize("kind", [slow("encoder"), "gpt"])
def test_each_rank_has_the_rows_of_its_heads(cluster: dtkit.Cluster, strategy: TensorParallel, kind: str):
    """Of queries, keys and values those of half of the heads; and so half of them computes on each rank."""
    model = net(kind)
    plan = strategy.plan_for(model)
    run = train(cluster, model, strategy=strategy, optimizer=adamw, steps=3)
    assert len(cut_by_heads(plan)) == 2
    expected = 8 * sum(row.local_parameters for row in plan.rows)
    assert set(cluster.run(held)) == {(expected, 2 * expected)}
    for what in ("weight", "bias"):
        name = IN_PROJECTIONS[kind].replace("weight", what)
        whole = run.model.state_dict()[name].chunk(3)
        for rank, found in enumerate(cluster.run(slices, name)):
            assert torch.equal(found, torch.cat([third.chunk(2)[rank % 2] for third in whole]))


@pytest.mark.parametrize("kind", ["encoder", slow("gpt"), slow("translator")])
def test_attention_takes_one_sum_forward_and_one_backward(cluster: dtkit.Cluster, strategy: TensorParallel, kind: str):
    """As the MLP beside it does, and nothing is gathered. The gradient of keys that come from elsewhere is one more."""
    run = train(cluster, net(kind), strategy=strategy, start=False)
    within = [c for c in run.explain_step().collectives if c.ranks == (0, 1) and len(c.shape) > 1]
    found = [(c.what, c.phase) for c in within]
    pairs, more = {"encoder": (4, 0), "gpt": (4, 0), "translator": (6, 1)}[kind]
    assert {what for what, _ in found} == {"all_reduce"}
    assert found.count(("all_reduce", "forward")) == pairs + (kind == "translator")  # its weights are used
    assert found.count(("all_reduce", "backward")) == pairs + more


@pytest.mark.parametrize("kind", [slow("encoder"), "gpt"])
def test_evaluation_with_attention_cut_is_the_whole_model_s(
    cluster: dtkit.Cluster, strategy: TensorParallel, kind: str
):
    """The encoder would take torch's fast path here, past what was cut."""
    inputs, targets = data()
    run = train(cluster, net(kind), strategy=strategy, steps=3)
    with torch.no_grad():
        expected = F.cross_entropy(run.model.eval()(inputs), targets).item()
    assert run.evaluate((inputs, targets)).values["loss"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", ["encoder", slow("gpt")])
def test_heads_are_put_together_in_a_checkpoint(
    cluster: dtkit.Cluster, strategy: TensorParallel, kind: str, tmp_path: Path
):
    """Each tensor as the model has it, bit by bit, and the optimiser's numbers: training goes on cut otherwise."""
    how: dict[str, Any] = {"optimizer": adamw, "shuffle": "global"}
    undisturbed = train(cluster, net(kind), strategy=strategy, steps=12, **how)
    run = train(cluster, net(kind), strategy=strategy, steps=6, **how)
    saved = run.save(tmp_path)
    found = dtkit.Checkpoint(saved.path).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in run.model.state_dict().items())
    others = (dtkit.Sharded(), TensorParallel(cluster.world_size), strategy)
    for other in others[:1] if cluster.world_size == 2 else others:
        there = train(cluster, net(kind), strategy=other, steps=9, resume_from=saved.path, **how)
        back = there.save(tmp_path / type(other).__name__)
        run = train(cluster, net(kind), strategy=strategy, steps=12, resume_from=back.path, **how)
        assert difference(run.model.state_dict(), undisturbed.model.state_dict()) <= 1e-10


DROPPING = {
    "decoder": lambda: Decoder(dropout=0.3),
    "encoder": lambda: Encoder(dropout=0.3),
    "gpt": lambda: GPT(lambda: Attention(dropout=0.3), dropout=0.3),
    "gpt by hand": lambda: GPT(lambda: Attention(dropout=0.3, flash=False), dropout=0.3),
}


@pytest.mark.parametrize("kind", list(DROPPING))
def test_dropout_draws_alike_on_ranks_that_share_a_replica(cluster: dtkit.Cluster, strategy: TensorParallel, kind: str):
    """What every rank holds whole stays equal on all of them, and each slice in all replicas; in attention, too."""
    model = net(DROPPING[kind])
    run = train(cluster, model, strategy=strategy, optimizer=adamw, steps=20)
    assert run.consistency == dtkit.types.ReplicaCheckResult(20, (), None, num_holders=strategy.replicas)
    fingerprints = cluster.run(lambda: worker().compute_fingerprint())
    assert [set(found) for found in fingerprints] == strategy.replicas * [{(), (0,)}, {(), (1,)}]


class Learned(nn.Module):
    """An activation with one parameter between two layers: cut, its gradient would be a part."""

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
def test_a_plan_that_does_not_hold_is_refused_before_anything_is_trained(
    cluster: dtkit.Cluster, plan: dict[str, str] | None, message: str
):
    with soon(), pytest.raises((ValueError, dtkit.errors.EngineError), match=f"(?s){message}"):
        train(cluster, net(Learned), strategy=TensorParallel(2, plan))
    check_usable(cluster)

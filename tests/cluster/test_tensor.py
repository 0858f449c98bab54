"""What is particular to tensor parallelism: cut outputs, what lies where, random numbers, and plans that are wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtkit
from dtkit.strategies.tensor import TensorParallel
from tests.cluster.nets import Decoder, accuracy, adamw, held, net, quickly, worker
from tests.cluster.oracle import CLASSES, FEATURES, data, mlp, train
from tests.cluster.small import check_usable

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
    expected = 8 * sum(row.here for row in strategy.plan_for(model).rows)
    parameters, state = zip(*cluster.run(held), strict=True)
    assert set(parameters) == {expected}
    assert set(state) == {2 * expected}
    assert run.history.totals()["samples"].tolist() == [24, 24, 24]  # told by several ranks, counted once


def test_dropout_draws_alike_on_ranks_that_share_a_replica(cluster: dtkit.Cluster, strategy: TensorParallel):
    """What every rank holds whole stays equal on all of them, and each slice in all replicas."""
    model = net(lambda: Decoder(dropout=0.3))
    run = train(cluster, model, strategy=strategy, optimizer=adamw, steps=20)
    assert run.consistency == dtkit.Consistency(20, (), None, copies=strategy.replicas)
    fingerprints = cluster.run(lambda: worker().fingerprint())
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
        ({"first": "colwise"}, r"in . slices can't compute .*What follows a colwise layer"),
        ({"second": "rowwise"}, r"in . slices can't compute"),
        ({"first": "colwise", "thrid": "rowwise"}, r"'thrid': no such module"),
        ({"second": "colwise"}, r"3 outputs can't be cut into . equal parts"),
        (None, r"finds nothing in Learned"),
    ],
)
def test_a_plan_that_does_not_hold_is_refused_before_anything_is_trained(
    cluster: dtkit.Cluster, plan: dict[str, str] | None, message: str
):
    with quickly(5), pytest.raises((ValueError, dtkit.EngineError), match=f"(?s){message}"):
        train(cluster, net(Learned), strategy=TensorParallel(2, plan))
    check_usable(cluster)


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_degrees_that_do_not_multiply(cluster: dtkit.Cluster):
    with pytest.raises(ValueError, match=r"replicas 1 x ways 3 = 3, but there are . ranks"):
        train(cluster, mlp(), strategy=TensorParallel(3))

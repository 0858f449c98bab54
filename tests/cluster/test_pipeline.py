"""What is particular to pipelines: two traces, what lies where, what can't be cut, errors in a stage, counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtkit
from tests.support.cuts import best
from tests.support.marks import slow
from tests.support.nets import WIDTH, Decoder, deep, net, worker
from tests.support.oracle import BOUND, CLASSES, FEATURES, data, difference, global_rows, one_process, train
from tests.support.small import check_usable
from tests.support.waiting import soon

pytestmark = pytest.mark.cluster

on_two = pytest.mark.parametrize("cluster", [2], indirect=True)


@pytest.fixture
def strategy(cluster: dtkit.Cluster) -> dtkit.Pipeline:
    """Two stages; on four engines, two replicas of that."""
    return dtkit.Pipeline(2, 4, replicas=cluster.world_size // 2, balance_by="parameters")


def test_dropout_is_off_in_evaluation(cluster: dtkit.Cluster, strategy: dtkit.Pipeline):
    """The model is traced twice: in training its blocks drop, in evaluation they don't."""
    model = net(lambda: Decoder(dropout=0.5))
    run = train(cluster, model, strategy=strategy, steps=3)
    values = [run.evaluate(data()).values["loss"] for _ in range(2)]
    assert values[0] == values[1]
    inputs, targets = data()
    with torch.no_grad():
        expected = F.cross_entropy(run.model.eval()(inputs), targets).item()
    assert values[0] == pytest.approx(expected, abs=1e-12)


def test_each_rank_holds_its_part_of_the_model(cluster: dtkit.Cluster):
    def numbers() -> int:
        return sum(p.numel() for p in worker().model.parameters())

    model = net("deep")
    run = train(cluster, model, strategy=dtkit.Pipeline(cluster.world_size, 4, balance_by="parameters"), steps=2)
    held = cluster.run(numbers)
    assert sum(held) == sum(p.numel() for p in model.parameters())
    assert max(held) < sum(held)
    assert run.model.state_dict().keys() == model.state_dict().keys()


def test_a_large_head_is_in_the_balance(cluster: dtkit.Cluster):
    """Blocks alone would be cut in equal parts, and the last rank hold the head besides."""

    def numbers() -> int:
        return sum(p.numel() for p in worker().model.parameters())

    size = cluster.world_size
    model = net(lambda: Decoder(blocks=8))
    block = sum(p.numel() for p in model.h[0].parameters())
    torch.manual_seed(0)
    model.head = nn.Sequential(nn.Linear(WIDTH, 3 * block // WIDTH), nn.Linear(3 * block // WIDTH, CLASSES)).double()
    stem, head = 18 * WIDTH, sum(p.numel() for part in (model.norm, model.head) for p in part.parameters())
    assert head > 3 * block
    train(cluster, model, strategy=dtkit.Pipeline(size, 4, balance_by="parameters"), steps=2)
    costs = [stem + block, *[block] * 6, block + head]
    assert max(cluster.run(numbers)) == best(costs, size)


@on_two
def test_a_stage_may_have_no_parameters(cluster: dtkit.Cluster):
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 12), nn.Linear(12, CLASSES), nn.Tanh()).double()

    run = train(cluster, model(), strategy=dtkit.Pipeline(2, 4, split=["2"]), shuffle="global", steps=8)
    assert difference(run.model.state_dict(), one_process(model(), global_rows, steps=8)) <= BOUND


class Constant(Decoder):
    """Has tensors that are no part of its state dict: torch's exporter makes buffers of them."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = torch.full((WIDTH,), 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.factors[0]) * torch.tensor([1.0, 2.0, 3.0])


@on_two
def test_constants_in_a_model_s_code_are_no_part_of_its_state(cluster: dtkit.Cluster):
    model = net(Constant)
    run = train(cluster, model, strategy=dtkit.Pipeline(2, 4), shuffle="global", steps=3)
    assert run.model.state_dict().keys() == model.state_dict().keys()
    expected = one_process(net(Constant), global_rows, steps=3)
    assert difference(run.model.state_dict(), expected) <= BOUND


class Raises(nn.Module):
    """Fails at the third micro-batch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(12, 12), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += self.training
        if self.seen > 3:
            raise ValueError("this layer has had enough")
        return self.layer(x)


@pytest.mark.parametrize("where", [1, 14])
def test_an_error_in_a_stage_is_told_as_it_was(cluster: dtkit.Cluster, strategy: dtkit.Pipeline, where: int):
    layers = list(deep().children())
    layers.insert(where, Raises())
    if where == 1:
        layers[0], layers[1] = nn.Linear(FEATURES, 12), layers[1]
    with soon(), pytest.raises(dtkit.errors.EngineError, match="this layer has had enough") as error:
        train(cluster, nn.Sequential(*layers).double(), strategy=strategy, steps=20)
    assert "ValueError" in str(error.value)
    check_usable(cluster)


class Grows(nn.Module):
    """Makes twice as many rows of the fourth micro-batch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += self.training
        return torch.cat([x, x]) if self.seen > 3 else x


def test_a_tensor_that_does_not_fit_at_a_border_is_refused_before_it_is_sent(
    cluster: dtkit.Cluster, strategy: dtkit.Pipeline
):
    """gloo would end the process that receives it."""
    layers = list(deep().children())
    model = nn.Sequential(layers[0], Grows(), *layers[1:]).double()
    with (
        soon(),
        pytest.raises(dtkit.errors.EngineError, match=r"stage 0 returned float64 of shape .* pad the samples") as error,
    ):
        train(cluster, model, strategy=strategy, steps=20)
    assert error.value.cause.rank == 0
    check_usable(cluster)


class Spoils(nn.Module):
    """Makes its output, or the gradient that goes through it, not a number."""

    def __init__(self, *, backward: bool) -> None:
        super().__init__()
        self.backward = backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.backward:
            return x * torch.nan
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * torch.nan)
        return x * 1.0


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("schedule", [slow("1F1B"), "Interleaved1F1B"])
def test_what_is_not_finite_is_put_down_to_the_stage_that_made_it(
    cluster: dtkit.Cluster, schedule: str, direction: str
):
    """Though the last stage alone knows a loss, and the gradients of all stages are not finite in the end."""
    size = cluster.world_size
    stages = size * (2 if schedule != "1F1B" else 1)
    where = stages - 2  # of the stages, the one that spoils
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(FEATURES if k == 0 else 8, 8), nn.Tanh()) for k in range(stages)]
    layers[where].append(Spoils(backward=direction == "backward"))
    model = nn.Sequential(*layers, nn.Linear(8, CLASSES)).double()
    split = [str(k) for k in range(1, stages)]
    run = train(cluster, model, strategy=dtkit.Pipeline(size, size, schedule, split=split), start=False)
    run.resume()
    with pytest.raises(dtkit.errors.NonFiniteError, match=rf"this rank's stage {where}\b") as caught:
        run.wait(60)
    assert [failure.rank for failure in caught.value.failures] == [where % size]
    run.stop()


@on_two
def test_what_can_t_be_cut(cluster: dtkit.Cluster):
    strategy = dtkit.Pipeline(2, 4)
    line = nn.Linear(FEATURES, CLASSES).double()
    with pytest.raises(ValueError, match=r"has 0 layers in a chain \(none\), too few for 2 stages"):
        train(cluster, line, strategy=strategy)
    with pytest.raises(dtkit.errors.EngineError, match=r"has 0 layers in a chain \(none\), too few for 2 stages"):
        train(cluster, cluster.broadcast(line), strategy=strategy)
    with pytest.raises(dtkit.errors.EngineError, match=r"are one parameter \(tied weights\)"):
        train(cluster, net(lambda: Decoder(tied=True)), strategy=strategy)
    twice = nn.Linear(FEATURES, FEATURES)
    twin = nn.Sequential(twice, nn.Tanh(), twice, nn.Linear(FEATURES, CLASSES)).double()
    split = dtkit.Pipeline(2, 4, split=["2"])
    with pytest.raises(
        dtkit.errors.EngineError, match=r"0\.weight \(stage 0\), 2\.weight \(stage 1\) are one parameter"
    ):
        train(cluster, twin, strategy=split)
    with pytest.raises(ValueError, match=r"split names 'h\.7', but this model has no such layer"):
        train(cluster, net("decoder"), strategy=dtkit.Pipeline(2, 4, split=["h.7"]))

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(dtkit.errors.EngineError, match="a pipeline needs loss="):
        train(cluster, net("deep"), loss=None, training_step=step, strategy=strategy)
    check_usable(cluster)


@on_two
@pytest.mark.parametrize("split", [None, ["h.1"]])
def test_a_run_tells_which_layers_lie_where(cluster: dtkit.Cluster, split: list[str] | None):
    model = net("decoder")
    run = train(cluster, model, strategy=dtkit.Pipeline(2, 4, split=split), start=False)
    cut = run.placement()
    by = "parameters" if split else "time"
    assert repr(cut).splitlines()[0] == f"{len(cut.layers)} layers in 2 stages, by {by}"
    assert cut.layers[cut.stage_starts[1]] == (split or [cut.layers[cut.stage_starts[1]]])[0]
    numbers = [sum(p.numel() for name, p in model.named_parameters() if name.startswith(cut.layers[k])) for k in (0, 1)]
    held = [memory.parameters for memory in run.memory().rows]
    assert sum(held) == 8 * sum(p.numel() for p in model.parameters())
    assert all(taken > 8 * count for taken, count in zip(held, numbers, strict=True))
    assert train(cluster, model, start=False).placement() is None


def test_what_tracing_loads_is_not_counted_as_a_model_s_memory():
    """Of a cluster's first pipeline, that is."""
    with dtkit.Cluster(2, threads=1) as fresh:
        run = train(fresh, net("decoder"), strategy=dtkit.Pipeline(2, 4), steps=3)
        assert max(row.activations for row in run.memory().rows) < 30e6  # it was 45 MB, for 20 kB of parameters


def test_the_timeline_counts_what_each_schedule_holds(cluster: dtkit.Cluster):
    """GPipe holds all micro-batches, 1F1B at most as many as there are stages: counted."""
    stages = cluster.world_size
    for schedule, expected in (("GPipe", [6] * stages), ("1F1B", list(range(stages, 0, -1)))):
        strategy = dtkit.Pipeline(stages, 6, schedule=schedule, balance_by="parameters")
        timeline = train(cluster, net("deep"), strategy=strategy, steps=2).timeline
        assert timeline.num_micro_batches == 6
        assert [timeline.measure_peak_micro_batches(rank) for rank in timeline.ranks] == expected
        assert 0 < timeline.measure_bubble() < 1
        assert timeline.get_ideal_bubble() == pytest.approx((stages - 1) / (6 + stages - 1))

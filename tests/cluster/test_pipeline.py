"""Pipelines: evaluation, placement, models that can't be split, errors in a stage, counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtkit
from tests.support.best_cut import find_smallest_maximum
from tests.support.marks import slow
from tests.support.nets import WIDTH, Decoder, deep, get_worker, make_net
from tests.support.oracle import (
    BOUND,
    CLASSES,
    FEATURES,
    data,
    get_global_rows,
    max_difference,
    train,
    train_in_one_process,
)
from tests.support.small import check_usable
from tests.support.waiting import ends_soon

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.cluster

on_two = pytest.mark.parametrize("cluster", [2], indirect=True)


@pytest.fixture
def strategy(cluster: dtkit.Cluster) -> dtkit.Pipeline:
    """Pipeline of two stages, with two replicas on four engines."""
    return dtkit.Pipeline(2, 4, replicas=cluster.world_size // 2, balance_by="parameters")


def test_dropout_is_off_in_evaluation(cluster: dtkit.Cluster, strategy: dtkit.Pipeline):
    """The model is traced twice, with dropout for training and without it for evaluation."""
    model = make_net(lambda: Decoder(dropout=0.5))
    run = train(cluster, model, strategy=strategy, steps=3)
    values = [run.evaluate(data()).values["loss"] for _ in range(2)]
    assert values[0] == values[1]
    inputs, targets = data()
    with torch.no_grad():
        expected = F.cross_entropy(run.model.eval()(inputs), targets).item()
    assert values[0] == pytest.approx(expected, abs=1e-12)


def test_each_rank_holds_its_part_of_the_model(cluster: dtkit.Cluster):
    def count_parameters() -> int:
        return sum(p.numel() for p in get_worker().model.parameters())

    model = make_net("deep")
    run = train(cluster, model, strategy=dtkit.Pipeline(cluster.world_size, 4, balance_by="parameters"), steps=2)
    counts = cluster.run(count_parameters)
    assert sum(counts) == sum(p.numel() for p in model.parameters())
    assert max(counts) < sum(counts)
    assert run.model.state_dict().keys() == model.state_dict().keys()


def test_large_head_counts_when_stages_are_balanced(cluster: dtkit.Cluster):
    """Balancing the blocks alone would give the last rank its share of blocks and the head."""

    def count_parameters() -> int:
        return sum(p.numel() for p in get_worker().model.parameters())

    size = cluster.world_size
    model = make_net(lambda: Decoder(blocks=8))
    block = sum(p.numel() for p in model.h[0].parameters())
    torch.manual_seed(0)
    model.head = nn.Sequential(nn.Linear(WIDTH, 3 * block // WIDTH), nn.Linear(3 * block // WIDTH, CLASSES)).double()
    stem, head = 18 * WIDTH, sum(p.numel() for part in (model.norm, model.head) for p in part.parameters())
    assert head > 3 * block
    train(cluster, model, strategy=dtkit.Pipeline(size, 4, balance_by="parameters"), steps=2)
    costs = [stem + block, *[block] * 6, block + head]
    assert max(cluster.run(count_parameters)) == find_smallest_maximum(costs, size)


@on_two
def test_stage_without_parameters_trains(cluster: dtkit.Cluster):
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 12), nn.Linear(12, CLASSES), nn.Tanh()).double()

    run = train(cluster, model(), strategy=dtkit.Pipeline(2, 4, split=["2"]), shuffle="global", steps=8)
    assert max_difference(run.model.state_dict(), train_in_one_process(model(), get_global_rows, steps=8)) <= BOUND


class Constant(Decoder):
    """Model with tensors outside its state dict, which torch's exporter turns into buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = torch.full((WIDTH,), 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.factors[0]) * torch.tensor([1.0, 2.0, 3.0])


@on_two
def test_constants_in_model_code_are_not_in_the_state_dict(cluster: dtkit.Cluster):
    model = make_net(Constant)
    run = train(cluster, model, strategy=dtkit.Pipeline(2, 4), shuffle="global", steps=3)
    assert run.model.state_dict().keys() == model.state_dict().keys()
    expected = train_in_one_process(make_net(Constant), get_global_rows, steps=3)
    assert max_difference(run.model.state_dict(), expected) <= BOUND


class Failing(nn.Module):
    """Layer that raises after its third micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(12, 12), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls > 3:
            raise ValueError("too many micro-batches")
        return self.layer(x)


@pytest.mark.parametrize("position", [1, 14])
def test_error_in_a_stage_is_raised_unchanged(cluster: dtkit.Cluster, strategy: dtkit.Pipeline, position: int):
    layers = list(deep().children())
    layers.insert(position, Failing())
    if position == 1:
        layers[0], layers[1] = nn.Linear(FEATURES, 12), layers[1]
    with ends_soon(), pytest.raises(dtkit.errors.EngineError, match="too many micro-batches") as error:
        train(cluster, nn.Sequential(*layers).double(), strategy=strategy, steps=20)
    assert "ValueError" in str(error.value)
    check_usable(cluster)


class Grows(nn.Module):
    """Layer that doubles the rows from the fourth micro-batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return torch.cat([x, x]) if self.calls > 3 else x


def test_stage_output_of_another_shape_is_refused_before_it_is_sent(cluster: dtkit.Cluster, strategy: dtkit.Pipeline):
    """gloo would end the receiving process."""
    layers = list(deep().children())
    model = nn.Sequential(layers[0], Grows(), *layers[1:]).double()
    with (
        ends_soon(),
        pytest.raises(dtkit.errors.EngineError, match=r"stage 0 returned float64 of shape .* pad the samples") as error,
    ):
        train(cluster, model, strategy=strategy, steps=20)
    assert error.value.cause.rank == 0
    check_usable(cluster)


class NanLayer(nn.Module):
    """Layer that turns its output, or the gradient through it, into NaN."""

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
def test_nonfinite_values_are_attributed_to_the_stage_that_made_them(
    cluster: dtkit.Cluster, schedule: str, direction: str
):
    """Only the last stage has a loss, and in the end the gradients of all stages are not finite."""
    size = cluster.world_size
    stages = size * (2 if schedule != "1F1B" else 1)
    nan_stage = stages - 2
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(FEATURES if k == 0 else 8, 8), nn.Tanh()) for k in range(stages)]
    layers[nan_stage].append(NanLayer(backward=direction == "backward"))
    model = nn.Sequential(*layers, nn.Linear(8, CLASSES)).double()
    split = [str(k) for k in range(1, stages)]
    run = train(cluster, model, strategy=dtkit.Pipeline(size, size, schedule, split=split), start=False)
    run.resume()
    with pytest.raises(dtkit.errors.NonFiniteError, match=rf"this rank's stage {nan_stage}\b") as caught:
        run.wait(60)
    assert [failure.rank for failure in caught.value.failures] == [nan_stage % size]
    run.stop()


@on_two
def test_model_that_cannot_be_split_is_refused(cluster: dtkit.Cluster):
    strategy = dtkit.Pipeline(2, 4)
    line = nn.Linear(FEATURES, CLASSES).double()
    with pytest.raises(ValueError, match=r"has no layers in a chain, too few for 2 stages"):
        train(cluster, line, strategy=strategy)
    with pytest.raises(dtkit.errors.EngineError, match=r"has no layers in a chain, too few for 2 stages"):
        train(cluster, cluster.broadcast(line), strategy=strategy)
    with pytest.raises(ValueError, match=r"split names 'h\.7', but this model has no such layer"):
        train(cluster, make_net("decoder"), strategy=dtkit.Pipeline(2, 4, split=["h.7"]))

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(dtkit.errors.EngineError, match="a pipeline needs loss="):
        train(cluster, make_net("deep"), loss=None, training_step=step, strategy=strategy)
    check_usable(cluster)


def make_tied_layers() -> nn.Module:
    torch.manual_seed(0)
    shared = nn.Linear(FEATURES, FEATURES)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(FEATURES, CLASSES)).double()


class Autoencoder(nn.Module):
    """Blocks between an embedding and its transpose, in the manner of a language model without a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(FEATURES, CLASSES)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(F.linear(x, self.embed.weight.t()))
        return result


@on_two
def test_parameter_in_the_code_of_several_stages_trains_as_in_one_process(cluster: dtkit.Cluster):
    run = train(cluster, Autoencoder().double(), strategy=dtkit.Pipeline(2, 4, clip_grad_norm=0.1))
    run.wait(60)
    verification = run.verify(4)
    assert verification.verdict == "PASS", verification.text()
    message = "embed.weight is a parameter of several stages: the gradients of stages on ranks 0 and 1 are summed"
    assert any(message in event.text for event in run.history.events)


@on_two
@pytest.mark.parametrize(
    ("make", "split"), [(make_tied_layers, ["2"]), (lambda: make_net(lambda: Decoder(tied=True)), None)]
)
def test_tied_weights_train_as_in_one_process(
    cluster: dtkit.Cluster, make: Callable[[], nn.Module], split: list[str] | None
):
    run = train(cluster, make(), strategy=dtkit.Pipeline(2, 4, split=split))
    run.wait(60)
    verification = run.verify(4)
    assert verification.verdict == "PASS", verification.text()
    message = "are one parameter: the gradients of stages on ranks 0 and 1 are summed"
    assert any(message in event.text for event in run.history.events)


@on_two
@pytest.mark.parametrize("split", [None, ["h.1"]])
def test_placement_lists_the_layers_of_each_stage(cluster: dtkit.Cluster, split: list[str] | None):
    model = make_net("decoder")
    run = train(cluster, model, strategy=dtkit.Pipeline(2, 4, split=split), start=False)
    placement = run.placement()
    by = "parameters" if split else "time"
    assert repr(placement).splitlines()[0] == f"{len(placement.layers)} layers in 2 stages, by {by}"
    assert placement.layers[placement.stage_starts[1]] == (split or [placement.layers[placement.stage_starts[1]]])[0]
    numbers = [
        sum(p.numel() for name, p in model.named_parameters() if name.startswith(placement.layers[k])) for k in (0, 1)
    ]
    measured = [row.parameters for row in run.memory().rows]
    assert sum(measured) == 8 * sum(p.numel() for p in model.parameters())
    assert all(taken > 8 * count for taken, count in zip(measured, numbers, strict=True))
    assert train(cluster, model, start=False).placement() is None


@pytest.mark.slow
def test_memory_report_excludes_what_tracing_loads():
    """The first pipeline of a cluster loads torch's tracing modules."""
    with dtkit.Cluster(2, threads=1) as cluster:
        run = train(cluster, make_net("decoder"), strategy=dtkit.Pipeline(2, 4), steps=3)
        assert max(row.activations for row in run.memory().rows) < 30e6  # tracing loads 45 MB


def test_timeline_counts_the_micro_batches_that_each_schedule_holds(cluster: dtkit.Cluster):
    """GPipe holds all micro-batches, 1F1B at most one per stage."""
    stages = cluster.world_size
    for schedule, expected in (("GPipe", [6] * stages), ("1F1B", list(range(stages, 0, -1)))):
        strategy = dtkit.Pipeline(stages, 6, schedule=schedule, balance_by="parameters")
        timeline = train(cluster, make_net("deep"), strategy=strategy, steps=2).timeline
        assert timeline.num_micro_batches == 6
        assert [timeline.measure_peak_micro_batches(rank) for rank in timeline.ranks] == expected
        assert 0 < timeline.measure_bubble() < 1
        assert timeline.get_ideal_bubble() == pytest.approx((stages - 1) / (6 + stages - 1))

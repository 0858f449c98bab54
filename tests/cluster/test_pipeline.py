"""Pipelines on 2 and 4 engines train as one process does, hold a part of the model each, and fail with a word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtkit
from tests.cluster.nets import NETS, OPTIMIZERS, Clipped, Decoder, accuracy, bound, go, net, quickly, worker
from tests.cluster.oracle import (
    BOUND,
    CLASSES,
    FEATURES,
    data,
    difference,
    global_rows,
    momentum,
    one_process,
    train,
)
from tests.cluster.small import check_usable

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cluster

TWENTY = 20
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble")


@pytest.fixture(scope="module", params=[2, 4])
def cluster(request: pytest.FixtureRequest) -> Iterator[dtkit.Cluster]:
    with dtkit.Cluster(request.param, threads=1) as started:
        yield started


def deep() -> nn.Module:
    """Eight layers in a chain."""
    width = 12
    layers = [nn.Linear(FEATURES, width), *(nn.Linear(width, width) for _ in range(2)), nn.Linear(width, CLASSES)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def pipeline(cluster: dtkit.Cluster, micro_batches: int = 4, **options: Any) -> dtkit.Pipeline:
    """Two stages; on four engines, two replicas of that."""
    return dtkit.Pipeline(2, micro_batches, replicas=cluster.world_size // 2, **options)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NETS)
def test_twenty_steps_equal_one_process(cluster: dtkit.Cluster, name: str, optimizer: str):
    """Batches of 24 leave a last one of a single sample: fewer than micro-batches, and none for a second replica."""
    make = OPTIMIZERS[optimizer]
    run = train(cluster, net(name), strategy=pipeline(cluster), optimizer=make, shuffle="global", steps=TWENTY)
    expected = one_process(net(name), global_rows, optimizer=make, steps=TWENTY)
    assert difference(run.model.state_dict(), expected) <= bound(name, optimizer)
    totals = run.history.totals()
    assert totals["samples"].tolist()[:5] == [24, 24, 24, 24, 24]
    assert totals["samples"].min() == 1


@pytest.mark.parametrize("micro_batches", [3, 5])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_equals_one_process(cluster: dtkit.Cluster, schedule: str, micro_batches: int):
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS"):
        micro_batches += 1  # these want rounds of as many micro-batches as ranks
    strategy = pipeline(cluster, micro_batches, schedule=schedule)
    run = train(cluster, net(deep), strategy=strategy, shuffle="global", steps=TWENTY)
    assert difference(run.model.state_dict(), one_process(net(deep), global_rows, steps=TWENTY)) <= BOUND


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_as_many_stages_as_engines(cluster: dtkit.Cluster, schedule: str):
    strategy = dtkit.Pipeline(cluster.world_size, 6, schedule=schedule, by="parameters")
    run = train(cluster, net(deep), strategy=strategy, shuffle="global", steps=TWENTY)
    assert difference(run.model.state_dict(), one_process(net(deep), global_rows, steps=TWENTY)) <= BOUND


def test_clipping_is_of_the_whole_gradient(cluster: dtkit.Cluster):
    run = train(cluster, net(deep), strategy=pipeline(cluster, clip_norm=0.1), shuffle="global", steps=TWENTY)
    expected = one_process(net(deep), global_rows, optimizer=Clipped(momentum, 0.1), steps=TWENTY)
    assert difference(run.model.state_dict(), expected) <= BOUND
    norms = run.history.column("grad_norm").reshape(-1, cluster.world_size)
    assert (norms > 0.1).any()
    assert (norms == norms[:, :1]).all()  # every stage knows the norm of the whole


def test_a_loss_as_a_pair(cluster: dtkit.Cluster):
    weights = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)

    def pair(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.cross_entropy(output, target, weight=weights, reduction="sum"), weights[target].sum()

    def whole(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, weight=weights)

    run = train(cluster, net(deep), strategy=pipeline(cluster), loss=pair, shuffle="global", steps=TWENTY)
    assert difference(run.model.state_dict(), one_process(net(deep), global_rows, whole, steps=TWENTY)) <= BOUND


def test_the_same_run(cluster: dtkit.Cluster):
    """Pause, step, learning rate, metrics, evaluation, verification, the model: as with any strategy."""
    run = cluster.train(
        net("decoder"),
        data(),
        loss=F.cross_entropy,
        optimizer=momentum,
        batch_size=24,
        epochs=3,
        valid=data(),
        metrics={"accuracy": accuracy},
        strategy=pipeline(cluster),
        start=False,
    )
    assert run.step() == 1
    run.set(lr=0.05)
    go(run)
    assert run.history.column("lr")[-1] == 0.05
    assert [e.samples for e in run.history.evaluations] == [121, 121, 121]
    model, found = run.model, run.evaluate(data())
    inputs, targets = data()
    with torch.no_grad():
        output = model.eval()(inputs)
    assert found.values["loss"] == pytest.approx(F.cross_entropy(output, targets).item(), abs=1e-12)
    assert found.values["accuracy"] == pytest.approx(accuracy(output, targets).item(), abs=1e-12)
    losses = run.history.loss()[1]
    assert len(losses) == 18
    assert not torch.tensor(losses).isnan().any()
    assert run.verify(steps=10).verdict == "PASS"


def test_dropout_is_off_in_evaluation(cluster: dtkit.Cluster):
    """The model is traced twice: in training its blocks drop, in evaluation they don't."""
    model = net(lambda: Decoder(dropout=0.5))
    run = train(cluster, model, strategy=pipeline(cluster), steps=3)
    values = [run.evaluate(data()).values["loss"] for _ in range(2)]
    assert values[0] == values[1]
    inputs, targets = data()
    with torch.no_grad():
        expected = F.cross_entropy(run.model.eval()(inputs), targets).item()
    assert values[0] == pytest.approx(expected, abs=1e-12)


def test_each_rank_holds_its_part_of_the_model(cluster: dtkit.Cluster):
    def numbers() -> int:
        return sum(p.numel() for p in worker().model.parameters())

    model = net(deep)
    run = train(cluster, model, strategy=dtkit.Pipeline(cluster.world_size, 4), steps=2)
    held = cluster.run(numbers)
    assert sum(held) == sum(p.numel() for p in model.parameters())
    assert max(held) < sum(held)
    assert run.model.state_dict().keys() == model.state_dict().keys()


def test_a_paused_run_goes_on_after_somebody_else_broke_the_group(cluster: dtkit.Cluster):
    def fail() -> None:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            raise RuntimeError("not here")
        dist.barrier()

    undisturbed = train(cluster, net(deep), strategy=pipeline(cluster), shuffle="global", steps=TWENTY)
    expected = undisturbed.model.state_dict()
    run = cluster.train(
        net(deep),
        cluster.partition(data()),
        loss=F.cross_entropy,
        optimizer=momentum,
        batch_size=24,
        steps=TWENTY,
        seed=5,
        shuffle="global",
        strategy=pipeline(cluster),
        start=False,
    )
    run.step(7)
    with pytest.raises(dtkit.EngineError, match="not here"):
        cluster.run(fail)
    go(run)
    assert difference(run.model.state_dict(), expected) == 0


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


@pytest.mark.parametrize("where", [1, 6])
def test_an_error_in_a_stage_is_told_as_it_was(cluster: dtkit.Cluster, where: int):
    layers = list(deep().children())
    layers.insert(where, Raises())
    strategy = dtkit.Pipeline(2, 4, replicas=cluster.world_size // 2, by="parameters")
    if where == 1:
        layers[0], layers[1] = nn.Linear(FEATURES, 12), layers[1]
    with quickly(20), pytest.raises(dtkit.EngineError, match="this layer has had enough") as error:
        train(cluster, nn.Sequential(*layers).double(), strategy=strategy, steps=TWENTY)
    assert "ValueError" in str(error.value)
    check_usable(cluster)


class Shapes(nn.Module):
    """What comes out depends on what goes in: no fixed shape at the border."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[: 1 + int(x[0, 0] > 0) + len(x) // 2]


def test_what_can_t_be_cut(cluster: dtkit.Cluster):
    strategy = pipeline(cluster)
    with pytest.raises(dtkit.EngineError, match=r"has 0 layers in a chain \(none\), too few for 2 stages"):
        train(cluster, nn.Linear(FEATURES, CLASSES).double(), strategy=strategy)
    with pytest.raises(dtkit.EngineError, match=r"are one parameter \(tied weights\)"):
        train(cluster, net(lambda: Decoder(tied=True)), strategy=strategy)
    twice = nn.Linear(FEATURES, FEATURES)
    twin = nn.Sequential(twice, nn.Tanh(), twice, nn.Linear(FEATURES, CLASSES)).double()
    split = dtkit.Pipeline(2, 4, replicas=cluster.world_size // 2, split=["2"])
    with pytest.raises(dtkit.EngineError, match=r"0\.weight \(stage 0\), 2\.weight \(stage 1\) are one parameter"):
        train(cluster, twin, strategy=split)
    with pytest.raises(dtkit.EngineError, match=r"split has 'h\.7', which begins no layer of this model"):
        train(cluster, net("decoder"), strategy=dtkit.Pipeline(2, 4, replicas=cluster.world_size // 2, split=["h.7"]))

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(dtkit.EngineError, match="a pipeline needs loss="):
        train(cluster, net(deep), loss=None, step=step, strategy=strategy)
    check_usable(cluster)


def test_degrees_that_don_t_multiply_to_the_ranks(cluster: dtkit.Cluster):
    with pytest.raises(ValueError, match=r"dp 1 x pp 3 = 3, but there are \d ranks"):
        train(cluster, net(deep), strategy=dtkit.Pipeline(3, 4))
    with pytest.raises(ValueError, match="needs at least as many micro-batches as stages"):
        dtkit.Pipeline(4, 2)
    with pytest.raises(ValueError, match="schedule='2F2B'; it must be one of 'GPipe', '1F1B'"):
        dtkit.Pipeline(2, 4, schedule="2F2B")
    with pytest.raises(ValueError, match="stages=0; it must be at least 1"):
        dtkit.Pipeline(0, 4)


def test_the_timeline_counts_what_each_schedule_holds(cluster: dtkit.Cluster):
    """GPipe holds all micro-batches, 1F1B at most as many as there are stages: counted."""
    stages = cluster.world_size
    for schedule, expected in (("GPipe", [6] * stages), ("1F1B", list(range(stages, 0, -1)))):
        strategy = dtkit.Pipeline(stages, 6, schedule=schedule, by="parameters")
        timeline = train(cluster, net(deep), strategy=strategy, steps=2).timeline
        assert timeline.micro_batches == 6
        assert [timeline.held(rank) for rank in timeline.ranks] == expected
        assert 0 < timeline.bubble() < 1
        assert timeline.ideal_bubble() == pytest.approx((stages - 1) / (6 + stages - 1))


def test_data_parallel_runs_have_a_timeline_too(cluster: dtkit.Cluster, tmp_path: Any):
    run = train(cluster, net(deep), steps=3)
    timeline = run.timeline
    assert timeline.ranks == list(range(cluster.world_size))
    assert not timeline.piped
    assert {"data", "forward", "backward", "sync", "update"} <= set(timeline.spans["phase"].tolist())
    assert (timeline.spans["end"] >= timeline.spans["begin"]).all()
    run.trace(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_size > 100


@pytest.mark.parametrize(
    ("engines", "strategy"),
    [(2, dtkit.Pipeline(2, 4, by="parameters")), (4, dtkit.Pipeline(4, 8)), (2, dtkit.Sharded()), (4, dtkit.Sharded())],
)
def test_a_model_that_no_engine_can_hold_is_refused_and_then_trained_in_parts(engines: int, strategy: Any):
    """27 million parameters: 432 MB with gradients and AdamW's state, on engines of 420 MB."""

    def left() -> int:
        from dtkit.engine.limits import data_left

        found = data_left()
        assert found is not None
        return found

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(12)), nn.Linear(1500, 3))
    rows = torch.randn(64, 1500), torch.randint(3, (64,))
    how: dict[str, Any] = {
        "loss": F.cross_entropy,
        "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-4),
        "batch_size": 32,
        "steps": 3,
    }
    with dtkit.Cluster(engines, memory_limit="420MB") as cluster:
        refused = r"does not fit rank \d with DataParallel.*These would fit: Sharded.*Pipeline"
        with pytest.raises(ValueError, match=refused):
            cluster.train(model, rows, **how)
        run = cluster.train(model, rows, strategy=strategy, **how)
        run.wait(60)
        assert min(cluster.run(left)) > 0
        found = run.model.state_dict()
        assert found.keys() == model.state_dict().keys()
        assert any(not torch.equal(found[name], value) for name, value in model.state_dict().items())

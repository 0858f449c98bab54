"""What each strategy and option trains, against a plain loop in one process: see :mod:`tests.cluster.oracle`."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import dtkit
from dtkit.engine.data import Shards, Stream
from dtkit.engine.sources import as_source
from dtkit.records import JobPlan
from tests.cluster.nets import Clipped, adamw, forwards
from tests.cluster.oracle import (
    BATCH,
    BOUND,
    CLASSES,
    FEATURES,
    SAMPLES,
    SEED,
    STEPS,
    data,
    difference,
    global_rows,
    mean_loss,
    mlp,
    momentum,
    one_process,
    train,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.cluster

Optimizer = torch.optim.Optimizer


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def cluster(request: pytest.FixtureRequest) -> Iterator[dtkit.Cluster]:
    with dtkit.Cluster(request.param, threads=1) as started:
        yield started


# -- gradients every step ------------------------------------------------------------------------------------

OPTIONS = {
    "plain": dtkit.DataParallel(),
    "accumulate": dtkit.DataParallel(accumulate=3),
    "clip": dtkit.DataParallel(clip_norm=0.2),
    "accumulate and clip": dtkit.DataParallel(accumulate=3, clip_norm=0.2),
    "small buckets": dtkit.DataParallel(bucket_mb=0.0005),
    "balance": dtkit.DataParallel(balance="auto"),
    "naive": dtkit.NaiveDataParallel(),
}


@pytest.mark.parametrize("optimizer", [momentum, adamw])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_equals_one_process(cluster: dtkit.Cluster, name: str, optimizer: Callable[..., Optimizer]):
    limit = getattr(OPTIONS[name], "clip_norm", None)
    run = train(cluster, mlp(), strategy=OPTIONS[name], optimizer=optimizer, shuffle="global")
    reference = optimizer if limit is None else Clipped(optimizer, limit)
    assert difference(run.model.state_dict(), one_process(mlp(), global_rows, optimizer=reference)) <= BOUND
    assert forwards(run) == [getattr(OPTIONS[name], "accumulate", 1)] * cluster.world_size
    if limit is not None:
        assert (run.history.column("grad_norm") > limit).any()  # clipping took place


def test_loss_curves_are_the_same_for_any_number_of_engines(cluster: dtkit.Cluster):
    run = train(cluster, mlp(), shuffle="global", strategy=dtkit.DataParallel(accumulate=2))
    inputs, targets = data()
    model, expected = mlp(), []
    update = momentum(model.parameters())
    for step in range(STEPS):
        rows = torch.from_numpy(global_rows(step))
        update.zero_grad()
        value = mean_loss(model(inputs[rows]), targets[rows])
        value.backward()
        update.step()
        expected.append(value.item())
    assert np.abs(run.history.loss()[1] - expected).max() <= BOUND


def test_pairs_come_in_micro_batches_too(cluster: dtkit.Cluster):
    weights = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)

    def pair(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.cross_entropy(output, target, weight=weights, reduction="sum"), weights[target].sum()

    def whole(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, weight=weights)

    strategy = dtkit.DataParallel(accumulate=3, clip_norm=0.2)
    run = train(cluster, mlp(), shuffle="global", loss=pair, strategy=strategy)
    expected = one_process(mlp(), global_rows, whole, Clipped(momentum, 0.2))
    assert difference(run.model.state_dict(), expected) <= BOUND


def test_a_schedule_is_the_one_of_one_process(cluster: dtkit.Cluster):
    def schedule(optimizer: Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS)

    def scheduled(parameters: Any) -> Optimizer:
        made = momentum(parameters)
        following = schedule(made)
        made.register_step_post_hook(lambda *_: following.step())
        return made

    run = train(cluster, mlp(), shuffle="global", steps=40, scheduler=schedule)
    assert difference(run.model.state_dict(), one_process(mlp(), global_rows, optimizer=scheduled, steps=40)) <= BOUND
    rates = run.history.column("lr")
    assert rates.max() == pytest.approx(0.2, rel=0.02)
    assert rates[-1] < rates.max() / 2


# -- parameters now and then ---------------------------------------------------------------------------------


def averaged(ranks: int, every: int, outer: dtkit.OuterSGD | None, make: Callable[..., Optimizer]) -> dict[str, Any]:
    """The reference: all ranks in one process, a model each, a loop that anybody can read."""
    inputs, targets = data()
    part = dtkit.Partition(SAMPLES, ranks)
    plan = JobPlan(BATCH, STEPS, "shard", SEED)
    shards = Shards(part.flat(), part.sizes)
    streams = [Stream(as_source(data()), shards, plan, [rank]) for rank in range(ranks)]
    start = mlp()
    models = [copy.deepcopy(start) for _ in range(ranks)]
    updates = [make(model.parameters()) for model in models]
    weights = [0] * ranks
    momenta = [torch.zeros_like(p) for p in start.parameters()]
    for step in range(STEPS):
        for rank, (model, update) in enumerate(zip(models, updates, strict=True)):
            rows = torch.from_numpy(streams[rank].rows(step))
            weights[rank] += len(rows)
            if len(rows):
                update.zero_grad()
                mean_loss(model(inputs[rows]), targets[rows]).backward()
                update.step()
        if (step + 1) % every and step + 1 < STEPS:
            continue
        with torch.no_grad():
            for k, old in enumerate(start.parameters()):
                own = [list(model.parameters())[k] for model in models]
                mean = sum(w * p for w, p in zip(weights, own, strict=True)) / max(1, sum(weights))
                if outer is not None and (step + 1) % every == 0:
                    gradient = old - mean
                    momenta[k] = outer.momentum * momenta[k] + gradient
                    direction = gradient + outer.momentum * momenta[k] if outer.nesterov else momenta[k]
                    mean = old - outer.lr * direction
                for p in (old, *own):
                    p.copy_(mean)
        weights = [0] * ranks
    return start.state_dict()


@pytest.mark.parametrize("optimizer", [momentum, adamw])
@pytest.mark.parametrize(
    ("every", "outer"),
    [(1, None), (5, None), (8, None), (5, dtkit.OuterSGD()), (5, dtkit.OuterSGD(1.0, 0.5, nesterov=False))],
)
def test_averaging_equals_its_reference(
    cluster: dtkit.Cluster, every: int, outer: dtkit.OuterSGD | None, optimizer: Callable[..., Optimizer]
):
    """Every 8: the run ends between two averagings, and its model is the mean all the same."""
    strategy = dtkit.ParameterAveraging(every=every, outer=outer)
    run = train(cluster, mlp(), strategy=strategy, optimizer=optimizer)
    expected = averaged(cluster.world_size, every, outer, optimizer)
    assert difference(run.model.state_dict(), expected) <= BOUND
    assert run.verify(steps=STEPS).difference <= BOUND


def test_averaging_every_step_with_plain_sgd_is_data_parallelism(cluster: dtkit.Cluster):
    def plain(parameters: Any) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    gradients = train(cluster, mlp(), optimizer=plain).model.state_dict()
    parameters = train(cluster, mlp(), optimizer=plain, strategy=dtkit.ParameterAveraging(every=1)).model.state_dict()
    assert difference(gradients, parameters) <= BOUND


def test_averaging_every_eight_steps_sends_an_eighth(cluster: dtkit.Cluster):
    """Counted on the connections: what goes beyond the parameters are headers, and a word on whether all is well."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 2000), nn.Tanh(), nn.Linear(2000, CLASSES)).double()
    sent = []
    for strategy in (dtkit.DataParallel(), dtkit.ParameterAveraging(every=8)):
        run = train(cluster, model, strategy=strategy, steps=40, batch_size=40)
        sent.append(int(run.history.totals()["sent_bytes"].sum()))
    if cluster.world_size == 1:
        assert sent == [0, 0]
        return
    size = sum(p.nbytes for p in model.parameters())
    assert sent[0] == pytest.approx(40 * 2 * (cluster.world_size - 1) * size, rel=0.02)
    assert sent[1] == pytest.approx(sent[0] / 8, rel=0.02)


# -- what is no longer exact ----------------------------------------------------------------------------------

ROUNDED = {  # seen after 20 steps at 4 engines: 6e-5, 7e-4, 2e-3 and 2e-4
    "fp16 on the wire": (dtkit.DataParallel(compress="fp16"), 1e-3),
    "bf16 on the wire": (dtkit.DataParallel(compress="bf16"), 1e-2),
    "bf16": (dtkit.DataParallel(precision="bf16"), 2e-2),
    "fp16": (dtkit.DataParallel(precision="fp16"), 2e-3),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_stays_within_its_bound(cluster: dtkit.Cluster, name: str):
    strategy, bound = ROUNDED[name]
    inputs, targets = data()
    part = cluster.partition((inputs.float(), targets))
    exact = train(cluster, mlp().float(), part, steps=20).model.state_dict()
    run = train(cluster, mlp().float(), part, steps=20, strategy=strategy)
    found = difference(run.model.state_dict(), exact)
    assert found <= bound
    assert found > 0 or cluster.world_size == 1
    verified = run.verify(steps=4)
    assert verified.verdict == "NOT COMPARABLE"
    assert name.partition(" ")[0] in verified.text()


def test_powersgd_trains_with_a_fraction_of_the_bytes(cluster: dtkit.Cluster):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    inputs, targets = data()
    part = cluster.partition((inputs.float(), targets))
    how: dict[str, Any] = {"steps": 100, "optimizer": lambda p: torch.optim.SGD(p, lr=0.05)}
    plain = train(cluster, model, part, **how)
    small = train(cluster, model, part, strategy=dtkit.DataParallel(compress="powersgd", bucket_mb=0.005), **how)
    losses = [float(run.history.loss()[1][-10:].mean()) for run in (plain, small)]
    assert losses[1] == pytest.approx(losses[0], abs=0.15)
    if cluster.world_size > 1:
        sent = [int(run.history.totals()["sent_bytes"][10:].sum()) for run in (plain, small)]
        assert sent[1] < 0.45 * sent[0]

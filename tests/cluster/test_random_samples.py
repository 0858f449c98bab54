"""Samples that user code draws at random: ranks of a replica see one draw, and a seed repeats all draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import dtkit
from tests.support import small
from tests.support.marks import slow
from tests.support.random_samples import FEATURES, SOLUTION, RandomSamples, draw_from_global_generators

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster


class RandomStream(IterableDataset[Any]):
    """The same samples without length."""

    def __iter__(self) -> Iterator[Any]:
        samples = RandomSamples(None)
        return (samples[k] for k in range(small.ROWS))


def make_one_half() -> Any:
    """Return the rows of the rank that asks."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return [(x, SOLUTION @ x) for x in torch.eye(FEATURES).repeat(small.ROWS // FEATURES, 1)[rank::world_size]]


class Half(IterableDataset[Any]):
    """The same rows as a stream."""

    def __iter__(self) -> Iterator[Any]:
        return iter(make_one_half())


class RandomHalf(Half):
    """The same rows in an order that no seed covers."""

    def __iter__(self) -> Iterator[Any]:
        rows = make_one_half()
        return iter([rows[k] for k in np.random.default_rng().permutation(len(rows))])


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(3)), nn.Linear(FEATURES, 1))


def make_solved_model() -> nn.Module:
    """Return a model with zero loss for every sample, as long as input and target are of one sample."""
    *layers, head = model = make_model()
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.eye(FEATURES))
        head.weight.copy_(SOLUTION)
        head.bias.zero_()
    return model


def train(cluster: dtkit.Cluster, data: Any, strategy: Any = None, **options: Any) -> dtkit.Run:
    return small.train(cluster, make_solved_model(), data, loss=nn.MSELoss(), strategy=strategy, **options)


SHARING_STRATEGIES = {
    "pipeline": dtkit.Pipeline(2, 2),
    "one rank with the first and the last stage": dtkit.Pipeline(2, 4, schedule="ZBVZeroBubble"),
    "tensor parallel": dtkit.TensorParallel(2, plan={"0": "colwise", "1": "rowwise"}),
}
REPEATED = (
    ("pipeline", "Dataset"),
    ("tensor parallel", "stream"),
    ("one rank with the first and the last stage", "stream"),
)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        pytest.param(name, data, id=f"{name}, {kind}", marks=[pytest.mark.slow] if (name, kind) in REPEATED else [])
        for name in SHARING_STRATEGIES
        for kind, data in {"Dataset": RandomSamples(None), "stream": RandomStream()}.items()
    ],
)
def test_ranks_of_a_replica_train_on_one_draw(cluster2: dtkit.Cluster, name: str, data: Any):
    run = train(cluster2, data, SHARING_STRATEGIES[name], steps=4)
    run.wait(60)
    assert max(run.history.loss()[1]) < 1e-9
    if isinstance(data, RandomSamples):
        assert run.evaluate(data).values["loss"] < 1e-9


def test_seed_repeats_the_draws_of_a_dataset(cluster2: dtkit.Cluster):
    data = RandomSamples(draw_from_global_generators)
    losses = fit(cluster2, data, seed=0)
    assert fit(cluster2, data, seed=0) == losses
    assert fit(cluster2, data, seed=0, num_workers=2) == losses
    assert fit(cluster2, data, seed=0, prefetch=True) == losses
    assert fit(cluster2, data, seed=1) != losses


def fit(cluster: dtkit.Cluster, data: Any, **options: Any) -> list[float]:
    """Return the losses of a model that has something to learn."""
    run = small.train(
        cluster, make_model(), data, **{"loss": nn.MSELoss(), "optimizer": make_sgd, "steps": 6, **options}
    )
    run.wait(60)
    return [float(loss) for loss in run.history.loss()[1]]


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


@pytest.mark.parametrize("strategy", [slow(None), dtkit.Pipeline(2, 2)], ids=str)
def test_resumed_run_repeats_the_draws_of_a_dataset(cluster2: dtkit.Cluster, tmp_path: Path, strategy: Any):
    data = RandomSamples(draw_from_global_generators)
    whole = fit(cluster2, data, strategy=strategy)
    half = fit(cluster2, data, strategy=strategy, steps=3, checkpoint_dir=tmp_path, checkpoint_every=3)
    rest = fit(cluster2, data, strategy=strategy, steps=6, resume_from=tmp_path)
    assert whole[: len(half)] == half
    assert rest[-len(whole) + len(half) :] == whole[len(half) :]


class NoisyLayer(nn.Module):
    """Layer that draws random numbers in evaluation, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape[-1])


def test_check_of_a_tensor_plan_runs_on_one_draw(cluster2: dtkit.Cluster):
    model = nn.Sequential(NoisyLayer(), nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 1))
    strategy = dtkit.TensorParallel(2, plan={"1": "colwise", "3": "rowwise"})
    run = small.train(cluster2, model, RandomSamples(None), loss=nn.MSELoss(), strategy=strategy, steps=2)
    run.wait(60)
    assert run.status.step == 2


class BrokenSamples(RandomSamples):
    """Samples of which the last rows can't be made."""

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        if row >= small.ROWS - 8:
            raise KeyError("broken row")
        return super().__getitem__(row)


@pytest.mark.parametrize("name", [name if name == "pipeline" else slow(name) for name in SHARING_STRATEGIES])
def test_error_of_a_dataset_is_raised_with_the_rank_that_loads(cluster2: dtkit.Cluster, name: str):
    run = train(cluster2, BrokenSamples(None), SHARING_STRATEGIES[name], steps=4, shuffle=None)
    with pytest.raises(dtkit.errors.EngineError, match="broken row") as caught:
        run.wait(60)
    causes = [failure.rank for failure in caught.value.failures if not failure.victim]
    assert causes == [0]
    small.check_usable(cluster2)


@pytest.mark.parametrize(
    "data", [Half(), RandomHalf(), slow(make_one_half)], ids=["stream", "random stream", "function"]
)
def test_data_that_divide_themselves_are_refused(cluster2: dtkit.Cluster, data: Any):
    """Divided once more, most samples would be left out."""
    with pytest.raises(dtkit.errors.EngineError, match=r"most (samples|rows) would be left out"):
        train(cluster2, data, steps=2)
    small.check_usable(cluster2)


def test_stream_that_divides_itself_trains_as_a_function_of_rank_and_world_size(cluster2: dtkit.Cluster):
    run = train(cluster2, lambda rank, world_size: Half(), steps=20, batch_size=8)
    run.wait(60)
    assert int(run.history.to_pandas()["samples"].sum()) == small.ROWS

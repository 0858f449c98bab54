"""Mixtures of experts of transformers, whose routers' loss is a product of means over the tokens of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import default_collate

import dtkit
from tests.support.marks import slow

pytest.importorskip("transformers")

from tests.support.hugging_face import MIXTURES, make_mixtral, make_samples

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.cluster

BOUND = 5e-7  # transformers computes losses in float32
BATCH, STEPS = 7, 6
NUM_SAMPLES = 15
"""One step of each epoch has a single sample, and so a rank without one."""


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train_alone(model: torch.nn.Module, samples: list[Any]) -> dict[str, torch.Tensor]:
    """Return the parameters after the same batches in a plain loop."""
    optimizer = make_sgd(model.parameters())
    batches = [default_collate(samples[k : k + BATCH]) for k in range(0, len(samples), BATCH)]
    for step in range(STEPS):
        optimizer.zero_grad()
        model(**batches[step % len(batches)]).loss.backward()
        optimizer.step()
    return model.state_dict()


def train(cluster: dtkit.Cluster, model: Any, samples: list[Any], strategy: dtkit.Strategy) -> dtkit.Run:
    run = cluster.train(
        model, samples, optimizer=make_sgd, batch_size=BATCH, steps=STEPS, shuffle=None, strategy=strategy
    )
    run.wait(120)
    return run


STRATEGIES = [dtkit.DataParallel(), dtkit.Sharded(), slow(dtkit.NaiveDataParallel()), slow(dtkit.TensorParallel(2))]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("name", [name if name == "mixtral" else slow(name) for name in MIXTURES])
def test_routers_count_the_tokens_of_all_ranks(cluster2: dtkit.Cluster, name: str, strategy: dtkit.Strategy):
    make: Callable[[], Any] = MIXTURES[name]
    samples = make_samples(NUM_SAMPLES, name)
    expected = train_alone(make(), samples)
    run = train(cluster2, make(), samples, strategy)
    found = run.model.state_dict()
    assert max(float((found[k] - v).abs().max()) for k, v in expected.items()) <= BOUND
    verification = run.verify(3)
    assert verification.verdict == "PASS", verification.text()


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [4], indirect=True)
def test_routers_count_the_tokens_of_all_replicas_of_slices(cluster: dtkit.Cluster):
    samples = make_samples(NUM_SAMPLES, "mixtral")
    expected = train_alone(make_mixtral(), samples)
    run = train(cluster, make_mixtral(), samples, dtkit.TensorParallel(2, replicas=2))
    found = run.model.state_dict()
    assert max(float((found[k] - v).abs().max()) for k, v in expected.items()) <= BOUND


def test_micro_batches_with_routers_are_told_and_not_comparable(cluster2: dtkit.Cluster):
    samples = make_samples(NUM_SAMPLES, "mixtral")
    with pytest.warns(UserWarning, match=r"The routers' loss of a mixture of experts .* without accumulate"):
        run = train(cluster2, make_mixtral(), samples, dtkit.DataParallel(accumulate=2))
    assert any("the routers' loss" in event.text for event in run.history.events)  # also of models without a trial
    verification = run.verify(2)
    assert verification.verdict == "NOT COMPARABLE"
    assert "routers' loss" in verification.text()


def test_explained_step_has_the_loss_of_all_tokens(cluster2: dtkit.Cluster):
    samples = make_samples(NUM_SAMPLES, "mixtral")
    run = cluster2.train(
        make_mixtral(), samples, optimizer=make_sgd, batch_size=BATCH, steps=STEPS, shuffle=None, start=False
    )
    run.explain_step()
    run.resume()
    run.wait(120)
    expected = train_alone(make_mixtral(), samples)
    found = run.model.state_dict()
    assert max(float((found[k] - v).abs().max()) for k, v in expected.items()) <= BOUND

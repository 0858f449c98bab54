"""Verification of trainings that one process can't repeat: the verdict names the cause, and never says FAIL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import dtkit
from dtkit.training.verify_reasons import NOT_A_MEAN, OWN_GENERATOR_IN_DATA, OWN_GENERATOR_IN_STEP, RANDOM_STEP
from tests.support import small
from tests.support.language_model import LENGTH, VOCABULARY, LanguageModel, compute_own_loss
from tests.support.marks import slow
from tests.support.random_samples import RandomSamples, draw_from_global_generators

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.rpc.verification import Verification

pytestmark = pytest.mark.cluster


def verify(cluster: dtkit.Cluster, model: nn.Module, data: Any, **options: Any) -> Verification:
    run = small.train(cluster, model, data, steps=4, **options)
    run.wait(60)
    verification = run.verify(4)
    run.release()
    return verification


def compute_step_loss(model: nn.Module, batch: Any, noise: torch.Tensor) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x + noise), y)


def add_global_noise(model: nn.Module, batch: Any) -> torch.Tensor:
    return compute_step_loss(model, batch, torch.randn_like(batch[0]))


def add_noise_of_its_own(model: nn.Module, batch: Any) -> torch.Tensor:
    generator = torch.Generator()
    generator.seed()
    return compute_step_loss(model, batch, torch.randn(batch[0].shape, generator=generator))


def compute_contrastive_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    features = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(features @ features.T, torch.arange(len(features)))


def compute_hidden_token_mean(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y.masked_fill(x[:, 0] < 0, -100))


def average_by_collective(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = compute_step_loss(model, batch, torch.zeros(()))
    dist.all_reduce(loss.detach().clone())
    return loss


@pytest.mark.filterwarnings("ignore:the loss of . rows .* is not the mean")
@pytest.mark.parametrize(
    ("training_step", "reason"),
    [
        (add_global_noise, RANDOM_STEP),
        slow(add_noise_of_its_own, OWN_GENERATOR_IN_STEP),
        (compute_contrastive_loss, NOT_A_MEAN),
        slow(compute_hidden_token_mean, NOT_A_MEAN),
    ],
)
def test_training_that_one_process_cannot_repeat_is_not_comparable(
    cluster2: dtkit.Cluster, training_step: Callable[..., Any], reason: str
):
    verification = verify(cluster2, small.net(), small.data(), loss=None, training_step=training_step)
    assert verification.verdict == "NOT COMPARABLE"
    assert verification.incomparable_reasons == (reason,)
    assert (verification.part_difference is not None) == (training_step is not add_noise_of_its_own)


def test_rounding_that_grew_is_told_apart_from_another_loss(cluster2: dtkit.Cluster):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(256, 16, generator=generator), torch.randint(4, (256,), generator=generator)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    run = cluster2.train(
        model,
        data,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        batch_size=64,
        steps=200,
    )
    run.wait(60)
    verification = run.verify(steps=200)
    assert verification.verdict == "NOT COMPARABLE"
    assert "Rounding in float32 does that" in verification.text()
    assert run.verify(steps=20).verdict == "PASS"


def test_lower_precision_is_compared_with_one_process_that_takes_each_part(cluster2: dtkit.Cluster):
    strategy = dtkit.DataParallel(precision="bf16")
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.5)  # noqa: E731 - so that rounding shows
    verification = verify(cluster2, small.net(), small.data(), strategy=strategy, optimizer=optimizer)
    assert verification.verdict == "PASS"
    assert verification.max_difference < verification.tolerance == 1e-5
    assert verification.whole_difference > 1e-5
    assert "takes each rank's part of a batch by itself; on whole batches it differs by" in verification.text()


def test_compressed_gradients_are_not_comparable(cluster2: dtkit.Cluster):
    strategy = dtkit.DataParallel(precision="bf16", compress="bf16")
    verification = verify(cluster2, small.net(), small.data(), strategy=strategy)
    assert verification.verdict == "NOT COMPARABLE"
    assert verification.whole_difference is None


def test_lower_precision_of_shards_is_compared_with_no_process(cluster2: dtkit.Cluster):
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.5)  # noqa: E731 - so that rounding shows
    strategy = dtkit.Sharded(precision="bf16")
    verification = verify(cluster2, small.net(), small.data(), strategy=strategy, optimizer=optimizer)
    assert verification.verdict == "NOT COMPARABLE"
    assert "which one process does in float32" in verification.text()


def test_step_with_a_collective_is_not_comparable(cluster2: dtkit.Cluster):
    verification = verify(cluster2, small.net(), small.data(), loss=None, training_step=average_by_collective)
    assert verification.verdict == "NOT COMPARABLE"
    assert "the step calls a collective (allreduce)" in verification.text()
    small.check_usable(cluster2)


@pytest.mark.parametrize("strategy", [None, dtkit.Pipeline(2, 2), slow(dtkit.Sharded())], ids=str)
def test_random_augmentation_passes(cluster2: dtkit.Cluster, strategy: Any):
    samples = RandomSamples(draw_from_global_generators)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    verification = verify(cluster2, model, samples, loss=nn.MSELoss(), strategy=strategy)
    assert verification.verdict == "PASS", verification.text()


@pytest.mark.slow
def test_data_with_a_generator_of_its_own_is_not_comparable(cluster2: dtkit.Cluster):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    verification = verify(cluster2, model, RandomSamples(None), loss=nn.MSELoss())
    assert verification.verdict == "NOT COMPARABLE"
    assert verification.incomparable_reasons == (OWN_GENERATOR_IN_DATA,)


@pytest.mark.filterwarnings("ignore:.*normalizes with the statistics of a batch")
@pytest.mark.parametrize("layer", [nn.BatchNorm1d(8), slow(nn.Dropout(0.5))], ids=lambda layer: type(layer).__name__)
def test_training_by_parts_is_compared_where_whole_batches_differ(cluster2: dtkit.Cluster, layer: nn.Module):
    model = nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 3))
    verification = verify(cluster2, model, small.data())
    assert verification.verdict == "NOT COMPARABLE"
    assert verification.part_difference is not None
    assert verification.part_difference < verification.tolerance
    assert len(verification.incomparable_reasons) == 1


@pytest.mark.filterwarnings("ignore:.*normalizes with the statistics of a batch")
@pytest.mark.parametrize(("batch_size", "verdict"), [(16, "PASS"), slow(15, "NOT COMPARABLE")])
def test_a_pipeline_normalizes_as_one_process_with_its_micro_batches(
    cluster2: dtkit.Cluster, batch_size: int, verdict: str
):
    """Copies fill up the smaller of two micro-batches of 15 samples, and count in its statistics."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    verification = verify(cluster2, model, small.data(), strategy=dtkit.Pipeline(2, 2), batch_size=batch_size)
    assert verification.verdict == verdict, verification.text()
    assert "BatchNorm normalizes each of 2 micro-batches by itself" in verification.text()
    assert "its own part" not in verification.text()


class MaskedTokens(Dataset[Any]):
    """Token rows, of which each has another number of labels that count."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(row, row + LENGTH) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(LENGTH) < row % LENGTH, -100)}


@pytest.mark.parametrize("shift", [slow(False), True])
def test_mean_over_labels_is_that_of_one_process(
    cluster2: dtkit.Cluster,
    shift: bool,  # noqa: FBT001 - a parameter of the test
    capsys: pytest.CaptureFixture[str],
):
    model = LanguageModel(shift=shift)
    verification = verify(cluster2, model, MaskedTokens(), loss=None, training_step=compute_own_loss)
    assert verification.verdict == "PASS", verification.text()
    assert "the loss is a mean over all labels" in capsys.readouterr().out


def test_sparse_gradients_are_verified(cluster2: dtkit.Cluster):
    model = nn.Sequential(nn.Embedding(16, 4, sparse=True), nn.Flatten(), nn.Linear(4, 3))
    rows = torch.arange(64).reshape(-1, 1) % 16, small.data()[1]
    verification = verify(cluster2, model, rows, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert verification.verdict == "PASS", verification.text()

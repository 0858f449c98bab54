"""DataLoaders: their Dataset, order, collation, workers and batch size are taken over, and said in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, WeightedRandomSampler

import dtkit
from dtkit.data.torch_loader import is_data_loader, read_data_loader
from dtkit.testing.fake_transport import FakeTransport

ROWS = TensorDataset(torch.arange(8.0))
SAMPLES = [{"x": torch.tensor(float(k))} for k in range(8)]


def collate(samples: list[Any]) -> Any:
    return torch.stack([sample["x"] for sample in samples])


def test_settings_are_those_of_the_loader():
    settings = read_data_loader(DataLoader(SAMPLES, batch_size=4, shuffle=True, collate_fn=collate, num_workers=2))
    assert settings.dataset is SAMPLES
    assert (settings.batch_size, settings.collate_fn, settings.num_workers) == (4, collate, 2)
    assert (settings.shuffle, settings.sampler) == ("shard", None)
    assert str(settings) == "list, batch_size=4 over all ranks, shuffled, its collate_fn, num_workers=2 on each rank"


def test_plain_rows_need_no_workers():
    settings = read_data_loader(DataLoader(ROWS, batch_size=4, num_workers=2))
    assert settings.num_workers == 0
    assert str(settings) == "TensorDataset, batch_size=4 over all ranks, rows in order"
    assert read_data_loader(DataLoader(ROWS, num_workers=2, collate_fn=collate)).num_workers == 2


def test_dropped_last_batch_is_taken_over():
    settings = read_data_loader(DataLoader(ROWS, batch_size=3, drop_last=True))
    assert settings.drop_last
    assert str(settings).endswith("rows in order, without an incomplete last batch")
    assert not read_data_loader(DataLoader(ROWS, batch_size=3)).drop_last
    assert read_data_loader(DataLoader(Endless(), batch_size=3, drop_last=True)).drop_last


WEIGHTED = WeightedRandomSampler([1.0] * 8, 8)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (None, None)),
        ({"shuffle": True}, ("shard", None)),
        ({"sampler": DistributedSampler(ROWS, 2, 0)}, ("shard", None)),
        ({"sampler": DistributedSampler(ROWS, 2, 0, shuffle=False)}, (None, None)),
        ({"sampler": WEIGHTED}, ("shard", WEIGHTED)),
    ],
    ids=["in order", "shuffled", "distributed", "distributed in order", "weighted"],
)
def test_order_is_that_of_the_loader(options: dict[str, Any], expected: tuple[Any, Any]):
    settings = read_data_loader(DataLoader(ROWS, **options))
    assert (settings.shuffle, settings.sampler) == expected
    is_distributed = isinstance(options.get("sampler"), DistributedSampler)
    assert str(settings).endswith("dtkit divides all rows over the ranks itself, without the DistributedSampler") == (
        is_distributed
    )


class Endless(IterableDataset[Any]):
    """Samples without length."""

    def __iter__(self) -> Any:
        return iter(SAMPLES)


class Pairs(torch.utils.data.Sampler[Any]):
    """Batches of a user's own making."""

    def __iter__(self) -> Any:
        return iter([[0, 1]])


class Chosen(DistributedSampler[Any]):
    """Sampler with an order of its own."""


def test_sampler_of_an_own_kind_is_kept():
    sampler = Chosen(ROWS, 2, 0)
    assert read_data_loader(DataLoader(ROWS, sampler=sampler)).sampler is sampler


def test_loader_of_a_stream_is_recognized():
    settings = read_data_loader(DataLoader(Endless(), batch_size=4, num_workers=2))
    assert isinstance(settings.dataset, Endless)
    assert settings.num_workers == 0


@pytest.mark.parametrize("options", [{"batch_size": None}, {"batch_sampler": Pairs()}], ids=["samples", "own batches"])
def test_batches_that_cannot_be_divided_are_refused(options: dict[str, Any]):
    with pytest.raises(ValueError, match="so dtkit can't split its batches over ranks"):
        read_data_loader(DataLoader(ROWS, **options))


def test_other_data_are_no_loaders():
    assert is_data_loader(DataLoader(ROWS))
    assert not any(map(is_data_loader, (ROWS, DataLoader, [1], None)))


def test_the_line_has_the_batch_size_that_counts(capsys: pytest.CaptureFixture[str]):
    """It had that of the DataLoader, and the run took the other one."""
    loader = DataLoader(TensorDataset(torch.randn(8, 2), torch.arange(8) % 2), batch_size=4)
    options: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD, "steps": 1, "start": False}
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster:
        cluster.train(nn.Linear(2, 2), loader, **options, batch_size=8)
    line = "batch_size=8 over all ranks, rows in order; batch_size= of the call replaces its 4\n"
    assert line in capsys.readouterr().out

"""Batches as a pure function of the step: the rows that each rank takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from dtkit.data.partition import Partition
from dtkit.engine.data.batches import ShardedBatches, Shards
from dtkit.engine.data.sources import ArraySource, DatasetSource, as_source, to_device
from dtkit.rpc.job_plan import IN_ORDER, JobPlan

SAMPLES = 121  # divides by none of 2, 3, 4


def shards(world: int, samples: int = SAMPLES, **cut: Any) -> Shards:
    part = Partition(samples, world, **cut)
    return Shards(part.flatten_indices(), part.sizes)


def source(samples: int = SAMPLES) -> ArraySource:
    return ArraySource([torch.arange(samples), -torch.arange(samples)])


def stream(
    world: int, mine: list[int], shuffle: str | None = "shard", batch: int = 24, seed: int = 5, **cut: Any
) -> ShardedBatches:
    plan = JobPlan(batch_size=batch, steps=100, shuffle=shuffle, seed=seed)
    return ShardedBatches(source(cut.get("samples", SAMPLES)), shards(world, **cut), plan, mine)


def rows(streams: list[ShardedBatches], step: int) -> list[int]:
    """Rows that all ranks take together, sorted."""
    return sorted(np.concatenate([s.get_rows(step) for s in streams]).tolist())


WAYS = [IN_ORDER, "shard", "global", None]


@pytest.mark.parametrize("shuffle", WAYS)
def test_a_batch_depends_only_on_its_step(shuffle):
    steps = [0, 17, 3, 5, 16, 4, 40, 0]
    asked = stream(3, [1], shuffle)
    for step in steps:
        fresh = stream(3, [1], shuffle)
        assert np.array_equal(asked.get_rows(step), fresh.get_rows(step))
        if len(fresh.get_rows(step)):
            [(count, batch)] = asked.load_batches(step)
            assert count == len(batch[0])
            assert torch.equal(batch[0], torch.from_numpy(fresh.get_rows(step)))


@pytest.mark.parametrize("shuffle", WAYS)
@pytest.mark.parametrize("weights", [None, [1, 3, 9]])
def test_an_epoch_takes_every_row_once(shuffle, weights):
    streams = [stream(3, [rank], shuffle, weights=weights) for rank in range(3)]
    per_epoch = streams[0].steps_per_epoch
    assert per_epoch == 6
    for epoch in range(3):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        assert {streams[0].get_epoch(step) for step in steps} == {epoch}
        taken = [row for step in steps for row in rows(streams, step)]
        assert sorted(taken) == list(range(SAMPLES))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("seed_of_cut", [None, 7])
def test_global_shuffle_gives_the_same_rows_on_any_number_of_ranks(world, seed_of_cut):
    alone = stream(1, [0], "global")
    ranks = [stream(world, [r], "global", by="strided") for r in range(world)]
    cut = [
        ShardedBatches(source(), shards(world, seed=seed_of_cut), JobPlan(24, 100, "global", 5), [r])
        for r in range(world)
    ]
    for step in range(20):
        expected = alone.get_rows(step).tolist()
        # In order too: the ranks' parts, one after the other, are the batch of one process.
        for streams in (ranks, cut):
            assert np.concatenate([s.get_rows(step) for s in streams]).tolist() == expected


@pytest.mark.parametrize("shuffle", WAYS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_one_process_with_all_shards_gets_the_same_rows_as_the_ranks(shuffle, world):
    ranks = [stream(world, [rank], shuffle) for rank in range(world)]
    alone = stream(world, list(range(world)), shuffle)
    for step in range(14):
        assert sorted(alone.get_rows(step).tolist()) == rows(ranks, step)
        assert alone.count_samples(step) == ranks[0].count_samples(step)


def test_shards_take_only_their_own_rows():
    part = Partition(SAMPLES, 3, seed=1)
    for rank in range(3):
        own = ShardedBatches(source(), Shards(part.flatten_indices(), part.sizes), JobPlan(24, 9, "shard", 0), [rank])
        taken = np.concatenate([own.get_rows(step) for step in range(6)])
        assert sorted(taken.tolist()) == sorted(part.indices(rank).tolist())


@pytest.mark.parametrize("shuffle", ["shard", "global"])
def test_shuffles_differ_by_epoch_and_seed_and_no_shuffle_keeps_the_order(shuffle):
    one = stream(2, [0], shuffle)
    first, second = one.get_rows(0), one.get_rows(one.steps_per_epoch)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, stream(2, [0], shuffle, seed=6).get_rows(0))
    plain = stream(2, [0], None)
    assert np.concatenate([plain.get_rows(step) for step in range(6)]).tolist() == list(range(61))
    assert np.array_equal(plain.get_rows(0), plain.get_rows(6))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_of_data_that_is_not_partitioned_keep_their_order(world):
    ranks = [stream(world, [rank], IN_ORDER, seed=1) for rank in range(world)]
    for step in range(2 * ranks[0].steps_per_epoch):
        rows = np.concatenate([rank.get_rows(step) for rank in ranks])
        first = step % ranks[0].steps_per_epoch * 24
        assert rows.tolist() == list(range(first, first + len(rows)))


def test_two_shards_of_equal_size_are_shuffled_differently():
    even = {"samples": 120}
    one, other = (stream(2, [rank], "shard", **even) for rank in (0, 1))
    places = [one.get_rows(step) for step in range(5)], [other.get_rows(step) - 60 for step in range(5)]
    assert not np.array_equal(np.concatenate(places[0]), np.concatenate(places[1]))


@pytest.mark.parametrize("weights", [[1, 3], [1, 1], [1, 100]])
def test_unequal_shards_give_rows_in_proportion_and_end_together(weights):
    one = stream(2, [0], weights=weights)
    sizes = Partition(SAMPLES, 2, weights=weights).sizes
    counts = np.array([one.count_samples(step) for step in range(one.steps_per_epoch)])
    assert counts.sum(axis=1).tolist() == [24, 24, 24, 24, 24, 1]
    assert tuple(counts.sum(axis=0)) == sizes
    # At no time is a shard ahead of, or behind, its share by a whole sample.
    done = counts.cumsum(axis=0)
    share = np.outer(done.sum(axis=1), sizes) / SAMPLES
    assert np.abs(done - share).max() < 1


def test_counts_depend_only_on_the_step_in_every_epoch_and_block():
    many = stream(3, [0], batch=3, samples=10_000)  # 3334 steps: more than are computed at once
    per_epoch = many.steps_per_epoch
    counts = np.array([many.count_samples(step) for step in range(per_epoch)])
    assert counts.sum() == 10_000
    assert (counts.sum(axis=1)[:-1] == 3).all()
    for step in (0, 1023, 1024, 2047, 2048, per_epoch - 1):
        assert many.count_samples(step + per_epoch) == tuple(counts[step])
        assert len(many.get_rows(step)) == counts[step][0]


def test_a_step_without_a_sample_has_no_batch():
    ranks = [stream(4, [rank]) for rank in range(4)]
    last = ranks[0].steps_per_epoch - 1
    assert sorted(ranks[0].count_samples(last)) == [0, 0, 0, 1]
    assert sorted(len(s.load_batches(last)) for s in ranks) == [0, 0, 0, 1]


def test_find_step_with_count_finds_the_first_single_sample():
    assert stream(2, [0]).find_step_with_count({1}) == (5, stream(2, [0]).count_samples(5).index(1))
    assert stream(2, [0], samples=120).find_step_with_count({1}) is None
    late = stream(2, [0], batch=4, samples=4 * 2000 + 1)
    assert late.find_step_with_count({1})[0] == 2000


def test_find_step_with_count_counts_the_samples_of_a_replica_of_several_ranks():
    batches = stream(2, [0], samples=122)
    assert batches.find_step_with_count({1}) == (5, 0)
    batches.set_shares([1.0])
    assert batches.find_step_with_count({1}) is None
    assert batches.find_step_with_count({2}) == (5, 0)


class Samples(Dataset):
    def __init__(self, form):
        self.form = form

    def __len__(self):
        return 10

    def __getitem__(self, row):
        return self.form(row)


class ManySamples(Samples):
    def __init__(self, form):
        super().__init__(form)
        self.asked = []

    def __getitems__(self, rows):
        self.asked.append(rows)
        return [self.form(row) for row in rows]


class Pair(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize("kind", [Samples, ManySamples])
def test_datasets_are_collated_as_torch_does(kind):
    wanted = np.array([7, 0, 3])
    inputs, targets = DatasetSource(kind(lambda row: (torch.tensor([row, row]), row))).take(wanted)
    assert inputs.tolist() == [[7, 7], [0, 0], [3, 3]]
    assert targets.tolist() == [7, 0, 3]
    batch = DatasetSource(kind(lambda row: {"text": str(row), "x": row})).take(wanted)
    assert batch["text"] == ["7", "0", "3"]
    assert batch["x"].tolist() == [7, 0, 3]
    pair = DatasetSource(kind(lambda row: Pair(row, -row))).take(wanted)
    assert pair.y.tolist() == [-7, 0, -3]


def test_getitems_is_called_once_per_batch():
    dataset = ManySamples(lambda row: (row, row))
    DatasetSource(dataset).take(np.array([4, 2]))
    assert dataset.asked == [[4, 2]]


def test_arrays_and_map_style_datasets_are_accepted_as_data():
    x, y = torch.arange(6.0).reshape(3, 2), np.arange(3)
    for given in ((x, y), [x, y], TensorDataset(x, torch.from_numpy(y))):
        found = as_source(given)
        assert len(found) == 3
        inputs, targets = found.take(np.array([2, 0]))
        assert inputs.tolist() == [[4, 5], [0, 1]]
        assert targets.tolist() == [2, 0]
        assert found.labels.tolist() == [0, 1, 2]
    assert len(as_source(x).take(np.array([1]))) == 1
    assert isinstance(as_source(Samples(lambda row: row)), DatasetSource)
    with pytest.raises(
        TypeError, match="data is an int; it must be a tuple of arrays, a DataFrame, an iterable of samples"
    ):
        as_source(3)


def test_batches_of_any_form_move_to_the_device():
    x = torch.zeros(2)
    cpu = torch.device("cpu")
    batch = {"a": (x, [x, "text"]), "b": Pair(x, 1)}
    moved = to_device(batch, cpu)
    assert moved["a"][1][1] == "text"
    assert isinstance(moved["b"], Pair)
    assert moved["b"].y == 1


def test_a_source_can_define_how_its_rows_are_shuffled():
    class Blocks(ArraySource):
        def shuffle_rows(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
            return rows[::-1] if rng.random() >= 0 else rows

    found = ShardedBatches(Blocks([torch.arange(SAMPLES)]), shards(2), JobPlan(24, 9, "shard", 0), [0])
    assert np.concatenate([found.get_rows(step) for step in range(6)]).tolist() == list(range(60, -1, -1))

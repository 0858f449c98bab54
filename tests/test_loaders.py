"""Batch loading: directly, one batch ahead, in worker processes, or from a stream without length."""

from __future__ import annotations

import os
import random
import signal
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from dtkit.data.columns import ColumnSelection
from dtkit.data.partition import Partition
from dtkit.engine.data.batches import ShardedBatches, Shards
from dtkit.engine.data.iterable import IterableBatches, StreamSource, accepts_rank, is_iterable_only
from dtkit.engine.data.loader import (
    LoadedBatches,
    load_evaluation_batches,
    make_loader,
    make_row_batches,
    make_stream_batches,
)
from dtkit.engine.data.prefetch_loader import PrefetchLoader, SyncLoader
from dtkit.engine.data.sample_seeds import SampleSeeds
from dtkit.engine.data.sources import ArraySource, DatasetSource, as_source, load_source
from dtkit.engine.data.worker_loader import WorkerLoader
from dtkit.mesh import Mesh
from dtkit.rpc.job_plan import JobPlan, LoadingOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SAMPLES, BATCH, WORLD = 61, 16, 2
CPU = torch.device("cpu")
SEEDS = SampleSeeds(7)


class Numbers(Dataset):
    """Row numbers as samples, with what a worker would draw at random; row `bad` raises."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, row: int) -> Any:
        if row == self.bad:
            raise KeyError("unlucky")
        return torch.tensor([row, os.getpid()]), torch.rand(()), random.random(), np.random.random()  # noqa: NPY002 - what users do


def plan(**changes: Any) -> JobPlan:
    return JobPlan(**{"batch_size": BATCH, "steps": 20, "shuffle": "shard", "seed": 3} | changes)


def shards() -> Shards:
    part = Partition(SAMPLES, WORLD)
    return Shards(part.flatten_indices(), part.sizes)


def feeder(source: Any, loader: Any, rank: int = 1) -> LoadedBatches:
    return LoadedBatches(source, shards(), plan(), [rank], loader)


def numbers(pieces: list[tuple[int, Any]]) -> list[list[int]]:
    """The row numbers in each micro-batch."""
    return [batch[0][:, 0].tolist() for _, batch in pieces]


# -- rows by number -----------------------------------------------------------------------------------------

LOADERS: dict[str, Callable[[Any], Any]] = {
    "directly": lambda source: SyncLoader(source, SEEDS),
    "one ahead": lambda source: PrefetchLoader(SyncLoader(source, SEEDS)),
    "by two workers": lambda source: WorkerLoader(source, 2, SEEDS),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("parts", [1, 3])
def test_loaders_return_the_batches_of_the_stream_for_any_step_order(name: str, parts: int):
    source = DatasetSource(Numbers())
    plain, fed = ShardedBatches(source, shards(), plan(), [1]), feeder(source, LOADERS[name](source))
    try:
        for step in [0, 1, 2, 3, 4, 5, 9, 10, 3, 3, 4]:
            assert numbers(fed.load_batches(step, parts)) == numbers(plain.load_batches(step, parts))
            assert fed.count_samples(step) == plain.count_samples(step)
    finally:
        fed.close()


@pytest.mark.parametrize("name", LOADERS)
def test_batches_loaded_for_old_shares_are_dropped(name: str):
    source = DatasetSource(Numbers())
    plain, fed = ShardedBatches(source, shards(), plan(), [1]), feeder(source, LOADERS[name](source))
    try:
        for step in range(6):
            if step in (2, 4):
                for stream in (plain, fed):
                    stream.set_shares([1, step])
            assert numbers(fed.load_batches(step)) == numbers(plain.load_batches(step))
    finally:
        fed.close()


@pytest.mark.parametrize("name", LOADERS)
def test_one_worker_loads_several_shards_and_steps_without_samples(name: str):
    source = ArraySource([torch.arange(5).unsqueeze(1), torch.arange(5)])
    fed = LoadedBatches(source, Shards([0, 1, 2, 3, 4], (4, 1)), plan(batch_size=1), [0, 1], LOADERS[name](source))
    plain = ShardedBatches(source, Shards([0, 1, 2, 3, 4], (4, 1)), plan(batch_size=1), [0, 1])
    try:
        for step in range(7):
            found, expected = fed.load_batches_by_shard(step), plain.load_batches_by_shard(step)
            assert [count for count, _ in found] == [count for count, _ in expected]
            for (_, batch), (_, other) in zip(found, expected, strict=True):
                assert (batch is None) == (other is None)
                assert batch is None or torch.equal(batch[1], other[1])
    finally:
        fed.close()


@pytest.mark.parametrize("name", LOADERS)
def test_a_loading_error_names_rank_step_and_row(name: str):
    source = DatasetSource(Numbers(bad=45))
    loader = WorkerLoader(source, 2, SEEDS, rank=1) if "workers" in name else LOADERS[name](source)
    fed = feeder(source, loader)
    bad = next(step for step in range(9) if 45 in fed.get_rows(step))
    try:
        for step in range(bad):
            fed.load_batches(step)
        with pytest.raises(KeyError) as caught:
            fed.load_batches(bad)
        said = str(caught.value) + "\n".join(caught.value.__notes__)
        assert "the Dataset raised this for row 45" in said
        assert f"while rank {loader._rank if 'workers' in name else 0} was loading step {bad}: rows " in said
        assert numbers(fed.load_batches(bad + 1)) == numbers(
            ShardedBatches(source, shards(), plan(), [1]).load_batches(bad + 1)
        )
    finally:
        fed.close()


def test_prefetch_loads_one_batch_ahead_in_another_thread():
    taken: list[tuple[int, str]] = []

    class Watched(ArraySource):
        def take(self, rows: np.ndarray) -> Any:
            taken.append((len(taken), threading.current_thread().name))
            return super().take(rows)

    source = Watched([torch.arange(SAMPLES).unsqueeze(1)])
    fed = feeder(source, PrefetchLoader(SyncLoader(source, SEEDS)))
    fed.load_batches(0)
    fed.load_batches(1)
    fed.close()  # waits for what is under way
    assert len(taken) in (2, 3)
    assert {name for _, name in taken} == {"dtkit-prefetch_0"}
    assert not [t for t in threading.enumerate() if t.name.startswith("dtkit-prefetch")]


@pytest.mark.parametrize(
    ("loading", "source", "expected"),
    [
        (LoadingOptions(), ArraySource([torch.zeros(3)]), SyncLoader),
        (LoadingOptions(prefetch=True), ArraySource([torch.zeros(3)]), PrefetchLoader),
        (LoadingOptions(), DatasetSource(Numbers()), SyncLoader),
        (LoadingOptions(num_workers=1), DatasetSource(Numbers()), WorkerLoader),
        (LoadingOptions(prefetch=True), DatasetSource(Numbers()), WorkerLoader),  # threads share random generators
    ],
)
def test_options_and_source_determine_the_loader(loading: LoadingOptions, source: Any, expected: type):
    loader = make_loader(source, loading, CPU, 0, 0)
    loader.close()
    assert type(loader) is expected


def test_files_are_prefetched_unless_prefetch_is_false(tmp_path: Any):
    np.save(tmp_path / "X.npy", np.zeros((3, 2)))
    source = as_source(str(tmp_path / "X.npy"))
    assert type(make_loader(source, LoadingOptions(), CPU, 0, 0)) is PrefetchLoader
    assert type(make_loader(source, LoadingOptions(prefetch=False), CPU, 0, 0)) is SyncLoader


# -- worker processes ---------------------------------------------------------------------------------------


def test_random_numbers_of_a_sample_depend_only_on_its_row_and_step():
    source = DatasetSource(Numbers())
    expected = draw_samples(source, SyncLoader(source, SEEDS), [0, 1, 2, 3])
    for workers, start in [(1, 0), (2, 0), (2, 3)]:
        steps = list(range(start, 4))
        assert draw_samples(source, WorkerLoader(source, workers, SEEDS), steps) == expected
    assert draw_samples(source, SyncLoader(source, SEEDS), [3], num_micro_batches=3) == expected
    assert draw_samples(source, SyncLoader(source, SampleSeeds(8)), [3]) != expected
    assert draw_samples(source, SyncLoader(source, SEEDS), [3 + 4]) != expected


def get_numpy_words() -> list[int]:
    state: Any = np.random.get_state()  # noqa: NPY002 - what users' code draws from
    return [*state[1].tolist(), *state[2:]]


def draw_samples(source: Any, loader: Any, steps: list[int], **options: Any) -> list[list[float]]:
    """Return what the samples of the last of these steps draw, without a change of the generators here."""
    fed = feeder(source, loader)
    before = torch.get_rng_state(), random.getstate(), get_numpy_words()
    for step in steps:
        batches = fed.load_batches(step, **options)
    after = torch.get_rng_state(), random.getstate(), get_numpy_words()
    fed.close()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    return [torch.cat([batch[k] for _, batch in batches]).tolist() for k in (1, 2, 3)]


def test_worker_processes_are_reused_and_end_on_close():
    source = DatasetSource(Numbers())
    fed = feeder(source, WorkerLoader(source, 2, SEEDS))
    pids = {
        pid for step in [0, 1, 2, 3, 9, 10] for _, batch in fed.load_batches(step) for pid in batch[0][:, 1].tolist()
    }
    assert len(pids) == 2
    assert os.getpid() not in pids
    fed.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    fed.close()


# torch raises from its SIGCHLD handler at any point, so a file that was being opened may stay open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_killed_worker_raises_an_error_and_is_replaced():
    source = DatasetSource(Numbers())
    fed = feeder(source, WorkerLoader(source, 1, SEEDS))
    try:
        (_, batch), *_ = fed.load_batches(0)
        os.kill(int(batch[0][0, 1]), signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"worker .*(killed|exited)"):
            [fed.load_batches(step) for step in range(1, 9)]  # what it had loaded by then may still come
        assert len(fed.load_batches(2)) == 1
    finally:
        fed.close()


def test_a_dead_worker_is_distinguished_from_a_dataset_connection_error():
    class Torn:
        error: Exception = ConnectionResetError("Connection reset by peer")

        def __next__(self) -> Any:
            raise self.error

    loader = WorkerLoader(DatasetSource(Numbers()), 1, SEEDS)
    loader._iterator = Torn()
    with pytest.raises(RuntimeError, match="a worker process that loads samples was killed or exited"):
        loader._take_next()
    loader._iterator.error = ConnectionResetError("Caught ConnectionResetError in DataLoader worker process 0.")
    with pytest.raises(ConnectionResetError, match="Caught"):
        loader._take_next()


def test_num_workers_is_refused_for_arrays():
    with pytest.raises(ValueError, match=r"num_workers=2: .*\(ArraySource\) .* Leave num_workers"):
        make_loader(ArraySource([torch.zeros(3)]), LoadingOptions(num_workers=2), CPU, 0, 0)


@pytest.mark.parametrize("bad", [{"num_workers": -1}, {"num_workers": 1.5}, {"num_workers": True}, {"prefetch": 2}])
def test_invalid_loading_options_are_refused(bad: dict[str, Any]):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
        LoadingOptions(**bad)
    with pytest.raises(ValueError, match="load ahead by themselves"):
        LoadingOptions(num_workers=1, prefetch=True)


@pytest.mark.parametrize("loading", [LoadingOptions(), LoadingOptions(num_workers=2)])
def test_evaluation_batches_keep_the_order_of_rows(loading: LoadingOptions):
    rows = np.arange(3, 40)
    found = list(load_evaluation_batches(DatasetSource(Numbers()), rows, 10, loading, rank=0))
    assert [count for count, _ in found] == [10, 10, 10, 7]
    assert [n for piece in numbers(found) for n in piece] == rows.tolist()


# -- streams without length ---------------------------------------------------------------------------------


class Ranks:
    """Fake ranks, each in its own thread, whose counts are summed."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._gate = threading.Barrier(world_size, timeout=10)
        self._sum = torch.zeros(0)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._gate.wait() == 0:
            self._sum = torch.zeros_like(tensor)
        self._gate.wait()
        with _adding:
            self._sum += tensor
        self._gate.wait()
        return tensor.copy_(self._sum)

    def play(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work(rank)` returned or raised, by rank."""
        results: list[Any] = [None] * self.world_size

        def run(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except Exception as error:  # noqa: BLE001 - it is the result
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return results


_adding = threading.Lock()
_thread = threading.local()


def counting(n: int) -> Callable[[], Iterator[Any]]:
    """A stream of the numbers up to n, each with its negative."""

    def samples() -> Iterator[Any]:
        for k in range(n):
            yield torch.tensor([k]), -k

    return samples


def parts(*sizes: int) -> Callable[..., Iterator[Any]]:
    """A stream that makes each rank's part: rank r counts from 100 r."""

    def samples(rank: int, world_size: int) -> Iterator[Any]:
        assert world_size == len(sizes)
        yield from ((torch.tensor([100 * rank + k]), rank) for k in range(sizes[rank]))

    return samples


def drain(make: Any, world_size: int, *, batch_size: int = BATCH, ahead: bool = False) -> list[Any]:
    """Every rank's [(counts, its samples)] for the steps until the end, or its error."""
    group = Ranks(world_size)

    def run(rank: int) -> list[Any]:
        _thread.rank = rank
        job = plan(batch_size=batch_size)
        stream = IterableBatches(load_source(make, ColumnSelection()), job, world_size, [rank], group, prefetch=ahead)
        found, step = [], 0
        while any(counts := stream.count_samples(step)):
            pieces = stream.load_batches(step)
            assert sum(count for count, _ in pieces) == counts[rank]
            found.append((counts, [n for _, batch in pieces for n in batch[0][:, 0].tolist()]))
            step += 1
        assert stream.load_batches(step) == []
        stream.close()
        return found

    return group.play(run)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_a_stream_and_end_together(world_size: int, ahead: bool):  # noqa: FBT001 - a parameter of the test
    found = drain(counting(70), world_size, ahead=ahead)
    assert len({len(one) for one in found}) == 1
    assert sorted(n for one in found for _, samples in one for n in samples) == list(range(70))
    for rank, one in enumerate(found):
        assert [n for _, samples in one for n in samples] == list(range(rank, 70, world_size))
    counts = [counts for counts, _ in found[0]]
    assert all(sum(c) == BATCH for c in counts[:-1])
    assert all([c for c, _ in one] == counts for one in found)


class Shuffled(IterableDataset[Any]):
    """Dataset that shuffles itself, with random numbers of a kind that a seed covers."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[Any]:
        return ((torch.tensor([k]), 0) for k in self.draw())


SHUFFLES: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.randperm(70).tolist(),
    "numpy": lambda: np.random.permutation(70).tolist(),  # noqa: NPY002 - as users do
    "python": lambda: random.sample(range(70), 70),
}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", SHUFFLES)
def test_ranks_divide_a_stream_that_shuffles_itself(kind: str, ahead: bool):  # noqa: FBT001 - a parameter of the test
    source = StreamSource(Shuffled(SHUFFLES[kind]))
    stream = IterableBatches(source, plan(), WORLD, [0, 1], None, prefetch=ahead)
    rows = [n for step in range(5) for batch in numbers(stream.load_batches(step)) for n in batch]
    stream.close()
    assert sorted(rows) == list(range(70))
    assert rows != list(range(70))


def divide_itself() -> Iterator[Any]:
    """A stream that yields the items of the rank that asks, as by ``torch.distributed.get_rank()``."""
    for k in range(_thread.rank, 70, WORLD):
        yield {"x": torch.tensor([k // 2]), "name": f"{k // 4}"}, np.array([k, torch.rand(()).item()])


@pytest.mark.parametrize("ahead", [False, True])
def test_a_stream_that_divides_itself_is_refused_on_all_ranks(ahead: bool):  # noqa: FBT001 - a parameter of the test
    found = drain(divide_itself, WORLD, ahead=ahead)
    assert [type(one) for one in found] == [ValueError, ValueError]
    assert "the stream has different items on each rank, as if it divided itself" in str(found[0])


def test_a_stream_that_divides_itself_trains_as_a_function_of_rank_and_world_size():
    found = drain(lambda rank, world_size: ((torch.tensor([k]), k) for k in range(_thread.rank, 70, 2)), WORLD)
    assert sorted(n for one in found for _, samples in one for n in samples) == list(range(70))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_stream_with_random_numbers_of_its_own_is_no_divided_one(ahead: bool):  # noqa: FBT001 - a parameter of the test
    def samples() -> Iterator[Any]:
        rng = np.random.default_rng()
        yield from ((torch.from_numpy(rng.normal(size=3)), 0) for _ in range(70))

    def start(rank: int) -> list[str]:
        stream = IterableBatches(load_source(samples, ColumnSelection()), plan(), WORLD, [rank], group, prefetch=ahead)  # type: ignore[arg-type]
        stream.close()
        return stream.notes

    group = Ranks(WORLD)
    (note,), again = group.play(start)
    assert again == [note]
    assert note.startswith("ranks see different items of the stream, and others each time")


def test_a_rank_whose_part_ended_continues_without_samples():
    found = drain(parts(10, 21), 2, batch_size=8)
    assert [counts for counts, _ in found[0]] == [(4, 4), (4, 4), (2, 4), (0, 4), (0, 4), (0, 1)]
    assert [n for _, samples in found[1] for n in samples] == list(range(100, 121))


def test_first_ranks_get_the_remainder_of_an_uneven_batch():
    assert drain(counting(50), 3, batch_size=8)[0][0][0] == (3, 3, 2)


def test_all_ranks_report_an_empty_stream_part_before_the_first_step():
    found = drain(parts(5, 0, 0), 3)
    assert [type(one) for one in found] == [ValueError] * 3
    assert "the stream gave no sample on ranks 1, 2 of 3" in str(found[0])
    assert "the stream gave no sample on rank 1 of 2" in str(drain(counting(1), 2)[1])


def test_only_one_rank_of_each_replica_reads_the_stream():
    group, mesh = Ranks(4), Mesh({"dp": 2, "tp": 2})

    def run(rank: int) -> Any:
        coordinates = mesh.get_coordinates(rank)
        setting = SimpleNamespace(
            group=SimpleNamespace(rank=rank, all_reduce=group.all_reduce),
            shards=[coordinates["dp"]],
            mesh=mesh,
            replica_link=SimpleNamespace(is_leader=coordinates["tp"] == 0),
        )
        stream = make_stream_batches(StreamSource(counting(22)), plan(), setting, LoadingOptions())  # type: ignore[arg-type]
        return [(stream.count_samples(step), numbers(stream.load_batches(step))) for step in range(3)]

    found = group.play(run)
    assert [[counts for counts, _ in steps] for steps in found] == [[(8, 8), (3, 3), (0, 0)]] * 4
    assert found[0][0][1] == [list(range(0, 16, 2))]
    assert found[2][0][1] == [list(range(1, 16, 2))]
    assert found[1][0][1] == found[3][0][1] == []


def test_first_sample_of_a_stream_is_used_for_the_trial_and_for_training():
    stream = alone(counting(50))
    assert stream.make_first_batch()[1].tolist() == [0]
    assert numbers(stream.load_batches(0))[0][:2] == [0, 2]


@pytest.mark.parametrize("ahead", [False, True])
def test_random_numbers_of_a_stream_repeat_with_its_seed(ahead: bool):  # noqa: FBT001 - a parameter of the test
    def samples() -> Iterator[Any]:
        while True:
            yield torch.rand(()), random.random() + np.random.random()  # noqa: NPY002 - what users do

    def draw(seed: int, *, prefetch: bool) -> list[float]:
        source = load_source(samples, ColumnSelection())
        stream = IterableBatches(source, plan(seed=seed), WORLD, [0, 1], None, prefetch=prefetch)  # type: ignore[arg-type]
        values = [
            n for step in range(3) for _, batch in stream.load_batches(step) for part in batch for n in part.tolist()
        ]
        stream.close()
        return values

    assert draw(3, prefetch=ahead) == draw(3, prefetch=False)
    assert draw(4, prefetch=ahead) != draw(3, prefetch=ahead)


def alone(make: Any, **options: Any) -> IterableBatches:
    """Both ranks' parts, played by one process."""
    return IterableBatches(load_source(make, ColumnSelection()), plan(), WORLD, [0, 1], None, **options)


def test_one_process_in_place_of_all_ranks_gets_their_samples():
    together = drain(counting(70), WORLD)
    stream = alone(counting(70))
    for step in range(len(together[0])):
        expected = [samples for ranks in together for samples in [ranks[step][1]]]
        assert stream.count_samples(step) == together[0][step][0]
        assert [batch[0][:, 0].tolist() for _, batch in stream.load_batches_by_shard(step)] == expected
        assert [count for count, _ in stream.load_batches(step, 3)] == [6, 5, 5][
            : len(stream.load_batches(step, 3))
        ] or step == 4


@pytest.mark.parametrize(("samples", "full"), [(70, 4), (64, 4), (16, 1)])
def test_drop_last_ends_a_stream_before_a_step_that_is_not_full(samples: int, full: int):
    source = load_source(counting(samples), ColumnSelection())
    stream = IterableBatches(source, plan(drop_last=True), WORLD, [0, 1], None)  # type: ignore[arg-type]
    counts = [stream.count_samples(step) for step in range(full + 2)]
    assert counts == [(8, 8)] * full + [(0, 0)] * 2
    assert stream.load_batches(full + 1) == []


def test_drop_last_of_a_stream_that_fills_no_step_is_refused():
    source = load_source(counting(10), ColumnSelection())
    stream = IterableBatches(source, plan(drop_last=True), WORLD, [0, 1], None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"has only 10 samples for batch_size=16, .* Use batch_size=10 or less"):
        stream.count_samples(0)


def test_stream_steps_can_be_repeated_and_skipped_but_not_revisited():
    stream = alone(counting(200))
    first = numbers(stream.load_batches(0))
    assert numbers(stream.load_batches(0)) == first
    assert stream.count_samples(0) == stream.count_samples(0) == (8, 8)
    assert sorted(*numbers(stream.load_batches(3))) == list(range(48, 64))
    with pytest.raises(ValueError, match="is at step 3 and can't go back to step 2"):
        stream.count_samples(2)


def test_counts_are_summed_again_in_a_new_group():
    asked = []

    class Group:
        def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
            counts, checksums = tensor[:2], tensor[2:]
            asked.append(counts.tolist())
            return torch.cat([counts + torch.tensor([0, 1]), checksums.sum().expand(len(checksums))])

    stream = IterableBatches(load_source(counting(50), ColumnSelection()), plan(), WORLD, [0], Group())  # type: ignore[arg-type]
    stream.count_samples(0)
    stream.count_samples(0)
    stream.set_process_group(Group())  # type: ignore[arg-type]
    assert stream.count_samples(0) == (8, 1)
    assert asked == [[1, 0], [8, 0], [8, 0]]


def test_new_shares_of_the_batch_apply_from_the_next_step():
    stream = alone(counting(200))
    assert stream.count_samples(0) == (8, 8)
    stream.set_shares([3, 1])
    assert stream.count_samples(0) == (8, 8)
    assert stream.count_samples(1) == (12, 4)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_stream_that_raises_is_not_treated_as_ended(ahead: bool):  # noqa: FBT001 - a parameter of the test
    def samples() -> Iterator[Any]:
        yield from ((torch.tensor([k]), k) for k in range(21))
        raise OSError("the link is down")

    stream = alone(samples, prefetch=ahead)
    stream.count_samples(0)
    with pytest.raises(OSError, match="the link is down") as caught:
        stream.count_samples(1)
    assert caught.value.__notes__ == ["the stream raised this on rank 0, after 11 samples of its part"]
    with pytest.raises(ValueError, match=r"rank 0 broke off after 11 samples \(OSError\)"):
        stream.count_samples(1)


def test_closing_a_stream_ends_its_generators():
    ended = []

    def samples() -> Iterator[Any]:
        try:
            yield from iter(int, 1)
        finally:
            ended.append(True)

    stream = alone(samples)
    stream.count_samples(0)
    stream.close()
    assert ended == [True, True]


def test_closing_ends_the_worker_processes_of_a_stream():
    others = set(psutil.Process().children())
    stream = alone(counting(10**9), prefetch=True)
    stream.count_samples(0)
    workers = set(psutil.Process().children()) - others
    stream.close()
    assert workers
    assert not any(worker.is_running() for worker in workers)


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(counting(10)())


class Lying(Endless):
    def __len__(self) -> int:  # has a length, but no rows by number
        return 10


def test_iterables_without_numbered_rows_are_recognized_as_streams():
    assert is_iterable_only(Endless())
    assert is_iterable_only(Lying())
    assert is_iterable_only(counting(3)())
    assert not is_iterable_only([1, 2])
    assert not is_iterable_only(Numbers())
    for make in (counting(9), Endless, Endless(), Lying(), parts(1)):
        found = load_source(make, ColumnSelection()) if callable(make) else as_source(make)
        assert isinstance(found, StreamSource)
    assert isinstance(load_source(Numbers, ColumnSelection()), DatasetSource)


def test_samples_of_an_iterable_dataset_are_distributed_over_ranks():
    source = as_source(Endless())
    assert isinstance(source, StreamSource)
    assert [int(x) for x, _ in source.iterate_samples(1, 3)] == [1, 4, 7]
    assert [int(x) for x, _ in source.iterate_samples(1, 3)] == [1, 4, 7]


def test_a_hub_stream_is_split_by_rank():
    datasets = pytest.importorskip("datasets")
    hub = datasets.Dataset.from_dict({"x": list(range(12)), "y": [0] * 12}).to_iterable_dataset(num_shards=4)
    source = as_source(hub, ColumnSelection.from_arguments("y"))
    held = [[sample["x"] for sample in source.iterate_samples(rank, 2)] for rank in range(2)]
    assert sorted(held[0] + held[1]) == list(range(12))
    assert len(held[0]) == 6
    x, y = source.collate(list(source.iterate_samples(0, 2)))
    assert (x.dtype, x.shape, y.tolist()) == (torch.int64, (6,), [0] * 6)


def test_a_hub_stream_that_was_split_already_is_refused():
    datasets = pytest.importorskip("datasets")
    hub = datasets.Dataset.from_dict({"x": list(range(12))}).to_iterable_dataset(num_shards=4)
    source = as_source(datasets.distributed.split_dataset_by_node(hub, 0, 2))
    with pytest.raises(ValueError, match="split_dataset_by_node has divided the data already"):
        source.iterate_samples(0, 2)  # type: ignore[union-attr]


def test_stream_functions_take_no_arguments_or_rank_and_world_size():
    assert accepts_rank(parts(1))
    assert accepts_rank(lambda world_size, rank, depth=3: None)
    assert not accepts_rank(counting(1))
    assert not accepts_rank(lambda rank=0: None)
    with pytest.raises(TypeError, match=r"a function of \(path, rank\).*functools\.partial"):
        accepts_rank(lambda path, rank: None)
    with pytest.raises(TypeError, match=r"the function of \(rank, world_size\) returned a tuple; it must return an it"):
        load_source(lambda rank, world_size: (torch.zeros(3), torch.zeros(3)), ColumnSelection()).iterate_samples(0, 1)  # type: ignore[union-attr]


class Setting:
    """The attributes of a worker's context that loading reads."""

    group, device, shards, mesh, replica_link = None, CPU, [0, 1], Mesh({"dp": 2}), None


def test_rows_and_streams_get_their_own_kind_of_batches():
    fed = make_row_batches(ArraySource([torch.zeros(SAMPLES)]), shards(), plan(), Setting, LoadingOptions())  # type: ignore[arg-type]
    assert isinstance(fed, LoadedBatches)
    drawing = load_source(lambda: ((torch.rand(()), 0) for _ in range(9)), ColumnSelection())
    state = torch.get_rng_state()
    flow = make_stream_batches(drawing, plan(), Setting, LoadingOptions())  # type: ignore[arg-type]
    assert isinstance(flow, IterableBatches)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match=r"num_workers=1: .* a stream has none"):
        make_stream_batches(drawing, plan(), Setting, LoadingOptions(num_workers=1))  # type: ignore[arg-type]

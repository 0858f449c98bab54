"""Training and evaluation on each kind of data with real engines, and streams that end on all ranks at once."""

from __future__ import annotations

import linecache
import os
import re
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import dtkit
from dtkit._util.notebook import name_code
from dtkit.errors import FirstBatchError
from dtkit.rpc.engine_group import EngineGroup
from tests.support import small
from tests.support.marks import slow
from tests.support.notebook_dataset import BAD_LINE, CELL, CELL_FILE, make_notebook_dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.cluster.conftest import SharedCluster

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.cluster

ROWS = small.ROWS


def make_table() -> pd.DataFrame:
    x, y = small.data()
    names = ["u", "v", "w", "z"]
    return pd.DataFrame(x.double().numpy(), columns=names).assign(label=y.numpy())


def save_npy(folder: Path) -> Any:
    x, y = small.data()
    np.save(folder / "X.npy", x.numpy())
    np.save(folder / "y.npy", y.numpy())
    return folder / "X.npy", folder / "y.npy"


def save_parquet(folder: Path) -> Any:
    pq.write_table(pa.Table.from_pandas(make_table()), folder / "data.parquet", row_group_size=10)
    return folder / "data.parquet"


def save_hub_dataset(folder: Path) -> Any:
    make_hub_dataset().save_to_disk(folder / "hub")
    return datasets.load_from_disk(folder / "hub")


def make_hub_dataset() -> Any:
    x, y = small.data()
    return datasets.Dataset.from_dict({"x": x.numpy(), "label": y.numpy()})


def map_npy(folder: Path) -> Any:
    return tuple(np.load(path, mmap_mode="r") for path in save_npy(folder))


KINDS: dict[str, tuple[Callable[[Path], Any], str | None]] = {
    "a DataFrame": (lambda _: make_table(), "label"),
    "a DataFrame and a Series": (lambda _: (make_table().drop(columns="label"), make_table()["label"]), None),
    "a function that loads a DataFrame": (lambda _: make_table, "label"),
    "npy files": (save_npy, None),
    "mapped arrays": (map_npy, None),
    "parquet": (save_parquet, "label"),
    "a hub Dataset in memory": (lambda _: make_hub_dataset(), "label"),
    "a hub Dataset on disk": (save_hub_dataset, "label"),
}


@pytest.fixture(scope="module")
def expected(shared: SharedCluster) -> tuple[list[float], float]:
    """Losses of training on plain arrays in row order, and the final loss."""
    return train_and_evaluate(shared.get(2), small.data(), None)


def train_and_evaluate(cluster: dtkit.Cluster, rows: Any, target: str | None) -> tuple[list[float], float]:
    part = cluster.partition(rows, target=target)
    run = small.train(cluster, rows=part, epochs=2, shuffle=None, validation=part)
    run.wait(60)
    assert run.verify(steps=4)
    return run.history.totals()["loss"].tolist(), run.evaluate(rows).values["loss"]  # noqa: PD011 - no DataFrame


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_data_trains_like_arrays(
    cluster2: dtkit.Cluster, tmp_path: Path, expected: tuple[list[float], float], name: str
):
    make, target = KINDS[name]
    losses, loss = train_and_evaluate(cluster2, make(tmp_path), target)
    assert losses == pytest.approx(expected[0], abs=1e-6)
    assert loss == pytest.approx(expected[1], abs=1e-6)


def test_a_training_from_parquet_survives_a_lost_engine(cluster2: dtkit.Cluster, tmp_path: Path):
    """The survivor sends its data to the new engine, but no open file can be sent."""
    options: dict[str, Any] = {"rows": save_parquet(tmp_path), "target": "label", "epochs": 4}
    undisturbed = small.train(cluster2, **options)
    undisturbed.wait(60)
    run = small.train(cluster2, **options, start=False)
    run.step(3)
    os.kill(cluster2.nodes[1].pid, signal.SIGKILL)
    run.resume()
    run.wait(60)
    for (name, p), q in zip(run.model.named_parameters(), undisturbed.model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("shuffle", ["shard", "global"])
def test_train_accepts_parquet_and_shuffles_it(cluster2: dtkit.Cluster, tmp_path: Path, shuffle: str):
    run = small.train(cluster2, rows=save_parquet(tmp_path), target="label", epochs=2, shuffle=shuffle)
    run.wait(60)
    assert run.history.totals()["samples"].sum() == 2 * ROWS
    assert run.verify(steps=8)


def test_partition_describes_the_columns_of_a_table(cluster2: dtkit.Cluster):
    part = cluster2.partition(make_table(), target="label")
    assert "4 columns as float32, target 'label' as int64" in repr(part)
    assert "4 columns as float32" in part._repr_html_()


def test_only_the_path_of_data_on_disk_is_sent(cluster2: dtkit.Cluster, tmp_path: Path, monkeypatch: Any):
    sent = []
    deliver = EngineGroup.call_all_with_payload

    def record_size(self: dtkit.Cluster, op: str, packed: Any, **args: Any) -> Any:
        sent.append(packed.nbytes)
        return deliver(self, op, packed, **args)

    monkeypatch.setattr(EngineGroup, "call_all_with_payload", record_size)
    for make in (map_npy, save_parquet, save_hub_dataset):
        cluster2.partition(make(tmp_path), target=None if make is map_npy else "label")
    assert max(sent) < 4000 + 4 * ROWS


def test_file_missing_on_an_engine_is_named(cluster2: dtkit.Cluster, tmp_path: Path):
    paths = save_npy(tmp_path)

    def list_missing() -> Any:
        return [str(path) + ".npy" for path in paths]

    with pytest.raises(dtkit.errors.EngineError, match=r"X\.npy\.npy does not exist on .*under the same path"):
        small.train(cluster2, rows=list_missing)
    small.check_usable(cluster2)


def test_unsuitable_tables_are_refused_at_once(cluster2: dtkit.Cluster):
    with pytest.raises(TypeError, match=r"columns 'city' \(.*\) are not numbers.*get_dummies"):
        small.train(cluster2, rows=make_table().assign(city="x"), target="label")
    with pytest.raises(ValueError, match=r"a table needs target="):
        small.train(cluster2, rows=make_table())
    with pytest.raises(ValueError, match="name columns of a table, but this data has arrays"):
        small.train(cluster2, rows=small.data(), target="label")
    small.check_usable(cluster2)


# -- worker processes ---------------------------------------------------------------------------------------


class Rows(Dataset):
    """Dataset of the small data, in which row `bad` raises."""

    def __init__(self, bad: int | None = None) -> None:
        self.x, self.y = small.data()
        self.bad = bad

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        if row == self.bad:
            raise KeyError("bad row")
        return self.x[row], self.y[row]


def list_children() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"prefetch": True}])
def test_batches_loaded_ahead_train_the_same(
    cluster2: dtkit.Cluster, expected: tuple[list[float], float], options: dict[str, Any]
):
    before = cluster2.run(list_children)
    part = cluster2.partition(Rows())
    run = small.train(cluster2, rows=part, epochs=2, shuffle=None, validation=Rows(), **options)
    run.wait(60)
    assert run.history.totals()["loss"].tolist() == pytest.approx(expected[0], abs=1e-6)
    assert run.evaluate(Rows()).values["loss"] == pytest.approx(expected[1], abs=1e-6)  # noqa: PD011 - no DataFrame
    started = [set(now) - set(then) for now, then in zip(cluster2.run(list_children), before, strict=True)]
    assert [len(pids) for pids in started] == [options.get("num_workers", 1)] * 2
    run.release()
    small.check_usable(cluster2)
    assert [set(now) - set(then) for now, then in zip(cluster2.run(list_children), before, strict=True)] == [
        set(),
        set(),
    ]


def test_failing_worker_process_names_rank_and_row(cluster2: dtkit.Cluster):
    run = small.train(cluster2, rows=cluster2.partition(Rows(bad=40)), num_workers=1, shuffle=None)
    with pytest.raises(dtkit.errors.EngineError, match="bad row") as caught:
        run.wait(60)
    assert caught.value.cause.rank == 1
    assert "the Dataset raised this for row 40" in str(caught.value)
    assert "while rank 1 was loading step 1: rows 40, 41" in str(caught.value)
    run.release()
    small.check_usable(cluster2)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_error_of_a_dataset_of_the_notebook_shows_its_cell(
    cluster2: dtkit.Cluster, monkeypatch: pytest.MonkeyPatch, num_workers: int
):
    statement = "raise OSError(5, 'disk is gone', 'a.png')"
    source = CELL.format(statement=statement, bad=40).splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, CELL_FILE, (1, None, source, CELL_FILE))  # as a kernel has its cells
    rows = cluster2.partition(make_notebook_dataset(statement, bad=40))
    run = small.train(cluster2, rows=rows, num_workers=num_workers, shuffle=None)
    with pytest.raises(dtkit.errors.EngineError) as caught:
        run.wait(60)
    first, *others = str(caught.value).splitlines()
    assert re.fullmatch(r"rank 1 on .*, step 1: OSError: \[Errno 5\] disk is gone: 'a.png'", first)
    assert others[0] == "the Dataset raised this for row 40"
    assert others[1].startswith("while rank 1 was loading step 1: rows 40, 41")
    assert others[2:4] == [f"  {name_code(CELL_FILE)}, line {BAD_LINE}, in __getitem__", f"    {statement}"]
    assert not any(word in line for line in others for word in ("torch", "worker", "left out"))
    assert "in _load_sample" in caught.value.full
    run.release()


def test_workers_for_arrays_are_refused(cluster2: dtkit.Cluster):
    with pytest.raises(dtkit.errors.EngineError, match=r"num_workers=2: worker processes are for Datasets"):
        small.train(cluster2, num_workers=2)
    small.check_usable(cluster2)


@pytest.mark.slow
def test_workers_end_with_their_engine():
    with dtkit.Cluster(1, device="cpu") as cluster:
        run = small.train(cluster, rows=Rows(), num_workers=2, steps=3)
        run.wait(60)
        pids = cluster.run(list_children)[0]
        assert len(pids) >= 2
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
    assert alive == []


# -- streams ------------------------------------------------------------------------------------------------


def stream() -> Iterator[Any]:
    x, y = small.data()
    yield from zip(x, y, strict=True)


def uneven(rank: int, world_size: int) -> Iterator[Any]:
    """Yield 40 of the rows on rank 0, and the other 24 on rank 1."""
    x, y = small.data()
    part = slice(0, 40) if rank == 0 else slice(40, ROWS)
    yield from zip(x[part], y[part], strict=True)


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from stream()


STREAMS: dict[str, tuple[Any, list[tuple[int, int]]]] = {
    "a generator function": (stream, [(8, 8)] * 4),
    "a function of rank and world_size": (uneven, [(8, 8)] * 3 + [(8, 0)] * 2),
    "an IterableDataset's class": (Endless, [(8, 8)] * 6),
    "an IterableDataset": (Endless(), [(8, 8)] * 6),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("prefetch", [None, slow(True)])
def test_stream_ends_on_all_ranks_at_the_same_step(cluster2: dtkit.Cluster, name: str, prefetch: bool | None):  # noqa: FBT001 - a parameter of the test
    rows, counts = STREAMS[name]
    run = small.train(cluster2, rows=rows, steps=6, prefetch=prefetch, validation=small.data())
    run.wait(60)
    assert run.status.state is dtkit.types.State.COMPLETED
    history = run.history.rows()
    history = history[np.argsort(history, order=["step", "rank"])]
    assert list(map(tuple, history["samples"].reshape(-1, 2).tolist())) == counts
    assert run.status.steps == len(counts)
    assert [evaluation.step for evaluation in run.history.evaluations] == [len(counts)]
    assert run.verify(steps=6)


def batches() -> Iterator[Any]:
    x, y = small.data()
    yield from zip(x.split(16), y.split(16), strict=True)


def test_validation_data_beside_a_stream_are_tried_before_the_first_step(cluster2: dtkit.Cluster):
    x, y = small.data()
    with pytest.raises(FirstBatchError, match=r"of validation= fails.*\n.*data are float64"):
        small.train(cluster2, rows=stream, steps=6, validation=(x.double(), y))


class Numbers(IterableDataset[Any]):
    """55 samples."""

    def __iter__(self) -> Iterator[Any]:
        return iter((torch.tensor([k / 55]), torch.tensor([1.0])) for k in range(55))


def test_stream_of_whole_batches_is_taken_apart(cluster2: dtkit.Cluster, capsys: pytest.CaptureFixture[str]):
    run = small.train(cluster2, rows=batches, steps=6)
    run.wait(60)
    assert "the stream yields whole batches: they are taken apart into samples" in capsys.readouterr().out
    assert run.history.totals()["samples"].tolist() == [16] * 4
    run = small.train(cluster2, rows=stream, steps=6)
    run.wait(60)
    assert "whole batches" not in capsys.readouterr().out


def test_train_uses_the_named_columns_of_a_table(cluster2: dtkit.Cluster):
    table = make_table().assign(noise=1e9)
    losses = []
    for rows, options in ((table, {"target": "label", "columns": ["u", "v", "w", "z"]}), (small.data(), {})):
        run = small.train(cluster2, rows=rows, **options)
        run.wait(60)
        losses.append(run.history.loss()[1].tolist())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_data_loader_over_a_stream_ends_before_a_batch_that_is_not_full(cluster2: dtkit.Cluster):
    loader = DataLoader(Numbers(), batch_size=16, drop_last=True)
    run = cluster2.train(nn.Linear(1, 1), loader, steps=20, loss=nn.MSELoss(), optimizer=small.sgd)
    run.wait(60)
    assert run.history.totals()["samples"].tolist() == [16] * 3
    assert run.verify(3).verdict == "PASS"


def test_run_on_a_stream_can_be_paused_and_stepped(cluster2: dtkit.Cluster):
    run = small.train(cluster2, rows=stream, steps=100, start=False)
    assert run.step() == 1
    assert run.step(2) == 3
    run.resume()
    run.wait(60)
    assert run.history.totals()["samples"].tolist() == [16] * 4


def test_streams_of_unequal_length_train_exactly(cluster2: dtkit.Cluster):
    run = small.train(cluster2, net64(), rows=lambda rank, world_size: as64(uneven(rank, world_size)), steps=9)
    run.wait(60)
    verification = run.verify(steps=5)
    assert verification
    assert verification.max_difference < 1e-12


def net64() -> nn.Module:
    return small.net().double()


def as64(samples: Iterator[Any]) -> Iterator[Any]:
    for x, y in samples:
        yield x.double(), y


BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "empty on one rank": (
        lambda rank, world_size: iter([(torch.zeros(4), 0)] * (1 - rank)),
        {},
        dtkit.errors.EngineError,
        r"the stream gave no sample on rank 1 of 2",
    ),
    "workers": (stream, {"num_workers": 1}, dtkit.errors.EngineError, "worker processes load rows by number"),
    "not an iterable": (
        lambda rank, world_size: 3,
        {},
        dtkit.errors.EngineError,
        "returned an int; it must return an iterable",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_streams_are_refused_before_anything_hangs(cluster2: dtkit.Cluster, name: str):
    rows, options, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        small.train(cluster2, rows=rows, **options)
    small.check_usable(cluster2)


def test_stream_cannot_be_partitioned(cluster2: dtkit.Cluster):
    for rows in (stream, Endless(), Endless):
        with pytest.raises(ValueError, match=r"a stream without length, so there are no rows to divide"):
            cluster2.partition(rows)
    small.check_usable(cluster2)


def test_failing_stream_names_rank_and_position(cluster2: dtkit.Cluster):
    def broken(rank: int, world_size: int) -> Iterator[Any]:
        for k, sample in enumerate(stream()):
            if rank == 1 and k == 20:
                raise OSError("the link is down")
            yield sample

    run = small.train(cluster2, rows=broken, steps=50)
    with pytest.raises(dtkit.errors.EngineError, match="the link is down") as caught:
        run.wait(60)
    assert "the stream raised this on rank 1, after 20 samples of its part" in str(caught.value)
    assert run.status.step == 2
    small.check_usable(cluster2)


def test_generators_are_closed_with_their_job(cluster2: dtkit.Cluster, tmp_path: Path):
    def marked(rank: int, world_size: int) -> Iterator[Any]:
        try:
            yield from Endless()
        finally:
            (tmp_path / f"{rank}-{os.getpid()}").touch()

    run = small.train(cluster2, rows=marked, steps=3)
    run.wait(60)
    assert list(tmp_path.iterdir()) == []
    run.release()
    small.check_usable(cluster2)
    assert sorted(path.name[:2] for path in tmp_path.iterdir()) == ["0-", "1-"]


def pad_samples(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    x = nn.utils.rnn.pad_sequence([torch.tensor(sample["x"]) for sample in samples], batch_first=True)
    return nn.functional.pad(x, (0, 4 - x.shape[1])), torch.tensor([sample["y"] for sample in samples])


def test_list_of_ragged_samples_trains_with_a_collate_fn(cluster2: dtkit.Cluster):
    samples = [{"x": [float(row % 7)] * (1 + row % 4), "y": row % 3} for row in range(ROWS)]
    padded = pad_samples(samples)
    run = small.train(cluster2, rows=samples, collate_fn=pad_samples, shuffle="global", validation=samples)
    run.wait(60)
    expected = small.train(cluster2, rows=padded, shuffle="global", validation=padded)
    expected.wait(60)
    assert run.history.loss()[1].tolist() == pytest.approx(expected.history.loss()[1].tolist(), abs=1e-6)


def test_collate_fn_is_refused_for_arrays(cluster2: dtkit.Cluster):
    with pytest.raises(ValueError, match="collate_fn= makes a batch of samples, but this data has arrays"):
        small.train(cluster2, collate_fn=pad_samples)


@pytest.mark.parametrize("shuffle", [True, slow(False)])
def test_data_loader_without_its_last_batch_has_fewer_steps(cluster2: dtkit.Cluster, tmp_path: Path, *, shuffle: bool):
    """Also after a resume, and in the reference of `verify`."""
    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(55, 4), torch.randint(3, (55,)))
    loader = DataLoader(rows, batch_size=16, shuffle=shuffle, drop_last=True)
    options: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD, "checkpoint_dir": tmp_path}
    model = nn.Linear(4, 3)
    run = cluster2.train(model, loader, epochs=2, checkpoint_every=4, **options)
    run.wait(60)
    assert (run.spec.steps_per_epoch, run.status.step) == (3, 6)
    assert set(run.history.totals()["samples"].tolist()) == {16}
    assert run.verify(6).verdict == "PASS"
    resumed = cluster2.train(
        model, loader, epochs=2, resume_from=tmp_path / "step-00000004", **options | {"checkpoint_dir": None}
    )
    resumed.wait(60)
    assert np.array_equal(resumed.history.totals()["loss"][-2:], run.history.totals()["loss"][-2:])


def test_data_loader_trains_as_its_settings_do(cluster2: dtkit.Cluster, capsys: pytest.CaptureFixture[str]):
    x, y = small.data()
    samples = [{"features": row, "target": label} for row, label in zip(x, y, strict=True)]

    def collate(batch: list[Any]) -> Any:
        return torch.stack([s["features"] for s in batch]), torch.stack([s["target"] for s in batch])

    loader = DataLoader(samples, batch_size=16, sampler=range(0, 64, 2), collate_fn=collate, num_workers=2)
    options: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "optimizer": small.sgd, "epochs": 1}
    run = cluster2.train(small.net(), loader, **options)
    run.wait(60)
    assert "its collate_fn, num_workers=2 on each rank" in capsys.readouterr().out
    rows = torch.arange(0, 64, 2)
    expected = cluster2.train(small.net(), (x[rows], y[rows]), batch_size=16, shuffle=None, **options)
    expected.wait(60)
    assert run.history.loss()[1].tolist() == pytest.approx(expected.history.loss()[1].tolist())


def test_an_evaluation_takes_the_batches_that_its_data_loader_or_its_argument_says(cluster2: dtkit.Cluster):
    def share(output: torch.Tensor, target: torch.Tensor) -> float:
        """The share of a row in its batch."""
        return 1 / len(target)

    x, y = small.data()
    in_order = {"shuffle": None, "steps": 2}
    losses = []
    for validation, rows_a_rank in (((x, y), 8), (DataLoader(TensorDataset(x, y), batch_size=32), 16)):
        run = small.train(cluster2, validation=validation, metrics={"share": share}, **in_order)
        run.wait(60)
        values = run.history.evaluations[-1].values  # noqa: PD011 - no DataFrame
        assert values["share"] == 1 / rows_a_rank
        losses.append(values["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert run.evaluate((x, y)).values["share"] == 1 / 8  # noqa: PD011 - no DataFrame
    whole = run.evaluate((x, y), batch_size=10**6).values  # noqa: PD011 - no DataFrame
    assert whole["share"] == 2 / small.ROWS
    assert whole["loss"] == pytest.approx(losses[0], rel=1e-6)
    with pytest.raises(ValueError, match=r"batch_size=0; it must be at least 1"):
        run.evaluate((x, y), batch_size=0)

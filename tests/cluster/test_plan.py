"""Plans compared with real engines, and refusals before a training starts."""

from __future__ import annotations

import ctypes
import gc
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import dtkit
from dtkit.planning import fit_check
from dtkit.rpc.protocol import GroupOperations, make_call
from dtkit.strategies.averaging import OuterSGD, ParameterAveraging
from tests.support.marks import slow
from tests.support.small import check_usable, data, net, train

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.cluster
MB = 10**6


class Encoder(nn.Module):
    def __init__(self, words: int = 4000, width: int = 384, length: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 4), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.layers(self.words(x) + self.places(places)).mean(1))


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) if float(x.sum()) > 0 else self.line(-x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(32, 128, batch_first=True), nn.Linear(128, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0][:, -1])


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 3072), nn.ReLU(), nn.Linear(3072, 3072), nn.ReLU(), nn.Linear(3072, 10))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1),
        nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(32 * 24 * 24, 256), nn.ReLU(),
        nn.Linear(256, 10),
    )  # fmt: skip


def rows(count: int, *shape: int, whole: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(4000, (count, *shape), generator=generator) if whole else torch.rand(count, *shape)
    return x, torch.randint(10, (count,), generator=generator)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


# -- memory ----------------------------------------------------------------------------------------------


def reset_peak() -> int | None:
    """Reset this engine's peak memory, and return its resident bytes; None where the system refuses that."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return read_status("VmRSS")


def read_peak() -> int:
    return read_status("VmHWM")


def read_status(name: str) -> int:
    return 1024 * int(re.search(rf"^{name}:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)[1])


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, torch.Tensor], int, Any, Any]] = {
    "perceptron": (perceptron, rows(512, 784), 256, adam, None),
    "convolutions": (convolutions, rows(128, 3, 96, 96), 64, momentum, None),
    "encoder": (Encoder, rows(128, 64, whole=True), 16, adam, None),
    "micro-batches": (perceptron, rows(512, 784), 256, momentum, dtkit.DataParallel(accumulate=2)),
    "averaging": (perceptron, rows(512, 784), 256, momentum, ParameterAveraging(every=2, outer=OuterSGD())),
}


@pytest.mark.filterwarnings("ignore:.*normalizes with the statistics of a batch:UserWarning")
@pytest.mark.parametrize("name", [slow(name) for name in CASES])
def test_predicted_peak_memory_is_within_20_percent(cluster2: dtkit.Cluster, name: str):
    make, (x, y), batch_size, optimizer, strategy = CASES[name]
    strategy = strategy or dtkit.DataParallel()
    loss, model = nn.CrossEntropyLoss(), make()
    train(cluster2, steps=2).wait(60)  # torch loads its modules in the first step
    plan = cluster2.plan(
        model, (x[:4], y[:4]), batch_size=batch_size, optimizer=optimizer, loss=loss, strategies=[strategy]
    )
    part, peaks = cluster2.partition((x, y), seed=0), []
    for _ in range(3):  # the peak of the same training varies by up to a third
        cluster2.current_run.release()
        before = cluster2.run(reset_peak)
        if None in before:
            pytest.skip("the system does not let a process reset its peak")
        options: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "batch_size": batch_size, "strategy": strategy}
        run = cluster2.train(model, part, steps=4, **options)
        run.wait(120)
        peaks.append([peak - initial for peak, initial in zip(cluster2.run(read_peak), before, strict=True)])
    predicted = [row.needed for row in plan.get_rows(strategy)]
    for needed, measured in zip(predicted, zip(*peaks, strict=True), strict=True):
        print(name, f"{needed / MB:.0f} of", *(f"{t / MB:.0f}" for t in sorted(measured)), "MB")
        assert 0.8 * min(measured) <= needed <= 1.2 * max(measured)
    table = run.history.to_pandas()
    assert table[table.step >= 2].sent_bytes.mean() == pytest.approx(plan.rows[0].sent_bytes, rel=0.02)


class Decoder(nn.Module):
    """Model with most of its parameters outside its blocks."""

    def __init__(self, words: int = 3000, width: int = 64) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.words(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))


@pytest.mark.slow
@pytest.mark.parametrize("by", ["parameters", "time"])
def test_plan_counts_modules_outside_the_chain_in_first_and_last_stage(cluster2: dtkit.Cluster, by: str):
    x = torch.randint(3000, (64, 16))
    model, strategy, loss = Decoder(), dtkit.Pipeline(2, 4, balance_by=by), nn.CrossEntropyLoss()
    options: dict[str, Any] = {"batch_size": 32, "optimizer": adam, "loss": loss, "strategies": [strategy]}
    plan = cluster2.plan(model, (x[:4], x[:4, 0]), **options)
    run = cluster2.train(model, (x, x[:, 0]), loss=loss, optimizer=adam, batch_size=32, strategy=strategy, steps=6)
    run.wait(60)
    planned, measured = plan.get_rows(strategy), run.memory(plan).rows
    outside = [4 * 3000 * 64, 4 * 3000 * 65]
    assert all(row.parameters > part for row, part in zip(planned, outside, strict=True))
    assert [row.parameters for row in planned] == pytest.approx([row.parameters for row in measured], rel=0.1)
    rows = run.history.rows()
    for rank in (0, 1):
        sent = rows[(rows["rank"] == rank) & (rows["step"] > 0)][
            "sent_bytes"
        ].min()  # some steps send control data, too
        assert planned[rank].sent_bytes == pytest.approx(sent, rel=0.02)
        assert planned[rank].sent_bytes == 4 * 32 * 16 * 64
    if by == "parameters":  # without measured times, the split is the same
        assert [row.parameters for row in planned] == [row.parameters for row in measured]
        assert [row.optimizer for row in planned] == pytest.approx([row.optimizer for row in measured], rel=0.01)
    splits = [dtkit.Pipeline(2, 4, split=[f"blocks.{k}"]) for k in (1, 5)]
    split_plan = cluster2.plan(model, (x[:4], x[:4, 0]), **(options | {"strategies": splits}))
    assert split_plan.get_rows(splits[0])[0].parameters < split_plan.get_rows(splits[1])[0].parameters


@pytest.mark.slow
def test_model_with_an_unused_block_is_planned_in_equal_stages(cluster2: dtkit.Cluster):
    class PartlyUsed(nn.Module):
        """Model whose second block is never called."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(100, 100), nn.Linear(100, 100)])
            self.head = nn.Linear(100, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks[0](x))

    plan = cluster2.plan(
        PartlyUsed(),
        rows(4, 100),
        batch_size=16,
        optimizer=adam,
        loss=nn.CrossEntropyLoss(),
        strategies=[dtkit.Pipeline(2, 4)],
    )
    assert any("blocks.1 took no part" in note and "taken as equal" in note for note in plan.notes)
    assert plan.rows[0].parameters == plan.rows[1].parameters


@pytest.mark.slow
@pytest.mark.parametrize("make", [slow(DataDependent), Recurrent])
def test_model_that_fails_on_meta_tensors_is_profiled_with_real_ones(
    cluster2: dtkit.Cluster, make: Callable[[], nn.Module]
):
    inputs = torch.rand(4, 4) if make is DataDependent else torch.rand(4, 20, 32)
    plan = cluster2.plan(
        make(),
        (inputs, torch.zeros(4, dtype=torch.long)),
        batch_size=64,
        optimizer=momentum,
        loss=nn.CrossEntropyLoss(),
    )
    assert any("was tried with numbers" in note for note in plan.notes)
    least = 32 * 20 * 4 * 128 * 4 if make is Recurrent else 32 * 4 * 4  # four gates of 128 cells; the inputs
    assert plan.rows[0].activations > least
    assert plan.rows[0].compute_s > 0
    check_usable(cluster2)


# -- benchmark and plan ----------------------------------------------------------------------------------


def test_benchmark_measures_engines_and_links(cluster2: dtkit.Cluster):
    benchmark = cluster2.benchmark()
    assert benchmark.world_size == 2
    assert all(1e8 < flops < 1e13 for flops in benchmark.flops)
    sizes, seconds = zip(*benchmark.all_reduce_timings, strict=True)
    assert sizes[0] == 8
    assert len(sizes) >= 3
    assert seconds[-1] > seconds[0] > 1e-6
    assert math.isnan(benchmark.latency_s[0][0])
    assert 1e-6 < benchmark.latency_s[0][1] == benchmark.latency_s[1][0] < 0.1
    assert 1e6 < benchmark.bandwidth[0][1] < 1e12
    assert 0 <= benchmark.overlap <= 1
    assert cluster2.benchmark() is benchmark
    check_usable(cluster2)


def make_plan(cluster: dtkit.Cluster, **changes: Any) -> Any:
    inputs, targets = data()
    options: dict[str, Any] = {
        "batch_size": 16,
        "optimizer": momentum,
        "loss": nn.CrossEntropyLoss(),
        "data": (inputs[:4], targets[:4]),
    }
    return cluster.plan(net(), **(options | changes))


@pytest.mark.parametrize("cluster", [2, 4], indirect=True)
def test_predicted_bytes_of_a_small_model_are_sent(cluster: dtkit.Cluster):
    plan = make_plan(cluster, strategies=[dtkit.DataParallel()])
    assert plan.benchmark.sums_directly
    run = train(cluster, net(), data(), steps=30)
    run.wait(60)
    rows = run.history.rows()
    expected = (cluster.world_size - 1) * sum(p.nbytes for p in net().parameters())
    assert plan.rows[0].sent_bytes == expected
    assert (rows["sent_bytes"][rows["step"] >= 2] >= expected).all()
    assert float(np.median(rows["sent_bytes"])) == expected


@pytest.mark.slow
def test_plan_leaves_the_cluster_unchanged(cluster2: dtkit.Cluster):
    def count_objects() -> list[int]:
        from dtkit.engine.session import get_session

        return [len(get_session().state.models), len(get_session().state.data)]

    gc.collect()  # objects of earlier tests
    cluster2._engine_group.call_all(make_call(GroupOperations.node_info))
    before = cluster2.run(count_objects)
    plan = make_plan(cluster2)
    assert len(plan.rows) == 2 * len(plan.strategies)
    assert plan.fitting == plan.strategies
    assert all(row.step_s > 0 for row in plan.rows)
    gc.collect()
    cluster2._engine_group.call_all(
        make_call(GroupOperations.node_info)
    )  # engines free unused objects in the next call
    for now, then in zip(cluster2.run(count_objects), before, strict=True):  # runs of earlier tests may have been freed
        assert now[0] <= then[0]
        assert now[1] <= then[1]
    check_usable(cluster2)


@pytest.mark.slow
def test_plan_accepts_a_partition_and_a_training_step(cluster2: dtkit.Cluster):
    part = cluster2.partition(data(), seed=0)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    plan = make_plan(cluster2, data=part, loss=None, training_step=step)
    assert [row.rows for row in plan.get_rows("DataParallel()")] == [8, 8]


@pytest.mark.slow
def test_failure_during_planning_raises_the_engines_error(cluster2: dtkit.Cluster):
    def raise_error(_parameters: Any) -> torch.optim.Optimizer:
        raise RuntimeError("no optimizer here")

    with pytest.raises(dtkit.errors.EngineError, match="no optimizer here"):
        make_plan(cluster2, optimizer=raise_error)
    with pytest.raises(dtkit.errors.EngineError, match=r"returned NoneType; it must return a torch\.optim\.Optimizer"):
        make_plan(cluster2, optimizer=lambda _: None)
    with pytest.raises(dtkit.errors.EngineError, match="mat1 and mat2"):
        make_plan(cluster2, data=(torch.rand(4, 5), torch.zeros(4, dtype=torch.long)))
    check_usable(cluster2)


@pytest.mark.slow
def test_plan_is_refused_while_a_run_is_running(cluster2: dtkit.Cluster):
    run = train(cluster2, steps=100_000)
    try:
        with pytest.raises(dtkit.errors.RunError, match=r"this cluster is training .*pause it"):
            make_plan(cluster2)
        run.pause()
        assert make_plan(cluster2).rows
    finally:
        run.stop()
    check_usable(cluster2)


# -- refusals -------------------------------------------------------------------------------------


def wide(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 3))


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.slow
def test_fit_check_refuses_only_models_that_do_not_fit():
    small, large = wide(2500), wide(3500)  # 25 and 49 MB
    with dtkit.Cluster(1, memory_limit="170MB") as cluster:
        with pytest.raises(ValueError, match=r"does not fit rank 0 .*needs 246 MB .*1[567]\d MB are free for it"):
            fit_check.check_fits(cluster._engine_group, large, adam, dtkit.DataParallel())
        fit_check.check_fits(cluster._engine_group, large, plain, dtkit.DataParallel())  # 147 MB
        run = train(cluster, small, optimizer=plain, steps=3)
        run.wait(60)
        # The next training frees the run's memory, so the run does not count against it (125 MB).
        fit_check.check_fits(cluster._engine_group, small, adam, dtkit.DataParallel())

"""Horovod's interface on engines and in scripts, compared with one process."""

from __future__ import annotations

import importlib.util
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dtkit
from tests.support.marks import slow
from tests.support.small import check_usable

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster

BOUND = 1e-12


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def make_rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(24, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(24, 3, generator=generator, dtype=torch.float64)


def train_alone(passes: int = 1, steps: int = 5) -> list[torch.Tensor]:
    """Train on all rows at once; gradients of several passes add up."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = make_rows()
    for _ in range(steps):
        optimizer.zero_grad()
        (passes * nn.functional.mse_loss(model(inputs), targets)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train_by_horovod(passes: int, groups: int | None, threshold: str) -> list[torch.Tensor]:
    """Train on this rank's rows, from weights that differ before the broadcast."""
    import horovod.torch as hvd

    os.environ["HOROVOD_FUSION_THRESHOLD"] = threshold
    hvd.init()
    model = make_model()
    if hvd.rank() == 1:
        nn.init.zeros_(model[0].weight)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1 if hvd.rank() == 0 else 5.0, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), backward_passes_per_step=passes, groups=groups
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    inputs, targets = (rows[hvd.rank() :: hvd.size()] for rows in make_rows())
    for _ in range(5):
        optimizer.zero_grad()
        for _ in range(passes):
            nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("passes", "groups", "threshold"), [(1, None, "100"), slow(2, 2, "1000000")])
def test_distributed_optimizer_trains_like_one_process(
    cluster2: dtkit.Cluster, passes: int, groups: int | None, threshold: str
):
    expected = train_alone(passes)
    for parameters in cluster2.torchrun(train_by_horovod, passes, groups, threshold, horovod=True):
        assert all((a - b).abs().max() < BOUND for a, b in zip(parameters, expected, strict=True))


def test_only_the_script_finds_horovod(cluster2: dtkit.Cluster, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("import horovod.torch as hvd\nhvd.init()\nassert hvd.size() == 2, hvd.size()\n")
    assert cluster2.torchrun(script, horovod=True) == [0, 0]
    with pytest.raises(dtkit.errors.EngineError, match=r"No module named 'horovod'.*horovod=True"):
        cluster2.torchrun(script)
    assert cluster2.run(lambda: importlib.util.find_spec("horovod") is None) == [True, True]
    check_usable(cluster2)


def run_operations() -> dict[str, Any]:
    import dtkit.integrations.horovod.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    rows = torch.full((rank + 1, 2), float(rank + 1), requires_grad=True)
    gathered = hvd.allgather(rows)
    gathered.sum().backward()
    exchanged, received = hvd.alltoall(torch.arange(3 * size), splits=[1] * (size - 1) + [2 * size + 1])
    empty = torch.empty(0, dtype=torch.int32).as_strided((0,), (0,))  # as numpy's, a stride that torch can't view
    sent = torch.arange(size, dtype=torch.int32) if rank == 0 else empty
    some = hvd.add_process_set([0])
    results = {
        "rows of rank 0": hvd.alltoall(sent, splits=[1 - rank] * size)[0].tolist(),
        "sum": hvd.allreduce(torch.tensor([rank + 1]), op=hvd.Sum).item(),
        "mean of integers": hvd.allreduce(torch.tensor([3 * rank])).item(),
        "max": hvd.allreduce(torch.tensor([rank]), op=hvd.Max).item(),
        "scaled": hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0).tolist(),
        "fp16": hvd.allreduce(torch.ones(2), compression=hvd.Compression.fp16).dtype,
        "gathered": gathered[:, 0].tolist(),
        "gradient": rows.grad.tolist(),
        "broadcast": hvd.broadcast(torch.tensor([rank]), root_rank=1).item(),
        "object": hvd.broadcast_object({"rank": rank}, root_rank=1),
        "objects": hvd.allgather_object("ab"[: rank + 1]),
        "scattered": hvd.reducescatter(torch.arange(6.0).reshape(3, 2), op=hvd.Sum).tolist(),
        "exchanged": exchanged.tolist(),
        "received": received.tolist(),
        "asynchronous": [hvd.synchronize(h).item() for h in [hvd.allreduce_async(torch.ones(1)) for _ in range(3)]],
        "in the set": hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=some).item() if rank == 0 else None,
    }
    hvd.remove_process_set(some)
    hvd.barrier()
    hvd.shutdown()
    assert not hvd.is_initialized()
    return results


def test_operations_use_the_engines_group(cluster2: dtkit.Cluster):
    first, second = cluster2.run(run_operations)
    shared = {
        "sum": 3,
        "mean of integers": 1,
        "max": 1,
        "scaled": [3.0, 3.0],
        "fp16": torch.float32,
        "gathered": [1.0, 2.0, 2.0],
        "broadcast": 1,
        "object": {"rank": 1},
        "objects": ["a", "ab"],
        "asynchronous": [1.0, 1.0, 1.0],
    }
    for results in (first, second):
        assert {name: results[name] for name in shared} == shared
    assert first["gradient"] == [[1.0, 1.0]]
    assert second["gradient"] == [[1.0, 1.0]] * 2
    assert (first["scattered"], second["scattered"]) == ([[0.0, 2.0], [4.0, 6.0]], [[8.0, 10.0]])
    assert (first["exchanged"], first["received"]) == ([0, 0], [1, 1])
    assert (second["exchanged"], second["received"]) == ([1, 2, 3, 4, 5, 1, 2, 3, 4, 5], [5, 5])
    assert (first["in the set"], second["in the set"]) == (1.0, None)
    assert (first["rows of rank 0"], second["rows of rank 0"]) == ([0], [1])
    check_usable(cluster2)


def ask_for_different_things(kind: str) -> str:
    import horovod.torch as hvd

    os.environ |= {"HOROVOD_CHECK": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1"}
    hvd.init()
    tensor = torch.ones(2)
    try:
        if kind == "shape":
            hvd.allreduce(torch.ones(2 + hvd.rank()), name="x")
        elif kind == "dtype":
            hvd.allreduce(tensor.to([torch.float32, torch.float64][hvd.rank()]), name="x")
        elif kind == "root rank":
            hvd.broadcast(tensor, root_rank=hvd.rank(), name="x")
        else:
            (hvd.allreduce if hvd.rank() else hvd.allgather)(tensor, name="x")
    except hvd.HorovodInternalError as error:
        hvd.allreduce(tensor)  # still possible
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", ["shape", slow("dtype"), slow("root rank")])
def test_mismatch_is_reported_on_every_rank_in_strict_mode(cluster2: dtkit.Cluster, kind: str):
    first, second = cluster2.torchrun(ask_for_different_things, kind, horovod=True)
    assert first == second
    assert kind in first


@pytest.mark.slow
def test_operations_that_only_one_rank_asks_for_end_in_strict_mode(cluster2: dtkit.Cluster):
    first, second = cluster2.torchrun(ask_for_different_things, "operation", horovod=True)
    assert "instead, rank 1 waits for allreduce.x" in first
    assert "instead, rank 0 waits for allgather.x" in second


def break_off_on_rank_1(checked: bool) -> tuple[list[str], float]:  # noqa: FBT001
    import horovod.torch as hvd

    from dtkit.integrations.horovod.communicator import Communicator

    os.environ["HOROVOD_CHECK"] = str(int(checked))
    hvd.init()
    exchange_rows = Communicator.exchange_rows

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    if hvd.rank() == 1:
        Communicator.exchange_rows = fail
    errors = []
    for _ in range(2):
        try:
            hvd.alltoall(torch.arange(2))
        except hvd.HorovodInternalError as error:
            errors.append(str(error))
    hvd.shutdown()
    Communicator.exchange_rows = exchange_rows
    hvd.init()
    return errors, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


@pytest.mark.parametrize("checked", [False, slow(True)])
def test_operation_that_breaks_off_on_one_rank_ends_on_all(cluster2: dtkit.Cluster, *, checked: bool):
    (errors, total), (own_errors, own_total) = cluster2.torchrun(break_off_on_rank_1, checked, horovod=True)
    assert own_errors[0] == "planted"
    for later in (errors[1], own_errors[1]):
        assert "has failed on this rank before" in later
    assert total == own_total == 2.0


def sum_until_joined() -> tuple[list[float], int]:
    import horovod.torch as hvd

    hvd.init()
    sums = [hvd.allreduce(torch.ones(1), op=hvd.Sum).item() for _ in range(2 + 3 * hvd.rank())]
    return sums, hvd.join()


@pytest.mark.slow
def test_rank_that_joined_takes_part_with_zeros(cluster2: dtkit.Cluster):
    (first, last), (second, last_of_second) = cluster2.torchrun(sum_until_joined, horovod=True)
    assert first == [2.0, 2.0]
    assert second == [2.0, 2.0, 1.0, 1.0, 1.0]
    assert last == last_of_second == 1


def train_elastically() -> tuple[list[torch.Tensor], int]:
    import horovod.torch as hvd

    hvd.init()
    model = make_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    inputs, targets = (rows[hvd.rank() :: hvd.size()] for rows in make_rows())
    failures = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < 5:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            if state.step == 3 and not failures:
                failures.append(state.step)
                raise hvd.HorovodInternalError("planted")
            state.step += 1
            state.commit()

    state = hvd.elastic.TorchState(model, optimizer, step=0)
    train(state)
    return [p.detach() for p in model.parameters()], len(failures)


@pytest.mark.slow
def test_elastic_run_repeats_the_step_that_failed(cluster2: dtkit.Cluster):
    expected = train_alone()
    for parameters, num_failures in cluster2.torchrun(train_elastically, horovod=True):
        assert num_failures == 1
        assert all((a - b).abs().max() < BOUND for a, b in zip(parameters, expected, strict=True))


def train_with_a_kill(rank_to_kill: int, flag: Path) -> list[torch.Tensor]:
    import horovod.torch as hvd

    hvd.init()
    model = make_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    inputs, targets = (rows[hvd.rank() :: hvd.size()] for rows in make_rows())

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < 5:
            if state.step == 3 and hvd.rank() == rank_to_kill and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            state.step += 1
            state.commit()

    train(hvd.elastic.TorchState(model, optimizer, step=0))
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("rank", [slow(0), 1])
def test_killed_process_of_an_elastic_script_is_started_again(cluster2: dtkit.Cluster, tmp_path: Path, rank: int):
    expected = train_alone()
    for parameters in cluster2.torchrun(train_with_a_kill, rank, tmp_path / "flag", horovod=True):
        assert all((a - b).abs().max() < BOUND for a, b in zip(parameters, expected, strict=True))
    check_usable(cluster2)


def call_what_is_missing() -> list[str]:
    import dtkit.integrations.horovod.torch as hvd

    errors = []
    try:
        hvd.rank()
    except ValueError as error:
        errors.append(str(error))
    hvd.init()
    for call in (
        lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum),
        lambda: hvd.start_timeline("x.json"),
        hvd.mpi_threads_supported,
        lambda: hvd.ProcessSet("communicator"),
    ):
        try:
            call()
        except NotImplementedError as error:
            errors.append(str(error))
    hvd.shutdown()
    return errors


def test_what_is_missing_is_refused_with_a_remedy(cluster2: dtkit.Cluster):
    for errors in cluster2.run(call_what_is_missing):
        assert len(errors) == 5, errors
        assert "hvd.init()" in errors[0]
        assert "use op=hvd.Average" in errors[1]

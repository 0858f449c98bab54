"""User functions on all ranks: results, live rows, output, errors, interrupts."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import dtkit
from dtkit.dashboard.text import progress
from tests.support.small import check_usable
from tests.support.waiting import wait_until

pytestmark = pytest.mark.cluster


def all_reduce_value(value: float) -> tuple[int, float]:
    total = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def test_run_returns_results_by_rank_from_inside_the_process_group(cluster2):
    assert cluster2.run(all_reduce_value, 2.0) == [(0, 6.0), (1, 6.0)]


def test_function_of_a_cell_may_use_classes_helpers_and_globals(cluster2):
    cell = {"__name__": "__main__"}
    exec(
        "import torch\n"
        "SCALE = 3\n"
        "class Base:\n"
        "    def value(self): return 1\n"
        "class Derived(Base):\n"
        "    def value(self): return super().value() + helper()\n"
        "def helper(): return SCALE\n"
        "def main(): return Derived().value() + len(torch.zeros(2))\n",
        cell,
    )
    assert cluster2.run(cell["main"]) == [6, 6]


def report(rows: int) -> str:
    for k in range(rows):
        dtkit.log(loss=1 / (k + 1), samples=torch.tensor(8))
    print("done", dist.get_rank())
    return "x"


def test_rows_and_output_arrive_complete_and_in_order(cluster2):
    task = cluster2.submit(report, 300)
    assert task.result(60) == ["x", "x"]
    for rank in (0, 1):
        rank_rows = [row for row in task.rows if row["rank"] == rank]
        assert [row["index"] for row in rank_rows] == list(range(300))
        assert [row["loss"] for row in rank_rows] == [1 / (k + 1) for k in range(300)]
        assert (rank, f"done {rank}") in task.output
    assert task.to_pandas().shape == (600, 4)
    assert [ax.get_title(loc="left") for ax in task.figure().axes] == ["loss", "samples"]


def wait_for_file(path: str) -> None:
    dtkit.log(before=1)
    while not Path(path).exists():
        pass


def test_rows_arrive_while_the_function_still_runs(cluster2, tmp_path):
    flag = tmp_path / "go"
    task = cluster2.submit(wait_for_file, str(flag))
    arrived = threading.Event()
    task.subscribe(lambda: len(task.rows) == 2 and arrived.set())
    assert arrived.wait(30) or len(task.rows) == 2
    assert not task.done()
    assert "running" in repr(task)
    flag.touch()
    task.result(30)


def test_flood_of_printed_lines_is_limited_and_counted(cluster2):
    def flood() -> None:
        for k in range(5000):
            print(k)

    task = cluster2.submit(flood)
    task.result(60)
    lines = [text for rank, text in task.output if rank == 0]
    assert len(lines) < 1000
    assert any("lines dropped" in line for line in lines)


def test_run_prints_lines_with_their_rank(cluster2, capsys):
    cluster2.run(report, 2)
    out = capsys.readouterr().out
    assert "[0] done 0" in out
    assert "[1] done 1" in out
    assert "[0] loss=0.5 samples=8" in out


def test_nan_and_infinity_arrive_live_as_numbers(cluster2, tmp_path):
    def diverge(path: str) -> None:
        dtkit.log(loss=math.nan, largest=math.inf)
        while not Path(path).exists():
            pass

    task = cluster2.submit(diverge, str(tmp_path / "go"))
    arrived = threading.Event()
    task.subscribe(lambda: len(task.rows) == 2 and arrived.set())
    assert arrived.wait(30) or len(task.rows) == 2
    (tmp_path / "go").touch()
    task.result(30)
    assert all(math.isnan(row["loss"]) and row["largest"] == math.inf for row in task.rows)
    assert task.output == []  # without a warning on their encoding


def test_output_printed_just_before_an_error_arrives(cluster2):
    def fail() -> None:
        for k in range(3):
            dtkit.log(k=k)
        print("last line")
        raise ValueError("now")

    task = cluster2.submit(fail)
    with pytest.raises(dtkit.errors.EngineError, match="now"):
        task.result(30)
    for rank in (0, 1):
        assert [row["k"] for row in task.rows if row["rank"] == rank] == [0, 1, 2]
        assert task.output.count((rank, "last line")) == 1
    check_usable(cluster2)


def test_results_of_successful_ranks_leave_no_file(cluster2):
    def large_or_fail() -> torch.Tensor:
        if dist.get_rank() == 1:
            raise ValueError("no result")
        return torch.zeros(1_000_000)

    def list_files() -> set[str]:
        return {path.name for path in Path("/dev/shm").glob("dtkit-*")}

    before = list_files()
    with pytest.raises(dtkit.errors.EngineError, match="no result"):
        cluster2.run(large_or_fail)
    assert list_files() <= before


def test_lost_engine_ends_the_call_and_interrupts_the_others():
    def endless() -> None:
        print("running")
        while True:
            pass

    with dtkit.Cluster(2) as cluster:
        task = cluster.submit(endless)
        running = threading.Event()
        task.subscribe(lambda: len(task.output) == 2 and running.set())
        assert running.wait(30) or len(task.output) == 2
        psutil.Process(cluster.nodes[1].pid).kill()
        with pytest.raises(dtkit.errors.EngineError) as caught:
            task.result(30)
    assert caught.value.cause.kind == "lost"
    assert str(caught.value).startswith(f"rank 1 on {socket.gethostname()}: the engine of rank 1 is gone")
    assert caught.value.failures[1].kind == "interrupted"  # rank 0, which would have looped forever


@pytest.mark.slow
def test_engine_that_is_lost_while_a_call_is_sent_ends_the_call(monkeypatch: pytest.MonkeyPatch):
    with dtkit.Cluster(2, threads=1) as cluster:
        transport: Any = cluster._engine_group.transport
        send, engine = transport._client.send_apply_request, transport._client._engines[transport.engine_ids[1]]

        def lose_engine(*args: Any, ident: bytes, **options: Any) -> Any:
            if ident == engine.encode():
                assert transport.kill([1])
            return send(*args, ident=ident, **options)

        monkeypatch.setattr(transport._client, "send_apply_request", lose_engine)
        with pytest.raises(dtkit.errors.EngineError, match="the engine of rank 1 is gone"):
            cluster.run(os.getpid)


def ignore_interrupts() -> None:
    print("running")
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                pass


@pytest.mark.slow
def test_cancel_replaces_an_engine_that_ignores_interrupts():
    with dtkit.Cluster(2, threads=1) as cluster:
        before = [node.pid for node in cluster.nodes]
        task, running = cluster.submit(ignore_interrupts), threading.Event()
        task.subscribe(lambda: len(task.output) == 2 and running.set())
        assert running.wait(30) or len(task.output) == 2
        begun = time.monotonic()
        task.cancel()
        assert time.monotonic() - begun < 10
        assert task.cancelled()
        with pytest.raises(dtkit.errors.EngineError, match="is gone"):
            task.result(10)
        check_usable(cluster)
        assert not set(before) & {node.pid for node in cluster.nodes}


@pytest.mark.slow
def test_cancel_returns_in_ten_seconds_and_repair_waits_for_the_replacement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """New engines come only after `cancel` has returned, as on a machine that starts them slowly."""
    with dtkit.Cluster(2, threads=1) as cluster:
        membership, may_start = cluster._engine_group.membership, threading.Event()
        replace_engines = membership.replace_engines

        def replace_late(ranks: Any) -> None:
            assert may_start.wait(60)
            replace_engines(ranks)

        monkeypatch.setattr(membership, "replace_engines", replace_late)
        task = cluster.submit(ignore_interrupts)
        wait_until(lambda: len(task.output) == 2)
        begun = time.monotonic()
        task.cancel()
        assert time.monotonic() - begun < 10
        assert task.cancelled()
        assert "its engines are still being replaced" in capsys.readouterr().out
        may_start.set()
        cluster.repair()
        check_usable(cluster)


def test_call_cancelled_before_it_runs_leaves_the_cluster_usable():
    """The interrupt reaches what a new engine loads for its first step."""

    def endless() -> None:
        while True:
            pass

    with dtkit.Cluster(1, threads=1) as cluster:
        task = cluster.submit(endless)
        task.cancel()
        assert task.cancelled()
        assert cluster.run(lambda: 1) == [1]


def test_closing_the_cluster_ends_a_running_call():
    def endless() -> None:
        while True:
            pass

    with dtkit.Cluster(1) as cluster:
        task = cluster.submit(endless)
    with pytest.raises(dtkit.errors.ClusterClosedError, match="closed during the call"):
        task.result(30)
    with pytest.raises(dtkit.errors.ClusterClosedError):
        cluster.submit(all_reduce_value, 1.0)


def test_error_names_the_failed_rank_and_summarizes_the_others(cluster2):
    def fail() -> None:
        if dist.get_rank() == 1:
            raise ValueError("only here")
        dist.barrier()

    with pytest.raises(dtkit.errors.EngineError) as caught:
        cluster2.run(fail)
    text = str(caught.value)
    assert text.startswith("rank 1 on ")
    assert "ValueError: only here" in text
    assert re.search(r"test_task.py, line \d+, in fail\n    raise ValueError\(.only here.\)\n", text)
    assert "dtkit/engine" not in text
    assert "Traceback of rank 1" in caught.value.full
    assert "rank 0 only lost its peer" in text
    assert caught.value.cause.rank == 1
    check_usable(cluster2)


def test_result_that_cannot_be_pickled_is_named(cluster2):
    with pytest.raises(dtkit.errors.EngineError, match=r"the function's result: .*returns to the notebook") as caught:
        cluster2.run(threading.Lock)
    assert "sent to an engine" not in str(caught.value)
    check_usable(cluster2)


def test_function_that_cannot_be_pickled_is_refused_before_it_runs(cluster2):
    class Holder:
        def __init__(self) -> None:
            self.gate = threading.Lock()

    holder = Holder()
    with pytest.raises(dtkit.errors.SerializationError, match="gate"):
        cluster2.run(lambda: holder.gate)
    with pytest.raises(TypeError, match="function is an int, which can't be called"):
        cluster2.run(3)
    check_usable(cluster2)


@pytest.mark.parametrize("where", ["loop", "collective"])
def test_interrupt_reaches_the_engines(cluster2, where):
    def loop() -> None:
        print("looping")
        while True:
            pass

    def collective() -> None:
        print("looping")
        if dist.get_rank() == 0:
            dist.barrier()
        while True:
            pass

    task = cluster2.submit({"loop": loop, "collective": collective}[where])
    is_sent = threading.Event()

    def interrupt_once() -> None:
        if len(task.output) == 2 and not is_sent.is_set():
            is_sent.set()
            os.kill(os.getpid(), signal.SIGINT)

    task.subscribe(interrupt_once)
    interrupt_once()
    with pytest.raises(KeyboardInterrupt):
        task.display_and_wait()
    with pytest.raises(dtkit.errors.EngineError, match="KeyboardInterrupt"):
        task.result(30)
    check_usable(cluster2)


@pytest.mark.slow
def test_memory_limit_raises_and_keeps_the_engine():
    def allocate(count: int) -> int:
        return len(torch.ones(count))

    with dtkit.Cluster(1, memory_limit="200MB") as cluster:
        assert cluster.run(allocate, 10_000_000) == [10_000_000]
        with pytest.raises(dtkit.errors.EngineError, match="allocate memory"):
            cluster.run(allocate, 100_000_000)
        assert cluster.run(allocate, 10_000_000) == [10_000_000]


# -- whole scripts -------------------------------------------------------------------------------------------


def get_rank_variables() -> list[str | None]:
    return [os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]


def test_functions_see_their_rank_in_the_environment(cluster2: dtkit.Cluster):
    """Lightning takes a process without these variables for rank 0."""
    assert cluster2.run(get_rank_variables) == [["0", "0", "2"], ["1", "1", "2"]]


def test_ranks_that_wait_for_one_that_has_returned_are_told(cluster2, capsys):
    def sum_often() -> None:
        for _ in range(1 + dist.get_rank()):
            dist.all_reduce(torch.ones(1))

    task = cluster2.submit(sum_often)
    texts: list[str] = []

    def has_told() -> bool:
        texts.append(capsys.readouterr().out)
        return "sum_often: rank 0 keeps the other one waiting: it has returned from the call" in "".join(texts)

    wait_until(has_told, 60)
    task.cancel()
    check_usable(cluster2)


class SlowToPickle:
    """Object whose pickling takes until a line of progress was shown."""

    def __init__(self, shown: threading.Event) -> None:
        self._shown = shown

    def __reduce__(self) -> Any:
        assert self._shown.wait(30)
        return (int, (7,))


def test_a_function_that_takes_long_to_pickle_shows_progress(
    cluster2: dtkit.Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    shown, show = threading.Event(), progress._PlainLine.show

    def show_and_note(line: progress._PlainLine, text: str) -> None:
        show(line, text)
        shown.set()

    monkeypatch.setattr(progress._PlainLine, "show", show_and_note)
    slow_object = SlowToPickle(shown)
    assert cluster2.run(lambda: slow_object) == [7, 7]
    assert "pickling <lambda> for 2 engines" in capsys.readouterr().err

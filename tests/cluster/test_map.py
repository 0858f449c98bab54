"""``cluster.map``: order, errors by item, lost engines, interrupts, limits, large arguments."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dtkit
from dtkit.errors import ItemError
from tests.support import small
from tests.support.waiting import wait_until

pytestmark = pytest.mark.cluster


def get_rank() -> int:
    import torch.distributed as dist

    return int(dist.get_rank())


def square(x: int) -> int:
    return x * x


def test_results_come_in_the_order_of_the_items(cluster2: dtkit.Cluster):
    assert cluster2.map(square, range(7)) == [x * x for x in range(7)]
    assert cluster2.map(square, iter([])) == []


def wait_for_the_other(item: int, folder: str) -> int:
    """Return once another item has begun, which needs another engine."""
    Path(folder, str(item)).touch()
    deadline = time.monotonic() + 30
    while not Path(folder, str(1 - item)).exists():
        assert time.monotonic() < deadline
    return get_rank()


def test_engines_compute_items_at_the_same_time(cluster2: dtkit.Cluster, tmp_path: Path):
    assert sorted(cluster2.map(wait_for_the_other, [0, 1], args=[str(tmp_path)])) == [0, 1]


def wait_for_flag(item: int, flag: str) -> int:
    """Item 0 waits until the last one is done."""
    if item == 9:
        Path(flag).touch()
    deadline = time.monotonic() + 30
    while item == 0 and not Path(flag).exists():
        assert time.monotonic() < deadline
    return item


def test_a_long_item_does_not_hold_up_the_others(cluster2: dtkit.Cluster, tmp_path: Path):
    assert cluster2.map(wait_for_flag, range(10), kwargs={"flag": str(tmp_path / "flag")}) == list(range(10))


def test_functions_and_classes_of_a_cell_travel_by_value(cluster2: dtkit.Cluster):
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "SCALE = 3\nclass Scaler:\n    def apply(self, x): return SCALE * x\ndef scale(x): return Scaler().apply(x)\n",
        cell,
    )
    assert cluster2.map(cell["scale"], [1, 2]) == [3, 6]


def add_address(item: int, table: np.ndarray) -> tuple[float, int, int]:
    return float(table[item]), table.ctypes.data, os.getpid()


def test_large_arguments_are_loaded_once_on_each_engine(cluster2: dtkit.Cluster):
    table = np.arange(1_000_000.0)
    results = cluster2.map(add_address, range(8), args=[table])
    assert [value for value, _, _ in results] == list(range(8))
    addresses: dict[int, set[int]] = {}
    for _, address, pid in results:
        addresses.setdefault(pid, set()).add(address)
    assert all(len(found) == 1 for found in addresses.values())


def test_the_arguments_travel_once_to_each_engine(cluster2: dtkit.Cluster, monkeypatch: pytest.MonkeyPatch):
    transport, sizes = cluster2._engine_group.transport, []
    send = transport.send

    def record(rank: int, message: bytes, listen: Any = None) -> Any:
        sizes.append(len(message))
        return send(rank, message, listen)

    monkeypatch.setattr(transport, "send", record)
    table = np.arange(20_000.0)  # small enough to be sent in messages
    cluster2.map(add_address, range(20), args=[table])
    assert sum(size > table.nbytes for size in sizes) == 2


def make_large(item: int) -> np.ndarray:
    return np.full(500_000, float(item))


def test_large_results_arrive(cluster2: dtkit.Cluster):
    results = cluster2.map(make_large, range(3))
    assert [result.sum() for result in results] == [0.0, 500_000.0, 1_000_000.0]


# -- errors ----------------------------------------------------------------------------------------------------


def fail_at_3(item: int) -> int:
    if item == 3:
        raise ValueError("three is too many")
    return item


def test_an_error_names_its_item(cluster2: dtkit.Cluster):
    with pytest.raises(ItemError, match=r"item 3 \(3\): rank \d on .*: ValueError: three is too many") as caught:
        cluster2.map(fail_at_3, range(6))
    assert caught.value.index == 3
    assert "in fail_at_3" in str(caught.value)
    small.check_usable(cluster2)


def test_errors_can_be_returned_in_their_place(cluster2: dtkit.Cluster):
    results = cluster2.map(fail_at_3, range(6), on_error="return")
    assert [r for r in results if not isinstance(r, ItemError)] == [0, 1, 2, 4, 5]
    assert isinstance(results[3], ItemError)
    assert results[3].cause.type == "ValueError"


def return_lock(item: int) -> Any:
    return threading.Lock() if item else 0


def test_a_result_that_cannot_travel_fails_its_item_alone(cluster2: dtkit.Cluster):
    results = cluster2.map(return_lock, range(2), on_error="return")
    assert results[0] == 0
    assert results[1].cause.type == "SerializationError"
    small.check_usable(cluster2)


def exit_python(item: int) -> int:
    if item == 1:
        raise SystemExit(3)
    return item


def test_an_item_that_exits_fails_alone(cluster2: dtkit.Cluster):
    results = cluster2.map(exit_python, range(8), on_error="return")
    assert [r for r in results if not isinstance(r, ItemError)] == [0, *range(2, 8)]
    assert results[1].cause.type == "SystemExit"
    small.check_usable(cluster2)


def test_an_item_that_cannot_travel_is_named(cluster2: dtkit.Cluster):
    with pytest.raises(dtkit.errors.SerializationError, match="item 1"):
        cluster2.map(square, [1, threading.Lock()])
    small.check_usable(cluster2)


def test_wrong_arguments_are_refused(cluster2: dtkit.Cluster):
    with pytest.raises(TypeError, match="can't be called"):
        cluster2.map([1, 2], [1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_error='ignore'"):
        cluster2.map(square, [1], on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"items=5 is an int; give a list"):
        cluster2.map(square, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"args": 3}, r"args=3; give the further arguments as a list, as in args=\[3\]"),
        ({"args": "xy"}, r"args='xy'; give the further arguments as a list"),
        ({"kwargs": [1]}, r"kwargs=\[1\]; give further arguments by name"),
        ({"timeout": -1}, "timeout=-1; it must be a number of seconds above 0"),
        ({"timeout": "3"}, "timeout='3'; it must be a number of seconds"),
    ],
)
def test_further_arguments_of_another_kind_are_refused(cluster2: dtkit.Cluster, options: dict[str, Any], message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        cluster2.map(square, [1], **options)
    with pytest.raises((TypeError, ValueError), match=message):
        cluster2.search(square, {"x": [1]}, **options)


def test_a_map_is_refused_while_a_run_trains(cluster2: dtkit.Cluster):
    run = small.train(cluster2, steps=small.LONG)
    with pytest.raises(dtkit.errors.RunError, match="is training"):
        cluster2.map(square, [1])
    run.pause()
    step = run.status.step
    assert cluster2.map(square, [3]) == [9]
    assert run.step(2) == step + 2
    run.stop()


# -- output ----------------------------------------------------------------------------------------------------


def report(item: int) -> int:
    print("item", item)
    dtkit.log(value=item)
    return item


def test_printed_lines_are_shown_once(cluster2: dtkit.Cluster, capsys: pytest.CaptureFixture[str]):
    cluster2.map(report, range(6))
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line[4:] for line in lines if "item" in line) == [f"item {k}" for k in range(6)]


# -- interrupts, limits, lost engines --------------------------------------------------------------------------


def touch_and_wait(item: int, folder: str) -> None:
    Path(folder, str(item)).touch()
    while True:
        pass


def test_a_map_that_takes_too_long_is_ended(cluster2: dtkit.Cluster, tmp_path: Path):
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"touch_and_wait: 0 items were computed within 1\.0 s, and 2 were"):
        cluster2.map(touch_and_wait, range(5), args=[str(tmp_path)], timeout=1.0)
    assert time.monotonic() - start < 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    small.check_usable(cluster2)


def test_an_interrupt_ends_the_items(cluster2: dtkit.Cluster, tmp_path: Path):
    def interrupt() -> None:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        cluster2.map(touch_and_wait, range(5), args=[str(tmp_path)], timeout=60)
    thread.join(10)
    small.check_usable(cluster2)


def kill_once(item: int, folder: str) -> int:
    """End the engine at the first try of item 2."""
    if item == 2 and not Path(folder, "killed").exists():
        Path(folder, "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item


@pytest.mark.slow
def test_the_item_of_a_lost_engine_is_computed_again(tmp_path: Path):
    with dtkit.Cluster(2, threads=1) as cluster:
        assert cluster.map(kill_once, range(6), args=[str(tmp_path)]) == list(range(6))
        small.check_usable(cluster)


@pytest.mark.slow
def test_the_only_engine_is_replaced(tmp_path: Path):
    with dtkit.Cluster(1, threads=1) as cluster:
        assert cluster.map(kill_once, range(4), args=[str(tmp_path)]) == list(range(4))
        small.check_usable(cluster)


def kill(item: int) -> int:
    if item == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


@pytest.mark.slow
def test_an_item_that_ends_each_engine_fails_after_three():
    with dtkit.Cluster(2, threads=1) as cluster:
        results = cluster.map(kill, range(5), on_error="return")
        assert [r for r in results if not isinstance(r, ItemError)] == [0, 2, 3, 4]
        assert results[1].cause.kind == "lost"
        small.check_usable(cluster)

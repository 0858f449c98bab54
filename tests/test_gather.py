"""Ranks gather before they form a group; and what is told of an error that wraps another."""

from __future__ import annotations

import datetime as dt
import threading
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from dtkit.engine.comm import process_group
from dtkit.engine.observe import error_report
from dtkit.types import ABORT_FLAG, GroupSpec

if TYPE_CHECKING:
    from pathlib import Path


def spec(folder: Path, rank: int, timeout_s: float = 30.0) -> GroupSpec:
    return GroupSpec(rank, 2, 7, "gloo", "cpu", str(folder / "store-7"), "lo", 1, timeout_s)


def test_they_wait_for_each_other(tmp_path: Path):
    other = threading.Thread(target=process_group._wait_for_ranks, args=(spec(tmp_path, 1),))
    other.start()
    process_group._wait_for_ranks(spec(tmp_path, 0))
    other.join(30)
    assert not other.is_alive()


def test_one_that_can_not_join_ends_the_wait(tmp_path: Path):
    (tmp_path / f"store-7{ABORT_FLAG}").touch()
    with pytest.raises(RuntimeError, match="a rank could not join generation 7") as raised:
        process_group._wait_for_ranks(spec(tmp_path, 0))
    assert process_group.is_lost_peer_error(raised.value)


def test_who_comes_last_to_one_that_was_called_off_does_not_join_it(tmp_path: Path):
    """Nobody is missing, but who came first has left: torch would wait for it, and no interrupt gets through."""
    (tmp_path / "store-7.0").touch()
    (tmp_path / f"store-7{ABORT_FLAG}").touch()
    with pytest.raises(RuntimeError, match="a rank could not join generation 7"):
        process_group._wait_for_ranks(spec(tmp_path, 1))


def test_who_leaves_is_not_there_any_more(tmp_path: Path):
    with pytest.raises(RuntimeError, match="did not join"):
        process_group._wait_for_ranks(spec(tmp_path, 0, timeout_s=0.01))
    assert not (tmp_path / "store-7.0").exists()


def test_who_is_missing_is_named(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"ranks \[1\] did not join the group within 0.01 s") as raised:
        process_group._wait_for_ranks(spec(tmp_path, 0, timeout_s=0.01))
    assert process_group.is_lost_peer_error(raised.value)


def test_a_collective_that_timed_out_is_a_victim():
    error = RuntimeError("[unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete")
    assert process_group.is_lost_peer_error(error)


def test_so_is_another_one_that_was_under_way_then(tmp_path: Path):
    """gloo closes the connection when the first one's time is over, and tells the other that, not that it timed out."""
    store, groups = str(tmp_path / "store"), {}

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(dist.FileStore(store, 2), rank, 2, dt.timedelta(seconds=1))

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join(30)
    works = [groups[0].allreduce(torch.ones(4)) for _ in range(2)]
    for work in works:
        with pytest.raises(RuntimeError) as raised:
            work.wait()
        assert process_group.is_lost_peer_error(raised.value), raised.value


def fail() -> None:
    raise RuntimeError("\n  Failed to run stage backward:\n  details") from LookupError("a bad row")


def test_a_wrapped_error_is_told_by_its_cause():
    with pytest.raises(RuntimeError) as raised:
        fail()
    text = error_report.format_message(raised.value)
    assert text.partition("\n")[0] == "Failed to run stage backward: Caused by LookupError: a bad row"
    assert "details" in text
    assert error_report.format_message(ValueError("plain")) == "plain"

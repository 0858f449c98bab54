"""The wait of ranks before they form a group, and the report of a wrapped error."""

from __future__ import annotations

import datetime as dt
import threading
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from dtkit.engine.comm import process_group, rendezvous
from dtkit.engine.observe import error_report
from dtkit.messages import ABORT_FLAG, GroupSpec

if TYPE_CHECKING:
    from pathlib import Path


def spec(folder: Path, rank: int, timeout_s: float = 30.0) -> GroupSpec:
    return GroupSpec(rank, 2, 7, "gloo", "cpu", str(folder / "store-7"), "lo", 1, timeout_s)


def _wait(spec: GroupSpec) -> None:
    rendezvous._wait_for_ranks(spec, rendezvous._FileArrivals(spec))


def test_ranks_wait_for_each_other(tmp_path: Path):
    other = threading.Thread(target=_wait, args=(spec(tmp_path, 1),))
    other.start()
    _wait(spec(tmp_path, 0))
    other.join(30)
    assert not other.is_alive()


def test_a_rank_that_cannot_join_ends_the_wait(tmp_path: Path):
    (tmp_path / f"store-7{ABORT_FLAG}").touch()
    with pytest.raises(RuntimeError, match="a rank could not join generation 7") as raised:
        _wait(spec(tmp_path, 0))
    assert process_group.is_lost_peer_error(raised.value)


def test_the_last_rank_does_not_join_a_canceled_group(tmp_path: Path):
    """All ranks arrived, but the first has left: torch would wait for it, and block interrupts."""
    (tmp_path / "store-7.0").touch()
    (tmp_path / f"store-7{ABORT_FLAG}").touch()
    with pytest.raises(RuntimeError, match="a rank could not join generation 7"):
        _wait(spec(tmp_path, 1))


def test_a_rank_that_gives_up_removes_its_arrival_file(tmp_path: Path):
    with pytest.raises(RuntimeError, match="did not join"):
        _wait(spec(tmp_path, 0, timeout_s=0.01))
    assert not (tmp_path / "store-7.0").exists()


def test_the_timeout_error_names_the_missing_ranks(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"ranks \[1\] did not join the group within 0.01 s") as raised:
        _wait(spec(tmp_path, 0, timeout_s=0.01))
    assert process_group.is_lost_peer_error(raised.value)


def test_a_collective_timeout_is_a_lost_peer_error():
    error = RuntimeError("[unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete")
    assert process_group.is_lost_peer_error(error)


def test_a_collective_pending_during_a_timeout_raises_a_lost_peer_error(tmp_path: Path):
    """gloo closes the connection at the first timeout, so the other collective reports a closed connection."""
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


def test_a_wrapped_error_is_reported_with_its_cause():
    with pytest.raises(RuntimeError) as raised:
        fail()
    text = error_report.format_message(raised.value)
    assert text.partition("\n")[0] == "Failed to run stage backward: Caused by LookupError: a bad row"
    assert "details" in text
    assert error_report.format_message(ValueError("plain")) == "plain"

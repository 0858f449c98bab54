"""Sums over the ranks of one host: equal bits on all ranks, in any number of chunks, and ends of broken connections."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dtkit._util.resources import find_loopback_interface
from dtkit.engine.comm import host_link
from dtkit.engine.comm.host_link import HostLink
from dtkit.engine.comm.host_memory import PIECE_BYTES
from dtkit.engine.comm.process_group import is_lost_peer_error
from dtkit.messages import GroupSpec
from dtkit.planning.cost_model import MAX_WHOLE_SUM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@contextlib.contextmanager
def linked(num_ranks: int, timeout_s: float = 30.0) -> Iterator[list[HostLink]]:
    """Yield the links of all ranks, in one process."""
    connections: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
    for a, b in itertools.combinations(range(num_ranks), 2):
        connections[a][b], connections[b][a] = socket.socketpair()
    links = [HostLink(rank, own, timeout_s) for rank, own in enumerate(connections)]
    try:
        yield links
    finally:
        for link in links:
            link.close()


def on_all(links: Sequence[HostLink], work: Callable[[int, HostLink], Any]) -> list[Any]:
    """Return the results of `work(rank, link)` in one thread for each rank; an error counts as a result."""
    results: list[Any] = [None] * len(links)

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, links[rank])
        except RuntimeError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(links))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_all_ranks_get_the_same_sum_in_the_order_of_ranks(num_ranks: int, dtype: torch.dtype):
    tensors = [torch.randn(9, 5, generator=torch.Generator().manual_seed(k)).mul(100).to(dtype) for k in range(4)]
    expected = tensors[0] + tensors[1]
    for tensor in tensors[2:num_ranks]:
        expected += tensor

    def add(rank: int, link: HostLink) -> torch.Tensor:
        own = tensors[rank].clone()
        link.all_reduce(own)
        return own

    with linked(num_ranks) as links:
        for result in on_all(links, add):
            assert torch.equal(result, expected)
        assert {link.sent_bytes for link in links} == {(num_ranks - 1) * expected.nbytes}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    "size",
    [0, 1, MAX_WHOLE_SUM_BYTES // 4, MAX_WHOLE_SUM_BYTES // 4 + 1, PIECE_BYTES // 4, 3 * PIECE_BYTES // 4 + 2],
)
def test_sums_of_any_size_end_again_and_again(num_ranks: int, size: int):
    """By sockets, all ranks send before they receive; by memory, a piece waits until others have read one before."""
    numbers = torch.arange(float(size))

    def add(rank: int, link: HostLink) -> list[torch.Tensor]:
        owns = [numbers * (rank + 1) + k for k in range(4)]
        for own in owns:
            assert link.can_sum(own)
            link.all_reduce(own)
        return owns

    total = sum(range(1, num_ranks + 1))
    with linked(num_ranks) as links:
        for owns in on_all(links, add):
            assert all(torch.equal(own, numbers * total + k * num_ranks) for k, own in enumerate(owns))
        expected_bytes = num_ranks - 1 if 4 * size <= MAX_WHOLE_SUM_BYTES else 2 * (num_ranks - 1) / num_ranks
        assert {link.sent_bytes for link in links} == {4 * round(expected_bytes * 4 * size)}


def test_large_sums_are_added_in_the_order_of_ranks():
    tensors = [torch.randn(100_000, generator=torch.Generator().manual_seed(k)) for k in range(3)]

    def add(rank: int, link: HostLink) -> torch.Tensor:
        own = tensors[rank].clone()
        link.all_reduce(own)
        return own

    with linked(3) as links:
        for result in on_all(links, add):
            assert torch.equal(result, tensors[0] + tensors[1] + tensors[2])


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("size", [0, 1, 7, PIECE_BYTES // 8, 3 * PIECE_BYTES // 8 + 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_ranks_gather_and_scatter_tensors_of_any_size(num_ranks: int, size: int, dtype: torch.dtype):
    owns = [torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(num_ranks)]
    whole = torch.cat(owns)

    def run(rank: int, link: HostLink) -> list[torch.Tensor]:
        results = []
        for _ in range(3):  # one memory after the other, and the first one again
            gathered, part = torch.empty_like(whole), torch.empty(size, dtype=dtype)
            gathered[rank * size : (rank + 1) * size] = owns[rank]  # as in FSDP2, the own part lies in the output
            link.all_gather(gathered, gathered[rank * size : (rank + 1) * size])
            link.reduce_scatter(part, whole * (rank + 1))
            results += [gathered, part]
        return results

    parts = [whole * (rank + 1) for rank in range(num_ranks)]
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part  # in the order of ranks
    with linked(num_ranks) as links:
        for rank, results in enumerate(on_all(links, run)):
            for gathered, part in zip(results[::2], results[1::2], strict=True):
                assert torch.equal(gathered, whole)
                assert torch.equal(part, total[rank * size : (rank + 1) * size])
        sent_bytes = 3 * 2 * (num_ranks - 1) * size * whole.element_size()
        assert {link.sent_bytes for link in links} == {sent_bytes}


def test_shared_memory_ends_with_the_links():
    def count() -> int:
        return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:dtkit")

    before = count()
    with linked(2) as links:
        on_all(links, lambda _, link: link.all_reduce(torch.zeros(MAX_WHOLE_SUM_BYTES)))
        assert count() == before + 4
    assert count() == before


def test_a_rank_that_ends_while_memory_is_shared_leaves_no_descriptor():
    def add(rank: int, link: HostLink) -> None:
        if rank == 2:
            link.shut_down()
        else:
            link.all_reduce(torch.zeros(MAX_WHOLE_SUM_BYTES))

    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    with linked(3) as links:
        errors = on_all(links, add)
    assert all(is_lost_peer_error(error) for error in errors[:2])
    assert len(list(descriptors.iterdir())) == before


def test_a_started_sum_is_finished_before_a_later_one():
    def add(rank: int, link: HostLink) -> list[float]:
        wait_for_first, wait_for_second = (link.start_all_reduce(torch.tensor(rank + k)) for k in (1.0, 10.0))
        third = torch.tensor([rank + 100.0])
        link.all_reduce(third)
        return [float(wait_for_second()), float(wait_for_first()), float(third)]

    with linked(2) as links:
        assert on_all(links, add) == [[21.0, 3.0, 201.0]] * 2


@pytest.mark.parametrize("size", [3, MAX_WHOLE_SUM_BYTES])
def test_a_rank_that_ends_or_aborts_ends_the_wait_of_the_others(size: int):
    def add(rank: int, link: HostLink) -> None:
        if rank == 1:
            link.shut_down()
        link.all_reduce(torch.zeros(size))

    with linked(3) as links:
        errors = on_all(links, add)
    assert all(is_lost_peer_error(error) for error in errors)


def test_a_rank_that_does_not_answer_in_time_is_an_error_of_a_lost_peer():
    with linked(2) as links:
        links[0].set_timeout(0.01)
        with pytest.raises(RuntimeError, match="timed out waiting 10ms") as raised:
            links[0].all_reduce(torch.zeros(3))
        assert is_lost_peer_error(raised.value)
        with pytest.raises(RuntimeError, match="Connection closed"):  # never the rest of an earlier message
            links[1].all_reduce(torch.zeros(5))


def test_ranks_of_one_host_connect_by_files_that_vanish(tmp_path: Path):
    folder = tmp_path / ("long" * 30)  # longer than the path of a socket may be
    folder.mkdir()
    arrived = threading.Barrier(3)

    def join(rank: int, _: HostLink) -> torch.Tensor:
        spec = GroupSpec(rank, 3, 0, "gloo", "cpu", str(folder / "store-0"), find_loopback_interface(), 1, 30.0)
        link = host_link.connect(spec, lambda: arrived.wait(30) and None)
        assert link is not None
        own = torch.tensor([float(rank)])
        link.all_reduce(own)
        link.close()
        return own

    with linked(3) as links:
        assert [float(total) for total in on_all(links, join)] == [3.0, 3.0, 3.0]
    assert list(folder.iterdir()) == []


def test_ranks_on_another_interface_have_no_link(tmp_path: Path):
    spec = GroupSpec(0, 2, 0, "gloo", "cpu", str(tmp_path / "store-0"), "other0", 1, 30.0)
    assert host_link.connect(spec, pytest.fail) is None

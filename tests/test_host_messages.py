"""Messages by memory of a host: contents, order, reused buffers, errors, and nothing left behind."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from dtkit.engine.comm.host_link import HostLink
from dtkit.engine.comm.host_messages import (
    MAX_MESSAGE_BYTES,
    MAX_UNREAD_BYTES,
    MAX_UNREAD_MESSAGES,
    HostMessages,
)
from dtkit.engine.comm.process_group import is_lost_peer_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def opened(num_ranks: int = 2, timeout_s: float = 30.0) -> Iterator[tuple[list[HostLink], list[HostMessages]]]:
    """Yield the links of all ranks, and their messages, in one process."""
    connections: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
    for a, b in itertools.combinations(range(num_ranks), 2):
        connections[a][b], connections[b][a] = socket.socketpair()
    links = [HostLink(rank, own, timeout_s) for rank, own in enumerate(connections)]
    threads = [threading.Thread(target=link.open_messages) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    try:
        yield links, [link.open_messages() for link in links]
    finally:
        for link in links:
            link.close()


def receive(messages: HostMessages, like: torch.Tensor, source: int) -> torch.Tensor:
    received = torch.empty_like(like)
    messages.start_receive(received, source)()
    return received


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4),
        torch.arange(12.0, dtype=torch.float64).view(3, 4).t(),
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        torch.randn(5).to(torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
        torch.randn(3, requires_grad=True),
    ],
    ids=["plain", "transposed", "scalar", "empty", "bool", "bfloat16", "conjugate", "requires a gradient"],
)
def test_a_tensor_arrives_with_its_type_and_values(tensor: torch.Tensor):
    with opened() as (links, messages):
        messages[0].send(tensor, 1)
        assert torch.equal(receive(messages[1], tensor.detach(), 0), tensor)
        assert links[0].sent_bytes == tensor.nbytes
        assert links[1].sent_bytes == 0


def test_messages_arrive_in_the_order_of_sending_however_they_are_awaited():
    with opened(3) as (_, messages):
        for k in range(40):
            messages[0].send(torch.full((k + 1,), float(k)), 2)
            messages[1].send(torch.full((k + 1,), -float(k)), 2)
        received = [torch.empty(k + 1) for k in range(40) for _ in range(2)]
        waits = [messages[2].start_receive(tensor, k % 2) for k, tensor in enumerate(received)]
        for wait in reversed(waits):
            wait()
    for k in range(40):
        assert torch.equal(received[2 * k], torch.full((k + 1,), float(k)))
        assert torch.equal(received[2 * k + 1], torch.full((k + 1,), -float(k)))


def test_the_sender_may_change_its_tensor_and_uses_buffers_again():
    tensor = torch.zeros(10_000)
    with opened() as (_, messages):
        for k in range(50):
            tensor.fill_(k)
            messages[0].send(tensor, 1)
            tensor.fill_(-1)
            assert receive(messages[1], tensor, 0).unique().tolist() == [k]
        assert count_shared_memories() == 2  # one buffer, which each rank maps


def test_a_buffer_is_not_written_again_before_it_is_read():
    with opened() as (_, messages):
        for k in range(20):
            messages[0].send(torch.full((1000,), float(k)), 1)
        assert [float(receive(messages[1], torch.empty(1000), 0).mean()) for _ in range(20)] == list(range(20))


def test_more_messages_than_the_socket_holds_are_sent_while_the_receiver_reads():
    """The answers to them fill the socket too, because the sender reads none while it waits for room."""

    def send() -> None:
        for k in range(3000):
            messages[0].send(torch.tensor(float(k)), 1)

    with opened() as (_, messages):
        sender = threading.Thread(target=send)
        sender.start()
        received = [float(receive(messages[1], torch.empty(()), 0)) for _ in range(3000)]
        sender.join(30)
        assert received == list(range(3000))


@pytest.mark.parametrize(("size", "most"), [(1, MAX_UNREAD_MESSAGES), (MAX_UNREAD_BYTES // 16, 4)])
def test_a_sender_waits_while_too_much_is_unread(size: int, most: int):
    """Otherwise the first stage would send all of an evaluation while the last one computes its first batch."""
    tensor = torch.zeros(size)
    with opened(timeout_s=0.05) as (_, messages):
        for _ in range(most):
            messages[0].send(tensor, 1)
            messages[0].wait_for_room(1)
        messages[0].send(tensor, 1)
        for link in messages:
            link.set_timeout(30)
        for _ in range(5):
            receive(messages[1], tensor, 0)
            messages[0].wait_for_room(1)
            messages[0].send(tensor, 1)
        messages[0].set_timeout(0.05)
        with pytest.raises(RuntimeError, match="timed out"):
            messages[0].wait_for_room(1)


def test_autograd_accepts_a_buffer_that_a_message_has_filled():
    """torch's stages receive into tensors of which a graph was made already."""
    with opened() as (_, messages):
        received, weight = torch.zeros(3), nn.Parameter(torch.ones(3))
        product = (received * weight).sum()
        messages[0].send(torch.arange(3.0), 1)
        messages[1].start_receive(received, 0)()
        product.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0, 1, 2]


@pytest.mark.parametrize("end", [HostLink.shut_down, HostLink.close])
def test_a_rank_that_aborts_or_ends_ends_the_wait_of_the_other(end: Callable[[HostLink], None]):
    errors = []

    def wait() -> None:
        with pytest.raises(RuntimeError) as raised:
            receive(messages[1], torch.zeros(3), 0)
        errors.append(raised.value)

    with opened() as (links, messages):
        waiting = threading.Thread(target=wait)
        waiting.start()
        end(links[0])
        waiting.join(30)
        assert is_lost_peer_error(errors[0])
        with pytest.raises(RuntimeError, match="Connection closed"):
            messages[1].send(torch.zeros(3), 0)


def test_a_message_of_a_rank_that_has_ended_still_arrives():
    with opened() as (links, messages):
        messages[0].send(torch.tensor(3.0), 1)
        links[0].close()
        assert receive(messages[1], torch.empty(()), 0) == 3


def test_a_message_that_does_not_come_in_time_is_an_error_of_a_lost_peer():
    with opened() as (links, messages):
        links[0].set_timeout(0.01)
        with pytest.raises(RuntimeError, match="timed out waiting 10ms") as raised:
            receive(messages[0], torch.zeros(3), 1)
        assert is_lost_peer_error(raised.value)


def test_memory_and_descriptors_end_with_the_links():
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    with opened(3) as (_, messages):
        messages[0].send(torch.zeros(3), 1)
        messages[0].send(torch.zeros(3), 2)
        receive(messages[1], torch.zeros(3), 0)  # the other one is never received
        assert count_shared_memories() == 3
    assert count_shared_memories() == 0
    assert len(list(descriptors.iterdir())) == before


def test_large_messages_and_those_of_devices_go_another_way():
    assert HostMessages.can_send(torch.empty(MAX_MESSAGE_BYTES, dtype=torch.uint8))
    assert not HostMessages.can_send(torch.empty(MAX_MESSAGE_BYTES + 1, dtype=torch.uint8))
    assert not HostMessages.can_send(torch.empty(3, device="meta"))
    assert not HostMessages.can_send(torch.zeros(3).to_sparse())


def count_shared_memories() -> int:
    """Return how many times this process has mapped a buffer."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:dtkit")

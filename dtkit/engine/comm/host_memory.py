"""Sums over the ranks of one host, by memory that all of them see.

gloo sends gradients through the kernel's loopback, which copies them several times in several threads. Here, each rank
copies its numbers once into memory of its own that the others can read. It then adds one part for all ranks, and reads
the other parts where the other ranks have added them: a reduce-scatter and an all-gather, without messages but those
that wake a rank.

Large tensors go piece by piece, so that a rank's memory stays small. It has no name: it ends with the last process that
has it, however that process ends.
"""

from __future__ import annotations

import mmap
import os
import socket
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PIECE_BYTES = 2**22  # larger pieces were not faster
_NUM_PIECES = 2  # a rank writes one, while another rank may still read the one before


class HostMemory:
    """Memory of all ranks of one host. Each rank writes its own, and reads all."""

    def __init__(self, rank: int, connections: Sequence[socket.socket], meet: Callable[[], None]) -> None:
        """Share this rank's memory with all others. A collective.

        `connections` has one to each other rank, in the order of ranks. `meet` returns once all ranks have called it.
        """
        self._rank, self._meet = rank, meet
        own = os.memfd_create("dtkit", os.MFD_CLOEXEC)
        descriptors: list[int] = []
        try:
            os.ftruncate(own, _NUM_PIECES * PIECE_BYTES)
            for connection in connections:
                socket.send_fds(connection, [b"m"], [own])
            for connection in connections:
                descriptors.append(receive_descriptor(connection))  # noqa: PERF401 - closed below, if a later one fails
            in_order = [*descriptors[:rank], own, *descriptors[rank:]]
            self._memories = [mmap.mmap(descriptor, 0) for descriptor in in_order]
        finally:
            for descriptor in [own, *descriptors]:
                os.close(descriptor)
        self._next_piece = 0

    def all_reduce(self, flat: torch.Tensor) -> None:
        """Sum a flat tensor in place, adding in the order of ranks. A collective."""
        for piece in torch.split(flat, PIECE_BYTES // flat.element_size()):
            self._sum_piece(piece)

    def all_gather(self, output: torch.Tensor, own: torch.Tensor) -> None:
        """Gather the flat tensors of all ranks into `output`, in the order of ranks. A collective."""
        rows = output.view(len(self._memories), -1)
        for begin in range(0, len(own), PIECE_BYTES // own.element_size()):
            columns = slice(begin, begin + PIECE_BYTES // own.element_size())
            memories = self._begin_piece(own[columns])
            memories[self._rank].copy_(own[columns])
            self._meet()
            for row, memory in zip(rows, memories, strict=True):
                row[columns].copy_(memory)

    def reduce_scatter(self, output: torch.Tensor, terms: torch.Tensor) -> None:
        """Sum the flat `terms` of all ranks, of which each rank gets its part in `output`. A collective."""
        num_ranks = len(self._memories)
        rows = terms.view(num_ranks, -1)
        width = PIECE_BYTES // terms.element_size() // num_ranks
        for begin in range(0, len(output), width):
            piece = rows[:, begin : begin + width]
            memories = [memory.view(piece.shape) for memory in self._begin_piece(piece)]
            memories[self._rank].copy_(piece)
            self._meet()
            _add([memory[self._rank] for memory in memories], output[begin : begin + width])

    def _begin_piece(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Return the memory of each rank for the next piece, flat.

        A rank that begins the next piece but one has met all others in the next. By then, they have read this one.
        """
        begin = self._next_piece * PIECE_BYTES
        self._next_piece = (self._next_piece + 1) % _NUM_PIECES
        return [
            torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=begin) for memory in self._memories
        ]

    def _sum_piece(self, piece: torch.Tensor) -> None:
        memories = self._begin_piece(piece)
        parts = piece.tensor_split(len(memories))
        terms = [memory.tensor_split(len(memories)) for memory in memories]
        memories[self._rank].copy_(piece)
        self._meet()
        own = parts[self._rank]
        _add([term[self._rank] for term in terms], own)
        terms[self._rank][self._rank].copy_(own)
        self._meet()
        for rank, part in enumerate(parts):
            if rank != self._rank:
                part.copy_(terms[rank][rank])


def _add(terms: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    torch.add(terms[0], terms[1], out=total)
    for term in terms[2:]:
        total.add_(term)


def receive_descriptor(connection: socket.socket) -> int:
    """Return a descriptor that another rank has sent. The socket's timeout limits the wait."""
    data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not data or not descriptors:
        raise ConnectionResetError("it has ended before it shared its memory")
    return descriptors[0]

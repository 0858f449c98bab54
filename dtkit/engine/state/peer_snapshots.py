"""Snapshots in memory: every rank keeps a copy of its part of a job, and one of the part of another rank.

What is lost with a rank is then in its peer's memory, and what it goes back to with everybody's own, so that no disk is
needed: diskless checkpointing with neighbours as mirrors (Plank, Li and Puening, IEEE TPDS 9(10), 1998). Which rank
keeps whose part goes by the hosts, so that one that is lost as a whole takes no part along with its copy, as far as
that can be (the placement of Gemini, Wang et al., SOSP 2023).

It is a collective between two steps. A rank may die in the midst of it, so the copies of the snapshot before are let
go only when all ranks have said that they have theirs: at any moment one of the two is whole. Copies lie in the
process's own memory, those of a GPU's tensors too, and end with the job.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import socket
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dtkit._util import formatting
from dtkit.checkpoint.json_values import UnsupportedValueError
from dtkit.cluster import resources
from dtkit.engine.comm.cancellable_wait import CancellableWait
from dtkit.engine.state.capture import all_gather_json, view_state
from dtkit.engine.state.packing import PackedLayout, unpack_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.job import Job
    from dtkit.engine.state.capture import ShardedState

_CHUNK_BYTES = 32 * 2**20  # bytes that are sent at once: each piece has the time that a collective may take


@dataclasses.dataclass(frozen=True)
class PeerSnapshot:
    """What one rank keeps of one snapshot: packed parts, by the rank whose they are."""

    step: int
    parts_by_rank: dict[int, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(part.nbytes for part in self.parts_by_rank.values())


def take_snapshot(job: Job, snapshots: list[PeerSnapshot], spare_bytes: int | None) -> dict[str, Any]:
    """Copy this rank's part of a job and exchange it, in place of what is `kept`. A collective.

    `spare` is how many bytes of a limit on this process steps leave; None without one. {"error": why no rank keeps any
    now, or None; "seconds": for which training stood still}. Nothing is raised that would be the state's fault, or for
    want of memory: then what is kept stays, and training goes on.
    """
    begun = time.perf_counter()
    try:
        error = _take_snapshot(job, snapshots, spare_bytes)
    except UnsupportedValueError as problem:  # on all ranks alike
        error = str(problem)
    return {"error": error, "seconds": time.perf_counter() - begun}


def _take_snapshot(job: Job, snapshots: list[PeerSnapshot], spare_bytes: int | None) -> str | None:
    group = job.context.group
    if group is None or group.world_size == 1:  # as many as were left over
        return None
    packing = PackedLayout(view_state(job))
    steps = [copies.step for copies in snapshots]
    told = all_gather_json(group, {"bytes": packing.nbytes, "host": socket.gethostname(), "steps": steps})
    _drop_incomplete(snapshots, [one["steps"] for one in told])
    hosts, sizes = [one["host"] for one in told], [one["bytes"] for one in told]
    shift = choose_peer_distance(hosts)
    source, target = (group.rank - shift) % group.world_size, (group.rank + shift) % group.world_size
    needed = packing.nbytes + sizes[source]
    held = sum(copies.nbytes for copies in snapshots)
    blocks = _allocate_blocks([packing.nbytes, sizes[source]])
    room = _compute_available_bytes(
        spare_bytes, held, hosts.count(socket.gethostname())
    )  # the next ones are made before these are let go
    fits = bool(blocks) and 2 * needed <= room
    short = (
        None
        if fits
        else f"{formatting.format_bytes(2 * needed)} of the {formatting.format_bytes(room)} that training leaves"
    )
    lacking = [f"rank {rank} would need {short}" for rank, short in enumerate(all_gather_json(group, short)) if short]
    if lacking:
        return "; ".join(lacking)
    mine, theirs = blocks
    packing.pack_into(mine)
    _exchange_blocks(group, (mine, target), (theirs, source), max(sizes))
    found = PeerSnapshot(job.step, {group.rank: mine, source: theirs})
    snapshots.append(found)
    # waits: a collective, limited by the process group's timeout
    group.barrier()
    snapshots[:] = [found]
    return None


def _drop_incomplete(snapshots: list[PeerSnapshot], steps_by_rank: Sequence[Sequence[int]]) -> None:
    """Let go of what an exchange that was broken off has left on some ranks only."""
    common = set.intersection(*map(set, steps_by_rank))
    snapshots[:] = [copies for copies in snapshots if common and copies.step == max(common)]


def choose_peer_distance(hosts: Sequence[str]) -> int:
    """How many ranks further a rank's copy is kept, of the hosts by rank: on another host for as many as can be."""
    n = len(hosts)
    return max(range(1, n), key=lambda d: (sum(hosts[r] != hosts[(r + d) % n] for r in range(n)), -d))


def _compute_available_bytes(spare_bytes: int | None, snapshot_bytes: int, ranks_on_host: int) -> int:
    """Bytes that snapshots may take here, with those that are `held`; so many ranks have this host's memory."""
    room = resources.read_memory().free // ranks_on_host + snapshot_bytes
    return room if spare_bytes is None else min(room, spare_bytes)


def _allocate_blocks(sizes: Sequence[int]) -> list[torch.Tensor]:
    """Memory of these sizes; none where the process may not have as much."""
    try:
        return [torch.empty(size, dtype=torch.uint8) for size in sizes]
    except (RuntimeError, MemoryError):  # torch has no class of its own for it, on a CPU
        return []


def _exchange_blocks(
    group: Group, outgoing: tuple[torch.Tensor, int], incoming: tuple[torch.Tensor, int], max_bytes: int
) -> None:
    """Send (all of a block, to a rank), and receive (one, from a rank)."""
    waiter, limit = CancellableWait(group.has_lost_connection), dt.timedelta(seconds=group.timeout_s)
    for begin in range(0, max_bytes, _CHUNK_BYTES):
        piece = slice(begin, begin + _CHUNK_BYTES)
        works = []
        if len(sent := outgoing[0][piece]):
            works.append(dist.isend(sent, outgoing[1]))
        if len(received := incoming[0][piece]):
            works.append(dist.irecv(received, incoming[1]))
        waiter.wait([work for work in works if work is not None], limit)


def find_own_part(snapshots: Sequence[PeerSnapshot], step: int, rank: int) -> ShardedState | None:
    """A rank's part as of a step; None where it is not kept."""
    return next((unpack_state(copies.parts_by_rank[rank]) for copies in snapshots if copies.step == step), None)


def export_parts(snapshots: Sequence[PeerSnapshot], step: int, ranks: Sequence[int]) -> list[ShardedState]:
    """These ranks' parts as of a step, which are kept here."""
    (copies,) = [copies for copies in snapshots if copies.step == step]
    return [unpack_state(copies.parts_by_rank[rank]) for rank in ranks]

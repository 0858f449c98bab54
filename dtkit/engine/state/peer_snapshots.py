"""Snapshots in memory: each rank keeps a copy of its part of a job, and a copy of another rank's part.

After the loss of a rank, its part is still in its peer's memory. All ranks return to the snapshot's step without a
disk. This is diskless checkpointing with neighbors as mirrors (Plank, Li and Puening, IEEE TPDS 9(10), 1998). If
possible, peers are on different hosts, so that the loss of one doesn't destroy both copies. Gemini does so, too (Wang
et al., SOSP 2023).

A snapshot is a collective between two steps, and a rank may end during it. Ranks therefore free the previous snapshot
only after all of them have the new one. Copies are in the memory of the process, those of a GPU's tensors too, and are
freed with the job.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import socket
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dtkit._util import formatting, resources
from dtkit.checkpoint.json_values import UnsupportedValueError
from dtkit.engine.comm.cancellable_wait import CancellableWait
from dtkit.engine.state.capture import all_gather_json, view_state
from dtkit.engine.state.packing import PackedLayout, unpack_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.state.shards import ShardedState
    from dtkit.engine.state.visitor import StatefulJob
    from dtkit.messages import SnapshotReport

_CHUNK_BYTES = 32 * 2**20  # sent at once; the timeout of a collective applies to each chunk


@dataclasses.dataclass(frozen=True)
class PeerSnapshot:
    """One rank's copies of a snapshot: packed parts, by the rank that they belong to."""

    step: int
    parts_by_rank: dict[int, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Size of all parts."""
        return sum(part.nbytes for part in self.parts_by_rank.values())


def take_snapshot(job: StatefulJob, snapshots: list[PeerSnapshot], spare_bytes: int | None) -> SnapshotReport:
    """Copy this rank's part of a job, exchange it with peers, and replace `snapshots`. A collective.

    `spare_bytes` is the part of this process's memory limit that steps don't need; None without a limit. State that
    can't be saved and a lack of memory are reported, not raised: then `snapshots` stay, and training continues.
    """
    begun = time.perf_counter()
    try:
        error = _take_snapshot(job, snapshots, spare_bytes)
    except UnsupportedValueError as problem:  # on all ranks
        error = str(problem)
    return {"error": error, "seconds": time.perf_counter() - begun}


def _take_snapshot(job: StatefulJob, snapshots: list[PeerSnapshot], spare_bytes: int | None) -> str | None:
    group = job.context.group
    if group is None or group.world_size == 1:  # after shrinking to one rank
        return None
    layout, host = PackedLayout(view_state(job)), socket.gethostname()
    steps = [snapshot.step for snapshot in snapshots]
    reports = all_gather_json(group, {"bytes": layout.nbytes, "host": host, "steps": steps})
    _drop_incomplete(snapshots, [report["steps"] for report in reports])
    hosts, sizes = [report["host"] for report in reports], [report["bytes"] for report in reports]
    distance = choose_peer_distance(hosts)
    source, target = (group.rank - distance) % group.world_size, (group.rank + distance) % group.world_size
    blocks = _allocate_blocks([layout.nbytes, sizes[source]])
    available = _compute_available_bytes(spare_bytes, snapshots, hosts.count(host))
    error = _check_memory(group, 2 * (layout.nbytes + sizes[source]), available, is_allocated=bool(blocks))
    if error:
        return error
    own_block, peer_block = blocks
    layout.pack_into(own_block)
    _exchange_blocks(group, (own_block, target), (peer_block, source), max(sizes))
    new_snapshot = PeerSnapshot(job.step, {group.rank: own_block, source: peer_block})
    snapshots.append(new_snapshot)
    # waits: a collective, limited by the process group's timeout
    group.barrier()
    snapshots[:] = [new_snapshot]
    return None


def _drop_incomplete(snapshots: list[PeerSnapshot], steps_by_rank: Sequence[Sequence[int]]) -> None:
    """Drop snapshots that an aborted exchange has left on only some ranks."""
    common_steps = set.intersection(*map(set, steps_by_rank))
    snapshots[:] = [snapshot for snapshot in snapshots if common_steps and snapshot.step == max(common_steps)]


def _check_memory(group: Group, needed_bytes: int, available_bytes: int, *, is_allocated: bool) -> str | None:
    """Return a text on the ranks that lack memory for this snapshot and the next one, or None. A collective."""
    needed, available = formatting.format_bytes(needed_bytes), formatting.format_bytes(available_bytes)
    is_enough = is_allocated and needed_bytes <= available_bytes
    problems = all_gather_json(group, None if is_enough else f"{needed} of the {available} that training leaves")
    return "; ".join(f"rank {rank} would need {problem}" for rank, problem in enumerate(problems) if problem) or None


def choose_peer_distance(hosts: Sequence[str]) -> int:
    """Return the distance to the rank that keeps a copy, so that as many copies as possible are on another host."""
    n = len(hosts)
    return max(range(1, n), key=lambda d: (sum(hosts[r] != hosts[(r + d) % n] for r in range(n)), -d))


def _compute_available_bytes(spare_bytes: int | None, snapshots: Sequence[PeerSnapshot], ranks_on_host: int) -> int:
    """Return the memory that snapshots may use here, including the current ones. Ranks of a host share its memory."""
    snapshot_bytes = sum(snapshot.nbytes for snapshot in snapshots)
    available = resources.read_memory().free // ranks_on_host + snapshot_bytes
    return available if spare_bytes is None else min(available, spare_bytes)


def _allocate_blocks(sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return blocks of these sizes; none if the process can't have as much memory."""
    try:
        return [torch.empty(size, dtype=torch.uint8) for size in sizes]
    except (RuntimeError, MemoryError):  # on a CPU torch has no class for it
        return []


def _exchange_blocks(
    group: Group, outgoing: tuple[torch.Tensor, int], incoming: tuple[torch.Tensor, int], max_bytes: int
) -> None:
    """Send `outgoing` (block, target), and receive `incoming` (block, source)."""
    waiter, limit = CancellableWait(group.has_lost_connection), dt.timedelta(seconds=group.timeout_s)
    for begin in range(0, max_bytes, _CHUNK_BYTES):
        chunk = slice(begin, begin + _CHUNK_BYTES)
        works = []
        if len(sent := outgoing[0][chunk]):
            works.append(dist.isend(sent, outgoing[1]))
        if len(received := incoming[0][chunk]):
            works.append(dist.irecv(received, incoming[1]))
        waiter.wait([work for work in works if work is not None], limit)


def find_own_part(snapshots: Sequence[PeerSnapshot], step: int, rank: int) -> ShardedState | None:
    """Return a rank's part as of a step, or None if it isn't here."""
    return next((unpack_state(snapshot.parts_by_rank[rank]) for snapshot in snapshots if snapshot.step == step), None)


def export_parts(snapshots: Sequence[PeerSnapshot], step: int, ranks: Sequence[int]) -> list[ShardedState]:
    """Return these ranks' parts as of a step, which are kept here."""
    (snapshot,) = [snapshot for snapshot in snapshots if snapshot.step == step]
    return [unpack_state(snapshot.parts_by_rank[rank]) for rank in ranks]

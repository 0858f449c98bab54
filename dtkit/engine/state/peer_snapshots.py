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
from dtkit.engine.comm.cancellable_wait import Waiter
from dtkit.engine.state.capture import share, tell
from dtkit.engine.state.packing import Packing, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.job import Job
    from dtkit.engine.state.capture import Captured

_PIECE = 32 * 2**20  # bytes that are sent at once: each piece has the time that a collective may take


@dataclasses.dataclass(frozen=True)
class Copies:
    """What one rank keeps of one snapshot: packed parts, by the rank whose they are."""

    step: int
    parts: dict[int, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(part.nbytes for part in self.parts.values())


def take(job: Job, kept: list[Copies], spare: int | None) -> dict[str, Any]:
    """Copy this rank's part of a job and exchange it, in place of what is `kept`. A collective.

    `spare` is how many bytes of a limit on this process steps leave; None without one. {"error": why no rank keeps any
    now, or None; "seconds": for which training stood still}. Nothing is raised that would be the state's fault, or for
    want of memory: then what is kept stays, and training goes on.
    """
    begun = time.perf_counter()
    try:
        error = _taken(job, kept, spare)
    except UnsupportedValueError as problem:  # on all ranks alike
        error = str(problem)
    return {"error": error, "seconds": time.perf_counter() - begun}


def _taken(job: Job, kept: list[Copies], spare: int | None) -> str | None:
    group = job.setting.group
    if group is None or group.world_size == 1:  # as many as were left over
        return None
    packing = Packing(share(job))
    steps = [copies.step for copies in kept]
    told = tell(group, {"bytes": packing.nbytes, "host": socket.gethostname(), "steps": steps})
    _keep_common(kept, [one["steps"] for one in told])
    hosts, sizes = [one["host"] for one in told], [one["bytes"] for one in told]
    shift = distance(hosts)
    source, target = (group.rank - shift) % group.world_size, (group.rank + shift) % group.world_size
    needed = packing.nbytes + sizes[source]
    held = sum(copies.nbytes for copies in kept)
    blocks = _blocks([packing.nbytes, sizes[source]])
    room = _room(spare, held, hosts.count(socket.gethostname()))  # the next ones are made before these are let go
    fits = bool(blocks) and 2 * needed <= room
    short = None if fits else f"{formatting.size(2 * needed)} of the {formatting.size(room)} that training leaves"
    lacking = [f"rank {rank} would need {short}" for rank, short in enumerate(tell(group, short)) if short]
    if lacking:
        return "; ".join(lacking)
    mine, theirs = blocks
    packing.fill(mine)
    _exchange(group, (mine, target), (theirs, source), max(sizes))
    found = Copies(job.step, {group.rank: mine, source: theirs})
    kept.append(found)
    # waits: a collective, limited by the process group's timeout
    group.barrier()
    kept[:] = [found]
    return None


def _keep_common(kept: list[Copies], steps: Sequence[Sequence[int]]) -> None:
    """Let go of what an exchange that was broken off has left on some ranks only."""
    common = set.intersection(*map(set, steps))
    kept[:] = [copies for copies in kept if common and copies.step == max(common)]


def distance(hosts: Sequence[str]) -> int:
    """How many ranks further a rank's copy is kept, of the hosts by rank: on another host for as many as can be."""
    n = len(hosts)
    return max(range(1, n), key=lambda d: (sum(hosts[r] != hosts[(r + d) % n] for r in range(n)), -d))


def _room(spare: int | None, held: int, ranks: int) -> int:
    """Bytes that snapshots may take here, with those that are `held`; so many ranks have this host's memory."""
    room = resources.memory().free // ranks + held
    return room if spare is None else min(room, spare)


def _blocks(sizes: Sequence[int]) -> list[torch.Tensor]:
    """Memory of these sizes; none where the process may not have as much."""
    try:
        return [torch.empty(size, dtype=torch.uint8) for size in sizes]
    except (RuntimeError, MemoryError):  # torch has no class of its own for it, on a CPU
        return []


def _exchange(group: Group, mine: tuple[torch.Tensor, int], theirs: tuple[torch.Tensor, int], longest: int) -> None:
    """Send (all of a block, to a rank), and receive (one, from a rank)."""
    waiter, limit = Waiter(group.ended), dt.timedelta(seconds=group.timeout_s)
    for begin in range(0, longest, _PIECE):
        piece = slice(begin, begin + _PIECE)
        works = []
        if len(sent := mine[0][piece]):
            works.append(dist.isend(sent, mine[1]))
        if len(received := theirs[0][piece]):
            works.append(dist.irecv(received, theirs[1]))
        waiter.wait([work for work in works if work is not None], limit)


def own(kept: Sequence[Copies], step: int, rank: int) -> Captured | None:
    """A rank's part as of a step; None where it is not kept."""
    return next((unpack(copies.parts[rank]) for copies in kept if copies.step == step), None)


def give(kept: Sequence[Copies], step: int, ranks: Sequence[int]) -> list[Captured]:
    """These ranks' parts as of a step, which are kept here."""
    (copies,) = [copies for copies in kept if copies.step == step]
    return [unpack(copies.parts[rank]) for rank in ranks]

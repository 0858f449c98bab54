"""A trap in dtkit's own code: forming the process group runs no code of the user's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tests.faults.trap import Sprung

if TYPE_CHECKING:
    from tests.faults.trap import Trap


def plant(trap: Trap) -> None:
    """On an engine: have its rank pass the trap when it next forms a group."""
    from dtkit.engine.comm.process_group import Group

    if dist.get_rank() != trap.rank:
        return
    form: Any = Group.__init__

    def passing_by(group: Group, spec: Any) -> None:
        Group.__init__ = form  # type: ignore[method-assign]
        trap.pass_by("forming")
        form(group, spec)

    Group.__init__ = passing_by  # type: ignore[method-assign]


def fail_on(rank: int) -> None:
    """On all engines: an error on one of them, which breaks up the group."""
    if dist.get_rank() == rank:
        raise Sprung("so that the group is formed anew")
    dist.barrier()

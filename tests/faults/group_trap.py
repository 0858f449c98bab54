"""A trap in dtkit's own code, since forming the process group runs no user code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tests.faults.trap import TrapError

if TYPE_CHECKING:
    from tests.faults.trap import Trap


def plant_in_group(trap: Trap) -> None:
    """Let the trap's rank trigger it when this engine next forms a group."""
    from dtkit.engine.comm.process_group import Group

    if dist.get_rank() != trap.rank:
        return
    init: Any = Group.__init__

    def trigger_and_form(group: Group, *args: Any, **options: Any) -> None:
        Group.__init__ = init  # type: ignore[method-assign]
        trap.trigger("forming")
        init(group, *args, **options)

    Group.__init__ = trigger_and_form  # type: ignore[method-assign]


def fail_on(rank: int) -> None:
    """Raise an error on one rank, which breaks the group of all engines."""
    if dist.get_rank() == rank:
        raise TrapError("so that the group is formed again")
    dist.barrier()

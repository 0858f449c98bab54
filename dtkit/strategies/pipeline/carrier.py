"""How messages between stages travel: through memory of their host, or by torch's process group."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.pipelining import schedules

from dtkit._util.torch_private import POST_P2P
from dtkit.engine.comm.cancellable_wait import LARGE_MESSAGE_BYTES, CancellableWait

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from dtkit.engine.comm.host_messages import HostMessages
    from dtkit.engine.comm.process_group import Group


@dataclasses.dataclass(frozen=True)
class HostWork:
    """A message through memory that is under way."""

    wait: Callable[[], None]


Work = HostWork | dist.Work
"""A message that is under way."""


class TorchCarrier:
    """Messages by torch's process group."""

    def __init__(self, group: Group, device: torch.device, largest_bytes: int) -> None:
        """The largest message has `largest_bytes`."""
        self._group, self._is_cpu = group, device.type == "cpu"
        self._torch_post: Any = vars(schedules)[POST_P2P]
        self._needs_cancellable_wait = self._is_cpu and largest_bytes >= LARGE_MESSAGE_BYTES

    @functools.cached_property
    def _cancellable_wait(self) -> CancellableWait:
        return CancellableWait(self._group.has_lost_connection)

    def post(self, ops: list[dist.P2POp], desc: str | None = None) -> list[Work]:
        """Start sends and receives. NCCL returns one work for several."""
        works: list[Work] = self._torch_post(ops, desc)
        return works

    def wait(self, work: Work) -> None:
        """Wait for a message as long as for a collective.

        gloo's connections keep the timeout of the group's creation, so each wait needs its own. NCCL enforces its
        timeout itself, and would block the host if given one.
        """
        assert isinstance(work, dist.Work)
        timeout = dt.timedelta(seconds=self._group.timeout_s)
        if self._needs_cancellable_wait:
            self._cancellable_wait.wait([work], timeout)
        elif self._is_cpu:
            work.wait(timeout)
        else:
            # waits: limited by NCCL
            work.wait()


class HostCarrier:
    """Messages through memory of the ranks' host; those that are too large for it go another way."""

    def __init__(self, messages: HostMessages, otherwise: TorchCarrier) -> None:
        self._messages, self._otherwise = messages, otherwise

    def post(self, ops: list[dist.P2POp], desc: str | None = None) -> list[Work]:
        """Start sends and receives."""
        works: list[Work] = []
        for op in ops:
            works += [self._start(op)] if self._messages.can_send(op.tensor) else self._otherwise.post([op], desc)
        return works

    def _start(self, op: dist.P2POp) -> HostWork:
        if op.op is dist.irecv:
            return HostWork(self._messages.start_receive(op.tensor, op.peer))
        self._messages.send(op.tensor, op.peer)
        return HostWork(functools.partial(self._messages.wait_for_room, op.peer))

    def wait(self, work: Work) -> None:
        """Wait for a message. A sent one has left already; this waits only if too many are unread."""
        if isinstance(work, HostWork):
            # waits: limited by the group's timeout
            work.wait()
        else:
            self._otherwise.wait(work)


Carrier = HostCarrier | TorchCarrier


def make_carrier(group: Group, device: torch.device, largest_bytes: int) -> Carrier:
    """Return the faster way between the ranks of a group, for messages up to `largest_bytes`. A collective."""
    by_torch = TorchCarrier(group, device, largest_bytes)
    messages = group.open_messages() if device.type == "cpu" else None
    return by_torch if messages is None else HostCarrier(messages, by_torch)

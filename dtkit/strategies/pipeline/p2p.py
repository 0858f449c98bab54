"""Messages between stages as torch's schedules send, receive and await them: marked, and awaited no longer than told.

All of its schedules post messages by one function of their module, and wait for them by another. While a step runs,
these two are ours: what is posted is marked as begun, by what it is labelled with, and what is awaited as blocked in.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch.distributed.pipelining import schedules

from dtkit.engine.observe.phase_timer import BETWEEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch.distributed as dist

    from dtkit.engine.observe.phase_timer import Phases

_POST, _WAIT = "_batch_p2p", "_wait_batch_p2p"  # the functions in which they do all their posting and waiting
_LABEL = "dtkit_message"

Label = tuple[str, tuple[int, int]]
"""A phase of :data:`dtkit.history.message_times.PHASES`, and (stage, micro-batch)."""


def labelled(ops: list[dist.P2POp], phase: str, stage: int, micro_batch: int) -> list[dist.P2POp]:
    """What is to be sent or received of one message: told which."""
    for op in ops:
        setattr(op, _LABEL, (phase, (stage, micro_batch)))
    return ops


class Traffic:
    """One rank's messages."""

    def __init__(self, phases: Phases, wait: Callable[[dist.Work], None]) -> None:
        """`wait` waits until that has come or gone."""
        self._phases, self._await = phases, wait
        self._post: Any = vars(schedules)[_POST]
        self._under_way: dict[int, Label] = {}  # by the identity of a work, which who posted it keeps

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Have torch's schedules post and wait here."""
        names = vars(schedules)
        before = {name: names[name] for name in (_POST, _WAIT)}
        self._under_way.clear()
        names.update({_POST: self.post, _WAIT: self.wait})
        try:
            yield
        finally:
            names.update(before)

    def post(self, ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
        """Begin to send and receive all these. NCCL makes one work of several, which counts as the last of them."""
        labels: list[Label | None] = [getattr(op, _LABEL, None) for op in ops]
        for label in dict.fromkeys(labels):
            if label is not None:
                self._phases.enter(*label)
        works: list[dist.Work] = self._post(ops, desc)
        for work, label in zip(works, labels if len(works) == len(ops) else labels[-1:] * len(works), strict=True):
            if label is not None:
                self._under_way[id(work)] = label
        return works

    def wait(self, works: Sequence[dist.Work | None]) -> None:
        """Until all have come or gone, message by message."""
        mine = [work for work in works if work is not None]
        for work in mine:
            label = self._under_way.pop(id(work), None)
            if label is not None:
                self._phases.keep(*label)
            self._await(work)
        if mine:
            self._phases.enter(BETWEEN)

"""Messages between stages as torch's schedules send, receive and await them: marked, and awaited no longer than told.

All of its schedules post messages by one function of their module, and wait for them by another. While a step runs,
these two are ours: what is posted is marked as begun, by what it is labelled with, and what is awaited as blocked in.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch.distributed.pipelining import schedules

from dtkit.engine.observe.phase_timer import BETWEEN_PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch.distributed as dist

    from dtkit.engine.observe.phase_timer import PhaseTimer

_POST_FUNCTION, _WAIT_FUNCTION = (
    "_batch_p2p",
    "_wait_batch_p2p",
)  # the functions in which they do all their posting and waiting
_LABEL_ATTRIBUTE = "dtkit_message"

MessageLabel = tuple[str, tuple[int, int]]
"""A phase of :data:`dtkit.history.message_times.MESSAGE_PHASES`, and (stage, micro-batch)."""


def label_ops(ops: list[dist.P2POp], phase: str, stage: int, micro_batch: int) -> list[dist.P2POp]:
    """What is to be sent or received of one message: told which."""
    for op in ops:
        setattr(op, _LABEL_ATTRIBUTE, (phase, (stage, micro_batch)))
    return ops


class P2PTracer:
    """One rank's messages."""

    def __init__(self, phases: PhaseTimer, wait: Callable[[dist.Work], None]) -> None:
        """`wait` waits until that has come or gone."""
        self._phases, self._wait_for_work = phases, wait
        self._torch_post: Any = vars(schedules)[_POST_FUNCTION]
        self._labels_by_work: dict[int, MessageLabel] = {}  # by the identity of a work, which who posted it keeps

    @contextlib.contextmanager
    def intercept(self) -> Iterator[None]:
        """Have torch's schedules post and wait here."""
        names = vars(schedules)
        before = {name: names[name] for name in (_POST_FUNCTION, _WAIT_FUNCTION)}
        self._labels_by_work.clear()
        names.update({_POST_FUNCTION: self.post_ops, _WAIT_FUNCTION: self.wait_for})
        try:
            yield
        finally:
            names.update(before)

    def post_ops(self, ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
        """Begin to send and receive all these. NCCL makes one work of several, which counts as the last of them."""
        labels: list[MessageLabel | None] = [getattr(op, _LABEL_ATTRIBUTE, None) for op in ops]
        for label in dict.fromkeys(labels):
            if label is not None:
                self._phases.enter(*label)
        works: list[dist.Work] = self._torch_post(ops, desc)
        for work, label in zip(works, labels if len(works) == len(ops) else labels[-1:] * len(works), strict=True):
            if label is not None:
                self._labels_by_work[id(work)] = label
        return works

    def wait_for(self, works: Sequence[dist.Work | None]) -> None:
        """Until all have come or gone, message by message."""
        mine = [work for work in works if work is not None]
        for work in mine:
            label = self._labels_by_work.pop(id(work), None)
            if label is not None:
                self._phases.continue_phase(*label)
            self._wait_for_work(work)
        if mine:
            self._phases.enter(BETWEEN_PHASES)

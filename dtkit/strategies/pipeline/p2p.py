"""Messages between stages: timed, and awaited with a timeout.

torch's schedules post messages by one function of their module, and wait for them by another. During a step dtkit
replaces both, to record phases when messages are posted and awaited.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch.distributed.pipelining import schedules

from dtkit._util.torch_private import POST_P2P, WAIT_P2P
from dtkit.engine.observe.phase_timer import BETWEEN_PHASES
from dtkit.strategies.patching import replace_functions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch.distributed as dist

    from dtkit.engine.observe.phase_timer import PhaseTimer
    from dtkit.strategies.pipeline.carrier import Carrier, Work

_LABEL_ATTRIBUTE = "dtkit_message"

MessageLabel = tuple[str, tuple[int, int]]
"""One of :data:`dtkit.history.comm_time.MESSAGE_PHASES`, and (stage, micro-batch)."""


def label_ops(ops: list[dist.P2POp], phase: str, stage: int, micro_batch: int) -> list[dist.P2POp]:
    """Return the sends or receives of one message, labelled with it."""
    for op in ops:
        setattr(op, _LABEL_ATTRIBUTE, (phase, (stage, micro_batch)))
    return ops


class P2PTracer:
    """Recorder of one rank's messages."""

    def __init__(self, phases: PhaseTimer, carrier: Carrier) -> None:
        """Record in `phases` the messages that `carrier` carries."""
        self._phases, self._carrier = phases, carrier
        self._labels_by_work: dict[int, MessageLabel] = {}  # by id; torch's schedule keeps the works alive

    @contextlib.contextmanager
    def intercept(self) -> Iterator[None]:
        """Replace the functions by which torch's schedules post and wait, within the context."""
        self._labels_by_work.clear()
        with replace_functions(schedules, {POST_P2P: self.post_ops, WAIT_P2P: self.wait_for}):
            yield

    def post_ops(self, ops: list[dist.P2POp], desc: str | None = None) -> list[Work]:
        """Start sends and receives. NCCL returns one work for several, which gets the last label."""
        labels: list[MessageLabel | None] = [getattr(op, _LABEL_ATTRIBUTE, None) for op in ops]
        for label in dict.fromkeys(labels):
            if label is not None:
                self._phases.enter(*label)
        works = self._carrier.post(ops, desc)
        for work, label in zip(works, labels if len(works) == len(ops) else labels[-1:] * len(works), strict=True):
            if label is not None:
                self._labels_by_work[id(work)] = label
        return works

    def wait_for(self, works: Sequence[Work | None]) -> None:
        """Wait for each message."""
        pending = [work for work in works if work is not None]
        for work in pending:
            label = self._labels_by_work.pop(id(work), None)
            if label is not None:
                self._phases.continue_phase(*label)
            self._carrier.wait(work)
        if pending:
            self._phases.enter(BETWEEN_PHASES)

"""What each node did when in the last step, as strips: the live timeline and the kept one draw these.

The time that a node was blocked in a collective is cut where the last node arrived (:mod:`dtkit.history.comm_time`):
before that it waited, after it data moved. Messages between stages are cut already
(:mod:`dtkit.history.message_times`): into waiting, and sending or receiving. What is between phases is left empty. Of
many nodes some are shown: those that are asked for, and others at equal distances.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.history import comm_time, message_times

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dtkit.history.timeline import Timeline

KINDS = (
    "data",
    "forward",
    "backward",
    "backward input",
    "backward weight",
    "waiting",
    "send",
    "receive",
    "communication",
    "update",
    "other",
)
"""What a strip is made of; as the phases of :mod:`dtkit.dashboard.timing`, with a pipeline's two halves of backward and
its messages."""

NUMBERED = tuple(kind for kind in KINDS if kind.startswith(("forward", "backward")))
"""Of which a box carries its micro-batch's number."""

STRIPS = 16
"""Nodes at most."""

SPANS = 1500
"""Spans at most: 15 kB on their way to a page."""

_NAMED = {message_times.SYNC_PHASE: "communication", message_times.WAIT_PHASE: "waiting"}
_BOX = np.dtype(
    [("rank", "i4"), ("kind", "u1"), ("stage", "i4"), ("micro_batch", "i4"), ("begin", "f8"), ("end", "f8")]
)


@dataclasses.dataclass(frozen=True)
class Strip:
    """Boxes of one step in seconds from its begin, by rank and time; `plan` is the schedule behind them, if known.

    `boxes` and `plan` have the fields rank, kind (an index of ``BUILTIN_SCHEDULES``), stage, micro_batch (both -1 for
    none), begin and end.
    """

    step: int
    seconds: float
    ranks: tuple[int, ...]
    boxes: np.ndarray
    plan: np.ndarray
    piped: bool
    note: str


def strip(timeline: Timeline | None, wanted: Iterable[int] = ()) -> Strip | None:
    """The last step of a timeline; None where there is none."""
    if timeline is None or not len(timeline.spans):
        return None
    step = int(timeline.spans["step"].max())
    spans = comm_time.split_wait_spans(timeline.select(step))
    spans = spans[spans["end"] > spans["begin"]]
    if not len(spans):
        return None
    start, end = float(spans["begin"].min()), float(spans["end"].max())
    piped = bool((spans["micro_batch"] >= 0).any())
    boxes = _boxes(spans, start)
    ranks = _chosen(np.unique(boxes["rank"]), wanted)
    boxes = boxes[np.isin(boxes["rank"], ranks)]
    while len(boxes) > SPANS:  # the shortest say least
        boxes = boxes[boxes["end"] - boxes["begin"] > np.median(boxes["end"] - boxes["begin"])]
    plan = _planned(timeline, step, start, ranks) if piped else np.empty(0, _BOX)
    return Strip(step, max(end - start, 1e-9), ranks, boxes, plan, piped, _note(timeline, step, piped=piped))


def _chosen(ranks: np.ndarray, wanted: Iterable[int]) -> tuple[int, ...]:
    """The ranks to show, in order."""
    if len(ranks) <= STRIPS:
        return tuple(int(rank) for rank in ranks)
    named = [rank for rank in wanted if rank in ranks][: STRIPS // 2]
    even = ranks[np.linspace(0, len(ranks) - 1, STRIPS - len(named)).astype(int)]
    return tuple(sorted({*named, *(int(rank) for rank in even)}))


def _boxes(spans: np.ndarray, start: float) -> np.ndarray:
    boxes = np.zeros(len(spans), _BOX)
    for name in ("rank", "stage", "micro_batch"):
        boxes[name] = spans[name]
    boxes["begin"], boxes["end"] = spans["begin"] - start, spans["end"] - start
    boxes["kind"] = _kinds(spans["phase"])
    return boxes[np.lexsort((boxes["begin"], boxes["rank"]))]


def _kinds(phases: np.ndarray) -> np.ndarray:
    names, place = np.unique(phases, return_inverse=True)
    plain = [message_times.get_phase_kind(str(name)) for name in names]
    known = [_NAMED.get(name, name) for name in plain]
    numbers = [KINDS.index(name) if name in KINDS else KINDS.index("other") for name in known]
    return np.asarray(numbers, "u1")[place]


def _planned(timeline: Timeline, step: int, start: float, ranks: tuple[int, ...]) -> np.ndarray:
    """The schedule played through with the measured durations, on the same clock, where the timeline knows one."""
    if timeline.schedule is None:
        return np.empty(0, _BOX)
    spans = timeline.simulate_schedule(step).spans
    return _boxes(spans[np.isin(spans["rank"], ranks)], start)


def _note(timeline: Timeline, step: int, *, piped: bool) -> str:
    if not piped:
        return f"step {step:,}"
    measured, ideal = formatting.share(timeline.measure_bubble(step)), formatting.share(timeline.get_ideal_bubble())
    return f"step {step:,} · bubble {measured} measured, {ideal} by {timeline.ideal_bubble_source}"

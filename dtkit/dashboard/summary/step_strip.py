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

BOX_KINDS = (
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
"""What a strip is made of; as the phases of :mod:`dtkit.dashboard.summary.timing`, with a pipeline's two halves of backward and
its messages."""

NUMBERED_KINDS = tuple(kind for kind in BOX_KINDS if kind.startswith(("forward", "backward")))
"""Of which a box carries its micro-batch's number."""

MAX_NODES = 16
"""Nodes at most."""

MAX_BOXES = 1500
"""Spans at most: 15 kB on their way to a page."""

_KIND_BY_PHASE = {message_times.SYNC_PHASE: "communication", message_times.WAIT_PHASE: "waiting"}
_BOX_DTYPE = np.dtype(
    [("rank", "i4"), ("kind", "u1"), ("stage", "i4"), ("micro_batch", "i4"), ("begin", "f8"), ("end", "f8")]
)


@dataclasses.dataclass(frozen=True)
class StepStrip:
    """Boxes of one step in seconds from its begin, by rank and time; `plan` is the schedule behind them, if known.

    `boxes` and `plan` have the fields rank, kind (an index of ``BUILTIN_SCHEDULES``), stage, micro_batch (both -1 for
    none), begin and end.
    """

    step: int
    duration_s: float
    ranks: tuple[int, ...]
    boxes: np.ndarray
    plan: np.ndarray
    is_pipelined: bool
    note: str


def make_step_strip(timeline: Timeline | None, preferred_ranks: Iterable[int] = ()) -> StepStrip | None:
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
    boxes = _make_boxes(spans, start)
    ranks = _select_ranks(np.unique(boxes["rank"]), preferred_ranks)
    boxes = boxes[np.isin(boxes["rank"], ranks)]
    while len(boxes) > MAX_BOXES:  # the shortest say least
        boxes = boxes[boxes["end"] - boxes["begin"] > np.median(boxes["end"] - boxes["begin"])]
    plan = _make_planned_boxes(timeline, step, start, ranks) if piped else np.empty(0, _BOX_DTYPE)
    return StepStrip(
        step, max(end - start, 1e-9), ranks, boxes, plan, piped, _describe_step(timeline, step, is_pipelined=piped)
    )


def _select_ranks(ranks: np.ndarray, preferred_ranks: Iterable[int]) -> tuple[int, ...]:
    """The ranks to show, in order."""
    if len(ranks) <= MAX_NODES:
        return tuple(int(rank) for rank in ranks)
    named = [rank for rank in preferred_ranks if rank in ranks][: MAX_NODES // 2]
    even = ranks[np.linspace(0, len(ranks) - 1, MAX_NODES - len(named)).astype(int)]
    return tuple(sorted({*named, *(int(rank) for rank in even)}))


def _make_boxes(spans: np.ndarray, start: float) -> np.ndarray:
    boxes = np.zeros(len(spans), _BOX_DTYPE)
    for name in ("rank", "stage", "micro_batch"):
        boxes[name] = spans[name]
    boxes["begin"], boxes["end"] = spans["begin"] - start, spans["end"] - start
    boxes["kind"] = _find_kind_indices(spans["phase"])
    return boxes[np.lexsort((boxes["begin"], boxes["rank"]))]


def _find_kind_indices(phases: np.ndarray) -> np.ndarray:
    names, place = np.unique(phases, return_inverse=True)
    plain = [message_times.get_phase_kind(str(name)) for name in names]
    known = [_KIND_BY_PHASE.get(name, name) for name in plain]
    numbers = [BOX_KINDS.index(name) if name in BOX_KINDS else BOX_KINDS.index("other") for name in known]
    return np.asarray(numbers, "u1")[place]


def _make_planned_boxes(timeline: Timeline, step: int, start: float, ranks: tuple[int, ...]) -> np.ndarray:
    """The schedule played through with the measured durations, on the same clock, where the timeline knows one."""
    if timeline.schedule is None:
        return np.empty(0, _BOX_DTYPE)
    spans = timeline.simulate_schedule(step).spans
    return _make_boxes(spans[np.isin(spans["rank"], ranks)], start)


def _describe_step(timeline: Timeline, step: int, *, is_pipelined: bool) -> str:
    if not is_pipelined:
        return f"step {step:,}"
    measured, ideal = (
        formatting.format_percent(timeline.measure_bubble(step)),
        formatting.format_percent(timeline.get_ideal_bubble()),
    )
    return f"step {step:,} · bubble {measured} measured, {ideal} by {timeline.ideal_bubble_source}"

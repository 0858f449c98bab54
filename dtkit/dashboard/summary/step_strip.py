"""The phases of one of the last steps as strips, for the live timeline and the figure.

The time of a node in a collective is split at the arrival of the last node (:mod:`dtkit.history.comm_time`). Before,
the node waited; after, data moved. Messages between stages are already split into waiting, and sending or receiving.
Time between phases is left empty. Of many nodes, the preferred ones are shown, and others at equal distances.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.summary.step_range import read_range_totals
from dtkit.dashboard.summary.timing import WINDOW_STEPS
from dtkit.history import comm_time
from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dtkit.dashboard.run_view import RunView
    from dtkit.history.history import History
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
"""Kinds of boxes: the phases of :mod:`dtkit.dashboard.summary.timing`, with halves of backward and with messages."""

NUMBERED_KINDS = tuple(kind for kind in BOX_KINDS if kind.startswith(("forward", "backward")))
"""Kinds of boxes with the number of a micro-batch."""

MAX_NODES = 16
"""Largest number of nodes."""

MAX_BOXES = 1500
"""Largest number of boxes, which are 15 kB in a message."""

MAX_TYPICAL_FACTOR = 1.5
"""Largest ratio of a step's duration to the median for which it is a typical one."""

_MIN_STEPS = 5  # that a median needs
_KIND_BY_PHASE = {comm_time.SYNC_PHASE: "communication", comm_time.WAIT_PHASE: "waiting"}
_BOX_DTYPE = np.dtype(
    [("rank", "i4"), ("kind", "u1"), ("stage", "i4"), ("micro_batch", "i4"), ("begin", "f8"), ("end", "f8")]
)


@dataclasses.dataclass(frozen=True)
class StepStrip:
    """Boxes of one step in seconds from its begin, by rank and time; `plan` is the schedule, if known.

    `boxes` and `plan` have the fields rank, kind (an index of ``BOX_KINDS``), stage, micro_batch (both -1 for
    none), begin and end.
    """

    step: int
    duration_s: float
    ranks: tuple[int, ...]
    boxes: np.ndarray
    plan: np.ndarray
    is_pipelined: bool
    note: str


def read_step_strip(
    run: RunView, preferred_ranks: Iterable[int] = (), steps: tuple[int, int] | None = None
) -> StepStrip | None:
    """Return the timeline of one of a run's last steps, or of a range of `steps`; None without any.

    Its note says if newer steps have none, as after an attach, or if no step of the range has one.
    """
    return make_step_strip(run.timeline, preferred_ranks, run.history, state=run.status.state, steps=steps)


def find_last_step(history: History) -> int | None:
    """Return the last step that has rows; None without rows."""
    return int(history.rows(len(history) - 1)["step"][-1]) if len(history) else None


def make_step_strip(
    timeline: Timeline | None,
    preferred_ranks: Iterable[int] = (),
    history: History | None = None,
    *,
    state: State | None = None,
    steps: tuple[int, int] | None = None,
) -> StepStrip | None:
    """Return a typical one of the last steps of a timeline, or of a range of `steps`; None without any.

    The durations of steps are known from the `history`; without it, this is the last step. It is also that while the
    run's `state` isn't an end, unless the last step took far longer than others.
    """
    if timeline is None or not len(timeline.spans):
        return None
    step, words = _choose_last(timeline, history, state) if steps is None else _choose_in(timeline, history, *steps)
    spans = comm_time.split_collective_waits(timeline.select_spans(step))
    spans = spans[spans["end"] > spans["begin"]]
    if not len(spans):
        return None
    start, end = float(spans["begin"].min()), float(spans["end"].max())
    is_pipelined = bool((spans["micro_batch"] >= 0).any())
    boxes = _make_boxes(spans, start)
    ranks = _select_ranks(np.unique(boxes["rank"]), preferred_ranks)
    boxes = boxes[np.isin(boxes["rank"], ranks)]
    while len(boxes) > MAX_BOXES:  # drop the shortest boxes
        boxes = boxes[boxes["end"] - boxes["begin"] > np.median(boxes["end"] - boxes["begin"])]
    plan = _make_planned_boxes(timeline, step, start, ranks) if is_pipelined else np.empty(0, _BOX_DTYPE)
    note = words + (_describe_bubble(timeline, step) if is_pipelined else "")
    return StepStrip(step, max(end - start, 1e-9), ranks, boxes, plan, is_pipelined, note)


def _choose_last(timeline: Timeline, history: History | None, state: State | None) -> tuple[int, str]:
    """Return one of the last steps with spans, and what it is in words."""
    steps, is_live = timeline.steps, state is not None and not state.has_ended
    newest = steps[-1]
    if history is None:
        return newest, f"step {newest:,}"
    last_step = None if state is State.RUNNING else find_last_step(history)  # rows arrive before their timeline
    if last_step is not None and last_step > newest:
        return newest, f"step {newest:,} ({_describe_range(newest + 1, last_step)} no timeline)"
    totals = history.read_valid_totals(history.num_steps - WINDOW_STEPS)
    if len(totals) < _MIN_STEPS:
        return newest, f"step {newest:,}"
    median_s = float(np.median(totals["step_s"]))
    if is_live and _measure_duration_s(timeline, newest) <= MAX_TYPICAL_FACTOR * median_s:
        return newest, f"step {newest:,}"
    return _choose_typical(timeline, steps, median_s, f"the last {len(totals)}")


def _choose_in(timeline: Timeline, history: History | None, first_step: int, last_step: int) -> tuple[int, str]:
    """Return a typical step of a range, or else the nearest one with spans, and what it is in words."""
    steps = np.array(timeline.steps)
    inside = steps[(steps >= first_step) & (steps <= last_step)]
    if len(inside) and first_step == last_step:
        return first_step, f"step {first_step:,}"
    if len(inside):
        seconds = [] if history is None else read_range_totals(history, first_step, last_step)["step_s"].tolist()
        median_s = float(np.median(seconds or [_measure_duration_s(timeline, step) for step in inside]))
        return _choose_typical(timeline, inside.tolist(), median_s, f"steps {first_step:,} to {last_step:,}")
    distances = np.maximum(first_step - steps, 0) + np.maximum(steps - last_step, 0)
    nearest = int(steps[distances.argmin()])
    return nearest, f"step {nearest:,} ({_describe_range(first_step, last_step)} no timeline)"


def _choose_typical(timeline: Timeline, steps: Sequence[int], median_s: float, which: str) -> tuple[int, str]:
    """Return the step whose duration is nearest to the median, and how it is related to that."""
    durations = {step: _measure_duration_s(timeline, step) for step in steps}
    step = min(steps, key=lambda step: abs(durations[step] - median_s))
    ratio = durations[step] / median_s if median_s > 0 else math.inf
    if 1 / MAX_TYPICAL_FACTOR <= ratio <= MAX_TYPICAL_FACTOR:
        return step, f"step {step:,}, a typical one of {which}"
    return step, f"step {step:,}, {ratio:.1f} times as long as the median of {which}"


def _measure_duration_s(timeline: Timeline, step: int) -> float:
    spans = timeline.select_spans(step)
    return float(spans["end"].max() - spans["begin"].min())


def _select_ranks(ranks: np.ndarray, preferred_ranks: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks to show, in order."""
    if len(ranks) <= MAX_NODES:
        return tuple(int(rank) for rank in ranks)
    preferred = [rank for rank in preferred_ranks if rank in ranks][: MAX_NODES // 2]
    spread = ranks[np.linspace(0, len(ranks) - 1, MAX_NODES - len(preferred)).astype(int)]
    return tuple(sorted({*preferred, *(int(rank) for rank in spread)}))


def _make_boxes(spans: np.ndarray, start: float) -> np.ndarray:
    boxes = np.zeros(len(spans), _BOX_DTYPE)
    for name in ("rank", "stage", "micro_batch"):
        boxes[name] = spans[name]
    boxes["begin"], boxes["end"] = spans["begin"] - start, spans["end"] - start
    boxes["kind"] = _find_kind_indices(spans["phase"])
    return boxes[np.lexsort((boxes["begin"], boxes["rank"]))]


def _find_kind_indices(phases: np.ndarray) -> np.ndarray:
    names, indices = np.unique(phases, return_inverse=True)
    kinds = [comm_time.get_phase_kind(str(name)) for name in names]
    box_kinds = [_KIND_BY_PHASE.get(name, name) for name in kinds]
    numbers = [BOX_KINDS.index(name) if name in BOX_KINDS else BOX_KINDS.index("other") for name in box_kinds]
    return np.asarray(numbers, "u1")[indices]


def _make_planned_boxes(timeline: Timeline, step: int, start: float, ranks: tuple[int, ...]) -> np.ndarray:
    """Return the boxes of the schedule simulated with the measured durations, if the timeline has a schedule."""
    if timeline.schedule is None:
        return np.empty(0, _BOX_DTYPE)
    spans = timeline.simulate_schedule(step).spans
    return _make_boxes(spans[np.isin(spans["rank"], ranks)], start)


def _describe_range(first_step: int, last_step: int) -> str:
    return f"{last_step:,} has" if first_step == last_step else f"{first_step:,} to {last_step:,} have"


def _describe_bubble(timeline: Timeline, step: int) -> str:
    measured = formatting.format_percent(timeline.measure_bubble(step))
    ideal = formatting.format_percent(timeline.get_ideal_bubble())
    return f" · bubble {measured} measured, {ideal} by {timeline.ideal_bubble_source}"


def pack_boxes(step_strip: StepStrip, boxes: np.ndarray) -> np.ndarray:
    """Return five uint16 for each box of a timeline.

    They are the rank's position, begin and end in 1/60,000 of the step, kind + 16 * (micro-batch + 1), and stage + 1.
    """
    packed = np.zeros((len(boxes), 5), "u2")
    packed[:, 0] = np.searchsorted(step_strip.ranks, boxes["rank"])
    for column, name in ((1, "begin"), (2, "end")):
        packed[:, column] = np.clip(boxes[name] / step_strip.duration_s * 60_000, 0, 65_535)
    packed[:, 3] = boxes["kind"] + 16 * np.clip(boxes["micro_batch"] + 1, 0, 4095)
    packed[:, 4] = boxes["stage"] + 1
    return packed

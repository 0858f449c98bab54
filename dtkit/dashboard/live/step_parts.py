"""Parts of messages about steps: a description for JSON, and the numbers of a buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.dashboard.summary.curves import CHARTS, MAX_BUCKETS, Curves, read_range
from dtkit.dashboard.summary.step_strip import pack_boxes
from dtkit.dashboard.summary.timing import select_bars

if TYPE_CHECKING:
    from dtkit.dashboard.summary.step_strip import StepStrip
    from dtkit.dashboard.summary.timing import StepTiming
    from dtkit.history.history import History

_MAX_CURVE_ROWS = 200_000
"""Rows of the longest range with finer curves: reading them takes about 50 ms."""


def describe_bars(timing: StepTiming, selected_rank: int | None) -> tuple[dict[str, Any], np.ndarray]:
    """Return the time of a step, and the bars' seconds, of shape (bars, phases)."""
    bars = select_bars(timing, selected_rank) if timing.is_measured else []
    described = {
        "steps": timing.range_text,  # a page draws the bars later than the tiles
        "bars": [{"rank": bar.rank, "label": bar.label, "slow": bar.is_straggler} for bar in bars],
        "straggler": None if timing.straggler is None else timing.straggler.text,
    }
    return described, np.array([bar.seconds for bar in bars])


def describe_strip(step_strip: StepStrip) -> tuple[dict[str, Any], np.ndarray]:
    """Return a timeline, and its boxes, then those of the plan, of shape (boxes, 5)."""
    described = {
        "error": None,
        "step": step_strip.step,
        "seconds": step_strip.duration_s,
        "ranks": step_strip.ranks,
        "boxes": len(step_strip.boxes),
        "piped": step_strip.is_pipelined,
        "note": step_strip.note,
    }
    boxes = [pack_boxes(step_strip, step_strip.boxes), pack_boxes(step_strip, step_strip.plan)]
    return described, np.concatenate(boxes)


def describe_range(
    history: History, num_ranks: int, width: int, first_step: int, last_step: int
) -> tuple[dict[str, Any], np.ndarray]:
    """Return curves of a range in finer buckets than those of `width` steps that a page has, and their values."""
    num_steps = max(0, last_step - first_step + 1)
    if num_steps > MAX_BUCKETS * width // 2 or num_steps * num_ranks > _MAX_CURVE_ROWS:
        part = Curves(CHARTS, num_ranks).get_all()  # no buckets: the page keeps its own
    else:
        part = read_range(history, CHARTS, num_ranks, first_step, last_step)
    described = {"width": part.width, "origin": part.origin, "last": part.last_step, "buckets": len(part.values)}
    return described, part.values

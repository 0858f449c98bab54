"""Timelines in the JSON format of Chrome's tracing, which https://ui.perfetto.dev opens.

Each rank has a row. An arrow leads from the span that sends a message to the span that receives it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.history import comm_time

if TYPE_CHECKING:
    from collections.abc import Sequence


def build_trace(spans: np.ndarray, ranks_per_pipeline: int, title: str) -> dict[str, Any]:
    """Return the trace of these spans, which share one clock."""
    start = float(spans["begin"].min(initial=np.inf))
    ranks = [int(rank) for rank in np.unique(spans["rank"])]
    events = _make_metadata_events(ranks, title)
    events += [_make_span_event(span, start) for span in spans]
    events += _make_arrow_events(spans, start, ranks_per_pipeline)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _make_metadata_events(ranks: Sequence[int], title: str) -> list[dict[str, Any]]:
    """Return the names of the process and its rows, and the order of rows (by name, rank 10 precedes rank 2)."""
    if not ranks:
        return []
    names = [_make_metadata_event("thread_name", rank, name=f"node {rank}") for rank in ranks]
    order = [_make_metadata_event("thread_sort_index", rank, sort_index=rank) for rank in ranks]
    return [_make_metadata_event("process_name", 0, name=title), *names, *order]


def _make_metadata_event(event: str, rank: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": rank, "name": event, "args": args}


def _make_span_event(span: np.void, start: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 0,
        "tid": int(span["rank"]),
        "name": _format_span_name(span),
        "cat": comm_time.get_phase_kind(str(span["phase"])),
        "ts": 1e6 * (float(span["begin"]) - start),
        "dur": 1e6 * float(span["end"] - span["begin"]),
        "args": _make_event_args(span),
    }


def _make_event_args(span: np.void) -> dict[str, int]:
    names = ("step", "stage", "micro_batch") if span["micro_batch"] >= 0 else ("step",)
    return {name: int(span[name]) for name in names}


def _make_arrow_events(spans: np.ndarray, start: float, ranks_per_pipeline: int) -> list[dict[str, Any]]:
    """Return an arrow for each message. Its ends are at the begins of both spans, because they must lie within them."""
    events: list[dict[str, Any]] = []
    for number, (sent, received) in enumerate(comm_time.pair_messages(spans, ranks_per_pipeline)):
        for ph, span in (("s", spans[sent]), ("f", spans[received])):
            arrow = {"ph": ph, "pid": 0, "tid": int(span["rank"]), "name": "message", "cat": "message", "id": number}
            binding = {"bp": "e"} if ph == "f" else {}
            time_us = 1e6 * (float(span["begin"]) - start)
            events.append({**arrow, **binding, "ts": time_us, "args": _make_event_args(span)})
    return events


def _format_span_name(span: np.void) -> str:
    if span["micro_batch"] < 0:
        return str(span["phase"])
    return f"{span['phase']} {span['micro_batch']} of stage {span['stage']}"

"""Rules of the Trace Event Format."""

from __future__ import annotations

import json

import numpy as np


def parse_checked_trace(text):
    """Parse a trace and check its complete events ("X"), metadata ("M") and flows ("s", "f")."""
    trace = json.loads(text)
    assert trace["displayTimeUnit"] in {"ms", "ns"}
    ends, boxes, flows = {}, {}, {}
    for event in trace["traceEvents"]:
        assert event["ph"] in {"X", "M", "s", "f"}
        assert isinstance(event["name"], str)
        assert event["name"]
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "thread_name", "thread_sort_index"}
            assert event["args"]
            continue
        if event["ph"] in {"s", "f"}:
            assert event["ph"] == "s" or event["bp"] == "e"
            flows.setdefault((event["cat"], event["name"], event["id"]), []).append(event)
            continue
        assert all(isinstance(event[key], float) and np.isfinite(event[key]) for key in ("ts", "dur"))
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert isinstance(event["cat"], str)
        row = event["pid"], event["tid"]
        assert event["ts"] >= ends.get(row, 0) - 1e-3, "events of a thread don't overlap, unless they nest"
        ends[row] = event["ts"] + event["dur"]
        boxes.setdefault(row, []).append((event["ts"], ends[row]))
    for start, end in flows.values():
        assert (start["ph"], end["ph"]) == ("s", "f")
        assert start["ts"] <= end["ts"] + 1e-3
        for event in (start, end):  # each flow is bound to the event around it
            assert any(a - 1e-3 <= event["ts"] <= b + 1e-3 for a, b in boxes[event["pid"], event["tid"]])
    return trace

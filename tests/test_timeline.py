"""Spans of time: bubbles, activations held, and the trace, from schedules that are written down here."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dtkit.timeline import SPAN, Timeline, merge


def gpipe(ranks, micro_batches, *, step=0):
    """All forwards, then all backwards, each of one second, without any cost of sending."""
    spans = []
    for rank in range(ranks):
        for m in range(micro_batches):
            begin = rank + m
            spans.append((step, rank, "forward", rank, m, begin, begin + 1))
        first = ranks + micro_batches - 1 + (ranks - 1 - rank)
        for m in range(micro_batches):
            spans.append((step, rank, "backward", rank, m, first + m, first + m + 1))
    return np.array(spans, SPAN)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("micro_batches", [4, 8, 16])
def test_the_bubble_of_gpipe_is_that_of_the_formula(ranks, micro_batches):
    timeline = Timeline(gpipe(ranks, micro_batches))
    assert timeline.ideal_bubble() == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
    assert timeline.bubble() == pytest.approx(timeline.ideal_bubble())
    assert timeline.micro_batches == micro_batches
    assert [timeline.held(rank) for rank in range(ranks)] == [micro_batches] * ranks


def test_parts_on_a_rank_make_the_bubble_smaller():
    assert Timeline(gpipe(4, 8), parts_per_rank=2).ideal_bubble() == pytest.approx(3 / 19)


def test_activations_are_held_until_their_backward_has_ended():
    spans = [
        (0, 0, "forward", 0, 0, 0, 1),
        (0, 0, "forward", 0, 1, 1, 2),
        (0, 0, "backward input", 0, 0, 2, 3),
        (0, 0, "backward weight", 0, 0, 3, 4),
        (0, 0, "forward", 0, 2, 4, 5),
        (0, 0, "backward", 0, 1, 5, 6),
        (0, 0, "backward", 0, 2, 6, 7),
    ]
    assert Timeline(np.array(spans, SPAN)).held(0) == 2


def test_a_run_without_stages_has_no_bubble():
    spans = np.array([(3, 0, "forward", -1, -1, 0, 1), (3, 0, "sync", -1, -1, 1, 2)], SPAN)
    timeline = Timeline(spans)
    assert not timeline.piped
    assert repr(timeline) == "Timeline(steps 3 to 3, 1 ranks)"
    with pytest.raises(ValueError, match="no pipeline in this timeline"):
        timeline.bubble()


def test_clocks_of_several_hosts_are_put_right():
    one, other = gpipe(2, 4)[:8], gpipe(2, 4)[8:]
    ahead = other.copy()
    ahead["begin"] += 50
    ahead["end"] += 50
    found = merge([one, ahead], [0.0, 50.0])
    assert np.array_equal(found, gpipe(2, 4))
    assert ahead["begin"].min() > 50  # what was given stays as it was


def test_the_last_step_is_shown_and_the_others_are_there():
    timeline = Timeline(np.concatenate([gpipe(2, 4, step=6), gpipe(2, 8, step=7)]))
    assert timeline.steps == [6, 7]
    assert timeline.bubble(6) == pytest.approx(1 / 5)
    assert timeline.bubble() == pytest.approx(1 / 9)


def test_a_trace_has_a_row_per_rank_and_an_event_per_span(tmp_path):
    timeline = Timeline(gpipe(2, 4))
    timeline.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", "rank 1"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 16
    assert spans[0] == {
        "ph": "X",
        "pid": 0,
        "tid": 0,
        "name": "forward 0 of stage 0",
        "cat": "forward",
        "ts": 0.0,
        "dur": 1e6,
        "args": {"step": 0},
    }


def test_pictures(tmp_path):
    figure = Timeline(gpipe(2, 4), title=" of a net").figure()
    (ax,) = figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["node 0", "node 1"]
    assert sorted(t.get_text() for t in ax.texts) == sorted(str(m) for m in range(4) for _ in range(4))
    assert "20.0% of the time as measured, 20.0% by formula" in ax.get_title(loc="right")
    assert len(Timeline(gpipe(2, 4))._repr_png_()) > 1000
    assert Timeline(np.empty(0, SPAN)).figure().axes
    assert repr(Timeline(np.empty(0, SPAN))) == "Timeline(empty)"

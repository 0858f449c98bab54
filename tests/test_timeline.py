"""Timelines of spans: bubbles, activations in memory, figures, and traces of known schedules."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dtkit.history.timeline import SPAN_DTYPE, Timeline, convert_simulation, merge_spans
from dtkit.schedules.schedule import Schedule
from tests.support.trace_format import parse_checked_trace


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
    return np.array(spans, SPAN_DTYPE)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("micro_batches", [4, 8, 16])
def test_the_bubble_of_gpipe_equals_the_formula(ranks, micro_batches):
    timeline = Timeline(gpipe(ranks, micro_batches))
    assert timeline.get_ideal_bubble() == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
    assert timeline.measure_bubble() == pytest.approx(timeline.get_ideal_bubble())
    assert timeline.num_micro_batches == micro_batches
    assert [timeline.measure_peak_micro_batches(rank) for rank in range(ranks)] == [micro_batches] * ranks


def test_more_stages_on_a_rank_make_the_bubble_smaller():
    interleaved = Schedule.from_name("Interleaved1F1B", 4, 8)
    timeline = Timeline(convert_simulation(interleaved.simulate()), schedule=interleaved)
    assert timeline.ideal_bubble_formula == ("(p-1)/(v·m+p-1)", pytest.approx(3 / 19))
    assert timeline.measure_bubble() == pytest.approx(3 / 19)
    assert "15.8 % measured, 15.8 % by the formula" in repr(timeline)


def late(spans, rank, by):
    """The same spans, with those of one rank delayed."""
    moved = spans.copy()
    moved["begin"][moved["rank"] == rank] += by
    moved["end"][moved["rank"] == rank] += by
    return moved


def test_the_planned_timeline_has_measured_durations_and_free_sending():
    schedule = Schedule.from_name("GPipe", 2, 4)
    measured = late(gpipe(2, 4), 1, 0.5)  # each message takes half a second; the backward path has slack
    measured["begin"] += 100
    measured["end"] += 100
    timeline = Timeline(measured, schedule=schedule)
    planned = timeline.simulate_schedule()
    assert timeline.measure_bubble() == pytest.approx(1 / 5)
    assert planned.measure_bubble() == pytest.approx(1 / 5)
    order = ["rank", "begin"]
    assert np.array_equal(
        np.sort(planned.select_spans(0, 0), order=order), np.sort(measured[measured["rank"] == 0], order=order)
    )
    assert planned.select_spans(0, 1)["begin"].min() == 101  # where 101.5 was measured


def test_each_replica_has_its_own_planned_timeline():
    schedule = Schedule.from_name("GPipe", 2, 4)
    other = late(gpipe(2, 4), 0, 0)
    other["rank"] += 2
    other["begin"] += 3
    other["end"] += 3
    timeline = Timeline(np.concatenate([gpipe(2, 4), other]), schedule=schedule)
    planned = timeline.simulate_schedule().spans
    assert sorted({int(rank) for rank in planned["rank"]}) == [0, 1, 2, 3]
    assert [planned["begin"][planned["rank"] == rank].min() for rank in range(4)] == [0, 1, 3, 4]
    assert timeline.get_ideal_bubble() == pytest.approx(1 / 5)


def test_a_schedule_without_a_formula_is_simulated():
    schedule = Schedule("F0 F1 B0 F2 B1 F3 B2 B3\nF0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3")
    timeline = Timeline(convert_simulation(schedule.simulate()), schedule=schedule)
    assert timeline.ideal_bubble_formula == ("equal stages", pytest.approx(1 - 24 / 26))
    assert "7.7 % measured, 7.7 % by simulation" in repr(timeline)
    assert [timeline.measure_peak_micro_batches(rank) for rank in (0, 1)] == [2, 2]


def test_compare_with_returns_the_ratios_of_time_and_memory():
    table = "F0 F1 B0 F2 B1 F3 B2 B3\nF0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3"
    own, usual, gpipe_ = Schedule(table), Schedule.from_name("1F1B", 2, 4), Schedule.from_name("GPipe", 2, 4)
    lines = [Timeline(convert_simulation(schedule.simulate()), schedule=schedule) for schedule in (own, usual, gpipe_)]
    score = lines[0].compare_with(lines[1])
    assert score.time_ratio == pytest.approx(13 / 15)
    assert score.memory_ratio == 1
    assert repr(score).startswith(
        "custom against 1F1B: time 0.87 (13000 and 15000 ms), memory 1.00 (1 and 1 micro-batches"
    )
    assert lines[2].compare_with(lines[1]).memory_ratio == 2


def test_activations_count_until_their_backward_has_ended():
    spans = [
        (0, 0, "forward", 0, 0, 0, 1),
        (0, 0, "forward", 0, 1, 1, 2),
        (0, 0, "backward input", 0, 0, 2, 3),
        (0, 0, "backward weight", 0, 0, 3, 4),
        (0, 0, "forward", 0, 2, 4, 5),
        (0, 0, "backward", 0, 1, 5, 6),
        (0, 0, "backward", 0, 2, 6, 7),
    ]
    assert Timeline(np.array(spans, SPAN_DTYPE)).measure_peak_micro_batches(0) == 2


def test_the_loss_belongs_to_its_forward_pass():
    spans = [
        (0, 0, "forward", 0, 0, 0, 1),
        (0, 0, "forward", 0, 0, 1.5, 2),
        (0, 0, "backward", 0, 0, 2, 3),
    ]
    timeline = Timeline(np.array(spans, SPAN_DTYPE), schedule=Schedule("F0 B0"))
    assert timeline.measure_peak_micro_batches(0) == 1
    assert timeline.measure_bubble() == pytest.approx(0.5 / 3)
    assert timeline.simulate_schedule().measure_duration_s() == 2.5
    (ax,) = timeline.figure().axes
    assert [t.get_text() for t in ax.texts if t.get_gid() is None] == ["F0", "B0"]  # one label per pass


def test_a_run_without_stages_has_no_bubble():
    spans = np.array([(3, 0, "forward", -1, -1, 0, 1), (3, 0, "sync", -1, -1, 1, 2)], SPAN_DTYPE)
    timeline = Timeline(spans)
    assert not timeline.is_pipelined
    assert repr(timeline) == "Timeline(steps 3 to 3, 1 ranks)"
    with pytest.raises(ValueError, match="timeline has no pipeline"):
        timeline.measure_bubble()


def test_merged_spans_are_on_the_clock_of_rank_0():
    one, other = gpipe(2, 4)[:8], gpipe(2, 4)[8:]
    ahead = other.copy()
    ahead["begin"] += 50
    ahead["end"] += 50
    found = merge_spans([one, ahead], [0.0, 50.0])
    assert np.array_equal(found, gpipe(2, 4))
    assert ahead["begin"].min() > 50  # the input is unchanged


def test_timeline_has_all_steps_and_measures_the_last_one_by_default():
    timeline = Timeline(np.concatenate([gpipe(2, 4, step=6), gpipe(2, 8, step=7)]))
    assert timeline.steps == [6, 7]
    assert timeline.measure_bubble(6) == pytest.approx(1 / 5)
    assert timeline.measure_bubble() == pytest.approx(1 / 9)


def test_a_trace_has_a_row_per_rank_and_an_event_per_span(tmp_path):
    timeline = Timeline(gpipe(2, 4), title=" of a net")
    timeline.export_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [(e["name"], e["tid"], *e["args"].values()) for e in events if e["ph"] == "M"]
    assert names[0] == ("process_name", 0, "step 0 of a net")
    assert [name[1:] for name in names if name[0] == "thread_name"] == [(0, "node 0"), (1, "node 1")]
    assert [name[1:] for name in names if name[0] == "thread_sort_index"] == [(0, 0), (1, 1)]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == sum(e["ph"] != "M" for e in events) == 16
    assert spans[0] == {
        "ph": "X",
        "pid": 0,
        "tid": 0,
        "name": "forward 0 of stage 0",
        "cat": "forward",
        "ts": 0.0,
        "dur": 1e6,
        "args": {"step": 0, "stage": 0, "micro_batch": 0},
    }


def test_an_arrow_leads_from_the_sender_to_the_receiver(tmp_path):
    spans = [
        (0, 0, "send forward", 0, 0, 1, 1.25),
        (0, 0, "send forward", 0, 0, 2, 2.5),  # the received one
        (0, 1, "receive forward", 1, 0, 0.5, 0.75),  # posted
        (0, 1, "wait", 1, 0, 0.75, 1),
        (0, 1, "receive forward", 1, 0, 1, 2),
        (0, 1, "send backward", 1, 0, 3, 4),  # nobody received it
    ]
    Timeline(np.array(spans, SPAN_DTYPE)).export_chrome_trace(tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    events = parse_checked_trace(text)["traceEvents"]
    (start,) = [e for e in events if e["ph"] == "s"]
    (end,) = [e for e in events if e["ph"] == "f"]
    assert (start["tid"], start["ts"], end["tid"], end["ts"]) == (0, 5e5, 1, 5e5)
    assert [e["cat"] for e in events if e["ph"] == "X"] == ["send", "send", "receive", "wait", "receive", "send"]
    assert end["args"] == {"step": 0, "stage": 1, "micro_batch": 0}


def test_a_trace_follows_the_format(tmp_path):
    for spans in (gpipe(2, 4), np.array([(3, 0, "forward", -1, -1, 0, 1)], SPAN_DTYPE), np.empty(0, SPAN_DTYPE)):
        Timeline(spans).export_chrome_trace(tmp_path / "trace.json")
        parse_checked_trace((tmp_path / "trace.json").read_text())


def test_figure_shows_measured_and_planned_passes():
    figure = Timeline(gpipe(2, 4), schedule=Schedule.from_name("GPipe", 2, 4), title=" of a net").figure()
    (ax,) = figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["node 0", "node 1"]
    numbers = [t.get_text() for t in ax.texts if t.get_gid() is None]
    assert sorted(numbers) == sorted(f"{kind}{m}" for m in range(4) for kind in "FFBB")
    (note,) = [t.get_text() for t in ax.texts if t.get_gid() == "note"]
    assert " ".join(note.split()) == (
        "GPipe · bubble: 20.0 % of the time as measured, 20.0 % by formula, (p-1)/(m+p-1) · planned with these "
        "durations: 20.0 %"
    )
    hollow = [c for c in ax.collections if c.get_gid() == "planned"]
    assert [len(c.get_paths()) for c in hollow] == [8, 8]
    assert all(len(c.get_facecolor()) == 0 for c in hollow)
    assert min(map(ax.collections.index, hollow)) == 0  # behind what was measured
    (ax,) = Timeline(gpipe(2, 4)).figure().axes
    assert not [c for c in ax.collections if c.get_gid() == "planned"]
    assert len(Timeline(gpipe(2, 4))._repr_png_()) > 1000
    assert Timeline(np.empty(0, SPAN_DTYPE)).figure().axes
    assert repr(Timeline(np.empty(0, SPAN_DTYPE))) == "Timeline(empty)"

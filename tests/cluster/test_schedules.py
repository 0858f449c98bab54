"""Custom schedules: they run as written, rank by rank, and train as one process does."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import dtkit
from dtkit.history.comm_time import MESSAGE_PHASES, WAIT_PHASE, pair_messages
from dtkit.history.timeline import ACTION_KINDS, COMPUTE_PHASES, Timeline
from dtkit.schedules.builtin import BUILTIN_SCHEDULES as SCHEDULES
from tests.support.marks import slow
from tests.support.nets import deep, make_net
from tests.support.oracle import BOUND, get_global_rows, max_difference, train, train_in_one_process, train_reference
from tests.support.trace_format import parse_checked_trace

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster

STEPS = 8  # of 24 samples; the sixth has one sample
TABLES = {
    "out of order": "F2 F0 F1 B0 B2 B1\nF2 F0 B0 F1 B2 B1",
    "halves": "F0 F1 B0 F2 B1 F3 B2 B3\nF0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3",
    "halves on the first stage": "F0 F1 I0 W0 I1 W1\nF0 I0 W0 F1 B1",
    "idle cells": "F0 F1 . . B0 . B1\n. F0 B0 F1 B1 . .",
    "V shape": "0F0 3F0 0F1 3B0 3F1 0B0 3B1 0B1\n1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1",
    "two stages on a rank": "0F0 0F1 0B1 0B0\n1F0 2F0 1F1 2F1 2B1 1B1 2B0 1B0",
    "fewer activations": "F0 B0 F1 B1 F2 B2\nF0 B0 F1 B1 F2 B2",
}


FOUR_STAGE_TABLES = {
    "out of order": "F1 F0 F2 F3 B1 B0 B3 B2\nF1 F0 F2 B1 F3 B0 B3 B2\n"
    "F1 F0 B1 F2 B0 F3 B3 B2\nF1 B1 F0 B0 F2 F3 B3 B2",
    "halves": "F0 F1 F2 B0 B1 B2\nF0 F1 F2 B0 B1 B2\nF0 F1 I0 F2 I1 W0 I2 W1 W2\nF0 I0 F1 I1 F2 I2 W0 W1 W2",
    "V shape": "0F0 0F1 7F0 7F1 7B0 7B1 0B0 0B1\n1F0 1F1 6F0 6F1 6B0 6B1 1B0 1B1\n"
    "2F0 2F1 5F0 5F1 5B0 5B1 2B0 2B1\n3F0 4F0 3F1 4F1 4B0 3B0 4B1 3B1",
}
FOUR_STEPS = 10


def train_with_schedule(cluster: dtkit.Cluster, schedule: Any, micro_batches: int = 0) -> dtkit.Run:
    strategy = dtkit.Pipeline(cluster.world_size, micro_batches, schedule=schedule, balance_by="parameters")
    return train(cluster, make_net(deep), strategy=strategy, shuffle="global", steps=STEPS)


def list_executed(timeline: Timeline) -> list[list[str]]:
    """Return the actions of each rank in the last step, in order."""
    executed = []
    for rank in timeline.ranks:
        spans = [s for s in timeline.select_spans(timeline.steps[-1], rank) if s["phase"] in ACTION_KINDS]
        named = [
            f"{s['stage']}{ACTION_KINDS[s['phase']]}{s['micro_batch']}" for s in sorted(spans, key=lambda s: s["begin"])
        ]
        executed.append(list(dict.fromkeys(named)))  # the loss is a separate span
    return executed


def list_planned(table: dtkit.Schedule) -> list[list[str]]:
    return [[str(action) for action in row if action] for row in table.rows]


@pytest.mark.parametrize(
    "name", [name if name in ("halves", "idle cells", "V shape") else slow(name) for name in TABLES]
)
def test_custom_schedule_trains_as_one_process_and_runs_as_written(cluster2: dtkit.Cluster, name: str):
    table = dtkit.Schedule(TABLES[name])
    run = train_with_schedule(cluster2, table)
    assert (
        max_difference(run.model.state_dict(), train_in_one_process(make_net(deep), get_global_rows, steps=STEPS))
        <= BOUND
    )
    timeline = run.timeline
    assert list_executed(timeline) == list_planned(table)
    assert (
        tuple(timeline.measure_peak_micro_batches(rank) for rank in timeline.ranks)
        == table.simulate().peak_micro_batches
    )
    assert timeline.measure_peak_activations() == table.simulate().peak_activations


on_four = pytest.mark.parametrize("cluster", [4], indirect=True)


@on_four
@pytest.mark.parametrize(
    ("text", "replicas"),
    [
        *(pytest.param(text, 1, id=f"four stages, {name}") for name, text in FOUR_STAGE_TABLES.items()),
        *(pytest.param(TABLES[name], 2, id=f"two replicas, {name}") for name in ("halves", "V shape")),
    ],
)
@pytest.mark.slow
def test_custom_schedule_on_four_engines_trains_as_one_process(cluster: dtkit.Cluster, text: str, replicas: int):
    """Four stages, or two replicas of two stages, each of which runs the table."""
    table = dtkit.Schedule(text)
    strategy = dtkit.Pipeline(4 // replicas, schedule=table, replicas=replicas, balance_by="parameters")
    run = train(cluster, make_net(deep), strategy=strategy, shuffle="global", steps=FOUR_STEPS)
    expected = train_reference(make_net(deep), get_global_rows, steps=FOUR_STEPS)
    assert max_difference(run.model.state_dict(), expected.state) <= BOUND
    assert abs(run.history.loss()[1] - expected.losses).max() <= BOUND
    samples = run.history.column("samples").reshape(FOUR_STEPS, 4)
    assert (samples[5] == 0).any() == (replicas == 2)  # only one replica has the single sample of this step
    timeline = run.timeline
    assert list_executed(timeline) == replicas * list_planned(table)
    assert (
        tuple(timeline.measure_peak_micro_batches(rank) for rank in timeline.ranks)
        == replicas * table.simulate().peak_micro_batches
    )


@pytest.mark.parametrize("name", [slow("GPipe"), "1F1B", slow("Interleaved1F1B"), "ZBVZeroBubble"])
def test_builtin_schedules_run_as_their_tables_say(cluster2: dtkit.Cluster, name: str):
    timeline = train_with_schedule(cluster2, name, 4).timeline
    table = dtkit.Schedule.from_name(name, 2, 4)
    assert list_executed(timeline) == list_planned(table)
    assert timeline.schedule == table


def list_messages(table: dtkit.Schedule) -> set[tuple[str, int, int]]:
    """Return (phase, stage, micro-batch) of both ends of each message between ranks."""
    boundaries = [s for s in range(table.stages - 1) if table.stage_ranks[s] != table.stage_ranks[s + 1]]
    ends = (("send forward", 0), ("receive forward", 1), ("send backward", 1), ("receive backward", 0))
    return {(phase, s + k, m) for s in boundaries for m in range(table.micro_batches) for phase, k in ends}


@pytest.mark.parametrize(
    "name", [*(name if name == "1F1B" else slow(name) for name in SCHEDULES), slow("halves"), "V shape"]
)
def test_timeline_has_each_pass_and_message_once_and_in_order(cluster2: dtkit.Cluster, name: str, tmp_path: Path):
    run = train_with_schedule(cluster2, TABLES.get(name, name), 0 if name in TABLES else 4)
    timeline = run.timeline
    table = timeline.schedule
    assert table is not None
    spans = timeline.select_spans(timeline.steps[-1])

    for rank in range(2):  # spans of a rank don't overlap
        rank_spans = np.sort(spans[spans["rank"] == rank], order=["begin", "end"])
        assert (rank_spans["begin"][1:] >= rank_spans["end"][:-1]).all()

    passes = spans[np.isin(spans["phase"], COMPUTE_PHASES)]
    passes_by_action = Counter((ACTION_KINDS[s["phase"]], int(s["stage"]), int(s["micro_batch"])) for s in passes)
    last = table.stages - 1  # its loss is a separate span
    actions = {(a.kind, a.stage, a.micro_batch) for _, _, a in table.iterate_actions()}
    assert passes_by_action == {(kind, s, m): 1 + (kind == "F" and s == last) for kind, s, m in actions}
    assert {(int(s["stage"]), int(s["rank"])) for s in passes} == set(enumerate(table.stage_ranks))

    sent = spans[np.isin(spans["phase"], MESSAGE_PHASES)]
    assert {(str(s["phase"]), int(s["stage"]), int(s["micro_batch"])) for s in sent} == list_messages(table)
    matched = pair_messages(spans, table.ranks)
    assert len(matched) == len(list_messages(table)) // 2
    for begun, received in matched:
        assert spans["begin"][begun] <= spans["begin"][received]  # a rank waits before it receives
        assert spans["rank"][begun] != spans["rank"][received]
    waits = {(int(s["stage"]), int(s["rank"])) for s in spans[spans["phase"] == WAIT_PHASE]}
    assert waits <= {*enumerate(table.stage_ranks), (-1, 0), (-1, 1)}  # -1: in collectives of all stages

    blocked = spans[np.isin(spans["phase"], [WAIT_PHASE, "sync", *MESSAGE_PHASES])]
    rows = run.history.rows()
    for rank in range(2):
        row = rows[(rows["rank"] == rank) & (rows["step"] == timeline.steps[-1])][0]
        rank_spans = blocked[blocked["rank"] == rank]
        seconds = rank_spans["end"] - rank_spans["begin"]
        assert row["wait_s"] + row["comm_s"] == pytest.approx(seconds.sum(), rel=1e-4)
        assert row["wait_s"] >= seconds[rank_spans["phase"] == WAIT_PHASE].sum() * (1 - 1e-4)
        assert row["comm_s"] >= seconds[np.isin(rank_spans["phase"], MESSAGE_PHASES)].sum() * (1 - 1e-4)

    timeline.export_chrome_trace(tmp_path / "trace.json")
    events = parse_checked_trace((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "s" for e in events) == len(pair_messages(timeline.spans, table.ranks))
    assert {"send", "receive"} <= {e.get("cat") for e in events}


def test_custom_schedule_has_a_simulated_timeline_and_a_valid_trace(cluster2: dtkit.Cluster, tmp_path: Path):
    run = train_with_schedule(cluster2, TABLES["halves"])
    timeline = run.timeline
    assert timeline.ideal_bubble_formula[0] == "equal stages"
    assert timeline.simulate_schedule().measure_bubble() <= timeline.measure_bubble()
    assert timeline.simulate_schedule().measure_duration_s() <= timeline.measure_duration_s()
    assert repr(timeline.compare_with(timeline)).startswith("custom against custom: time 1.00")
    assert timeline._repr_png_().startswith(b"\x89PNG")
    timeline.export_chrome_trace(tmp_path / "trace.json")
    trace = parse_checked_trace((tmp_path / "trace.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"forward 0 of stage 0", "backward input 3 of stage 1", "backward weight 3 of stage 1"} <= names

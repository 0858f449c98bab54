"""Profiles of fake engines: the merged trace, the table, and wrong arguments."""

from __future__ import annotations

import gzip
import json

import pytest
import torch
from torch import nn

import dtkit
from dtkit.dashboard.text import profile_text
from dtkit.history.profile import OperatorTime, Profile, RankProfile, merge_operators, merge_traces
from dtkit.testing.fake_transport import FakeTransport


def rank_profile(begin_us: float, shift_us: float, seconds: float) -> RankProfile:
    events = [
        {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": 77, "tid": 0, "ts": 0, "args": {"labels": "CPU"}},
        {"ph": "X", "name": "aten::mm", "pid": 77, "tid": 5, "ts": begin_us, "dur": 10},
        {"ph": "s", "name": "arrow", "pid": 77, "tid": 5, "ts": begin_us, "id": 1},
    ]
    packed = gzip.compress(json.dumps({"traceEvents": events}).encode())
    return RankProfile(
        (OperatorTime("aten::mm", 4, seconds, 0.0), OperatorTime("aten::add", 2, 1e-3, 0.0)), packed, shift_us
    )


def profile() -> Profile:
    ranks = [rank_profile(1000.0, 500.0, 3e-3), rank_profile(7000.0, -5400.0, 5e-3)]
    return Profile("Net", 8, 2, ranks, [0.0, 50e-6])


def test_traces_of_ranks_are_merged_on_one_clock():
    events = merge_traces(profile().ranks, profile().clock_offsets)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [event["ts"] for event in spans] == [0.0, 50.0]  # 1500 us, and 7000 - 5400 - 50 us
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [names[event["pid"]] for event in spans] == ["node 0, CPU", "node 1, CPU"]
    assert [event["id"] for event in events if event["ph"] == "s"] == ["0.1", "1.1"]


def test_the_table_has_time_by_rank_and_share():
    text = profile_text.format_text(profile())
    assert text.startswith("Profile of Net: steps 8 to 9 on 2 nodes\n")
    header, *rows = text.splitlines()[1:4]
    assert header.split() == ["operator", "calls", "a", "step", "share", "node", "0", "node", "1"]
    assert rows[0].split() == ["aten::mm", "2", "80", "%", "1.5", "ms", "2.5", "ms"]
    assert [row.name for row in profile().operators] == ["aten::mm", "aten::add"]
    assert list(profile().to_pandas()["rank"]) == [0, 0, 1, 1]
    assert profile().figure().axes


def test_a_node_of_the_backward_graph_is_one_operator():
    engine, node = "autograd::engine::evaluate_function: ", "torch::autograd::"
    merged = merge_operators(
        [
            OperatorTime("AddmmBackward0", 6, 1e-3, 0.0),
            OperatorTime("aten::mm", 12, 2e-3, 5e-3),
            OperatorTime(f"{engine}AddmmBackward0", 6, 3e-3, 0.0),
            OperatorTime(f"{engine}{node}AccumulateGrad", 4, 1e-4, 0.0),
            OperatorTime(f"{node}AccumulateGrad", 4, 2e-4, 0.0),
        ]
    )
    assert [(operator.name, operator.calls) for operator in merged] == [
        ("aten::mm", 12),
        ("AddmmBackward0", 6),
        ("AccumulateGrad", 4),
    ]
    assert [operator.self_s for operator in merged] == pytest.approx([5e-3, 4e-3, 3e-4])


def test_a_compressed_trace_is_written_for_gz(tmp_path):
    profile().export_chrome_trace(tmp_path / "trace.json.gz")
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]


def test_a_run_takes_steps_for_a_profile_and_refuses_wrong_numbers():
    cluster = dtkit.Cluster.from_transport(FakeTransport(2), device="cpu")
    rows = torch.zeros(64, 2), torch.zeros(64, dtype=torch.int64)
    run = cluster.train(
        nn.Linear(2, 2),
        rows,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        batch_size=16,
        steps=5,
        start=False,
    )
    assert run.profile(2).num_steps == 2
    for steps in (0, True, 1.5, 1000):
        with pytest.raises(ValueError, match=r"number of steps from 1 to 100"):
            run.profile(steps)
    assert run.profile(9).num_steps == 3
    with pytest.raises(dtkit.errors.RunError, match="all of its 5 steps"):
        run.profile()
    cluster.close()

"""Texts and HTML of the results that users read."""

from __future__ import annotations

import dataclasses
import time

import pytest

from dtkit.types import (
    Evaluation,
    Event,
    Failure,
    LayerSummary,
    ModelSummary,
    NodeInfo,
    NodeList,
    ReplicaCheckResult,
    RunSpec,
)

NODE = NodeInfo(0, 4, "gpu1", 4000, "cpu", 8_000_000_000, 5_000_000_000, 1)
MODEL = ModelSummary(195, 51, (LayerSummary("0", "Linear", 144), LayerSummary("<b>", "Linear", 51)))
SPEC = RunSpec(
    "Net", "DataParallel()", 2, 256, 32, 12, 8, "shard", 3, "CrossEntropyLoss", "SGD(lr=0.1)", model=MODEL,
    settings=(("loss", "CrossEntropyLoss(label_smoothing=0.1)"), ("strategy", "DataParallel()"), ("drop_last", "True")),
)  # fmt: skip


def test_nodes_are_a_table_with_units():
    nodes = NodeList([NODE, dataclasses.replace(NODE, rank=1, host="a-longer-name")])
    head, first, second = repr(nodes).splitlines()
    assert head.split() == ["node", "engine", "id", "host", "pid", "device", "memory", "free", "threads"]
    assert "5 GB of 8 GB" in first
    assert first.index("4000") == second.index("4000")
    assert nodes[0] is NODE
    assert "<td" in nodes._repr_html_()
    assert repr(NODE) == "node 0: gpu1, cpu, 5 GB of 8 GB free, 1 thread, pid 4000"


def test_arguments_of_a_run_are_a_table_in_the_words_of_train():
    rows = dict(line.split(maxsplit=1) for line in repr(SPEC).splitlines())
    assert rows == {
        "name": "Net",
        "model": "195 parameters, 51 trainable",
        "data": "256 samples in an epoch",
        "strategy": "DataParallel() on 2 nodes",
        "batch_size": "32 samples per update, over all nodes",
        "steps": "12, 1.5 epochs of 8 steps",
        "loss": "CrossEntropyLoss(label_smoothing=0.1)",
        "optimizer": "SGD(lr=0.1)",
        "shuffle": "shard",
        "seed": "3",
        "drop_last": "True",
    }
    assert "steps       12, 1 epoch of 12 steps" in repr(dataclasses.replace(SPEC, steps_per_epoch=12))
    assert "Data<wbr>Parallel(<wbr>) on 2 nodes" in SPEC._repr_html_()


def test_a_long_argument_wraps():
    long = dataclasses.replace(SPEC, optimizer="SGD(lr=0.1) " * 30)
    assert max(map(len, repr(long).splitlines())) <= 120


def test_layers_of_a_model_are_a_table():
    assert repr(MODEL).splitlines() == [
        "195 parameters, 51 trainable",
        "layer  class   parameters",
        "0      Linear         144",
        "<b>    Linear          51",
    ]
    assert "&lt;b&gt;" in MODEL._repr_html_()
    assert repr(MODEL.layers[0]) == "0 (Linear): 144 parameters"
    assert repr(dataclasses.replace(MODEL, trainable=195, layers=())).startswith("195 parameters, all trainable")


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (ReplicaCheckResult(16, (), None), "parameters identical on all nodes, checked at step 16"),
        (ReplicaCheckResult(16, (), None, 2), "parameters identical between 2 replicas, checked at step 16"),
        (
            ReplicaCheckResult(16, (), None, 1),
            "parameters that are not split identical on all nodes, checked at step 16",
        ),
        (ReplicaCheckResult(1600, (1, 3), 8), "parameters differ on nodes 1, 3 since step 8, checked at step 1,600"),
    ],
    ids=["whole", "replicas", "split", "different"],
)
def test_replica_check_says_its_result(result: ReplicaCheckResult, text: str):
    assert repr(result) == text


def test_evaluations_events_and_failures_are_short_lines():
    evaluation = Evaluation(16, 256, {"loss": 1.1203495, "acc": 0.289})
    assert repr([evaluation]) == "[step 16: loss 1.12, acc 0.289 (256 samples)]"
    at = time.mktime((2026, 3, 1, 9, 30, 0, 0, 0, -1))
    assert repr(Event(1000, "print", "hello", at, 1)) == "09:30:00, step 1,000, node 1, print: hello"
    assert repr(Event(0, "start", "start at step 0", at)) == "09:30:00, step 0, start: start at step 0"
    failure = Failure(0, "gpu1", "ValueError", "bad rows", "Traceback", 8)
    assert repr(failure) == "rank 0 on gpu1, step 8, error: ValueError: bad rows"
    assert "which only lost its peer" in repr(dataclasses.replace(failure, victim=True))

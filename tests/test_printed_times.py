"""Times in lines of arithmetic: what is printed adds up as printed."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtkit.dashboard.summary.one_process import describe_measured
from dtkit.dashboard.summary.printed_times import PrintedTimes, describe_difference
from dtkit.dashboard.summary.verdict import Verdict, find_verdict
from dtkit.history.history import History
from dtkit.history.scalars import CORE_WAIT_NAME, ScalarRecord
from tests.support.fake_source import FakeSource
from tests.support.phase_rows import make_phase_rows

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize(
    ("whole_s", "part_s", "difference", "ratio"),
    [
        (0.1, 0.04, "100 ms - 40 ms = 60 ms", "100 ms / 60 ms = 1.67"),
        (0.0113, 0.01055, "11.30 ms - 10.55 ms = 0.75 ms", "11.30 ms / 0.75 ms = 15.07"),
        (0.0011049, 0.00105, "1.1049 ms - 1.0500 ms = 0.0549 ms", "1.1049 ms / 0.0549 ms = 20.13"),
        (0.000733, 0.000367, "733 µs - 367 µs = 366 µs", "733 µs / 366 µs = 2.00"),
        (2.5, 0.5, "2.5 s - 0.5 s = 2.0 s", "2.5 s / 2.0 s = 1.25"),
        (0.9996, 0.0, "1 s - 0 s = 1 s", "1 s / 1 s = 1.00"),
    ],
)
def test_a_difference_has_one_unit_and_as_many_digits_as_its_smallest_number_needs(
    whole_s: float, part_s: float, difference: str, ratio: str
):
    assert describe_difference(whole_s, part_s) == (difference, ratio)


def test_a_difference_of_nothing_has_no_ratio():
    assert describe_difference(0.2, 0.2) == ("200 ms - 200 ms = 0 ms", "")


def test_times_of_a_line_share_their_digits():
    show = PrintedTimes(0.0101, 0.25)
    assert [show(0.0101), show(0.25), show(show.round(0.25) + show.round(0.0101))] == [
        "10.1 ms",
        "250.0 ms",
        "260.1 ms",
    ]


_TERM = r"[\d.]+(?: (?:µs|ms|s)\b)?"
_EXPRESSION = re.compile(rf"({_TERM}(?: [-+*/] {_TERM})+)(?: \([a-z, ]+\))? = ([\d.]+)(?: (µs|ms|s)\b)?")
_QUOTIENT = re.compile(rf"({_TERM} / {_TERM}) rounds up to ([\d,]+) worker")
_MEASURED = re.compile(rf": ({_TERM}) a step on .*, ({_TERM}) in one process, so the nodes are ([\d.]+) times")
_UNITS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, None: 1.0}


def evaluate(expression: str) -> float:
    """Return the value of numbers and times with the four signs, in seconds."""
    value: float = eval(re.sub(r"([\d.]+) (µs|ms|s)\b", lambda term: f"({term[1]}*{_UNITS[term[2]]})", expression))
    return value


def check_line(line: str) -> int:
    """Check what a line of arithmetic says, and return the number of its statements."""
    for expression, result, unit in (statements := _EXPRESSION.findall(line)):
        decimals = len(result.partition(".")[2])
        half = 0.5 * 10**-decimals * _UNITS[unit or None]
        shown = float(result) * _UNITS[unit or None]
        assert abs(evaluate(expression) - shown) <= half * (1 + 1e-6) + 1e-12, line
    for expression, count in (rounded := _QUOTIENT.findall(line)):
        assert math.ceil(evaluate(expression) - 1e-9) == int(count.replace(",", "")), line
    for nodes_s, one_s, ratio in (measured := _MEASURED.findall(line)):
        assert evaluate(one_s) / evaluate(nodes_s) == pytest.approx(float(ratio), abs=0.006, rel=0.005), line
    return len(statements) + len(rounded) + len(measured)


@pytest.mark.parametrize(
    "line",
    [
        "11 ms - 11 ms = 750 µs",
        "1.5 ms + 4 * 2.0 ms = 9.6 ms",
        "2.00 * 60 ms + 10 ms (update, other) = 131 ms",
        "10 ms / 4 ms = 2.51",
        "10 ms / 4 ms rounds up to 4 workers",
    ],
)
def test_a_line_that_does_not_add_up_is_found(line: str):
    with pytest.raises(AssertionError):
        check_line(line)


_MILLISECONDS = st.floats(0.02, 900)
_PHASES = st.fixed_dictionaries(
    dict.fromkeys(("forward", "backward"), _MILLISECONDS),
    optional=dict.fromkeys(("data", "wait", "comm", "update"), _MILLISECONDS),
)
_STRATEGIES = ("DataParallel()", "Sharded()", "TensorParallel(tp_size=2)", "Pipeline(stages=2, micro_batches=2)")


def judge(
    phases_ms: list[dict[str, float]], shares: list[float], strategy: str, workers: int, cores: int, one_s: float | None
) -> Iterator[Verdict]:
    """Return all verdicts on steps with these milliseconds in each phase, on nodes that waited for a core."""
    ranks, steps = len(phases_ms), 60
    rows, stages = make_phase_rows(phases_ms, steps), 2 if strategy.startswith("Pipeline") and ranks % 2 == 0 else 1
    if stages > 1:
        early = rows["rank"] % stages < stages - 1
        rows["loss"][early], rows["weight"][early] = float("nan"), 0
    history, source = History(ranks_per_replica=stages), FakeSource(ranks=ranks)
    history.append(rows)
    for rank, share in zip(range(ranks), shares, strict=False):
        history.add(ScalarRecord(rank, {CORE_WAIT_NAME: [(step, 200 * share, 2.0) for step in range(5, steps, 5)]}))
    spec = dataclasses.replace(source.spec, batch_size=64 * ranks, strategy=strategy, num_workers=workers)
    step_s = sum(phases_ms[0].values()) / 1e3
    measured = None if one_s is None else describe_measured(one_s * step_s, step_s, ranks, "a test", "a test")
    nodes = [dataclasses.replace(node, cores=cores) for node in source.nodes]
    verdict = find_verdict(history, spec, measured, nodes)
    yield from (verdict, *verdict.others)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(_PHASES, min_size=1, max_size=4),
    st.lists(st.floats(0, 1), max_size=4),
    st.sampled_from(_STRATEGIES),
    st.integers(0, 3),
    st.integers(1, 8),
    st.none() | st.floats(0.1, 5),
)
def test_the_arithmetic_of_every_verdict_adds_up_as_printed(
    phases_ms: list[dict[str, float]], shares: list[float], strategy: str, workers: int, cores: int, one_s: float | None
):
    for verdict in judge(phases_ms, shares, strategy, workers, cores, one_s):
        for line in verdict.arithmetic:
            check_line(line)


@pytest.mark.parametrize(
    ("phases_ms", "shares", "strategy", "cause"),
    [
        ([{"forward": 9.3, "backward": 1.1, "data": 10.57}] * 2, [], "DataParallel()", "data"),
        ([{"forward": 9.3, "backward": 1.1, "comm": 10.57}] * 2, [], "Sharded()", "communication"),
        ([{"forward": 9.3, "comm": 10.57}] * 2, [], "DataParallel()", "one process"),
        ([{"forward": 1.0, "wait": 10.3}, {"forward": 11.3}], [], "Sharded()", "straggler"),
        ([{"forward": 11.3}] * 2, [0.93, 0.93], "DataParallel()", "cores"),
        ([{"forward": 1.0, "wait": 9.0}, {"forward": 10.0}], [], "Pipeline(stages=2, micro_batches=2)", "cut"),
    ],
)
def test_each_cause_has_arithmetic_that_is_checked(
    phases_ms: list[dict[str, float]], shares: list[float], strategy: str, cause: str
):
    found = {verdict.cause: verdict for verdict in judge(phases_ms, shares, strategy, 0, 8, None)}
    assert sum(map(check_line, found[cause].arithmetic)) > 0

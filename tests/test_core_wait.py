"""The share of time that nodes wait for a core: from the kernel to the verdict."""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtkit.dashboard.summary.verdict import Verdict, find_verdict
from dtkit.engine.observe import core_wait
from dtkit.engine.observe.core_wait import CoreWait, read_core_wait_s
from dtkit.engine.observe.system_monitor import SystemMonitor
from dtkit.history.core_use import CoreUse, record_core_use
from dtkit.history.history import History
from dtkit.history.scalars import CORE_WAIT_NAME, ScalarRecord
from tests.support.fake_source import FakeSource
from tests.support.phase_rows import make_phase_rows

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("text", "seconds"), [("7 2500000000 3\n", 2.5), ("0 0 0\n", None), ("", None), (None, None)])
def test_the_kernels_count_is_read_where_there_is_one(tmp_path: Path, text: str | None, seconds: float | None):
    file = tmp_path / "schedstat"
    if text is not None:
        file.write_text(text)
    assert read_core_wait_s(file) == seconds


def test_only_dispatches_of_one_thread_are_counted(monkeypatch: pytest.MonkeyPatch):
    counts, clock = iter([1.0, 1.5, 9.0, 9.25, 20.0]), iter([10.0, 12.0, 50.0, 51.0, 60.0])
    monkeypatch.setattr(core_wait, "read_core_wait_s", lambda: next(counts))
    monkeypatch.setattr(core_wait.time, "perf_counter", lambda: next(clock))
    counted = CoreWait()
    for _ in range(2):
        counted.start()
        counted.stop()
        counted.stop()
    assert counted.take() == (0.75, 3.0)
    assert counted.take() is None
    counted.start()
    other = threading.Thread(target=counted.stop)  # its count says nothing of this thread
    other.start()
    other.join()
    assert counted.take() is None


def test_a_sample_of_the_machine_has_the_share_of_the_dispatches_before_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(core_wait, "read_core_wait_s", iter([0.0, 0.5, 0.5, 1.5]).__next__)
    monkeypatch.setattr(core_wait.time, "perf_counter", iter([0.0, 1.0, 1.0, 4.0]).__next__)
    monitor = SystemMonitor(iter([0.0, 0.1, 9.0, 9.1]).__next__)
    found = []
    for step in (3, 6):
        monitor.start_dispatch()
        found.append(monitor.take(step).get(CORE_WAIT_NAME))
    assert found == [[(3, 50.0, 1.0)], None]
    assert monitor.take(7)[CORE_WAIT_NAME] == [(7, 100.0, 3.0)]


def judge(
    shares: list[float],
    *,
    cores: int = 8,
    slowness: dict[int, float] | None = None,
    steps: int = 60,
    others: dict[str, float] | None = None,
) -> Verdict:
    """Return the verdict on nodes of one host that waited these percentages for a core."""
    source = FakeSource(ranks=len(shares))
    source.slowness = slowness or {}
    source.advance(steps)
    for rank, percent in enumerate(shares):
        rows = [(step, 2 * percent, 2.0) for step in range(5, steps, 5)]
        source.history.add(ScalarRecord(rank, {CORE_WAIT_NAME: rows}))
    if others is not None:
        record_core_use(source.history, CoreUse(steps, source.nodes[0].host, others))
    nodes = [dataclasses.replace(node, cores=cores) for node in source.nodes]
    return find_verdict(source.history, source.spec, None, nodes)


def test_nodes_that_wait_for_a_core_are_named_with_the_time_on_an_idle_machine():
    verdict = judge([35.0, 35.0])
    assert verdict.cause == "cores"
    assert verdict.text == (
        "nodes 0 and 1 had no core for 35 % of their time: other processes used it; about 1.5 times as fast on an idle "
        "machine"
    )
    assert verdict.gain == pytest.approx(0.35, abs=0.01)
    printed = verdict.explain()
    assert re.search(
        r"node 1 had no core for 35 % of a step of 10\d ms, which is taken off its computing: \d\d", printed
    )
    assert re.search(
        r"on an idle machine: 10\d.* ms - 3\d.* ms = 6\d.* ms a step, 10\d.* ms / 6\d.* ms = 1.5\d", printed
    )


def test_the_processes_that_have_the_cores_are_named_if_they_were_counted():
    verdict = judge([35.0, 35.0], others={"the browser": 0.8, "this notebook's kernel": 0.5, "sshd": 0.01})
    assert verdict.text == (
        "nodes 0 and 1 had no core for 35 % of their time: the browser and this notebook's kernel used it; about 1.5 "
        "times as fast on an idle machine"
    )
    expected = "cores that other processes used meanwhile: the browser 0.8, this notebook's kernel 0.5"
    assert expected in verdict.arithmetic
    few = judge([35.0, 35.0], others={"the browser": 0.1})
    assert ": other processes used it; " in few.text
    assert not any("used meanwhile" in line for line in few.arithmetic)


@pytest.mark.parametrize("shares", [[6.0, 9.0], [0.0, 0.0]])
def test_short_waits_are_no_cause(shares: list[float]):
    assert judge(shares).cause == "computing"


def test_a_node_that_is_slow_for_want_of_a_core_is_no_straggler():
    assert judge([0.0, 45.0], slowness={1: 2.0}).cause == "cores"


def test_a_node_that_is_slow_by_itself_stays_the_straggler():
    verdict = judge([12.0, 12.0], slowness={1: 3.0})
    assert verdict.cause == "straggler"


def test_engines_that_take_the_cores_from_each_other_are_told_so():
    verdict = judge([48.0, 48.0, 52.0, 52.0], cores=2)
    assert verdict.text == (
        "nodes 0, 1, 2 and 3 had no core for 50 % of their time, since 4 engines share 2 cores: use Cluster(2)"
    )
    assert any("engines with 4 threads in all, 2 cores" in line for line in verdict.arithmetic)


_TIME = r"([\d.]+) (µs|ms|s)\b"
_UNITS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}


@pytest.mark.parametrize("cores", [2, 8])
def test_the_lack_of_a_core_is_not_called_waiting(cores: int):
    """A tile beside the verdict has the share of time that nodes wait for each other."""
    explained = judge([48.0, 48.0, 52.0, 52.0], cores=cores).explain()
    about_cores = [line for line in explained.splitlines() if "core" in line or "idle" in line]
    assert about_cores
    assert not [line for line in about_cores if "wait" in line]


def judge_times(phases_ms: list[dict[str, float]], shares: list[float]) -> Verdict:
    """Return the verdict on steps with these milliseconds in each phase, of nodes that waited for a core."""
    ranks, steps = len(phases_ms), 60
    rows = make_phase_rows(phases_ms, steps)
    history = History()
    history.append(rows)
    for rank, share in enumerate(shares):
        history.add(ScalarRecord(rank, {CORE_WAIT_NAME: [(step, 200 * share, 2.0) for step in range(5, steps, 5)]}))
    return find_verdict(history, dataclasses.replace(FakeSource(ranks=ranks).spec, batch_size=64 * ranks))


def list_differences(verdict: Verdict) -> list[tuple[float, float, float]]:
    """Return the numbers of each "a - b = c" of the arithmetic, in seconds."""
    pattern = rf"{_TIME} - {_TIME} = {_TIME}"
    found = re.findall(pattern, "\n".join(verdict.arithmetic))
    return [tuple(float(each[k]) * _UNITS[each[k + 1]] for k in (0, 2, 4)) for each in found]


def test_a_node_that_waits_longer_than_it_computes_still_computes():
    verdict = judge_times([{"forward": 0.733, "comm": 1.6}] * 2, [0.1, 0.4])
    (cores,) = (each for each in (verdict, *verdict.others) if each.cause == "cores")
    (line,) = (line for line in cores.arithmetic if line.startswith("node 1"))
    assert line == (
        "node 1 had no core for 40 % of a step of 2.3 ms, longer than half of its computing, so half of its computing "
        "is taken off: 733 µs - 367 µs = 366 µs"
    )


def test_a_node_that_mostly_has_no_core_keeps_that_share_of_its_computing_off():
    verdict = judge_times([{"forward": 40.0, "comm": 10.0}] * 2, [0.62, 0.62])
    assert verdict.cause == "cores"
    assert verdict.arithmetic[2] == (
        "node 0 had no core for 62 % of a step of 50 ms, so 62 % of its computing is taken off: 40.0 ms - 24.8 ms = "
        "15.2 ms"
    )


def test_a_phase_that_takes_no_time_to_speak_of_is_not_listed():
    verdict = judge_times([{"forward": 40.0, "update": 0.0001}] * 2, [0.62, 0.62])
    assert verdict.arithmetic[0].endswith("nodes: forward 40 ms")


_MILLISECONDS = st.floats(0.02, 900)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(
        st.fixed_dictionaries(
            dict.fromkeys(("forward", "backward"), _MILLISECONDS),
            optional=dict.fromkeys(("data", "wait", "comm", "update"), _MILLISECONDS),
        ),
        min_size=2,
        max_size=3,
    ),
    st.lists(st.floats(0, 1), min_size=3, max_size=3),
)
def test_the_arithmetic_of_a_verdict_adds_up(phases_ms: list[dict[str, float]], shares: list[float]):
    verdict = judge_times(phases_ms, shares[: len(phases_ms)])
    for all_s, saved_s, remaining_s in itertools.chain(*map(list_differences, (verdict, *verdict.others))):
        assert remaining_s > 0
        assert all_s - saved_s == pytest.approx(remaining_s, rel=1e-6)  # as printed
    assert 0 <= verdict.gain < 1


def test_many_short_steps_share_the_number_of_the_last_sample():
    source = FakeSource(ranks=1)
    source.advance(300)
    source.history.add(ScalarRecord(0, {CORE_WAIT_NAME: [(200, 80.0, 2.0)]}))
    assert find_verdict(source.history, source.spec).cause == "cores"

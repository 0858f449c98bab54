"""The verdict of a view over time: it does not flip between two states."""

import dataclasses

import pytest

from dtkit._util import timeouts
from dtkit.dashboard.summary.metrics import RunMetrics, compute_run_metrics
from dtkit.dashboard.summary.steady_verdict import SteadyVerdict
from dtkit.dashboard.summary.verdict import Verdict
from tests.support.fake_source import FakeSource

DATA, WAITING = Verdict("data", "waiting for data: save up to 30 %", 0.3), Verdict("waiting", "nodes wait", 0.31)
DIVERGED = Verdict("diverged", "the loss is NaN", 0.0)
COMPUTING = Verdict("computing", "computing is 95 % of a step", 0.0)
HOLD_S = timeouts.VERDICT_HOLD_S


def beside(found: Verdict, *others: Verdict) -> Verdict:
    """Return a verdict of a look in which the other causes were measured, too."""
    return dataclasses.replace(found, others=others)


def test_two_causes_in_turn_leave_the_line_alone():
    steady = SteadyVerdict()
    looks = beside(DATA, WAITING), beside(WAITING, DATA)
    shown = [steady.update(looks[k % 2], 2.0 * k) for k in range(20)]
    assert set(shown) == {DATA}


@pytest.mark.parametrize("first", [0, 1])
def test_other_programs_that_come_and_go_leave_the_line_alone(first):
    """Next to waits for a core, one process is not estimated, so that the looks don't list each other's cause."""
    cores = Verdict("cores", "nodes had no core for 20 % of their time: the browser used it", 0.2)
    batch = Verdict("one process", "one process is faster: use a larger batch", 0.5)
    steady, looks = SteadyVerdict(), [cores, beside(batch, dataclasses.replace(cores, gain=0.06))]
    shown = [steady.update(looks[(first + k) % 2], 2.0 * k).cause for k in range(21)]
    assert set(shown) == {looks[first].cause}
    lasting = looks[1 - first]
    shown = [steady.update(lasting, 100.0 + at).cause for at in (0.0, HOLD_S - 0.1, HOLD_S)]
    assert shown == [looks[first].cause] * 2 + [lasting.cause]


def test_a_cause_that_lasts_replaces_the_shown_one():
    steady = SteadyVerdict()
    steady.update(DATA, 0.0)
    waiting = beside(WAITING, DATA)
    assert steady.update(waiting, 10.0) is DATA
    assert steady.update(waiting, 10.0 + HOLD_S - 0.1) is DATA
    assert steady.update(waiting, 10.0 + HOLD_S) is waiting


def test_a_cause_that_the_bars_no_longer_show_is_dropped_at_once():
    steady = SteadyVerdict()
    steady.update(DATA, 0.0)
    assert steady.update(COMPUTING, 2.0) is COMPUTING


def test_a_far_larger_cause_shows_at_once():
    larger, steady = Verdict("waiting", "nodes wait", 0.6), SteadyVerdict()
    steady.update(COMPUTING, 0.0)
    assert steady.update(DATA, 2.0) is DATA
    found = beside(larger, DATA)
    assert steady.update(found, 4.0) is found


def test_a_held_line_has_the_present_numbers_of_its_cause():
    steady, smaller = SteadyVerdict(), Verdict("data", "waiting for data: save up to 22 %", 0.22)
    steady.update(DATA, 0.0)
    assert steady.update(beside(WAITING, smaller), 2.0) is smaller
    assert steady.update(beside(WAITING, smaller), 2.0 + HOLD_S).cause == "waiting"


def test_measurements_around_a_limit_do_not_flip_the_line():
    """A cause of 8 to 12 % is above the smallest gain of a verdict in every other look."""
    shown, steady = [], SteadyVerdict()
    for k in range(20):
        data = Verdict("data", "waiting for data", 0.1 + 0.02 * (-1) ** k)
        found = data if data.gain >= 0.1 else beside(COMPUTING, data)
        shown.append(steady.update(found, 2.0 * k).cause)
    assert set(shown) == {"data"}


def test_numbers_that_vary_a_little_leave_the_line_alone():
    steady = SteadyVerdict()
    steady.update(DATA, 0.0)
    assert steady.update(Verdict("data", "save up to 33 %", 0.33), 100.0) is DATA


def test_another_node_that_is_the_slowest_replaces_the_shown_one():
    first, other = (Verdict("straggler", f"without node {rank}", 0.3, (), (rank,)) for rank in (0, 1))
    steady = SteadyVerdict()
    steady.update(first, 0.0)
    assert steady.update(other, 10.0) is first
    assert steady.update(other, 10.0 + HOLD_S) is other


def test_a_share_in_the_text_follows_the_measurements_at_once():
    """Nothing holds the run back all the time, but the line must not name other shares than the tiles and bars."""
    first, later = (Verdict("computing", f"computing is {share} % of a step", 0.0) for share in (90, 60))
    steady = SteadyVerdict()
    steady.update(first, 0.0)
    assert steady.update(later, 10.0) is later


def test_what_can_not_wait_shows_at_once():
    steady = SteadyVerdict()
    steady.update(DATA, 0.0)
    assert steady.update(DIVERGED, 0.1) is DIVERGED
    assert steady.update(DATA, 0.2) is DATA
    assert steady.update(WAITING, 0.3, is_final=True) is WAITING
    assert steady.update(None, 0.4) is None
    assert steady.update(DATA, 0.5) is DATA


def test_a_slow_node_is_named_beside_another_line_once_it_has_lasted():
    """On a busy machine, one of two equal nodes was named for a moment."""
    run = FakeSource(ranks=2)
    run.slowness = {1: 2.0}
    run.advance(60)
    slow = compute_run_metrics(run.history, 2, {})
    equal = dataclasses.replace(slow, timing=dataclasses.replace(slow.timing, straggler=None))
    steady = SteadyVerdict()
    steady.update(Verdict("cores", "nodes had no core for 60 % of their time", 0.4), 0.0)

    def is_named(metrics: RunMetrics, now: float) -> bool:
        return steady.match(metrics, now).timing.straggler is not None

    assert [is_named(metrics, 1.0 * k) for k, metrics in enumerate([slow, equal] * 20)] == [False] * 40
    assert [is_named(slow, 100 + at) for at in (0.0, HOLD_S - 0.1, HOLD_S)] == [False, False, True]
    assert not is_named(equal, 200.0)
    steady.update(Verdict("cores", "nodes had no core for 60 % of their time", 0.4), 201.0, is_final=True)
    assert is_named(slow, 201.0)  # of a run at rest, as its saved picture has it

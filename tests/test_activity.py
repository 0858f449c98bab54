"""What views say of a run that takes no steps, and of a repair that ended."""

import dataclasses
import time

import pytest

from dtkit.dashboard.summary.activity import describe_last_repair, find_activity
from dtkit.dashboard.summary.metrics import build_tiles, compute_run_metrics
from dtkit.dashboard.summary.notices import collect_notices
from dtkit.types import Event, State
from tests.support.fake_source import FakeSource

REPAIRED = "node 1 replaced in 7.9 s, no step lost"


def make_lost_source():
    source = FakeSource(ranks=3)
    source.advance(20)
    source.history.add(Event(20, "lost", "node 1 lost", time.time() - 4.2, 1))
    return source


def test_run_without_a_lost_or_stuck_node_takes_steps():
    source = FakeSource()
    source.advance(5)
    assert find_activity(source) is None


def test_recovery_is_named_with_its_seconds_and_without_a_throughput():
    source = make_lost_source()
    activity = find_activity(source)
    assert activity.text == "recovering node 1"
    assert activity.format_short() == "↻ recovering node 1, 4 s"
    tile = next(build_tiles(source, compute_run_metrics(source.history, 3)))
    assert (tile.value, tile.note) == ("—", "no steps are taken")


@pytest.mark.parametrize("state", [State.PAUSED, State.STOPPED, State.FAILED])
def test_run_that_rests_does_not_recover(state: State):
    source = make_lost_source()
    source.state = state
    assert find_activity(source) is None


def test_stuck_node_is_named_with_phase_and_seconds():
    source = FakeSource(ranks=3)
    source.advance(20)
    source.stick(1)
    assert find_activity(source).format_short() == "⊘ stuck: node 1 in forward, 12 s"
    source.stall_report = dataclasses.replace(source.stall_report, rank=None)
    assert find_activity(source).text == "stuck: no node moves"


def test_repair_is_shown_until_something_newer():
    lost, repair = Event(20, "lost", "node 1 lost", 100.0, 1), Event(20, "repair", "long", 109.0, None, REPAIRED)
    events = [
        Event(3, "lost", "node 2 lost", 50.0, 2),
        Event(3, "repair", "earlier", 52.0, None, "earlier"),
        lost,
        repair,
    ]
    prints = [Event(30, "print", "hello", 120.0, 0)] * 5
    assert describe_last_repair([*events, *prints]) == REPAIRED
    assert describe_last_repair([*events, Event(31, "lr", "learning rate 0.1", 130.0, None)]) is None
    assert describe_last_repair([lost]) is None
    assert describe_last_repair([]) is None


def test_repair_is_a_notice_of_a_run_that_goes_on():
    source = make_lost_source()
    source.history.add(Event(20, "repair", "long", time.time() + 4.8, None, REPAIRED))
    notices = [notice.text for notice in collect_notices(source) if notice.kind == "repaired"]
    assert notices == [REPAIRED]
    source.end()
    assert not [notice for notice in collect_notices(source) if notice.kind == "repaired"]

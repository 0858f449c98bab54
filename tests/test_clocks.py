"""Comparison of hosts' clocks by barriers."""

from __future__ import annotations

import pytest

from dtkit.rpc.clocks import ClockComparison, ClockReading

DAY = 1.7e9


def make_readings(offset: float, delays: list[tuple[float, float]], wall: float = 0.0) -> list[list[ClockReading]]:
    """Return readings of two ranks. Each barrier takes the given seconds from rank 0 to 1, and from 1 to 0."""
    first, second = [], []
    for k, (there, back) in enumerate(delays):
        first.append(ClockReading(k, k + back, DAY + k + back))
        second.append(ClockReading(k + offset, k + there + offset, DAY + k + there + wall))
    return [first, second]


def test_offset_is_within_its_error_on_an_asymmetric_network():
    clocks = ClockComparison.from_readings(make_readings(1000.0, [(0.030, 0.001), (0.020, 0.001), (0.050, 0.002)]))
    assert clocks.offsets[0] == clocks.errors[0] == 0.0
    assert abs(clocks.offsets[1] - 1000.0) <= clocks.errors[1] == pytest.approx(0.0105)


def test_the_shortest_barrier_decides_the_error():
    clocks = ClockComparison.from_readings(make_readings(-5.0, [(0.1, 0.1), (0.001, 0.001), (0.2, 0.2)]))
    assert clocks.offsets[1] == pytest.approx(-5.0)
    assert clocks.errors[1] == pytest.approx(0.001)


def test_only_large_differences_are_mentioned_once_for_each_host():
    hosts = ["host1", "host2"]
    assert ClockComparison.from_readings(make_readings(1000.0, [(0.001, 0.001)])).describe(hosts) == []
    (note,) = ClockComparison.from_readings(make_readings(1000.0, [(0.001, 0.001)], wall=-3.0)).describe(hosts)
    assert note.startswith("The clock of host2 is 3.00 s behind that of host1 (to within 1.0 ms): times in logs differ")
    (note,) = ClockComparison.from_readings(make_readings(0.0, [(0.02, 0.02)])).describe(hosts)
    assert note == "Timelines of host2 are exact to 20 ms only: the network is slow."
    twice = ClockComparison((0.0, 0.0, 9.0, 9.0), (0.0, 0.0, 1e-4, 1e-4), (0.0, 0.0, 9.0, 9.0))
    assert len(twice.describe(["host1", "host1", "host2", "host2"])) == 1

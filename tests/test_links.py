"""Slow links between hosts, by counters of their connections."""

from __future__ import annotations

import dataclasses

import pytest

from dtkit.health.link_traffic import LinkTraffic
from dtkit.health.links import HostPair, LinkSpeed, SlowLinkDetector, find_slow_link
from dtkit.health.status import EngineStatus

ADDRESSES = ("10.0.0.1", "10.0.0.2")
FAST, SLOW = LinkSpeed(1e6, 0.05, 100e6), LinkSpeed(1e6, 0.9, 2.1e6)
RING = [HostPair("a", "b"), HostPair("b", "c"), HostPair("c", "a")]


@pytest.mark.parametrize(
    ("slow", "subject"),
    [
        ([], None),
        ([0], "the link from a to b is"),
        ([0, 1], "b: its link is"),
        ([0, 2], "a: its link is"),
    ],
    ids=str,
)
def test_the_subject_is_what_all_slow_links_have_in_common(slow: list[int], subject: str | None):
    speeds = {pair: SLOW if k in slow else FAST for k, pair in enumerate(RING)}
    found = find_slow_link(speeds, {})
    assert subject == (None if found is None else found.subject)


def test_the_text_has_both_speeds_and_a_remedy():
    found = find_slow_link({RING[0]: SLOW, RING[1]: SLOW, RING[2]: FAST}, {})
    assert found is not None
    assert found.text.startswith("b: its link is slow: 2.1 MB/s, 100 MB/s elsewhere; in use 90 % of the time. ")
    assert "interface=" in found.text


def test_two_hosts_are_compared_with_their_own_earlier_speed():
    pair = HostPair("a", "b"), HostPair("b", "a")
    found = find_slow_link(dict.fromkeys(pair, SLOW), dict.fromkeys(pair, 100e6))
    assert found is not None
    assert found.text.startswith("the link between a and b is slow: 2.1 MB/s, 100 MB/s before; ")
    assert find_slow_link(dict.fromkeys(pair, SLOW), {}) is None
    assert find_slow_link({pair[0]: SLOW, pair[1]: FAST}, {}) is None  # the same cable


@pytest.mark.parametrize(
    "changed",
    [{"busy": 0.4}, {"rate": 30e6}, {"num_bytes": 5e6}, {"num_bytes": 0, "rate": 0}],
    ids=["rarely in use", "not so slow", "others carry less", "cut"],
)
def test_a_link_that_delays_nobody_is_no_news(changed: dict[str, float]):
    speeds = {RING[0]: dataclasses.replace(SLOW, **changed), RING[1]: FAST, RING[2]: FAST}
    assert find_slow_link(speeds, {}) is None


# -- the detector -----------------------------------------------------------------------------------------


def make_status(rank: int, observed_at: float, *links: LinkTraffic, pid: int = 7) -> EngineStatus:
    """Return the status of one of two ranks, in a collective."""
    return EngineStatus(
        rank=rank,
        world_size=2,
        generation=0,
        host=f"host{rank}",
        pid=pid,
        process_start_time=1.0,
        observed_at=observed_at,
        op="advance",
        phase="collective",
        phase_since=0.0,
        stalled_s=0.0,
        is_blocked=True,
        blocked_fraction=None,
        links=links,
    )


class Kernel:
    """Counters of two ranks on two hosts, whose links are in use all the time."""

    def __init__(self) -> None:
        self.now, self.acked, self.pid = 0.0, 0.0, 7

    def run(self, seconds: float, rate: float) -> None:
        self.now, self.acked = self.now + seconds, self.acked + seconds * rate

    def read(self) -> list[tuple[str, EngineStatus]]:
        ends = [(address, 1000) for address in ADDRESSES]
        links = [LinkTraffic(ends[k], ends[1 - k], int(self.acked), self.now, 0.0) for k in range(2)]
        return [(f"host{k}", make_status(k, self.now, links[k], pid=self.pid)) for k in range(2)]


def test_two_checks_in_a_row_report_a_slow_link_once():
    kernel = Kernel()
    detector = SlowLinkDetector(kernel.read)

    def check(rate: float) -> str:
        kernel.run(2.0, rate)
        found = detector.check(kernel.now)
        return "" if found is None else found.text

    assert [check(100e6) for _ in range(3)] == [""] * 3
    assert check(1e6) == ""  # once may be chance
    assert check(100e6) == ""
    assert check(1e6) == ""
    assert check(1e6).startswith("the link between host0 and host1 is slow: 1 MB/s, 100 MB/s before")
    assert [check(1e6) for _ in range(3)] == [""] * 3


def test_checks_between_two_periods_and_new_processes_compare_nothing():
    kernel = Kernel()
    detector = SlowLinkDetector(kernel.read)
    for k in range(10):
        kernel.pid += 1
        kernel.run(2.0, 100e6 if k < 5 else 1e6)
        assert detector.check(kernel.now) is None
        assert detector.check(kernel.now + 1) is None


def test_a_status_keeps_its_links_as_json():
    link = LinkTraffic((ADDRESSES[0], 1), (ADDRESSES[1], 2), 3, 4.0, 5.0)
    status = make_status(0, 1.0, link)
    assert EngineStatus.from_json(status.to_json()) == status

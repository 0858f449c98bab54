"""Slow links between hosts, found in the traffic of a training.

Each engine's kernel counts, for each connection to another rank, the acknowledged bytes and the time in which sent
bytes waited for it. Their ratio is the speed of the link while it is in use, and needs no traffic of its own. A link is
slow if it is in use half of the time, at a quarter of the speed of comparable links: those of other hosts, or itself
earlier in this run. Two checks in a row have to agree.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from typing import TYPE_CHECKING, NamedTuple

from dtkit._util import timeouts
from dtkit._util.formatting import format_bytes, format_percent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.health.status import EngineStatus

MIN_BUSY, SLOW_RATIO, COMPARABLE = 0.5, 4.0, 0.25
"""Share of the time in use, ratio of speeds, and share of the bytes that another link must carry to be compared."""
_REMEDY = "Name another network between the hosts with interface=, or start the cluster without that host"


class HostPair(NamedTuple):
    """Hosts at the two ends of a link, by name."""

    sender: str
    receiver: str


@dataclasses.dataclass(frozen=True)
class LinkSpeed:
    """Use of a link between two samples."""

    num_bytes: float
    """Acknowledged bytes per second of the whole time."""
    busy: float
    """Share of the time in use."""
    rate: float
    """Bytes per second while in use."""


@dataclasses.dataclass(frozen=True)
class SlowLink:
    """A link, or a host with several of them, that delays the others."""

    subject: str
    rate: float
    reference: float
    """Speed of the links that it is compared with, in bytes per second."""
    is_change: bool
    """Whether it is compared with itself, earlier in the run."""
    busy: float

    @property
    def text(self) -> str:
        """Sentence for the user, with the remedy."""
        rates = f"{format_bytes(self.rate)}/s"
        compared = f"{format_bytes(self.reference)}/s" + (" before" if self.is_change else " elsewhere")
        return f"{self.subject} slow: {rates}, {compared}; in use {format_percent(self.busy)} of the time. {_REMEDY}"


class SlowLinkDetector:
    """Detector of one run. `read_statuses` returns (host, last status) of each rank."""

    def __init__(self, read_statuses: Callable[[], Sequence[tuple[str, EngineStatus]]]) -> None:
        self._read_statuses = read_statuses
        self._checked_at = -math.inf
        self._last: dict[int, EngineStatus] = {}
        self._best: dict[HostPair, float] = {}
        self._suspect = self._reported = ""

    def check(self, now: float) -> SlowLink | None:
        """Return a link that has become slow, else None. `now` is in seconds on a monotonic clock."""
        if now - self._checked_at < timeouts.LINK_CHECK_S:
            return None
        self._checked_at = now
        speeds = self._measure(self._read_statuses())
        if not speeds:
            return None
        found = find_slow_link(speeds, self._best)
        for pair, speed in speeds.items():
            self._best[pair] = max(speed.rate, self._best.get(pair, 0.0))
        before, self._suspect = self._suspect, "" if found is None else found.subject
        if found is None or found.subject != before or found.subject == self._reported:
            return None
        self._reported = found.subject
        return found

    def _measure(self, statuses: Sequence[tuple[str, EngineStatus]]) -> dict[HostPair, LinkSpeed]:
        """Return the speed of each link that was in use since the last call: that of its busiest connection."""
        hosts = {link.local[0]: host for host, status in statuses for link in status.links}
        speeds: dict[HostPair, LinkSpeed] = {}
        for host, status in statuses:
            before, self._last[status.rank] = self._last.get(status.rank), status
            if before is None or before.pid != status.pid:
                continue
            for remote, speed in _compare_statuses(before, status):
                pair = HostPair(host, hosts.get(remote, host))
                if pair.sender != pair.receiver and (pair not in speeds or speeds[pair].busy < speed.busy):
                    speeds[pair] = speed
        return speeds


def _compare_statuses(before: EngineStatus, after: EngineStatus) -> list[tuple[str, LinkSpeed]]:
    """Return (remote address, speed) of each connection that was in use between two statuses of an engine."""
    seconds = after.observed_at - before.observed_at
    earlier = {(link.local, link.remote): link for link in before.links}
    speeds = []
    for link in after.links:
        first = earlier.get((link.local, link.remote))
        if first is not None and seconds > 0 and (busy_s := link.busy_s - first.busy_s) > 0:
            num_bytes = link.acked_bytes - first.acked_bytes
            # A late acknowledgement of the last packet counts as use of the link, though not in the kernel's rate.
            rate = max(num_bytes / busy_s, link.rate if num_bytes else 0.0)
            speeds.append((link.remote[0], LinkSpeed(num_bytes / seconds, min(1.0, busy_s / seconds), rate)))
    return speeds


def find_slow_link(speeds: Mapping[HostPair, LinkSpeed], best: Mapping[HostPair, float]) -> SlowLink | None:
    """Return the slow link, or the host whose links are slow, if there is one. `best` has earlier speeds."""
    slow: dict[HostPair, tuple[float, bool]] = {}
    for pair, speed in speeds.items():
        references = [(_find_speed_elsewhere(pair, speeds), False), (best.get(pair, 0.0), True)]
        fitting = [reference for reference in references if speed.rate * SLOW_RATIO < reference[0]]
        if speed.busy >= MIN_BUSY and speed.num_bytes and fitting:  # without bytes it is cut, not slow
            slow[pair] = fitting[0]
    if not slow:
        return None
    pair = min(slow, key=lambda pair: speeds[pair].rate)
    return SlowLink(_name_subject(slow), speeds[pair].rate, *slow[pair], speeds[pair].busy)


def _find_speed_elsewhere(pair: HostPair, speeds: Mapping[HostPair, LinkSpeed]) -> float:
    """Return the usual speed between other hosts, or where one of the two hosts has no part; 0 if there is none."""
    least = COMPARABLE * speeds[pair].num_bytes
    others = {other: speed.rate for other, speed in speeds.items() if {*other} != {*pair} and speed.num_bytes >= least}
    groups = [[rate for other, rate in others.items() if host not in other] for host in pair]
    return max((statistics.median_high(rates) for rates in [[*others.values()], *groups] if rates), default=0.0)


def _name_subject(pairs: Mapping[HostPair, object]) -> str:
    """Return the host that all pairs have in common, or the first pair."""
    counts = collections.Counter(host for pair in pairs for host in pair)
    common = [host for host, count in counts.items() if count == len(pairs)]
    if len(common) == 1:
        return f"{common[0]}: its link is"
    sender, receiver = min(pairs)
    direction = "between" if len(pairs) > 1 else "from"
    return f"the link {direction} {sender} {'and' if len(pairs) > 1 else 'to'} {receiver} is"

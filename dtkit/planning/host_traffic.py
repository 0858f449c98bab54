"""Bytes that a strategy sends from one host to another, where a network is slower than memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dtkit._util import formatting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def count_ring_bytes(sent_bytes: Sequence[float], hosts: Sequence[str]) -> float:
    """Return the bytes that cross between hosts if each rank sends to the next one, and the last one to the first."""
    following = [*hosts[1:], hosts[0]]
    return sum(sent for sent, here, there in zip(sent_bytes, hosts, following, strict=True) if here != there)


def describe_host_traffic(sent_bytes: Mapping[str, Sequence[float]], hosts: Sequence[str]) -> list[str]:
    """Return a note on the traffic between several hosts, for strategies whose collectives are rings of all ranks."""
    if len(set(hosts)) == 1:
        return []
    crossing = {name: count_ring_bytes(sent, hosts) for name, sent in sent_bytes.items()}
    known = [
        f"{name} {formatting.format_bytes(round(nbytes))}"
        for name, nbytes in crossing.items()
        if not math.isnan(nbytes)
    ]
    return [f"between {len(set(hosts))} hosts, a step sends: {', '.join(known)}"] if known else []

"""Bytes between hosts, counted along a ring of ranks."""

from __future__ import annotations

import math

import pytest

from dtkit.planning.host_traffic import count_ring_bytes, describe_host_traffic


@pytest.mark.parametrize(
    ("hosts", "crossings"),
    [("aaaa", 0), ("aabb", 2), ("abab", 4), ("aabbcc", 3), ("ab", 2)],
    ids=str,
)
def test_a_ring_crosses_between_hosts_where_neighbors_differ(hosts: str, crossings: int):
    assert count_ring_bytes([10.0] * len(hosts), list(hosts)) == 10 * crossings


def test_a_plan_notes_the_traffic_of_several_hosts_alone():
    sent = {"DataParallel()": [3e6, 3e6], "TensorParallel(2)": [math.nan, math.nan]}
    assert describe_host_traffic(sent, ["a", "a"]) == []
    assert describe_host_traffic(sent, ["a", "b"]) == ["between 2 hosts, a step sends: DataParallel() 6 MB"]
    assert describe_host_traffic({"TensorParallel(2)": [math.nan]}, ["a", "b"][:1]) == []

"""Devices of engines that take the place of lost ones on another host."""

from __future__ import annotations

import pytest

from dtkit.errors import ClusterError
from dtkit.rpc.host_devices import choose_devices

GPUS = {"a": 2, "b": 2, "c": 4, "none": 0}


@pytest.mark.parametrize(
    ("devices", "hosts", "new_ranks", "expected"),
    [
        (["cuda:0", "cuda:1", "cuda:0", "cuda:1"], ["a", "a", "b", "b"], [3], "0101"),
        (["cuda:0", "cuda:1", "cuda:0", "cuda:1"], ["a", "a", "c", "c"], [2, 3], "0101"),
        (["cuda:0", "cuda:1", "cuda:0"], ["c", "c", "c"], [2], "012"),
        (["cuda:3", "cuda:0"], ["a", "b"], [0], "00"),
        (["cuda:0", "cuda:1", "cuda:0", "cuda:1"], ["c", "c", "c", "c"], [2, 3], "0123"),
    ],
    ids=["same host", "empty host", "number is taken", "number is too large", "two join others"],
)
def test_a_new_engine_gets_a_free_gpu_of_its_host(
    devices: list[str], hosts: list[str], new_ranks: list[int], expected: str
):
    chosen = choose_devices(devices, hosts, GPUS, new_ranks, "cpu:gloo,cuda:nccl")
    assert chosen == tuple(f"cuda:{k}" for k in expected)


def test_engines_on_cpus_stay_there():
    assert choose_devices(["cpu", "cpu"], ["a", "none"], GPUS, [1], "gloo") == ("cpu", "cpu")


def test_a_host_without_a_free_gpu_is_refused_unless_engines_may_share():
    devices, hosts = ["cuda:0", "cuda:1", "cuda:0"], ["a", "a", "a"]
    with pytest.raises(ClusterError, match=r"a has 2 GPUs, and each has an engine already.*on_failure='shrink'"):
        choose_devices(devices, hosts, GPUS, [2], "cpu:gloo,cuda:nccl")
    assert choose_devices(devices, hosts, GPUS, [2], "gloo")[2] == "cuda:0"
    with pytest.raises(ClusterError, match="none took the place of a lost host, and has no GPU"):
        choose_devices(["cuda:0"], ["none"], GPUS, [0], "gloo")

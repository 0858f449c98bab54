"""Samples of an engine's CPU, network and memory."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from dtkit._util import timeouts
from dtkit._util.resources import find_loopback_interface
from dtkit.engine.observe.system_monitor import SystemMonitor
from dtkit.history.history import History
from dtkit.history.scalars import ScalarRecord

if TYPE_CHECKING:
    from dtkit.types import Scalars


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_rates_need_two_samples():
    clock = Clock()
    monitor = SystemMonitor(clock)
    monitor.sample_if_due()
    assert set(monitor.take(3)) == {"system/memory (MB)"}
    clock.now += 0.1
    monitor.sample_if_due()  # too early
    assert monitor.take(4) == {}
    clock.now += 2.4
    monitor.sample_if_due()
    scalars = monitor.take(5)
    assert {"system/CPU (cores)", "system/memory (MB)"} <= set(scalars)
    ((step, memory_mb, count),) = scalars["system/memory (MB)"]
    assert (step, count) == (5, 1.0)
    assert 10 < memory_mb < 1e6
    ((_, cores, _),) = scalars["system/CPU (cores)"]
    assert cores >= 0


def test_network_cards_are_counted_without_loopback_and_only_between_hosts(monkeypatch: pytest.MonkeyPatch):
    """Ranks on one host exchange gradients by its memory: the cards' traffic contradicted the size of the gradients."""
    counted = dict.fromkeys((find_loopback_interface(), "card"), SimpleNamespace(bytes_sent=1e6))
    monkeypatch.setattr(psutil, "net_io_counters", lambda **_: dict(counted))
    clock = Clock()
    monitor = SystemMonitor(clock)

    def sample_twice() -> Scalars:
        for _ in range(2):
            monitor.sample_if_due()
            clock.now += 2.0
            counted.update({name: SimpleNamespace(bytes_sent=one.bytes_sent + 8e6) for name, one in counted.items()})
        return monitor.take(1)

    assert "system/network cards (MB/s)" not in sample_twice()
    monitor.has_other_hosts = True
    sample_twice()
    assert sample_twice()["system/network cards (MB/s)"] == [(1, 8.0, 2.0)]


def test_a_run_shorter_than_a_period_has_samples():
    clock = Clock()
    monitor = SystemMonitor(clock)
    found = []
    for step in range(4):  # dispatches, without the watchdog
        found.append(monitor.take(step))
        clock.now += 0.3
    assert [len(scalars) for scalars in found] == [1, 2, 2, 2]
    assert found[3]["system/memory (MB)"][0][0] == 3


def test_several_samples_become_their_mean():
    clock = Clock()
    monitor = SystemMonitor(clock)
    for _ in range(4):
        monitor.sample_if_due()
        clock.now += 2.0
    clock.now -= 1.9
    scalars = monitor.take(9)
    assert [rows[0][2] for rows in scalars.values()] == [4.0, 3.0]
    assert monitor.take(10) == {}


def test_numbers_of_the_system_are_apart_from_the_users():
    history = History()
    history.add(ScalarRecord(0, {"system/CPU (cores)": [(1, 2.0, 2.0)], "kl": [(1, 0.5, 1.0)]}))
    assert history.scalar_names == ["kl"]
    assert history.system_names == ["system/CPU (cores)"]
    steps, cores = history.scalar("system/CPU (cores)", 0)
    assert (steps.tolist(), cores.tolist()) == ([1], [1.0])


@pytest.mark.parametrize("since_s", [0.2, 0.01])
def test_the_last_step_of_a_run_has_a_sample_however_short_it_is_after_the_last_one(since_s: float):
    clock = Clock()
    monitor = SystemMonitor(clock)
    monitor.take(1, 110)
    clock.now += 0.3
    before = monitor.take(65, 110)
    clock.now += since_s
    assert monitor.take(80, 110) == {}
    scalars = monitor.take(110, 110)
    assert set(scalars) == set(before) == {"system/memory (MB)", "system/CPU (cores)"}
    assert all(rows[0][0] == 110 for rows in scalars.values())
    if since_s < timeouts.SYSTEM_LAST_SAMPLE_S:
        assert [rows[0][1] for rows in scalars.values()] == [rows[0][1] for rows in before.values()]


class NVMLError(Exception):
    """The library's error, such as for a GPU that it doesn't know."""


def make_library(uuid: str) -> SimpleNamespace:
    """Return the part of NVIDIA's library that is called, with one GPU. The tests have none."""

    def find(asked: str) -> str:
        if asked != uuid:
            raise NVMLError
        return "handle"

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=find,
        nvmlDeviceGetUtilizationRates=lambda handle: {"handle": SimpleNamespace(gpu=87)}[handle],
        nvmlDeviceGetMemoryInfo=lambda handle: {"handle": SimpleNamespace(used=5_000_000_000)}[handle],
    )


@pytest.mark.parametrize(
    ("uuid", "expected"), [("GPU-a1", {"system/GPU (%)": 87.0, "system/GPU memory (MB)": 5000.0}), ("GPU-b2", {})]
)
def test_a_gpu_that_the_library_knows_is_sampled(
    monkeypatch: pytest.MonkeyPatch, uuid: str, expected: dict[str, float]
):
    monkeypatch.setitem(sys.modules, "pynvml", make_library(uuid))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid="a1"))
    monitor = SystemMonitor(Clock())
    monitor.sample_if_due()
    sampled = {name: points[0][1] for name, points in monitor.take(3).items() if "GPU" in name}
    assert sampled == expected

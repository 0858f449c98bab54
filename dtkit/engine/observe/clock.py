"""Clocks for the phases of a step, on a CPU or a GPU, and timings of single calls."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


class Clock:
    """A clock whose marks within steps are read as seconds once a dispatch has ended.

    Read marks after :meth:`synchronize`. A mark is the time on a CPU. On CUDA it is an event in the stream, so that
    recording one never waits for the device.
    """

    def start_dispatch(self) -> None:
        """Begin a dispatch: later marks are read relative to this moment."""

    def record_mark(self) -> object:
        """Return a mark for this moment."""
        return time.perf_counter()

    def read_events(self, events: list[tuple[str, object, Any]]) -> list[tuple[str, object, Any]]:
        """Return events (phase, mark, position) with times in seconds as marks, so that each mark is read once."""
        return events

    def synchronize(self) -> None:
        """Wait until the device has reached all marks."""

    def read_mark(self, mark: object) -> float:
        """Return the time of a mark in seconds, as in `time.perf_counter`."""
        return mark  # type: ignore[return-value]

    def compute_elapsed(self, start: object, end: object) -> float:
        """Return the seconds from one mark to another."""
        return self.read_mark(end) - self.read_mark(start)


class CudaClock(Clock):
    """A clock whose marks are events in the device's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.start_dispatch()

    def start_dispatch(self) -> None:
        """Relate the device's time to the host's: times of events are exact only relative to a recent one."""
        self.synchronize()
        self._reference_event, self._reference_s = self.record_mark(), time.perf_counter()

    def record_mark(self) -> object:
        """Return an event after all work that is enqueued so far."""
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def synchronize(self) -> None:
        """Wait for the device."""
        import torch

        torch.cuda.synchronize(self._device)

    def read_mark(self, mark: object) -> float:
        """Return the time at which the device reached the event."""
        return self._reference_s + self._reference_event.elapsed_time(mark) / 1000  # type: ignore[attr-defined, no-any-return]

    def read_events(self, events: list[tuple[str, object, Any]]) -> list[tuple[str, object, Any]]:
        """See :class:`Clock`."""
        return [(phase, self.read_mark(mark), position) for phase, mark, position in events]

    def compute_elapsed(self, start: object, end: object) -> float:
        """Return the seconds between two events."""
        return start.elapsed_time(end) / 1000  # type: ignore[attr-defined, no-any-return]


def make_clock(device: torch.device) -> Clock:
    """Return the clock for a device."""
    return CudaClock(device) if device.type == "cuda" else Clock()


def time_call(device: torch.device, work: Callable[[], Any]) -> float:
    """Return the seconds that the device takes for a call."""
    clock = make_clock(device)
    start = clock.record_mark()
    work()
    end = clock.record_mark()
    clock.synchronize()
    return clock.compute_elapsed(start, end)


def time_repeatedly(device: torch.device, work: Callable[[], Any], budget_s: float) -> list[float]:
    """Return the seconds of each call: at least three, and as many as fit into the budget, after a first one."""
    time_call(device, work)
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < budget_s:
        seconds.append(time_call(device, work))
    return seconds


def take_fast_quartile(seconds: Sequence[float]) -> float:
    """Return the fast quartile: disturbances make calls slower, never faster."""
    return sorted(seconds)[len(seconds) // 4]

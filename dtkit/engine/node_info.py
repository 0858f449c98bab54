"""What an engine can say of itself: versions, device, memory, and clocks that are right for the device."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def get_handshake() -> dict[str, object]:
    """Versions and place, without importing torch: the first thing a notebook asks an engine.

    Its keys are a contract between versions of dtkit; only add to them.
    """
    from dtkit import __version__

    return {
        "dtkit": __version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "cloudpickle": importlib.metadata.version("cloudpickle"),
        "torch": importlib.metadata.version("torch").partition("+")[0],
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "path": list(sys.path),
    }


def read_device_memory(device: torch.device) -> tuple[int, int]:
    """(total, free) bytes: of the GPU, else of this host within its limits."""
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return total, free
    from dtkit.cluster import resources

    found = resources.read_memory()
    return found.total, found.free


def read_used_memory(device: torch.device) -> int:
    """Bytes that this process holds: allocated on the GPU, else its resident set."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.memory_allocated(device))
    import psutil

    return int(psutil.Process().memory_info().rss)


class Clock:
    """Marks within steps, read as seconds once a dispatch has ended.

    ``mark()`` returns a token; :meth:`at` and :meth:`seconds` read tokens, after :meth:`wait_until_replaced`. On the
    CPU a token is the time; on CUDA it is an event in the stream, so that marking never waits for the device.
    """

    def start_dispatch(self) -> None:
        """A dispatch begins: later marks are read relative to now."""

    def record_mark(self) -> object:
        """Now."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """Wait until all marks have happened."""

    def read_mark(self, mark: object) -> float:
        """When it was, in seconds on the clock of `time.perf_counter`."""
        return mark  # type: ignore[return-value]

    def compute_elapsed(self, start: object, end: object) -> float:
        """Seconds from one mark to another."""
        return self.read_mark(end) - self.read_mark(start)


class CudaClock(Clock):
    """Marks are events in the device's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.start_dispatch()

    def start_dispatch(self) -> None:
        """Tie the device's time to the host's: events are exact relative to a near one only."""
        self.synchronize()
        self._reference_event, self._reference_s = self.record_mark(), time.perf_counter()

    def record_mark(self) -> object:
        """An event after all work that was enqueued so far."""
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def synchronize(self) -> None:
        """Wait for the device."""
        import torch

        torch.cuda.synchronize(self._device)

    def read_mark(self, mark: object) -> float:
        """When the event was reached."""
        return self._reference_s + self._reference_event.elapsed_time(mark) / 1000  # type: ignore[attr-defined, no-any-return]

    def compute_elapsed(self, start: object, end: object) -> float:
        """Seconds between two events."""
        return start.elapsed_time(end) / 1000  # type: ignore[attr-defined, no-any-return]


def make_clock(device: torch.device) -> Clock:
    """The clock for a device."""
    return CudaClock(device) if device.type == "cuda" else Clock()

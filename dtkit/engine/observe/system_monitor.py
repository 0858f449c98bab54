"""One engine's use of the machine: CPU, network cards, memory, and its GPU if NVIDIA's library is installed.

Ranks on one host exchange gradients by its memory, and those on several hosts through network cards. So the traffic of
the cards is counted only where a group has several hosts: elsewhere it says nothing about a training.

The watchdog's thread samples every two seconds; a sample takes less than 0.2 ms of CPU. The next dispatch that ends
returns the means since the last one, as numbers of a step with the prefix ``system/``. So they reach the history, its
log on disk and views like numbers of `dtkit.log`. At the end of a dispatch without a sample one is taken, so that short
runs have some, and at the last step of a run, so that lines reach its end. With a sample come the seconds that the
training thread waited for a core in its dispatches.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from dtkit._util import timeouts
from dtkit._util.resources import find_loopback_interface
from dtkit.engine.observe.core_wait import CoreWait
from dtkit.history.scalars import CORE_WAIT_NAME, SYSTEM_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.types import Scalars


class SystemMonitor:
    """Samples of this process and its host since the last :meth:`take`. Tests replace `clock`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # locks: for one sample, which takes less than a millisecond
        self._lock = threading.Lock()  # the watchdog samples, and the serving thread takes
        self.has_other_hosts = False
        """Whether ranks of the process group are on other hosts, so that network cards carry what they exchange."""
        self._sums: dict[str, tuple[float, int]] = {}
        self._last_values: dict[str, float] = {}
        self._core_wait = CoreWait()
        self._sampled_at = float("-inf")
        self._cpu_s = self._sent_bytes = 0.0
        self._process: Any = None
        self._gpu: Any = None

    def sample_if_due(self) -> None:
        """Take a sample, two seconds after the last one at the earliest."""
        self._sample_after(timeouts.SYSTEM_SAMPLE_S)

    def start_dispatch(self) -> None:
        """Begin to count how long the calling thread waits for a core."""
        self._core_wait.start()

    def take(self, step: int, last_step: int | None = None) -> Scalars:
        """Return the means of the samples since the last call, as numbers of `step`; the calling thread trains.

        At a run's `last_step` there is always a sample. One from less than an instant before counts again.
        """
        self._core_wait.stop()
        is_last = last_step is not None and step >= last_step
        if not self._sums:
            self._sample_after(timeouts.SYSTEM_LAST_SAMPLE_S if is_last else timeouts.SYSTEM_FIRST_SAMPLE_S)
        with self._lock:
            sums, self._sums = self._sums, {}
            if is_last and not sums:
                sums = {name: (value, 1) for name, value in self._last_values.items()}
        numbers = {SYSTEM_PREFIX + name: [(step, total, float(count))] for name, (total, count) in sums.items()}
        if sums and (counted := self._core_wait.take()) is not None:
            waited_s, seconds = counted
            numbers[CORE_WAIT_NAME] = [(step, 100 * waited_s, seconds)]
        return numbers

    def _sample_after(self, seconds: float) -> None:
        """Take a sample if the last one is at least this old."""
        with self._lock:
            now = self._clock()
            since = self._sampled_at
            if now - since < seconds:
                return
            self._sampled_at = now
            self._last_values = self._read(now - since)
            for name, value in self._last_values.items():
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + value, count + 1

    def _read(self, seconds: float) -> dict[str, float]:
        import psutil

        if self._process is None:
            self._process = psutil.Process()
        self._gpu = self._gpu or _open_gpu()
        times = self._process.cpu_times()
        cpu_s, sent_bytes = times.user + times.system, _count_sent_bytes() if self.has_other_hosts else 0.0
        before, self._cpu_s, self._sent_bytes = (self._cpu_s, self._sent_bytes), cpu_s, sent_bytes
        values = {"memory (MB)": self._process.memory_info().rss / 1e6}
        if seconds < float("inf"):  # rates need an earlier sample
            values["CPU (cores)"] = (cpu_s - before[0]) / seconds
            if self.has_other_hosts and before[1]:
                values["network cards (MB/s)"] = max(0.0, sent_bytes - before[1]) / 1e6 / seconds
        if self._gpu is not None:
            values |= _read_gpu(*self._gpu)
        return values


def _count_sent_bytes() -> float:
    """Return the bytes that the host's network cards have sent, without those of the loopback interface."""
    import psutil

    loopback = find_loopback_interface()
    return float(sum(card.bytes_sent for name, card in psutil.net_io_counters(pernic=True).items() if name != loopback))


def _open_gpu() -> tuple[Any, Any] | None:
    """Return NVIDIA's library and this process's GPU; None without them, or before torch has used a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        import pynvml
    except ImportError:
        return None
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    return None


def _read_gpu(library: Any, device: Any) -> dict[str, float]:
    rates, memory = library.nvmlDeviceGetUtilizationRates(device), library.nvmlDeviceGetMemoryInfo(device)
    return {"GPU (%)": float(rates.gpu), "GPU memory (MB)": memory.used / 1e6}


MONITOR = SystemMonitor()
"""The monitor of this process: an engine is one process."""

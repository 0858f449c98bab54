"""torch's profiler around some steps: a trace with dtkit's phases in it, and the times of operators.

The profiler has a clock of its own. One annotation at a known time relates it to the clock of the timeline
(`time.perf_counter`). So the notebook can merge the traces of all ranks.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile, record_function

from dtkit.history.profile import OperatorTime, RankProfile, merge_operators

if TYPE_CHECKING:
    import torch

    from dtkit.engine.observe.phase_timer import PhaseTimer

_CLOCK_MARK = "dtkit clock"
_PREFIX = "phase "


class StepProfiler:
    """A profile that is being recorded, from its construction until :meth:`stop`."""

    def __init__(self, phases: PhaseTimer, device: torch.device) -> None:
        self._phases = phases
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities)
        self._annotation: Any = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's remarks on its own events
            self._profile.start()
        self._clock_us = 1e6 * time.perf_counter()
        with record_function(_CLOCK_MARK):
            pass
        phases.on_phase = self._annotate

    def _annotate(self, phase: str) -> None:
        """End the annotation of the last phase, and begin that of `phase`."""
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        self._annotation = None
        if phase:
            self._annotation = record_function(f"{_PREFIX}{phase}")
            self._annotation.__enter__()

    def stop(self) -> RankProfile:
        """End the recording, and return its trace and operators."""
        self._phases.on_phase = None
        self._annotate("")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as above
            self._profile.stop()
            trace = self._export_trace()
            operators = [
                OperatorTime(average.key, average.count, 1e-6 * average.self_cpu_time_total, _get_device_s(average))
                for average in self._profile.key_averages()
                if average.key != _CLOCK_MARK and not average.key.startswith((_PREFIX, "ProfilerStep"))
            ]
        marks = [event["ts"] for event in trace["traceEvents"] if event.get("name") == _CLOCK_MARK]
        shift_us = self._clock_us - float(marks[0]) if marks else 0.0
        packed = gzip.compress(json.dumps(trace).encode(), compresslevel=3)
        return RankProfile(merge_operators(operators), packed, shift_us)

    def _export_trace(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        return trace


def _get_device_s(average: Any) -> float:
    """Return the seconds on a GPU."""
    return 1e-6 * float(getattr(average, "self_device_time_total", 0.0))

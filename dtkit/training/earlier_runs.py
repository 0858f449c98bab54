"""Runs before the current one. Engines keep their inputs, so that `verify` can still repeat these runs.

They keep data and model as they were sent, without trained weights and optimizer, as far as memory allows.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import psutil

from dtkit._util.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.training.run import Run

_MEMORY_FRACTION = 0.05
"""Largest part of the free memory for earlier runs' inputs."""


class EarlierRuns:
    """Earlier runs whose data and model the engines keep. They are freed with the last reference to a run."""

    def __init__(self, check_idle: Callable[[], None]) -> None:
        """`check_idle` raises RunError while another run is training."""
        self._check_idle = check_idle
        self._runs: list[weakref.ref[Run]] = []

    def add(self, run: Run) -> None:
        """Free a run's job, but keep its inputs. Frees the oldest runs' inputs if memory is short."""
        if run.is_released:
            return
        if not run.done():
            run.stop()
        run.lifecycle.release(Deadline(None, "release"), check_idle=self._check_idle)
        self._runs.append(weakref.ref(run))
        self._free_oldest()

    def _free_oldest(self) -> None:
        room = _MEMORY_FRACTION * psutil.virtual_memory().available
        kept = []
        for reference in reversed(self._runs):
            if (run := reference()) is None:
                continue
            room -= run.lifecycle.count_input_bytes()
            if room < 0:
                run.release()
            else:
                kept.append(reference)
        self._runs = kept[::-1]

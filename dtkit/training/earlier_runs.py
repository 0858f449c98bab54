"""Runs before the current one. Engines keep their inputs, so that `verify` can still repeat these runs.

They keep data and model as they were sent, without trained weights and optimizer, as far as memory allows. The notebook
keeps the weights of a run that was paused, since its only variable may get the new run.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import psutil

from dtkit._util import formatting
from dtkit._util.completion import hide_from_completion
from dtkit._util.deadline import Deadline
from dtkit.errors import NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.training.run import Run

_MEMORY_FRACTION = 0.05
"""Largest part of the free memory for earlier runs' inputs."""


@hide_from_completion("add")
class EarlierRuns:
    """Earlier runs whose data and model the engines keep. They are freed with the last reference to a run."""

    def __init__(self, check_idle: Callable[[], None]) -> None:
        """`check_idle` raises RunError while another run is training."""
        self._check_idle = check_idle
        self._runs: list[weakref.ref[Run]] = []
        self.replaced: Run | None = None
        """The last run that was paused when a later training took its place."""

    def __repr__(self) -> str:
        """Return the replaced run, if there is one, and how many earlier runs engines can still repeat."""
        kept = [reference for reference in self._runs if reference() is not None]
        replaced = "no paused run was replaced" if self.replaced is None else f"replaced={self.replaced.spec.name}"
        return f"EarlierRuns({replaced}, {formatting.format_count(len(kept), 'run')} kept for verify())"

    def add(self, run: Run) -> None:
        """Free a run's job, but keep its inputs. Frees the oldest runs' inputs if memory is short.

        Of a paused run, it keeps what it can, and prints what that is.
        """
        if run.is_released:
            return
        is_unfinished = not run.done()
        if is_unfinished:
            run.lifecycle.save_into_own_folder()
            run.note("a later training takes this run's place")
            run.stop()
        run.lifecycle.release(Deadline(None, "release"), check_idle=self._check_idle)
        self._runs.append(weakref.ref(run))
        if is_unfinished and run.status.step:
            self.replaced = run
            print(_describe_replacement(run))  # noqa: T201 - nobody asked to end it
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


def _describe_replacement(run: Run) -> str:
    """Return a line on a run that was paused: what remains of it, and how to get it back."""
    status, saved = run.status, run.lifecycle.last_checkpoint
    line = (
        f"{run.spec.name} was paused at step {status.step:,} of {status.steps:,}, and this training takes its place. "
    )
    if isinstance(run.exception, NonFiniteError) and run.exception.remedy == "train":
        return f"{line}Its parameters are ruined, so that nothing of it can be continued"
    if saved is not None and saved.step == status.step:
        return f"{line}To continue it later: cluster.train(..., resume_from={str(saved.path)!r})"
    if not run.lifecycle.has_weights:
        line += "Its weights and its optimizer's state are gone, since the engines did not send them. "
    else:
        line += "Its weights are in cluster.earlier_runs.replaced.model, and its optimizer's state is gone. "
    if saved is not None:
        return f"{line}Its last checkpoint is {str(saved.path)!r}"
    return f"{line}A paused run can be saved before the next training: run.save()"

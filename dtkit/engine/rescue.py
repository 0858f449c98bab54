"""State out of a broken group: what a survivor holds is taken without a word to the others, who may be gone.

:func:`rescue` is :func:`dtkit.engine.state.capture` without its agreements: a rank gives all that lies on it, and not
its share of what several hold. What comes of all survivors together may be more than enough, or have gaps where a lost
rank held the only copy.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit import checkpoint
from dtkit.engine.state import Capture, Captured, MemoryReader, restore
from dtkit.plain import Unsavable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.engine.trainer import Job


class _Rescue(Capture):
    """Takes what it is shown, and asks nobody."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.setting, job.layout)
        self.setting = dataclasses.replace(job.setting, group=None)

    def finish(self) -> Captured:
        """All that lies here. Raises Unsavable where something can't be taken along."""
        if self.problems:
            raise Unsavable(f"{'; '.join(self.problems)}: state that is passed on holds tensors, numbers and text only")
        return Captured(dict(self._slabs), {**self._facts, "own": {str(self.rank): self._own}})


def rescue(job: Job, *, tensors: bool) -> Captured:
    """What this rank holds of a job's state, not copied; without `tensors`, only what is this rank's own and plain."""
    archive = _Rescue(job)
    job.exchange(archive)
    found = archive.finish()
    facts = {**found.facts, "layout": dict(job.layout), "step": job.step}
    return Captured(found.slabs if tensors else {}, facts)


def revive(job: Job, found: Sequence[Captured]) -> None:
    """Put what survivors gave into a job that was made anew. Raises ValueError where it doesn't fit."""
    restore(job, MemoryReader([one.slabs for one in found], checkpoint.merge([one.facts for one in found])))

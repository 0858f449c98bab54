"""State out of a broken group: what a survivor holds is taken without a word to the others, who may be gone.

:func:`rescue` is :func:`dtkit.engine.state.capture.capture` without its agreements: a rank gives all that lies on it,
and not its share of what several hold. What comes of all survivors together may be more than enough, or have gaps where
a lost rank held the only copy.

One survivor for each part of the model gives all that it has. Those who stand at the same step give what is theirs
alone (random state, batch statistics, between two averagings parameters and optimiser): each goes on with its own, and
whoever is new with their mean. One who stands at another step has parameters and rows of that step, which are of no
use in this one; but an optimiser of its own, which it keeps.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from dtkit.checkpoint import checkpoint
from dtkit.checkpoint.json_values import UnsupportedValueError
from dtkit.engine.state.capture import Capture, Captured, MemoryReader, restore
from dtkit.types import ALL, OWN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.engine.job import Job
    from dtkit.engine.state.capture import Slab


class _Rescue(Capture):
    """Takes what it is shown, and asks nobody."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.setting, job.layout)
        self.setting = dataclasses.replace(job.setting, group=None)
        self._weights: dict[str, float] = {}

    def differing(self, place: str, named: Mapping[str, torch.Tensor], weight: float | None) -> None:
        """See :class:`Archive`. The mean is taken where all survivors' parts have come together."""
        super().differing(place, named, weight)
        if weight is not None:
            self._weights.update({f"{place}/{name}": weight for name in named})

    def finish(self) -> Captured:
        """All that lies here. Raises Unsavable where something can't be taken along."""
        if self.problems:
            raise UnsupportedValueError(
                f"{'; '.join(self.problems)}: state that is passed on holds tensors, numbers and text only"
            )
        own = {**self._own, "weights": self._weights}
        return Captured(dict(self._slabs), {**self._facts, "own": {str(self.rank): own}})


def rescue(job: Job, what: str) -> Captured:
    """What this rank holds of a job's state, not copied: ALL, OWN or OPTIMIZERS."""
    archive = _Rescue(job)
    job.exchange(archive)
    found = archive.finish()
    found.facts.update(layout=dict(job.layout), step=job.step)
    if what == ALL:
        return found
    rank = archive.rank
    if what == OWN:
        return Captured(_under(found.slabs, [f"rank{rank}/"]), found.facts)
    optimizers = found.facts["own"][str(rank)]["optimizers"]
    facts = {**found.facts, "own": {str(rank): {"values": {}, "optimizers": optimizers}}}
    facts.update({name: {} for name in ("values", "optimizers", "aliases", "extra")})
    return Captured(_under(found.slabs, [f"rank{rank}/{place}/" for place in optimizers]), facts)


def _under(slabs: Mapping[str, Slab], prefixes: Sequence[str]) -> dict[str, Slab]:
    return {name: slab for name, slab in slabs.items() if name.startswith(tuple(prefixes))}


class _Survivors(MemoryReader):
    """What survivors gave. Of tensors that each had for itself, their mean by weight stands for all."""

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """See :class:`Reader`."""
        found = super().read(name, offset, shape)
        weights = {rank: own.get("weights", {}).get(name) for rank, own in self.facts["own"].items()}
        given = {f"rank{rank}/{name}": weight for rank, weight in weights.items() if weight}
        if not given or not found.is_floating_point():  # without a weight (after an averaging) all have the same
            return found
        total = sum(given.values())
        parts = [super(_Survivors, self).read(key, offset, shape) * (weight / total) for key, weight in given.items()]
        return torch.stack(parts).sum(0)


def revive(job: Job, found: Sequence[Captured]) -> None:
    """Put what survivors gave into a job that was made anew. Raises ValueError where it doesn't fit."""
    restore(job, _Survivors([one.slabs for one in found], checkpoint.merge_facts([one.facts for one in found])))

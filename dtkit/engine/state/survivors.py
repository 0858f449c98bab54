"""State out of a broken group: what a survivor holds is taken without a word to the others, who may be gone.

:func:`export_state` is :func:`dtkit.engine.state.capture_state.capture_state` without its agreements: a rank gives all
that lies on it, and not its share of what several hold. What comes of all survivors together may be more than enough,
or have gaps where a lost rank held the only copy.

One survivor for each part of the model gives all that it has. Those who stand at the same step give what is theirs
alone (random state, batch statistics, between two averagings parameters and optimiser): each goes on with its own, and
whoever is new with their mean. One who stands at another step has parameters and rows of that step, which are of no
use in this one; but an optimiser of its own, which it keeps.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from dtkit.checkpoint import index
from dtkit.checkpoint.json_values import UnsupportedValueError
from dtkit.engine.state.capture import MemoryReader, ShardedState, StateCapture, restore_state
from dtkit.types import ALL_STATE, PER_RANK_STATE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.engine.job import Job
    from dtkit.engine.state.capture import TensorShard


class _SurvivorCapture(StateCapture):
    """Takes what it is shown, and asks nobody."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.context, job.layout)
        self.context = dataclasses.replace(job.context, group=None)
        self._loss_weights: dict[str, float] = {}

    def per_replica(self, prefix: str, named_tensors: Mapping[str, torch.Tensor], weight: float | None) -> None:
        """See :class:`StateVisitor`. The mean is taken where all survivors' parts have come together."""
        super().per_replica(prefix, named_tensors, weight)
        if weight is not None:
            self._loss_weights.update({f"{prefix}/{name}": weight for name in named_tensors})

    def build_state(self) -> ShardedState:
        """All that lies here. Raises Unsavable where something can't be taken along."""
        if self.problems:
            raise UnsupportedValueError(
                f"{'; '.join(self.problems)}: state that is passed on holds tensors, numbers and text only"
            )
        own = {**self._per_rank_facts, "weights": self._loss_weights}
        return ShardedState(dict(self._shards), {**self._facts, "own": {str(self.rank): own}})


def export_state(job: Job, scope: str) -> ShardedState:
    """What this rank holds of a job's state, not copied: ALL, OWN or OPTIMIZERS."""
    archive = _SurvivorCapture(job)
    job.visit_state(archive)
    found = archive.build_state()
    found.facts.update(layout=dict(job.layout), step=job.step)
    if scope == ALL_STATE:
        return found
    rank = archive.rank
    if scope == PER_RANK_STATE:
        return ShardedState(_select_by_prefix(found.shards, [f"rank{rank}/"]), found.facts)
    optimizers = found.facts["own"][str(rank)]["optimizers"]
    facts = {**found.facts, "own": {str(rank): {"values": {}, "optimizers": optimizers}}}
    facts.update({name: {} for name in ("values", "optimizers", "aliases", "extra")})
    return ShardedState(_select_by_prefix(found.shards, [f"rank{rank}/{place}/" for place in optimizers]), facts)


def _select_by_prefix(shards: Mapping[str, TensorShard], prefixes: Sequence[str]) -> dict[str, TensorShard]:
    return {name: slab for name, slab in shards.items() if name.startswith(tuple(prefixes))}


class _SurvivorReader(MemoryReader):
    """What survivors gave. Of tensors that each had for itself, their mean by weight stands for all."""

    def read_slice(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """See :class:`StateReader`."""
        found = super().read_slice(name, offset, shape)
        weights = {rank: own.get("weights", {}).get(name) for rank, own in self.facts["own"].items()}
        given = {f"rank{rank}/{name}": weight for rank, weight in weights.items() if weight}
        if not given or not found.is_floating_point():  # without a weight (after an averaging) all have the same
            return found
        total = sum(given.values())
        parts = [
            super(_SurvivorReader, self).read_slice(key, offset, shape) * (weight / total)
            for key, weight in given.items()
        ]
        return torch.stack(parts).sum(0)


def restore_from_survivors(job: Job, survivor_states: Sequence[ShardedState]) -> None:
    """Put what survivors gave into a job that was made anew. Raises ValueError where it doesn't fit."""
    restore_state(
        job,
        _SurvivorReader(
            [one.shards for one in survivor_states], index.merge_facts([one.facts for one in survivor_states])
        ),
    )

"""State of survivors of a broken process group. Each rank exports its state without a collective.

:func:`export_state` is like :func:`dtkit.engine.state.capture.capture_state`, except that a rank exports everything
that it holds. The parts of all survivors may overlap, or have gaps where a lost rank held the only copy.

One survivor for each part of the model exports all of its state. Survivors at the same step export the state that
belongs only to them: random state and batch statistics. Between two averagings, they also export parameters and
optimizer. Each continues with its own state, and a new rank continues with their mean. A survivor at another step
exports its optimizer, but only if each rank has its own. Its parameters and batch statistics belong to the other step.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from dtkit.checkpoint.index import merge_facts
from dtkit.checkpoint.json_values import UnsupportedValueError
from dtkit.engine.state.capture import StateCapture
from dtkit.engine.state.restore import restore_state
from dtkit.engine.state.shards import MemoryReader, ShardedState
from dtkit.messages import ALL_STATE, PER_RANK_STATE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.engine.state.shards import TensorShard
    from dtkit.engine.state.visitor import StatefulJob


class _SurvivorCapture(StateCapture):
    """Visitor that captures all that this rank holds, without any collective."""

    def __init__(self, job: StatefulJob) -> None:
        super().__init__(job.context, job.layout)
        self.context = dataclasses.replace(job.context, group=None)
        self._weights: dict[str, float] = {}

    def per_replica(self, prefix: str, named_tensors: Mapping[str, torch.Tensor], weight: float | None) -> None:
        """See :class:`StateVisitor`. The reader of all survivors' parts computes the mean."""
        super().per_replica(prefix, named_tensors, weight)
        if weight is not None:
            self._weights.update({f"{prefix}/{name}": weight for name in named_tensors})

    def build_state(self) -> ShardedState:
        """Return all state of this rank. Raises UnsupportedValueError if some of it can't be sent."""
        if self.problems:
            raise UnsupportedValueError(
                f"{'; '.join(self.problems)}: exported state holds tensors, numbers and text only"
            )
        return ShardedState(dict(self._shards), self._build_facts({**self._per_rank_facts, "weights": self._weights}))


def export_state(job: StatefulJob, scope: str) -> ShardedState:
    """Return this rank's state of a job, not copied: ALL_STATE, PER_RANK_STATE or OPTIMIZER_STATE."""
    capture = _SurvivorCapture(job)
    job.visit_state(capture)
    state = capture.build_state()
    state.facts["step"] = job.step
    if scope == ALL_STATE:
        return state
    rank = capture.rank
    if scope == PER_RANK_STATE:
        return ShardedState(_select_by_prefix(state.shards, [f"rank{rank}/"]), state.facts)
    optimizers = state.facts["per_rank"][str(rank)]["optimizers"]
    facts = {**state.facts, "per_rank": {str(rank): {"values": {}, "optimizers": optimizers}}}
    facts.update({name: {} for name in ("values", "optimizers", "aliases", "extra", "frozen")})
    return ShardedState(_select_by_prefix(state.shards, [f"rank{rank}/{prefix}/" for prefix in optimizers]), facts)


def _select_by_prefix(shards: Mapping[str, TensorShard], prefixes: Sequence[str]) -> dict[str, TensorShard]:
    return {name: shard for name, shard in shards.items() if name.startswith(tuple(prefixes))}


class _SurvivorReader(MemoryReader):
    """Reader of the survivors' exports. For tensors that differ between ranks, it returns the weighted mean."""

    def read_slice(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """See :class:`StateReader`."""
        part = super().read_slice(name, offset, shape)
        weights = {
            f"rank{rank}/{name}": facts.get("weights", {}).get(name) for rank, facts in self.facts["per_rank"].items()
        }
        weights = {key: weight for key, weight in weights.items() if weight}
        if not weights or not part.is_floating_point():  # without weights (after an averaging) all are equal
            return part
        total = sum(weights.values())
        parts = [
            super(_SurvivorReader, self).read_slice(key, offset, shape) * (w / total) for key, w in weights.items()
        ]
        return torch.stack(parts).sum(0)


def restore_from_survivors(job: StatefulJob, survivor_states: Sequence[ShardedState]) -> None:
    """Restore a new job from the survivors' exports. Raises ValueError if they don't fit."""
    facts = merge_facts([state.facts for state in survivor_states])
    restore_state(job, _SurvivorReader([state.shards for state in survivor_states], facts))

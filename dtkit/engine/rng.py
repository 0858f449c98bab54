"""A job's random numbers.

torch's numbers of a step, such as those of dropout, follow from the seed, the replica's index and the step. So a rank
that replaces a lost one draws what that one would have drawn, and a repeated step draws its numbers again.

numpy's and Python's generators are slow to seed, and few steps draw from them. So their states go on from step to step,
and are part of checkpoints. With another layout, a rank continues with the states of the rank that had the same replica
index. A new replica starts with states that follow from the seed, the step and its index.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from dtkit.engine.data.random_state import GeneratorStates, OwnRng, derive_seed, mix_seed, seed_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from dtkit.engine.state.visitor import StateVisitor


class JobRng(OwnRng):
    """Context in which a job draws its own random numbers, with state in checkpoints."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, device)
        self._seed = seed

    def begin_step(self, step: int) -> None:
        """Seed torch's generators for a step. To be called within the context."""
        seed_torch(mix_seed(self._seed, step), self._cuda_device)

    def visit_state(self, visitor: StateVisitor, step: int) -> None:
        """Visit the states."""
        replica = visitor.replica
        state = visitor.per_rank(
            "random",
            {"replica": replica, **self.states.encode()},
            lambda states: next((s for s in states if s["replica"] == replica), None),
        )
        if state is None:
            self.reseed(derive_seed(self._seed, step, replica))
            return
        states = GeneratorStates.decode(state)
        self.states = states if states.cuda is not None else dataclasses.replace(states, cuda=self.states.cuda)

    @contextlib.contextmanager
    def preserve_states(self) -> Iterator[None]:
        """Enter the context, and restore the state afterwards: training draws the same numbers with and without it."""
        saved = self.states
        try:
            with self:
                yield
        finally:
            self.states = saved

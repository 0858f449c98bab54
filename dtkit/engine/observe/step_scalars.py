"""Numbers that a loss or a training step passes to `dtkit.log`, by step.

Values stay on the device until the dispatch ends. A value counts by the samples of its micro-batch, or by the weight of
a pair (sum, weight).
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from dtkit.engine.observe.call_output import redirect_log
from dtkit.history.history import ROW_DTYPE
from dtkit.history.scalars import SYSTEM_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dtkit.types import Scalars


@dataclasses.dataclass
class _Sum:
    total: Any = 0.0
    weight: Any = 0.0

    def add(self, total: Any, weight: Any) -> None:
        self.total, self.weight = self.total + total, self.weight + weight


class StepScalars:
    """Numbers that one rank's steps have logged since the dispatch began."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, dict[str, _Sum]]] = []
        self._sums: dict[str, _Sum] = {}
        self._unweighted: list[tuple[str, Any]] = []

    def begin_step(self) -> None:
        """Forget the numbers of an unfinished step."""
        self._sums, self._unweighted = {}, []

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Let `dtkit.log` add to the current step within the context, which may hold several steps."""
        global _active  # noqa: PLW0603 - an engine takes one step at a time
        self.begin_step()
        previous, _active = _active, self
        try:
            with redirect_log(self._add):
                yield
        finally:
            _active = previous

    def _add(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name in (ROW_DTYPE.names or ()):
                raise ValueError(
                    f"dtkit.log({name}=...): the history of a training has a column {name!r} already; use another "
                    f"name, as in my_{name}="
                )
            if name.startswith(SYSTEM_PREFIX):
                raise ValueError(f"dtkit.log of {name!r}: names that begin with {SYSTEM_PREFIX!r} are dtkit's own")
            if isinstance(value, tuple):
                total, weight = value
                self._sums.setdefault(name, _Sum()).add(_detach(total), _detach(weight))
            else:
                self._unweighted.append((name, _detach(value)))

    def weigh(self, samples: int) -> None:
        """Weight the values that were logged since the last call by this number of samples."""
        for name, value in self._unweighted:
            self._sums.setdefault(name, _Sum()).add(value * samples, samples)
        self._unweighted.clear()

    def end_step(self, step: int, samples: int) -> None:
        """End a step. Values logged after its last micro-batch count by the `samples` of the whole step."""
        self.weigh(samples)
        if self._sums:
            self._steps.append((step, self._sums))
        self._sums = {}

    def take(self) -> Scalars:
        """Return {name: [(step, sum, weight)]} of the completed steps, and forget them."""
        steps, self._steps = self._steps, []
        scalars: dict[str, list[tuple[int, float, float]]] = {}
        for step, sums in steps:
            for name, each in sums.items():
                scalars.setdefault(name, []).append((step, float(each.total), float(each.weight)))
        return scalars


def _detach(value: Any) -> Any:
    """Return a number without its graph; a tensor as a copy that later operations don't change."""
    return value.detach().double().clone() if isinstance(value, torch.Tensor) else float(value)


_active: StepScalars | None = None


def weigh_scalars(samples: int) -> None:
    """Weight the values that the current step has logged since the last call by this number of samples."""
    if _active is not None:
        _active.weigh(samples)

"""Numbers that a loss or a training step passes to `dtkit.log`, by step.

Values stay on the device until the dispatch ends. A value counts by the samples of its micro-batch, or by the weight of
a pair (sum, weight).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dtkit.engine.observe.call_output import redirect_log
from dtkit.history.history import ROW_DTYPE
from dtkit.history.scalars import OWN_PREFIXES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dtkit.types import Scalars


def check_logged_names(values: Mapping[str, Any]) -> None:
    """Raise ValueError for names of numbers that a step can't log."""
    for name in values:
        if name in (ROW_DTYPE.names or ()):
            raise ValueError(
                f"dtkit.log({name}=...): the history of a training has a column {name!r} already; use another "
                f"name, as in my_{name}="
            )
        prefix = next(filter(name.startswith, OWN_PREFIXES), None)
        if prefix is not None:
            raise ValueError(f"dtkit.log of {name!r}: names that begin with {prefix!r} are dtkit's own")


class _Entry(NamedTuple):
    """A logged value: `value` times `factor` is added to the sum of its name, and `weight` to the sum's weight."""

    name: str
    value: Any
    factor: int
    weight: Any


class StepScalars:
    """Numbers that one rank's steps have logged since the dispatch began."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, list[_Entry]]] = []
        self._entries: list[_Entry] = []
        self._unweighted: list[tuple[str, Any]] = []

    def begin_step(self) -> None:
        """Forget the numbers of an unfinished step."""
        self._entries, self._unweighted = [], []

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
        check_logged_names(values)
        for name, value in values.items():
            if isinstance(value, tuple):
                total, weight = value
                self._entries.append(_Entry(name, _detach(total), 1, _detach(weight)))
            else:
                self._unweighted.append((name, _detach(value)))

    def weigh(self, samples: int) -> None:
        """Weight the values that were logged since the last call by this number of samples."""
        for name, value in self._unweighted:
            self._entries.append(_Entry(name, value, samples, samples))
        self._unweighted.clear()

    def end_step(self, step: int, samples: int) -> None:
        """End a step. Values logged after its last micro-batch count by the `samples` of the whole step."""
        self.weigh(samples)
        if self._entries:
            self._steps.append((step, self._entries))
        self._entries = []

    def take(self) -> Scalars:
        """Return {name: [(step, sum, weight)]} of the completed steps, and forget them.

        Numbers are added up here and not in the steps: an operation on a tensor takes some microseconds.
        """
        steps, self._steps = self._steps, []
        numbers = _read_numbers(value for _, entries in steps for entry in entries for value in (entry[1], entry[3]))
        scalars: dict[str, list[tuple[int, float, float]]] = {}
        for step, entries in steps:
            sums: dict[str, tuple[float, float]] = {}
            for name, _, factor, _ in entries:
                total, weight = sums.get(name, (0.0, 0.0))
                sums[name] = total + next(numbers) * factor, weight + next(numbers)
            for name, (total, weight) in sums.items():
                scalars.setdefault(name, []).append((step, total, weight))
        return scalars


def _read_numbers(values: Iterable[Any]) -> Iterator[float]:
    """Return numbers and tensors as numbers, with one copy from each device."""
    listed = list(values)
    places: dict[torch.device, list[int]] = {}
    for place, value in enumerate(listed):
        if isinstance(value, torch.Tensor):
            places.setdefault(value.device, []).append(place)
    for tensors in places.values():
        read = torch.stack([listed[place].reshape(()) for place in tensors]).tolist()
        for place, number in zip(tensors, read, strict=True):
            listed[place] = number
    return iter(listed)


def _detach(value: Any) -> Any:
    """Return a number without its graph; a tensor as a copy that later operations don't change."""
    return value.detach().to(torch.float64, copy=True) if isinstance(value, torch.Tensor) else float(value)


_active: StepScalars | None = None


def weigh_scalars(samples: int) -> None:
    """Weight the values that the current step has logged since the last call by this number of samples."""
    if _active is not None:
        _active.weigh(samples)

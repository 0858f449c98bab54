"""What a view reads of a run, and the one way in which it asks for something.

Views are written against this protocol and not against the run itself, so that a test double, a run read back
from a file or a run of another framework is shown by the same code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from dtkit.health.stall_report import StallReport
    from dtkit.history.history import History
    from dtkit.types import NodeInfo, ReplicaCheckResult, RunSpec, Status


@runtime_checkable
class RunView(Protocol):
    """A run, as its views see it. Everything may be read from any thread at any time."""

    @property
    def spec(self) -> RunSpec:
        """What was asked for."""
        ...

    @property
    def status(self) -> Status:
        """A snapshot of where the run stands."""
        ...

    @property
    def history(self) -> History:
        """What every rank did in every step, with events and evaluations."""
        ...

    @property
    def nodes(self) -> Sequence[NodeInfo]:
        """The engines, by rank."""
        ...

    @property
    def lr(self) -> float | None:
        """The learning rate in force, where there is one."""
        ...

    @property
    def exception(self) -> BaseException | None:
        """What failed or halted the run."""
        ...

    @property
    def delay_factors(self) -> Mapping[int, float]:
        """The ranks that are slowed on purpose, and how many times slower: ``{1: 2.0}``."""
        ...

    @property
    def consistency(self) -> ReplicaCheckResult | None:
        """What the last comparison of parameters over the ranks found; None before the first."""
        ...

    @property
    def stall_report(self) -> StallReport | None:
        """Who keeps the others waiting now, as far as anybody had to ask; None while all is well."""
        ...

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback` called, from any thread, after every change; returns what ends that."""
        ...

    def post(self, command: str, value: float | None = None) -> Future[int] | None:
        """Ask for "pause", "resume", "step", "stop" or "lr" (with `value`). Never waits for the effect.

        The answer, where there is one, will be how many steps were taken when it took effect on all nodes.
        """
        ...

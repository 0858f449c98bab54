"""Protocols for views. Views take these instead of a run, so that the same code shows a test double."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from dtkit.health.stall_report import StallReport
    from dtkit.history.history import History
    from dtkit.history.timeline import Timeline
    from dtkit.rpc.verification import Verification
    from dtkit.types import NodeInfo, ReplicaCheckResult, RunSpec, Status


@runtime_checkable
class RunView(Protocol):
    """The part of a run that views may read. Any thread may read it at any time."""

    @property
    def spec(self) -> RunSpec:
        """What the user asked for."""
        ...

    @property
    def status(self) -> Status:
        """A snapshot of state, step and times."""
        ...

    @property
    def history(self) -> History:
        """Records of every rank and step, with events and evaluations."""
        ...

    @property
    def timeline(self) -> Timeline | None:
        """Phases of the last steps, where they are recorded."""
        ...

    @property
    def nodes(self) -> Sequence[NodeInfo]:
        """The engines, by rank."""
        ...

    @property
    def lr(self) -> float | None:
        """The current learning rate, where there is one."""
        ...

    @property
    def exception(self) -> BaseException | None:
        """The error that failed or paused the run."""
        ...

    @property
    def delay_factors(self) -> Mapping[int, float]:
        """Delay factors of the ranks that are slowed on purpose: ``{1: 2.0}``."""
        ...

    @property
    def consistency(self) -> ReplicaCheckResult | None:
        """The result of the last comparison of parameters over the ranks; None before the first."""
        ...

    @property
    def is_released(self) -> bool:
        """Whether the engines have freed the run's job, so that it can't go on."""
        ...

    @property
    def ended_engines(self) -> Mapping[int, str] | None:
        """Why engines are gone that have ended, with the remedy, by rank; None where nobody watches them any more."""
        ...

    @property
    def verification(self) -> Verification | None:
        """The comparison with one process by the last `verify`, which may have times of steps; None before."""
        ...

    @property
    def stall_report(self) -> StallReport | None:
        """The rank that the others wait for; None while every rank makes progress."""
        ...

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after every change, from any thread. Return a function that ends the subscription."""
        ...

    def post(self, command: str, value: float | None = None) -> Future[int] | None:
        """Request "pause", "resume", "step", "stop" or "lr" (with `value`), without waiting for the effect.

        The future, if any, returns the number of steps at which the command took effect on all nodes.
        """
        ...


class CallView(Protocol):
    """A function running on all ranks, as its views read it. Any thread may read it."""

    @property
    def name(self) -> str:
        """The function's name."""
        ...

    @property
    def state(self) -> str:
        """One of "running", "done", "failed" and "interrupted"."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def note(self) -> str:
        """What happens before its first output, if that takes long; else empty."""
        ...

    @property
    def rows(self) -> Sequence[dict[str, Any]]:
        """Logged rows: rank, index and the values."""
        ...

    @property
    def output(self) -> Sequence[tuple[int, str]]:
        """Printed lines, with their rank."""
        ...

    @property
    def progress(self) -> Mapping[int, str]:
        """The line by rank that has no end yet, such as a progress bar."""
        ...

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after every change. Return a function that ends the subscription."""
        ...

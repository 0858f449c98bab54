"""One request to all ranks that is under way: what it is for, and whom it concerns when it lands."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from dtkit.errors import EngineError
    from dtkit.types import Reply


def _do_nothing() -> None:
    """Who asks for steps asks again from where the ranks stand."""


@dataclasses.dataclass(eq=False)
class PendingCall:
    """A request for one step, and what is to be done with what comes of it. These must not hold the flight itself."""

    op: str
    step: int
    """At which the job must stand."""
    on_result: Callable[[int, Sequence[Any]], None]
    """All ranks did it: (step, their answers)."""
    on_failure: Callable[[EngineError], None]
    """The user's code failed in it, or it was refused over and over."""
    on_cancel: Callable[[], None] = _do_nothing
    """It was not done, and nothing is wrong with it."""
    is_answered: bool = False
    """Whether all ranks have answered, or one has failed."""
    futures: list[Future[Reply]] = dataclasses.field(default_factory=list)


def resolve(answer: Future[int], step: int) -> None:
    """Tell who waits for it that the run stands at this step, unless that was told."""
    if not answer.done():
        answer.set_result(step)

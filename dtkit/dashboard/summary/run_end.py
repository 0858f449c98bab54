"""Why a run of a comparison ended early or does not learn: its error, or what its loss does, and what helps."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from dtkit._util import formatting
from dtkit.dashboard.summary.notices import list_error_lines
from dtkit.errors import EngineError, NonFiniteError
from dtkit.history.divergence import find_divergence, find_past_divergence
from dtkit.history.no_learning import find_no_learning

if TYPE_CHECKING:
    from dtkit.history.history import History
    from dtkit.types import Status

_MAX_CAUSE_CHARS = 600  # views wrap it
_TURNS = frozenset({"start", "resume", "stop", "done", "error"})
"""Kinds of events after which a run goes on or ends."""


@runtime_checkable
class _HasException(Protocol):
    @property
    def exception(self) -> BaseException | None: ...


@runtime_checkable
class _HasStatus(Protocol):
    @property
    def status(self) -> Status: ...


class RunEnd(NamedTuple):
    """A word for how a run ended badly, and the cause in one line; empty texts if it did not."""

    word: str = ""
    cause: str = ""


def describe_end(run: object, history: History) -> RunEnd:
    """Return the error of a run, or how its loss diverged or never fell, with what helps: as its verdict.

    A history has the error of its run as an event.
    """
    error = run.exception if isinstance(run, _HasException) else None
    divergence = find_divergence(history)
    if isinstance(error, NonFiniteError) and divergence is not None:  # the loss was lost before the gradients were
        return RunEnd("failed", divergence.advice)
    if error is not None:
        return RunEnd("failed", formatting.sanitize_text(_format_error(error), _MAX_CAUSE_CHARS))
    turns = [] if isinstance(run, _HasException) else [e for e in history.events if e.kind in _TURNS]
    if turns and turns[-1].kind == "error":
        first = (turns[-1].text.strip().splitlines() or ["error"])[0]
        return RunEnd("failed", formatting.sanitize_text(first, _MAX_CAUSE_CHARS))
    if divergence is not None:
        return RunEnd("diverged", divergence.advice)
    past = find_past_divergence(history)
    if past is not None and not _is_running(run):
        return RunEnd("diverged", f"{past.text}: {past.remedy}")
    found = find_no_learning(history)
    return RunEnd() if found is None else RunEnd("learned nothing", f"{found.short}: {found.remedy}")


def _is_running(run: object) -> bool:
    return isinstance(run, _HasStatus) and not run.status.state.has_ended


def _format_error(error: BaseException) -> str:
    """Return the error of the user's code with its step, such as ``ValueError: bad batch, step 4``."""
    if isinstance(error, NonFiniteError):
        first, *others = list_error_lines(error, has_ended=True)
        remedy = next((line.removeprefix("- ") for line in others if line.startswith("- ")), "")
        return ": ".join(filter(None, [first, remedy]))
    if not isinstance(error, EngineError) or error.cause.kind != "error":
        return list_error_lines(error)[0]
    cause = error.cause
    first = (cause.message.strip().splitlines() or [""])[0]
    text = formatting.sanitize_text(f"{cause.type}: {first}".rstrip(": "), _MAX_CAUSE_CHARS - 20)
    return text if cause.step is None else f"{text}, step {cause.step:,}"

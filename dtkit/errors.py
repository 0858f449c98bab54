"""All errors that dtkit defines, as one tree.

    DtkitError
    ├── ClusterError              engines could not be started, reached or formed into a group
    │   ├── ClusterClosedError    a call on a cluster that was closed
    │   ├── EmptyEnginesError     all engines ended, and those in their place hold neither data nor job
    │   ├── HostLostError         a host's agent has ended, was cut off or does not answer
    │   ├── VersionMismatchError  notebook and engine have versions that can't work together
    │   └── RefusedError          a request does not match the engine's owner, generation or step; nothing ran
    │       └── SupersededError   another notebook has attached to the cluster
    ├── CallbackError             a callback of a run failed, and the run is paused
    ├── FirstBatchError           model or loss refuse the first rows; nothing was trained
    ├── EngineError               user code or an engine failed; `failures` has every rank's
    │   ├── ItemError             one item of cluster.map failed
    │   └── NonFiniteError        gradients were NaN or infinite; parameters are as before that step
    ├── RunError                  the run's state does not allow the call
    │   └── PausedError           a run is paused, and can't continue while its caller waits
    ├── CollectiveInStepError     a step calls a collective where one process trains alone
    ├── CheckpointError           a checkpoint could not be written, or can't be used
    └── SerializationError        an object can't be pickled; the message names the attribute

Bad arguments raise plain ``ValueError`` or ``TypeError``. Every message gives the value, the rule and the remedy.
"""

from __future__ import annotations

import concurrent.futures
import linecache
from pathlib import Path
from typing import TYPE_CHECKING

from dtkit._util.notebook import name_code, render_traceback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.types import Failure


class DtkitError(Exception):
    """Root of all errors that dtkit defines."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython and terminals show: without dtkit's own frames."""
        return render_traceback(self, is_hidden=_is_own_frame)


class ClusterError(DtkitError):
    """Engines could not be started, reached or formed into a process group."""


class ClusterClosedError(ClusterError):
    """A call on a cluster that was closed."""


class EmptyEnginesError(ClusterError):
    """All engines ended, and those in their place hold neither data nor job."""


class HostLostError(ClusterError):
    """A host's agent has ended, was cut off or does not answer. Its engines end with it."""


class VersionMismatchError(ClusterError):
    """The notebook and an engine run versions that can't work together."""


class RefusedError(ClusterError):
    """A request does not match the engine's owner, generation, job or step. Nothing was run."""


class SupersededError(RefusedError):
    """Another notebook, or this one by attaching again, has taken the cluster over."""


class RunError(DtkitError):
    """The run's state does not allow the call."""


class PausedError(RunError):
    """A run is paused, and can't continue while its caller waits."""


class CollectiveInStepError(DtkitError):
    """A training step calls a collective, but one process trains alone."""


class CheckpointError(DtkitError):
    """A checkpoint could not be written, is damaged, or does not fit."""


class SerializationError(DtkitError):
    """An object can't be pickled, so it can't travel to an engine."""


def drop_consequential_refusals(failures: Sequence[Failure]) -> Sequence[Failure]:
    """Return the failures without refusals, unless there are no others.

    After the loss of an engine, the others refuse their calls, which doesn't explain the cause.
    """
    return [f for f in failures if f.kind != "refused"] or failures


class ClusterWarning(UserWarning):
    """A cluster will be slow: it has more engines than cores, or there are other engines that nobody uses."""


class UserCodeError(DtkitError):
    """An error in a user's code. It is shown with the user's own lines; `full` has the whole traceback."""

    @property
    def full(self) -> str:
        """Message with the whole traceback."""
        raise NotImplementedError


class FirstBatchError(UserCodeError):
    """Model, loss, metrics or optimizer failed in a trial with the first rows in the notebook. No step was taken."""

    def __init__(
        self,
        message: str,
        user_frames: Sequence[tuple[str, int, str, str]],
        traceback: str,
        part: str = "the first batch",
        purpose: str = "training",
    ) -> None:
        self._traceback = traceback
        position_lines = [*_format_user_frames(user_frames), FULL_HINT]
        super().__init__(_fit_lines(f"{part} fails, before the {purpose} starts: {message}", position_lines))

    @property
    def full(self) -> str:
        """Message with the whole traceback."""
        return f"{self}\n\n{self._traceback.rstrip()}"


class CallbackError(UserCodeError):
    """A callback of a run failed, and the run is paused. The callback's own error is the ``__cause__``."""

    def __init__(
        self,
        message: str,
        user_frames: Sequence[tuple[str, int, str, str]],
        traceback: str,
        remedy: str,
    ) -> None:
        self._traceback = traceback
        super().__init__(_fit_lines(message, [*_format_user_frames(user_frames), remedy, FULL_HINT]))

    @property
    def full(self) -> str:
        """Message with the whole traceback."""
        return f"{self}\n\n{self._traceback.rstrip()}"


class EngineError(UserCodeError):
    """A call failed on one or more ranks.

    `failures` has every rank's :class:`~dtkit.types.Failure`. Causes come first, then interrupted or stuck ranks, then
    those that only lost their peer.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = tuple(sorted(failures, key=lambda f: (f.victim, f.kind in ("interrupted", "stuck"), f.rank)))
        super().__init__(_format_failures(self.failures))

    @property
    def cause(self) -> Failure:
        """Failure that explains the others."""
        return self.failures[0]

    @property
    def full(self) -> str:
        """Message of each rank that caused it, with its whole traceback."""
        causes = [f for f in self.failures if not f.victim] or [self.cause]
        tracebacks = [f"Traceback of rank {f.rank}:\n{f.traceback.rstrip()}" for f in causes if f.traceback]
        return "\n\n".join([str(self), *tracebacks])


class NonFiniteError(EngineError):
    """The gradients, reduced over all ranks, are not finite. Parameters are as before that step."""

    def __init__(self, failures: Sequence[Failure], remedy: str = "lr") -> None:
        super().__init__(failures)
        self.remedy = remedy
        """What the message advises: "lr" (a lower rate), "data" (repair data or loss), or "train" (train again)."""


class ItemError(EngineError):
    """One item of `cluster.map` failed. `index` is its position, `cause` its failure."""

    def __init__(self, index: int, item: object, failure: Failure) -> None:
        super().__init__([failure])
        self.index = index
        text = repr(item)
        shown = text if len(text) <= _MAX_ITEM_CHARS else f"{text[:_MAX_ITEM_CHARS]}..."
        self.args = (f"item {index} ({shown}): {self.args[0]}",)


_MAX_ITEM_CHARS = 60


def _format_failures(failures: Sequence[Failure]) -> str:
    """Return one message: the causes (equal ones in one line), the first one's traceback, and the ranks without a
    cause.
    """
    causes = [f for f in failures if not f.victim] or list(failures[:1])
    victims = [f.rank for f in failures if f.victim and f not in causes]
    interrupted = [f.rank for f in causes if f.kind == "interrupted"]
    if len(interrupted) < len(causes):  # because another rank failed
        causes = [f for f in causes if f.kind != "interrupted"]
    else:
        interrupted = []
    groups: dict[tuple[object, ...], list[Failure]] = {}
    for cause in causes:
        groups.setdefault((cause.step, cause.type, cause.message), []).append(cause)
    lines, remedies = [], []
    for (step, error_type, message), group in groups.items():
        position = f", step {step}" if step is not None else ""
        hosts = ", ".join(dict.fromkeys(f.host for f in group))
        raised = group[0].kind not in ("nonfinite", "lost")
        problem = f"{error_type}: {message}" if raised else message
        if group[0].kind == "nonfinite":  # a remedy in each further line
            problem, *found = group[0].message.split("\n")
            remedies += [line for line in found if line not in remedies]
        lines.append(f"{format_ranks([f.rank for f in group])} on {hosts}{position}: {problem}")
    position_lines = _format_user_frames(causes[0].user_frames)
    if victims:
        position_lines.append(
            f"{format_ranks(victims)} only lost {'its peer' if len(victims) == 1 else 'their peers'}."
        )
    if interrupted:
        verb = "was" if len(interrupted) == 1 else "were"
        position_lines.append(f"{format_ranks(interrupted)} {verb} then interrupted.")
    if causes[0].traceback:
        position_lines.append(FULL_HINT)
    return _fit_lines("\n".join([*lines, *remedies]), position_lines)


FULL_HINT = "(The error's .full has the whole traceback.)"
"""Last line of an error whose traceback isn't shown."""
_MAX_LINES, _MAX_LINE_CHARS = 15, 500
_MAX_SHOWN_FRAMES = 4


def _fit_lines(message: str, position_lines: Sequence[str]) -> str:
    """Return a message and its position in the code, in at most 15 lines. The middle of a long message is left out."""
    lines = [
        line if len(line) <= _MAX_LINE_CHARS else f"{line[:_MAX_LINE_CHARS]} [...]" for line in message.splitlines()
    ]
    room = _MAX_LINES - len(position_lines)
    if len(lines) > room:
        end = room // 3  # notes with a remedy come last
        start = room - 1 - end
        lines[start:-end] = [f"[... {len(lines) - room + 1} lines left out ...]"]
    return "\n".join([*lines, *position_lines])


def _format_user_frames(frames: Sequence[tuple[str, int, str, str]]) -> list[str]:
    """Return two lines for each of the innermost frames, named by cell as Jupyter does."""
    lines = []
    for file, line, function, source in frames[-_MAX_SHOWN_FRAMES:]:
        lines.append(f"  {name_code(file)}, line {line}, in {function}")
        if source := source.strip() or linecache.getline(file, line).strip():  # notebooks have the source of cells
            lines.append(f"    {source}")
    return lines


_OWN_FOLDER = str(Path(__file__).parent)
_FUTURES_FOLDER = str(Path(concurrent.futures.__file__).parent)


def _is_own_frame(file: str) -> bool:
    """Return whether a frame tells a user nothing: dtkit's own, and those of a future that passes an error on."""
    return file.startswith((_OWN_FOLDER, _FUTURES_FOLDER))


def format_ranks(ranks: Sequence[int], noun: str = "rank") -> str:
    """Return "rank 1", or "ranks 0, 2 and 3"."""
    if len(ranks) == 1:
        return f"{noun} {ranks[0]}"
    return f"{noun}s {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def __dir__() -> list[str]:
    return [name for name, value in globals().items() if isinstance(value, type) and issubclass(value, Exception)]

"""All errors that dtkit defines, as one tree.

    DtkitError
    ├── ClusterError              engines could not be started, reached or formed into a group
    │   ├── ClusterClosedError    a call on a cluster that was closed
    │   ├── VersionMismatchError  notebook and engine have versions that can't work together
    │   └── RefusedError          a request does not match the engine's owner, generation or step; nothing ran
    │       └── SupersededError   another notebook has attached to the cluster
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

import linecache
from pathlib import Path
from typing import TYPE_CHECKING

from dtkit._util.notebook import name_code, render_traceback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.types import Failure


class DtkitError(Exception):
    """Root of all errors that dtkit defines."""


class ClusterError(DtkitError):
    """Engines could not be started, reached or formed into a process group."""


class ClusterClosedError(ClusterError):
    """A call on a cluster that was closed."""


class VersionMismatchError(ClusterError):
    """The notebook and an engine run versions that can't work together."""


class RefusedError(ClusterError):
    """A request does not match the engine's owner, generation, job or step. Nothing was run."""


class SupersededError(RefusedError):
    """Another notebook has attached to the cluster, and owns it now."""


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

    After the loss of an engine the others refuse their calls, which adds nothing to the cause.
    """
    return [f for f in failures if f.kind != "refused"] or failures


class ClusterWarning(UserWarning):
    """A cluster starts where it will be slow: more engines than cores, or next to engines that nobody uses."""


class EngineError(DtkitError):
    """A call failed on one or more ranks.

    `failures` has every rank's :class:`~dtkit.types.Failure`. Causes come first, then ranks that are interrupted or
    stuck, then those that only lost their peer.
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
        """Message with the whole tracebacks of the ranks that caused it."""
        causes = [f for f in self.failures if not f.victim] or [self.cause]
        tracebacks = [f"Traceback of rank {f.rank}:\n{f.traceback.rstrip()}" for f in causes if f.traceback]
        return "\n\n".join([str(self), *tracebacks])

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: without dtkit's own frames."""
        return render_traceback(self, is_hidden=_is_own_frame)


class NonFiniteError(EngineError):
    """The gradients, reduced over all ranks, are not finite. Parameters are as before that step."""


class ItemError(EngineError):
    """One item of `cluster.map` failed. `index` is its place, `cause` how and where it failed."""

    def __init__(self, index: int, item: object, failure: Failure) -> None:
        super().__init__([failure])
        self.index = index
        text = repr(item)
        shown = text if len(text) <= _MAX_ITEM_CHARS else f"{text[:_MAX_ITEM_CHARS]}..."
        self.args = (f"item {index} ({shown}): {self.args[0]}",)


_MAX_ITEM_CHARS = 60


def _format_failures(failures: Sequence[Failure]) -> str:
    """Return one message: the causes, equal ones in one line, the first one's traceback, and the ranks without one."""
    causes = [f for f in failures if not f.victim] or list(failures[:1])
    victims = [f.rank for f in failures if f.victim and f not in causes]
    groups: dict[tuple[object, ...], list[Failure]] = {}
    for cause in causes:
        groups.setdefault((cause.step, cause.type, cause.message), []).append(cause)
    lines = []
    for (step, error_type, message), group in groups.items():
        position = f", step {step}" if step is not None else ""
        hosts = ", ".join(dict.fromkeys(f.host for f in group))
        lines.append(f"{format_ranks([f.rank for f in group])} on {hosts}{position}: {error_type}: {message}")
    lines += _format_user_frames(causes[0].user_frames)
    if victims:
        lines.append(f"{format_ranks(victims)} only lost {'its peer' if len(victims) == 1 else 'their peers'}.")
    if causes[0].traceback:
        lines.append("(The error's .full has the whole traceback.)")
    return "\n".join(lines)


_MAX_SHOWN_FRAMES = 4


def _format_user_frames(frames: Sequence[tuple[str, int, str, str]]) -> list[str]:
    """Return two lines for each of the innermost frames, named by cell as Jupyter does."""
    lines = []
    for file, line, function, source in frames[-_MAX_SHOWN_FRAMES:]:
        lines.append(f"  {name_code(file)}, line {line}, in {function}")
        if source := source.strip() or linecache.getline(file, line).strip():  # notebooks have the source of cells
            lines.append(f"    {source}")
    return lines


_OWN_FOLDER = str(Path(__file__).parent)


def _is_own_frame(file: str) -> bool:
    return file.startswith(_OWN_FOLDER)


def format_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1", or "ranks 0, 2 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"

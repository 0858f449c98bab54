"""What can go wrong, as one tree.

    DtkitError
    ├── ClusterError              engines could not be started, reached or formed into a group
    │   ├── ClusterClosedError    a call on a cluster that was closed
    │   ├── VersionMismatchError  notebook and engine can't work together; both versions are named
    │   └── RefusedError          a request that doesn't match the engine's owner, generation or step; nothing ran
    │       └── SupersededError   another notebook has taken the cluster over
    ├── EngineError               user code, or the engine itself, failed on a rank; carries every rank's Failure
    │   └── NonFiniteError        the reduced gradients held NaN or infinity; parameters are as before that step
    ├── RunError                  the run's state does not allow what was asked
    │   └── PausedError           a run that is waited for is paused, and needs its caller to continue
    ├── CheckpointError           a checkpoint could not be written, or can't be used; says what is wrong with it
    └── SerializationError        an object that can't be pickled; names the attribute that can't

Bad arguments raise plain ``ValueError`` or ``TypeError``: they are the caller's, not the cluster's. Every
message gives the value, the rule and the remedy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    """A dispatch did not match the engine's owner, generation, job or step; nothing was run."""


class SupersededError(RefusedError):
    """Another notebook has attached to the cluster since, and owns it now."""


class RunError(DtkitError):
    """The run's state does not allow what was asked."""


class PausedError(RunError):
    """A run that somebody waits for is paused, and needs its caller to continue."""


class CheckpointError(DtkitError):
    """A checkpoint could not be written, or is damaged, or does not fit."""


class SerializationError(DtkitError):
    """An object can't be pickled, so it can't travel to an engine."""


def drop_consequential_refusals(failures: Sequence[Failure]) -> Sequence[Failure]:
    """Without what was refused since an engine is gone, which says nothing more than that."""
    return [f for f in failures if f.kind != "refused"] or failures


class EngineError(DtkitError):
    """A call failed on one or more ranks.

    ``failures`` holds the ranks' :class:`~dtkit.types.Failure`, causes before victims, then by rank; one that is
    stuck may be so since another's engine is gone. Ranks that only lost their peer are folded into one line of the
    message.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = tuple(sorted(failures, key=lambda f: (f.victim, f.kind in ("interrupted", "stuck"), f.rank)))
        super().__init__(_format_failures(self.failures))

    @property
    def cause(self) -> Failure:
        """The failure that came first and was not merely the loss of a peer."""
        return self.failures[0]


class NonFiniteError(EngineError):
    """The gradients, reduced over all ranks, were not finite. Parameters are as before that step."""


def _format_failures(failures: Sequence[Failure]) -> str:
    """One message from many: causes with the first one's traceback, equal ones together, the victims in one line."""
    causes = [f for f in failures if not f.victim] or list(failures[:1])
    victims = [f.rank for f in failures if f.victim and f not in causes]
    alike: dict[tuple[object, ...], list[Failure]] = {}
    for cause in causes:
        alike.setdefault((cause.step, cause.type, cause.message), []).append(cause)
    lines = []
    for (step, kind, message), same in alike.items():
        at = f", step {step}" if step is not None else ""
        hosts = ", ".join(dict.fromkeys(f.host for f in same))
        lines.append(f"{format_ranks([f.rank for f in same])} on {hosts}{at}: {kind}: {message}")
    if causes[0].traceback:
        lines.append(f"\nTraceback of rank {causes[0].rank}:\n{causes[0].traceback.rstrip()}")
    if victims:
        lines.append(f"\n{format_ranks(victims)} only lost {'its peer' if len(victims) == 1 else 'their peers'}.")
    return "\n".join(lines)


def format_ranks(ranks: Sequence[int]) -> str:
    """In words: "rank 1", "ranks 0, 2 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"

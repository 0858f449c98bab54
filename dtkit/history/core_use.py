"""Which other processes had the cores while the nodes of a run waited for one, as far as the notebook has counted."""

from __future__ import annotations

import collections
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

from dtkit._util import formatting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.history.history import History

_NUM_KEPT = 50
_MIN_CORES = 0.05  # that a process needs to be named
_MIN_SHARE = 0.25  # of what all of them use, too
_MAX_NAMED = 2
_MIN_COVERED = 0.6  # share of the cores that the named processes have, if nobody else is mentioned


class CoreUse(NamedTuple):
    """Mean number of cores that each other process used on a host until a step, by what a reader calls it."""

    step: int
    host: str
    cores: Mapping[str, float]


def record_core_use(history: History, use: CoreUse) -> None:
    """Keep the use of cores until a step of a history."""
    with _lock:
        _uses.setdefault(history, collections.deque(maxlen=_NUM_KEPT)).append(use)


def read_core_use(history: History, first_step: int, hosts: set[str]) -> dict[str, float]:
    """Return {name: mean number of cores} since a step, or else by the last count; empty without one on these hosts."""
    with _lock:
        uses = [use for use in _uses.get(history, ()) if hosts == {use.host}]
    uses = [use for use in uses if use.step >= first_step] or uses[-1:]
    names = {name for use in uses for name in use.cores}
    cores = {name: sum(use.cores.get(name, 0.0) for use in uses) / len(uses) for name in names}
    return dict(sorted(cores.items(), key=lambda item: -item[1]))


def name_largest(cores: Mapping[str, float], needed: float) -> str | None:
    """Return the processes that use most, in words; None if all of them use fewer cores than were `needed`.

    Their order is that of the alphabet, so that a line about them stays while two of them are about equal.
    """
    total = sum(cores.values())
    if total < needed:
        return None
    named = [name for name, used in cores.items() if used >= max(_MIN_CORES, _MIN_SHARE * total)]
    named = sorted(sorted(named, key=lambda name: -cores[name])[:_MAX_NAMED])
    if not named:
        return None
    is_most = sum(cores[name] for name in named) >= _MIN_COVERED * total
    return _join([*named, *([] if is_most else ["others"])])


def describe_cores(cores: Mapping[str, float]) -> str:
    """Return the numbers of cores that processes use: ``the browser 0.8, ffmpeg 0.3``."""
    shown = [f"{name} {used:.1f}" for name, used in cores.items() if used >= _MIN_CORES]
    rest = len(cores) - len(shown)
    return ", ".join([*shown[:4], *([formatting.format_count(rest, "smaller one")] if rest and not shown else [])])


def _join(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# locks: while the run adds a count, or a view reads them
_lock = threading.Lock()
_uses: weakref.WeakKeyDictionary[History, collections.deque[CoreUse]] = weakref.WeakKeyDictionary()

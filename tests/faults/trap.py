"""Faults that spring once, on one rank, at one step and place, inside the user's own code.

A trap travels to the engines in a model, a dataset, an optimiser and a scheduler. It is set by a file, which the rank
takes away at the moment when it springs: the same code, run again after a recovery, does nothing. What the file becomes
says when that was, on the clock of this host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SLOW_STEP_S = 0.06
"""What a step takes more on the rank that is slowed, ten times what it takes otherwise."""
STEP_S = SLOW_STEP_S / 10
_PIECE = 1 << 30  # bytes


class Sprung(LookupError):  # noqa: N818 - what has happened
    """What user code raises here."""


@dataclasses.dataclass(frozen=True)
class Trap:
    """One fault, and where it waits."""

    fault: str
    place: str
    """"forward", "backward", "data", "optimiser", "checkpoint", "forming"."""
    rank: int
    step: int
    path: Path
    """Exists while the trap is set."""

    def set(self) -> None:
        """From here on it springs."""
        self.path.touch()

    @property
    def sprung_at(self) -> float | None:
        """When it sprang, as time.time(); None before."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return float(self._mark.read_text(encoding="utf-8"))
        return None

    @property
    def _mark(self) -> Path:
        return self.path.with_suffix(".sprung")

    def pass_by(self, place: str, value: Any = None) -> Any:
        """On an engine: the fault, if it waits here; else `value`."""
        if place != self.place or not self.path.exists() or not self._due():
            return value
        self.path.unlink()
        unready = self.path.with_suffix(".new")
        unready.write_text(repr(time.time()), encoding="utf-8")
        unready.replace(self._mark)
        return FAULTS[self.fault](value)

    def _due(self) -> bool:
        if self.place == "forming":
            return True
        return dist.is_initialized() and dist.get_rank() == self.rank and standing() == self.step


def standing() -> int | None:
    """At which step the newest job of this engine stands."""
    from dtkit.engine.session import _session

    return next(reversed(_session._jobs.values())).step if _session._jobs else None


def kill(_value: Any) -> None:
    """As the system does to the largest process when memory is gone."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(_value: Any) -> None:
    """Alive, and doing nothing: all threads."""
    os.kill(os.getpid(), signal.SIGSTOP)


def leave(_value: Any) -> None:
    """Gone without a word, as C code that gives up."""
    os._exit(3)


def fail(_value: Any) -> None:
    """An error in the user's code."""
    raise Sprung("sprung on purpose")


def loop(_value: Any) -> None:
    """Python that does not end."""
    while True:
        pass


def loop_for_ever(value: Any) -> None:
    """Python that does not end, and that catches the interrupt."""
    with contextlib.suppress(KeyboardInterrupt):
        loop(value)
    loop_for_ever(value)


def take_all_memory(_value: Any) -> None:
    """Until there is no more: under a limit of memory, an error of torch."""
    taken = []
    while True:
        taken.append(torch.empty(_PIECE, dtype=torch.uint8))


def cut(value: torch.Tensor) -> torch.Tensor:
    """One feature too few for what follows."""
    return value[..., :-1]


def poison(value: torch.Tensor) -> torch.Tensor:
    """Not a number."""
    return value * float("nan")


FAULTS: dict[str, Callable[[Any], Any]] = {
    "SIGKILL": kill,
    "SIGSTOP": stop,
    "exception": fail,
    "os._exit": leave,
    "endless loop": loop,
    "deaf loop": loop_for_ever,
    "out of memory": take_all_memory,
    "mismatched shapes": cut,
    "NaN loss": poison,
}


@dataclasses.dataclass(frozen=True)
class Slowness:
    """Not sprung, but lasting: one rank's steps take ten times as long as the others'."""

    rank: int

    def pass_by(self, place: str, value: Any = None) -> Any:
        """On an engine: take the time."""
        if place == "forward" and dist.is_initialized():
            threading.Event().wait(SLOW_STEP_S if dist.get_rank() == self.rank else STEP_S)
        return value


@dataclasses.dataclass(frozen=True)
class Minefield:
    """A trap that is set again and again: its file says for which fault, rank and place."""

    path: Path
    step_s: float
    """What a step takes at least."""

    def lay(self, fault: str, rank: int, place: str) -> None:
        """The next fault."""
        unready = self.path.with_suffix(".new")
        unready.write_text(f"{fault}\n{rank}\n{place}", encoding="utf-8")
        unready.replace(self.path)

    @property
    def sprung(self) -> bool:
        """Whether the last one did."""
        return not self.path.exists()

    def pass_by(self, place: str, value: Any = None) -> Any:
        """On an engine."""
        if place == "optimiser":
            threading.Event().wait(self.step_s)
        with contextlib.suppress(FileNotFoundError):
            fault, rank, wanted = self.path.read_text(encoding="utf-8").split("\n")
            if place == wanted and dist.is_initialized() and dist.get_rank() == int(rank):
                self.path.unlink()
                return FAULTS[fault](value)
        return value

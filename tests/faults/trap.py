"""Faults that fire once, on one rank, at one step and place, inside user code.

A trap is sent to the engines in a model, a dataset, an optimizer and a scheduler. A file arms it, and the rank removes
the file when the trap fires, so that the same code does nothing after a recovery. A second file records the time.
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
"""Seconds that a step of the slowed rank takes longer; the other ranks take a tenth of that."""
STEP_S = SLOW_STEP_S / 10
_BLOCK = 1 << 30  # bytes


class TrapError(LookupError):
    """Error that the trap raises in user code."""


@dataclasses.dataclass(frozen=True)
class Trap:
    """One fault, and where it fires."""

    fault: str
    place: str
    """"forward", "backward", "data", "optimizer", "checkpoint" or "forming"."""
    rank: int
    step: int
    path: Path
    """File that exists while the trap is armed."""

    def arm(self) -> None:
        """Let the trap fire from now on."""
        self.path.touch()

    @property
    def fired_at(self) -> float | None:
        """Time at which the trap fired, as time.time(); None before."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return float(self._fired_file.read_text(encoding="utf-8"))
        return None

    @property
    def _fired_file(self) -> Path:
        return self.path.with_suffix(".fired")

    def trigger(self, place: str, value: Any = None) -> Any:
        """Fire if this engine is at the trap's rank, step and place; otherwise return `value`."""
        if place != self.place or not self.path.exists() or not self._is_due():
            return value
        self.path.unlink()
        temporary = self.path.with_suffix(".new")
        temporary.write_text(repr(time.time()), encoding="utf-8")
        temporary.replace(self._fired_file)
        return FAULTS[self.fault](value)

    def _is_due(self) -> bool:
        if self.place == "forming":
            return True
        return dist.is_initialized() and dist.get_rank() == self.rank and get_job_step() == self.step


def get_job_step() -> int | None:
    """Return the step of this engine's newest job."""
    from dtkit.engine.session import get_session

    return next(reversed(get_session().state.jobs.values())).step if get_session().state.jobs else None


def kill(_value: Any) -> None:
    """End the process as the system does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(_value: Any) -> None:
    """Stop all threads of the process, which stays alive."""
    os.kill(os.getpid(), signal.SIGSTOP)


def leave(_value: Any) -> None:
    """End the process without an error, as C code may."""
    os._exit(3)


def fail(_value: Any) -> None:
    """Raise an error in user code."""
    raise TrapError("raised on purpose")


def loop(_value: Any) -> None:
    """Run Python code that does not end."""
    while True:
        pass


def loop_uninterruptibly(value: Any) -> None:
    """Run Python code that does not end and ignores interrupts."""
    with contextlib.suppress(KeyboardInterrupt):
        loop(value)
    loop_uninterruptibly(value)


def take_all_memory(_value: Any) -> None:
    """Allocate memory until torch raises an error at the limit."""
    blocks = []
    while True:
        blocks.append(torch.empty(_BLOCK, dtype=torch.uint8))


def drop_feature(value: torch.Tensor) -> torch.Tensor:
    """Return one feature too few for the next layer."""
    return value[..., :-1]


def poison(value: torch.Tensor) -> torch.Tensor:
    """Return NaN for all values."""
    return value * float("nan")


FAULTS: dict[str, Callable[[Any], Any]] = {
    "SIGKILL": kill,
    "SIGSTOP": stop,
    "exception": fail,
    "os._exit": leave,
    "endless loop": loop,
    "deaf loop": loop_uninterruptibly,
    "out of memory": take_all_memory,
    "mismatched shapes": drop_feature,
    "NaN loss": poison,
}


@dataclasses.dataclass(frozen=True)
class Slowness:
    """Permanent fault: the steps of one rank take ten times as long as those of the others."""

    rank: int

    def trigger(self, place: str, value: Any = None) -> Any:
        """Wait, on an engine."""
        if place == "forward" and dist.is_initialized():
            threading.Event().wait(SLOW_STEP_S if dist.get_rank() == self.rank else STEP_S)
        return value


@dataclasses.dataclass(frozen=True)
class RepeatedTrap:
    """Trap that fires repeatedly; its file names the fault, rank and place."""

    path: Path
    step_s: float
    """Minimum seconds of a step."""

    def arm(self, fault: str, rank: int, place: str) -> None:
        """Set the next fault."""
        temporary = self.path.with_suffix(".new")
        temporary.write_text(f"{fault}\n{rank}\n{place}", encoding="utf-8")
        temporary.replace(self.path)

    @property
    def has_fired(self) -> bool:
        """Whether the last fault has fired."""
        return not self.path.exists()

    def trigger(self, place: str, value: Any = None) -> Any:
        """Wait, and fire if this engine is at the fault's rank and place."""
        if place == "optimizer":
            threading.Event().wait(self.step_s)
        with contextlib.suppress(FileNotFoundError):
            fault, rank, armed_place = self.path.read_text(encoding="utf-8").split("\n")
            if place == armed_place and dist.is_initialized() and dist.get_rank() == int(rank):
                self.path.unlink()
                return FAULTS[fault](value)
        return value

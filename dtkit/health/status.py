"""Where an engine stands right now: what its watchdog writes and the notebook reads, plain data in small files.

One file a rank in the cluster's folder, replaced as a whole, so that a reader never sees half of one. It answers while
the engine is busy or stuck, when no call would.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

IDLE = "idle"
"""The phase of an engine that waits for a call."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str
    kind: str = "library"
    """"user", "dtkit" or "library" (installed packages and Python's own)."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclasses.dataclass(frozen=True)
class EngineStatus:
    """What one engine's watchdog saw. Times are in seconds since the epoch, durations in seconds."""

    rank: int
    world_size: int
    generation: int
    host: str
    pid: int
    process_start_time: float
    """When the process started: with the pid, who it is."""
    observed_at: float
    """When this was seen."""
    op: str | None
    """What is being served: "advance", "evaluate", "call", ...; "cell" for code that came past dtkit; None if idle."""
    phase: str
    """"data", "forward", "backward", "collective", "send", "receive", "update", "step" (between those), else `op`, or
    "idle"."""
    phase_since: float
    """When that was first seen to be so: up to half a second late."""
    stalled_s: float
    """For how long nothing moved: no step, no mark of a phase, no collective begun."""
    is_blocked: bool
    """Whether it waits in a collective, as far as phase and stack tell."""
    blocked_fraction: float | None
    """Of the last looks at the busy engine, the part at which it was blocked; None before there were enough."""
    job: str | None = None
    step: int | None = None
    median_step_s: float = 0.0
    delay_factor: float = 1.0
    """How many times slower this rank was made on purpose."""
    is_p2p: bool = False
    """Whether ranks send to each other in pairs, so that counts of collectives can't be compared."""
    collective_counts: dict[str, int] = dataclasses.field(default_factory=dict)
    """Collectives begun in this call, by process group."""
    thread_id: int = 0
    """The identity of the thread that serves."""
    can_dump_stacks: bool = False
    """Whether SIGUSR1 has this process write its stacks. Where it is False, that signal may end the process."""
    stack: tuple[Frame, ...] = ()
    """Of the serving thread, innermost first, as far out as dtkit's or the user's code reaches; empty if idle."""
    threads: dict[str, tuple[Frame, ...]] = dataclasses.field(default_factory=dict)
    """Other threads that run user code, by name: loaders of batches."""

    def get_user_frame(self) -> Frame | None:
        """The user's own innermost line, else the innermost of all."""
        return find_user_frame(self.stack)

    def to_json(self) -> str:
        """As text."""
        return json.dumps(self, default=vars)  # dataclasses.asdict copies all, which takes ten times as long

    @classmethod
    def from_json(cls, text: str) -> EngineStatus:
        """From text."""
        found = json.loads(text)
        found["stack"] = _decode_frames(found["stack"])
        found["threads"] = {name: _decode_frames(rows) for name, rows in found["threads"].items()}
        return cls(**found)


def _decode_frames(rows: list[dict[str, object]]) -> tuple[Frame, ...]:
    return tuple(Frame(**row) for row in rows)  # type: ignore[arg-type]


def find_user_frame(stack: tuple[Frame, ...]) -> Frame | None:
    """The user's own innermost line of a stack, else the innermost of all; None for an empty one."""
    own = (frame for frame in stack if frame.kind == "user")
    return next(own, stack[0] if stack else None)


def get_status_path(folder: Path, rank: int) -> Path:
    """Where a rank's watchdog writes."""
    return folder / f"status-{rank}.json"


def get_dump_path(folder: Path, rank: int) -> Path:
    """Where SIGUSR1 has a rank write its stacks."""
    return folder / f"stacks-{rank}.txt"


def remove_status_files(folder: Path) -> None:
    """Delete what watchdogs left in a folder."""
    for pattern in ("status-*.json", ".status-*.json-*", "stacks-*.txt"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)

"""Status of an engine, which its watchdog writes and the notebook reads, also while the engine is busy or stuck.

Each rank has a small file in the cluster's folder. The watchdog replaces the file as a whole, so that a reader never
sees a part.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from dtkit.health.frames import Frame, find_user_frame
from dtkit.health.link_traffic import LinkTraffic

if TYPE_CHECKING:
    from pathlib import Path

IDLE = "idle"
"""The phase of an engine that waits for a call."""


@dataclasses.dataclass(frozen=True)
class EngineStatus:
    """One sample of an engine's watchdog. Times are in seconds since the epoch, durations in seconds."""

    rank: int
    world_size: int
    generation: int
    host: str
    pid: int
    process_start_time: float
    """Start of the process; with the pid it identifies the process."""
    observed_at: float
    """Time of the sample."""
    op: str | None
    """The current operation: "advance", "evaluate", "call", ...; "cell" for code from %%px; None if idle."""
    phase: str
    """"data", "forward", "backward", "collective", "send", "receive", "update", "step" (between those), else `op`, or
    "idle"."""
    phase_since: float
    """Time of the first sample with this phase, up to half a second late."""
    stalled_s: float
    """Seconds without progress: no step, no phase, no new collective."""
    is_blocked: bool
    """Whether it waits in a collective, by its phase and stack."""
    blocked_fraction: float | None
    """Fraction of the last samples in which the busy engine was blocked; None with too few samples."""
    job: str | None = None
    step: int | None = None
    is_warming_up: bool = False
    """Whether it is in the first validation of a job in its process, which may load modules, or compile."""
    median_step_s: float = 0.0
    delay_factor: float = 1.0
    """Factor by which this rank is slowed on purpose."""
    is_p2p: bool = False
    """Whether ranks send messages in pairs, so that counts of collectives can't be compared."""
    collective_counts: dict[str, int] = dataclasses.field(default_factory=dict)
    """Collectives begun in this call, by process group."""
    thread_id: int = 0
    """Id of the thread that serves requests."""
    can_dump_stacks: bool = False
    """Whether this process writes its stacks upon SIGUSR1. Otherwise the signal may end the process."""
    stack: tuple[Frame, ...] = ()
    """The serving thread's stack, innermost first, without the frames that every call has; empty if idle."""
    threads: dict[str, tuple[Frame, ...]] = dataclasses.field(default_factory=dict)
    """Stacks of other threads that run user code, such as batch loaders, by name."""
    links: tuple[LinkTraffic, ...] = ()
    """Connections to ranks of other hosts."""

    def get_user_frame(self) -> Frame | None:
        """Return the innermost user's frame, else the innermost frame."""
        return find_user_frame(self.stack)

    def to_json(self) -> str:
        """Return JSON."""
        return json.dumps(self, default=vars)  # dataclasses.asdict is slow

    @classmethod
    def from_json(cls, text: str) -> EngineStatus:
        """Return the status from JSON."""
        fields = json.loads(text)
        fields["stack"] = _decode_frames(fields["stack"])
        fields["threads"] = {name: _decode_frames(rows) for name, rows in fields["threads"].items()}
        fields["links"] = tuple(_decode_link(link) for link in fields["links"])
        return cls(**fields)


def _decode_frames(rows: list[dict[str, object]]) -> tuple[Frame, ...]:
    return tuple(Frame(**row) for row in rows)  # type: ignore[arg-type]


def _decode_link(row: dict[str, Any]) -> LinkTraffic:
    return LinkTraffic(**{**row, "local": tuple(row["local"]), "remote": tuple(row["remote"])})


def get_status_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's status."""
    return folder / f"status-{rank}.json"


def get_dump_path(folder: Path, rank: int) -> Path:
    """Return the path of the stacks that a rank writes upon SIGUSR1."""
    return folder / f"stacks-{rank}.txt"


def remove_status_files(folder: Path) -> None:
    """Delete the files of watchdogs in a folder."""
    for pattern in ("status-*.json", ".status-*.json-*", "stacks-*.txt"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)

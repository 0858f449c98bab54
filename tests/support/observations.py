"""What the notebook sees of three ranks that wait in a collective of a training."""

from __future__ import annotations

import dataclasses
from typing import Any

from dtkit.health.diagnosis import RankObservation
from dtkit.health.frames import Frame
from dtkit.health.status import EngineStatus

USER = Frame("net.py", 14, "forward", "user")
LIBRARY = Frame("torch/autograd/graph.py", 979, "backward")


def make_status(rank: int, **changed: Any) -> EngineStatus:
    """Status of one of three ranks, waiting in a collective of a training."""
    found = EngineStatus(
        rank=rank,
        world_size=3,
        generation=0,
        host="here",
        pid=100 + rank,
        process_start_time=1.0,
        observed_at=50.0,
        op="advance",
        phase="collective",
        phase_since=44.0,
        stalled_s=6.0,
        is_blocked=True,
        blocked_fraction=None,
        job="job-1",
        step=12,
        collective_counts={"0": 5},
        stack=(LIBRARY, USER),
    )
    return dataclasses.replace(found, **changed)


def seen(rank: int, process: str = "sleeping", age_s: float = 0.2, **changed: Any) -> RankObservation:
    """Observation of a rank, with a status that differs in these fields."""
    return RankObservation(rank, "here", 100 + rank, process, age_s, make_status(rank, **changed))

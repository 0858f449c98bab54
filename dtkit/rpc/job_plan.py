"""Definition of a job for the engines, with the numbers that determine each rank's samples of each step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtkit.rpc.payload import Payload


@dataclasses.dataclass(frozen=True)
class JobPlan:
    """Numbers from which each rank computes its samples of each step. They are the same on every rank."""

    batch_size: int
    steps: int
    shuffle: str | None
    """"shard": each shard's rows in an order of its own. "global": all rows in one order. `IN_ORDER`: all rows as they
    are. `BY_SAMPLER`: in a sampler's order. None: each shard's rows as they are."""
    seed: int
    drop_last: bool = False
    """Whether rows that don't fill the last batch of an epoch are left out."""

    def count_steps_per_epoch(self, num_rows: int) -> int:
        """Return the number of steps of an epoch over this many rows."""
        return count_steps_per_epoch(num_rows, self.batch_size, drop_last=self.drop_last)


def count_steps_per_epoch(num_rows: int, batch_size: int, *, drop_last: bool) -> int:
    """Return the number of steps of an epoch; with `drop_last`, without a last step of fewer rows."""
    return num_rows // batch_size if drop_last else -(-num_rows // batch_size)


IN_ORDER = "in order"
"""Order of rows for ``shuffle=None``, if the user has not partitioned the data."""
BY_SAMPLER = "by sampler"
"""Order of rows that a user's sampler gives."""


@dataclasses.dataclass(frozen=True)
class LoadingOptions:
    """User's options for how engines load batches."""

    num_workers: int = 0
    """Number of processes per engine that load a Dataset's samples."""
    pin_memory: bool | None = None
    """Whether batches for a GPU are in page-locked memory; None: if there is a GPU."""
    prefetch: bool | None = None
    """Whether a thread loads the next batch while a step runs; None: if it saves time."""

    def __post_init__(self) -> None:
        if isinstance(self.num_workers, bool) or not hasattr(self.num_workers, "__index__") or self.num_workers < 0:
            raise ValueError(
                f"num_workers={self.num_workers!r}; it must be a number of processes per engine, from 0 up"
            )
        for name in ("pin_memory", "prefetch"):
            if getattr(self, name) not in (True, False, None):
                raise ValueError(f"{name}={getattr(self, name)!r}; it must be True, False or None (where it pays)")
        if self.num_workers and self.prefetch:
            raise ValueError(
                f"num_workers={self.num_workers}, prefetch=True: worker processes load ahead by themselves. Leave "
                "prefetch out"
            )


@dataclasses.dataclass(frozen=True)
class JobDefinition:
    """Everything that engines need to build a job."""

    model: str
    """Key of the model on the engines."""
    data: str
    """Key of the data on the engines."""
    program: bytes | Payload
    """Loss, optimizer and strategy, pickled; a payload of these bytes where they are many."""
    plan: JobPlan
    loading: LoadingOptions
    in_float64: bool = False
    """Whether the job trains a copy of the model in float64, with its batches in float64."""

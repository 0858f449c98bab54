"""Environment of a worker on an engine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dtkit.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.replica_link import ReplicaLink
    from dtkit.engine.observe.phase_timer import PhaseTimer


@dataclasses.dataclass(frozen=True)
class WorkerContext:
    """Environment of a worker. `group` is None if one process simulates all ranks."""

    group: Group | None
    device: torch.device
    phases: PhaseTimer
    """Recorder of the phase that the worker is in."""
    shards: Sequence[int]
    """Shards of each batch that this worker takes."""
    mesh: Mesh = dataclasses.field(default_factory=lambda: Mesh({"dp": 1}))
    """Arrangement of the ranks."""
    make_sample_batch: Callable[[int], Any] | None = None
    """Function from a number of rows to a batch that all ranks have, to run a model before it is placed."""
    max_local_samples: int = 0
    """Largest number of samples in this worker's part of a batch."""
    replica_link: ReplicaLink | None = None
    """Link by which one rank of a replica loads the batches for all; None if each rank loads its own."""
    float_dtype: torch.dtype | None = None
    """Dtype of floating-point numbers in batches; None to leave them as they are."""
    recomputes_stages: bool = False
    """Whether stages of a pipeline compute again in backward instead of keeping their activations."""

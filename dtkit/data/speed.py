"""How fast each rank is with a user's own model: what ``partition(by="speed")`` cuts by.

Every rank takes some steps forward and backward on rows of the data itself, all at the same time, since what they
share (cores, memory, a link) is part of the truth. A rank's speed is its rows per second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit.cluster import broadcast
from dtkit.cluster.broadcast import ModelHandle
from dtkit.dashboard.text.progress import show_progress
from dtkit.data.partition import Partition
from dtkit.planning import planner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.cluster.cluster import Cluster
    from dtkit.data.distribute import DataHandle
    from dtkit.planning.cost_model import StepTimings

NUM_TIMED_ROWS = 64  # that each rank computes at a time


def repartition_by_speed(
    cluster: Cluster,
    partition: Partition,
    model: Any,
    loss_fn: Callable[..., Any] | None,
    training_step: Callable[..., Any] | None,
) -> Partition:
    """`part` again, cut in proportion to the ranks' speeds; its rows stay where they are."""
    speeds = measure_speeds(cluster, partition, model, loss_fn, training_step)
    found = Partition(
        partition.n, partition.world_size, by="speed", weights=speeds, labels=partition.labels, seed=partition.seed
    )
    found.source, found.note = partition.source, partition.note
    cluster.call_all("set_shards", key=partition.source.key, indices=found.flatten_indices(), sizes=found.sizes)
    return found


def check_measurable(model: Any, loss_fn: Any, training_step: Any, weights: Any) -> None:
    """Raise ValueError where there is nothing to measure with, or nothing to measure."""
    if weights is not None:
        raise ValueError("by='speed' measures the weights itself; leave weights out, or use by='contiguous' with them")
    if model is None or (loss_fn is None) == (training_step is None):
        raise ValueError(
            "by='speed' measures each rank with your own model: give model= and loss= (or step=), as in "
            "cluster.partition(data, by='speed', model=model, loss=nn.CrossEntropyLoss())"
        )


def measure_speeds(
    cluster: Cluster, partition: Partition, model: Any, loss_fn: Any, training_step: Any
) -> tuple[float, ...]:
    """Rows per second of each rank, forward and backward."""
    planner.check_idle(cluster)
    copies = model if isinstance(model, ModelHandle) else broadcast.broadcast(cluster, model)
    source: DataHandle = partition.source
    with show_progress(f"measuring the speed of {partition.world_size} engines"):
        times: Sequence[StepTimings] = cluster.call_all(
            "measure",
            what="times",
            program=planner.pickle_program(cluster, copies, loss_fn, training_step, _make_sgd),
            model=copies.key,
            data=source.key,
            rows=min(NUM_TIMED_ROWS, *partition.sizes),
        )
    return tuple(_compute_rate(found) for found in times)


def _compute_rate(times: StepTimings) -> float:
    rows, forward, backward = max(times.points)
    return rows / (forward + backward)


def _make_sgd(parameters: Any) -> Any:
    import torch

    return torch.optim.SGD(parameters, lr=0.0)

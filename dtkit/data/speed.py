"""How fast each rank is with a user's own model: what ``partition(by="speed")`` cuts by.

Every rank takes some steps forward and backward on rows of the data itself, all at the same time, since what they
share (cores, memory, a link) is part of the truth. A rank's speed is its rows per second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit.cluster import broadcast
from dtkit.cluster.broadcast import Replicas
from dtkit.dashboard.progress import waiting
from dtkit.data.partition import Partition
from dtkit.planning import planner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.cluster.cluster import Cluster
    from dtkit.data.distribute import Placed
    from dtkit.planning.cost_model import Times

ROWS = 64  # that each rank computes at a time


def repartition(
    cluster: Cluster,
    part: Partition,
    model: Any,
    loss: Callable[..., Any] | None,
    step: Callable[..., Any] | None,
) -> Partition:
    """`part` again, cut in proportion to the ranks' speeds; its rows stay where they are."""
    speeds = measure(cluster, part, model, loss, step)
    found = Partition(part.n, part.world_size, by="speed", weights=speeds, labels=part.labels, seed=part.seed)
    found.source, found.note = part.source, part.note
    cluster.ask("shard", key=part.source.key, indices=found.flat(), sizes=found.sizes)
    return found


def check(model: Any, loss: Any, step: Any, weights: Any) -> None:
    """Raise ValueError where there is nothing to measure with, or nothing to measure."""
    if weights is not None:
        raise ValueError("by='speed' measures the weights itself; leave weights out, or use by='contiguous' with them")
    if model is None or (loss is None) == (step is None):
        raise ValueError(
            "by='speed' measures each rank with your own model: give model= and loss= (or step=), as in "
            "cluster.partition(data, by='speed', model=model, loss=nn.CrossEntropyLoss())"
        )


def measure(cluster: Cluster, part: Partition, model: Any, loss: Any, step: Any) -> tuple[float, ...]:
    """Rows per second of each rank, forward and backward."""
    planner.check_idle(cluster)
    copies = model if isinstance(model, Replicas) else broadcast.broadcast(cluster, model)
    source: Placed = part.source
    with waiting(f"measuring the speed of {part.world_size} engines"):
        times: Sequence[Times] = cluster.ask(
            "measure",
            what="times",
            program=planner.program(cluster, copies, loss, step, _sgd),
            model=copies.key,
            data=source.key,
            rows=min(ROWS, *part.sizes),
        )
    return tuple(_rate(found) for found in times)


def _rate(times: Times) -> float:
    rows, forward, backward = max(times.points)
    return rows / (forward + backward)


def _sgd(parameters: Any) -> Any:
    import torch

    return torch.optim.SGD(parameters, lr=0.0)

"""Speed of each rank with a user's own model, for ``partition(by="speed")``.

All ranks run forward and backward on rows at the same time, because they share cores, memory and links. A rank's speed
is its rows per second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit.dashboard.text.progress import show_progress
from dtkit.data import broadcast
from dtkit.data.broadcast import ModelHandle
from dtkit.data.partition import Partition
from dtkit.data.program import pickle_program
from dtkit.rpc.measurements import BenchmarkOperations
from dtkit.rpc.protocol import DataOperations, make_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.data.distribute import DataHandle
    from dtkit.planning.cost_model import StepTimings
    from dtkit.rpc.engine_group import EngineGroup

NUM_TIMED_ROWS = 64  # batch size of each rank


def repartition_by_speed(
    engine_group: EngineGroup,
    partition: Partition,
    model: Any,
    loss_fn: Callable[..., Any] | None,
    training_step: Callable[..., Any] | None,
) -> Partition:
    """Return a partition of the same rows in proportion to the ranks' speeds. No rows are sent again."""
    speeds = measure_speeds(engine_group, partition, model, loss_fn, training_step)
    repartitioned = Partition(
        partition.n, partition.world_size, by="speed", weights=speeds, labels=partition.labels, seed=partition.seed
    )
    repartitioned.source, repartitioned.note = partition.source, partition.note
    indices = repartitioned.flatten_indices()
    engine_group.call_all(
        make_call(DataOperations.set_shards, key=partition.source.key, indices=indices, sizes=repartitioned.sizes)
    )
    return repartitioned


def check_measurable(model: Any, loss_fn: Any, training_step: Any, weights: Any) -> None:
    """Raise ValueError if arguments for the measurement are missing, or if it is not needed."""
    if weights is not None:
        raise ValueError("by='speed' measures the weights itself; leave weights out, or use by='contiguous' with them")
    if model is None:
        raise ValueError(
            "by='speed' measures each rank with your own model: give model= and loss= (or training_step=), as in "
            "cluster.partition(data, by='speed', model=model, loss=nn.CrossEntropyLoss())"
        )
    if not isinstance(model, ModelHandle):
        broadcast.check_model(model)
    broadcast.check_has_loss(model, loss_fn, training_step)
    broadcast.check_is_not_manual(training_step)


def measure_speeds(
    engine_group: EngineGroup, partition: Partition, model: Any, loss_fn: Any, training_step: Any
) -> tuple[float, ...]:
    """Return the rows per second of each rank, forward and backward."""
    handle = model if isinstance(model, ModelHandle) else broadcast.broadcast(engine_group, model)
    source: DataHandle = partition.source
    with show_progress(f"measuring the speed of {partition.world_size} engines"):
        times = engine_group.call_all(
            make_call(
                BenchmarkOperations.measure_step_times,
                program=pickle_program(engine_group, handle, loss_fn, training_step, _make_sgd),
                model=handle.key,
                data=source.key,
                rows=min(NUM_TIMED_ROWS, *partition.sizes),
            )
        )
    return tuple(_compute_rate(timings) for timings in times)


def _compute_rate(timings: StepTimings) -> float:
    rows, forward, backward = max(timings.points)
    return rows / (forward + backward)


def _make_sgd(parameters: Any) -> Any:
    import torch

    return torch.optim.SGD(parameters, lr=0.0)

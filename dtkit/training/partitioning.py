"""The data of a training as a partition, after all checks that need data, model and loss together."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

from dtkit._util.stacklevel import find_caller_stacklevel
from dtkit.data import distribute
from dtkit.data.columns import ColumnSelection
from dtkit.data.distribute import DataHandle, StreamHandle
from dtkit.data.partition import Partition
from dtkit.planning import fit_check
from dtkit.training.callbacks import check_evaluated
from dtkit.training.validation import check_batch_size, check_stream

if TYPE_CHECKING:
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.strategies.base import Strategy
    from dtkit.training.config import TrainConfig


def partition_training_data(
    engine_group: EngineGroup, model: Any, data: Any, config: TrainConfig, strategy: Strategy, program: bytes
) -> Partition | StreamHandle:
    """Return the data as a partition that fits these options. They are checked before raw data is sent."""
    from dtkit.data.first_batch import check_first_batch, check_held_out
    from dtkit.data.optimizer_check import check_optimizer
    from dtkit.data.trial import TrialInputs

    columns = ColumnSelection.from_arguments(config.target, config.columns, config.collate_fn)

    inputs = TrialInputs(engine_group, model, program, data, columns)

    def check_validation(training_columns: ColumnSelection) -> None:
        if config.validation is not None:
            trained = dataclasses.replace(inputs, columns=training_columns)
            check_evaluated(config.callbacks, check_held_out(trained, config.validation, config.metrics))

    def check(part: Partition, training_columns: ColumnSelection) -> None:
        check_batch_size(config, part)
        if isinstance(data, Partition):
            distribute.get_data_handle(engine_group, part)
        fit_check.check_fits(engine_group, model, config.optimizer_factory, strategy)
        num_parts = strategy.build_mesh(engine_group.world_size).num_replicas * strategy.num_micro_batches
        divides_batch = strategy.divides_batch and num_parts > 1
        check_optimizer(inputs)
        uses_all_rows = config.sampler is None
        for problem in check_first_batch(inputs, divides_batch=divides_batch, uses_all_rows=uses_all_rows):
            warnings.warn(problem, stacklevel=find_caller_stacklevel())
        check_validation(training_columns)

    def check_stream_fits() -> None:
        check_stream(engine_group, config)
        fit_check.check_fits(engine_group, model, config.optimizer_factory, strategy)
        check_optimizer(inputs)

    if isinstance(data, Partition):
        # a partition of another cluster is refused by `check`
        check(data, data.source.columns if isinstance(data.source, DataHandle) else columns)
        return data
    sent = distribute.distribute_training_data(
        engine_group,
        data,
        seed=config.seed,
        columns=columns,
        check=check,
        check_stream=check_stream_fits,
    )
    if isinstance(sent, StreamHandle):  # no `check`
        check_validation(sent.columns)
    return sent

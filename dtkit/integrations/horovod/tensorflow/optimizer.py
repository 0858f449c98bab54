"""A Keras optimizer that reduces gradients over all ranks before each update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from dtkit._util.formatting import name_type
from dtkit.integrations.horovod.process_sets import ProcessSet, global_process_set
from dtkit.integrations.horovod.reductions import Average
from dtkit.integrations.horovod.tensorflow.compression import Compression
from dtkit.integrations.horovod.tensorflow.gradients import (
    GradientReducer,
    ReducerOptions,
    check_groups,
    list_layer_variables,
)
from dtkit.integrations.keras.weight_decay import copy_exclusions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.integrations.horovod.compression import Compressor


class _Accumulator:
    """Sums gradients of several backward passes on each rank."""

    def __init__(self, passes: int, is_averaged: bool) -> None:
        self._passes, self._is_averaged = passes, is_averaged
        self._sums: list[Any] = []
        self.counter = tf.Variable(0, trainable=False)

    def build(self, variables: Sequence[Any]) -> None:
        """Allocate memory for the gradients of these variables at the first call."""
        if not self._sums:
            with tf.init_scope():
                self._sums = [tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in variables]

    def add(self, gradients: Sequence[Any]) -> Any:
        """Add a pass, and return whether it is the last one before an update, as a tensor."""
        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                total.assign_add(tf.convert_to_tensor(gradient))
        return tf.equal(self.counter.assign_add(1), self._passes)

    def take(self) -> list[Any]:
        """Return the sums or means, and reset them to zero."""
        factor = self._passes if self._is_averaged else 1
        results = [tf.identity(total) / tf.cast(factor, total.dtype) for total in self._sums]
        for total in self._sums:
            total.assign(tf.zeros_like(total))
        self.counter.assign(0)
        return results


class _DistributedMixin:
    """Methods that :func:`DistributedOptimizer` adds to the optimizer's class."""

    _horovod_reducer: GradientReducer
    _agg_helper: _Accumulator | None  # its name in Horovod
    _horovod_is_reduced = False

    def register_local_var(self, var: Any) -> None:
        """Let the gradient of a variable stay on its rank."""
        self._horovod_reducer.register_local(var)

    def compute_gradients(self, loss: Any, var_list: Sequence[Any], tape: Any = None) -> list[tuple[Any, Any]]:
        """Return pairs of a gradient, reduced over all ranks, and its variable, for `apply_gradients`.

        loss : a function without arguments, or a tensor that was computed under `tape`.
        """
        if callable(loss):
            with tf.GradientTape() as own_tape:
                value = loss()
            gradients = own_tape.gradient(value, list(var_list))
        else:
            gradients = tape.gradient(loss, list(var_list))
        if self._agg_helper is None:
            gradients = self._horovod_reducer.reduce(gradients, var_list)
            self._horovod_is_reduced = True
        return list(zip(gradients, var_list, strict=True))

    _compute_gradients = compute_gradients  # its name in Keras 2 and in Horovod's scripts

    def apply_gradients(self, grads_and_vars: Any, **options: Any) -> Any:
        """Reduce the gradients, and update. Keras 2's options about aggregation have no effect."""
        options.pop("experimental_aggregate_gradients", None)
        options.pop("skip_gradients_aggregation", None)
        return super().apply_gradients(grads_and_vars, **options)  # type: ignore[misc]

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Reduce the gradients, and update. With several backward passes per step, do so only after the last one."""
        variables: Any = list(self._trainable_variables if trainable_variables is None else trainable_variables)  # type: ignore[attr-defined]
        if self._horovod_is_reduced:
            self._horovod_is_reduced = False
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        if self._agg_helper is None:
            return super().apply(self._horovod_reducer.reduce(grads, variables), trainable_variables)  # type: ignore[misc]
        return self._apply_accumulated(self._agg_helper, grads, variables)

    def _apply_accumulated(self, accumulator: _Accumulator, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        if not self.built:  # type: ignore[has-type]
            with tf.init_scope():
                self.build(variables)  # type: ignore[attr-defined]
            self.built = True
        accumulator.build(variables)

        def update() -> bool:
            reduced = self._horovod_reducer.reduce(accumulator.take(), variables)
            super(_DistributedMixin, self).apply(reduced, variables)  # type: ignore[misc]
            return True

        def skip() -> bool:
            self._iterations.assign_add(1)  # type: ignore[attr-defined]
            return False

        tf.cond(accumulator.add(gradients), update, skip)


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer of the same kind and options that reduces gradients over all ranks before each update.

    backward_passes_per_step : backward passes whose gradients each rank adds up before they are reduced.
    average_aggregated_gradients : whether these sums are divided by the number of passes.

    The other arguments are those of :func:`DistributedGradientTape`. The optimizer's state is not copied.
    """
    check_groups(num_groups, groups)
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}; it must be at least 1")
    if not isinstance(optimizer, tf.keras.optimizers.Optimizer):
        raise TypeError(f"optimizer is {name_type(optimizer)}; give one of tf.keras.optimizers")
    options = ReducerOptions(
        compression, sparse_as_dense, op, gradient_predivide_factor, process_set, scale_local_gradients
    )
    kind = type(optimizer)

    def initialize(self: Any, *args: Any, **config: Any) -> None:
        kind.__init__(self, *args, **config)
        self._horovod_reducer = GradientReducer(options)
        self._agg_helper = None
        if backward_passes_per_step > 1:
            self._agg_helper = _Accumulator(backward_passes_per_step, average_aggregated_gradients)

    members = {"__init__": initialize, "__module__": kind.__module__, "__doc__": kind.__doc__}
    subclass: Any = type(kind.__name__, (_DistributedMixin, kind), members)
    config = optimizer.get_config()
    made = subclass.from_config(config | ({} if name is None else {"name": name}))
    copy_exclusions(optimizer, made)
    return made


def PartialDistributedOptimizer(optimizer: Any, *args: Any, local_layers: Any = None, **options: Any) -> Any:
    """Return an optimizer as :func:`DistributedOptimizer` does that doesn't reduce the gradients of `local_layers`."""
    distributed = DistributedOptimizer(optimizer, *args, **options)
    for variable in list_layer_variables(local_layers):
        distributed.register_local_var(variable)
    return distributed

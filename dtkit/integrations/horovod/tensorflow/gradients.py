"""Reduction of gradients of TensorFlow's variables over the ranks, by the tape and the optimizer."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any, Self

import tensorflow as tf

from dtkit.integrations.horovod.process_sets import ProcessSet, global_process_set
from dtkit.integrations.horovod.reductions import Average, resolve_op
from dtkit.integrations.horovod.tensorflow.bridge import read_size
from dtkit.integrations.horovod.tensorflow.compression import Compression
from dtkit.integrations.horovod.tensorflow.operations import allreduce, grouped_allreduce

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.integrations.horovod.compression import Compressor


@dataclasses.dataclass(frozen=True)
class ReducerOptions:
    """Options for reducing gradients. See :func:`DistributedGradientTape`."""

    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    op: int = Average
    predivide_factor: float = 1.0
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True

    def __post_init__(self) -> None:
        resolve_op(self.op)
        if self.predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor needs op=Average")


class GradientReducer:
    """Reduces gradients together, in the order of their variables. Those of *local* variables stay on their rank."""

    def __init__(self, options: ReducerOptions) -> None:
        self._options = options
        self._local: set[Any] = set()

    def register_local(self, variable: Any) -> None:
        """Let the gradient of a variable stay on its rank."""
        self._local.add(get_key(variable))

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients. A gradient that is None must be None on all ranks, and stays so."""
        keys = [get_key(variable) for variable in variables]
        pairs = zip(keys, gradients, strict=True)
        results = [self._scale(gradient) if key in self._local else gradient for key, gradient in pairs]
        reduced = [k for k, key in enumerate(keys) if key not in self._local and results[k] is not None]
        if self._options.sparse_as_dense:
            results = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in results]
        dense = [k for k in reduced if not isinstance(results[k], tf.IndexedSlices)]
        options = self._options
        factor = options.predivide_factor
        means = grouped_allreduce(
            [results[k] for k in dense],
            compression=options.compression,
            op=options.op,
            prescale_factor=1 / factor,
            postscale_factor=factor,
            process_set=options.process_set,
        )
        for k, mean in zip(dense, means, strict=True):
            results[k] = mean
        for k in (k for k in reduced if k not in dense):
            results[k] = allreduce(results[k], op=options.op, process_set=options.process_set)
        return results

    def _scale(self, gradient: Any) -> Any:
        """Divide a local gradient by the number of ranks, so that its weight is that of an average's part."""
        if gradient is None or not self._options.scale_local_gradients:
            return gradient
        size = read_size(self._options.process_set, gradient.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
        return gradient / size


def get_key(variable: Any) -> Any:
    """Return something hashable for a variable of TensorFlow or Keras."""
    tensorflow_variable = (
        variable if callable(getattr(variable, "value", None)) else getattr(variable, "value", variable)
    )
    return tensorflow_variable.ref()


def check_groups(num_groups: int, groups: Any) -> None:
    """Check Horovod's grouping of gradients, which has no effect, since all are reduced together."""
    if num_groups:
        warnings.warn("num_groups has become groups", DeprecationWarning, stacklevel=3)
    if groups is not None and not isinstance(groups, list) and not (isinstance(groups, int) and groups >= 0):
        raise ValueError(f"groups is {groups!r}; give a number of groups, at least 0, or lists of variables")


class _ReducingTape:
    """A tape around another one."""

    def __init__(self, tape: Any, reducer: GradientReducer) -> None:
        self._tape, self._reducer = tape, reducer

    def __enter__(self) -> Self:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def register_local_source(self, source: Any) -> None:
        """Let the gradient of a variable stay on its rank."""
        self._reducer.register_local(source)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False) -> Any:
        """Return the gradients, reduced over all ranks. A collective."""
        del use_generic_names
        gradients = self._tape.gradient(target, sources, output_gradients)
        flat = self._reducer.reduce(tf.nest.flatten(gradients), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(gradients, flat)


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape around `gradtape` whose `gradient` is reduced over all ranks.

    compression : `Compression.none` or `Compression.fp16`.
    sparse_as_dense : whether IndexedSlices are reduced as dense tensors.
    op : Average or Sum, Min, Max, Product.
    gradient_predivide_factor : with Average, a number that divides gradients before the sum, and multiplies the sum.
    process_set : the ranks over which gradients are reduced.
    scale_local_gradients : whether gradients of `register_local_source` are divided by the number of ranks.
    """
    check_groups(num_groups, groups)
    if not hasattr(gradtape, "gradient"):
        raise TypeError(f"gradtape is {gradtape!r}; give a tf.GradientTape")
    options = ReducerOptions(
        compression, sparse_as_dense, op, gradient_predivide_factor, process_set, scale_local_gradients
    )
    return _ReducingTape(gradtape, GradientReducer(options))


def PartialDistributedGradientTape(
    gradtape: Any,
    *args: Any,
    local_layers: Any = None,
    **options: Any,
) -> Any:
    """Return a tape as :func:`DistributedGradientTape` does that doesn't reduce the gradients of `local_layers`."""
    tape = DistributedGradientTape(gradtape, *args, **options)
    for variable in list_layer_variables(local_layers):
        tape.register_local_source(variable)
    return tape


def list_layer_variables(layers: Any) -> list[Any]:
    """Return the trainable variables of a layer, of several, or of none (None)."""
    chosen = [] if layers is None else [layers] if isinstance(layers, tf.keras.layers.Layer) else list(layers)
    if not all(isinstance(layer, tf.keras.layers.Layer) for layer in chosen):
        raise ValueError("local_layers must be Keras layers")
    return [variable for layer in chosen for variable in layer.trainable_weights]

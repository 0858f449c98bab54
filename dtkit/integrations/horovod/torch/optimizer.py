"""An optimizer that reduces gradients over all ranks before each step.

Backward may compute gradients in different orders on different ranks. So parameters are divided into *buckets* in a
fixed order, the optimizer's reversed. A bucket's reduction begins when all of its gradients are complete and the
reduction of the previous bucket has begun. `synchronize` reduces missing gradients as zeros.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import TYPE_CHECKING, Any

from dtkit.integrations.horovod.context import get_context
from dtkit.integrations.horovod.process_sets import ProcessSet, global_process_set
from dtkit.integrations.horovod.reductions import Average, resolve_op
from dtkit.integrations.horovod.torch.compression import Compression
from dtkit.integrations.horovod.torch.gradient_reducer import GradientReducer, ReducerOptions, form_buckets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from dtkit.integrations.horovod.compression import Compressor


class _DistributedMixin:
    """Methods that :func:`DistributedOptimizer` adds to the optimizer's class."""

    param_groups: list[dict[str, Any]]
    _reducer: GradientReducer | None
    _parameter_names: dict[torch.Tensor, str]
    _is_synchronized: bool
    _is_skipping: bool

    def synchronize(self) -> None:
        """Wait until all gradients are reduced."""
        if self._reducer is not None:
            self._reducer.synchronize()
        self._is_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` within the context use the gradients as they are, after you have called `synchronize`."""
        self._is_skipping = True
        try:
            yield
        finally:
            self._is_skipping = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes that accumulate gradients before they are reduced."""
        if self._reducer is not None:
            self._reducer.set_passes(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, and update the parameters."""
        if not self._is_skipping:
            if self._is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). Gradients are reduced twice, which takes time",
                    stacklevel=2,
                )
            self.synchronize()
        self._is_synchronized = False
        return super().step(closure)  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients. Raises AssertionError while they are being reduced."""
        if self._reducer is not None and self._reducer.is_busy():
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(); the gradients are being reduced"
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state, and forget gradients that have not been reduced."""
        if self._reducer is not None:
            self._reducer.reset()
        self._is_synchronized = self._is_skipping = False
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the optimizer as an instance of a subclass that reduces gradients before each step.

    named_parameters : ``model.named_parameters()``; names must be unique, and all parameters named.
    compression : `Compression.none` or `Compression.fp16`.
    backward_passes_per_step : backward passes whose gradients are summed on each rank before they are reduced.
    op : Average or Sum, Min, Max, Product.
    gradient_predivide_factor : with Average, a number that divides gradients before the sum, and multiplies the sum.
    groups : number of groups of parameters that are reduced together, or the groups. By default groups of at most 64 MB
        (``HOROVOD_FUSION_THRESHOLD``, in bytes). `num_groups` is its old name.
    sparse_as_dense : whether sparse gradients are reduced as dense ones.
    process_set : the ranks over which gradients are reduced.

    Don't use `optimizer` itself afterwards.
    """
    resolve_op(op)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=Average")
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}; it must be > 0")
    if num_groups:
        warnings.warn("num_groups has become groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    names = _name_parameters(optimizer, named_parameters)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    buckets = form_buckets(trained, groups, _get_fusion_threshold())
    reducer = None
    if process_set.included() and get_context().size > 1:
        options = ReducerOptions(compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
        reducer = GradientReducer(buckets, names, backward_passes_per_step, options)
    return _make_subclass_instance(optimizer, names, reducer)


def _make_subclass_instance(
    optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str], reducer: GradientReducer | None
) -> Any:
    """Return a new object with the optimizer's own state. A scheduler may have replaced its `step`."""
    kind = type(optimizer)
    subclass: Any = type(kind.__name__, (_DistributedMixin, kind), {"__module__": __name__, "__doc__": kind.__doc__})
    result = subclass.__new__(subclass)
    vars(result).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    attributes = {"_reducer": reducer, "_parameter_names": names, "_is_synchronized": False, "_is_skipping": False}
    vars(result).update(attributes)
    return result


def _name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Return the parameters' names, after checks."""
    parameters = [
        (f"allreduce.noname.{i}.{j}", parameter)
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
    ]
    if named_parameters is None:
        return {parameter: name for name, parameter in parameters}
    named = list(named_parameters)
    if not all(isinstance(entry, tuple) and len(entry) == 2 for entry in named):
        raise ValueError("named_parameters must be tuples (name, parameter), as model.named_parameters() yields them")
    names = [name for name, _ in named]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"parameter names in named_parameters must be unique; found twice: {', '.join(duplicates)}")
    known = {parameter for _, parameter in named}
    if unnamed := [name for name, parameter in parameters if parameter not in known]:
        raise ValueError(
            f"named_parameters lacks {len(unnamed)} parameters of the optimizer; give all, as "
            "model.named_parameters() does, or leave it out"
        )
    return {parameter: name for name, parameter in named}


def _get_fusion_threshold() -> int:
    """Return the size of a bucket in bytes."""
    return int(os.environ.get("HOROVOD_FUSION_THRESHOLD", str(64 * 2**20)))

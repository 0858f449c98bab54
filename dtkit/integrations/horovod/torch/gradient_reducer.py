"""Reduction of gradients in buckets, during backward. See :mod:`optimizer`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from dtkit.integrations.horovod.reductions import Average
from dtkit.integrations.horovod.torch.asynchronous import (
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.integrations.horovod.compression import Compressor
    from dtkit.integrations.horovod.process_sets import ProcessSet


@dataclasses.dataclass(frozen=True)
class ReducerOptions:
    """Options for reducing gradients. See :func:`~optimizer.DistributedOptimizer`."""

    compression: type[Compressor]
    op: int
    predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet

    def make_arguments(self) -> dict[str, Any]:
        """Return keyword arguments of a reduction."""
        factors = {}
        if self.op == Average and self.predivide_factor != 1.0:
            factors = {"prescale_factor": 1.0 / self.predivide_factor, "postscale_factor": self.predivide_factor}
        return {"op": self.op, "process_set": self.process_set, **factors}


def form_buckets(
    parameters: Sequence[torch.Tensor], groups: int | Sequence[Sequence[torch.Tensor]] | None, max_bytes: int
) -> list[list[torch.Tensor]]:
    """Return buckets of parameters in the order of their reduction: last ones first, as backward computes them."""
    if groups is None:
        return _form_by_size(list(reversed(parameters)), max_bytes)
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups is {groups}; give a number of groups, at least 0, or lists of parameters")
        size = -(-len(parameters) // groups) if groups else 1
        ordered = list(reversed(parameters))
        return [ordered[k : k + size] for k in range(0, len(ordered), size)]
    return _complete_groups(parameters, groups)


def _form_by_size(parameters: Sequence[torch.Tensor], max_bytes: int) -> list[list[torch.Tensor]]:
    buckets: list[list[torch.Tensor]] = []
    size = 0
    for parameter in parameters:
        size += parameter.nbytes
        if not buckets or size > max_bytes:
            buckets.append([])
            size = parameter.nbytes
        buckets[-1].append(parameter)
    return buckets


def _complete_groups(
    parameters: Sequence[torch.Tensor], groups: Sequence[Sequence[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """Check groups, and put each other parameter into a group of its own."""
    grouped = [parameter for group in groups for parameter in group]
    if not all(isinstance(parameter, torch.Tensor) for parameter in grouped):
        raise ValueError("groups must be lists of parameters, or a number of groups")
    if len({id(parameter) for parameter in grouped}) < len(grouped):
        raise ValueError("a parameter is in groups twice; each can be in one group only")
    trained, taken = {id(parameter) for parameter in parameters}, {id(parameter) for parameter in grouped}
    buckets = [[parameter for parameter in group if id(parameter) in trained] for group in groups]
    rest = [[parameter] for parameter in reversed(parameters) if id(parameter) not in taken]
    return [bucket for bucket in buckets if bucket] + rest


class GradientReducer:
    """Reduces the gradients of buckets of parameters as backward computes them."""

    def __init__(
        self,
        buckets: Sequence[Sequence[torch.Tensor]],
        names: Mapping[torch.Tensor, str],
        passes: int,
        options: ReducerOptions,
    ) -> None:
        self._buckets, self._names, self._passes, self._options = buckets, names, passes, options
        self._remaining: dict[torch.Tensor, int] = {}  # backward passes until a gradient is complete
        self._started: list[list[Callable[[], None]]] = []  # for each bucket, functions that wait for its results
        self.reset()
        for bucket in buckets:
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes."""
        self._passes = passes
        self.reset()

    def reset(self) -> None:
        """Expect new gradients for all parameters."""
        self._started.clear()
        self._remaining = {parameter: self._passes for bucket in self._buckets for parameter in bucket}

    def is_busy(self) -> bool:
        """Return whether some gradients have been computed but not reduced yet."""
        return bool(self._started) or any(count < self._passes for count in self._remaining.values())

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._remaining[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before a call of step(). Increase "
                "backward_passes_per_step to accumulate gradients on each rank"
            )
        self._remaining[parameter] -= 1
        while len(self._started) < len(self._buckets) and self._is_complete(self._buckets[len(self._started)]):
            self._start_next()

    def _is_complete(self, bucket: Sequence[torch.Tensor]) -> bool:
        return all(self._remaining[parameter] == 0 for parameter in bucket)

    def synchronize(self) -> None:
        """Reduce the gradients of all parameters, zeros for those without one, and wait."""
        while len(self._started) < len(self._buckets):
            self._start_next()
        for waits in self._started:
            for wait in waits:
                wait()
        self.reset()

    def _start_next(self) -> None:
        bucket = self._buckets[len(self._started)]
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        sparse = [parameter for parameter in bucket if _get_gradient(parameter).is_sparse]
        dense = [parameter for parameter in bucket if not _get_gradient(parameter).is_sparse]
        waits = [self._start_sparse(parameter) for parameter in sparse]
        if dense:
            waits.append(self._start_dense(dense))
        self._started.append(waits)

    def _start_dense(self, parameters: Sequence[torch.Tensor]) -> Callable[[], None]:
        options = self._options
        compressed = [options.compression.compress(_get_gradient(parameter)) for parameter in parameters]
        handle = grouped_allreduce_async_(
            [tensor for tensor, _ in compressed], name=self._names[parameters[0]], **options.make_arguments()
        )

        def wait() -> None:
            for parameter, reduced, (_, ctx) in zip(parameters, synchronize(handle), compressed, strict=True):
                gradient, result = _get_gradient(parameter), options.compression.decompress(reduced, ctx)
                if result is not gradient:
                    gradient.copy_(result)

        return wait

    def _start_sparse(self, parameter: torch.Tensor) -> Callable[[], None]:
        options, gradient, name = self._options, _get_gradient(parameter), self._names[parameter]
        if not options.sparse_as_dense:
            wait_for_sparse = sparse_allreduce_async(gradient, name, options.op, options.process_set)

            def wait() -> None:
                parameter.grad = wait_for_sparse().coalesce()

            return wait
        handle = allreduce_async_(gradient.to_dense(), name=name, **options.make_arguments())

        def wait_for_dense() -> None:
            parameter.grad = synchronize(handle).to_sparse(gradient.sparse_dim())

        return wait_for_dense


def _get_gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad

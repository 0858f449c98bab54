"""Code of the user's own that runs on every rank after each step: ``cluster.train(on_engine=[...])``."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.arguments import suggest_options
from dtkit._util.dtensor import is_dtensor
from dtkit.engine.state.dtensor_shards import (
    get_local_tensor,
    get_num_fused_blocks,
    set_num_fused_blocks,
    wrap_local_shard,
)
from dtkit.engine.state.visitor import drop_aliases

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dtkit.engine.state.visitor import StateVisitor
    from dtkit.strategies.base import Worker


@dataclasses.dataclass
class EngineContext:
    """The part of a training that a callback on an engine sees."""

    rank: int
    world_size: int
    step: int
    """Number of completed steps."""
    model: torch.nn.Module
    """This rank's part of the model."""
    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, torch.Tensor]
    """This rank's parts of the parameters, as plain tensors, by the model's names."""


class EngineCallback:
    """Base of callbacks on engines. Each rank has its own copy; methods are called at the same step on all ranks.

    Overwrite what you need, and pass an object to ``cluster.train(on_engine=[...])``::

        class LogNorm(dtkit.EngineCallback):
            def after_step(self, context):
                dtkit.log(weight_norm=context.parameters["0.weight"].norm())

    `context` has `rank`, `world_size`, `step`, `model`, `optimizer` and `parameters`: this rank's parts, by name.
    """

    def start(self, context: EngineContext) -> None:
        """Prepare for a training that has just been built."""

    def after_step(self, context: EngineContext) -> None:
        """Read or change the training after an update."""

    def list_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return tensors with the shapes of this rank's parameter parts, by the parameters' names. Checkpoints include
        them.
        """
        return {}

    def build_model(self, run: Any) -> torch.nn.Module:
        """Return the model of a run in the notebook, with this callback's tensors as its parameters.

        Raises ValueError if the run was started without this callback, and RunError if it was released.
        """
        model: torch.nn.Module = run.lifecycle.fetch_callback_model(self)
        return model

    def state_dict(self) -> dict[str, Any]:
        """Return plain values that are equal on all ranks. Checkpoints include them."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values that :meth:`state_dict` returned."""


@suggest_options
class ExponentialMovingAverage(EngineCallback):
    """Exponential moving average of the parameters (Polyak and Juditsky, 1992), on each rank for its part.

    After each step the average moves towards the parameters by ``1 - decay``. ``average.build_model(run)`` returns
    the model with averaged parameters. With `warmup` the decay is ``min(decay, (1 + step) / (10 + step))``, so that
    early parameters are soon forgotten.
    """

    def __init__(self, decay: float = 0.999, *, warmup: bool = False) -> None:
        if not (isinstance(decay, int | float) and 0 <= decay < 1):
            raise ValueError(f"decay={decay!r}; it must be a number from 0 to below 1, such as 0.999")
        self.decay, self.warmup = float(decay), warmup
        self._averages: dict[str, torch.Tensor] = {}

    def start(self, context: EngineContext) -> None:
        """Begin with the current parameters."""
        self._averages = {name: p.detach().clone() for name, p in context.parameters.items()}

    @torch.no_grad()
    def after_step(self, context: EngineContext) -> None:
        """Move the average."""
        decay = min(self.decay, (1 + context.step) / (10 + context.step)) if self.warmup else self.decay
        for name, average in self._averages.items():
            average.lerp_(context.parameters[name].to(average), 1 - decay)

    def list_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the averages."""
        return self._averages

    def __repr__(self) -> str:
        return f"ExponentialMovingAverage({self.decay:g})"


class CallbackList:
    """The callbacks of one job on one rank."""

    def __init__(self, callbacks: Sequence[EngineCallback], worker: Worker, rank: int, world_size: int) -> None:
        self._callbacks, self._worker = tuple(callbacks), worker
        self._rank, self._world_size = rank, world_size
        self._parameters: dict[str, torch.Tensor] = {}
        self.is_stale = True
        """Whether the strategy may have other parameters now: it has a new process group."""
        self._refresh_if_stale()
        for callback in self._callbacks:
            callback.start(self._make_context(0))

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def _refresh_if_stale(self) -> None:
        """Look up the parameters again. A collective with a new process group."""
        if self._callbacks and self.is_stale:
            self._worker.settle()
            self._parameters = drop_aliases(self._worker.named_parameters())[0]
            self.is_stale = False

    def _list_local_parts(self) -> dict[str, torch.Tensor]:
        """Return this rank's parts. torch's sharding may move them, so they are looked up each time."""
        return {name: get_local_tensor(p.detach()) for name, p in self._parameters.items()}

    def _make_context(self, step: int) -> EngineContext:
        worker = self._worker
        local_parts = self._list_local_parts()
        return EngineContext(self._rank, self._world_size, step, worker.model, worker.optimizer, local_parts)

    def after_step(self, step: int) -> None:
        """Call all callbacks after `step` steps."""
        self._refresh_if_stale()
        if not self._callbacks:
            return
        context = self._make_context(step)
        for callback in self._callbacks:
            callback.after_step(context)

    def visit_state(self, visitor: StateVisitor, step: int) -> None:
        """Visit the callbacks' state. If a checkpoint lacks a callback, it starts from the restored parameters."""
        self._refresh_if_stale()
        for k, callback in enumerate(self._callbacks):
            name = f"callback {k}"
            tensors = {key: self._wrap(key, tensor) for key, tensor in callback.list_tensors().items()}
            was_saved = visitor.visit_tensors(name, tensors) or not tensors
            state = visitor.visit_value(name, callback.state_dict())
            if not visitor.is_saving:
                if not was_saved:
                    callback.start(self._make_context(step))
                callback.load_state_dict(state)

    def _wrap(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a part in the form that the strategy uses for the parameter, with the same memory."""
        like = self._parameters[name]
        if not is_dtensor(like):
            return tensor
        wrapped: Any = wrap_local_shard(tensor, like)
        return set_num_fused_blocks(wrapped, get_num_fused_blocks(like))

    @contextlib.contextmanager
    def apply(self, index: int) -> Iterator[None]:
        """Set the parameters to one callback's tensors within the context."""
        self._refresh_if_stale()
        tensors, local_parts = self._callbacks[index].list_tensors(), self._list_local_parts()
        before = {name: local_parts[name].clone() for name in tensors}
        try:
            for name, tensor in tensors.items():
                local_parts[name].copy_(tensor)
            yield
        finally:
            for name, tensor in before.items():
                local_parts[name].copy_(tensor)

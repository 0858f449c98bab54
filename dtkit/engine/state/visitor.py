"""The visitor to which a job's workers show their state, with one method for both saving and restoring.

:class:`~dtkit.engine.state.capture.StateCapture` saves the state that it is shown.
:class:`~dtkit.engine.state.restore.StateRestore` fills it in. With the same layout (kind of strategy and mesh) each
rank gets back its own values. With another layout it gets a substitute: a mean over saved ranks, its share of their
sum, or a new random state.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dtkit._util.dtensor import is_dtensor
from dtkit.engine.state.dtensor_shards import count_shards, get_local_tensor, get_shard_position
from dtkit.engine.state.shards import TensorShard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dtkit.engine.data.worker_context import WorkerContext


class StateVisitor(abc.ABC):
    """Base of the visitors that capture and restore state."""

    is_saving = True
    """Whether the visitor captures state."""

    def __init__(self, context: WorkerContext, layout: Mapping[str, Any]) -> None:
        group = context.group
        self.rank, self.world_size = (0, 1) if group is None else (group.rank, group.world_size)
        self.context, self.layout = context, layout
        self.replica = context.shards[0]
        """Index of this rank's replica."""

    @abc.abstractmethod
    def visit_value(self, name: str, current: Any) -> Any:
        """Visit a plain value that is equal on all ranks. Return the value to use: `current` if none was saved."""

    @abc.abstractmethod
    def per_rank(self, name: str, current: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Visit a plain value of this rank. Return the value to use.

        With another layout that is `combine` of all saved ranks' values.
        """

    @abc.abstractmethod
    def visit_tensors(self, prefix: str, named_tensors: Mapping[str, torch.Tensor]) -> bool:
        """Visit tensors or shards that are equal on all ranks that hold them. Return whether any were saved."""

    @abc.abstractmethod
    def per_rank_tensors(
        self, prefix: str, named_tensors: Mapping[str, torch.Tensor], *, fraction: float | None = None
    ) -> None:
        """Visit tensors of this rank.

        With another layout they stay as they are, or become `fraction` of the sum over all saved ranks. With the same
        layout, the tensors of a rank that was lost stay as they are.
        """

    @abc.abstractmethod
    def per_replica(self, prefix: str, named_tensors: Mapping[str, torch.Tensor], weight: float | None) -> None:
        """Visit tensors that may differ between replicas.

        The model as a whole has their mean, weighted by `weight`; without weight it has those of the first replica.
        """

    @abc.abstractmethod
    def visit_optimizer(
        self,
        prefix: str,
        optimizer: torch.optim.Optimizer,
        named_parameters: Mapping[str, torch.Tensor],
        *,
        per_rank: bool = False,
    ) -> None:
        """Visit an optimizer of these parameters. `per_rank` means that ranks take different steps."""

    @abc.abstractmethod
    def visit_extra_state(self, model: torch.nn.Module, entries: Mapping[str, Any]) -> None:
        """Visit what modules return from ``get_extra_state``, by its names in the state dict."""

    @abc.abstractmethod
    def visit_stateful(self, name: str, stateful: Any, description: str) -> None:
        """Visit an object with `state_dict` and `load_state_dict` of plain values, equal on all ranks."""


class StatefulJob(Protocol):
    """The part of a job that is needed to capture and restore its state."""

    context: WorkerContext
    step: int
    partially_updated: bool
    """Whether an update began and did not end, so that the parameters belong to no step."""
    checkpoint_trainable_only: bool
    """Whether checkpoints leave frozen parameters out."""

    @property
    def layout(self) -> Mapping[str, Any]:
        """Kind of strategy, and mesh."""

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""

    def visit_state(self, visitor: StateVisitor) -> None:
        """Show all state to the visitor. A collective."""

    def visit_worker(self, visitor: StateVisitor) -> None:
        """Show the state of model and optimizer to the visitor. A collective."""

    def visit_model(self, visitor: StateVisitor) -> None:
        """Show the model's state to the visitor. A collective."""


def drop_aliases(named_tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return (tensors under the first of their names, {other name: first name}). Tied weights are one tensor."""
    first_names: dict[Any, str] = {}
    unique: dict[str, torch.Tensor] = {}
    aliases = {}
    for name, tensor in named_tensors.items():
        local = get_local_tensor(tensor)
        has_data = local.numel() and local.layout == torch.strided
        key = (local.data_ptr(), local.shape, local.stride()) if has_data else name
        if key in first_names:
            aliases[name] = first_names[key]
        else:
            first_names[key], unique[name] = name, tensor
    return unique, aliases


def make_shard(tensor: torch.Tensor, num_blocks: int = 1) -> TensorShard:
    """Return this rank's part of a tensor; with several blocks, its part of each."""
    local, offset = get_local_tensor(tensor.detach()), [0] * tensor.dim()
    position = get_shard_position(tensor) if is_dtensor(tensor) else None
    if position is None:
        return TensorShard(local, tuple(tensor.shape), tuple(offset))
    dim, index = position
    length = tensor.shape[dim] // num_blocks
    offset[dim] = min(index * -(-length // count_shards(tensor)), length)  # like torch.chunk
    return TensorShard(local, tuple(tensor.shape), tuple(offset), num_blocks, dim)

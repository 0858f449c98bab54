"""One rank's shards of a model's parameters: the base of tensor parallel and sharded training.

A sharded parameter is a torch DTensor: this rank's part, and the mesh of ranks that have the other parts. Norm,
clipping and the check for finite gradients work on this rank's parts, with one number summed over all ranks. A part
that n ranks hold counts for 1/n on each of them.

A fused parameter holds several matrices. A rank with some attention heads has rows of queries, of keys and of values
(columns, in transformers' Conv1D). To torch it is a DTensor sharded by rows. The parameter stores the number of its
blocks (:func:`get_num_fused_blocks`). Loading and saving use it to restore the order of rows.

DTensors and the hooks of modules keep the process group that they were made with. For a new process group the worker
shards another copy without values. Its shards and the optimizer's state move there without copying. It does so at the
job's next use, since other ranks may lack the job when the group is formed. For meshes with equal ranks and names,
torch would reuse the old process group. So names of meshes include the generation.
"""

from __future__ import annotations

import abc
import contextlib
import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dtkit._util.lazy_compiler import load_compiler
from dtkit.engine.observe.collective_probe import CollectiveProbe
from dtkit.engine.state.checksum import compute_checksum
from dtkit.engine.state.dtensor_shards import count_shards, get_local_tensor
from dtkit.mesh import Mesh
from dtkit.strategies import gradients
from dtkit.strategies.base import StepResult, Strategy, Worker, make_optimizer
from dtkit.strategies.combined_optimizer import CombinedOptimizer
from dtkit.strategies.data_parallel import DataParallel
from dtkit.strategies.meta_copy import copy_to_meta
from dtkit.strategies.model_shards import load_shards, rebind_optimizer, transfer_shards
from dtkit.strategies.module_numbers import assign_numbers, list_numbers
from dtkit.strategies.options import check_count, check_positive
from dtkit.strategies.replicated import LossAccumulator, ReplicatedWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.engine.observe.step_probe import StepProbe
    from dtkit.engine.state.visitor import StateVisitor
    from dtkit.messages import Fingerprint
    from dtkit.strategies.loss import Loss


class DTensorStrategy(Strategy):
    """Base of the strategies that shard parameters, with replicas of the model and micro-batches."""

    replicas: int
    clip_grad_norm: float | None
    accumulate: int

    shards_model = True

    def __post_init__(self) -> None:
        """Check the options."""
        check_count("replicas", self.replicas)
        check_positive("clip_grad_norm", self.clip_grad_norm)
        check_count("accumulate", self.accumulate)

    @property
    def num_micro_batches(self) -> int:
        """Return `accumulate`."""
        return self.accumulate

    @property
    def shares_router_losses(self) -> bool:  # type: ignore[override]  # a constant of other strategies
        """Whether a rank computes all of its samples at once."""
        return self.accumulate == 1

    def check(self, world_size: int, batch_size: int) -> None:
        """Raise ValueError if no replica has enough samples for `accumulate` micro-batches."""
        self._unsharded_strategy.check(self.build_mesh(world_size).num_replicas, batch_size)

    def preload(self, model: nn.Module | None, group: Group | None) -> None:  # noqa: ARG002 - always the same
        """Load torch's compiler, from which DTensor and FSDP exclude some of their functions."""
        load_compiler()

    def setup(self, model: nn.Module, loss_fn: Loss, optimizer: Callable[..., Any], context: WorkerContext) -> Worker:
        """Return a worker with this rank's shards, or with the whole model without a process group.

        The parameters must already be equal on all ranks.
        """
        make = self._unsharded_strategy.setup if context.group is None else self._make_worker
        return make(model, loss_fn, optimizer, context)

    @property
    def _unsharded_strategy(self) -> DataParallel:
        """The same training without shards."""
        return DataParallel(clip_grad_norm=self.clip_grad_norm, accumulate=self.accumulate)

    @abc.abstractmethod
    def _make_worker(
        self, model: nn.Module, loss_fn: Loss, optimizer: Callable[..., Any], context: WorkerContext
    ) -> DTensorWorker:
        """Return a worker with this rank's shards of `model`."""


class DTensorWorker(ReplicatedWorker, abc.ABC):
    """One rank's shards. Subclasses shard the model and define a step."""

    forward_is_collective = True
    _strategy: DTensorStrategy

    def __init__(
        self,
        strategy: DTensorStrategy,
        model: nn.Module,
        loss_fn: Loss,
        optimizer: Callable[..., Any],
        context: WorkerContext,
    ) -> None:
        """Shard a copy of the whole `model`; `optimizer` is a function from the shards to an optimizer."""
        assert context.group is not None
        self._strategy, self._context, self._num_micro_batches = strategy, context, strategy.accumulate
        self._meta_model, self._has_stale_group = copy_to_meta(model), False
        sharded = copy.deepcopy(self._meta_model)
        self._shard_model(sharded, context.group)
        load_shards(model, sharded, context.device)
        super().__init__(
            sharded, loss_fn, _make_optimizer(optimizer, sharded), context, clip_grad_norm=strategy.clip_grad_norm
        )
        self._register_shards(sharded)

    def step(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], probe: StepProbe | None = None
    ) -> StepResult:
        """Take one step; a probe records its collectives."""
        self.settle()
        if not isinstance(probe, CollectiveProbe):
            return self._run_step(batches, counts)
        with probe.record_collectives():
            result = self._run_step(batches, counts)
        probe.record_loss(result.loss, float(result.loss_weight) if self._reports_samples else 0.0, 0.0)
        if result.is_finite:
            probe.record_update(float(self.optimizer.param_groups[0]["lr"]))
        return result

    @abc.abstractmethod
    def _run_step(self, batches: Sequence[tuple[int, Any]], counts: Sequence[int]) -> StepResult:
        """Take one step in the current process group."""

    def make_step_probe(self, **position: int) -> StepProbe:
        """Return a probe of this rank's collectives. A collective if the process group is new."""
        self.settle()
        group = self._group
        assert group is not None
        return CollectiveProbe(
            self._model,
            lambda: self._phases.enclosing_phase,
            group,
            reports_samples=self._reports_samples,
            **position,
        )

    @abc.abstractmethod
    def _shard_model(self, model: nn.Module, group: Group) -> None:
        """Shard the parameters of `model`, a copy without values. A collective."""

    def _register_shards(self, model: nn.Module) -> None:
        """Keep references to the shards, since FSDP temporarily replaces them by whole parameters."""
        self.model = self._model = model
        self._sharded_parameters = dict(model.named_parameters(remove_duplicate=False))
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        world = self._context.group.world_size if self._context.group is not None else 1
        self._num_holders = [world // count_shards(p) for p in self._parameters]

    def visit_model(self, visitor: StateVisitor) -> None:
        """Visit the same state as of a whole copy, by shards."""
        self.settle()
        super().visit_model(visitor)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's shards by their names in the model."""
        return self._sharded_parameters

    # -- gradients --------------------------------------------------------------------------------------------

    def _list_local_gradients(self) -> list[torch.Tensor]:

        return [get_local_tensor(p.grad) for p in self._parameters if p.grad is not None]

    def _compute_grad_norm(self) -> float:
        """Return the norm of the whole gradient: squares summed over ranks in float64."""
        pairs = [
            (get_local_tensor(p.grad), n)
            for p, n in zip(self._parameters, self._num_holders, strict=True)
            if p.grad is not None
        ]
        total = sum_global_squares(
            [gradient for gradient, _ in pairs], [n for _, n in pairs], self._context.device
        ).sum()
        assert self._group is not None
        self._phases.enter("sync")
        self._group.all_reduce(total)
        self._phases.enter("update")
        return float(total.sqrt())

    def _are_gradients_finite(self) -> bool:
        assert self._group is not None
        return not self._group.all_reduce_any(not all(bool(g.isfinite().all()) for g in self._list_local_gradients()))

    def _start_weight_reduce(self, loss_accumulator: LossAccumulator) -> Callable[[], torch.Tensor] | None:
        """Start the sum of weights; of ranks with the same samples, one reports theirs."""
        if self._reports_samples:
            return super()._start_weight_reduce(loss_accumulator)
        empty = LossAccumulator(1)
        empty.loss_form = loss_accumulator.loss_form
        return super()._start_weight_reduce(empty)

    @property
    def _reports_samples(self) -> bool:
        """Whether this rank reports the samples that it takes."""
        return True

    # -- the whole model --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def averaged_model(self) -> Iterator[nn.Module]:
        """Average the batch statistics over ranks, within the context."""
        self.settle()
        with super().averaged_model() as model:
            yield model

    def compute_fingerprint(self) -> Fingerprint:
        """Return a checksum of the shards, equal in all replicas, and one of whole parameters, equal on all ranks."""
        assert self._group is not None
        shard_id = self._strategy.model_shard_id(self._group.world_size, self._group.rank)
        whole = [get_local_tensor(p) for p in self._parameters if count_shards(p) == 1]
        sharded = [get_local_tensor(p) for p in self._parameters if count_shards(p) > 1]
        return {part: compute_checksum(tensors) for part, tensors in (((), whole), (shard_id, sharded)) if tensors}

    # -- another process group --------------------------------------------------------------------------------

    def set_process_group(self, group: Group) -> None:
        """Continue in a new generation of the process group, from the next use on."""
        super().set_process_group(group)
        self._has_stale_group = True

    def settle(self) -> None:
        """Move to the current process group. A collective if it is new."""
        if not self._has_stale_group:
            return
        assert self._group is not None
        new_model = copy.deepcopy(self._meta_model)
        self._shard_model(new_model, self._group)
        assign_numbers(new_model, list_numbers(self._model))
        rebind_optimizer(self.optimizer, transfer_shards(self._sharded_parameters, self._model, new_model))
        self._register_shards(new_model)
        self._has_stale_group = False


def build_device_meshes(group: Group, mesh: Mesh, device: torch.device) -> dict[str, DeviceMesh]:
    """Return the sub-mesh of each axis by its name, and the whole mesh as "", named after the group's generation."""
    names = {axis: f"{axis}{group.generation}" for axis in mesh.axes}
    whole = group.device_mesh(Mesh({names[axis]: size for axis, size in mesh.axes.items()}), device)
    return {"": whole} | {axis: whole[name] for axis, name in names.items() if name in (whole.mesh_dim_names or ())}


def sum_global_squares(
    tensors: Sequence[torch.Tensor], num_holders: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Return the sum of squares of each tensor, divided by the number of ranks that hold it, in float64."""
    if not tensors:
        return torch.zeros(1, dtype=torch.float64, device=device)
    return gradients.sum_squares(tensors) / torch.tensor(num_holders, dtype=torch.float64, device=device)


_UNFIT_OPTIMIZERS = (torch.optim.Adafactor, torch.optim.Rprop, torch.optim.SparseAdam)
"""torch's optimizers whose steps raise errors on shards: torch lacks in-place operations that change how a tensor is
sharded, and SparseAdam's gradients are dense here. All others of torch 2.13 were tried, and train.
"""


def _make_optimizer(factory: Callable[..., Any], sharded: nn.Module) -> torch.optim.Optimizer:
    """Return the user's optimizer. Raises ValueError for one that can't train shards."""
    optimizer = make_optimizer(factory, sharded)
    for each in optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [optimizer]:
        if isinstance(each, _UNFIT_OPTIMIZERS) and any(
            isinstance(p, DTensor) for group in each.param_groups for p in group["params"]
        ):
            raise ValueError(
                f"torch's {type(each).__name__} can't train sharded parameters. Use strategy=dtkit.DataParallel() or "
                "dtkit.Pipeline(...), whose ranks hold whole parameters, or another optimizer, such as AdamW"
            )
    return optimizer

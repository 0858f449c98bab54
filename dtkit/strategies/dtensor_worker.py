"""One rank's slices of a model's parameters: what tensor parallel and sharded training do alike.

A sliced parameter is a torch DTensor: this rank's part of it, and the mesh of ranks among which it was cut. What is
done with gradients here (their norm, clipping, the check that they are finite) is done on the parts that lie on this
rank, with one number summed over all ranks: a part that lies on `copies` ranks counts for 1 / `copies` on each.

A parameter may be several in one: of the rows of queries, keys and values, a rank that holds some heads has a part
of each. To torch that is a DTensor cut by rows like any other; the parameter says of how many such blocks its part is
made (:func:`fused_blocks`), and wherever numbers come in or go out, that is undone.

A rank never copies the whole model: a skeleton of it without numbers is cut, and this rank's slices of the numbers
are put into it.

A DTensor and the hooks that were put on the module hold the process group that they were made with. When an error
elsewhere has the group formed anew, another skeleton is cut, and the slices that there are go into that as they are:
nothing is copied or sent, and the optimiser's state moves along. That is done when the job is next used and not at
once, since ranks need not hold the same jobs then. torch takes meshes of the same ranks and names for equal, and what
it keeps about one (which process group to use among it) for true of the other; so here names carry the generation.
"""

from __future__ import annotations

import abc
import contextlib
import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dtkit.engine.observe.collective_probe import CollectiveProbe
from dtkit.engine.state.dtensor_shards import (
    count_shards,
    get_local_tensor,
    get_num_fused_blocks,
    get_shard_position,
)
from dtkit.engine.state.tensor_part import TensorPart
from dtkit.mesh import Mesh
from dtkit.strategies import gradients
from dtkit.strategies.base import StepResult, Strategy, Worker, WorkerContext, make_optimizer
from dtkit.strategies.data_parallel import DataParallel
from dtkit.strategies.meta_copy import copy_to_meta
from dtkit.strategies.model_shards import load_shards, rebind_optimizer, transfer_shards
from dtkit.strategies.options import check_count, check_positive
from dtkit.strategies.replicated import LossAccumulator, ReplicatedWorker, copy_to_cpu
from dtkit.engine.state.checksum import compute_checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.observe.step_probe import StepProbe
    from dtkit.engine.state.capture import StateVisitor
    from dtkit.strategies.loss import Loss
    from dtkit.types import Fingerprint


class DTensorStrategy(Strategy):
    """What strategies have in common that cut parameters: replicas of the model, and micro-batches for less memory."""

    replicas: int
    clip_grad_norm: float | None
    accumulate: int

    shards_model = True

    def __post_init__(self) -> None:
        """Refuse what is no option."""
        check_count("replicas", self.replicas)
        check_positive("clip_grad_norm", self.clip_grad_norm)
        check_count("accumulate", self.accumulate)

    @property
    def num_micro_batches(self) -> int:
        """`accumulate`."""
        return self.accumulate

    def check(self, world_size: int, batch_size: int) -> None:
        """Raise ValueError where nobody could have so many micro-batches."""
        self._unsharded_strategy.check(self.build_mesh(world_size).num_replicas, batch_size)

    def setup(self, model: nn.Module, loss_fn: Loss, optimizer: Callable[..., Any], context: WorkerContext) -> Worker:
        """This rank's slices. The parameters must be equal on all ranks already; alone, a plain training."""
        make = self._unsharded_strategy.setup if context.group is None else self._make_worker
        return make(model, loss_fn, optimizer, context)

    @property
    def _unsharded_strategy(self) -> DataParallel:
        """The same training where nothing is cut."""
        return DataParallel(clip_grad_norm=self.clip_grad_norm, accumulate=self.accumulate)

    @abc.abstractmethod
    def _make_worker(
        self, model: nn.Module, loss_fn: Loss, optimizer: Callable[..., Any], context: WorkerContext
    ) -> DTensorWorker:
        """This rank's slices of `model`."""


class DTensorWorker(ReplicatedWorker, abc.ABC):
    """One rank's slices. Subclasses cut the model, and say what a step is."""

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
        """`model` is the whole one, and stays as it is. `optimizer` makes one, once parameters are cut."""
        assert context.group is not None
        self._strategy, self._context = strategy, context
        self._meta_model, self._has_stale_group = copy_to_meta(model), False
        mine = copy.deepcopy(self._meta_model)
        self._shard_model(mine, context.group)
        load_shards(model, mine, context.device)
        super().__init__(
            mine, loss_fn, make_optimizer(optimizer, mine), context, clip_grad_norm=strategy.clip_grad_norm
        )
        self._register_shards(mine)

    def step(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], probe: StepProbe | None = None
    ) -> StepResult:
        """One step; the collectives in it are told to a microscope."""
        self._rebuild_if_stale()
        if not isinstance(probe, CollectiveProbe):
            return self._run_step(batches, counts)
        with probe.record_collectives():
            outcome = self._run_step(batches, counts)
        probe.record_loss(outcome.loss, float(outcome.loss_weight) if self._reports_samples else 0.0, 0.0)
        if outcome.is_finite:
            probe.record_update(float(self.optimizer.param_groups[0]["lr"]))
        return outcome

    @abc.abstractmethod
    def _run_step(self, batches: Sequence[tuple[int, Any]], counts: Sequence[int]) -> StepResult:
        """One step, in the process group that there is now."""

    def make_step_probe(self, **position: int) -> StepProbe:
        """What looks at this rank's collectives. A collective itself, where the process group is a new one."""
        self._rebuild_if_stale()
        group = self._group
        assert group is not None
        return CollectiveProbe(
            self._model,
            lambda: self._phases.enclosing_phase,
            group.count_sent_bytes,
            reports_samples=self._reports_samples,
            **position,
        )

    @abc.abstractmethod
    def _shard_model(self, model: nn.Module, group: Group) -> None:
        """Cut the parameters of `model`, a skeleton without numbers. A collective."""

    @property
    @abc.abstractmethod
    def _replica_index(self) -> int:
        """Which copy of the model this rank's slices belong to."""

    def _register_shards(self, model: nn.Module) -> None:
        """Keep the slices at hand: while FSDP is at work, its modules have whole parameters in their place."""
        self._model = model
        self._sharded_parameters = dict(model.named_parameters(remove_duplicate=False))
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        world = self._context.group.world_size if self._context.group is not None else 1
        self._num_holders = [world // count_shards(p) for p in self._parameters]

    def visit_state(self, visitor: StateVisitor) -> None:
        """As of a whole copy, slice by slice."""
        self._rebuild_if_stale()
        super().visit_state(visitor)

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return self._sharded_parameters

    # -- gradients --------------------------------------------------------------------------------------------

    def _list_local_gradients(self) -> list[torch.Tensor]:
        """What lies on this rank of the gradients that there are."""
        return [get_local_tensor(p.grad) for p in self._parameters if p.grad is not None]

    def _compute_grad_norm(self) -> float:
        """Of the whole gradient: the squares of all parts, summed over ranks in float64."""
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

    def _start_weight_reduce(
        self, loss_accumulator: LossAccumulator
    ) -> torch.futures.Future[list[torch.Tensor]] | None:
        """Of ranks that take the same samples, one tells their weight."""
        if self._reports_samples:
            return super()._start_weight_reduce(loss_accumulator)
        mute = LossAccumulator(1)
        mute.loss_form = loss_accumulator.loss_form
        return super()._start_weight_reduce(mute)

    @property
    def _reports_samples(self) -> bool:
        """Whether this rank speaks for the samples that it takes."""
        return True

    # -- the whole model --------------------------------------------------------------------------------------

    def state_dict_parts(self) -> dict[str, Any]:
        """The slices of the first copy of the model; from rank 0, what is not cut too."""
        assert self._group is not None
        found: dict[str, Any] = {}
        with self.averaged_model() as model:
            for name, value in model.state_dict().items():
                cut = get_shard_position(value) if isinstance(value, DTensor) else None
                if cut is not None and self._replica_index == 0:
                    found[name] = TensorPart(
                        copy_to_cpu(get_local_tensor(value)), *cut, get_num_fused_blocks(self._sharded_parameters[name])
                    )
                elif cut is None and self._group.rank == 0:
                    found[name] = copy_to_cpu(get_local_tensor(value) if isinstance(value, torch.Tensor) else value)
        return found

    @contextlib.contextmanager
    def averaged_model(self) -> Iterator[nn.Module]:
        """The module, its batch statistics averaged over ranks while it lasts."""
        self._rebuild_if_stale()
        with super().averaged_model() as model:
            yield model

    def compute_fingerprint(self) -> Fingerprint:
        """A checksum of the slices, to be equal in all replicas, and one of what is not cut and lies on all ranks."""
        assert self._group is not None
        mine = self._strategy.model_shard_id(self._group.world_size, self._group.rank)
        whole = [get_local_tensor(p) for p in self._parameters if count_shards(p) == 1]
        cut = [get_local_tensor(p) for p in self._parameters if count_shards(p) > 1]
        return {part: compute_checksum(tensors) for part, tensors in (((), whole), (mine, cut)) if tensors}

    # -- another process group --------------------------------------------------------------------------------

    def set_process_group(self, group: Group) -> None:
        """Go on in a new generation of the process group, from the next use on."""
        super().set_process_group(group)
        self._has_stale_group = True

    def _rebuild_if_stale(self) -> None:
        """Move to the process group that there is now. A collective where it is a new one."""
        if not self._has_stale_group:
            return
        assert self._group is not None
        fresh = copy.deepcopy(self._meta_model)
        self._shard_model(fresh, self._group)
        rebind_optimizer(self.optimizer, transfer_shards(self._sharded_parameters, self._model, fresh))
        self._register_shards(fresh)
        self._has_stale_group = False


def build_device_meshes(group: Group, mesh: Mesh, device: torch.device) -> dict[str, DeviceMesh]:
    """Groups along each axis of several ranks by name, and along all as "": unlike any of another generation."""
    names = {axis: f"{axis}{group.generation}" for axis in mesh.axes}
    whole = group.device_mesh(Mesh({names[axis]: size for axis, size in mesh.axes.items()}), device)
    return {"": whole} | {axis: whole[name] for axis, name in names.items() if name in (whole.mesh_dim_names or ())}














def sum_global_squares(
    tensors: Sequence[torch.Tensor], num_holders: Sequence[int], device: torch.device
) -> torch.Tensor:
    """The sum of squares of each tensor's numbers, over its copies, in float64."""
    if not tensors:
        return torch.zeros(1, dtype=torch.float64, device=device)
    return gradients.sum_squares(tensors) / torch.tensor(num_holders, dtype=torch.float64, device=device)

















"""Sharded training: each rank holds a shard of parameters, gradients and optimizer state.

torch's FSDP2 does the work (Zhao et al., VLDB 2023; after ZeRO, Rajbhandari et al., SC 2020). Each rank takes its own
samples, as in data parallelism. FSDP2 gathers a block's parameters before its forward or backward pass, and frees them
afterwards. A reduce-scatter gives each rank the sum of its shard of the gradients. So a rank holds only a few whole
blocks at a time. With `replicas`, parameters are sharded among the ranks of each replica, and the shards' gradients
are summed over replicas (HSDP).

Blocks are the layers of every ``nn.Sequential`` and ``nn.ModuleList``; the rest of the model is one more block.
Parameters without a dimension can't be sharded: all ranks hold them.

Training is as exact as data parallelism. Ranks scale their losses by samples, and FSDP2 sums gradients instead of
averaging them. Gathering is a collective, so a rank without samples runs two rows whose loss doesn't count. It restores
the batch statistics afterwards.

All ranks must run the same blocks in the same order. So a model that skips blocks depending on its data can't be
sharded. A rank with an unused parameter would reduce fewer elements than its peers, which aborts a gloo process. dtkit
checks this first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dtkit._util.arguments import suggest_options
from dtkit._util.torch_private import get_fsdp_group, get_fsdp_groups, get_fsdp_state
from dtkit.engine.data.sources import to_device
from dtkit.mesh import Mesh
from dtkit.planning.cost_model import Cost, compute_ring_bytes
from dtkit.strategies.dtensor_worker import DTensorStrategy, DTensorWorker, build_device_meshes
from dtkit.strategies.frozen_writes import is_thorough_step, refuse_frozen_writes
from dtkit.strategies.options import check_choice
from dtkit.strategies.replicated import AUTOCAST_DTYPES, LossAccumulator
from dtkit.strategies.sharded_collectives import AllGather, CheckedReduceScatter
from dtkit.strategies.sharded_outputs import refuse_in_place_operations
from dtkit.strategies.written_tensors import preserve_buffers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.engine.observe.phase_timer import PhaseTimer
    from dtkit.planning.cost_model import Benchmark, ModelProfile
    from dtkit.strategies.base import EvalFunction, StepResult
    from dtkit.strategies.loss import Loss

PADDING_ROWS = 2  # rows of a batch that doesn't count; BatchNorm1d needs two
_GATHER_ALL_LIMIT = 9  # whole tensors at a time: 3 blocks (two gathered, one gradient) of 3 tensors


@suggest_options
@dataclasses.dataclass(frozen=True, repr=False)
class Sharded(DTensorStrategy):
    """Parameters, gradients and optimizer state sharded among the ranks, which gather one block at a time.

    torch's FSDP2 does the work (Zhao et al., VLDB 2023; after ZeRO, Rajbhandari et al., SC 2020).

    Parameters
    ----------
    replicas
        Copies of the model, each sharded among world size / `replicas` ranks.
    precision
        "bf16": compute and gather parameters in bfloat16. Parameters and optimizer keep their type, and gradients are
        summed in float32. (fp16 would need a scaled loss, which isn't supported here.)
    clip_grad_norm
        Largest norm of the whole gradient; a larger gradient is scaled down to it.
    accumulate
        Number of micro-batches of a rank's samples in a step; more of them need less memory. `batch_size` is still the
        number of samples per update.

    """

    replicas: int = 1
    precision: str | None = None
    clip_grad_norm: float | None = None
    accumulate: int = 1

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_choice("precision", self.precision, ("bf16",))

    @property
    def unused_parameter_error(self) -> str:
        """Return why a parameter needs a gradient in each step."""
        return _UNUSED_PARAMETER_ERROR

    def build_mesh(self, world_size: int) -> Mesh:
        """Return a mesh in which every rank takes its own samples."""
        self.build_shard_mesh(world_size)
        return Mesh({"dp": world_size})

    def build_shard_mesh(self, world_size: int) -> Mesh:
        """Return the mesh for the shards; raise ValueError if `replicas` doesn't divide the world size."""
        if self.replicas == 1:
            return Mesh({"shard": world_size})
        shards = max(1, world_size // self.replicas)
        return Mesh({"replica": self.replicas, "shard": shards}).check(world_size, replica="replicas", shard="shards")

    def model_shard_id(self, world_size: int, rank: int) -> tuple[int, ...]:
        """Return the index of the rank's shard."""
        return (self.build_shard_mesh(world_size).get_coordinates(rank)["shard"],)

    def check_model(self, model: nn.Module) -> None:
        """Raise ValueError for a model that FSDP2 can't shard."""
        check_shardable(model)

    def equivalence_notes(self) -> tuple[str, ...]:
        """Return a note on rounding that doesn't occur in one process."""
        return (_PRECISION_NOTE.format(precision=self.precision),) if self.precision else ()

    def estimate_cost(self, profile: ModelProfile, benchmark: Benchmark) -> Cost:
        """Return the cost of the shards and of the gathered blocks.

        The blocks are unknown here, so this counts 3 at a time, with 3 tensors of the largest size. Ranks send
        parameters twice and gradients once. gloo's reduce-scatter is an all-reduce of twice the bytes; ranks of one
        host use its memory instead, if all of them share one copy.
        """
        world = benchmark.world_size
        shards = max(1, world // self.replicas)
        largest = _compute_largest_tensor_bytes(profile)
        gathered = min(profile.parameters + profile.gradients, round(_GATHER_ALL_LIMIT * largest)) if shards > 1 else 0
        moved = compute_ring_bytes(profile.gradients, shards) / 2
        is_direct = benchmark.sums_directly and shards == world
        reduced = moved if "nccl" in benchmark.backend or is_direct else 2 * moved
        sum_s = (benchmark.estimate_sum_s if is_direct else benchmark.estimate_all_reduce_s)(profile.gradients)
        sent = 2 * moved + reduced + compute_ring_bytes(profile.gradients / shards, self.replicas)
        whole = compute_ring_bytes(profile.gradients, world)
        return dataclasses.replace(
            Cost.for_replica(
                profile,
                micro_batches=self.accumulate,
                gradients=-(-profile.gradients // shards),
                optimizer_state=-(-profile.optimizer_state // shards),
                temporaries=-(-profile.update_temporaries // shards),
                sent_bytes=sent * self.accumulate,
                exposed_s=sum_s * (sent / whole if whole else 0) * self.accumulate,
            ),
            parameters=-(-profile.parameters // shards),
            activations=round(profile.activations.predict(profile.rows / self.accumulate)) + gathered,
        )

    def _make_worker(
        self, model: nn.Module, loss_fn: Loss, optimizer: Callable[..., Any], context: WorkerContext
    ) -> DTensorWorker:
        check_shardable(model)
        return _FSDPWorker(self, model, loss_fn, optimizer, context)


_PRECISION_NOTE = (
    "precision={precision!r} lets FSDP compute in bfloat16, which one process does in float32: it shards nothing. "
    "Verify the same training without precision="
)


def _compute_largest_tensor_bytes(profile: ModelProfile) -> float:
    """Return the bytes of the largest trainable parameter."""
    sizes = [math.prod(shape) for shape in profile.gradient_shapes]
    return profile.gradients * max(sizes) / sum(sizes) if sum(sizes) else 0.0


class _FSDPWorker(DTensorWorker):
    """One rank's shards, under FSDP2."""

    _strategy: Sharded
    _num_steps = 0

    def __init__(
        self,
        strategy: Sharded,
        model: nn.Module,
        loss_fn: Loss,
        optimizer: Callable[..., Any],
        context: WorkerContext,
    ) -> None:
        super().__init__(strategy, model, loss_fn, optimizer, context)
        self._frozen_parameters = []  # ranks hold different shards of them, and no forward can write to them
        self._share_router_losses()

    def _shard_model(self, model: nn.Module, group: Group) -> None:
        mesh = self._strategy.build_shard_mesh(group.world_size)
        dtype = AUTOCAST_DTYPES.get(self._strategy.precision or "")
        reduced = None if dtype is None else torch.float32
        # On CUDA, collectives run in separate streams next to the computation, so they aren't a phase of it.
        phases = self._context.phases if self._context.device.type == "cpu" else None
        options: dict[str, Any] = {"mesh": build_device_meshes(group, mesh, self._context.device)[""]}
        if scalars := {p for p in model.parameters() if not p.dim()}:
            options["ignored_params"] = scalars
        for name, block in find_blocks(model):
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced)
            shard_module(block, name, mesh.axes["shard"], group, phases, mp_policy=policy, **options)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, output_dtype=reduced)
        shard_module(model, "the rest of the model", mesh.axes["shard"], group, phases, mp_policy=policy, **options)

    def set_process_group(self, group: Group) -> None:
        """Continue in a new generation of the process group from the next use on, and release the old one."""
        super().set_process_group(group)
        self._share_router_losses()
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                _drop_process_groups(module)

    def _run_step(self, batches: Sequence[tuple[int, Any]], counts: Sequence[int]) -> StepResult:
        """Run forward and backward with all-gathers and reduce-scatters, and update this rank's shards."""
        self._zero_grad()
        loss_accumulator = LossAccumulator(sum(counts))
        thorough, self._num_steps = is_thorough_step(self._num_steps), self._num_steps + 1
        with self._share_written_tensors(counts), refuse_frozen_writes(self._model, thorough=thorough):
            for k in range(min(self._strategy.accumulate, max(counts))):
                if k < len(batches):
                    self._run_micro_batch(loss_accumulator, *batches[k])
                else:
                    self._run_padding_batch()
        self._check_all_parameters_used()
        total = self._start_weight_reduce(loss_accumulator)
        self._all_reduce_unsharded()
        self._divide_by_weight(total)
        finite, norm = self._clip_and_update()
        return self._make_step_result(loss_accumulator, counts, finite=finite, norm=norm)

    def _run_micro_batch(self, loss_accumulator: LossAccumulator, count: int, batch: Any) -> None:
        self._phases.enter("forward")
        loss = loss_accumulator.add(*self._compute_loss(self._model, batch), count)
        self._phases.enter("backward")
        loss.backward()  # type: ignore[no-untyped-call]

    def _run_padding_batch(self) -> None:
        """Take part in the collectives without a sample."""
        batch = self._make_padding_batch()
        ignored = contextlib.nullcontext() if self._router_losses is None else self._router_losses.ignore_tokens()
        with preserve_buffers(self._model), ignored:
            self._phases.enter("forward")
            loss, _ = self._compute_loss(self._model, batch)
            self._phases.enter("backward")
            (loss * 0).backward()  # type: ignore[no-untyped-call]

    def _make_padding_batch(self) -> Any:
        """Return a batch whose loss doesn't count."""
        assert self._context.make_sample_batch is not None
        return to_device(self._context.make_sample_batch(PADDING_ROWS), self._context.device)

    def _all_reduce_unsharded(self) -> None:
        """Sum the gradients of parameters that are not sharded."""
        whole = [p.grad for p in self._parameters if p.grad is not None and not isinstance(p, DTensor)]
        if not whole or self._group is None:
            return
        self._phases.enter("sync")
        for gradient in whole:
            self._group.all_reduce(gradient)

    def _check_all_parameters_used(self) -> None:
        names = [name for name, p in self._sharded_parameters.items() if p.requires_grad and p.grad is None]
        if names:
            raise ValueError(f"{', '.join(names)} got no gradient: {_UNUSED_PARAMETER_ERROR}")

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[EvalFunction]:
        """Evaluate the model, gathered block by block: all ranks call the function equally often."""
        with super().eval_mode() as forward:
            yield forward
        if isinstance(self._model, FSDPModule):
            self._model.reshard()  # the outermost block stays gathered until backward


_UNUSED_PARAMETER_ERROR = (
    "the model did not use it in this step on this rank, and ranks sum their gradients block by block. Sharded "
    "training needs a model that uses all parameters in every step. Call requires_grad_(False) on parameters that are "
    "never used"
)


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules to gather one at a time, by name: layers of sequences that share no parameters."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners[id(p)] = owners.get(id(p), 0) + 1
    return [(name, m) for name, m in _find_layers(model, "") if all(owners[id(p)] == 1 for p in m.parameters())]


def _find_layers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        in_sequence = isinstance(module, (nn.Sequential, nn.ModuleList))
        if in_sequence and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            if any(p.dim() for p in child.parameters()):
                yield prefix + name, child
        else:
            yield from _find_layers(child, f"{prefix}{name}.")


def shard_module(
    module: nn.Module, name: str, shards: int, group: Group, phases: PhaseTimer | None, **options: Any
) -> None:
    """Shard a module's parameters that aren't sharded yet, with gradients summed and checked for completeness.

    With `phases`, marks its collectives among ranks of `group` during forward and backward.
    """
    trainable = [p for p in module.parameters() if p.requires_grad and p.dim() and not isinstance(p, DTensor)]
    dtypes = {p.dtype for p in trainable}
    if len(dtypes) > 1:
        raise ValueError(
            f"{name} has parameters of {' and '.join(sorted(map(str, dtypes)))}, and FSDP reduces a block's gradients "
            "in one dtype. Use one dtype, or put the parameters into different blocks of an nn.Sequential"
        )
    refuse_in_place_operations(module)
    sharded = fully_shard(module, **options)
    assert isinstance(sharded, FSDPModule)
    set_divisor = getattr(sharded, "set_gradient_divide_factor", None) or sharded.set_reduce_scatter_divide_factor
    set_divisor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)  # gloo can't divide sums
    expected = sum(math.prod(p.shape[1:]) * -(-p.shape[0] // shards) * shards for p in trainable)
    unused = f"a parameter of {name} got no gradient: {_UNUSED_PARAMETER_ERROR}"
    reduce_scatter = CheckedReduceScatter(group, phases, expected, unused)
    sharded.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]  # the base class is private
    if phases is not None:
        sharded.set_custom_all_gather(AllGather(group, phases))  # type: ignore[arg-type]  # as above
        sharded.set_all_reduce_hook(lambda _: phases.end_collective())  # also called without replicas


def _drop_process_groups(module: FSDPModule) -> None:
    """Remove the process groups from an unused module: they would keep their threads alive."""
    state = get_fsdp_state(module)
    parts = [get_fsdp_group(state)] if get_fsdp_groups is None else get_fsdp_groups(state)
    for part in filter(None, parts):
        for name, value in list(vars(part.mesh_info).items()):
            if isinstance(value, dist.ProcessGroup):
                setattr(part.mesh_info, name, None)


def check_shardable(model: nn.Module) -> None:
    """Raise ValueError for a model that FSDP2 can't shard."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(
                f"{name or 'the model'} makes sparse gradients, which can't be reduced to shards. Use "
                f"{type(module).__name__}(..., sparse=False)"
            )

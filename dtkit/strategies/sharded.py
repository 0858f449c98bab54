"""Sharded training: parameters, gradients and optimiser state cut into parts, one on each rank.

torch's FSDP2 does the work (Zhao et al., VLDB 2023; after ZeRO, Rajbhandari et al., SC 2020). Ranks take samples of
their own, as in data parallelism. A block's parameters are gathered when its forward or backward begins and given
back when it ends; of its gradients each rank keeps the sum of its own part, by a reduce-scatter. So a rank never
holds more than some blocks in full. With `replicas` the model is cut among the ranks of each replica only, and the
parts' gradients are summed over replicas (HSDP).

Blocks are the layers of every ``nn.Sequential`` and ``nn.ModuleList``; what lies outside of them is one block more.
Numbers alone (parameters without a dimension) can't be cut: they lie on all ranks.

Exactness is that of data parallelism: FSDP2 would average gradients and is told to add them up, ranks scale their
losses by samples before. Gathering is collective, so a rank without a sample takes part with two rows of the data
whose loss counts for nothing, and whose trace in batch statistics is removed.

Every rank must run the same blocks in the same order in each step: a model that skips some by what its data is can't
be sharded. A parameter that a rank's loss did not use would make that rank reduce fewer numbers than its peers, which
ends a gloo process for good; so that is looked for before.
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

from dtkit.engine.data.sources import to_device
from dtkit.mesh import Mesh
from dtkit.planning.cost_model import Cost, compute_ring_bytes
from dtkit.strategies.dtensor_worker import DTensorStrategy, DTensorWorker, build_device_meshes
from dtkit.strategies.options import check_choice
from dtkit.strategies.replicated import AUTOCAST_DTYPES, LossAccumulator
from dtkit.strategies.tensor.collective_marks import rank_span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.observe.phase_timer import PhaseTimer
    from dtkit.planning.cost_model import Benchmark, ModelProfile
    from dtkit.strategies.base import EvalFunction, StepResult, WorkerContext
    from dtkit.strategies.loss import Loss

PADDING_ROWS = 2  # rows of a batch that counts for nothing: a BatchNorm1d can't normalise one
_GATHER_ALL_LIMIT = 9  # largest tensors that are there in full: 3 blocks (two gathered, one's gradient) of 3 each


@dataclasses.dataclass(frozen=True, repr=False)
class Sharded(DTensorStrategy):
    """Parameters, gradients and optimiser state are cut among the ranks; a block at a time is put together to compute.

    Parameters
    ----------
    replicas
        Copies of the model, each cut among world size / `replicas` ranks. 1: cut among all.
    precision
        "bf16": compute in it, and gather parameters in it; they and the optimiser stay as they are, and gradients are
        summed in float32. (fp16 needs a scaled loss, which sharded gradients have no room for.)
    clip_grad_norm
        Largest norm of the whole gradient; larger ones are scaled down to it.
    accumulate
        Micro-batches that a rank's samples of a step come in, for less memory; `batch_size` stays samples per update.

    """

    replicas: int = 1
    precision: str | None = None
    clip_grad_norm: float | None = None
    accumulate: int = 1

    def __post_init__(self) -> None:
        """Refuse what is no option."""
        super().__post_init__()
        check_choice("precision", self.precision, ("bf16",))

    def build_mesh(self, world_size: int) -> Mesh:
        """Every rank takes samples of its own."""
        self.build_shard_mesh(world_size)
        return Mesh({"dp": world_size})

    def build_shard_mesh(self, world_size: int) -> Mesh:
        """Among whom parameters are cut; ValueError where `replicas` does not divide the world size."""
        if self.replicas == 1:
            return Mesh({"shard": world_size})
        shards = max(1, world_size // self.replicas)
        return Mesh({"replica": self.replicas, "shard": shards}).check(world_size, replica="replicas", shard="shards")

    def model_shard_id(self, world_size: int, rank: int) -> tuple[int, ...]:
        """Its shard."""
        return (self.build_shard_mesh(world_size).get_coordinates(rank)["shard"],)

    def check_model(self, model: nn.Module) -> None:
        """Raise ValueError for what FSDP2 can't shard."""
        check_shardable(model)

    def equivalence_notes(self) -> tuple[str, ...]:
        """Rounding that one process does not do."""
        return (f"precision={self.precision!r} rounds sums over other samples on each rank",) if self.precision else ()

    def estimate_cost(self, profile: ModelProfile, benchmark: Benchmark) -> Cost:
        """Everything cut among the shards, and what is put together for the blocks at work.

        Which blocks there are is not known here: counted are 3 at a time, of 3 tensors as large as the largest. Sent
        are parameters twice and gradients once; gloo's reduce-scatter is an all-reduce, and takes twice the bytes.
        """
        world = benchmark.world_size
        shards = max(1, world // self.replicas)
        largest = _compute_largest_tensor_bytes(profile)
        gathered = min(profile.parameters + profile.gradients, round(_GATHER_ALL_LIMIT * largest)) if shards > 1 else 0
        moved = compute_ring_bytes(profile.gradients, shards) / 2
        reduced = moved if "nccl" in benchmark.backend else 2 * moved
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
                exposed_s=benchmark.estimate_all_reduce_s(profile.gradients)
                * (sent / whole if whole else 0)
                * self.accumulate,
            ),
            parameters=-(-profile.parameters // shards),
            activations=round(profile.activations.predict(profile.rows / self.accumulate)) + gathered,
        )

    def _make_worker(
        self, model: nn.Module, loss_fn: Loss, optimizer: Callable[..., Any], context: WorkerContext
    ) -> DTensorWorker:
        check_shardable(model)
        return _FSDPWorker(self, model, loss_fn, optimizer, context)


def _compute_largest_tensor_bytes(profile: ModelProfile) -> float:
    """Bytes of the largest tensor that is trained."""
    numbers = [math.prod(shape) for shape in profile.gradient_shapes]
    return profile.gradients * max(numbers) / sum(numbers) if sum(numbers) else 0.0


class _FSDPWorker(DTensorWorker):
    """One rank's shards, under FSDP2."""

    _strategy: Sharded

    def __init__(
        self,
        strategy: Sharded,
        model: nn.Module,
        loss_fn: Loss,
        optimizer: Callable[..., Any],
        context: WorkerContext,
    ) -> None:
        self._last_batch: Any = None
        super().__init__(strategy, model, loss_fn, optimizer, context)

    def _shard_model(self, model: nn.Module, group: Group) -> None:
        mesh = self._strategy.build_shard_mesh(group.world_size)
        dtype = AUTOCAST_DTYPES.get(self._strategy.precision or "")
        reduced = None if dtype is None else torch.float32
        # On CUDA collectives run in streams of their own, beside the computing, and are no phase of it.
        phases = self._context.phases if self._context.device.type == "cpu" else None
        options: dict[str, Any] = {"mesh": build_device_meshes(group, mesh, self._context.device)[""]}
        if numbers := {p for p in model.parameters() if not p.dim()}:
            options["ignored_params"] = numbers
        for name, block in find_blocks(model):
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced)
            shard_module(block, name, mesh.axes["shard"], phases, mp_policy=policy, **options)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, output_dtype=reduced)
        shard_module(model, "what lies outside of blocks", mesh.axes["shard"], phases, mp_policy=policy, **options)

    def set_process_group(self, group: Group) -> None:
        """Go on in a new generation of the process group, from the next use on; hold the old one no longer."""
        super().set_process_group(group)
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                _drop_process_groups(module)

    @property
    def _replica_index(self) -> int:
        assert self._group is not None
        mesh = self._strategy.build_shard_mesh(self._group.world_size)
        return mesh.get_coordinates(self._group.rank).get("replica", 0)

    def _run_step(self, batches: Sequence[tuple[int, Any]], counts: Sequence[int]) -> StepResult:
        """Forward and backward with gathering and reduce-scatter, and each rank's update of its own part."""
        self._zero_grad()
        tally = LossAccumulator(sum(counts))
        for k in range(min(self._strategy.accumulate, max(counts))):
            if k < len(batches):
                self._run_micro_batch(tally, *batches[k])
            else:
                self._run_padding_batch()
        self._check_all_parameters_used()
        total = self._start_weight_reduce(tally)
        self._all_reduce_unsharded()
        self._divide_by_weight(total)
        finite, norm = self._clip_and_update()
        return self._make_step_result(tally, counts, finite=finite, norm=norm)

    def _run_micro_batch(self, loss_accumulator: LossAccumulator, count: int, batch: Any) -> None:
        if self._context.make_sample_batch is None:
            self._last_batch = batch
        self._phases.enter("forward")
        loss = loss_accumulator.add(*self._compute_loss(self._model, batch), count)
        self._phases.enter("backward")
        loss.backward()  # type: ignore[no-untyped-call]

    def _run_padding_batch(self) -> None:
        """Gather and reduce with the others, without a sample."""
        batch = self._make_padding_batch()
        buffers = [(b, b.clone()) for b in self._model.buffers()]
        self._phases.enter("forward")
        loss, _ = self._compute_loss(self._model, batch)
        self._phases.enter("backward")
        (loss * 0).backward()  # type: ignore[no-untyped-call]
        for buffer, before in buffers:
            buffer.copy_(before)

    def _make_padding_batch(self) -> Any:
        """A batch whose loss is not to count; of a stream, the last one that this rank had."""
        if self._context.make_sample_batch is not None:
            return to_device(self._context.make_sample_batch(PADDING_ROWS), self._context.device)
        if self._last_batch is None:
            raise ValueError(
                "this rank has no sample in its first step, and sharded training needs some batch from every rank to "
                "put the model together. Give every rank at least one sample at first"
            )
        return self._last_batch

    def _all_reduce_unsharded(self) -> None:
        """Sum the gradients of parameters that are not cut."""
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
        """Of the model put together block by block: all ranks call it equally often."""
        with super().eval_mode() as forward:
            yield forward
        if isinstance(self._model, FSDPModule):
            self._model.reshard()  # the outermost block stays whole after a forward pass, waiting for backward


_UNUSED_PARAMETER_ERROR = (
    "the model did not use it in this step on this rank, and ranks add up their gradients block by block. Sharded "
    "training needs a model that uses all of its parameters in every step; freeze what is never used by "
    "requires_grad_(False)"
)


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules to be gathered one at a time, by name: the layers of sequences, save what shares its parameters."""
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


def shard_module(module: nn.Module, name: str, shards: int, phases: PhaseTimer | None, **options: Any) -> None:
    """Shard the parameters of a module that are whole yet; gradients are summed, and never of some of them only.

    With `phases`, the collectives are marked in the midst of forward and backward.
    """
    own = [p for p in module.parameters() if p.requires_grad and p.dim() and not isinstance(p, DTensor)]
    dtypes = {p.dtype for p in own}
    if len(dtypes) > 1:
        raise ValueError(
            f"{name} has parameters of {' and '.join(sorted(map(str, dtypes)))}, and FSDP reduces a block's gradients "
            "in one dtype. Give them one dtype, or put them into different blocks of an nn.Sequential"
        )
    made = fully_shard(module, **options)
    assert isinstance(made, FSDPModule)
    divide = getattr(made, "set_gradient_divide_factor", None) or made.set_reduce_scatter_divide_factor  # its old name
    divide(1.0)
    made.set_force_sum_reduction_for_comms(True)  # gloo has no sum that divides
    expected = sum(math.prod(p.shape[1:]) * -(-p.shape[0] // shards) * shards for p in own)
    made.set_custom_reduce_scatter(_CheckedReduceScatter(phases, name, expected))  # type: ignore[arg-type]  # the base class is private
    if phases is not None:
        made.set_custom_all_gather(_AllGather(phases))  # type: ignore[arg-type]  # as above
        made.set_all_reduce_hook(lambda _: phases.end_collective())  # also where replicas have nothing to sum


def _drop_process_groups(module: FSDPModule) -> None:
    """Have FSDP hold no process group for a module that will not be used again: its threads would stay till then."""
    state = module._get_fsdp_state()  # noqa: SLF001 - torch has no public way
    parts = getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group])  # noqa: SLF001 - its old name
    for part in parts:
        for name, value in list(vars(part.mesh_info).items()):
            if isinstance(value, dist.ProcessGroup):
                setattr(part.mesh_info, name, None)


class _TimedCollective:
    """One of torch's, of which the phases know."""

    def __init__(self, phases: PhaseTimer | None) -> None:
        self._phases = phases

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for it."""
        return torch.empty(size, dtype=dtype, device=device)

    def _mark_blocked(self, group: dist.ProcessGroup) -> None:
        if self._phases is not None:
            self._phases.begin_collective(rank_span(group))


class _AllGather(_TimedCollective):
    """Puts a block's parameters together."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Any:
        """Gather."""
        self._mark_blocked(group)
        work = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        if self._phases is not None:
            self._phases.end_collective()
        return work


class _CheckedReduceScatter(_TimedCollective):
    """After a look whether all parameters of the block have a gradient: peers expect them."""

    def __init__(self, phases: PhaseTimer | None, name: str, expected_numel: int) -> None:
        super().__init__(phases)
        self._name, self._expected_numel = name, expected_numel

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Any:
        """Reduce, or raise ValueError. The sum over replicas follows, and then the hook that ends the mark."""
        if input_tensor.numel() != self._expected_numel:
            raise ValueError(f"a parameter of {self._name} got no gradient: {_UNUSED_PARAMETER_ERROR}")
        self._mark_blocked(group)
        return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


# torch 2.13 renamed them, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def check_shardable(model: nn.Module) -> None:
    """Refuse what FSDP2 can't shard."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(
                f"{name or 'the model'} makes sparse gradients, which can't be reduced to shards. Use "
                f"{type(module).__name__}(..., sparse=False)"
            )

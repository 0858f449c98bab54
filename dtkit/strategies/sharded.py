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
from dtkit.planning.cost_model import Cost, ring_bytes
from dtkit.strategies.dtensor_worker import Sliced, Slicing, grid
from dtkit.strategies.options import check_choice
from dtkit.strategies.replicated import PRECISIONS, Tally
from dtkit.strategies.tensor.collective_marks import among

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.observe.phase_timer import Phases
    from dtkit.planning.cost_model import Benchmark, Facts
    from dtkit.strategies.base import Forward, Outcome, Setting
    from dtkit.strategies.loss import Objective

FILLER = 2  # rows of a batch that counts for nothing: a BatchNorm1d can't normalise one
_WHOLE_AT_ONCE = 9  # largest tensors that are there in full: 3 blocks (two gathered, one's gradient) of 3 each


@dataclasses.dataclass(frozen=True, repr=False)
class Sharded(Slicing):
    """Parameters, gradients and optimiser state are cut among the ranks; a block at a time is put together to compute.

    Parameters
    ----------
    replicas
        Copies of the model, each cut among world size / `replicas` ranks. 1: cut among all.
    precision
        "bf16": compute in it, and gather parameters in it; they and the optimiser stay as they are, and gradients are
        summed in float32. (fp16 needs a scaled loss, which sharded gradients have no room for.)
    clip_norm
        Largest norm of the whole gradient; larger ones are scaled down to it.
    accumulate
        Micro-batches that a rank's samples of a step come in, for less memory; `batch_size` stays samples per update.

    """

    replicas: int = 1
    precision: str | None = None
    clip_norm: float | None = None
    accumulate: int = 1

    def __post_init__(self) -> None:
        """Refuse what is no option."""
        super().__post_init__()
        check_choice("precision", self.precision, ("bf16",))

    def mesh(self, world_size: int) -> Mesh:
        """Every rank takes samples of its own."""
        self.cut(world_size)
        return Mesh({"dp": world_size})

    def cut(self, world_size: int) -> Mesh:
        """Among whom parameters are cut; ValueError where `replicas` does not divide the world size."""
        if self.replicas == 1:
            return Mesh({"shard": world_size})
        shards = max(1, world_size // self.replicas)
        return Mesh({"replica": self.replicas, "shard": shards}).check(world_size, replica="replicas", shard="shards")

    def part_of(self, world_size: int, rank: int) -> tuple[int, ...]:
        """Its shard."""
        return (self.cut(world_size).coordinates(rank)["shard"],)

    def check_model(self, model: nn.Module) -> None:
        """Raise ValueError for what FSDP2 can't shard."""
        check_model(model)

    def caveats(self) -> tuple[str, ...]:
        """Rounding that one process does not do."""
        return (f"precision={self.precision!r} rounds sums over other samples on each rank",) if self.precision else ()

    def cost(self, facts: Facts, benchmark: Benchmark) -> Cost:
        """Everything cut among the shards, and what is put together for the blocks at work.

        Which blocks there are is not known here: counted are 3 at a time, of 3 tensors as large as the largest. Sent
        are parameters twice and gradients once; gloo's reduce-scatter is an all-reduce, and takes twice the bytes.
        """
        world = benchmark.world_size
        shards = max(1, world // self.replicas)
        largest = _largest(facts)
        gathered = min(facts.parameters + facts.gradients, round(_WHOLE_AT_ONCE * largest)) if shards > 1 else 0
        moved = ring_bytes(facts.gradients, shards) / 2
        reduced = moved if "nccl" in benchmark.backend else 2 * moved
        sent = 2 * moved + reduced + ring_bytes(facts.gradients / shards, self.replicas)
        whole = ring_bytes(facts.gradients, world)
        return dataclasses.replace(
            Cost.of_replica(
                facts,
                micro_batches=self.accumulate,
                gradients=-(-facts.gradients // shards),
                state=-(-facts.state // shards),
                temporaries=-(-facts.update // shards),
                sent_bytes=sent * self.accumulate,
                exposed_s=benchmark.all_reduce_s(facts.gradients) * (sent / whole if whole else 0) * self.accumulate,
            ),
            parameters=-(-facts.parameters // shards),
            activations=round(facts.activations.at(facts.rows / self.accumulate)) + gathered,
        )

    def _worker(
        self, model: nn.Module, objective: Objective, optimizer: Callable[..., Any], setting: Setting
    ) -> Sliced:
        check_model(model)
        return _Shards(self, model, objective, optimizer, setting)


def _largest(facts: Facts) -> float:
    """Bytes of the largest tensor that is trained."""
    numbers = [math.prod(shape) for shape in facts.shapes]
    return facts.gradients * max(numbers) / sum(numbers) if sum(numbers) else 0.0


class _Shards(Sliced):
    """One rank's shards, under FSDP2."""

    _strategy: Sharded

    def __init__(
        self,
        strategy: Sharded,
        model: nn.Module,
        objective: Objective,
        optimizer: Callable[..., Any],
        setting: Setting,
    ) -> None:
        self._spare: Any = None
        super().__init__(strategy, model, objective, optimizer, setting)

    def _cut(self, model: nn.Module, group: Group) -> None:
        mesh = self._strategy.cut(group.world_size)
        dtype = PRECISIONS.get(self._strategy.precision or "")
        reduced = None if dtype is None else torch.float32
        # On CUDA collectives run in streams of their own, beside the computing, and are no phase of it.
        phases = self._setting.phases if self._setting.device.type == "cpu" else None
        options: dict[str, Any] = {"mesh": grid(group, mesh, self._setting.device)[""]}
        if numbers := {p for p in model.parameters() if not p.dim()}:
            options["ignored_params"] = numbers
        for name, block in blocks(model):
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced)
            shard(block, name, mesh.axes["shard"], phases, mp_policy=policy, **options)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, output_dtype=reduced)
        shard(model, "what lies outside of blocks", mesh.axes["shard"], phases, mp_policy=policy, **options)

    def regroup(self, group: Group) -> None:
        """Go on in a new generation of the process group, from the next use on; hold the old one no longer."""
        super().regroup(group)
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                _let_go(module)

    @property
    def _replica(self) -> int:
        assert self._group is not None
        mesh = self._strategy.cut(self._group.world_size)
        return mesh.coordinates(self._group.rank).get("replica", 0)

    def _step(self, batches: Sequence[tuple[int, Any]], counts: Sequence[int]) -> Outcome:
        """Forward and backward with gathering and reduce-scatter, and each rank's update of its own part."""
        self._clear()
        tally = Tally(sum(counts))
        for k in range(min(self._strategy.accumulate, max(counts))):
            if k < len(batches):
                self._differentiate(tally, *batches[k])
            else:
                self._take_part()
        self._check_used()
        total = self._announce(tally)
        self._sum_numbers()
        self._divide(total)
        finite, norm = self._update()
        return self._outcome(tally, counts, finite=finite, norm=norm)

    def _differentiate(self, tally: Tally, count: int, batch: Any) -> None:
        if self._setting.sample is None:
            self._spare = batch
        self._phases.enter("forward")
        loss = tally.add(*self._loss(self._model, batch), count)
        self._phases.enter("backward")
        loss.backward()  # type: ignore[no-untyped-call]

    def _take_part(self) -> None:
        """Gather and reduce with the others, without a sample."""
        batch = self._filler()
        buffers = [(b, b.clone()) for b in self._model.buffers()]
        self._phases.enter("forward")
        loss, _ = self._loss(self._model, batch)
        self._phases.enter("backward")
        (loss * 0).backward()  # type: ignore[no-untyped-call]
        for buffer, before in buffers:
            buffer.copy_(before)

    def _filler(self) -> Any:
        """A batch whose loss is not to count; of a stream, the last one that this rank had."""
        if self._setting.sample is not None:
            return to_device(self._setting.sample(FILLER), self._setting.device)
        if self._spare is None:
            raise ValueError(
                "this rank has no sample in its first step, and sharded training needs some batch from every rank to "
                "put the model together. Give every rank at least one sample at first"
            )
        return self._spare

    def _sum_numbers(self) -> None:
        """Sum the gradients of parameters that are not cut."""
        whole = [p.grad for p in self._parameters if p.grad is not None and not isinstance(p, DTensor)]
        if not whole or self._group is None:
            return
        self._phases.enter("sync")
        for gradient in whole:
            self._group.all_reduce(gradient)

    def _check_used(self) -> None:
        names = [name for name, p in self._slices.items() if p.requires_grad and p.grad is None]
        if names:
            raise ValueError(f"{', '.join(names)} got no gradient: {_ALL_USED}")

    @contextlib.contextmanager
    def forwards(self) -> Iterator[Forward]:
        """Of the model put together block by block: all ranks call it equally often."""
        with super().forwards() as forward:
            yield forward
        if isinstance(self._model, FSDPModule):
            self._model.reshard()  # the outermost block stays whole after a forward pass, waiting for backward


_ALL_USED = (
    "the model did not use it in this step on this rank, and ranks add up their gradients block by block. Sharded "
    "training needs a model that uses all of its parameters in every step; freeze what is never used by "
    "requires_grad_(False)"
)


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules to be gathered one at a time, by name: the layers of sequences, save what shares its parameters."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners[id(p)] = owners.get(id(p), 0) + 1
    return [(name, m) for name, m in _layers(model, "") if all(owners[id(p)] == 1 for p in m.parameters())]


def _layers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        in_sequence = isinstance(module, (nn.Sequential, nn.ModuleList))
        if in_sequence and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            if any(p.dim() for p in child.parameters()):
                yield prefix + name, child
        else:
            yield from _layers(child, f"{prefix}{name}.")


def shard(module: nn.Module, name: str, shards: int, phases: Phases | None, **options: Any) -> None:
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
        made.set_all_reduce_hook(lambda _: phases.unblock())  # also where replicas have nothing to sum


def _let_go(module: FSDPModule) -> None:
    """Have FSDP hold no process group for a module that will not be used again: its threads would stay till then."""
    state = module._get_fsdp_state()  # noqa: SLF001 - torch has no public way
    parts = getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group])  # noqa: SLF001 - its old name
    for part in parts:
        for name, value in list(vars(part.mesh_info).items()):
            if isinstance(value, dist.ProcessGroup):
                setattr(part.mesh_info, name, None)


class _Collective:
    """One of torch's, of which the phases know."""

    def __init__(self, phases: Phases | None) -> None:
        self._phases = phases

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for it."""
        return torch.empty(size, dtype=dtype, device=device)

    def _begin(self, group: dist.ProcessGroup) -> None:
        if self._phases is not None:
            self._phases.block(among(group))


class _AllGather(_Collective):
    """Puts a block's parameters together."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Any:
        """Gather."""
        self._begin(group)
        work = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        if self._phases is not None:
            self._phases.unblock()
        return work


class _CheckedReduceScatter(_Collective):
    """After a look whether all parameters of the block have a gradient: peers expect them."""

    def __init__(self, phases: Phases | None, name: str, expected: int) -> None:
        super().__init__(phases)
        self._name, self._expected = name, expected

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> Any:
        """Reduce, or raise ValueError. The sum over replicas follows, and then the hook that ends the mark."""
        if input_tensor.numel() != self._expected:
            raise ValueError(f"a parameter of {self._name} got no gradient: {_ALL_USED}")
        self._begin(group)
        return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


# torch 2.13 renamed them, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def check_model(model: nn.Module) -> None:
    """Refuse what FSDP2 can't shard."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(
                f"{name or 'the model'} makes sparse gradients, which can't be reduced to shards. Use "
                f"{type(module).__name__}(..., sparse=False)"
            )

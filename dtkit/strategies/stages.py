"""The seam to torch's pipelining: which schedules there are, a model made into stages, and stages run by a schedule.

A chain in an ``nn.Sequential`` is cut into slices. Any other model is traced by torch's exporter and cut where a block
begins; the parts keep the names of their parameters. A trace is of training or of evaluation, never of both, so where
that makes a difference (dropout, batch normalisation) the model is traced twice, over the same parameters.

Private names of torch are used here and nowhere else: a schedule is handed micro-batches that are cut already.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from dtkit.strategies.splitting import chain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch.distributed as dist

    from dtkit.engine.phases import Phases
    from dtkit.strategies.splitting import Cut

logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # it logs whole schedules at an error


@dataclasses.dataclass(frozen=True)
class Kind:
    """A schedule of torch's: its class, how many parts of the model a rank has, and where they lie."""

    make: type[Any]
    per_rank: int = 1
    v_shaped: bool = False
    """Whether the parts of rank r are r and the r-th from the end, in place of r and r + ranks."""

    def places(self, rank: int, ranks: int) -> list[int]:
        """Which parts of the model a rank has."""
        if self.v_shaped:
            return [rank, self.per_rank * ranks - 1 - rank]
        return [rank + k * ranks for k in range(self.per_rank)]

    def rank_of(self, part: int, ranks: int) -> int:
        """Which rank has a part."""
        return next(rank for rank in range(ranks) if part in self.places(rank, ranks))


SCHEDULES = {
    "GPipe": Kind(pipelining.ScheduleGPipe),
    "1F1B": Kind(pipelining.Schedule1F1B),
    "Interleaved1F1B": Kind(pipelining.ScheduleInterleaved1F1B, 2),
    "InterleavedZeroBubble": Kind(pipelining.ScheduleInterleavedZeroBubble, 2),
    "LoopedBFS": Kind(pipelining.ScheduleLoopedBFS, 2),
    "ZBVZeroBubble": Kind(pipelining.ScheduleZBVZeroBubble, 2, v_shaped=True),
}


# -- a model in parts ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Part:
    """A contiguous part of a model. `forecast` is the module to evaluate with, over the same parameters."""

    module: nn.Module
    forecast: nn.Module


def parts_of(model: nn.Module, cut: Cut, inputs: Sequence[Any]) -> list[Part]:
    """All parts of a model, over its own parameters."""
    if isinstance(model, nn.Sequential):
        layers = chain(model)
        slices = [nn.Sequential(OrderedDict(layers[k] for k in stage)) for stage in cut.stages]
        return [Part(piece, piece) for piece in slices]
    begins = [cut.layers[start] for start in cut.starts[1:]]
    training = _traced(model.train(), begins, inputs)
    if not _differs_in_evaluation(model):
        return [Part(module, module) for module in training]
    try:
        forecasts = _traced(model.eval(), begins, inputs)
    finally:
        model.train()
    return [Part(module, forecast) for module, forecast in zip(training, forecasts, strict=True)]


def _traced(model: nn.Module, begins: Sequence[str], inputs: Sequence[Any]) -> list[nn.Module]:
    try:
        pipe = pipelining.pipeline(
            _unsplit(model), tuple(inputs), split_spec=dict.fromkeys(begins, pipelining.SplitPoint.BEGINNING)
        )
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} can't be traced, and so not be cut into stages: {_first_line(error)}. What can be "
            "cut is an nn.Sequential, or a model whose forward has no control flow that depends on the data. Wrap its "
            "layers in an nn.Sequential, or use strategy=dtkit.Sharded()"
        ) from error
    if pipe.num_stages != len(begins) + 1:
        raise ValueError(
            f"{type(model).__name__} came apart into {pipe.num_stages} parts in place of {len(begins) + 1}: the blocks "
            f"{', '.join(begins)} are not called one after the other. Name others: split=[...]"
        )
    return [pipe.get_stage_module(k) for k in range(pipe.num_stages)]


def _unsplit(model: nn.Module) -> nn.Module:
    """A view of the model over the same parameters: torch marks split points in the modules that it is given."""
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0].strip()[:300]


def _differs_in_evaluation(model: nn.Module) -> bool:
    dropouts = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - torch names no public base
    return any(
        (isinstance(m, dropouts) and getattr(m, "p", 1)) or (isinstance(m, nn.MultiheadAttention) and m.dropout)
        for m in model.modules()
    )


def borders(parts: Sequence[Part], inputs: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """What is given to each part, and last what comes out: tensors like those of every micro-batch.

    One forward pass; batch statistics stay as they were.
    """
    buffers = [b for part in parts for b in part.module.buffers()]
    before = [b.clone() for b in buffers]
    found, given = [tuple(inputs)], tuple(inputs)
    devices = [inputs[0].device] if inputs[0].is_cuda else []
    with torch.random.fork_rng(devices):
        for part in parts:
            made = part.module(*given)
            made = made if isinstance(made, tuple) else (made,)
            given = tuple(t.detach().requires_grad_(t.requires_grad) for t in made)
            found.append(given)
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
    return found


# -- parts at work -------------------------------------------------------------------------------------------


class Stage(PipelineStage):
    """torch's stage, which says what it is doing and lets a user's error through as it was."""

    def __init__(self, *args: Any, phases: Phases, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phases = phases

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch forward."""
        with self._at("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """One micro-batch backward, or the half of it that the stage before waits for."""
        whole = kwargs.get("full_backward", True)
        with self._at("backward" if whole else "backward input", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """The other half: the gradients of the weights."""
        with self._at("backward weight", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    @contextlib.contextmanager
    def _at(self, what: str, micro_batch: int) -> Iterator[None]:
        self._phases.enter(what, (self.stage_index, micro_batch))
        try:
            yield
        except RuntimeError as error:
            if error.__cause__ is not None and "failed to run forward" in str(error):
                raise error.__cause__ from None
            raise
        self._phases.enter("recv")


class Stages:
    """One rank's parts of a model, run by a schedule in one process group."""

    def __init__(
        self,
        kind: Kind,
        parts: dict[int, Part],
        shapes: Sequence[tuple[torch.Tensor, ...]],
        micro_batches: int,
        loss: Callable[[Any, Any], torch.Tensor],
    ) -> None:
        """`parts` are this rank's, by place; `shapes` what :func:`borders` found."""
        self.kind, self.parts, self.shapes = kind, parts, shapes
        self._micro_batches, self._loss = micro_batches, loss
        self.last = len(shapes) - 2
        """The place of the part that makes the output."""
        self.speaks = self.last in parts

    def join(self, group: dist.ProcessGroup, device: torch.device, phases: Phases) -> None:
        """Make torch's stages and schedule for a group; again for each group."""
        self._group, self._device = group, device
        self._stages = [
            Stage(
                part.module,
                place,
                self.last + 1,
                device,
                input_args=self.shapes[place],
                output_args=self.shapes[place + 1],
                group=group,
                phases=phases,
            )
            for place, part in self.parts.items()
        ]
        given: Any = self._stages[0] if self.kind.per_rank == 1 else self._stages
        self._schedule = self.kind.make(given, self._micro_batches, loss_fn=self._loss, scale_grads=False)

    @property
    def plan(self) -> dict[int, list[Any]]:
        """The schedule's own list of what each rank does in which order."""
        return dict(self._schedule.pipeline_order or {})

    def run(self, inputs: Sequence[tuple[Any, ...]], targets: Sequence[Any]) -> None:
        """Forward and backward of all micro-batches; gradients are added to what parameters have."""
        for stage in self._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        self._schedule._step_microbatches(  # noqa: SLF001 - the public `step` would cut micro-batches by itself
            list(inputs), [{} for _ in inputs], list(targets), None, return_outputs=False
        )

    def forecast(self, inputs: tuple[Any, ...]) -> Any:
        """The output of one micro-batch, part after part; None on ranks without the last part."""
        import torch.distributed as dist

        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        given: tuple[Any, ...] = inputs
        for place in range(self.last + 1):
            here, before = self.kind.rank_of(place, ranks), self.kind.rank_of(max(0, place - 1), ranks)
            if rank == here:
                if place and before != here:
                    given = tuple(torch.empty_like(t, requires_grad=False) for t in self.shapes[place])
                    for tensor in given:
                        dist.recv(tensor, group=self._group, group_src=before)
                made = self.parts[place].forecast(*given)
                given = made if isinstance(made, tuple) else (made,)
            elif rank == before:
                for tensor in given:
                    dist.send(tensor.contiguous(), group=self._group, group_dst=here)
        if not self.speaks:
            return None
        return given if len(given) > 1 else given[0]

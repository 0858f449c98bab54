"""The seam to torch's pipelining: a model made into stages, and stages run by a schedule.

A chain in an ``nn.Sequential`` is cut into slices. Any other model is traced by torch's exporter and cut where a block
begins; the parts keep the names of their parameters, and get their numbers by these. A trace is of training or of
evaluation, never of both, so where that makes a difference (dropout, batch normalisation) the model is traced twice,
over the same parameters.

Private names of torch are used here (and in `traffic.py` and `halves.py`) and nowhere else: a schedule is handed
micro-batches that are cut already, and a user's table goes to the runtime that torch's own looped schedules are made
of, which derives what is sent and received.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from dtkit.engine.comm.cancellable_wait import LARGE_MESSAGE_BYTES, CancellableWait
from dtkit.engine.observe.phase_timer import BETWEEN_PHASES
from dtkit.strategies.pipeline.p2p import P2PTracer, label_ops
from dtkit.strategies.pipeline.split_backward import can_split_backward
from dtkit.strategies.pipeline.trace import StageModulePair
from dtkit.strategies.pipeline.value_routing import StageModule, make_sendable
from dtkit.strategies.replicated import module_eval_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch.distributed as dist

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.observe.phase_timer import PhaseTimer
    from dtkit.schedules.schedule import Schedule
    from dtkit.types import NonFiniteLocations

logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # it logs whole schedules at an error


SCHEDULE_CLASSES: dict[str, type[Any]] = {
    "GPipe": pipelining.ScheduleGPipe,
    "1F1B": pipelining.Schedule1F1B,
    "Interleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": pipelining.ScheduleInterleavedZeroBubble,
    "LoopedBFS": pipelining.ScheduleLoopedBFS,
    "ZBVZeroBubble": pipelining.ScheduleZBVZeroBubble,
}
"""torch's own; each does what the table of its name says."""




# -- a model in parts ----------------------------------------------------------------------------------------




















@dataclasses.dataclass(frozen=True)
class StageIO:
    """What is given to each part, and last what comes out: tensors like those of every micro-batch.

    A model may return more in training than in evaluation, and then hands on more.
    """

    training: list[tuple[torch.Tensor, ...]]
    evaluation: list[tuple[torch.Tensor, ...]]


def infer_stage_io(
    stage_modules: Mapping[int, StageModulePair],
    stage_ranks: Sequence[int],
    inputs: Sequence[torch.Tensor],
    group: Group,
) -> StageIO:
    """Find them in a forward pass of each kind: the rank in `stage_ranks` runs its part, and hands on what that made.

    The part notes to which of its inputs it writes. Batch statistics stay as they were. A collective.
    """

    def passed(run: Callable[[StageModulePair, Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]) -> list[Any]:
        found = [tuple(inputs)]
        for place, home in enumerate(stage_ranks):
            made = run(stage_modules[place], found[-1]) if home == group.rank else None
            found.append(group.broadcast_tensors(made, home, inputs[0].device))
        return found

    return StageIO(passed(lambda part, given: _run_trial(part.training, given)), passed(_run_evaluation_trial))


def _run_evaluation_trial(pair: StageModulePair, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with module_eval_mode(pair.evaluation.module):
        return _run_trial(pair.evaluation, inputs)


def _run_trial(stage_module: StageModule, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    copies = [t.clone() for t in inputs]
    with preserve_buffers(stage_module.module), torch.random.fork_rng([inputs[0].device] if inputs[0].is_cuda else []):
        made = make_sendable(stage_module(*copies), copies)
    stage_module.mutated_inputs |= frozenset(k for k, t in enumerate(copies) if t._version)  # noqa: SLF001 - how often it was written to
    return made


@contextlib.contextmanager
def preserve_buffers(module: nn.Module) -> Iterator[None]:
    """Leave batch statistics, and buffers of any other kind, as they were before a forward pass that is to have no
    trace. Backward passes that wait may hold them: to autograd, `data` is not written to.
    """
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    yield
    for buffer, value in before:
        buffer.data.copy_(value)


# -- parts at work -------------------------------------------------------------------------------------------


class Stage(PipelineStage):
    """torch's stage, which says what it does and what its messages are, and lets a user's error through as it was."""

    def __init__(self, stage_module: StageModule, *args: Any, phases: PhaseTimer, **kwargs: Any) -> None:
        super().__init__(stage_module.module, *args, **kwargs)
        self._stage_module, self._phases, self._expected_outputs = stage_module, phases, kwargs["output_args"]
        self.unsplit_micro_batches: set[int] = set()
        """Micro-batches of this step whose backward was taken whole, though halves were asked for."""
        self.empty_micro_batches: frozenset[int] = frozenset()
        """Micro-batches of this step without a sample, which are there to keep ranks in step."""
        self.output_sums: list[torch.Tensor] = []
        """Of each output of this step: not finite where an element is not. On the device, read only if need be."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch forward."""
        lost = preserve_buffers(self.submod) if fwd_chunk_id in self.empty_micro_batches else contextlib.nullcontext()
        with self._in_phase("forward", fwd_chunk_id), lost:
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            if not self.is_last:  # of the last one the loss tells
                check_stage_output(self.stage_index, output, self._expected_outputs)
                self.output_sums += map(_sum_without_overflow, output)
            return output

    def forward_maybe_with_nosync(self, *args: Any, **_: Any) -> tuple[torch.Tensor, ...]:
        """Torch's way to call the module, with what came over the border; what goes over the next one."""
        made = self._stage_module(*args)
        return made if self.is_last else make_sendable(made, args)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """One micro-batch backward, or the half of it that the stage before waits for."""
        whole = kwargs.get("full_backward", True)
        if not whole and not self._can_split_backward(bwd_chunk_id, kwargs.get("loss")):
            whole = kwargs["full_backward"] = True
            self.unsplit_micro_batches.add(bwd_chunk_id)
        with self._in_phase("backward" if whole else "backward input", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _can_split_backward(self, micro_batch: int, loss: torch.Tensor | None) -> bool:
        """Whether backward comes in halves here. (Torch sees to its first stage itself.) Asked for every micro-batch,
        since layers may be left out at random: that takes some 3 % of the host's time in a backward pass.
        """
        outputs, inputs = self.fwd_cache[micro_batch]
        return self.is_first or can_split_backward(
            outputs if loss is None else [loss], inputs, self.submod.parameters()
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """The other half: the gradients of the weights."""
        if bwd_chunk_id in self.unsplit_micro_batches:
            self.unsplit_micro_batches.remove(bwd_chunk_id)
            return
        with self._in_phase("backward weight", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """A micro-batch's activation, for the next stage."""
        return label_ops(super().get_fwd_send_ops(fwd_chunk_id), "send forward", self.stage_index, fwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The one that the stage before sends."""
        return label_ops(super().get_fwd_recv_ops(fwd_chunk_id), "receive forward", self.stage_index, fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """A micro-batch's gradient, for the stage before."""
        if bwd_chunk_id in self.bwd_cache:
            self.bwd_cache[bwd_chunk_id] = tuple(map(_make_contiguous, self.bwd_cache[bwd_chunk_id]))
        return label_ops(super().get_bwd_send_ops(bwd_chunk_id), "send backward", self.stage_index, bwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The one that the next stage sends."""
        return label_ops(super().get_bwd_recv_ops(bwd_chunk_id), "receive backward", self.stage_index, bwd_chunk_id)

    @contextlib.contextmanager
    def _in_phase(self, phase: str, micro_batch: int) -> Iterator[None]:
        self._phases.enter(phase, (self.stage_index, micro_batch))
        try:
            yield
        except RuntimeError as error:
            if error.__cause__ is not None and "failed to run forward" in str(error):
                raise error.__cause__ from None
            raise
        self._phases.enter(BETWEEN_PHASES)


def _make_contiguous(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.contiguous()


def check_stage_output(stage: int, output: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Raise ValueError where a stage's output does not fit the buffers of the next one: gloo would end the process."""
    made, wanted = (
        [(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors] for tensors in (output, expected)
    )
    if made != wanted:
        raise ValueError(
            f"stage {stage} made {_format_shapes(made)} of a micro-batch, and {_format_shapes(wanted)} of the first one. Stages send "
            "tensors of one size: pad the samples to one, or use strategy=dtkit.Sharded()"
        )


def _format_shapes(found: Sequence[tuple[tuple[int, ...], str]]) -> str:
    return ", ".join(f"{dtype} of shape {shape}" for shape, dtype in found)


def _sum_without_overflow(output: torch.Tensor) -> torch.Tensor:
    """In a type in which finite numbers stay finite."""
    found = output.detach()
    return found.sum(dtype=torch.promote_types(found.dtype, torch.float32))


class CustomScheduleRuntime(_PipelineScheduleRuntime):
    """torch's runtime with a user's table.

    torch looks a micro-batch's loss up by its number in a list that grows in the order of forwards, and so would take
    another one's where a table has F1 before F0. Here losses are kept by number.
    """

    def __init__(self, schedule: Schedule, stages: list[Any], compute_loss: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__(stages, schedule.micro_batches, loss_fn=compute_loss, scale_grads=False)  # type: ignore[no-untyped-call]
        self._losses: dict[int, torch.Tensor] = {}
        self.pipeline_order = {
            rank: [a and _Action(a.stage, _ComputationType(a.kind), a.micro_batch) for a in row]
            for rank, row in enumerate(schedule.rows)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, _loss_kwargs: Any = None
    ) -> None:
        assert self._loss_fn is not None
        if stage.is_last:
            self._losses[mb_index] = self._loss_fn(output, target_mbs[mb_index])

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> torch.Tensor | None:
        return self._losses.pop(mb_index) if stage.is_last else None


class StageRunner:
    """One rank's parts of a model, run by a schedule in one process group."""

    def __init__(
        self,
        schedule: Schedule,
        stage_modules: dict[int, StageModulePair],
        stage_io: StageIO,
        compute_loss: Callable[[Any, Any], torch.Tensor],
    ) -> None:
        """`parts` are this rank's, by place; `found` what :func:`infer_stage_io` did."""
        self.schedule, self.stage_modules, self._loss_fn = schedule, stage_modules, compute_loss
        self.training_io, self._evaluation_io = stage_io.training, stage_io.evaluation
        self.last_stage = schedule.stages - 1
        """The place of the part that makes the output."""
        self.has_last_stage = self.last_stage in stage_modules

    def set_process_group(
        self, pp_group: dist.ProcessGroup, device: torch.device, phases: PhaseTimer, group: Group
    ) -> None:
        """Make torch's stages and schedule for the ranks of a pipeline, of a `group`; again for each group."""
        self._pp_group, self._device, self._phases, self._world_group = pp_group, device, phases, group
        large = any(t.nbytes >= LARGE_MESSAGE_BYTES for shapes in self.training_io[1:-1] for t in shapes)
        self._cancellable_wait = CancellableWait(group.has_lost_connection) if large and device.type == "cpu" else None
        self._stages = [
            Stage(
                part.training,
                place,
                self.last_stage + 1,
                device,
                input_args=self.training_io[place],
                output_args=self.training_io[place + 1],
                group=pp_group,
                phases=phases,
            )
            for place, part in self.stage_modules.items()
        ]
        self._torch_schedule = self._build_torch_schedule()
        self._p2p_tracer = P2PTracer(phases, lambda work: self._wait_for_peers([work]))

    @property
    def torch_stages(self) -> Sequence[Any]:
        """The stages that torch runs, as they are now."""
        return self._stages

    def _build_torch_schedule(self) -> Any:
        make = SCHEDULE_CLASSES.get(self.schedule.name)
        if make is None:
            return CustomScheduleRuntime(self.schedule, list(self._stages), self._compute_micro_batch_loss)
        given: Any = self._stages[0] if issubclass(make, PipelineScheduleSingle) else self._stages
        return make(given, self.schedule.micro_batches, loss_fn=self._compute_micro_batch_loss, scale_grads=False)

    def _compute_micro_batch_loss(self, output: Any, numbered_target: tuple[int, Any]) -> torch.Tensor:
        """The loss of a micro-batch: a part of its forward pass."""
        micro_batch, target = numbered_target
        self._phases.enter("forward", (self.last_stage, micro_batch))
        found = self._loss_fn(self.stage_modules[self.last_stage].training.unflatten_output(output), target)
        self._phases.enter(BETWEEN_PHASES)
        return found.clone()  # torch may detach it in place, which no view allows

    def run_schedule(
        self, inputs: Sequence[tuple[Any, ...]], targets: Sequence[Any], empty_micro_batches: Iterable[int] = ()
    ) -> None:
        """Forward and backward of all micro-batches; gradients are added to what parameters have.

        Those that are `empty_micro_batches`, by number, leave no trace in batch statistics.
        """
        for stage in self._stages:
            stage.has_backward, stage.empty_micro_batches = True, frozenset(empty_micro_batches)
            stage.output_sums.clear()
            stage.unsplit_micro_batches.clear()
            stage.clear_runtime_states()
        with self._p2p_tracer.intercept():
            self._torch_schedule._step_microbatches(  # noqa: SLF001 - the public `step` would cut micro-batches by itself
                list(inputs), [{} for _ in inputs], list(enumerate(targets)), None, return_outputs=False
            )

    def find_nonfinite(self) -> NonFiniteLocations:
        """What the last step made here that is not finite."""
        found = []
        for stage in self._stages:
            if not all(map(torch.isfinite, stage.output_sums)):
                found.append((stage.stage_index, "output"))
            if not all(p.grad.isfinite().all() for p in stage.submod.parameters() if p.grad is not None):
                found.append((stage.stage_index, "gradient"))
        return tuple(found)

    def _wait_for_peers(self, works: Sequence[Any]) -> None:
        """For other ranks no longer than a collective would.

        A gloo group's connections keep the limit that it was formed with, whatever is set later; NCCL ends what takes
        too long by itself, and would have the host wait where it is given a limit.
        """
        limit = (dt.timedelta(seconds=self._world_group.timeout_s),) if self._device.type == "cpu" else ()
        if self._cancellable_wait is not None:
            self._cancellable_wait.wait(works, *limit)
            return
        for work in works:
            work.wait(*limit)

    def run_forward(self, inputs: tuple[Any, ...]) -> Any:
        """The output of one micro-batch, part after part; None on ranks without the last part."""
        import torch.distributed as dist

        rank, homes = dist.get_rank(self._pp_group), self.schedule.stage_ranks
        given: tuple[Any, ...] = inputs
        for place in range(self.last_stage + 1):
            here, before = homes[place], homes[max(0, place - 1)]
            if rank == here:
                if place and before != here:
                    given = tuple(torch.empty_like(t, requires_grad=False) for t in self._evaluation_io[place])
                    self._wait_for_peers([dist.irecv(t, group=self._pp_group, group_src=before) for t in given])
                given = self.stage_modules[place].evaluation(*given)
                if place < self.last_stage:
                    check_stage_output(place, given, self._evaluation_io[place + 1])
            elif rank == before:
                sent = [t.contiguous() for t in given]
                self._wait_for_peers([dist.isend(t, group=self._pp_group, group_dst=here) for t in sent])
        return self.stage_modules[self.last_stage].evaluation.unflatten_output(given) if self.has_last_stage else None

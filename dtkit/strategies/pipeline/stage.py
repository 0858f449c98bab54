"""One rank's stages, run by torch's pipelining.

A schedule takes micro-batches that are already split. A user's table runs in the base class of torch's looped
schedules, which derives the sends and receives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from dtkit._util.torch_private import (
    ComputationType,
    PipelineScheduleRuntime,
    PipelineStage,
    ScheduleAction,
    count_inplace_writes,
    step_micro_batches,
)
from dtkit.engine.observe.phase_timer import BETWEEN_PHASES
from dtkit.strategies.module_modes import module_eval_mode
from dtkit.strategies.pipeline.carrier import make_carrier
from dtkit.strategies.pipeline.p2p import P2PTracer, label_ops
from dtkit.strategies.pipeline.split_backward import can_split_backward
from dtkit.strategies.pipeline.value_routing import StageModule, make_sendable
from dtkit.strategies.written_tensors import preserve_buffers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.observe.phase_timer import PhaseTimer
    from dtkit.messages import NonFiniteLocations
    from dtkit.schedules.schedule import Schedule
    from dtkit.strategies.pipeline.trace import StageModulePair

logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # it logs whole schedules on errors


SCHEDULE_CLASSES: dict[str, type[Any]] = {
    "GPipe": pipelining.ScheduleGPipe,
    "1F1B": pipelining.Schedule1F1B,
    "Interleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": pipelining.ScheduleInterleavedZeroBubble,
    "LoopedBFS": pipelining.ScheduleLoopedBFS,
    "ZBVZeroBubble": pipelining.ScheduleZBVZeroBubble,
}
"""torch's schedules, each of which runs the built-in table of its name."""


# -- shapes between stages -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StageIO:
    """Example inputs of each stage and the model's output, with the shapes of one micro-batch.

    A model may return more in training than in evaluation.
    """

    training: list[tuple[torch.Tensor, ...]]
    evaluation: list[tuple[torch.Tensor, ...]]


def infer_stage_io(
    stage_modules: Mapping[int, StageModulePair],
    stage_ranks: Sequence[int],
    inputs: Sequence[torch.Tensor],
    group: Group,
) -> StageIO:
    """Run a forward pass in training and in evaluation, in which each rank broadcasts its stages' outputs.

    Each module stores which inputs it changes in place. Batch statistics don't change. A collective.
    """

    def run_stages(run: Callable[[StageModulePair, Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]) -> list[Any]:
        values = [tuple(inputs)]
        for stage, rank in enumerate(stage_ranks):
            output = run(stage_modules[stage], values[-1]) if rank == group.rank else None
            values.append(group.broadcast_tensors(output, rank, inputs[0].device))
        return values

    return StageIO(run_stages(lambda pair, args: _run_trial(pair.training, args)), run_stages(_run_evaluation_trial))


def _run_evaluation_trial(pair: StageModulePair, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with module_eval_mode(pair.evaluation.module):
        return _run_trial(pair.evaluation, inputs)


def _run_trial(stage_module: StageModule, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    copies = [t.clone() for t in inputs]
    with preserve_buffers(stage_module.module), torch.random.fork_rng([inputs[0].device] if inputs[0].is_cuda else []):
        outputs = make_sendable(stage_module(*copies), copies)
    stage_module.mutated_inputs |= frozenset(k for k, t in enumerate(copies) if count_inplace_writes(t))
    return outputs


# -- running stages ------------------------------------------------------------------------------------------


class Stage(PipelineStage):
    """torch's stage that records its phases, labels its messages, and raises a user's error unchanged."""

    def __init__(self, stage_module: StageModule, *args: Any, phases: PhaseTimer, **kwargs: Any) -> None:
        super().__init__(stage_module.module, *args, **kwargs)
        self._stage_module, self._phases = stage_module, phases
        self._expected_inputs, self._expected_outputs = kwargs["input_args"], kwargs["output_args"]
        self.unsplit_micro_batches: set[int] = set()
        """Micro-batches of this step whose backward ran whole instead of in two passes."""
        self.empty_micro_batches: frozenset[int] = frozenset()
        """Micro-batches of this step without samples."""
        self.output_sums: list[torch.Tensor] = []
        """Sum of each output of this step, which is finite if all elements are. On the device, rarely read."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run one micro-batch forward."""
        buffers = (
            preserve_buffers(self.submod) if fwd_chunk_id in self.empty_micro_batches else contextlib.nullcontext()
        )
        with self._in_phase("forward", fwd_chunk_id), buffers:
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
            if not self.is_last:  # the last stage's output is checked through its loss
                check_stage_output(self.stage_index, output, self._expected_outputs)
                self.output_sums += map(_sum_without_overflow, output)
            return output

    def forward_maybe_with_nosync(self, *args: Any, **_: Any) -> tuple[torch.Tensor, ...]:
        """Return the module's outputs for the next stage; torch calls this."""
        if self.is_first and self.has_backward and self._stage_module.routing is not None:
            check_traced_input(args, self._expected_inputs)
        outputs = self._stage_module(*args)
        return outputs if self.is_last else make_sendable(outputs, args)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run one micro-batch backward, or only to the gradient of its inputs, for which the previous stage waits."""
        whole = kwargs.get("full_backward", True)
        if not whole and not self._can_split_backward(bwd_chunk_id, kwargs.get("loss")):
            whole = kwargs["full_backward"] = True
            self.unsplit_micro_batches.add(bwd_chunk_id)
        with self._in_phase("backward" if whole else "backward input", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _can_split_backward(self, micro_batch: int, loss: torch.Tensor | None) -> bool:
        """Return whether backward can run in two passes. Torch never splits the first stage, so it needs no check.

        Models may skip layers at random, so each micro-batch needs this check.
        """
        outputs, inputs = self.fwd_cache[micro_batch]
        return self.is_first or can_split_backward(
            outputs if loss is None else [loss], inputs, self.submod.parameters()
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run the other pass, for the gradients of the weights."""
        if bwd_chunk_id in self.unsplit_micro_batches:
            self.unsplit_micro_batches.remove(bwd_chunk_id)
            return
        with self._in_phase("backward weight", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a micro-batch's activations to the next stage."""
        return label_ops(super().get_fwd_send_ops(fwd_chunk_id), "send forward", self.stage_index, fwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of activations from the previous stage."""
        return label_ops(super().get_fwd_recv_ops(fwd_chunk_id), "receive forward", self.stage_index, fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a micro-batch's gradients to the previous stage."""
        if bwd_chunk_id in self.bwd_cache:
            self.bwd_cache[bwd_chunk_id] = tuple(map(_make_contiguous, self.bwd_cache[bwd_chunk_id]))
        return label_ops(super().get_bwd_send_ops(bwd_chunk_id), "send backward", self.stage_index, bwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of gradients from the next stage."""
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


def check_traced_input(inputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if a micro-batch has other sizes than the one that was traced."""
    shapes = _format_shapes(inputs)
    if shapes != _format_shapes(expected):
        raise ValueError(
            f"the inputs of this micro-batch are {shapes}, and the model was traced for {_format_shapes(expected)}: a "
            "pipeline's stages take one size. Pad all samples to one length (padding='max_length', or in collate_fn=), "
            "or use strategy=dtkit.Sharded()"
        )


def check_stage_output(stage: int, output: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if a stage's output doesn't fit the next one's buffers, where gloo would abort the process."""
    shapes, expected_shapes = _format_shapes(output), _format_shapes(expected)
    if shapes != expected_shapes:
        raise ValueError(
            f"stage {stage} returned {shapes} for a micro-batch, but {expected_shapes} for the first one. Stages send "
            "tensors of one size: pad the samples to one size, or use strategy=dtkit.Sharded()"
        )


def _format_shapes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')} of shape {tuple(t.shape)}" for t in tensors)


def _sum_without_overflow(output: torch.Tensor) -> torch.Tensor:
    """Return the sum in a type in which sums of finite values are finite."""
    return output.detach().sum(dtype=torch.promote_types(output.dtype, torch.float32))


class CustomScheduleRuntime(PipelineScheduleRuntime):
    """torch's runtime with a user's table.

    torch appends losses in the order of forwards and looks them up by micro-batch. That is wrong if a table has F1
    before F0. This class stores losses by micro-batch.
    """

    def __init__(self, schedule: Schedule, stages: list[Any], compute_loss: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__(stages, schedule.micro_batches, loss_fn=compute_loss, scale_grads=False)  # type: ignore[no-untyped-call]
        self._losses: dict[int, torch.Tensor] = {}
        self.pipeline_order = {
            rank: [a and ScheduleAction(a.stage, ComputationType(a.kind), a.micro_batch) for a in row]
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
    """One rank's stages of a model, run by a schedule in one process group."""

    def __init__(
        self,
        schedule: Schedule,
        stage_modules: dict[int, StageModulePair],
        stage_io: StageIO,
        compute_loss: Callable[[Any, Any], torch.Tensor],
    ) -> None:
        """Run `stage_modules`, this rank's by stage; `stage_io` is from :func:`infer_stage_io`."""
        self.schedule, self.stage_modules, self._loss_fn = schedule, stage_modules, compute_loss
        self.training_io, self._evaluation_io = stage_io.training, stage_io.evaluation
        self.last_stage = schedule.stages - 1
        """Index of the stage that returns the model's output."""
        self.has_last_stage = self.last_stage in stage_modules

    def set_process_group(
        self, pp_group: dist.ProcessGroup, device: torch.device, phases: PhaseTimer, group: Group
    ) -> None:
        """Build torch's stages and schedule for the pipeline's `pp_group` within `group`."""
        self._pp_group, self._phases = pp_group, phases
        largest = max((t.nbytes for shapes in self.training_io[1:-1] for t in shapes), default=0)
        self._carrier = make_carrier(group, device, largest)
        self._stages = [
            Stage(
                pair.training,
                stage,
                self.last_stage + 1,
                device,
                input_args=self.training_io[stage],
                output_args=self.training_io[stage + 1],
                group=pp_group,
                phases=phases,
            )
            for stage, pair in self.stage_modules.items()
        ]
        self._torch_schedule = self._build_torch_schedule()
        self._p2p_tracer = P2PTracer(phases, self._carrier)

    @property
    def torch_stages(self) -> Sequence[Any]:
        """The stages that torch runs in the current process group."""
        return self._stages

    def _build_torch_schedule(self) -> Any:
        schedule_class = SCHEDULE_CLASSES.get(self.schedule.name)
        if schedule_class is None:
            return CustomScheduleRuntime(self.schedule, list(self._stages), self._compute_micro_batch_loss)
        stages: Any = self._stages[0] if issubclass(schedule_class, PipelineScheduleSingle) else self._stages
        return schedule_class(
            stages, self.schedule.micro_batches, loss_fn=self._compute_micro_batch_loss, scale_grads=False
        )

    def _compute_micro_batch_loss(self, output: Any, numbered_target: tuple[int, Any]) -> torch.Tensor:
        """Return the loss of a micro-batch, as part of its forward pass."""
        micro_batch, target = numbered_target
        self._phases.enter("forward", (self.last_stage, micro_batch))
        loss = self._loss_fn(self.stage_modules[self.last_stage].training.unflatten_output(output), target)
        self._phases.enter(BETWEEN_PHASES)
        return loss.clone()  # torch may detach it in place, which fails for views

    def run_schedule(
        self, inputs: Sequence[tuple[Any, ...]], targets: Sequence[Any], empty_micro_batches: Iterable[int] = ()
    ) -> None:
        """Run forward and backward of all micro-batches, and add the gradients to the parameters'.

        `empty_micro_batches` don't change batch statistics.
        """
        for stage in self._stages:
            stage.has_backward, stage.empty_micro_batches = True, frozenset(empty_micro_batches)
            stage.output_sums.clear()
            stage.unsplit_micro_batches.clear()
            stage.clear_runtime_states()
        with self._p2p_tracer.intercept():
            step_micro_batches(
                self._torch_schedule,
                list(inputs),
                [{} for _ in inputs],
                list(enumerate(targets)),
                None,
                return_outputs=False,
            )

    def find_nonfinite(self) -> NonFiniteLocations:
        """Return this rank's nonfinite outputs and gradients of the last step."""
        locations = []
        for stage in self._stages:
            if not all(map(torch.isfinite, stage.output_sums)):
                locations.append((stage.stage_index, "output"))
            if not all(p.grad.isfinite().all() for p in stage.submod.parameters() if p.grad is not None):
                locations.append((stage.stage_index, "gradient"))
        return tuple(locations)

    def run_forward(self, inputs: tuple[Any, ...]) -> Any:
        """Return the output of one micro-batch, or None on ranks without the last stage."""
        rank, stage_ranks = dist.get_rank(self._pp_group), self.schedule.stage_ranks
        values: Sequence[Any] = inputs
        for stage, stage_rank in enumerate(stage_ranks):
            previous_rank = stage_ranks[max(0, stage - 1)]
            if rank == stage_rank:
                if rank != previous_rank:
                    values = self._receive(stage, previous_rank)
                values = self._run_stage(stage, values)
            elif rank == previous_rank:
                self._send(values, stage_rank)
        return self.stage_modules[self.last_stage].evaluation.unflatten_output(values) if self.has_last_stage else None

    def _run_stage(self, stage: int, inputs: Sequence[Any]) -> tuple[Any, ...]:
        output = self.stage_modules[stage].evaluation(*inputs)
        if stage < self.last_stage:
            check_stage_output(stage, output, self._evaluation_io[stage + 1])
        return output

    def _receive(self, stage: int, source: int) -> Sequence[torch.Tensor]:
        values = [torch.empty_like(t, requires_grad=False) for t in self._evaluation_io[stage]]
        self._carry([dist.P2POp(dist.irecv, t, group=self._pp_group, group_peer=source) for t in values])
        return values

    def _send(self, values: Sequence[torch.Tensor], target: int) -> None:
        buffers = [t.contiguous() for t in values]
        self._carry([dist.P2POp(dist.isend, t, group=self._pp_group, group_peer=target) for t in buffers])

    def _carry(self, ops: list[dist.P2POp]) -> None:
        """Send or receive messages, and wait for them."""
        for work in self._carrier.post(ops):
            self._carrier.wait(work)

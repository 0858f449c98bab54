"""One rank's stages of a pipeline: a step, the state and the evaluation."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from dtkit.engine.data.sources import map_tensors
from dtkit.engine.observe.phase_timer import BETWEEN_PHASES
from dtkit.engine.observe.stage_probe import PipelineProbe
from dtkit.strategies import gradients
from dtkit.strategies.base import (
    EvalFunction,
    StepResult,
    Worker,
    WorkerContext,
    make_optimizer,
    split_state_dict,
)
from dtkit.strategies.loss import LOSS_IS_WEIGHTED_SUM, split_batch
from dtkit.strategies.pipeline import cut as splitting
from dtkit.strategies.pipeline.stage import StageIO, StageRunner
from dtkit.strategies.pipeline.trace import (
    StageModulePair,
)
from dtkit.strategies.replicated import LossAccumulator, copy_to_cpu, module_eval_mode
from dtkit.engine.state.checksum import compute_checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.observe.step_probe import StepProbe
    from dtkit.engine.state.capture import StateVisitor
    from dtkit.strategies.loss import Loss
    from dtkit.types import Fingerprint


class PipelineWorker(Worker):
    """One rank's stages."""

    forward_is_collective = True

    def __init__(
        self,
        strategy: Pipeline,
        cut: splitting.StageCut,
        stage_modules: dict[int, StageModulePair],
        stage_io: StageIO,
        unstaged_entries: dict[str, Any],
        loss_fn: Loss,
        optimizer: Callable[..., Any],
        context: WorkerContext,
    ) -> None:
        self._strategy, self._loss_fn, self._context = strategy, loss_fn, context
        self.placement = cut
        self._phases, self._unstaged_entries = context.phases, unstaged_entries
        self._coordinates = context.mesh.get_coordinates(_get_rank(context))
        self.model = nn.ModuleList(part.module for part in stage_modules.values())
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not self._parameters:  # an optimiser wants one: this never gets a gradient, and is no part of the model
            self.model.register_parameter("nothing", nn.Parameter(torch.zeros((), device=context.device)))
        self.optimizer = make_optimizer(optimizer, self.model)
        self._loss_accumulator = LossAccumulator(1)
        self._loss_form: int | None = None
        self._stages = StageRunner(strategy.pipeline_schedule, stage_modules, stage_io, self._compute_loss)
        assert context.group is not None
        self.set_process_group(context.group)

    def set_process_group(self, group: Group) -> None:
        """Stages hold their group: make them anew, over the same parameters."""
        self._group = group
        self._loss_form = None  # of a step that was broken off, some ranks may know it and others not
        self._device_mesh = group.device_mesh(self._context.mesh, self._context.device)
        self._stages.set_process_group(self._device_mesh.get_group("pp"), self._context.device, self._phases, group)

    def visit_state(self, visitor: StateVisitor) -> None:
        """This rank's stages, under the whole model's names; each replica has batch statistics of its own."""
        named: dict[str, torch.Tensor] = {}
        for module in self.model.children():
            named |= dict(module.named_parameters(remove_duplicate=False))
        visitor.visit_tensors("model", named)
        if self._parameters:
            visitor.visit_optimizer("optimizer", self.optimizer, named)
        for module in self.model.children():
            buffers, extra = split_state_dict(module)
            visitor.per_replica("model", buffers, None)
            visitor.visit_extra_state(module, extra)
        visitor.visit_tensors(
            "model", {name: t for name, t in self._unstaged_entries.items() if isinstance(t, torch.Tensor)}
        )

    # -- a step -----------------------------------------------------------------------------------------------

    def step(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], probe: StepProbe | None = None
    ) -> StepResult:
        """All micro-batches through all stages, then one update."""
        scope = probe if isinstance(probe, PipelineProbe) else None
        for p in self._parameters:
            p.grad = None  # filled with zeros instead, malloc would keep fewer gaps, and steps take 6 % longer
        self._loss_accumulator = LossAccumulator(sum(counts))
        if batches:  # a replica without samples has nothing to run, and all of its ranks know
            filled = self._pad_micro_batches(batches)
            self._phases.enter(BETWEEN_PHASES)
            with contextlib.nullcontext() if scope is None else scope.observe_stages(self._stages.torch_stages):
                inputs, targets = [x for x, _, _ in filled], [(target, count) for _, target, count in filled]
                self._stages.run_schedule(inputs, targets, [k for k, (_, _, count) in enumerate(filled) if not count])
        if scope is not None:
            scope.compare_gradient_sums()
        self._phases.enter("sync")
        self._all_reduce_over_replicas()
        self._divide_by_weight()
        norm = self._compute_grad_norm()
        if scope is not None:
            self._report_loss(scope, norm)
        self._phases.enter("update")
        finite = math.isfinite(norm)
        if finite:
            if (factor := gradients.compute_clip_factor(norm, self._strategy.clip_grad_norm)) < 1:
                gradients.scale_(self._list_gradients(), factor)
            self.optimizer.step()
            if scope is not None:
                scope.record_update(float(self.optimizer.param_groups[0]["lr"]))
        return StepResult(
            self._loss_accumulator.mean_loss,
            self._loss_accumulator.loss_weight,
            finite,
            norm,
            () if finite else self._stages.find_nonfinite(),
        )

    def make_step_probe(self, **position: int) -> StepProbe:
        """What looks at the borders of this rank's stages."""
        return PipelineProbe({place: part.module for place, part in self._stages.stage_modules.items()}, **position)

    def _report_loss(self, probe: PipelineProbe, norm: float) -> None:
        """The loss, which the last stage alone knows, and what the update is about to do."""
        probe.record_loss(
            self._loss_accumulator.mean_loss if self._stages.has_last_stage else None,
            float(self._loss_accumulator.loss_weight),
            0.0,
        )
        if self._strategy.clip_grad_norm is not None:
            probe.record_clipping(gradients.compute_clip_factor(norm, self._strategy.clip_grad_norm))

    def _pad_micro_batches(self, batches: Sequence[tuple[int, Any]]) -> list[tuple[tuple[Any, ...], Any, int]]:
        """(inputs, target, rows that count) of every micro-batch, each of full size."""
        rows, found = self._micro_batch_size, []
        for k in range(self._strategy.micro_batches):
            count, batch = batches[k] if k < len(batches) else (0, batches[0][1])
            inputs, target = split_batch(
                batch if count == rows else _select_rows(batch, self._make_padding_index(count, rows))
            )
            found.append((require_tensor_inputs(inputs), target, count))
        return found

    @property
    def _micro_batch_size(self) -> int:
        """Of each micro-batch, those included that fill it up."""
        return int(self._stages.training_io[0][0].shape[0])

    def _make_padding_index(self, count: int, rows: int) -> torch.Tensor:
        """An index of `rows` rows of a batch of fewer: the first one again where there is none."""
        index = torch.arange(rows, device=self._context.device)
        index[max(count, 1) :] = 0
        return index

    def _compute_loss(self, output: Any, target_and_count: tuple[Any, int]) -> torch.Tensor:
        """A micro-batch's part of the global mean (or of the sum), to differentiate; its filling left out."""
        target, count = target_and_count
        if not count:
            first: torch.Tensor = tree_leaves(output)[0]
            return first.sum() * 0  # keeps every rank's backward in step
        if count < self._micro_batch_size:
            _check_batch_dim(output, self._micro_batch_size)
            output, target = _truncate_rows(output, count), _truncate_rows(target, count)
        forecast = self._loss_fn.evaluate_output(output, target)
        return self._loss_accumulator.add(forecast.loss, forecast.loss_weight, count)

    def _all_reduce_over_replicas(self) -> None:
        """Gradients of all replicas' samples, in one flat all-reduce among the ranks with the same stages."""
        if self._strategy.replicas == 1 or not self._parameters:
            return
        mates = self._device_mesh.get_group("dp")
        own = [p.grad for p in self._parameters]
        found = gradients.all_reduce_flat(self._parameters, own, lambda flat: self._group.all_reduce(flat, mates))
        for p, gradient in zip(self._parameters, found, strict=True):
            p.grad = gradient

    def _divide_by_weight(self) -> None:
        """A sum's gradients, made into those of the weighted mean: the last stages know the weights."""
        if self._loss_form is None:
            self._loss_form = gradients.agree_on_loss_form(self._loss_accumulator.loss_form, self._group)
        if self._loss_form == LOSS_IS_WEIGHTED_SUM:
            own = torch.as_tensor(self._loss_accumulator.loss_weight, dtype=torch.float64).to(
                self._context.device, copy=True
            )
            gradients.scale_(self._list_gradients(), gradients.compute_weight_factor(self._group.all_reduce(own)))

    def _compute_grad_norm(self) -> float:
        """Of the gradient of the whole model: its square is added up over the stages."""
        norm = self._compute_norm_over_stages(self._list_gradients())
        # It may have overflowed although every gradient is finite; all ranks of a pipeline have the same norm.
        return (
            norm
            if math.isfinite(norm)
            else self._compute_norm_over_stages([g.double() for g in self._list_gradients()])
        )

    def _compute_norm_over_stages(self, local_gradients: list[torch.Tensor]) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self._context.device)
        total += gradients.sum_squares(local_gradients).sum() if local_gradients else 0.0
        return math.sqrt(float(self._group.all_reduce(total, self._device_mesh.get_group("pp"))))

    def _list_gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def compute_fingerprint(self) -> Fingerprint:
        """A checksum of this rank's stages, to be equal in all replicas."""
        part = self._strategy.model_shard_id(self._group.world_size, self._group.rank)
        return {part: compute_checksum(self._parameters)}

    # -- the whole model --------------------------------------------------------------------------------------

    def state_dict_parts(self) -> dict[str, Any]:
        """The entries of this rank's stages, from the first replica; rank 0 adds what no stage has."""
        if self._coordinates["dp"]:
            return {}
        found = {name: copy_to_cpu(v) for module in self.model.children() for name, v in module.state_dict().items()}
        return {**self._unstaged_entries, **found} if self._coordinates["pp"] == 0 else found

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[EvalFunction]:
        """Micro-batch after micro-batch through all stages."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for part in self._stages.stage_modules.values():
                stack.enter_context(module_eval_mode(part.evaluation.module))
            yield self._evaluate_batch

    def _evaluate_batch(self, batch: Any) -> Any:
        inputs, target = split_batch(batch)
        count, rows, outputs = len(inputs[0]), self._micro_batch_size, []
        for start in range(0, count, rows):
            index = torch.arange(start, start + rows, device=self._context.device).clamp_(max=count - 1)
            outputs.append(self._stages.run_forward(require_tensor_inputs(_select_rows(inputs, index))))
        if not self._stages.has_last_stage:
            return None
        return self._loss_fn.evaluate_output(
            outputs[0] if count == rows else _concat_outputs(outputs, rows, count), target
        )


def _get_rank(context: WorkerContext) -> int:
    assert context.group is not None
    return context.group.rank


def _select_rows(batch: Any, index: torch.Tensor) -> Any:
    return map_tensors(batch, lambda t: t.index_select(0, index))


def require_tensor_inputs(inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    wrong = [type(x).__name__ for x in inputs if not isinstance(x, torch.Tensor)]
    if wrong:
        raise TypeError(
            f"the model's inputs include {', '.join(wrong)}; stages are fed with tensors. Give arrays, or a Dataset "
            "whose samples are tuples of tensors"
        )
    return tuple(inputs)


def _truncate_rows(value: Any, count: int) -> Any:
    return tree_map(lambda t: t[:count] if isinstance(t, torch.Tensor) else t, value)


def _concat_outputs(outputs: Sequence[Any], rows: int, count: int) -> Any:
    """The output for `count` samples, of that of micro-batches of `rows`."""
    for output in outputs:
        _check_batch_dim(output, rows)
    return tree_map(lambda *parts: torch.cat(parts)[:count], *outputs)


def _check_batch_dim(output: Any, rows: int) -> None:
    """Raise ValueError where an output can't be cut: where rows of it are not those of samples."""
    wrong = [tuple(t.shape) for t in tree_leaves(output) if t.shape[:1] != (rows,)]
    if wrong:
        raise ValueError(
            f"the model returned a tensor of shape {wrong[0]} for {rows} samples. A pipeline cuts the output where a "
            "micro-batch is filled up, and joins it in an evaluation: for that, it must have one row for each sample. "
            "Return such an output (and reshape it in the loss), or train with a batch_size that replicas * "
            "micro_batches divides, on data that batch_size divides"
        )


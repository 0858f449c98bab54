"""One rank's stages of a pipeline: a step, the state and the evaluation."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dtkit._util.torch_private import tree_leaves, tree_map
from dtkit.engine.data.sources import map_tensors
from dtkit.engine.observe.phase_timer import BETWEEN_PHASES
from dtkit.engine.observe.stage_probe import PipelineProbe
from dtkit.engine.state.checksum import compute_checksum
from dtkit.engine.state.shards import MODEL_PREFIX
from dtkit.errors import format_ranks
from dtkit.strategies import gradients, written_tensors
from dtkit.strategies.base import EvalFunction, StepResult, Strategy, Worker, make_optimizer, split_state_dict
from dtkit.strategies.loss import LOSS_IS_WEIGHTED_SUM, EvalOutput
from dtkit.strategies.module_modes import module_eval_mode
from dtkit.strategies.pipeline.masked_rows import explain_masked_rows, mask_labels
from dtkit.strategies.pipeline.stage import StageRunner
from dtkit.strategies.pipeline.tied_weights import TiedCopies
from dtkit.strategies.pipeline.trace import to_model_name
from dtkit.strategies.replicated import LossAccumulator
from dtkit.strategies.update import run_update

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.engine.observe.step_probe import StepProbe
    from dtkit.engine.state.visitor import StateVisitor
    from dtkit.messages import Fingerprint
    from dtkit.strategies.loss import Loss
    from dtkit.strategies.pipeline.cut import StageCut
    from dtkit.strategies.pipeline.stage import StageIO
    from dtkit.strategies.pipeline.tied_weights import TiedParameter
    from dtkit.strategies.pipeline.trace import StageModulePair


@dataclasses.dataclass(frozen=True)
class PlacedStages:
    """One rank's stages of a model that is cut, and the cut itself."""

    cut: StageCut
    modules: dict[int, StageModulePair]
    """This rank's modules by stage."""
    io: StageIO
    unstaged_entries: dict[str, Any]
    """Entries of the model's state dict that no stage has."""
    model: nn.Module
    """The whole model, only for `setup`."""
    tied: tuple[TiedParameter, ...] = ()
    """Parameters that several ranks have a copy of."""


class PipelineWorker(Worker):
    """Worker with one rank's stages."""

    forward_is_collective = True

    def __init__(
        self,
        strategy: Strategy,
        placed: PlacedStages,
        loss_fn: Loss,
        optimizer: Callable[..., Any],
        context: WorkerContext,
        *,
        clip_grad_norm: float | None,
    ) -> None:
        assert context.group is not None
        assert strategy.pipeline_schedule is not None
        self._strategy, self._loss_fn, self._context = strategy, loss_fn, context
        self._clip_grad_norm, self.placement = clip_grad_norm, placed.cut
        self._phases, self._unstaged_entries = context.phases, placed.unstaged_entries
        self._coordinates = context.mesh.get_coordinates(context.group.rank)
        self.model = nn.ModuleList(part.module for part in placed.modules.values())
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not self._parameters:  # an optimizer needs one; this one never gets a gradient
            self.model.register_parameter("placeholder", nn.Parameter(torch.zeros((), device=context.device)))
        self._tied = TiedCopies(placed.tied, _named_parameters_of_stages(self.model), self._coordinates["pp"])
        self.optimizer = make_optimizer(optimizer, self.model, self._make_model_view(placed.model))
        if context.group.rank == 0:
            self.notes = [
                f"{tied}: the gradients of stages on {format_ranks(tied.ranks)} are summed"
                for tied in placed.tied
                if tied.is_shared
            ]
        self._loss_accumulator = LossAccumulator(1)
        self._loss_form: int | None = None
        self._stages = StageRunner(strategy.pipeline_schedule, placed.modules, placed.io, self._compute_loss)
        self.set_process_group(context.group)

    def _make_model_view(self, model: nn.Module) -> nn.Module:
        """Return a copy of the model for the user's optimizer, with this rank's parameters instead of all."""
        named = self.named_parameters() or dict(self.model.named_parameters())
        first_names = {p: name for name, p in reversed(named.items())}  # a tied parameter has several names
        pairs = [(to_model_name(name), p) for name, p in named.items() if first_names[p] == name]
        view = copy.copy(model)
        vars(view)["named_parameters"] = lambda *_args, **_options: iter(pairs)
        vars(view)["parameters"] = lambda *_args, **_options: (p for _, p in pairs)
        return view

    def set_process_group(self, group: Group) -> None:
        """Rebuild the stages, which hold their process group, over the same parameters."""
        self._group = group
        self._loss_form = None  # after a failed step only some ranks may know it
        self._device_mesh = group.device_mesh(self._context.mesh, self._context.device)
        self._stages.set_process_group(self._device_mesh.get_group("pp"), self._context.device, self._phases, group)

    def visit_model(self, visitor: StateVisitor) -> None:
        """Visit this rank's stages under the model's names; each replica has its own batch statistics."""
        visitor.visit_tensors(MODEL_PREFIX, self.named_parameters())
        for module in self.model.children():
            buffers, extra = split_state_dict(module)
            visitor.per_replica(MODEL_PREFIX, buffers, None)
            visitor.visit_extra_state(module, extra)
        unstaged = {name: t for name, t in self._unstaged_entries.items() if isinstance(t, torch.Tensor)}
        visitor.visit_tensors(MODEL_PREFIX, unstaged)
        if visitor.is_saving:  # restoring would need a module
            extra = {name: value for name, value in self._unstaged_entries.items() if name not in unstaged}
            visitor.visit_extra_state(self.model, extra)

    def visit_state(self, visitor: StateVisitor) -> None:
        """Visit the model, and this rank's part of the optimizer."""
        self.visit_model(visitor)
        if self._parameters:
            visitor.visit_optimizer("optimizer", self.optimizer, self.named_parameters())

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters of this rank's stages by all of their names."""
        return self._tied.add_names(_named_parameters_of_stages(self.model))

    # -- a step -----------------------------------------------------------------------------------------------

    def step(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], probe: StepProbe | None = None
    ) -> StepResult:
        """Run all micro-batches through all stages, then update."""
        probe = probe if isinstance(probe, PipelineProbe) else None
        for p in self._parameters:
            p.grad = None  # faster than filling with zeros
        self._loss_accumulator = LossAccumulator(sum(counts))
        with self._share_written_tensors(counts):
            if batches:  # a replica without samples runs nothing
                self._run_stages(batches, probe)
        if probe is not None:
            probe.compare_gradient_sums()
        self._phases.enter("sync")
        self._tied.sum_gradients(
            lambda flat: self._group.all_reduce(flat, self._device_mesh.get_group("pp")), self._context.device
        )
        self._all_reduce_over_replicas()
        self._divide_by_weight()
        norm = self._compute_grad_norm()
        if probe is not None:
            self._report_loss(probe, norm)
        self._phases.enter("update")
        finite = math.isfinite(norm)
        if finite:
            if (factor := gradients.compute_clip_factor(norm, self._clip_grad_norm)) < 1:
                gradients.scale_(self._list_gradients(), factor)
            run_update(self.optimizer)
            if probe is not None:
                probe.record_update(float(self.optimizer.param_groups[0]["lr"]))
        return StepResult(
            self._loss_accumulator.mean_loss,
            self._loss_accumulator.loss_weight,
            finite,
            norm,
            () if finite else self._stages.find_nonfinite(),
        )

    def _run_stages(self, batches: Sequence[tuple[int, Any]], probe: PipelineProbe | None) -> None:
        """Run forward and backward of all micro-batches."""
        padded = self._pad_micro_batches(batches)
        self._phases.enter(BETWEEN_PHASES)
        with contextlib.nullcontext() if probe is None else probe.observe_stages(self._stages.torch_stages):
            inputs, targets = [x for x, _, _ in padded], [(target, count) for _, target, count in padded]
            with explain_masked_rows(self._loss_fn, [count for _, _, count in padded], self._micro_batch_size):
                self._stages.run_schedule(inputs, targets, [k for k, (_, _, count) in enumerate(padded) if not count])

    def _share_written_tensors(self, counts: Sequence[int]) -> contextlib.AbstractContextManager[None]:
        """Return a context for user code, after which all replicas have the counters that it wrote."""
        if self._context.mesh.axes["dp"] == 1:
            return contextlib.nullcontext()
        forwards = [min(count, self._strategy.num_micro_batches) for count in counts]
        dp_group = self._device_mesh.get_group("dp")
        return written_tensors.share((), self.model, forwards, self._context, self._group, dp_group)

    def make_step_probe(self, **position: int) -> StepProbe:
        """Return a probe of this rank's stages."""
        return PipelineProbe({stage: pair.module for stage, pair in self._stages.stage_modules.items()}, **position)

    def _report_loss(self, probe: PipelineProbe, norm: float) -> None:
        """Record the loss, which only the last stage knows, and the clipping."""
        probe.record_loss(
            self._loss_accumulator.mean_loss if self._stages.has_last_stage else None,
            float(self._loss_accumulator.loss_weight),
            0.0,
        )
        if self._clip_grad_norm is not None:
            probe.record_clipping(gradients.compute_clip_factor(norm, self._clip_grad_norm))

    def _pad_micro_batches(self, batches: Sequence[tuple[int, Any]]) -> list[tuple[tuple[Any, ...], Any, int]]:
        """Return (inputs, target, number of samples) of every micro-batch, padded to full size."""
        rows, padded = self._micro_batch_size, []
        for k in range(self._strategy.num_micro_batches):
            count, batch = batches[k] if k < len(batches) else (0, batches[0][1])
            if count < rows:
                batch = _select_rows(batch, self._make_padding_index(count, rows))
            inputs, target = self._loss_fn.split_batch(batch)
            if self._loss_fn.is_from_model and 0 < count < rows:
                inputs, target = mask_labels(inputs, target, count)
            padded.append((require_tensor_inputs(inputs.values), target, count))
        return padded

    @property
    def _micro_batch_size(self) -> int:
        """Number of rows of each micro-batch, including padding."""
        return int(self._stages.training_io[0][0].shape[0])

    def _make_padding_index(self, count: int, rows: int) -> torch.Tensor:
        """Return an index of `rows` rows into a batch of `count` rows, padded with the first row."""
        index = torch.arange(rows, device=self._context.device)
        index[max(count, 1) :] = 0
        return index

    def _compute_loss(self, output: Any, target_and_count: tuple[Any, int]) -> torch.Tensor:
        """Return a micro-batch's part of the global mean (or sum) without its padding, to differentiate."""
        target, count = target_and_count
        if not count:
            first: torch.Tensor = tree_leaves(output)[0]
            return first.sum() * 0  # all ranks need a backward pass
        if count < self._micro_batch_size and not self._loss_fn.is_from_model:
            _check_batch_dim(output, self._micro_batch_size)
            output, target = _truncate_rows(output, count), _truncate_rows(target, count)
        evaluated = self._loss_fn.evaluate_output(output, target)
        return self._loss_accumulator.add(evaluated.loss, evaluated.loss_weight, count)

    def _all_reduce_over_replicas(self) -> None:
        """Sum gradients in one flat all-reduce among the ranks with the same stages."""
        if self._context.mesh.axes["dp"] == 1 or not self._parameters:
            return
        dp_group = self._device_mesh.get_group("dp")
        local = [p.grad for p in self._parameters]
        sums = gradients.all_reduce_flat(self._parameters, local, lambda flat: self._group.all_reduce(flat, dp_group))
        for p, gradient in zip(self._parameters, sums, strict=True):
            p.grad = gradient

    def _divide_by_weight(self) -> None:
        """Divide the gradients of a sum by its weight, which the last stages know."""
        if self._loss_form is None:
            self._loss_form = gradients.agree_on_loss_form(self._loss_accumulator.loss_form, self._group)
        if self._loss_form == LOSS_IS_WEIGHTED_SUM:
            weight = torch.as_tensor(self._loss_accumulator.loss_weight, dtype=torch.float64)
            total = self._group.all_reduce(weight.to(self._context.device, copy=True))
            gradients.scale_(self._list_gradients(), gradients.compute_weight_factor(total))

    def _compute_grad_norm(self) -> float:
        """Return the norm of the whole model's gradient: squares are summed over the stages."""
        counted = [p.grad for p in self._parameters if p.grad is not None and self._tied.is_counted(p)]
        norm = self._compute_norm_over_stages(counted)
        if math.isfinite(norm):  # on all ranks of a pipeline, or on none
            return norm
        # The norm may overflow although every gradient is finite.
        return self._compute_norm_over_stages([g.double() for g in counted])

    def _compute_norm_over_stages(self, local_gradients: list[torch.Tensor]) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self._context.device)
        total += gradients.sum_squares(local_gradients).sum() if local_gradients else 0.0
        return math.sqrt(float(self._group.all_reduce(total, self._device_mesh.get_group("pp"))))

    def _list_gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def compute_fingerprint(self) -> Fingerprint:
        """Return a checksum of this rank's stages, which must be equal in all replicas."""
        shard_id = self._strategy.model_shard_id(self._group.world_size, self._group.rank)
        return {shard_id: compute_checksum(self._parameters)}

    # -- the whole model --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[EvalFunction]:
        """Evaluate micro-batches one after another through all stages."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for pair in self._stages.stage_modules.values():
                stack.enter_context(module_eval_mode(pair.evaluation.module))
            yield self._evaluate_batch

    def _evaluate_batch(self, batch: Any) -> EvalOutput | None:
        target = self._loss_fn.split_batch(batch)[1]
        rows, outputs = self._micro_batch_size, []
        num_rows = len(self._loss_fn.split_batch(batch)[0].values[0])
        for start in range(0, num_rows, rows):
            index = torch.arange(start, start + rows, device=self._context.device).clamp_(max=num_rows - 1)
            inputs, part = self._loss_fn.split_batch(_select_rows(batch, index))
            if self._loss_fn.is_from_model:
                inputs, part = mask_labels(inputs, part, min(rows, num_rows - start))
            output = self._stages.run_forward(require_tensor_inputs(inputs.values))
            if self._stages.has_last_stage:
                outputs.append(self._loss_fn.evaluate_output(output, part) if self._loss_fn.is_from_model else output)
        if not self._stages.has_last_stage:
            return None
        if self._loss_fn.is_from_model:
            return _join_evaluations(outputs, target, rows)
        return self._loss_fn.evaluate_output(
            outputs[0] if num_rows == rows else _concat_outputs(outputs, rows, num_rows), target
        )


def _named_parameters_of_stages(stages: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of stages by the names that their modules have for them."""
    return {name: p for module in stages.children() for name, p in module.named_parameters(remove_duplicate=False)}


def _select_rows(batch: Any, index: torch.Tensor) -> Any:
    return map_tensors(batch, lambda t: t.index_select(0, index))


def _join_evaluations(parts: Sequence[EvalOutput], target: torch.Tensor, rows: int) -> EvalOutput:
    """Return the output and the loss of all rows from those of micro-batches of `rows`, the last of them padded."""
    num_rows, outputs = len(target), [part.output for part in parts]
    output = outputs[0] if num_rows == rows else _concat_outputs(outputs, rows, num_rows)
    weights = [part.loss_weight for part in parts if part.loss_weight is not None]
    if weights:
        return EvalOutput(output, target, torch.stack([part.loss for part in parts]).sum(), torch.stack(weights).sum())
    counts = [min(rows, num_rows - start) for start in range(0, num_rows, rows)]
    means = [part.loss * count for part, count in zip(parts, counts, strict=True)]
    return EvalOutput(output, target, torch.stack(means).sum() / num_rows, None)


def require_tensor_inputs(inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Return a model's inputs; raise TypeError if some aren't tensors."""
    wrong = [type(x).__name__ for x in inputs if not isinstance(x, torch.Tensor)]
    if wrong:
        raise TypeError(
            f"the model's inputs include {', '.join(wrong)}; stages take tensors only. Pass arrays, or a Dataset whose "
            "samples are tuples of tensors"
        )
    return tuple(inputs)


def _truncate_rows(value: Any, count: int) -> Any:
    return tree_map(lambda t: t[:count] if isinstance(t, torch.Tensor) else t, value)


def _concat_outputs(outputs: Sequence[Any], rows: int, count: int) -> Any:
    """Return the output for `count` samples from those of micro-batches of `rows`."""
    for output in outputs:
        _check_batch_dim(output, rows)
    return tree_map(lambda *parts: torch.cat(parts)[:count], *outputs)


def _check_batch_dim(output: Any, rows: int) -> None:
    """Raise ValueError for an output without one row per sample."""
    wrong = [tuple(t.shape) for t in tree_leaves(output) if t.shape[:1] != (rows,)]
    if wrong:
        raise ValueError(
            f"the model returned a tensor of shape {wrong[0]} for {rows} samples. A pipeline removes padding from "
            "outputs and concatenates them in evaluations, so an output needs one row for each sample. Return such an "
            "output (and reshape it in the loss), or train with a batch_size that replicas * micro_batches divides, "
            "on data that batch_size divides"
        )

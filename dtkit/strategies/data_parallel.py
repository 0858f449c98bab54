"""Data parallelism: a copy of the model on each rank, with gradients summed over ranks in every step.

For large models, torch's DDP does the work (Li et al., VLDB 2020). It reduces buckets of gradients while backward still
computes the next ones. A small model has only one bucket, and gets one flat buffer instead: see
:mod:`dtkit.strategies.flat_gradients`. A single rank has nothing to reduce.

dtkit replaces DDP's hook for three reasons. Gradients are summed, not averaged: ranks scale their losses by samples
(see :mod:`dtkit.strategies.replicated`). The hook can compress them. And the launch of the last bucket marks the end of
computation. DDP wraps the model together with its loss, so that a user's training step gets the model with all its
attributes.

A rank without samples runs no user code: an empty forward gives NaN, and a missing backward breaks DDP's reducer. All
ranks know all counts, so in such a step all of them bypass DDP and sum their gradients explicitly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dtkit._util.arguments import suggest_options
from dtkit._util.lazy_compiler import load_compiler
from dtkit.planning.cost_model import Cost, compute_ring_bytes
from dtkit.strategies import compression
from dtkit.strategies.base import StepResult, Strategy, Worker, make_optimizer
from dtkit.strategies.compiled_model import COMPILE_MODES, CompiledModel
from dtkit.strategies.flat_gradients import FlatGradients, choose_max_flat_bytes, fits_flat_buffer
from dtkit.strategies.manual_optimization import ManualWorker
from dtkit.strategies.options import check_choice, check_count, check_flag, check_positive
from dtkit.strategies.replicated import AUTOCAST_DTYPES, LossAccumulator, ReplicatedWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.engine.observe.step_probe import StepProbe
    from dtkit.engine.state.visitor import StateVisitor
    from dtkit.planning.cost_model import Benchmark, ModelProfile
    from dtkit.strategies.loss import Loss


_UNUSED_PARAMETER_ERROR = (
    "the model did not use it in this step, and ranks wait for every parameter's gradient. Use "
    "strategy=dtkit.DataParallel(find_unused_parameters=True), or call requires_grad_(False) on parameters that are "
    "never used"
)


@suggest_options
@dataclasses.dataclass(frozen=True, repr=False)
class DataParallel(Strategy):
    """Gradients are all-reduced in every step, weighted by samples (Li et al., VLDB 2020).

    The result equals training in one process up to rounding, also for unequal shards. Small gradients are sent in one
    message after backward, large ones in buckets while backward still runs.

    Parameters
    ----------
    accumulate
        Number of micro-batches of a rank's samples in a step; more of them need less memory. `batch_size` is still the
        number of samples per update. A rank with fewer samples has one micro-batch per sample. The routers' loss of a
        mixture of experts is then that of each micro-batch.
    clip_grad_norm
        Largest norm of the whole gradient; a larger gradient is scaled down to it.
    precision
        "bf16" or "fp16": forward and backward use torch's autocast; "fp16" also scales the loss. Parameters and
        optimizer keep their type.
    compile
        Whether to compile calls of the model with ``torch.compile``; the first steps then take much longer. Or its
        mode: on GPUs, "reduce-overhead" and "max-autotune" record CUDA graphs.
    compress
        "fp16", "bf16" or "powersgd": send fewer bytes, not exact; see :mod:`dtkit.strategies.compression`.
    bucket_cap_mb
        Size of DDP's buckets in MB; 25 by default.
    balance
        "auto": faster ranks take more samples of each batch. The rows of a step stay the same.
    find_unused_parameters
        For models that don't use all parameters in every step; it traverses the graph in each step.
    sync_batch_norm
        On GPUs, make batch normalization use the statistics of the whole batch.

    """

    accumulate: int = 1
    clip_grad_norm: float | None = None
    precision: str | None = None
    compile: bool | str = False
    compress: str | None = None
    bucket_cap_mb: float | None = None
    balance: str | None = None
    find_unused_parameters: bool = False
    sync_batch_norm: bool = True

    def __post_init__(self) -> None:
        """Check the options."""
        check_count("accumulate", self.accumulate)
        check_positive("clip_grad_norm", self.clip_grad_norm)
        check_positive("bucket_cap_mb", self.bucket_cap_mb)
        check_choice("precision", self.precision, AUTOCAST_DTYPES)
        check_choice("compress", self.compress, compression.COMPRESSION_METHODS)
        check_choice("balance", self.balance, ("auto",))
        if isinstance(self.compile, str):
            check_choice("compile", self.compile, COMPILE_MODES)
        else:
            check_flag("compile", self.compile)
        for name in ("find_unused_parameters", "sync_batch_norm"):
            check_flag(name, getattr(self, name))
        if self.compress == "powersgd" and self.precision == "fp16":
            raise ValueError(
                "compress='powersgd' with precision='fp16': PowerSGD adds the error of one step to the next, but fp16 "
                "scales each step by a different factor. Use precision='bf16', or compress='fp16'"
            )

    @property
    def num_micro_batches(self) -> int:
        """Return `accumulate`."""
        return self.accumulate

    @property
    def shares_router_losses(self) -> bool:  # type: ignore[override]  # a constant of other strategies
        """Whether a rank computes all of its samples at once."""
        return self.accumulate == 1

    @property
    def has_plain_sums(self) -> bool:
        """Whether no option needs DDP, so that small gradients are summed in one flat buffer."""
        return self.compress is None and self.bucket_cap_mb is None and not self.find_unused_parameters

    @property
    def unused_parameter_error(self) -> str:
        """Return why a parameter needs a gradient in each step, without `find_unused_parameters`."""
        return "" if self.find_unused_parameters else _UNUSED_PARAMETER_ERROR

    def uses_flat_buffer(self, model: torch.nn.Module, group: Group, device: torch.device) -> bool:
        """Return whether the gradients of this model are summed in one flat buffer."""
        max_bytes = choose_max_flat_bytes(is_one_host=group.can_sum_directly(torch.zeros(1, device=device)))
        return self.has_plain_sums and fits_flat_buffer(model, max_bytes)

    def preload(self, model: torch.nn.Module | None, group: Group | None) -> None:
        """Load torch's compiler, if this model needs it: DDP is excluded from compilation by it."""
        assert model is not None  # each rank has a copy
        needs_ddp = group is not None and not self.uses_flat_buffer(model, group, torch.device("cpu"))
        if self.compile or needs_ddp:
            load_compiler()

    def check(self, world_size: int, batch_size: int) -> None:
        """Raise ValueError if no rank has enough samples for `accumulate` micro-batches."""
        most = -(-batch_size // world_size)
        if self.accumulate > most:
            raise ValueError(
                f"accumulate={self.accumulate} micro-batches of a step, but a rank has at most {most} samples in it "
                f"(batch_size={batch_size} on {world_size} ranks). Use accumulate={most} or less, or a larger "
                "batch_size: it is the number of samples per update, over all ranks and micro-batches"
            )

    def equivalence_notes(self) -> tuple[str, ...]:
        """Return a note on rounding that doesn't occur in one process."""
        rounding = f"precision={self.precision!r} rounds sums over other samples on each rank"
        notes = [rounding] if self.precision else []
        return tuple(notes + ([f"compress={self.compress!r} sends rounded gradients"] if self.compress else []))

    @property
    def rounds_by_part(self) -> bool:
        """Whether `precision` rounds sums, and gradients are sent as they are."""
        return self.precision is not None and self.compress is None

    def estimate_cost(self, profile: ModelProfile, benchmark: Benchmark) -> Cost:
        """Return the cost of an all-reduce in buckets, which overlaps with backward except for the last bucket.

        Small gradients are copied into one flat buffer after backward, and nothing overlaps. Those of micro-batches are
        copied into the buckets.
        """
        sent, kept, besides = compression.estimate_compression(self.compress, profile)
        whole = benchmark.estimate_all_reduce_s(sent)
        last = benchmark.estimate_all_reduce_s(min(sent, (self.bucket_cap_mb or 25) * 2**20))
        backward_s = profile.backward_s.predict(profile.rows / self.accumulate)
        exposed_s = whole - min(benchmark.overlap * (whole - last), backward_s)
        sent_bytes = compute_ring_bytes(sent, benchmark.world_size)
        is_flat = self.has_plain_sums and profile.gradients <= choose_max_flat_bytes(
            is_one_host=benchmark.sums_directly
        )
        if is_flat:
            exposed_s, sent_bytes = benchmark.estimate_sum_s(sent), benchmark.compute_sum_bytes(sent)
        return Cost.for_replica(
            profile,
            micro_batches=self.accumulate,
            gradients=profile.gradients * (1 if self.accumulate == 1 else 2) + kept,
            temporaries=max(profile.update_temporaries, besides, profile.gradients if is_flat else 0),
            sent_bytes=sent_bytes,
            exposed_s=exposed_s,
        )

    def setup(
        self, model: torch.nn.Module, loss_fn: Loss, optimizer: Callable[..., Any], context: WorkerContext
    ) -> Worker:
        """Return a worker with this rank's replica. The parameters must already be equal on all ranks."""
        model = model.to(context.device)
        if self.sync_batch_norm and context.group is not None and context.device.type == "cuda":
            model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        if self.compile:
            mode = self.compile if isinstance(self.compile, str) else None
            loss_fn = CompiledModel(model, mode).check_steps(loss_fn)
        if loss_fn.is_manual:
            return ManualWorker(model, loss_fn, optimizer, context, clip_grad_norm=self.clip_grad_norm)
        return _DataParallelWorker(self, model, loss_fn, make_optimizer(optimizer, model), context)


class _LossModule(torch.nn.Module):
    """Module from a batch to (loss, weight)."""

    def __init__(self, model: torch.nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = loss_fn

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (loss, weight) of a batch."""
        loss_and_weight: tuple[torch.Tensor, torch.Tensor | None] = self._loss_fn(self.model, batch)
        return loss_and_weight


class _DataParallelWorker(ReplicatedWorker):
    """One rank's copy of the model: under DDP, with gradients in a flat buffer, or alone."""

    _ddp: DistributedDataParallel | None = None
    _flat_gradients: FlatGradients | None = None

    def __init__(
        self,
        strategy: DataParallel,
        model: torch.nn.Module,
        loss_fn: Loss,
        optimizer: torch.optim.Optimizer,
        context: WorkerContext,
    ) -> None:
        super().__init__(
            model, loss_fn, optimizer, context, clip_grad_norm=strategy.clip_grad_norm, precision=strategy.precision
        )
        self._strategy, self._num_micro_batches = strategy, strategy.accumulate
        self._prepare_sync()

    def _prepare_sync(self) -> None:
        """Choose how gradients are summed over the ranks of the current process group."""
        strategy, self._ddp, self._flat_gradients = self._strategy, None, None
        self._share_router_losses()
        if self._group is None:
            return
        if strategy.uses_flat_buffer(self._model, self._group, self._context.device):
            self._flat_gradients = FlatGradients(self._parameters)
        elif self._group.world_size > 1 or strategy.compress is not None:
            self._ddp = self._wrap_in_ddp(self._group)

    def _wrap_in_ddp(self, group: Group) -> DistributedDataParallel:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)  # it has no successor yet
            module = DistributedDataParallel(
                _LossModule(self._model, self._compute_loss),
                broadcast_buffers=False,  # each rank keeps its batch statistics; broadcasts hang with an empty rank
                init_sync=False,  # equal already
                gradient_as_bucket_view=True,
                bucket_cap_mb=self._strategy.bucket_cap_mb,
                find_unused_parameters=self._strategy.find_unused_parameters,
            )
        self._comm_hook = compression.make_comm_hook(self._strategy.compress, group)
        # DDP's reducer holds the hook in C++, which garbage collection can't see: a strong reference would leak the
        # model. A lambda, since DDP checks the annotations of functions.
        this = weakref.proxy(self)
        module.register_comm_hook(None, lambda _, bucket: this.launch_reduce(bucket))
        return module

    def launch_reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Start to reduce a bucket; the last one ends the computation."""
        if bucket.is_last():
            self._phases.enter("sync")
        return self._comm_hook(bucket)

    def set_process_group(self, group: Group) -> None:
        """Prepare again, since DDP's reducer holds the old process group."""
        super().set_process_group(group)
        self._prepare_sync()

    def visit_state(self, visitor: StateVisitor) -> None:
        """Visit a replica's state and the state of the compression."""
        super().visit_state(visitor)
        if self._ddp is not None:
            compression.visit_hook_state(self._comm_hook, visitor, self.named_parameters())

    def step(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], probe: StepProbe | None = None
    ) -> StepResult:
        """Run forward, backward with all-reduce, and the update, so that parameters stay equal on all ranks."""
        self._zero_grad()
        some_rank_is_empty = self._group is not None and not all(counts)
        if some_rank_is_empty or probe is not None:
            return self._explain_step(batches, counts, probe)
        loss_accumulator = LossAccumulator(sum(counts))
        if len(batches) == 1 == self._num_micro_batches:
            total = self._run_micro_batches(batches, loss_accumulator)
        else:
            with self._share_written_tensors(counts):
                total = self._run_micro_batches(batches, loss_accumulator)
        self._check_all_parameters_used()
        self._reduce_flat_gradients()
        self._divide_by_weight(total)
        finite, norm = self._clip_and_update()
        return self._make_step_result(loss_accumulator, counts, finite=finite, norm=norm)

    def _run_micro_batches(
        self, batches: Sequence[tuple[int, Any]], loss_accumulator: LossAccumulator
    ) -> Callable[[], torch.Tensor] | None:
        """Run forward and backward. Return a function that waits for the weight of all losses."""
        total = None
        for k, (count, batch) in enumerate(batches, 1):
            last = k == len(batches)
            with contextlib.nullcontext() if last else self._no_sync():
                self._phases.enter("forward")
                value, weight = self._compute_loss(self._model, batch) if self._ddp is None else self._ddp(batch)
                loss_accumulator.record(value, weight, count)
                if last:
                    total = self._start_weight_reduce(loss_accumulator)
                self._phases.enter("backward")
                factor = 1.0 if weight is not None else count / loss_accumulator.global_samples
                self._run_backward(value, factor)
        return total

    def _no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._ddp is None else self._ddp.no_sync()

    def _reduce_flat_gradients(self) -> None:
        if self._flat_gradients is not None and self._group is not None and self._group.world_size > 1:
            buffer = self._flat_gradients.collect()
            self._phases.enter("sync")
            self._group.all_reduce(buffer)

    def _compute_grad_norm(self) -> float:
        flat = self._flat_gradients
        if flat is not None and (flat.is_current or flat.copy()):  # a copy on one rank, or in an explained step
            return flat.compute_norm()
        return super()._compute_grad_norm()

    def _check_all_parameters_used(self) -> None:
        """Raise ValueError at once. DDP reports a missing gradient one step later, while other ranks wait."""
        if self._group is None or self._strategy.find_unused_parameters:
            return
        unused = [p for p in self._parameters if p.grad is None]
        if unused:
            names = [name for name, p in self._model.named_parameters() if p.requires_grad and p.grad is None]
            raise ValueError(f"{', '.join(names)} got no gradient: {_UNUSED_PARAMETER_ERROR}")

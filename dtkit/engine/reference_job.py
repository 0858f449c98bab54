"""A job that one process trains alone, as `verify`'s reference for a distributed training."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dtkit.engine.data.sources import map_tensors, to_device
from dtkit.engine.job import Job
from dtkit.engine.largest_gradients import LargestGradients
from dtkit.engine.observe.tensor_values import compute_digest
from dtkit.engine.rng import JobRng
from dtkit.errors import CollectiveInStepError
from dtkit.rpc.reference import DIGESTED_STEPS, Reference, ReferenceReport
from dtkit.strategies import router_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dtkit.engine.data.batches import ShardedBatches
    from dtkit.engine.data.iterable import IterableBatches
    from dtkit.engine.data.worker_context import WorkerContext
    from dtkit.engine.observe.step_probe import StepProbe
    from dtkit.strategies.base import StepResult, TrainingProgram

_RESEED_OFFSET = 1_000_003


class ReferenceJob(Job):
    """Training of the whole model on all shards, by this process alone."""

    def __init__(
        self,
        model: torch.nn.Module,
        program: TrainingProgram,
        batch_source: ShardedBatches | IterableBatches,
        context: WorkerContext,
        seed: int,
        reference: Reference,
    ) -> None:
        is_reseeded = reference is Reference.RESEEDED
        super().__init__(model, program, batch_source, context, seed + _RESEED_OFFSET * is_reseeded)
        self._part_source = batch_source
        self._shard_rngs: list[JobRng] | None = None
        if reference is Reference.BY_PART:
            self._shard_rngs = [JobRng(seed + shard, context.device) for shard in context.shards]
        self._largest_gradients = LargestGradients()
        self._batch_digests: list[str] = []
        self._comparison_s: list[float] = []  # of each step

    def build_reference_report(self) -> ReferenceReport:
        """Return the results that `verify` needs besides the parameters."""
        optimizers = getattr(self._worker.optimizer, "optimizers", (self._worker.optimizer,))
        is_muon = any(type(optimizer).__name__ == "Muon" for optimizer in optimizers)
        model = self._worker.model
        dtype = "bfloat16" if is_muon else getattr(model, "loss_dtype", None)
        is_double = all(p.dtype == torch.float64 for p in model.parameters())
        if is_double and router_loss.find_namespaces(model, self.loss_fn.training_step):
            dtype = "float32"  # in which transformers computes this loss
        max_gradients = self._largest_gradients.compute()
        return ReferenceReport(max_gradients, tuple(self._batch_digests), dtype, tuple(self._comparison_s))

    def advance(
        self, num_steps: int, *, explain: bool = False, should_end_early: Callable[[], bool] = lambda: False
    ) -> None:
        """See :class:`Job`. Refuses collectives in all steps."""
        with _refuse_collectives():
            super().advance(num_steps, explain=explain, should_end_early=should_end_early)

    def _load_batches(self) -> Sequence[tuple[int, Any]]:
        if self._shard_rngs is None or self._worker.batch_per_shard or self._worker.takes_whole_batch:
            batches = super()._load_batches()
            begun = time.perf_counter()
            if self.step < DIGESTED_STEPS:
                self._batch_digests.append(_digest_batches(batches))
            self._comparison_s.append(time.perf_counter() - begun)
            return batches
        self._comparison_s.append(0.0)
        parts = self._part_source.load_batches_by_part(self.step, self._num_micro_batches)
        device, dtype = self.context.device, self.context.float_dtype
        on_device = [[(count, to_device(batch, device, dtype)) for count, batch in part] for part in parts]
        return _PartBatches(on_device, self._shard_rngs, self.step)

    def _run_worker(
        self, batches: Sequence[tuple[int, Any]], counts: Sequence[int], probe: StepProbe | None
    ) -> StepResult:
        result = super()._run_worker(batches, counts, probe)
        begun = time.perf_counter()
        self._largest_gradients.update(self._worker.model.named_parameters())
        self._comparison_s[-1] += time.perf_counter() - begun
        return result


class _PartBatches(Sequence[tuple[int, Any]]):
    """Batches of all shards. Each shard is iterated over with the random numbers of its rank."""

    def __init__(self, parts: list[list[tuple[int, Any]]], rngs: list[JobRng], step: int) -> None:
        self._parts, self._rngs, self._step = parts, rngs, step

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __getitem__(self, index: Any) -> Any:
        return [pair for part in self._parts for pair in part][index]

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for part, rng in zip(self._parts, self._rngs, strict=True):
            with rng:  # also while the caller computes with the pair
                rng.begin_step(self._step)
                yield from part


def _digest_batches(batches: Sequence[tuple[int, Any]]) -> str:
    tensors: list[tuple[str, torch.Tensor]] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append((str(len(tensors)), tensor))
        return tensor

    for _, batch in batches:
        map_tensors(batch, collect)
    return compute_digest(tensors)


_COLLECTIVES = [
    name
    for name in (
        "allgather",
        "allgather_coalesced",
        "allgather_into_tensor_coalesced",
        "_allgather_base",
        "allreduce",
        "allreduce_coalesced",
        "alltoall",
        "alltoall_base",
        "barrier",
        "broadcast",
        "gather",
        "monitored_barrier",
        "recv",
        "recv_anysource",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor_coalesced",
        "_reduce_scatter_base",
        "scatter",
        "send",
    )
    if name in vars(dist.ProcessGroup)
]


@contextlib.contextmanager
def _refuse_collectives() -> Iterator[None]:
    """Raise CollectiveInStepError if a step calls a collective, in which the other ranks don't take part."""
    originals = {name: vars(dist.ProcessGroup)[name] for name in _COLLECTIVES}

    def make_refusal(name: str) -> Callable[..., Any]:
        def refuse(*_args: Any, **_options: Any) -> Any:
            raise CollectiveInStepError(
                f"the step calls a collective ({name.strip('_')}), and a reference in one process has no other ranks"
            )

        return refuse

    try:
        for name in originals:
            setattr(dist.ProcessGroup, name, make_refusal(name))
        yield
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)

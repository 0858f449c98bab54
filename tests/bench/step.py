"""What dtkit adds to a step on an engine: its job next to a bare loop in the same process, and where the time goes.

Windows of both alternate in one process per rank, so that the machine's load affects both. No notebook and no
controller take part: :mod:`tests.bench.speed` measures with them.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtkit.engine.comm.process_group import Group
from dtkit.engine.data.batches import ShardedBatches
from dtkit.engine.job import Job
from dtkit.engine.lr_schedule import LearningRates
from dtkit.engine.observe.phase_timer import PhaseTimer
from dtkit.engine.rng import JobRng
from dtkit.engine.step_guard import StepGuard
from dtkit.strategies.data_parallel import DataParallel, _DataParallelWorker
from dtkit.strategies.flat_gradients import FlatGradients
from dtkit.strategies.loss import Loss
from dtkit.strategies.replicated import LossAccumulator, ReplicatedWorker
from tests.bench import ranks
from tests.bench.pairs import Sample, report
from tests.bench.work import SHORT, WORKS, Work, optimizer

if TYPE_CHECKING:
    from collections.abc import Callable

WINDOW, WINDOWS, WARM = 400, 15, 300
MAX_ADDED_MS, MIN_RATIO = 0.04, 0.97
_FIGURES = ("dtkit", "bare", "dtkit processor", "bare processor")
_PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "rows of the batch": ((ShardedBatches, "load_batches"),),
    "counts of the shards": ((ShardedBatches, "count_samples"),),
    "seed, and copies for undoing the step": ((StepGuard, "begin_step"), (JobRng, "begin_step")),
    "marks of the phases": ((PhaseTimer, "enter"), (PhaseTimer, "end_step")),
    "gradients set to None": ((ReplicatedWorker, "_zero_grad"),),
    "forward, with checks of the loss": ((Loss, "__call__"),),
    "sum of the loss": ((LossAccumulator, "record"), (ReplicatedWorker, "_make_step_result")),
    "gradients into one buffer": ((FlatGradients, "collect"),),
    "all-reduce": ((Group, "all_reduce"),),
    "norm, which decides whether it is finite": ((_DataParallelWorker, "_compute_grad_norm"),),
    "bytes sent": ((Group, "count_sent_bytes"),),
    "schedule of the rate": ((LearningRates, "step_after_update"),),
    "vote on the dispatch's end": ((Group, "start_all_reduce_any"),),
    "rows of the history, per dispatch": ((Job, "collect_results"),),
}


def step() -> bool:
    """Measure one and two ranks, and print where a step's time goes."""
    [alone] = ranks.run_on_ranks("tests.bench.step:measure", 1)
    added, added_processor = (
        Sample([1000 * (a - b) for a, b in zip(alone[ours], alone[bare], strict=True)])
        for ours, bare in (_FIGURES[:2], _FIGURES[2:])
    )
    print(f"  one rank, ms: {_describe(alone)}")
    print(f"  processor time that dtkit adds to a step on one rank: {added_processor} ms")
    met = report("wall time that dtkit adds to a step on one rank", added, unit="ms", most=MAX_ADDED_MS)
    both = ranks.run_on_ranks("tests.bench.step:measure", 2)
    for rank, figures in enumerate(both):
        print(f"  rank {rank} of two, ms: {_describe(figures)}")
    ratio = Sample([b / a for a, b in zip(both[0]["dtkit"], both[0]["bare"], strict=True)])
    met &= report("steps per second of two ranks against bare DDP", ratio, least=MIN_RATIO)
    for name, seconds in sorted(alone["parts"].items(), key=lambda pair: -pair[1]):
        print(f"  {1e6 * seconds:7.1f} us  {1e6 * both[0]['parts'][name]:7.1f} us  {name}")
    return met


def _describe(figures: dict[str, list[float]]) -> str:
    milliseconds = {name: Sample([1000 * value for value in figures[name]]) for name in _FIGURES}
    return "; ".join(f"{name} {sample}" for name, sample in milliseconds.items())


def measure(group: Group) -> dict[str, Any]:
    """Return seconds a step by window: wall time and processor time of both loops, and the parts of dtkit's."""
    work = WORKS[SHORT]
    job = ranks.make_job(group, work, DataParallel())
    loops: dict[str, Callable[[int], Any]] = {
        "dtkit": functools.partial(ranks.take_steps, job),
        "bare": make_bare_loop(group, work),
    }
    figures: dict[str, Any] = {name: [] for name in _FIGURES}
    for take_steps in loops.values():
        take_steps(WARM)
    for window in range(WINDOWS):
        for name, take_steps in list(loops.items())[:: 1 if window % 2 else -1]:
            group.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            take_steps(WINDOW)
            figures[name].append((time.perf_counter() - start) / WINDOW)
            figures[f"{name} processor"].append((time.process_time() - cpu_start) / WINDOW)
    return figures | {"parts": _time_parts(job)}


def make_bare_loop(group: Group, work: Work, *, compile_: bool = False) -> Callable[[int], None]:
    """Return a loop as in :mod:`tests.bench.bare`; one rank alone needs no DDP."""
    inputs, targets = (t[group.rank :: group.world_size] for t in work.data())
    model: nn.Module = work.model()
    if compile_:
        model = _CompiledModel(model)
    if group.world_size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    update, loss, batch = optimizer(list(model.parameters())), nn.CrossEntropyLoss(), work.batch // group.world_size
    order, position = torch.randperm(len(inputs)), 0

    def take_steps(steps: int) -> None:
        nonlocal order, position
        for _ in range(steps):
            if position + batch > len(inputs):
                order, position = torch.randperm(len(inputs)), 0
            rows = order[position : position + batch]
            position += batch
            update.zero_grad()
            loss(model(inputs[rows]), targets[rows]).backward()
            update.step()

    return take_steps


class _CompiledModel(nn.Module):
    """A model whose call is compiled. torch compiles no `nn.Sequential` by itself, since all its code is torch's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._call = torch.compile(lambda inputs: model(inputs))  # noqa: PLW0108 - torch traces no frame of its own

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._call(inputs)
        return result


def _time_parts(job: Job) -> dict[str, float]:
    """Return the seconds a step of each part, by timing its calls. Timing adds about 0.3 us to each call."""
    seconds = dict.fromkeys(_PARTS, 0.0)
    originals = [(owner, name, getattr(owner, name)) for calls in _PARTS.values() for owner, name in calls]
    for part, calls in _PARTS.items():
        for owner, name in calls:
            setattr(owner, name, _time_calls(getattr(owner, name), part, seconds))
    try:
        ranks.take_steps(job, 4 * WINDOW)
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
    return {part: total / (4 * WINDOW) for part, total in seconds.items()}


def _time_calls(function: Callable[..., Any], part: str, seconds: dict[str, float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[part] += time.perf_counter() - start

    return timed

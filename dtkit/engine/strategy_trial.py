"""Real steps of a copy of the model under a strategy, which a plan times.

Computing and communication, each measured by itself, don't add up to a step. A step also loads rows, runs Python
between operations, and waits for the slowest rank. Of a short step, this is most of the time.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util import timeouts
from dtkit.engine import memory
from dtkit.engine.benchmark import load_program
from dtkit.engine.data.worker_context import WorkerContext
from dtkit.engine.observe.clock import make_clock
from dtkit.engine.observe.phase_timer import PhaseTimer
from dtkit.engine.trial_training import take_batch
from dtkit.mesh import Mesh
from dtkit.rpc import pickling
from dtkit.strategies.module_modes import enter_training

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.engine.benchmark import BenchmarkContext
    from dtkit.engine.data.sources import RowSource
    from dtkit.strategies.base import Strategy, Worker

_NUM_WARMUP_STEPS, _MIN_STEPS, _MAX_STEPS = 3, 3, 200


def measure_strategy_step(
    context: BenchmarkContext,
    program: bytes,
    strategy: bytes,
    model: str,
    data: str,
    counts: Sequence[int],
    *,
    alone: bool = False,
) -> float:
    """Return the mean seconds of a step under a strategy. A collective, unless this rank takes all steps `alone`.

    `counts` has the samples of each replica in a step.
    """
    # unpickles: sent by the notebook in a call
    plan: Strategy = pickling.loads(strategy)
    try:
        with torch.random.fork_rng(devices=[] if context.device.type == "cpu" else [context.device]):
            trial = _StrategyTrial(context, program, plan, model, context.data[data][0], counts, alone=alone)
            seconds = trial.time_steps()
        return _average_cycle(seconds, getattr(plan, "every", 1))
    finally:
        memory.release_unused_memory()


def _average_cycle(seconds: Sequence[float], length: int) -> float:
    """Return the mean of each position's time, where every `length`-th step does more than others.

    A run has slow steps, too, so it isn't a median. But a tenth at each end is left out: such steps are accidents.
    """
    return statistics.mean(_average_without_ends(seconds[k::length]) for k in range(length))


def _average_without_ends(seconds: Sequence[float]) -> float:
    tenth = len(seconds) // 10
    return statistics.mean(sorted(seconds)[tenth : len(seconds) - tenth])


class _StrategyTrial:
    """A worker of a strategy, without a job around it."""

    def __init__(
        self,
        context: BenchmarkContext,
        program: bytes,
        strategy: Strategy,
        model: str,
        source: RowSource,
        counts: Sequence[int],
        *,
        alone: bool,
    ) -> None:
        self._device, self._source, self._counts = context.device, source, tuple(counts)
        self._group = None if alone else context.group
        self._cycle_length = getattr(strategy, "every", 1)
        self._phases = PhaseTimer(make_clock(context.device))
        mesh = Mesh({"dp": 1}) if alone else strategy.build_mesh(context.group.world_size)
        shard = 0 if alone else mesh.get_coordinates(context.group.rank)["dp"]
        is_pipeline = strategy.pipeline_schedule is not None
        module, loss_fn, factory, is_checkpointed = load_program(context, program, model, checkpoint=not is_pipeline)
        worker_context = WorkerContext(
            group=self._group,
            device=context.device,
            phases=self._phases,
            shards=[shard],
            mesh=mesh,
            make_sample_batch=lambda num_rows: take_batch(source, num_rows, torch.device("cpu")),
            max_local_samples=max(counts),
            recomputes_stages=is_checkpointed,
        )
        self._sizes = _divide_evenly(counts[shard], strategy.num_micro_batches)
        module = module if strategy.shards_model and not alone else copy.deepcopy(module)
        self._worker: Worker = strategy.setup(enter_training(module), loss_fn, factory, worker_context)

    def time_steps(self) -> list[float]:
        """Return the seconds of some steps after a few others, equally many on all ranks."""
        expected_s = self._average_over_ranks(min(self._time_step() for _ in range(_NUM_WARMUP_STEPS)))
        num_steps = round(timeouts.STRATEGY_BUDGET_S / expected_s)
        num_cycles = min(_MAX_STEPS, max(_MIN_STEPS, num_steps)) // self._cycle_length
        return [self._time_step() for _ in range(self._cycle_length * max(1, num_cycles))]

    def _time_step(self) -> float:
        begun = time.perf_counter()
        self._phases.enter("data")
        batches = [(size, take_batch(self._source, size, self._device)) for size in self._sizes]
        self._worker.step(batches, self._counts)
        self._phases.end_step()
        self._phases.clock.synchronize()
        return time.perf_counter() - begun

    def _average_over_ranks(self, seconds: float) -> float:
        if self._group is None:
            return seconds
        total: Any = self._group.all_reduce(torch.tensor([seconds], device=self._device))
        return float(total) / self._group.world_size


def _divide_evenly(count: int, parts: int) -> list[int]:
    """Return sizes of up to `parts` micro-batches, which differ by one at most."""
    parts = min(parts, count)
    return [count // parts + (k < count % parts) for k in range(parts)]

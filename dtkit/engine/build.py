"""Building of a job on this engine from what the user asked for."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.engine.checks import check_batch_norm, check_sync_batch_norm
from dtkit.engine.data.iterable import IterableBatches, StreamSource
from dtkit.engine.data.loader import LoadedBatches, make_row_batches, make_stream_batches
from dtkit.engine.data.sources import ArraySource
from dtkit.engine.data.worker_context import WorkerContext
from dtkit.engine.job import Job
from dtkit.engine.observe.clock import make_clock
from dtkit.engine.observe.phase_timer import PhaseTimer
from dtkit.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.batches import Shards
    from dtkit.engine.data.sources import RowSource
    from dtkit.strategies.base import Strategy, TrainingProgram
    from dtkit.types import JobPlan, LoadingOptions

EngineData = StreamSource | tuple["RowSource", "Shards"]
"""Data of an engine: a stream, or rows by number with their shards."""


def build_job(
    program: TrainingProgram,
    model: torch.nn.Module,
    data: EngineData,
    plan: JobPlan,
    loading_options: LoadingOptions,
    location: tuple[Group, torch.device],
    *,
    single_process: bool,
) -> Job:
    """Return a job before its first step. `model` is not changed. Raises ValueError if some step would fail."""
    context = _make_context(program.strategy, data, plan, location, single_process=single_process)
    job_model = model if program.strategy.shards_model and not single_process else copy.deepcopy(model)
    batch_source, program = _make_batch_source(data, job_model, program, plan, context, loading_options)
    seed = plan.seed + context.shards[0]  # ranks of one replica draw the same numbers, as dropout needs
    job = Job(job_model, program, batch_source, context, seed)
    if single_process:
        job.track_max_gradients()
    return job


def _make_context(
    strategy: Strategy, data: EngineData, plan: JobPlan, location: tuple[Group, torch.device], *, single_process: bool
) -> WorkerContext:
    """Return the environment of a job's worker."""
    group, device = location
    mesh = Mesh({"dp": group.world_size}) if single_process else strategy.build_mesh(group.world_size)
    return WorkerContext(
        group=None if single_process else group,
        device=device,
        phases=PhaseTimer(make_clock(device)),
        shards=range(group.world_size) if single_process else [mesh.get_coordinates(group.rank)["dp"]],
        mesh=mesh,
        make_sample_batch=None if isinstance(data, StreamSource) else _make_batch_sampler(data[0]),
        max_local_samples=-(-plan.batch_size // mesh.num_replicas),
    )


def _make_batch_sampler(source: RowSource) -> Callable[[int], Any]:
    """Return a function from a number of rows to a batch."""
    return lambda num_rows: source.take(np.arange(num_rows) % len(source))


def _make_batch_source(
    data: EngineData,
    model: torch.nn.Module,
    program: TrainingProgram,
    plan: JobPlan,
    context: WorkerContext,
    loading_options: LoadingOptions,
) -> tuple[LoadedBatches | IterableBatches, TrainingProgram]:
    """Return a job's batches, and its program, which may check targets now. Raises ValueError if a step would fail."""
    if isinstance(data, StreamSource):  # counts and targets are not known beforehand
        return make_stream_batches(data, plan, context, loading_options), program
    source, shards = data
    if isinstance(source, ArraySource):
        program = dataclasses.replace(program, loss_fn=program.loss_fn.with_checked_targets(source.targets))
    batches = make_row_batches(source, shards, plan, context, loading_options)
    if context.mesh.num_replicas < len(shards.sizes):  # ranks of one replica take the same rows
        batches.set_shares([1.0] * context.mesh.num_replicas)
    if context.group is not None:
        check_batch_norm(model.train(), program, source, batches)
        check_sync_batch_norm(model, program, batches, context.device)
    return batches, program

"""Building of a job on this engine from the user's request."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.engine.checks import check_batch_norm, check_embeddings, check_same_rows, check_sync_batch_norm
from dtkit.engine.data.iterable import IterableBatches, StreamSource
from dtkit.engine.data.loader import LoadedBatches, make_row_batches, make_stream_batches
from dtkit.engine.data.replica_link import ReplicaBatches, ReplicaLink, share_batch
from dtkit.engine.data.sample_seeds import SampleSeeds
from dtkit.engine.data.sampler import SampledShards
from dtkit.engine.data.sources import ArraySource, convert_floats, repeat_rows
from dtkit.engine.data.worker_context import WorkerContext
from dtkit.engine.job import Job
from dtkit.engine.label_weight import find_label_weight
from dtkit.engine.lr_schedule import check_length
from dtkit.engine.observe.clock import make_clock
from dtkit.engine.observe.phase_timer import PhaseTimer
from dtkit.engine.reference_job import ReferenceJob
from dtkit.engine.stream_trial import is_whole_batch
from dtkit.mesh import Mesh
from dtkit.strategies import router_loss
from dtkit.strategies.activation_checkpointing import checkpoint_blocks
from dtkit.strategies.module_modes import enter_training

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.batches import Shards
    from dtkit.engine.data.sources import RowSource
    from dtkit.rpc.job_plan import JobPlan, LoadingOptions
    from dtkit.rpc.reference import Reference
    from dtkit.strategies.base import Strategy, TrainingProgram
    from dtkit.strategies.loss import Loss

_NUM_SAMPLE_ROWS = 2  # for a trial of the model

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
    reference: Reference | None = None,
    in_float64: bool = False,
) -> Job:
    """Return a job before its first step. `model` is not changed. Raises ValueError if some step would fail.

    A `reference` is trained by this process alone. `in_float64` trains a copy of the model in float64.
    """
    if program.sampler is not None and not isinstance(data, StreamSource):
        source, shards = data
        data = source, SampledShards(program.sampler, len(source), len(shards.sizes), plan.seed)
    if not isinstance(data, StreamSource) and reference is None and not data[0].is_same_on_all_ranks:
        check_same_rows(data[0], plan.seed, location[0])
    context = _make_context(program, data, plan, location, single_process=reference is not None)
    is_sharded = program.strategy.shards_model and reference is None
    job_model = model if is_sharded and not in_float64 else copy.deepcopy(model)
    if program.activation_checkpointing and reference is None and program.strategy.pipeline_schedule is None:
        job_model = checkpoint_blocks(job_model, program.activation_checkpointing)
    loaded = _make_batch_source(data, plan, context, loading_options)
    holds_batches = isinstance(loaded, IterableBatches) and _take_batches_apart(loaded, job_model, program, context)
    context = dataclasses.replace(context, make_sample_batch=_make_batch_sampler(data, loaded, plan, context))
    if in_float64:
        job_model, context = job_model.double(), _use_float64(program, context)
    program = _weigh_labels(program, job_model, data, context)
    program = _check_schedule_length(program, plan, loaded)
    if not isinstance(data, StreamSource):  # counts and targets of a stream aren't known in advance
        program = _check_rows(data[0], job_model, program, loaded, context)
    if reference is None:
        check_embeddings(job_model, context.mesh.num_replicas)
    link = context.replica_link
    seed = plan.seed + context.shards[0]  # ranks of one replica draw the same numbers, as dropout needs
    if reference is not None:
        return ReferenceJob(job_model, program, loaded, context, seed, reference)
    job = Job(job_model, program, loaded if link is None else ReplicaBatches(loaded, link), context, seed)
    job.last_step = plan.steps - 1
    if location[0].rank == 0:
        job.notes += _describe_choices(program.loss_fn, type(model).__name__, holds_batches=holds_batches)
        job.notes += loaded.notes if isinstance(loaded, IterableBatches) else []
        job.notes += _describe_routers(model, program.strategy, context.mesh.num_replicas)
    return job


def _use_float64(program: TrainingProgram, context: WorkerContext) -> WorkerContext:
    """Convert the loss of a program to float64, such as its class weights. Return the context with such batches."""
    import torch

    if isinstance(loss := program.loss_fn.loss_fn, torch.nn.Module):
        loss.double()  # the program was unpickled for this job
    make_sample_batch = context.make_sample_batch
    assert make_sample_batch is not None
    return dataclasses.replace(
        context,
        float_dtype=torch.float64,
        make_sample_batch=lambda num_rows: convert_floats(make_sample_batch(num_rows), torch.float64),
    )


def _describe_choices(loss: Loss, model_name: str, *, holds_batches: bool) -> list[str]:
    """Return a line for each choice that dtkit has made for the user."""
    lines = []
    if holds_batches:
        lines.append("the stream yields whole batches: they are taken apart into samples")
    if loss.is_from_model:
        lines.append(f"the loss is the one that {model_name} returns: model(**batch).loss")
    if loss.label_weight is not None:
        lines.append(f"the loss is a mean over {loss.label_weight}: each rank counts by the number of its labels")
    return lines


def _describe_routers(model: torch.nn.Module, strategy: Strategy, num_replicas: int) -> list[str]:
    """Return a line if a mixture of experts has a routers' loss that ranks don't compute together."""
    has_parts = strategy.divides_batch and num_replicas * strategy.num_micro_batches > 1
    is_shared = strategy.shares_router_losses and bool(router_loss.find_namespaces(model))
    return [router_loss.PART_NOTE] if has_parts and not is_shared and router_loss.is_in_model(model) else []


def _take_batches_apart(
    batches: IterableBatches, model: torch.nn.Module, program: TrainingProgram, context: WorkerContext
) -> bool:
    """Return whether the items of a stream are whole batches, which are then taken apart. A collective."""
    item = batches.first_item
    is_batch = item is not None and is_whole_batch(item, model, program.loss_fn, batches.collate)
    if context.group is not None:
        is_batch = context.group.all_reduce_any(is_batch)
    if is_batch:
        batches.take_batches_apart()
    return is_batch


def _make_context(
    program: TrainingProgram,
    data: EngineData,
    plan: JobPlan,
    location: tuple[Group, torch.device],
    *,
    single_process: bool,
) -> WorkerContext:
    """Return the environment of a job's worker."""
    group, device = location
    strategy = program.strategy
    mesh = strategy.build_mesh(group.world_size)
    if single_process:
        mesh = Mesh({"dp": mesh.num_replicas})
    return WorkerContext(
        replica_link=None if single_process else _make_replica_link(strategy, data, mesh, location),
        group=None if single_process else group,
        device=device,
        phases=PhaseTimer(make_clock(device)),
        shards=range(mesh.num_replicas) if single_process else [mesh.get_coordinates(group.rank)["dp"]],
        mesh=mesh,
        max_local_samples=-(-plan.batch_size // mesh.num_replicas),
        recomputes_stages=bool(program.activation_checkpointing),
    )


def _make_replica_link(
    strategy: Strategy, data: EngineData, mesh: Mesh, location: tuple[Group, torch.device]
) -> ReplicaLink | None:
    """Return the link of ranks that need the same samples, if samples may differ between ranks. A collective."""
    is_same_on_all_ranks = not isinstance(data, StreamSource) and data[0].is_same_on_all_ranks
    if is_same_on_all_ranks or mesh.num_replicas == mesh.size:
        return None
    group, device = location
    return ReplicaLink(group, mesh, device, strategy.reduce_batch)


def _make_batch_source(
    data: EngineData, plan: JobPlan, context: WorkerContext, loading_options: LoadingOptions
) -> LoadedBatches | IterableBatches:
    """Return this rank's batches of a job."""
    if isinstance(data, StreamSource):
        return make_stream_batches(data, plan, context, loading_options)
    source, shards = data
    batches = make_row_batches(source, shards, plan, context, loading_options)
    if context.mesh.num_replicas < len(shards.sizes):  # ranks of one replica take the same rows
        batches.set_shares([1.0] * context.mesh.num_replicas)
    return batches


def _make_batch_sampler(
    data: EngineData, batch_source: LoadedBatches | IterableBatches, plan: JobPlan, context: WorkerContext
) -> Callable[[int], Any]:
    """Return a function from a number of rows to a batch that is the same on all ranks. A collective.

    If user code makes the samples, rank 0 makes a few, which are repeated.
    """
    if not isinstance(data, StreamSource) and data[0].is_same_on_all_ranks:
        source = data[0]
        return lambda num_rows: source.take(np.arange(num_rows) % len(source))

    def load_batch() -> Any:
        if isinstance(batch_source, IterableBatches):
            return batch_source.make_first_batch()
        assert not isinstance(data, StreamSource)
        rows = np.arange(min(_NUM_SAMPLE_ROWS, len(data[0])))
        return SampleSeeds(plan.seed).take(data[0], rows, step=0)

    batch = load_batch() if context.group is None else share_batch(load_batch, context.group, src=0)
    return lambda num_rows: repeat_rows(batch, num_rows)


def _weigh_labels(
    program: TrainingProgram, model: torch.nn.Module, data: EngineData, context: WorkerContext
) -> TrainingProgram:
    """Return the program, whose loss gets a weight if it is a mean over labels."""
    assert context.make_sample_batch is not None
    all_labels = None
    if not isinstance(data, StreamSource) and isinstance(data[0], ArraySource):
        all_labels = data[0].labels
    if program.loss_fn.is_manual:
        return program
    weight = find_label_weight(program.loss_fn, model, context.make_sample_batch, all_labels)
    return dataclasses.replace(program, loss_fn=dataclasses.replace(program.loss_fn, label_weight=weight))


def _check_schedule_length(
    program: TrainingProgram, plan: JobPlan, batch_source: LoadedBatches | IterableBatches
) -> TrainingProgram:
    """Return the program, which refuses a schedule that is shorter than the run. A stream may end earlier."""
    if program.lr_scheduler is None or isinstance(batch_source, IterableBatches):
        return program
    unit = program.lr_scheduler_interval
    num_steps = plan.steps if unit == "step" else plan.steps // batch_source.steps_per_epoch
    return dataclasses.replace(program, lr_scheduler=check_length(program.lr_scheduler, num_steps, unit))


def _check_rows(
    source: RowSource,
    model: torch.nn.Module,
    program: TrainingProgram,
    batch_source: LoadedBatches | IterableBatches,
    context: WorkerContext,
) -> TrainingProgram:
    """Return the program, which may check targets now. Raises ValueError if a step would fail."""
    if isinstance(source, ArraySource) and source.labels is not None:
        program = dataclasses.replace(program, loss_fn=program.loss_fn.with_checked_targets(source.labels))
    if context.group is not None:
        assert context.make_sample_batch is not None
        check_batch_norm(enter_training(model), program, context.make_sample_batch, batch_source, context.device)
        check_sync_batch_norm(model, program, batch_source, context.device)
    return program

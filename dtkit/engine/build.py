"""From what a user asked for to a job on this engine: where it works, what it is fed, what would fail is refused."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from dtkit.engine import node_info
from dtkit.engine.checks import check_batch_norm, check_sync_batch_norm
from dtkit.engine.data.iterable import IterableStream, StreamSource
from dtkit.engine.data.loader import Feeder, Loading, feed, feed_stream
from dtkit.engine.data.sources import ArraySource
from dtkit.engine.job import Job
from dtkit.engine.observe.phase_timer import Phases
from dtkit.mesh import Mesh
from dtkit.strategies.base import WorkerContext

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.batches import Shards
    from dtkit.engine.data.sources import Source
    from dtkit.strategies.base import Strategy, TrainingProgram
    from dtkit.types import JobPlan

Held = StreamSource | tuple["Source", "Shards"]
"""Data as an engine holds it: a stream, or rows by number and which of them belong to which shard."""


def assemble(
    program: TrainingProgram,
    model: torch.nn.Module,
    data: Held,
    plan: JobPlan,
    loading: Loading,
    place: tuple[Group, torch.device],
    *,
    alone: bool,
) -> Job:
    """A job that stands before its first step. `model` stays as it is."""
    setting = _setting(program.strategy, data, plan, place, alone=alone)
    network = model if program.strategy.shards_model and not alone else copy.deepcopy(model)
    stream, program = _feed(data, network, program, plan, setting, loading)
    seed = plan.seed + setting.shards[0]  # ranks that share a replica draw the same numbers, as dropout needs
    job = Job(network, program, stream, setting, seed)
    if alone:
        job.watch_gradients()
    return job


def _setting(
    strategy: Strategy, data: Held, plan: JobPlan, place: tuple[Group, torch.device], *, alone: bool
) -> WorkerContext:
    """Where a job's worker works."""
    group, device = place
    mesh = Mesh({"dp": group.world_size}) if alone else strategy.build_mesh(group.world_size)
    return WorkerContext(
        group=None if alone else group,
        device=device,
        phases=Phases(node_info.clock(device)),
        shards=range(group.world_size) if alone else [mesh.coordinates(group.rank)["dp"]],
        mesh=mesh,
        make_sample_batch=None if isinstance(data, StreamSource) else _sampler(data[0]),
        max_local_samples=-(-plan.batch_size // mesh.replicas),
    )


def _sampler(source: Source) -> Callable[[int], Any]:
    """A function that gives a batch of so many rows."""
    return lambda rows: source.take(np.arange(rows) % len(source))


def _feed(
    data: Held,
    network: torch.nn.Module,
    program: TrainingProgram,
    plan: JobPlan,
    setting: WorkerContext,
    loading: Loading,
) -> tuple[Feeder | IterableStream, TrainingProgram]:
    """The batches of a job, looked at for what would fail; and its program, which may know the targets by then."""
    if isinstance(data, StreamSource):  # its counts and targets are not known beforehand
        return feed_stream(data, plan, setting, loading), program
    source, shards = data
    if isinstance(source, ArraySource):
        program = dataclasses.replace(program, loss_fn=program.loss_fn.with_checked_targets(source.targets))
    stream = feed(source, shards, plan, setting, loading)
    if setting.mesh.replicas < len(shards.sizes):  # ranks of one replica take the same rows
        stream.set_shares([1.0] * setting.mesh.replicas)
    if setting.group is not None:
        check_batch_norm(network.train(), program, source, stream)
        check_sync_batch_norm(network, program, stream, setting.device)
    return stream, program

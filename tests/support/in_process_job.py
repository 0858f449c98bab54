"""Job in this process that trains all shards, without a process group."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dtkit.data.partition import Partition
from dtkit.engine.data.batches import ShardedBatches, Shards
from dtkit.engine.data.sources import as_source
from dtkit.engine.data.worker_context import WorkerContext
from dtkit.engine.job import Job
from dtkit.engine.observe.clock import make_clock
from dtkit.engine.observe.phase_timer import PhaseTimer
from dtkit.rpc.job_plan import JobPlan
from dtkit.strategies.base import TrainingProgram
from dtkit.strategies.data_parallel import DataParallel
from dtkit.strategies.loss import Loss

CPU = torch.device("cpu")


def data(rows: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 4, generator=generator, dtype=torch.float64), torch.arange(rows) % 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make_job(model: nn.Module | None = None, rows: Any = None, loss: Any = None, **options: Any) -> Job:
    source = as_source(data() if rows is None else rows)
    part = Partition(len(source), 2)
    plan = JobPlan(options.get("batch_size", 6), 100, options.get("shuffle", "shard"), 0)
    stream = ShardedBatches(source, Shards(part.flatten_indices(), part.sizes), plan, [0, 1])
    context = WorkerContext(None, CPU, PhaseTimer(make_clock(CPU)), [0, 1])
    program_loss = (
        Loss(loss or nn.CrossEntropyLoss(), None)
        if "training_step" not in options
        else Loss(None, options["training_step"])
    )
    program = TrainingProgram(
        program_loss,
        options.get("optimizer", sgd),
        options.get("strategy", DataParallel()),
        options.get("lr_scheduler"),
        options.get("every", "step"),
    )
    return Job(model or net(), program, stream, context, seed=0)

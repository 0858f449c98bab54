"""The references of :mod:`tests.bench.strategies`: torch's own engines in bare loops under torchrun.

Each loop does the same as a careful user's script: shuffled batches by index, forward and backward by torch's engine,
the optimizer's update. It keeps no records and checks nothing. The script takes a window of steps for each line from a
named pipe, so that it alternates with dtkit; between windows both ranks block without using a processor. For each
window it prints the steps per second.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.bench.work import MICRO_BATCHES, PIPELINE, SHARDED, TENSOR, WORKS, Work, colwise_rowwise, halves, optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Step = Callable[[torch.Tensor, torch.Tensor], None]


def pipeline(work: Work) -> Step:
    """Return a step of 1F1B over two stages."""
    rank = dist.get_rank()
    stage = PipelineStage(halves(work)[rank], rank, dist.get_world_size(), torch.device("cpu"))
    update = optimizer(list(stage.submod.parameters()))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.CrossEntropyLoss())

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        update.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=[])
        update.step()

    return step


def tensor(work: Work) -> Step:
    """Return a step of a model whose layers are alternately colwise and rowwise."""
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan = {name: styles[style]() for name, style in colwise_rowwise(work).items()}
    return _make_step(parallelize_module(work.model(), init_device_mesh("cpu", (dist.get_world_size(),)), plan))


def sharded(work: Work) -> Step:
    """Return a step of FSDP2, applied layer by layer."""
    model, mesh = work.model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return _make_step(fully_shard(model, mesh=mesh))


def _make_step(model: nn.Module) -> Step:
    update, loss = optimizer(list(model.parameters())), nn.CrossEntropyLoss()

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        update.zero_grad()
        loss(model(inputs), targets).backward()
        update.step()

    return step


def batches(work: Work, *, shards: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's batches, shuffled again in each epoch; with `shards`, from its shard of the rows."""
    inputs, targets = (t[dist.get_rank() % shards :: shards] for t in work.data())
    batch = work.batch // shards
    shuffle = torch.Generator().manual_seed(0)  # ranks that share samples need the same order
    while True:
        order = torch.randperm(len(inputs), generator=shuffle)
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            yield inputs[rows], targets[rows]


ENGINES = {PIPELINE: pipeline, TENSOR: tensor, SHARDED: sharded}


def main(engine: str, name: str, pipe: str) -> None:
    """Take a window of steps for each line from the pipe."""
    dist.init_process_group("gloo")
    work = WORKS[name]
    step, data = ENGINES[engine](work), batches(work, shards=dist.get_world_size() if engine == SHARDED else 1)
    for _ in range(work.warm):
        step(*next(data))
    lines = Path(pipe).open() if dist.get_rank() == 0 else None  # noqa: SIM115 - open while the process lives
    go = torch.ones(1)
    while True:
        if lines is not None:
            go.fill_(bool(lines.readline()))
        dist.broadcast(go, src=0)
        if not go:
            break
        start = time.perf_counter()
        for _ in range(work.steps):
            step(*next(data))
        dist.barrier()
        if lines is not None:
            print(work.steps / (time.perf_counter() - start), flush=True)
    os._exit(0)  # as in bare.py


if __name__ == "__main__":
    main(*sys.argv[1:])

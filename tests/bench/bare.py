"""The reference: a bare DistributedDataParallel loop under torchrun, which prints its steps per second.

The loop does the same as a careful user's script: shuffled batches of its shard by index, loss, backward, update. It
keeps no records and checks nothing.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.bench.work import WORKS, optimizer


def main(name: str) -> None:
    work = WORKS[name]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs, targets = (t[rank::world] for t in work.data())
    model = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)
    update, loss = optimizer(list(model.parameters())), nn.CrossEntropyLoss()
    batch = work.batch // world
    order = torch.randperm(len(inputs))
    start_time = 0.0
    for step in range(work.warm + work.steps):
        if step == work.warm:
            dist.barrier()
            start_time = time.perf_counter()
        start = step * batch % len(inputs)
        if start == 0:
            order = torch.randperm(len(inputs))
        rows = order[start : start + batch]
        update.zero_grad()
        loss(model(inputs[rows]), targets[rows]).backward()
        update.step()
    if rank == 0:
        print(work.steps / (time.perf_counter() - start_time), flush=True)
    dist.barrier()
    os._exit(0)  # torch may abort while it destroys a group that DDP still uses


main(sys.argv[1])

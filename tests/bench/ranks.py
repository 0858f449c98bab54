"""Two ranks as plain processes around dtkit's engine code: for what is measured without a notebook and a cluster.

`together("tests.bench.link:train")` starts both. Each forms the process group, calls that function with it and prints
what it returns as JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from dtkit.data.partition import Partition
from dtkit.engine import node_info
from dtkit.engine.comm.process_group import Group, find_loopback_interface
from dtkit.engine.data.batches import ShardedBatches, Shards
from dtkit.engine.data.sources import as_source
from dtkit.engine.data.worker_context import WorkerContext
from dtkit.engine.job import Job
from dtkit.engine.observe.phase_timer import PhaseTimer
from dtkit.strategies.base import TrainingProgram
from dtkit.strategies.loss import Loss
from dtkit.types import GroupSpec, JobPlan
from tests.bench.work import optimizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dtkit.strategies.base import Strategy
    from tests.bench.work import Work

WORLD_SIZE = 2
LIMIT_S = 300.0  # for all that two ranks do together
COLLECTIVE_S = 60.0


def together(task: str, *, prefixes: Sequence[Sequence[str]] = ((), ()), interface: str | None = None) -> list[Any]:
    """What `task`, as "module:function", returned on each rank. `prefixes`: commands to start each rank by."""
    with tempfile.TemporaryDirectory() as folder:
        what = [
            sys.executable,
            "-m",
            "tests.bench.ranks",
            task,
            str(Path(folder, "store")),
            interface or find_loopback_interface(),
        ]
        with contextlib.ExitStack() as stack:
            started = [stack.enter_context(_started([*prefix, *what, str(r)])) for r, prefix in enumerate(prefixes)]
            return [_answer(process, rank) for rank, process in enumerate(started)]


@contextlib.contextmanager
def _started(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def _answer(process: subprocess.Popen[str], rank: int) -> Any:
    out, errors = process.communicate(timeout=LIMIT_S)
    if process.returncode:
        raise RuntimeError(f"rank {rank} failed:\n{errors[-3000:]}")
    return json.loads(out.splitlines()[-1])


def job(group: Group, work: Work, strategy: Strategy) -> Job:
    """This rank's part of a training, as a session makes it."""
    device = torch.device("cpu")
    source = as_source(work.data())
    part = Partition(len(source), group.world_size)
    plan = JobPlan(work.batch, 1_000_000, "shard", seed=0)
    stream = ShardedBatches(source, Shards(part.flatten_indices(), part.sizes), plan, [group.rank])
    mesh = strategy.build_mesh(group.world_size)
    setting = WorkerContext(group, device, PhaseTimer(node_info.make_clock(device)), shards=[group.rank], mesh=mesh)
    program = TrainingProgram(Loss(nn.CrossEntropyLoss(), None), optimizer, strategy)
    return Job(work.model(), program, stream, setting, seed=group.rank)


def take(made: Job, steps: int) -> np.ndarray:
    """Take so many steps in as many dispatches as they need (one ends early where steps are slow); their rows."""
    rows, goal = [], made.step + steps
    while made.step < goal:
        made.advance(goal - made.step)
        rows.append(made.collect_results().rows)
    return np.concatenate(rows)


def main(task: str, store: str, interface: str, rank: str) -> None:
    torch.set_num_threads(1)
    module, _, function = task.partition(":")
    group = Group(GroupSpec(int(rank), WORLD_SIZE, 0, "gloo", "cpu", store, interface, 1, COLLECTIVE_S))
    found = getattr(importlib.import_module(module), function)(group)
    print(json.dumps(found), flush=True)
    group.barrier()
    os._exit(0)  # as in bare.py: DDP still holds the group


if __name__ == "__main__":
    main(*sys.argv[1:])

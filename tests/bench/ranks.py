"""Two ranks as plain processes around dtkit's engine code, for measurements without notebook and cluster.

`run_on_two_ranks("tests.bench.link:train")` starts both. Each rank forms the process group, calls that function with
it, and prints the result as JSON.
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

from dtkit._util.resources import find_loopback_interface
from dtkit.data.partition import Partition
from dtkit.engine.comm.process_group import Group
from dtkit.engine.data.batches import ShardedBatches, Shards
from dtkit.engine.data.sources import as_source
from dtkit.engine.data.worker_context import WorkerContext
from dtkit.engine.job import Job
from dtkit.engine.observe.clock import make_clock
from dtkit.engine.observe.phase_timer import PhaseTimer
from dtkit.messages import GroupSpec
from dtkit.rpc.job_plan import JobPlan
from dtkit.strategies.base import TrainingProgram
from dtkit.strategies.loss import Loss
from tests.bench.work import optimizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dtkit.strategies.base import Strategy
    from tests.bench.work import Work

WORLD_SIZE = 2
LIMIT_S = 300.0  # for a whole measurement
COLLECTIVE_S = 60.0


def run_on_two_ranks(
    task: str, *, prefixes: Sequence[Sequence[str]] = ((), ()), interface: str | None = None
) -> list[Any]:
    """Return the results of `task`, a "module:function", by rank. Each rank has a prefix of its command."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "tests.bench.ranks",
            task,
            str(Path(folder, "store")),
            interface or find_loopback_interface(),
            str(len(prefixes)),
        ]
        with contextlib.ExitStack() as stack:
            started = [
                stack.enter_context(_start_rank([*prefix, *command, str(r)])) for r, prefix in enumerate(prefixes)
            ]
            return [_read_result(process, rank) for rank, process in enumerate(started)]


def run_on_ranks(task: str, num_ranks: int) -> list[Any]:
    """Return the results of `task` by rank, for any number of ranks."""
    return run_on_two_ranks(task, prefixes=((),) * num_ranks)


@contextlib.contextmanager
def _start_rank(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def _read_result(process: subprocess.Popen[str], rank: int) -> Any:
    out, errors = process.communicate(timeout=LIMIT_S)
    if process.returncode:
        raise RuntimeError(f"rank {rank} failed:\n{errors[-3000:]}")
    return json.loads(out.splitlines()[-1])


def make_job(group: Group, work: Work, strategy: Strategy) -> Job:
    """Return this rank's job of a training, as a session builds it."""
    device = torch.device("cpu")
    source = as_source(work.data())
    part = Partition(len(source), group.world_size)
    plan = JobPlan(work.batch, 1_000_000, "shard", seed=0)
    stream = ShardedBatches(source, Shards(part.flatten_indices(), part.sizes), plan, [group.rank])
    mesh = strategy.build_mesh(group.world_size)
    context = WorkerContext(group, device, PhaseTimer(make_clock(device)), shards=[group.rank], mesh=mesh)
    program = TrainingProgram(
        Loss(nn.CrossEntropyLoss(), None).with_checked_targets(source.labels), optimizer, strategy
    )
    return Job(work.model(), program, stream, context, seed=group.rank)


def take_steps(job: Job, steps: int) -> np.ndarray:
    """Take `steps` steps and return their rows. Slow dispatches end early, so several may be needed."""
    rows, goal = [], job.step + steps
    while job.step < goal:
        job.advance(goal - job.step)
        rows.append(job.collect_results().rows)
    return np.concatenate(rows)


def main(task: str, store: str, interface: str, world_size: str, rank: str) -> None:
    torch.set_num_threads(1)
    module, _, function = task.partition(":")
    group = Group(GroupSpec(int(rank), int(world_size), 0, "gloo", "cpu", store, interface, 1, COLLECTIVE_S))
    result = getattr(importlib.import_module(module), function)(group)
    print(json.dumps(result), flush=True)
    group.barrier()
    os._exit(0)  # as in bare.py: DDP still holds the group


if __name__ == "__main__":
    main(*sys.argv[1:])

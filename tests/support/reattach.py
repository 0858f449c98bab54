"""A notebook in another process, and the check that a second notebook continues its run exactly."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psutil

import dtkit
from dtkit.health.status import get_status_path
from tests.support.oracle import BATCH, BOUND, SEED, data, max_difference, mean_loss, mlp, momentum

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch


STEPS = 2000


REPLICAS = dtkit.DataParallel()


NOTEBOOK = f"""
import sys, threading
import dtkit
from tests.support import oracle

class Net(oracle.torch.nn.Module):  # defined in __main__: pickled by value
    def __init__(self):
        super().__init__()
        self.inner = oracle.mlp()

    def forward(self, x):
        return self.inner(x)

if __name__ == "__main__":
    cluster = dtkit.Cluster(2, threads=1, lease=30)
    options = dict(loss=oracle.mean_loss, optimizer=oracle.momentum, batch_size={BATCH}, steps={STEPS}, seed={SEED})
    run = cluster.train(Net(), oracle.data(), shuffle="global", **options)
    started = threading.Event()
    run.subscribe(lambda: run.status.step > 100 and started.set())
    started.wait(60)
    print("ready", flush=True)
    sys.stdin.read()
    print(type(run.exception).__name__, run.exception, flush=True)
    cluster.close()
"""


@contextlib.contextmanager
def notebook(code: str = NOTEBOOK) -> Iterator[subprocess.Popen[str]]:
    """Start another process with a cluster that trains."""
    pipe: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipe) as process:
        try:
            assert process.stdout is not None
            assert any(line == "ready\n" for line in process.stdout)
            yield process
        finally:
            process.kill()


def list_steps(run: dtkit.Run, *, repeated: bool) -> list[int]:
    """Return the steps of the history in order; once each where some may be `repeated`."""
    steps = run.history.totals()["step"].tolist()
    return sorted(set(steps)) if repeated else steps


def check_run_continues(cluster: dtkit.Cluster, strategy: dtkit.Strategy = REPLICAS, *, repeated: bool = False) -> None:
    """Check that the run continues with its whole history, to the parameters of an undisturbed run.

    Steps may be `repeated` where the run continues from before its last row.
    """
    run = cluster.current_run
    assert run is not None
    assert run.status.state is dtkit.types.State.PAUSED
    assert run.status.step > 100
    assert list_steps(run, repeated=repeated) == list(range(len(run.history.totals()) if repeated else run.status.step))
    assert run.status.elapsed_s > 0
    run.resume()
    run.wait(120)
    assert list_steps(run, repeated=repeated) == list(range(STEPS))
    state = {name.removeprefix("inner."): value for name, value in run.model.state_dict().items()}
    assert max_difference(state, get_undisturbed_state(cluster, strategy)) <= BOUND


_UNDISTURBED: dict[tuple[str, int], dict[str, torch.Tensor]] = {}


def get_undisturbed_state(cluster: dtkit.Cluster, strategy: dtkit.Strategy) -> dict[str, torch.Tensor]:
    """Return the final parameters of an undisturbed run, trained once for each strategy and world size."""
    key = repr(strategy), cluster.world_size
    if key not in _UNDISTURBED:
        options: dict[str, Any] = {"loss": mean_loss, "optimizer": momentum, "batch_size": BATCH, "seed": SEED}
        run = cluster.train(mlp(), data(), strategy=strategy, shuffle="global", steps=STEPS, **options)
        run.wait(60)
        _UNDISTURBED[key] = run.model.state_dict()
    return _UNDISTURBED[key]


def get_engine_process(folder: Path, rank: int) -> psutil.Process:
    return psutil.Process(json.loads(get_status_path(folder, rank).read_text())["pid"])

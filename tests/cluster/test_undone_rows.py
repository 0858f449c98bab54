"""A run that goes back to a snapshot, because an engine was killed, and takes no step after that."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

import dtkit
from dtkit.dashboard.live.messages import MessageBuilder
from dtkit.types import State
from tests.support.oracle import BATCH, SEED
from tests.support.reattach import notebook

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster

EVERY, TAKEN = 20, 25
NOTEBOOK = f"""
import os, signal, sys
import dtkit
from dtkit.dashboard.live.messages import MessageBuilder
from tests.support import oracle

if __name__ == "__main__":
    cluster = dtkit.Cluster(2, threads=1, lease=30)
    options = dict(loss=oracle.mean_loss, optimizer=oracle.momentum, batch_size={BATCH}, steps=100, seed={SEED})
    options |= dict(strategy=dtkit.Sharded(), snapshot_every={EVERY}, shuffle="global", start=False)
    run = cluster.train(oracle.mlp(), oracle.data(), **options)
    builder = MessageBuilder(run)
    run.step({TAKEN})
    assert builder.build_change().content["curves"]["buckets"] == {TAKEN}
    os.kill(cluster.nodes[1].pid, signal.SIGKILL)
    run.repair()
    run.stop()
    message = builder.build_change().content
    print("ready", flush=True)
    print(run.status.step, run.history.num_steps, message["kind"], message["curves"]["buckets"], flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_undone_steps_count_nowhere_before_one_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    with notebook(NOTEBOOK) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split() == [str(EVERY), str(EVERY), "snapshot", str(EVERY)]
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        with dtkit.attach() as cluster:
            run = cluster.current_run
            assert run is not None
            assert (run.status.state, run.status.step) == (State.STOPPED, EVERY)
            assert run.history.totals()["step"].tolist() == list(range(EVERY))
            assert f"{EVERY} steps" in repr(run.history)
            assert MessageBuilder(run).build_snapshot().content["curves"]["buckets"] == EVERY

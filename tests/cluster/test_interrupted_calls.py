"""Interrupted calls (the kernel's interrupt button) next to a run, which must not be disturbed."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import dtkit
from dtkit.health import stacks
from dtkit.types import State
from tests.support.marks import slow
from tests.support.small import LONG, check_usable, data, train
from tests.support.waiting import wait_until, wait_until_run

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

pytestmark = pytest.mark.cluster


@pytest.fixture
def run(cluster2: dtkit.Cluster) -> dtkit.Run:
    """Pipeline run with two dispatches of many steps in flight."""
    run = train(cluster2, strategy=dtkit.Pipeline(2, micro_batches=2), steps=LONG)
    wait_until_run(run, lambda: run.status.step > 300)
    return run


def check_undisturbed(run: dtkit.Run) -> None:
    """Check that the run continues, and that no step was repeated."""
    wait_until_run(run, lambda step=run.status.step: run.status.step > step + 100)
    assert run.status.state is State.RUNNING
    run.stop()
    rows = run.history.rows()
    for rank in (0, 1):
        assert np.array_equal(rows["step"][rows["rank"] == rank], np.arange(run.status.step))
    log = " ".join(event.text for event in run.history.events)
    assert "go back" not in log
    assert "interrupted" not in log


@pytest.mark.parametrize("call", [lambda run: run.model, slow(lambda run: run.memory())], ids=["model", "memory"])
@pytest.mark.slow
def test_interrupting_a_queued_call_leaves_the_steps_running(
    cluster2: dtkit.Cluster, run: dtkit.Run, monkeypatch: pytest.MonkeyPatch, call: Callable[[dtkit.Run], Any]
):
    generation, gather_replies = cluster2._engine_group.membership.generation, cluster2._engine_group.gather_replies

    def interrupt_and_gather(*args: Any, **options: Any) -> Any:
        """Interrupt the main thread as soon as it waits."""
        if threading.current_thread() is threading.main_thread():
            os.kill(os.getpid(), signal.SIGINT)
        return gather_replies(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(cluster2._engine_group, "gather_replies", interrupt_and_gather)
        with pytest.raises(KeyboardInterrupt):
            call(run)
    assert run.memory().rows
    assert cluster2._engine_group.membership.generation == generation
    check_undisturbed(run)
    check_usable(cluster2)


@pytest.mark.slow
def test_interrupting_an_active_call_ends_it_on_the_engines(cluster2: dtkit.Cluster, run: dtkit.Run):
    notebook = os.getpid()  # which tries metrics first

    def compute_endlessly(_output: torch.Tensor, _target: torch.Tensor) -> float:
        while os.getpid() != notebook:
            pass
        return 0.0

    def interrupt() -> None:
        wait_until(lambda: read_op(cluster2, cluster2.nodes[-1]) == "evaluate", 30)  # the first stage is done at once
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run.evaluate(data(), {"endless": compute_endlessly})
    thread.join(10)
    assert run.evaluate(data()).samples == len(data()[0])
    check_undisturbed(run)
    check_usable(cluster2)


def read_op(cluster: dtkit.Cluster, node: Any) -> str | None:
    status = stacks.read_status(cluster.folder, node)
    return None if status is None else status.op

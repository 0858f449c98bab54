"""A call that a cell gives up (the kernel's interrupt button) while a run trains: the run is not disturbed by it."""

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
from tests.support.waiting import until, until_run

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

pytestmark = pytest.mark.cluster


@pytest.fixture
def run(cluster2: dtkit.Cluster) -> dtkit.Run:
    """One of which each rank has a part, with two dispatches of many steps under way."""
    found = train(cluster2, strategy=dtkit.Pipeline(2, micro_batches=2), steps=LONG)
    until_run(found, lambda: found.status.step > 300)
    return found


def check_undisturbed(run: dtkit.Run) -> None:
    """It goes on, and no step was taken twice."""
    until_run(run, lambda step=run.status.step: run.status.step > step + 100)
    assert run.status.state is State.RUNNING
    run.stop()
    rows = run.history.rows()
    for rank in (0, 1):
        assert np.array_equal(rows["step"][rows["rank"] == rank], np.arange(run.status.step))
    told = " ".join(event.text for event in run.history.events)
    assert "go back" not in told
    assert "interrupted" not in told


@pytest.mark.parametrize("ask", [lambda run: run.model, slow(lambda run: run.memory())], ids=["model", "memory"])
def test_a_call_that_stands_in_line_behind_steps_breaks_none_off(
    cluster2: dtkit.Cluster, run: dtkit.Run, monkeypatch: pytest.MonkeyPatch, ask: Callable[[dtkit.Run], Any]
):
    generation, collect = cluster2.generation, cluster2.gather_replies

    def pressed(*args: Any, **options: Any) -> Any:
        """The cell waits, and the button is pressed at once."""
        if threading.current_thread() is threading.main_thread():
            os.kill(os.getpid(), signal.SIGINT)
        return collect(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(cluster2, "gather_replies", pressed)
        with pytest.raises(KeyboardInterrupt):
            ask(run)
    assert run.memory().rows
    assert cluster2.generation == generation
    check_undisturbed(run)
    check_usable(cluster2)


def endless(_output: torch.Tensor, _target: torch.Tensor) -> None:
    while True:
        pass


def test_a_call_that_is_being_done_is_broken_off(cluster2: dtkit.Cluster, run: dtkit.Run):
    def press() -> None:
        until(lambda: all(at(cluster2, node) == "evaluate" for node in cluster2.nodes), 30)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press, daemon=True)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        run.evaluate(data(), {"endless": endless})
    presser.join(10)
    assert run.evaluate(data()).samples == len(data()[0])
    check_undisturbed(run)
    check_usable(cluster2)


def at(cluster: dtkit.Cluster, node: Any) -> str | None:
    found = stacks.read_status(cluster.folder, node)
    return None if found is None else found.op

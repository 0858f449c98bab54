"""Rows of steps whose results no reply brought, or that the notebook could not store: no history lacks them."""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import dtkit
from tests.support.reattach import NOTEBOOK, check_run_continues, list_steps, notebook
from tests.support.recovery import wait_for_step
from tests.support.small import LONG, train
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from dtkit.messages import Reply

pytestmark = pytest.mark.cluster


class LostReply:
    """Transport's `send` from which one rank's reply to a dispatch is lost, once `is_losing` is set."""

    def __init__(self, transport: Any, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._send, self._rank, self.is_losing = transport.send, rank, False
        self.reply: Future[Reply[Any]] | None = None
        self.awaited = Future[Any]()
        """What the notebook waits for instead of the reply."""
        monkeypatch.setattr(transport, "send", self._send_and_lose)

    def _send_and_lose(self, rank: int, message: bytes, listen: Any = None) -> Future[Reply[Any]]:
        reply = self._send(rank, message, listen)
        if not self.is_losing or rank != self._rank or self.reply or pickle.loads(message).op != "advance":
            return reply
        self.reply = reply
        return self.awaited


def list_ranks_of_steps(run: dtkit.Run) -> set[int]:
    """Return the numbers of ranks that have a row of a step."""
    return set(run.history.totals()["ranks"].tolist())


@pytest.mark.slow
def test_steps_whose_reply_was_lost_with_an_engine_are_in_the_history(monkeypatch: pytest.MonkeyPatch):
    """The engine ended after it had stored the results, and before their way to the notebook."""
    with dtkit.Cluster(2, threads=1) as cluster:
        transport: Any = cluster._engine_group.transport
        lost = LostReply(transport, 1, monkeypatch)
        run = train(cluster, steps=LONG)
        wait_for_step(run, 50)
        lost.is_losing = True
        wait_until(lambda: lost.reply is not None and lost.reply.done(), 30)
        assert lost.reply is not None
        transport.kill([1])
        lost.awaited.set_result(transport._make_lost_reply(1))
        wait_until(lambda: "repair" in [event.kind for event in run.history.events], 60)
        run.pause(timeout=60)
        assert list_steps(run, repeated=False) == list(range(run.status.step))
        rows, lost_rows = run.history.rows(), lost.reply.result(0).value[0].rows
        own_steps = rows["step"][rows["rank"] == 1]
        assert np.isin(lost_rows["step"], own_steps).all()
        assert len(np.unique(own_steps)) == len(own_steps)


FULL_DISK = """
    def refuse(*_):
        raise OSError(28, "No space left on device")

    started.wait(60)
    run.history.run_log._rows._write = refuse
    full = threading.Event()
    stop = run.status.step + 200
    run.subscribe(lambda: run.status.step > stop and full.set())
    full.wait(60)
"""
CUT_WRITE = """
    import os
    from dtkit._util import files
    from dtkit.history.history import ROW_DTYPE

    started.wait(60)
    pwrite = os.pwrite

    def write_and_die(descriptor, data, offset):
        if descriptor == run.history.run_log._rows._descriptor:
            pwrite(descriptor, data[:-ROW_DTYPE.itemsize], offset)
            print("ready", flush=True)
            os.kill(os.getpid(), 9)
        return pwrite(descriptor, data, offset)

    files.os.pwrite = write_and_die
    threading.Event().wait(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("death", [FULL_DISK, CUT_WRITE], ids=["on a full disk", "while it wrote"])
def test_a_kernel_that_died_before_it_stored_rows_has_left_them_to_the_next(
    death: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    with notebook(NOTEBOOK.replace("    started.wait(60)\n", death.lstrip("\n"))) as process:
        process.kill()
        process.wait(10)
        with dtkit.attach() as cluster:
            assert cluster.current_run is not None
            assert list_ranks_of_steps(cluster.current_run) == {2}
            check_run_continues(cluster)

"""The transports over ipyparallel: what they report of an engine that is gone."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from ipyparallel.error import EngineError

from dtkit.cluster.launched_transport import LaunchedTransport
from dtkit.cluster.transport import IpyparallelTransport
from dtkit.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

CLIENT: Any = SimpleNamespace(_engines={}, ids=[], _queue_handlers={"apply_reply": print})


def lost_message(transport: IpyparallelTransport) -> str:
    failure = transport.send(0, b"").result(0).failure
    assert failure is not None
    assert failure.kind == "lost"
    return failure.message


def make_launched(ended_jobs: str, exit_codes: Mapping[int, int] | None = None) -> LaunchedTransport:
    exit_codes = {} if exit_codes is None else exit_codes
    transport = LaunchedTransport.__new__(LaunchedTransport)
    IpyparallelTransport.__init__(transport, CLIENT, [7])
    transport._processes = {}
    transport._launcher = SimpleNamespace(
        describe_ended_jobs=lambda: ended_jobs, describe_host=lambda engine_id: "", get_exit_code=exit_codes.get
    )
    return transport


def test_the_message_of_a_lost_engine_names_the_job_that_has_ended():
    assert "silent for 8 s (Slurm job 17 is CANCELLED). cluster.repair()" in lost_message(
        make_launched("Slurm job 17 is CANCELLED")
    )


def test_the_message_of_a_lost_engine_has_the_remedy_of_a_started_cluster():
    transport = make_launched("")
    assert lost_message(transport) == (
        "the engine of rank 0 is gone: its process has ended, or was silent for 8 s. cluster.repair() starts another "
        "one in its place"
    )


def test_an_error_says_whether_a_lost_engines_process_has_ended():
    transport = make_launched("")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        transport.track_processes({0: process.pid})
        assert "its process runs, but was silent for 8 s. " in lost_message(transport)
        process.kill()
    assert "its process has ended. cluster.repair()" in lost_message(transport)


def test_error_of_an_engine_that_has_ended_gives_its_exit_status():
    exit_codes: dict[int, int] = {}
    transport = make_launched("", exit_codes)
    with subprocess.Popen([sys.executable, "-c", "input(); raise SystemExit(3)"], stdin=subprocess.PIPE) as process:
        transport.track_processes({0: process.pid})
        process.communicate(b"\n")
    exit_codes[process.pid] = process.returncode
    assert lost_message(transport) == (
        "the engine of rank 0 is gone: its process has ended (exit status 3). If your code ended it, correct that "
        "first: another engine would end in the same way. cluster.repair() starts another one in its place"
    )
    assert transport.describe_loss(0).exit_code == 3


def test_the_message_of_an_engine_that_was_killed_on_purpose_says_so():
    transport = make_launched("")
    alive: Any = SimpleNamespace(ids=[7])
    alive.send_signal = lambda *_args, **_options: alive.ids.clear()
    transport._client = alive
    assert transport.kill([0])
    transport._client = CLIENT
    assert lost_message(transport) == (
        "the engine of rank 0 is gone: dtkit ended its process, as it was told to. cluster.repair() starts another one "
        "in its place"
    )


def test_error_of_a_lost_engine_that_the_user_started_promises_no_replacement():
    transport = IpyparallelTransport(CLIENT, [7])
    message = lost_message(transport)
    assert message.startswith("the engine of rank 0 is gone: its process has ended, or its controller receives no")
    assert "repair()" not in message
    remedy = message.partition(". ")[2]
    with pytest.raises(ClusterError) as caught:
        transport.replace([0])
    assert str(caught.value).endswith(remedy)


@pytest.mark.parametrize("knows_the_call", [True, False])
def test_engine_that_is_lost_while_a_call_is_sent_ends_the_call(*, knows_the_call: bool):
    """The client ends the calls that it knows as it sees the loss, and never a later one."""
    call: Future[Any] = Future()

    def lose_engine(*_args: object, **_options: object) -> Future[Any]:
        client._engines.clear()
        if knows_the_call:
            call.set_result(EngineError())
        return call

    client: Any = SimpleNamespace(
        _engines={7: "identity"},
        _queue_handlers={"apply_reply": print},
        _mux_stream=None,
        history=[],
        send_apply_request=lose_engine,
    )
    call.msg_id = "call"  # type: ignore[attr-defined]
    assert lost_message(IpyparallelTransport(client, [7])).startswith("the engine of rank 0 is gone")
    if not knows_the_call:
        call.set_result(EngineError())  # the client has seen it after all


def test_late_replies_of_given_up_engines_print_nothing():
    handled: list[str] = []
    client: Any = SimpleNamespace(
        _engines={},
        outstanding={"awaited"},
        _futures={"sent": Future(), "given up": Future()},
        _queue_handlers={"apply_reply": lambda message: handled.append(message["parent_header"]["msg_id"])},
    )
    client._futures["given up"].set_result(None)
    IpyparallelTransport(client, [7])
    for msg_id in ("awaited", "sent", "given up", "unknown"):
        client._queue_handlers["apply_reply"]({"parent_header": {"msg_id": msg_id}})
    assert handled == ["awaited", "sent"]  # ipyparallel notes that a request is outstanding after it was sent


def make_refilling(*, is_closing: bool) -> LaunchedTransport:
    """Return a transport whose client is closed while spare engines start."""
    transport: Any = make_launched("")

    def start_engines(n: int) -> list[int]:
        transport._is_closing = is_closing
        return [8][:n]

    def raise_closed(engines: list[int]) -> None:
        raise RuntimeError("Client cannot be used after its sockets have been closed")

    transport.config = SimpleNamespace(spares=1)
    transport.spare_ids, transport._refill_lock = [], threading.Lock()
    transport._start_engines = start_engines
    transport._client = SimpleNamespace(direct_view=raise_closed)
    return transport


def test_a_cluster_that_closes_while_spare_engines_start_ends_their_thread_quietly():
    make_refilling(is_closing=True)._refill_spares()


def test_a_client_that_is_closed_without_its_cluster_is_an_error():
    transport = make_refilling(is_closing=False)
    with pytest.raises(RuntimeError, match="sockets have been closed"):
        transport._refill_spares()

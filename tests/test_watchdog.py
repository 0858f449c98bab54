"""Watchdog status of an engine's process, and how the notebook reads its files."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from dtkit.engine.comm import host_link, host_messages, process_group
from dtkit.engine.observe import stack_sampler
from dtkit.engine.observe.clock import Clock
from dtkit.engine.observe.phase_timer import PhaseTimer
from dtkit.engine.observe.watchdog import Watchdog
from dtkit.health import frames, stacks
from dtkit.health.diagnosis import RankObservation
from dtkit.health.frames import Frame
from dtkit.health.link_traffic import LinkTraffic
from dtkit.health.stack_dump import get_process_state
from dtkit.health.status import EngineStatus, get_dump_path, get_status_path, remove_status_files
from dtkit.messages import GroupSpec, Request
from dtkit.types import NodeInfo
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

USER = Frame("/home/me/net.py", 14, "forward", "user")
OWN = Frame("/x/dtkit/engine/job.py", 9, "advance", "dtkit")
LIBRARY = Frame("/x/site-packages/torch/autograd/graph.py", 979, "backward")


@pytest.fixture
def spec(tmp_path: Path) -> GroupSpec:
    return GroupSpec(1, 2, 3, "gloo", "cpu", str(tmp_path / "store-3"), "lo", 1, 5.0)


@pytest.fixture
def node() -> NodeInfo:
    return NodeInfo(1, 11, socket.gethostname(), os.getpid(), "cpu", 1, 1, 1)


def job(**changed: Any) -> Any:
    """The attributes of a job that a watchdog reads."""
    setting = SimpleNamespace(phases=PhaseTimer(Clock()), mesh=SimpleNamespace(axes={"dp": 2}))
    return SimpleNamespace(step=7, context=setting, median_step_s=lambda: 0.25, **changed)


@pytest.fixture
def watchdog(spec: GroupSpec) -> Iterator[Watchdog]:
    found = Watchdog({"job-1": job()})
    found.start(spec)
    yield found
    found.stop()
    faulthandler.unregister(signal.SIGUSR1)


def request(op: str = "advance") -> Request:
    return Request(op, 1, 3, {"job": "job-1"})


# -- status ------------------------------------------------------------------------------------------------


def test_an_idle_engine_reports_idle(watchdog: Watchdog, spec: GroupSpec):
    watchdog._main_thread_id = 0  # this test's own thread is at work
    found = watchdog.sample(spec)
    assert (found.rank, found.op, found.phase, found.stack, found.is_blocked) == (1, None, "idle", (), False)


def test_code_outside_dtkit_requests_is_reported_as_a_cell(watchdog: Watchdog, spec: GroupSpec):
    assert watchdog.sample(spec).phase == "cell"


def test_status_has_the_phase_and_step_of_the_job(watchdog: Watchdog, spec: GroupSpec):
    phases = watchdog._jobs["job-1"].context.phases
    with watchdog.track_request(request()):
        assert watchdog.sample(spec).phase == "step"
        phases.enter("forward")
        found = watchdog.sample(spec)
        assert (found.phase, found.step, found.median_step_s, found.is_blocked) == ("forward", 7, 0.25, False)
        phases.enter("sync")
        assert watchdog.sample(spec).phase == "collective"
        phases.end_step()
        assert watchdog.sample(spec).phase == "step"
    with watchdog.track_request(request("evaluate")):
        assert watchdog.sample(spec).phase == "evaluate"
    assert watchdog._active_call is None


def test_only_the_first_validation_of_a_job_in_a_process_is_its_warm_up(watchdog: Watchdog, spec: GroupSpec):
    for op, is_warming_up in (("advance", False), ("evaluate", True), ("advance", False), ("evaluate", False)):
        with watchdog.track_request(request(op)):
            status = EngineStatus.from_json(watchdog.sample(spec).to_json())
            assert (status.phase, status.is_warming_up) == (op if op == "evaluate" else "step", is_warming_up)
    with watchdog.track_request(Request("evaluate", 1, 3, {"job": "job-2"})):
        assert watchdog.sample(spec).is_warming_up


def test_user_frame_is_the_innermost_line_of_user_code(watchdog: Watchdog, spec: GroupSpec):
    with watchdog.track_request(request("call_function")):
        found = watchdog.sample(spec)
    line = found.get_user_frame()
    assert line is not None
    assert (line.file, line.function) == (__file__, "test_user_frame_is_the_innermost_line_of_user_code")
    assert found.stack[0].kind == "dtkit"


def test_stall_time_resets_only_on_a_phase_mark_or_a_step(watchdog: Watchdog, spec: GroupSpec):
    held = watchdog._jobs["job-1"]
    with watchdog.track_request(request()):
        held.context.phases.enter("forward")
        first = watchdog.sample(spec)
        assert watchdog.sample(spec).stalled_s > first.stalled_s == 0
        held.context.phases.enter("forward")  # the next micro-batch is progress, but the phase keeps its start
        second = watchdog.sample(spec)
        assert (second.stalled_s, second.phase_since) == (0, first.phase_since)
        held.step += 1
        assert watchdog.sample(spec).stalled_s == 0


def test_time_without_samples_does_not_count_as_stalled(
    watchdog: Watchdog, spec: GroupSpec, monkeypatch: pytest.MonkeyPatch
):
    """When a rank continues after SIGSTOP, its watchdog may run first and must not report it as stuck."""
    watchdog.stop()  # this test samples instead of the thread
    now = time.time()
    monkeypatch.setattr("dtkit.engine.observe.watchdog.time.time", lambda: now)
    with watchdog.track_request(request()):
        watchdog.sample(spec)
        now += 1
        assert watchdog.sample(spec).stalled_s == 1
        now += 60
        assert watchdog.sample(spec).stalled_s == 0
        now += 1
        assert watchdog.sample(spec).stalled_s == 1


def test_status_reports_the_blocked_fraction_of_the_current_job(watchdog: Watchdog, spec: GroupSpec, monkeypatch: Any):
    monkeypatch.setattr("dtkit.engine.observe.watchdog._is_in_user_code", lambda _: False)
    monkeypatch.setattr(stack_sampler, "is_in_collective", lambda rows: bool(waiting))
    waiting: list[int] = []
    with watchdog.track_request(request()):
        assert [watchdog.sample(spec).blocked_fraction for _ in range(3)] == [None, None, 0.0]
        waiting.append(1)
        assert watchdog.sample(spec).blocked_fraction == 0.25
    with watchdog.track_request(request("call_function") if not waiting else Request("call_function", 1, 3, {})):
        assert watchdog.sample(spec).blocked_fraction is None
    assert watchdog.sample(spec).blocked_fraction is None


def test_status_has_the_traffic_with_other_hosts(watchdog: Watchdog, spec: GroupSpec):
    assert watchdog.sample(spec).links == ()
    link = LinkTraffic(("10.0.0.1", 5000), ("10.0.0.2", 5001), 10, 0.5, 1e6)
    watchdog.watch_links(lambda: [link])
    assert EngineStatus.from_json(watchdog.sample(spec).to_json()).links == (link,)


def test_status_files_are_private_and_not_written_after_stop(watchdog: Watchdog, spec: GroupSpec, tmp_path: Path):
    path = get_status_path(tmp_path, 1)
    wait_until(path.exists)
    assert path.stat().st_mode & 0o777 == 0o600
    assert get_dump_path(tmp_path, 1).stat().st_mode & 0o777 == 0o600
    found = EngineStatus.from_json(path.read_text())
    assert (found.pid, found.generation, found.can_dump_stacks) == (os.getpid(), 3, True)
    watchdog.stop()
    remove_status_files(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_sample_is_reported_once_and_sampling_continues(watchdog: Watchdog, tmp_path: Path):
    path, held, looks = get_status_path(tmp_path, 1), watchdog._jobs["job-1"], []

    def median_step_s() -> float:
        looks.append(1)
        raise ValueError("no median")

    wait_until(path.exists)
    fine, held.median_step_s = held.median_step_s, median_step_s
    with watchdog.track_request(request()):
        wait_until(lambda: len(looks) > 2)
        assert not path.exists()  # an old file would mean that the engine is stuck
        held.median_step_s = fine
        wait_until(path.exists)
    assert watchdog.take_warning() == (
        "dtkit's watchdog failed to write this engine's status (ValueError: no median). It will retry."
    )
    assert watchdog.take_warning() is None


def test_an_existing_signal_handler_is_kept(spec: GroupSpec):
    def mine(*_: object) -> None: ...

    before = signal.signal(signal.SIGUSR1, mine)
    found = Watchdog({})
    try:
        found.start(spec)
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert not found.sample(spec).can_dump_stacks
    finally:
        found.stop()
        signal.signal(signal.SIGUSR1, before)


# -- stacks ------------------------------------------------------------------------------------------------


def test_files_are_classified_as_dtkit_library_or_user_code():
    assert frames.classify_file(frames.__file__) == "dtkit"
    assert (
        frames.classify_file(threading.__file__)
        == frames.classify_file(psutil.__file__)
        == frames.classify_file("<frozen runpy>")
        == "library"
    )
    assert frames.classify_file("/tmp/ipykernel_1/2.py") == frames.classify_file(__file__) == "user"


def test_outer_frames_common_to_all_calls_are_left_out():
    door = Frame(str(frames.ENTRY_FILES[0]), 1, "handle", "dtkit")
    assert frames.trim_outer_frames([LIBRARY, USER, OWN, door, door, LIBRARY]) == (LIBRARY, USER, OWN)
    assert frames.trim_outer_frames([LIBRARY]) == ()


@pytest.mark.parametrize(
    ("files", "blocked"),
    [
        (["torch/distributed/distributed_c10d.py"], True),
        (["torch/_ops.py", "torch/distributed/_functional_collectives.py"], True),
        (["torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"], True),
        (["torch/distributed/tensor/_dispatch.py"], False),
        (["torch/nn/functional.py", "torch/distributed/tensor/_dispatch.py"], False),
        ([], False),
    ],
)
def test_a_collective_is_recognized_by_its_innermost_line(files: list[str], blocked: bool):  # noqa: FBT001 - a parameter
    rows = [Frame(f"/x/site-packages/{file}", 1, "f") for file in files]
    assert stack_sampler.is_in_collective([*rows, USER] if rows else []) == blocked


def test_waiting_for_an_all_reduce_result_counts_as_a_collective():
    constants = process_group.Group.start_all_reduce_any.__code__.co_consts
    names = [constant.co_name for constant in constants if isinstance(constant, CodeType)]
    (wait_function,) = [name for name in names if name != "<lambda>"]  # which waits in the link
    assert stack_sampler.is_in_collective([Frame(host_link.__file__, 1, "_read"), USER])
    assert stack_sampler.is_in_collective([Frame(process_group.__file__, 1, wait_function), USER])
    assert not stack_sampler.is_in_collective([Frame(process_group.__file__, 1, "all_reduce"), USER])


def test_a_message_is_recognized_by_its_innermost_line():
    frames = ["/x/torch/distributed/distributed_c10d.py", "irecv"], [host_messages.__file__, "_receive"]
    assert all(stack_sampler.is_in_p2p([Frame(file, 1, function), USER]) for file, function in frames)
    assert not stack_sampler.is_in_p2p([USER])
    assert not stack_sampler.is_in_p2p([])


def test_non_ascii_file_and_function_names_are_sampled(tmp_path: Path):
    path = tmp_path / "\u0442\u0435\u0442\u0440\u0430\u0434\u044c-\xe9-\U0001f300.py"
    path.write_text("def h\xe9las(look):\n    return look()\n")
    space: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    rows = space["h\xe9las"](lambda: stack_sampler.sample_thread(threading.get_ident()))
    assert (str(path), 2, "h\xe9las") in [(row.file, row.line, row.function) for row in rows]


class Thing:
    """Something that can be referred to weakly."""


def test_sampling_a_thread_keeps_no_object_alive():
    """torch checks for a tensor's only owner when a function returns, so a sample must not own it."""
    over, looked_at = threading.Event(), threading.get_ident()

    def look() -> None:
        while not over.is_set():
            stack_sampler.sample_thread(looked_at)

    def make() -> weakref.ref[Thing]:
        thing = Thing()
        for _ in range(50):
            pass
        return weakref.ref(thing)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            assert make()() is None
    finally:
        over.set()
        thread.join(10)


LOOKED_AT = """
import sys, threading, time
import torch
import torch.distributed as dist
from dtkit.engine.comm import process_group as comm
from dtkit.engine.observe import stack_sampler as stack

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
over = threading.Event()

def look():
    while not over.is_set():
        stack.sample_thread(threading.main_thread().ident)

thread = threading.Thread(target=look)
thread.start()
deadline = time.monotonic() + 4
while time.monotonic() < deadline:  # each briefly turns a gloo thread into a Python thread
    dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda done: None).wait()
over.set()
thread.join()
dist.destroy_process_group()  # a process that exits with one may abort
"""


def test_threads_may_start_during_a_sample():
    """Reading all threads without the GIL reached a half-created one and crashed the process."""
    done = subprocess.run([sys.executable, "-c", LOOKED_AT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_helper_threads_are_sampled():
    go, there = threading.Event(), threading.Event()

    def load() -> None:
        there.set()
        go.wait(10)

    thread = threading.Thread(target=load, name="loader")
    thread.start()
    assert there.wait(10)
    found = stack_sampler.sample_helper_threads(0)
    go.set()
    thread.join(10)
    assert any(frame.function == "load" for frame in found["loader"])


# -- the notebook's side -----------------------------------------------------------------------------------


def test_a_status_survives_a_json_round_trip(watchdog: Watchdog, spec: GroupSpec):
    with watchdog.track_request(request("call_function")):
        found = dataclasses.replace(watchdog.sample(spec), threads={"loader": (USER,)})
    assert EngineStatus.from_json(found.to_json()) == found


def test_status_files_of_other_processes_and_damaged_ones_are_ignored(
    watchdog: Watchdog, node: NodeInfo, tmp_path: Path
):
    wait_until(get_status_path(tmp_path, 1).exists)
    assert stacks.observe_rank(tmp_path, node).process_state in ("running", "sleeping")
    other = stacks.observe_rank(tmp_path, dataclasses.replace(node, pid=node.pid + 1))
    assert (other.status, other.process_state) == (None, "unknown")
    watchdog.stop()
    get_status_path(tmp_path, 1).write_text('{"rank": ')
    assert stacks.observe_rank(tmp_path, node).status is None


def test_a_reused_process_id_is_reported_as_ended():
    created = psutil.Process().create_time()
    assert get_process_state(os.getpid(), created) in ("running", "sleeping")
    assert get_process_state(os.getpid(), created - 60) == "ended"
    assert get_process_state(2**22 + 1, created) == "ended"


def test_a_process_dumps_its_stack_on_request(watchdog: Watchdog, node: NodeInfo, tmp_path: Path):
    wait_until(get_status_path(tmp_path, 1).exists)
    found = stacks.observe_rank(tmp_path, node)
    stack = stacks.request_stack_dump(tmp_path, found).dumped_stack
    assert any(frame.function == "test_a_process_dumps_its_stack_on_request" for frame in stack)
    again = stacks.request_stack_dump(tmp_path, found).dumped_stack
    assert [frame.function for frame in again] == [frame.function for frame in stack]


def test_no_signal_is_sent_where_it_would_kill_the_process(
    monkeypatch: pytest.MonkeyPatch, watchdog: Watchdog, spec: GroupSpec, tmp_path
):
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a signal was sent"))
    found = watchdog.sample(spec)
    for process, dumps in (("sleeping", False), ("stopped", True), ("ended", True), ("unknown", True)):
        one = RankObservation(1, "here", found.pid, process, 0.1, dataclasses.replace(found, can_dump_stacks=dumps))
        assert stacks.request_stack_dump(tmp_path, one) == one


def test_a_dump_without_text_has_no_stacks():
    assert stacks.parse_dump("") == {}


def test_a_stack_dump_is_parsed_by_thread():
    text = (
        'Thread 0x00007f01 (most recent call first):\n  File "/a/b.py", line 3 in wait\n\n'
        'Current thread 0x00007f02 (most recent call first):\n  File "/c d/e.py", line 5 in f\n'
        '  File "/c d/e.py", line 9 in <module>\n\n'
        'Thread 0x00007f03 (most recent call first):\n  File "/\\u0442-\\xe9-\\U0001f300.py", line 2 in h\\xe9las\n'
    )
    assert stacks.parse_dump(text) == {
        0x7F01: (Frame("/a/b.py", 3, "wait", "user"),),
        0x7F03: (Frame("/\u0442-\xe9-\U0001f300.py", 2, "h\xe9las", "user"),),
        0x7F02: (Frame("/c d/e.py", 5, "f", "user"), Frame("/c d/e.py", 9, "<module>", "user")),
    }


def test_stacks_are_shown_as_text_and_escaped_html():
    found = EngineStatus(0, 2, 0, "here", 7, 1.0, 50.0, "advance", "forward", 44.0, 6.0, False, None)
    one = dataclasses.replace(found, step=12, stack=(LIBRARY, dataclasses.replace(USER, function="<lambda>"), OWN))
    shown = stacks.Stacks(
        [
            RankObservation(0, "here", 7, "sleeping", 0.1, one),
            RankObservation(1, "here", 8, "stopped", 9.0, dataclasses.replace(one, rank=1)),
            RankObservation(2, "there", 9, "unknown"),
        ]
    )
    lines = repr(shown).splitlines()
    assert lines[0] == "rank 0, here, pid 7, sleeping, forward of step 12, for 6 s"
    assert lines[1:3] == ["    torch/autograd/graph.py:979 in backward", "  > /home/me/net.py:14 in <lambda>"]
    assert "rank 1, here, pid 8, stopped (SIGSTOP), last seen in forward of step 12, for 15 s, silent for 9 s" in lines
    assert lines[-1] == "rank 2, there, pid 9, unknown, no status"
    page = shown._repr_html_()
    assert "&lt;lambda&gt;" in page
    assert "<lambda>" not in page
    assert (len(shown), shown[0][0], shown[2]) == (3, LIBRARY, ())


def test_watchdog_and_device_planning_do_not_import_torch():
    modules = "dtkit.engine.observe.watchdog, dtkit.health.stacks, dtkit.health.detector, dtkit.cluster.devices"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == "False"

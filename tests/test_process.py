"""`ProcessId`: the same process is recognized, another one with its pid is not."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from dtkit._util.process import ProcessId


def test_this_process_is_alive_and_matches_itself():
    process = ProcessId.from_pid()
    assert process.pid == os.getpid()
    assert process.is_alive
    assert process.matches(ProcessId.from_pid(os.getpid()))


@pytest.mark.parametrize(("shift_s", "same"), [(1.9, True), (-1.9, True), (2.1, False), (-2.1, False)])
def test_start_times_may_differ_by_two_seconds(shift_s: float, same: bool):  # noqa: FBT001
    process = ProcessId.from_pid()
    shifted = dataclasses.replace(process, start_time=process.start_time + shift_s)
    assert process.matches(shifted) is same
    assert shifted.is_alive is same
    assert (shifted.find() is not None) is same


def test_zombie_can_be_found_but_is_not_alive():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = ProcessId.from_pid(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
    assert process.find() is not None
    assert not process.is_alive
    child.communicate(timeout=10)
    assert process.find() is None
    with pytest.raises(ProcessLookupError, match="name one that is"):
        ProcessId.from_pid(child.pid)


def test_a_killed_process_is_given_time_to_end():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = ProcessId.from_pid(child.pid)
    assert not process.wait_until_ended(0.0)
    child.kill()
    assert process.wait_until_ended(10.0)
    child.communicate(timeout=10)

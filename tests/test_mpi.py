"""The ``mpirun`` command that starts agents on hosts, and its hosts."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from typing import Any

import pytest

import dtkit


def test_command_starts_one_agent_on_each_host_and_keeps_the_others_when_one_ends():
    launcher = dtkit.MPI(hosts=["a:2", "b"], arguments=["--mca", "plm_rsh_args", "-p 2222"], setup=["module load mpi"])
    lines = launcher.script().splitlines()
    assert lines[0] == "module load mpi"
    words = shlex.split(lines[1])
    assert words[:6] == ["exec", "mpirun", "--enable-recovery", "--mca", "orte_abort_on_non_zero_status", "0"]
    assert words[6:9] == ["--mca", "plm_rsh_args", "-p 2222"]
    assert ("--allow-run-as-root" in words) == (os.getuid() == 0)
    first, second = lines[1].split(" : ")
    assert "-np 1 --host a -x DTKIT_AGENT_INPUT_0 bash -c 'input=$DTKIT_AGENT_INPUT_0; unset" in first
    assert second.startswith("-np 1 --host b -x DTKIT_AGENT_INPUT_1 bash -c")
    assert f"exec {sys.executable} -m dtkit.cluster.agent" in words[-1]


def test_hosts_are_filled_in_order_and_named_twice_are_added():
    launcher = dtkit.MPI(hosts=["a:2", "b:3", "a:1"])
    assert launcher.list_hosts(6) == {"a": 3, "b": 3}
    assert launcher.list_hosts(4) == {"a": 3, "b": 1}
    assert launcher.list_hosts(2) == {"a": 2}
    with pytest.raises(ValueError, match=r"7 engines, but hosts=\['a:2', 'b:3', 'a:1'\] has room for 6. Raise"):
        launcher.list_hosts(7)


def test_launcher_shows_itself_and_survives_json():
    launcher = dtkit.MPI(hosts=["a:2"])
    assert repr(launcher) == "MPI(hosts=('a:2',))"
    assert dtkit.MPI(**dataclasses.asdict(launcher)) == launcher


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "names no host"),
        ({"hosts": "a"}, ValueError, r"Write hosts=\['a'\]"),
        ({"hosts": ["a:b"]}, ValueError, "'a:b' must be a name, or a name and a number"),
        ({"hosts": ["a:0"]}, ValueError, "'a:0' must be"),
        ({"host": ["a"]}, TypeError, "did you mean hosts="),
    ],
)
def test_bad_hosts_are_refused(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        dtkit.MPI(**options)


def test_hosts_without_a_name_are_refused_with_the_option():
    with pytest.raises(TypeError, match=r"MPI\(\['a'\]\): name each option, as in MPI\(hosts=\['a'\]\)"):
        dtkit.MPI(["a"])


def test_missing_mpirun_and_unknown_host_are_reported():
    launcher = dtkit.MPI(hosts=["no-such-host.invalid"], mpirun="no-such-mpirun")
    with pytest.raises(dtkit.errors.ClusterError, match=r"its name can't be resolved here.*address="):
        launcher.get_controller_address()
    with pytest.raises(dtkit.errors.ClusterError, match=r"no-such-mpirun is not on this notebook's PATH"):
        launcher.start_agents(None)  # type: ignore[arg-type]
    assert dtkit.MPI(hosts=["localhost"]).get_controller_address() in ("127.0.0.1", "::1")

"""Hosts by SSH, without a connection: what is asked for, what is run, what a failure says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dtkit
from dtkit.cluster.launchers.hosts import AgentRequest
from dtkit.cluster.launchers.registry import restore_launcher
from dtkit.cluster.launchers.ssh import explain_failure, list_ports, replace_ports

if TYPE_CHECKING:
    from collections.abc import Callable

CONNECTION = {"key": "", "interface": "tcp://127.0.0.1", "registration": 5000, "control": 5001, "hb_ping": [5002, 5003]}


@pytest.mark.parametrize("hosts", [["gpu1:4", "user@gpu2"], ["gpu1:4", "user@gpu2:1"]])
def test_hosts_have_slots(hosts: list[str]):
    assert dtkit.SSH(hosts).slots == {"gpu1": 4, "user@gpu2": 1}


@pytest.mark.parametrize("kind", [str, Path])
def test_hosts_come_from_a_file(tmp_path: Path, kind: Callable[[Path], str | Path]):
    file = tmp_path / "hosts"
    file.write_text("# of the lab\ngpu1 slots=4\n\ngpu2:2  # new\n")
    assert dtkit.SSH(kind(file)).slots == {"gpu1": 4, "gpu2": 2}


def test_engines_fill_one_host_after_the_other():
    launcher = dtkit.SSH(["a:2", "b:2", "c:2"])
    assert launcher.list_hosts(3) == {"a": 2, "b": 1}
    assert launcher.divide_engines(3, ["a", "b"]) == [2, 1]
    assert launcher.count_agents(3) == 2


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([], "give each host once"),
        (["a:1", "a:2"], "give each host once"),
        (["a:0"], "its number of engines"),
        (["a:x"], "its number of engines"),
        (["-oProxyCommand=x:1"], "its number of engines"),  # ssh would run it
        (["a b"], "its number of engines"),
        ("/nowhere", "No such file"),
    ],
)
def test_bad_hosts_are_refused_with_the_value(hosts: Any, message: str):
    with pytest.raises(ValueError, match=message):
        dtkit.SSH(hosts)


def test_more_engines_than_slots_are_refused_at_once():
    with pytest.raises(ValueError, match=r"Cluster\(9\): a:4, b:4 have 8 engines together. Ask for fewer"):
        dtkit.Cluster(9, launcher=dtkit.SSH(["a:4", "b:4"]))


def test_a_cluster_on_hosts_needs_a_number_of_engines():
    with pytest.raises(ValueError, match="say how many engines"):
        dtkit.Cluster(launcher=dtkit.SSH(["a:4"]))


def test_the_name_ssh_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"launcher=dtkit.SSH\(\['gpu1:4', 'gpu2:4'\]\)"):
        dtkit.Cluster(2, launcher="ssh")


def test_the_launcher_survives_the_cluster_file():
    launcher = dtkit.SSH(["a:4"], python="apptainer exec img.sif python", ssh_options=["-F", "x"])
    assert restore_launcher(json.loads(json.dumps(launcher.to_json()))) == launcher


def test_only_loopback_ports_are_forwarded_and_no_key_is_in_the_command():
    launcher = dtkit.SSH(["a:4"], python="~/env/bin/python")
    ports = list_ports(CONNECTION)
    command = launcher.make_command("a", ports, ports)
    forwards = [command[k + 1] for k, word in enumerate(command) if word == "-R"]
    assert forwards == [f"127.0.0.1:{port}:127.0.0.1:{port}" for port in (5000, 5001, 5002, 5003)]
    assert command[-3:] == ["--", "a", "exec ~/env/bin/python -m dtkit.cluster.agent"]
    assert {"-oExitOnForwardFailure=yes", "-oBatchMode=yes"} <= set(command)  # a question would wait for ever
    assert "exec ~/env/bin/python -m dtkit.cluster.agent" in launcher.script()
    assert launcher.get_controller_address() == "127.0.0.1"


def test_the_agent_is_sent_the_ports_of_its_host(tmp_path: Path):
    moved = {name: port + 100 for name, port in list_ports(CONNECTION).items()}
    connection = replace_ports(CONNECTION, moved)
    assert connection == {**CONNECTION, "registration": 5100, "control": 5101, "hb_ping": [5102, 5103]}
    line = AgentRequest(tmp_path, CONNECTION, 4, 1, ("a",)).format_input("a", connection)
    assert json.loads(line) == {"connection": connection, "host": "a", "cluster": tmp_path.name}
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("output", "remedy"),
    [
        ("ssh: Could not resolve hostname a: Name or service not known", "Correct the name"),
        ("root@a: Permission denied (publickey).", "work without a password"),
        ("Host key verification failed.", "Accept the key once"),
        ("ssh: connect to host a port 22: Connection refused", "Start an SSH server"),
        ("bash: line 1: /x/python: No such file or directory", "Name the Python"),
        ("/usr/bin/python3: No module named dtkit", "Install dtkit-jupyter"),
        ("Error: remote port forwarding failed for listen port 20000", "allow forwarding"),
        ("Traceback\nValueError: odd", "the agent ended: ValueError: odd. Try `ssh a`"),
        ("", "it printed nothing"),
    ],
)
def test_a_failure_is_one_sentence_with_a_remedy(output: str, remedy: str):
    text = explain_failure("a", output)
    assert text.startswith("a: ")
    assert remedy in text
    assert "\n" not in text


def test_the_cause_is_named_and_not_the_nanny_that_ends_after_it():
    nanny = "2026-11-24 15:19:15.956 [KernelNanny.1] Pipe closed, parent 111 has status: None"
    assert "the agent ended: ValueError: why" in explain_failure("a", f"ValueError: why\n{nanny}\n")


def test_an_agent_that_reaches_no_notebook_says_so_itself():
    output = "dtkit agent: a can't reach the notebook: Connection refused. Name another address\n"
    assert explain_failure("a", output) == "a: a can't reach the notebook: Connection refused. Name another address"

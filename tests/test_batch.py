"""Scripts for schedulers that can't run here. What a scheduler makes of them is not tested."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

import dtkit
from dtkit.cluster.launchers.batch import SYSTEMS, find_stuck, read_phase
from dtkit.cluster.launchers.hosts import AgentRequest

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "a key that nobody else may read"

MARKS = {"HTCondor": "getenv = True", "LSF": "#BSUB -env all", "PBS": "#PBS -V", "SGE": "#$ -V"}


@pytest.mark.parametrize("system", SYSTEMS)
def test_default_script_passes_the_environment_and_starts_an_agent(system: str):
    launcher = dtkit.Batch(system, address="10.0.0.1")
    script = launcher.script()
    assert MARKS[system] in script
    assert "-m dtkit.cluster.agent < dtkit-agent.in" in script or "arguments = dtkit-agent.sh" in script
    assert ("queue" in script) == (system == "HTCondor")  # HTCondor has a command of this name
    assert dtkit.Batch(**dataclasses.asdict(launcher)) == launcher


def test_template_of_the_user_is_filled_in():
    template = "#!/bin/sh\n#PBS -q {queue}\n#PBS -o {output_file}\nmodule load x\n{program_and_args}\n"
    script = dtkit.Batch(
        "PBS", template=template, queue="gpu", python="apptainer exec i.sif python", address="h"
    ).script()
    assert script.splitlines()[1] == "#PBS -q gpu"
    assert script.splitlines()[2].endswith("agent.log")
    assert "exec apptainer exec i.sif python -m dtkit.cluster.agent" in script.splitlines()[4]


@pytest.mark.parametrize(
    ("system", "options", "message"),
    [
        ("Torque", {}, "'Torque' is not a scheduler that Batch knows; choose one of HTCondor, LSF, PBS, SGE"),
        ("PBS", {"nodes": 0}, "nodes=0"),
        ("PBS", {"template": "#!/bin/sh\n"}, "template= starts no agent; put {program_and_args}"),
        ("HTCondor", {"template": "executable = x\nqueue\n"}, "template= starts no agent; put {script_file}"),
    ],
)
def test_bad_options_are_refused(system: str, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        dtkit.Batch(system, address="h", **options)


def test_missing_scheduler_is_reported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    job = dtkit.Batch("PBS", address="h").restore_job({"system": "PBS", "job_id": "7", "log": "x"})
    with pytest.raises(dtkit.errors.ClusterError, match="qstat is not on this notebook's PATH"):
        job.get_state()


COMMAND = """\
#!/bin/sh
env > {folder}/environment
cp {folder}/home/.cache/dtkit/*.in {folder}/input
stat -c %a {folder}/home/.cache/dtkit/*.in > {folder}/mode
echo "1 job(s) submitted to cluster 5."
exit {code}
"""


@pytest.mark.parametrize("code", [0, 1])
def test_key_is_in_a_private_file_because_schedulers_show_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    """``condor_q -long`` of another user shows what ``getenv = True`` has copied."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("condor_submit", "condor_rm"):
        (tmp_path / name).write_text(COMMAND.format(folder=tmp_path, code=code))
        (tmp_path / name).chmod(0o700)
    launcher, request = dtkit.Batch("HTCondor", address="h"), AgentRequest(tmp_path / "dtkit-1", {"key": SECRET}, 1, 1)
    if code:
        with pytest.raises(dtkit.errors.ClusterError, match="HTCondor refused the job"):
            launcher.start_agents(request)
    else:
        (job,) = launcher.start_agents(request)
        job.cancel()
    assert SECRET not in (tmp_path / "environment").read_text()
    assert (tmp_path / "input").read_text() == request.format_input()
    assert (tmp_path / "mode").read_text() == "600\n"
    assert list((tmp_path / "home" / ".cache" / "dtkit").iterdir()) == []


@pytest.mark.parametrize(
    ("system", "text", "command"),
    [
        ("HTCondor", "5\n", "condor_q -hold 17"),
        ("HTCondor", "1\n", None),
        ("SGE", "     17 0.55500 dtkit      me           Eqw   11/24/2026 01:00:00\n", "qstat -j 17"),
        ("SGE", "    117 0.55500 dtkit      me           Eqw   11/24/2026 01:00:00\n", None),
        ("SGE", "     17 0.55500 dtkit      me           qw    11/24/2026 01:00:00\n", None),
        ("PBS", "    job_state = Q\n", None),
    ],
)
def test_job_that_an_error_keeps_in_the_queue_is_recognized(system: str, text: str, command: str | None):
    assert find_stuck(system, "17", text) == command


@pytest.mark.parametrize(
    ("system", "text", "phase"),
    [
        ("PBS", "Job Id: 17.head\n    job_state = Q\n", "waiting"),
        ("PBS", "Job Id: 17.head\n    job_state = R\n", "running"),
        ("PBS", "", "ended"),
        ("LSF", "PEND\n", "waiting"),
        ("LSF", "RUN\n", "running"),
        ("LSF", "EXIT\n", "ended"),
        ("LSF", "UNKWN\n", "running"),
        ("HTCondor", "1\n", "waiting"),
        ("HTCondor", "2\n", "running"),
        ("HTCondor", "4\n", "ended"),
        ("SGE", "     17 0.55500 ipengine   me           qw    11/24/2026 01:00:00\n", "waiting"),
        ("SGE", "     17 0.55500 ipengine   me           r     11/24/2026 01:00:00\n", "running"),
        ("SGE", "    117 0.55500 ipengine   me           r     11/24/2026 01:00:00\n", "ended"),
    ],
)
def test_phase_is_read_from_what_schedulers_print(system: str, text: str, phase: str):
    assert read_phase(system, "17", text) == phase

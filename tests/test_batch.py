"""Scripts for schedulers that can't run here. What a scheduler makes of them is not tested."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import dtkit
from dtkit.cluster.launchers.batch import SYSTEMS, read_phase

MARKS = {"HTCondor": "getenv = True", "LSF": "#BSUB -env all", "PBS": "#PBS -V", "SGE": "#$ -V"}


@pytest.mark.parametrize("system", SYSTEMS)
def test_default_script_passes_the_environment_and_starts_an_agent(system: str):
    launcher = dtkit.Batch(system, address="10.0.0.1")
    script = launcher.script()
    assert MARKS[system] in script
    assert "dtkit.cluster.agent" in script or "/bin/bash" in script
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
        ("Torque", {}, "'Torque' is not a scheduler that Batch knows; they are HTCondor, LSF, PBS, SGE"),
        ("PBS", {"nodes": 0}, "nodes=0"),
        ("PBS", {"template": "#!/bin/sh\n"}, "template= starts no agent; put {program_and_args}"),
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


@pytest.mark.parametrize(
    ("system", "text", "phase"),
    [
        ("PBS", "Job Id: 17.head\n    job_state = Q\n", "waiting"),
        ("PBS", "Job Id: 17.head\n    job_state = R\n", "running"),
        ("PBS", "", "ended"),
        ("LSF", "PEND\n", "waiting"),
        ("LSF", "RUN\n", "running"),
        ("LSF", "EXIT\n", "ended"),
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

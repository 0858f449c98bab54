"""``python -m dtkit.demo``, as ``make demo`` runs it, in another process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster


def run_demo(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dtkit.demo", *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.slow
def test_demo_trains_verifies_and_saves_a_picture(tmp_path: Path):
    done = run_demo(tmp_path, "--engines", "2", "--epochs", "6")
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert re.search(r"^node +engine id +host +pid", printed, re.MULTILINE)  # the table of nodes
    # Six epochs of 1500 rows in batches of 64 are 144 steps.
    last = printed[printed.index("digits: completed, step 144 of 144") :]
    assert re.search(r"^  loss .*; validation: loss \S+, accuracy \S+; [\d,]+ samples/s", last, re.MULTILINE)
    assert re.search(r"^starting 2 engines: [\d.]+ s$", done.stderr, re.MULTILINE)
    assert "metrics=" not in printed  # no warning
    accuracy = re.search(r"accuracy on 297 held-out rows: (\S+)\s%", last)
    assert accuracy
    assert float(accuracy[1]) > 95
    assert "\nPASS: 20 steps on 2 ranks against one process" in last
    picture = tmp_path / "dtkit-demo.png"
    assert printed.splitlines()[-1].endswith(str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Traceback" not in done.stderr


def test_demo_without_scikit_learn_names_the_package_to_install(tmp_path: Path):
    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError(name='sklearn')\n")
    done = run_demo(tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "pip install scikit-learn" in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_refuses_a_picture_in_a_missing_folder(tmp_path: Path):
    done = run_demo(tmp_path, "--picture", "nowhere/run.png")
    assert done.returncode == 2
    assert "the folder nowhere does not exist" in done.stderr
    assert done.stdout == ""

"""``python -m dtkit.demo``, which is what ``make demo`` runs: in a process of its own, as a person starts it."""

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


def demo(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dtkit.demo", *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_it_trains_proves_and_draws(tmp_path: Path):
    done = demo(tmp_path, "--engines", "2", "--epochs", "6")
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert re.search(r"^rank +engine id +host +pid", said, re.MULTILINE)  # the table of nodes
    # Six epochs of 1500 rows in batches of 64 are 144 steps; a line per node stands under the last of them.
    last = said[said.index("completed 100 % step 144 of 144") :]
    for rank in (0, 1):
        assert re.search(rf"^  node {rank}  loss +\S+ +[\d,]+ samples/s", last, re.MULTILINE)
    accuracy = re.search(r"accuracy on 297 held-out rows: (\S+)%", last)
    assert accuracy
    assert float(accuracy[1]) > 95
    assert "\nPASS: 20 steps on 2 ranks against one process" in last
    picture = tmp_path / "dtkit-demo.png"
    assert said.splitlines()[-1].endswith(str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Traceback" not in done.stderr


def test_without_scikit_learn_it_says_what_to_install(tmp_path: Path):
    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError(name='sklearn')\n")
    done = demo(tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "pip install scikit-learn" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_picture_in_a_folder_that_is_missing_is_refused_at_once(tmp_path: Path):
    done = demo(tmp_path, "--picture", "nowhere/run.png")
    assert done.returncode == 2
    assert "the folder nowhere does not exist" in done.stderr
    assert done.stdout == ""

"""Errors of engines as a notebook shows them: the user's own lines, by cell."""

from __future__ import annotations

import subprocess
import sys

from dtkit.errors import EngineError
from dtkit.types import Failure

SHELL = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="NoColor")
shell.run_cell("def step():\\n    raise ValueError('broken')")
shell.run_cell('''
from dtkit.errors import EngineError, drop_consequential_refusals
from dtkit.types import Failure

frames = ((step.__code__.co_filename, 2, "step", ""),)

class Failures(list):
    def __iter__(self):
        raise EngineError([Failure(1, "host", "ValueError", "broken", "all of it", user_frames=frames)])

drop_consequential_refusals(Failures())
''')
"""


def make_failure(rank: int = 0, **options: object) -> Failure:
    frames = tuple((f"user{k}.py", k, f"f{k}", f"line {k}") for k in range(6))
    defaults = {"message": "broken", "traceback": "Traceback\n  everything", "user_frames": frames}
    return Failure(rank, "host", "ValueError", **(defaults | options))  # type: ignore[arg-type]


def test_message_has_the_innermost_frames_of_the_user():
    lines = str(EngineError([make_failure(1, step=3), make_failure(0, victim=True)])).splitlines()
    assert lines[0] == "rank 1 on host, step 3: ValueError: broken"
    assert lines[1:3] == ["  File user2.py, line 2, in f2", "    line 2"]
    assert lines[-3:] == [
        "    line 5",
        "rank 0 only lost its peer.",
        "(The error's .full has the whole traceback.)",
    ]
    assert len(lines) <= 15


def test_full_message_has_the_tracebacks_of_all_causes():
    error = EngineError([make_failure(0), make_failure(1), make_failure(2, victim=True)])
    assert error.full.startswith(str(error))
    assert error.full.count("everything") == 2
    assert "Traceback of rank 1:\nTraceback\n  everything" in error.full


def test_notebook_names_cells_and_hides_frames_of_dtkit():
    done = subprocess.run([sys.executable, "-c", SHELL], capture_output=True, text=True, timeout=60, check=True)
    assert "Cell In[1], line 2, in step\n    raise ValueError('broken')" in done.stdout
    assert "drop_consequential_refusals(Failures())" in done.stdout
    assert "dtkit/errors.py" not in done.stdout

"""Errors of engines as a notebook shows them: the user's own lines, by cell."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dtkit
from dtkit._util.notebook import name_code
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


SCRIPT = """
from dtkit.cluster.cluster import Cluster
from dtkit.testing.fake_transport import FakeTransport
from dtkit.errors import EngineError, drop_consequential_refusals
from dtkit.types import Failure

class Failures(list):
    def __iter__(self):
        raise EngineError([Failure(1, "host", "ValueError", "broken", "all of it")]) if kind else KeyError("other")

kind = {kind}
cluster = Cluster.from_transport(FakeTransport(1), device="cpu")
again = Cluster.from_transport(FakeTransport(1), device="cpu")
drop_consequential_refusals(Failures())
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


def test_ranks_interrupted_after_a_failure_are_named_after_it():
    interrupted = make_failure(0, kind="interrupted", message="", user_frames=())
    text = str(EngineError([interrupted, make_failure(1)]))
    assert text.startswith("rank 1 on host: ValueError: broken\n")
    assert "\nrank 0 was then interrupted.\n" in text
    alone = str(EngineError([interrupted]))
    assert alone.startswith("rank 0 on host: ")
    assert "then interrupted" not in alone


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


OTHERS = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="NoColor")
shell.run_cell('''
import threading
import torch
import dtkit
from dtkit.testing.fake_transport import FakeTransport

lock = threading.Lock()

def loss(output, target):
    with lock:
        return output.sum()

cluster = dtkit.Cluster.from_transport(FakeTransport(1), device="cpu")
data = torch.zeros(8, 4), torch.zeros(8, 1)
options = dict(optimizer=torch.optim.SGD, batch_size=4, steps=2)
''')
for cell in (
    "cluster.train(torch.nn.Linear(4, 1), data, loss=loss, **options)",
    "run = cluster.train(torch.nn.Linear(4, 1), data, loss=torch.nn.MSELoss(), start=False, **options); run.wait()",
    "cluster.close()",
    "cluster.broadcast(torch.nn.Linear(1, 1))",
):
    print("CELL", cell)
    shell.run_cell(cell)
"""


def test_notebook_shows_the_users_line_of_every_error_of_dtkit_in_few_lines():
    done = subprocess.run([sys.executable, "-c", OTHERS], capture_output=True, text=True, timeout=60, check=True)
    _, pickled, paused, _, closed = done.stdout.split("CELL ")
    for text, message in (
        (pickled, "SerializationError: loss= (global variable 'lock'): cannot pickle"),
        (paused, "PausedError: the run is paused at step 0"),
        (closed, "ClusterClosedError: this cluster was closed"),
    ):
        assert message in text
        assert "dtkit/" not in text
        assert len(text.splitlines()) <= 15


def test_cause_in_the_users_code_stays_in_the_traceback():
    code = """
import dtkit

try:
    {}["absent"]
except KeyError as error:
    raise dtkit.errors.RunError("broken") from error
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "KeyError: 'absent'" in done.stderr
    assert "dtkit.errors.RunError: broken" in done.stderr


def test_misspelled_name_of_dtkit_names_the_right_one():
    with pytest.raises(AttributeError, match=r"'DataParalel'; did you mean dtkit\.DataParallel\?"):
        dtkit.DataParalel  # noqa: B018 - the access raises
    with pytest.raises(AttributeError, match="'zzz'; it has Batch, "):
        dtkit.zzz  # noqa: B018 - the access raises


MISSPELLED = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="NoColor")
shell.run_cell("import dtkit")
shell.run_cell("dtkit.Cluster(2, thread=1)")
shell.run_cell("dtkit.Cluster(-2)")
"""


def test_notebook_shows_only_the_users_line_of_bad_arguments():
    done = subprocess.run([sys.executable, "-c", MISSPELLED], capture_output=True, text=True, timeout=60, check=True)
    assert "dtkit.Cluster(2, thread=1)" in done.stdout
    assert "TypeError: Cluster() has no argument thread=; did you mean threads=?" in done.stdout
    assert "dtkit.Cluster(-2)" in done.stdout
    assert "ValueError: " in done.stdout
    assert "dtkit/" not in done.stdout


def test_script_prints_errors_of_engines_without_frames_of_dtkit():
    printed = run_script(kind=True)
    assert 'File "<string>", line 14, in <module>' in printed
    assert "dtkit/errors.py" not in printed
    assert printed.endswith(
        "dtkit.errors.EngineError: rank 1 on host: ValueError: broken\n(The error's .full has the whole traceback.)\n"
    )
    assert printed.count("Traceback (most recent call last)") == 1


def test_script_prints_other_errors_as_python_does():
    printed = run_script(kind=False)
    assert "dtkit/errors.py" in printed
    assert printed.endswith("KeyError: 'other'\n")


def run_script(*, kind: bool) -> str:
    """Return what a script that ends in an error prints."""
    code = SCRIPT.replace("{kind}", str(kind))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    return done.stderr


def test_long_messages_are_cut_to_fifteen_lines_with_their_end():
    message = "\n".join([f"line {k}" for k in range(40)] + ["the remedy", "x" * 4000])
    failures = [make_failure(0, message=message), *(make_failure(k, message=f"other {k}") for k in range(1, 30))]
    for lines in (str(EngineError(failures[:1])).splitlines(), str(EngineError(failures)).splitlines()):
        assert len(lines) == 15
        assert max(map(len, lines)) < 550
        assert any("lines left out ...]" in line for line in lines)
    assert "the remedy" in str(EngineError(failures[:1]))


def test_cell_of_an_earlier_kernel_is_named_as_one():
    assert name_code("/tmp/ipykernel_13781/4289646896.py") == "Cell of an earlier kernel"
    assert name_code("/home/me/train.py") == "File /home/me/train.py"

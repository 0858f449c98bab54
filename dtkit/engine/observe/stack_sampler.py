"""What the threads of this process are doing: their stacks, and what those say.

A look must leave no trace, and the two plain ways to look do. faulthandler walks all threads without the lock under
which Python makes one: a thread of torch's that calls into Python at that moment is half made, and the process dies
of it. `sys._current_frames` takes the lock, but makes objects of frames, and whoever still has one when its function
returns keeps alive what that function had in hand: torch then finds a second owner of a tensor that should have one
(an export failed by it, once in some hundred).

So frames are made, followed and let go within one call of C code, during which no other thread runs Python. Nothing is
read from disk: source lines are looked up by whoever shows them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import sysconfig
import threading
from itertools import accumulate, chain, repeat, starmap
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import TYPE_CHECKING

import dtkit
from dtkit.health.status import Frame

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import CodeType

CallStack = tuple[Frame, ...]
"""Innermost first."""

MAX_FRAMES = 60  # innermost; deeper ones say little, and recursion would fill the file
_DTKIT_FOLDER = str(Path(dtkit.__file__).parent)
_ENTRY_FILES = (str(Path(_DTKIT_FOLDER, "engine/session.py")), str(Path(_DTKIT_FOLDER, "rpc/entrypoint.py")))
_LIBRARY_FOLDERS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_DISTRIBUTED_PATH = "/torch/distributed/"
_VOTE_WAIT_FUNCTION = (
    str(Path(_DTKIT_FOLDER, "engine/comm/process_group.py")),
    "answer",
)  # where ranks wait for what they asked each other
_COMPUTING_PATHS = ("/torch/distributed/tensor/", "/torch/distributed/pipelining/")
_get_code_and_line = attrgetter("f_code", "f_lineno")
_P2P_FUNCTIONS = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


@functools.lru_cache(4096)
def classify_file(file: str) -> str:
    """Whose code a file is: "dtkit", "library" or "user"."""
    if file.startswith(_DTKIT_FOLDER + "/"):
        return "dtkit"
    installed = file.startswith(("<frozen", "<string", *(f"{folder}/" for folder in _LIBRARY_FOLDERS)))
    return "library" if installed or "/site-packages/" in file or "/dist-packages/" in file else "user"


def sample_thread(thread_id: int) -> CallStack:
    """The stack of a thread by its identity, innermost first, less what only led to the code of dtkit and the user."""
    rows: list[tuple[CodeType, int]] = []
    innermost = map(methodcaller("get", thread_id), starmap(sys._current_frames, [()]))  # noqa: SLF001 - Python's only way
    with _pause_gc(), contextlib.suppress(AttributeError):  # the outermost frame's `f_back`, or the thread has ended
        # One call that runs no byte code, between two of which threads take turns: a loop here would be an error.
        rows.extend(map(_get_code_and_line, accumulate(chain(innermost, repeat("f_back", MAX_FRAMES - 1)), getattr)))
    places = [(code.co_filename, line or code.co_firstlineno, code.co_name) for code, line in rows]
    return make_stack(places)


@contextlib.contextmanager
def _pause_gc() -> Iterator[None]:
    """Without Python's garbage collector, which before 3.12 may begin in the midst of C code. What it finds may run
    Python, and another thread with it: one that then makes a thread waits for Python's lock on the list of threads, and
    who lists them for the interpreter (CPython issue 106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def make_stack(locations: Sequence[tuple[str, int, str]]) -> CallStack:
    """A stack of (file, line, function), innermost first, less what is in every one."""
    return trim_outer_frames([Frame(file, line, name, classify_file(file)) for file, line, name in locations])


def trim_outer_frames(frames: Sequence[Frame]) -> CallStack:
    """Without the outer frames that every call has: the kernel's, and dtkit's own door."""
    kept = len(frames)
    while kept and (frames[kept - 1].kind == "library" or frames[kept - 1].file in _ENTRY_FILES):
        kept -= 1
    return tuple(frames[:kept])


def sample_helper_threads(main_thread_id: int) -> dict[str, CallStack]:
    """The stacks of threads other than `thread_id` and this one that run user code, by the threads' names."""
    others = [t for t in threading.enumerate() if t.ident not in (None, main_thread_id, threading.get_ident())]
    stacks = {t.name: sample_thread(t.ident or 0) for t in others}
    return {name: stack for name, stack in stacks.items() if has_user_code(stack)}


def has_user_code(stack: Sequence[Frame]) -> bool:
    """Whether any line of it is the user's."""
    return any(frame.kind == "user" for frame in stack)


def is_in_collective(stack: Sequence[Frame]) -> bool:
    """Whether the innermost Python code is that of a collective."""
    inner = _find_innermost(stack)
    if inner is None:
        return False
    of_torch = _DISTRIBUTED_PATH in inner.file and not any(part in inner.file for part in _COMPUTING_PATHS)
    return of_torch or (inner.file, inner.function) == _VOTE_WAIT_FUNCTION


def is_in_p2p(stack: Sequence[Frame]) -> bool:
    """Whether it is one of two ranks only."""
    inner = _find_innermost(stack)
    return inner is not None and _DISTRIBUTED_PATH in inner.file and inner.function in _P2P_FUNCTIONS


def _find_innermost(stack: Sequence[Frame]) -> Frame | None:
    """The innermost frame but for torch's own way into an operator."""
    return next((frame for frame in stack if not frame.file.endswith("/torch/_ops.py")), None)

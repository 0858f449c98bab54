"""What the threads of this process are doing: their stacks, and what those say.

faulthandler writes them, and its text is read. Python's own way to another thread's frames,
`sys._current_frames`, makes objects of them, which keep alive what a function had in hand while it returns: torch then
finds a second owner of a tensor that should have one (an export failed by it, once in some hundred), and Python 3.11
may follow such an object to memory that is used for something else by then. Nothing is read from disk here: source
lines are looked up by whoever shows them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import re
import sysconfig
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from dtkit.standing import Frame

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Stack = tuple[Frame, ...]
"""Innermost first."""

MOST_FRAMES = 60  # innermost; deeper ones say little, and recursion would fill the file
_OWN = str(Path(__file__).parent.parent)
_DOORS = (str(Path(__file__).parent / "session.py"), str(Path(_OWN) / "entry.py"))
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_COLLECTIVES = "/torch/distributed/"
_COMPUTES = ("/torch/distributed/tensor/", "/torch/distributed/pipelining/")
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)", re.MULTILINE)
_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_ESCAPED = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_looking = threading.Lock()
_PAIRWISE = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


@functools.lru_cache(4096)
def kind(file: str) -> str:
    """Whose code a file is: "dtkit", "library" or "user"."""
    if file.startswith(_OWN + "/"):
        return "dtkit"
    installed = file.startswith(("<frozen", "<string", *(f"{folder}/" for folder in _INSTALLED)))
    return "library" if installed or "/site-packages/" in file or "/dist-packages/" in file else "user"


def of_all_threads() -> dict[int, Stack]:
    """The stacks of threads by identity, innermost first, less what only led to the code of dtkit and the user.

    Of more than a hundred threads, of the hundred youngest: faulthandler writes no more.
    """
    with _looking:
        file = _scratch()
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        faulthandler.dump_traceback(file, all_threads=True)
        text = os.pread(file, os.fstat(file).st_size, 0)
    return parsed(text.decode(errors="replace"))


@functools.cache
def _scratch() -> int:
    """A file without a name, as a descriptor that stays: they may run out. In memory where it can be: disks fill up."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or it is forbidden
        return os.memfd_create("dtkit-stacks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def parsed(text: str) -> dict[int, Stack]:
    """What faulthandler wrote, as `of_all_threads` gives it."""
    heads = list(_THREAD.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return {int(head[1], 16): _stack(text[head.end() : end]) for head, end in zip(heads, ends, strict=True)}


def _stack(text: str) -> Stack:
    rows = [(_plain(file), int(line), _plain(name)) for file, line, name in _LINE.findall(text)[:MOST_FRAMES]]
    return trimmed([Frame(file, line, name, kind(file)) for file, line, name in rows])


def _plain(name: str) -> str:
    """With letters beyond ASCII, for which faulthandler writes their numbers."""
    return _ESCAPED.sub(lambda found: chr(int(found[1][1:], 16)), name) if "\\" in name else name


def trimmed(rows: Sequence[Frame]) -> Stack:
    """Without the outer frames that every call has: the kernel's, and dtkit's own door."""
    kept = len(rows)
    while kept and (rows[kept - 1].kind == "library" or rows[kept - 1].file in _DOORS):
        kept -= 1
    return tuple(rows[:kept])


def helpers(stacks: Mapping[int, Stack], thread: int) -> dict[str, Stack]:
    """Of these stacks, those of threads other than `thread` and this one that run user code, by the threads' names."""
    known = {t.ident: t.name for t in threading.enumerate()}
    others = stacks.keys() & known.keys() - {thread, threading.get_ident()}
    return {known[ident]: stacks[ident] for ident in sorted(others) if has_user_code(stacks[ident])}


def has_user_code(stack: Sequence[Frame]) -> bool:
    """Whether any line of it is the user's."""
    return any(frame.kind == "user" for frame in stack)


def in_collective(stack: Sequence[Frame]) -> bool:
    """Whether the innermost Python code is that of a collective."""
    inner = _innermost(stack)
    return inner is not None and _COLLECTIVES in inner.file and not any(part in inner.file for part in _COMPUTES)


def in_pairs(stack: Sequence[Frame]) -> bool:
    """Whether it is one of two ranks only."""
    inner = _innermost(stack)
    return inner is not None and _COLLECTIVES in inner.file and inner.function in _PAIRWISE


def _innermost(stack: Sequence[Frame]) -> Frame | None:
    """The innermost frame but for torch's own way into an operator."""
    return next((frame for frame in stack if not frame.file.endswith("/torch/_ops.py")), None)

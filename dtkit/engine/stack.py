"""What a thread of this process is doing: its stack, seen from another thread, and what that says.

Reading another thread's frames is safe while one holds the interpreter, since then nobody else runs Python. Nothing is
read from disk here: source lines are looked up by whoever shows them.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from dtkit.standing import Frame

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

MOST_FRAMES = 60  # innermost; deeper ones say little, and recursion would fill the file
_OWN = str(Path(__file__).parent.parent)
_DOORS = (str(Path(__file__).parent / "session.py"), str(Path(_OWN) / "entry.py"))
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_COLLECTIVES = "/torch/distributed/"
_COMPUTES = ("/torch/distributed/tensor/", "/torch/distributed/pipelining/")
_PAIRWISE = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


@functools.lru_cache(4096)
def kind(file: str) -> str:
    """Whose code a file is: "dtkit", "library" or "user"."""
    if file.startswith(_OWN + "/"):
        return "dtkit"
    installed = file.startswith(("<frozen", "<string", *(f"{folder}/" for folder in _INSTALLED)))
    return "library" if installed or "/site-packages/" in file or "/dist-packages/" in file else "user"


def frames(thread: int, found: dict[int, FrameType] | None = None) -> tuple[Frame, ...]:
    """A thread's stack, innermost first, without what only led to the code of dtkit and the user; empty if it ended."""
    frame = (sys._current_frames() if found is None else found).get(thread)  # noqa: SLF001 - public but for its name
    rows: list[Frame] = []
    while frame is not None and len(rows) < MOST_FRAMES:
        code = frame.f_code
        rows.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name, kind(code.co_filename)))
        frame = frame.f_back
    return trimmed(rows)


def trimmed(rows: Sequence[Frame]) -> tuple[Frame, ...]:
    """Without the outer frames that every call has: the kernel's, and dtkit's own door."""
    kept = len(rows)
    while kept and (rows[kept - 1].kind == "library" or rows[kept - 1].file in _DOORS):
        kept -= 1
    return tuple(rows[:kept])


def helpers(thread: int) -> dict[str, tuple[Frame, ...]]:
    """The stacks of other threads that run user code, by the threads' names."""
    now = sys._current_frames()  # noqa: SLF001 - public but for its name
    me = threading.get_ident()
    stacks = {t.name: frames(t.ident or 0, now) for t in threading.enumerate() if t.ident not in (thread, me)}
    return {name: stack for name, stack in stacks.items() if has_user_code(stack)}


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

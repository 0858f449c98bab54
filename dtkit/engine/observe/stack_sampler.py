"""Stacks of this process's threads, sampled without side effects.

Two plain methods have side effects. faulthandler iterates over the threads without Python's lock. It may meet a thread
that torch is just creating, and then the process crashes. `sys._current_frames` takes the lock, but creates frame
objects. A frame object that outlives its function keeps the function's variables alive. Then torch finds a second
reference to a tensor, and its exporter, for example, fails.

So one call of C code creates, follows and releases the frames, during which no other thread runs Python. The sampler
reads no files, since the notebook looks up the source lines.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from itertools import accumulate, chain, repeat, starmap
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING

from dtkit._util.garbage import pause_gc
from dtkit._util.installation import PACKAGE_FOLDER
from dtkit.health.frames import MAX_FRAMES, CallStack, has_user_code, make_stack

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType

    from dtkit.health.frames import Frame

_DISTRIBUTED_PATH = "/torch/distributed/"
_HOST_LINK = str(PACKAGE_FOLDER / "engine/comm/host_link.py")
_HOST_MESSAGES = str(PACKAGE_FOLDER / "engine/comm/host_messages.py")
_VOTE_WAIT_FUNCTION = str(PACKAGE_FOLDER / "engine/comm/process_group.py"), "wait_for_result"
"""File and name of the function in which a rank waits for `Group.start_all_reduce_any`."""
_COMPUTING_PATHS = ("/torch/distributed/tensor/", "/torch/distributed/pipelining/")
_get_code_and_line = attrgetter("f_code", "f_lineno")
_P2P_FUNCTIONS = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


def sample_thread(thread_id: int) -> CallStack:
    """Return the stack of a thread, innermost first, without the frames that every call has."""
    codes_and_lines: list[tuple[CodeType, int]] = []
    # Before Python 3.12, a collection may start within C code. Its finalizers run Python, so that threads take turns.
    # A thread that creates another one then waits for the lock on the list of threads, whose owner waits for the
    # interpreter (CPython issue 106883).
    innermost = map(methodcaller("get", thread_id), starmap(sys._current_frames, [()]))  # noqa: SLF001 - Python's only way
    with pause_gc(), contextlib.suppress(AttributeError):  # at the outermost frame, or if the thread has ended
        # One call without bytecode. Between bytecodes other threads may run, so a loop would be wrong.
        codes_and_lines.extend(
            map(_get_code_and_line, accumulate(chain(innermost, repeat("f_back", MAX_FRAMES - 1)), getattr))
        )
    return make_stack([(code.co_filename, line or code.co_firstlineno, code.co_name) for code, line in codes_and_lines])


def sample_helper_threads(main_thread_id: int) -> dict[str, CallStack]:
    """Return the stacks of threads that run user code, by name, except for the main thread and this one."""
    others = [t for t in threading.enumerate() if t.ident not in (None, main_thread_id, threading.get_ident())]
    stacks = {t.name: sample_thread(t.ident or 0) for t in others}
    return {name: stack for name, stack in stacks.items() if has_user_code(stack)}


def is_in_collective(stack: Sequence[Frame]) -> bool:
    """Return whether the innermost Python function is a collective."""
    inner = _find_innermost(stack)
    if inner is None:
        return False
    is_torch_collective = _DISTRIBUTED_PATH in inner.file and not any(part in inner.file for part in _COMPUTING_PATHS)
    return is_torch_collective or inner.file == _HOST_LINK or (inner.file, inner.function) == _VOTE_WAIT_FUNCTION


def is_in_p2p(stack: Sequence[Frame]) -> bool:
    """Return whether the innermost Python function is a message between two ranks."""
    inner = _find_innermost(stack)
    if inner is None:
        return False
    is_torch_message = _DISTRIBUTED_PATH in inner.file and inner.function in _P2P_FUNCTIONS
    return is_torch_message or inner.file == _HOST_MESSAGES


def _find_innermost(stack: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame, skipping torch's dispatch to an operator."""
    return next((frame for frame in stack if not frame.file.endswith("/torch/_ops.py")), None)

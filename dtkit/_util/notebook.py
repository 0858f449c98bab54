"""Detection of a Jupyter kernel, displays in its cells, and tracebacks as IPython shows them."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def get_shell() -> Any:
    """Return IPython's shell, or None outside of IPython. Never imports IPython."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)  # another thread may be importing it
    return None if get_ipython is None else get_ipython()


def in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel, whose page can show widgets."""
    return getattr(get_shell(), "kernel", None) is not None


def is_kernel_shut_down() -> bool:
    """Return whether the user shut this kernel down, rather than restarting or killing it.

    Jupyter's request to end says whether another kernel follows. The kernel keeps its answer, which repeats that.
    """
    message = getattr(getattr(get_shell(), "kernel", None), "_shutdown_message", None)
    return message is not None and message["content"].get("restart") is False


def find_running_cell() -> tuple[str, str] | None:
    """Return the ids of the cell that runs and of its execution; None if the page names no cell."""
    parent: dict[str, Any] = getattr(get_shell(), "get_parent", dict)()
    cell, execution = parent.get("metadata", {}).get("cellId"), parent.get("header", {}).get("msg_id")
    return (str(cell), str(execution)) if cell and execution else None


def show_value(value: Any) -> None:
    """Show a value as the last line of a cell is shown; print its repr outside of IPython."""
    if get_shell() is None:
        sys.stdout.write(f"{value!r}\n")
        return
    from IPython.display import display

    display(value)  # type: ignore[no-untyped-call]


class UpdatableDisplay:
    """A display in the cell that runs when it is first shown. Any thread may update it."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, data: dict[str, str]) -> None:
        """Show a MIME bundle, or replace the one that is shown."""
        from IPython.display import display

        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(data, raw=True)


_CELL_FILE = re.compile(r"[/\\]ipykernel_\d+[/\\]\d+\.py$")
"""Name that ipykernel gives to the code of a cell. Only the kernel that ran the cell has its text and number."""


def name_code(file: str) -> str:
    """Return IPython's name of a file of code: "Cell In[3]" for a cell, else "File" and the path."""
    shell = get_shell()
    name = None if shell is None else shell.compile.format_code_name(file)
    if name:
        return " ".join(name)
    return "Cell of an earlier kernel" if _CELL_FILE.search(file) else f"File {file}"


def render_traceback(error: BaseException, *, is_hidden: Callable[[str], bool]) -> list[str]:
    """Return an error's traceback as IPython shows it, without frames and causes that come from hidden files."""
    shell = get_shell()
    kept = _drop_frames(error.__traceback__, is_hidden)
    with _without_hidden_cause(error, is_hidden):
        if shell is None:
            return traceback.format_exception(type(error), error, kept)
        lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, kept, tb_offset=1)
    return lines


@contextlib.contextmanager
def _without_hidden_cause(error: BaseException, is_hidden: Callable[[str], bool]) -> Iterator[None]:
    """Take an error's cause away for a moment if a hidden file caught it: the error's message says what matters."""
    cause = error.__cause__ or error.__context__
    frames = None if cause is None else cause.__traceback__
    if cause is None or (frames is not None and not is_hidden(frames.tb_frame.f_code.co_filename)):
        yield
        return
    kept = error.__cause__, error.__context__, error.__suppress_context__
    error.__cause__ = error.__context__ = None
    try:
        yield
    finally:
        error.__cause__, error.__context__, error.__suppress_context__ = kept


def _drop_frames(frames: TracebackType | None, is_hidden: Callable[[str], bool]) -> TracebackType | None:
    """Return copies of the frames that are not hidden."""
    if frames is None:
        return None
    rest = _drop_frames(frames.tb_next, is_hidden)
    if is_hidden(frames.tb_frame.f_code.co_filename):
        return rest
    return TracebackType(rest, frames.tb_frame, frames.tb_lasti, frames.tb_lineno)

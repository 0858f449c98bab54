"""Frames of a stack: the owner of each line's code, and the lines to show."""

from __future__ import annotations

import dataclasses
import functools
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from dtkit._util.installation import PACKAGE_FOLDER

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_FRAMES = 120
"""Number of innermost frames that are kept, for a compiler's 70 too. Recursion would fill the status file."""

_DTKIT_FOLDER = str(PACKAGE_FOLDER)
ENTRY_FILES = tuple(
    str(Path(_DTKIT_FOLDER, "engine", name)) for name in ("entrypoint.py", "server.py", "session.py", "ops")
)
"""Beginnings of the paths of files through which every call passes."""
_LIBRARY_FOLDERS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclasses.dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str
    kind: str = "library"
    """"user", "dtkit" or "library" (installed packages and Python's own)."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


CallStack = tuple[Frame, ...]
"""Frames of one thread, innermost first."""


def make_stack(locations: Sequence[tuple[str, int, str]]) -> CallStack:
    """Return the stack of (file, line, function) tuples, innermost first, without the frames that every call has."""
    return trim_outer_frames([Frame(file, line, name, classify_file(file)) for file, line, name in locations])


@functools.lru_cache(4096)
def classify_file(file: str) -> str:
    """Return the owner of a file's code: "dtkit", "library" or "user"."""
    if file.startswith(_DTKIT_FOLDER + "/"):
        return "dtkit"
    installed = file.startswith(("<frozen", "<string", *(f"{folder}/" for folder in _LIBRARY_FOLDERS)))
    return "library" if installed or "/site-packages/" in file or "/dist-packages/" in file else "user"


def trim_outer_frames(frames: Sequence[Frame]) -> CallStack:
    """Return the frames without the outer ones that every call has: the kernel's, and those of dtkit's entry files.

    A stack that was cut at `MAX_FRAMES` lacks them already; its outer frames may all be a library's, of a deep call.
    """
    count = len(frames)
    while 0 < count < MAX_FRAMES and (
        frames[count - 1].kind == "library" or frames[count - 1].file.startswith(ENTRY_FILES)
    ):
        count -= 1
    return tuple(frames[:count])


_COMPILER_FUNCTIONS = {
    "/torch/_dynamo/convert_frame.py": ("",),
    "/torch/_inductor/compile_fx.py": ("compile_fx", "_compile_fx", "fx_codegen", "codegen_and_compile"),
}
"""Beginnings of the names of functions that compile, by file; an empty one stands for all functions."""


def is_compiling(stack: Sequence[Frame]) -> bool:
    """Return whether torch.compile is at work. Names of files may lack the folder of installed packages."""
    return any(
        f"/{frame.file}".endswith(file) and frame.function.startswith(names)
        for frame in stack
        for file, names in _COMPILER_FUNCTIONS.items()
    )


def is_importing(stack: Sequence[Frame]) -> bool:
    """Return whether a module is being imported."""
    return any(frame.file.startswith("<frozen importlib") for frame in stack)


def has_user_code(stack: Sequence[Frame]) -> bool:
    """Return whether any frame is the user's."""
    return any(frame.kind == "user" for frame in stack)


def find_user_frame(stack: Sequence[Frame]) -> Frame | None:
    """Return the innermost user's frame, else the innermost frame; None for an empty stack."""
    user_frames = (frame for frame in stack if frame.kind == "user")
    return next(user_frames, stack[0] if stack else None)

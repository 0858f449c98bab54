"""Errors that end a script: printed as a notebook shows them, by their `_render_traceback_`."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def install_hook() -> None:
    """Let Python print errors that render themselves in their own way. IPython does so without it. Idempotent."""
    if getattr(sys.excepthook, "func", None) is not _print_error:
        sys.excepthook = functools.partial(_print_error, sys.excepthook)


def _print_error(
    previous: Hook, error_type: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    render = getattr(error, "_render_traceback_", None)
    if render is None:
        previous(error_type, error, traceback)
        return
    sys.stderr.write("".join(render()))

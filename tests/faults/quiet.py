"""Suppression of the output that a notebook would show, which has no place in the table."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Collect printed text instead of showing it."""
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(io.StringIO()):
        yield text

"""An error, as the notebook is told of it."""

from __future__ import annotations

import traceback
from pathlib import Path

import dtkit
from dtkit._util.guard import attempt

_MOST = 4000  # characters of a message, and of a traceback ten times as many: what a notebook can show
_DOORS = tuple(str(Path(dtkit.__file__).parent / "engine" / name) for name in ("server.py", "session.py"))


def message(error: BaseException) -> str:
    """What an error says; of one that wraps the user's (torch's pipelining does), first what that was."""
    text, cause = _words(error).strip(), error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is error:
        return _shortened(text, _MOST)
    head, _, rest = text.partition("\n")
    return _shortened(f"{head} Caused by {type(cause).__name__}: {_words(cause)}\n{rest}".rstrip(), _MOST)


def _words(error: BaseException) -> str:
    return attempt(lambda: str(error), lambda other: f"(no words: its __str__ raised {type(other).__name__})")


def trace(error: BaseException) -> str:
    """The traceback without the frames of the door, which are the same for every error."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in _DOORS:
        frames = frames.tb_next
    return _shortened("".join(traceback.format_exception(type(error), error, frames)), 10 * _MOST)


def _shortened(text: str, most: int) -> str:
    """Without its middle where it is longer: a tensor in a message may be megabytes, on every rank."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end]}\n[... {len(text) - most:,} characters left out ...]\n{text[-end:]}"

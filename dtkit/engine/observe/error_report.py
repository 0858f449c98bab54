"""An error, as the notebook is told of it."""

from __future__ import annotations

import traceback
from pathlib import Path

import dtkit
from dtkit._util.guard import run_guarded

_MAX_MESSAGE_CHARS = 4000  # characters of a message, and of a traceback ten times as many: what a notebook can show
_ENTRY_FILES = tuple(str(Path(dtkit.__file__).parent / "engine" / name) for name in ("server.py", "session.py"))


def format_message(error: BaseException) -> str:
    """What an error says; of one that wraps the user's (torch's pipelining does), first what that was."""
    text, cause = _stringify_error(error).strip(), error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is error:
        return _shorten_middle(text, _MAX_MESSAGE_CHARS)
    head, _, rest = text.partition("\n")
    return _shorten_middle(
        f"{head} Caused by {type(cause).__name__}: {_stringify_error(cause)}\n{rest}".rstrip(), _MAX_MESSAGE_CHARS
    )


def _stringify_error(error: BaseException) -> str:
    return run_guarded(lambda: str(error), lambda other: f"(no words: its __str__ raised {type(other).__name__})")


def format_traceback(error: BaseException) -> str:
    """The traceback without the frames of the door, which are the same for every error."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in _ENTRY_FILES:
        frames = frames.tb_next
    return _shorten_middle("".join(traceback.format_exception(type(error), error, frames)), 10 * _MAX_MESSAGE_CHARS)


def _shorten_middle(text: str, max_chars: int) -> str:
    """Without its middle where it is longer: a tensor in a message may be megabytes, on every rank."""
    if len(text) <= max_chars:
        return text
    end = max_chars // 4
    return f"{text[: max_chars - end]}\n[... {len(text) - max_chars:,} characters left out ...]\n{text[-end:]}"

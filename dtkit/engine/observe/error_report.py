"""Text of an error for the notebook."""

from __future__ import annotations

import traceback

from dtkit._util.guard import run_guarded
from dtkit.engine.observe.worker_error import parse_worker_error
from dtkit.health.frames import ENTRY_FILES, classify_file

_MAX_MESSAGE_CHARS = 4000  # ten times as many for a traceback


def name_error(error: BaseException) -> str:
    """Return the name of an error's type: the one that was raised, also where a DataLoader's worker raised it."""
    raised = parse_worker_error(_stringify_error(error))
    return type(error).__name__ if raised is None else raised.type


def format_message(error: BaseException) -> str:
    """Return an error's message, with its notes. If it wraps the user's, as in torch's pipelining, name that first."""
    text, cause = "\n".join([_format_raised(error), *getattr(error, "__notes__", ())]), error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is error:
        return _shorten_middle(text, _MAX_MESSAGE_CHARS)
    head, _, rest = text.partition("\n")
    return _shorten_middle(
        f"{head} Caused by {name_error(cause)}: {_format_raised(cause)}\n{rest}".rstrip(), _MAX_MESSAGE_CHARS
    )


def _format_raised(error: BaseException) -> str:
    """Return the message without notes, as it was where the error was raised: here, or in a DataLoader's worker."""
    text = _stringify_error(error)
    raised = parse_worker_error(text)
    return text.strip() if raised is None else raised.message


def _stringify_error(error: BaseException) -> str:
    return run_guarded(lambda: str(error), lambda other: f"(no message: its __str__ raised {type(other).__name__})")


def format_traceback(error: BaseException) -> str:
    """Return the traceback without the outer frames that all errors share."""
    frames = error.__traceback__
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename.startswith(ENTRY_FILES):
        frames = frames.tb_next
    return _shorten_middle("".join(traceback.format_exception(type(error), error, frames)), 10 * _MAX_MESSAGE_CHARS)


def list_user_frames(error: BaseException) -> tuple[tuple[str, int, str, str], ...]:
    """Return (file, line, function, source) of the user's own frames, outermost first.

    Frames of a DataLoader's worker follow those of this process.
    """
    frames = [(f.filename, f.lineno or 0, f.name, f.line or "") for f in traceback.extract_tb(error.__traceback__)]
    raised = parse_worker_error(_stringify_error(error))
    if raised is not None:
        frames += raised.frames
    return tuple(frame for frame in frames if classify_file(frame[0]) == "user")


def _shorten_middle(text: str, max_chars: int) -> str:
    """Return a text without its middle if it is too long: every rank's message may contain a large tensor."""
    if len(text) <= max_chars:
        return text
    end = max_chars // 4
    return f"{text[: max_chars - end]}\n[... {len(text) - max_chars:,} characters left out ...]\n{text[-end:]}"

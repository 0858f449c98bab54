"""An error, as the notebook is told of it."""

from __future__ import annotations

import traceback
from pathlib import Path

_DOORS = tuple(str(Path(__file__).with_name(name)) for name in ("serving.py", "session.py"))


def message(error: BaseException) -> str:
    """What an error says; of one that wraps the user's (torch's pipelining does), first what that was."""
    text, cause = str(error).strip(), error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is error:
        return text
    head, _, rest = text.partition("\n")
    return f"{head} Caused by {type(cause).__name__}: {cause}\n{rest}".rstrip()


def trace(error: BaseException) -> str:
    """The traceback without the frames of the door, which are the same for every error."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in _DOORS:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))

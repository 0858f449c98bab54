"""Errors of a DataLoader's worker processes, read from torch's text.

torch raises such an error again in the process that loads. The message then holds the worker's traceback as text, and
an error whose class needs several arguments becomes a RuntimeError.
"""

from __future__ import annotations

import dataclasses
import itertools
import re


@dataclasses.dataclass(frozen=True)
class WorkerError:
    """Error as the worker process raised it."""

    type: str
    message: str
    """Message with its notes."""
    frames: tuple[tuple[str, int, str, str], ...]
    """(file, line, function, source) of all frames, outermost first. Code of a notebook's cell has no source here."""


def parse_worker_error(text: str) -> WorkerError | None:
    """Return the error in a message of torch.

    Return None for any other message, and for an error with a cause or a context.
    """
    caught = _CAUGHT.match(text)
    if caught is None or any(line in text for line in _LINKS):
        return None
    lines = text[caught.end() :].split("\n")
    frame_lines = list(itertools.takewhile(lambda line: not line or line.startswith("  "), lines))
    first_line, *more = lines[len(frame_lines) :] or [""]
    name, _, message = first_line.partition(": ")
    if name.rpartition(".")[2] != caught["type"]:
        return None
    return WorkerError(caught["type"], "\n".join([message, *more]).rstrip(), _parse_frames(frame_lines))


_CAUGHT = re.compile(r"Caught (?P<type>\S+) [^\n]+\.\nOriginal Traceback \(most recent call last\):\n")
_LINKS = (
    "\nThe above exception was the direct cause of the following exception:\n",
    "\nDuring handling of the above exception, another exception occurred:\n",
)
"""Lines between two tracebacks."""
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)')
_SOURCE_INDENT = " " * 4


def _parse_frames(lines: list[str]) -> tuple[tuple[str, int, str, str], ...]:
    return tuple(
        (
            frame["file"],
            int(frame["line"]),
            frame["function"],
            following.strip() if following.startswith(_SOURCE_INDENT) else "",
        )
        for line, following in itertools.pairwise([*lines, ""])
        if (frame := _FRAME.fullmatch(line))
    )

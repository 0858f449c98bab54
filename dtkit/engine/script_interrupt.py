"""Tracebacks that a script's process prints once it was interrupted.

They are held back from the output, since they are the interrupt's own doing, and show where the script was.
"""

from __future__ import annotations

import linecache
import re
import threading
from typing import TYPE_CHECKING

from dtkit.health.frames import classify_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    UserFrames = tuple[tuple[str, int, str, str], ...]

TRACEBACK_HEAD = "Traceback (most recent call last):"
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch puts it before each line of a traceback
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+)(, in (?P<function>.+))?$')


class ScriptInterrupt(KeyboardInterrupt):
    """An interrupt that has ended a script's process. `details` is the traceback that the process printed, or empty."""

    def __init__(self, user_frames: UserFrames, details: str) -> None:
        super().__init__()
        self.user_frames, self.details = user_frames, details


class TracebackFilter:
    """Passes lines on to `add_line`, but after `interrupt` not those of tracebacks that the interrupt has caused."""

    def __init__(self, add_line: Callable[[str], None], is_lost_peer: Callable[[str], bool]) -> None:
        """`is_lost_peer` returns whether a traceback's last line says that another rank is gone."""
        self._add_line, self._is_lost_peer = add_line, is_lost_peer
        self._is_interrupted = False
        self._held: list[str] = []
        self._caused: list[str] = []
        self.user_frames: UserFrames = ()
        """(file, line, function, source) of the script's own frames, outermost first."""
        # locks: while a line is added
        self._lock = threading.Lock()

    @property
    def details(self) -> str:
        """The tracebacks that were held back."""
        return "\n".join(self._caused)

    def interrupt(self) -> None:
        """Hold back tracebacks from now on."""
        self._is_interrupted = True

    def add_line(self, line: str) -> None:
        """Pass a line on, or hold it back as a traceback's."""
        with self._lock:
            plain = strip_rank_prefix(line)
            if self._is_interrupted and (self._held or plain == TRACEBACK_HEAD):
                self._held.append(line)
                if plain and not plain[0].isspace() and plain != TRACEBACK_HEAD:  # the error itself
                    self._end_traceback(plain)
            else:
                self._add_line(line)

    def close(self) -> None:
        """Pass on a traceback that lacks its end."""
        with self._lock:
            self._pass_on()

    def _end_traceback(self, cause: str) -> None:
        frames = _parse_user_frames([strip_rank_prefix(line) for line in self._held])
        self.user_frames = self.user_frames or frames
        if cause.startswith("KeyboardInterrupt") or self._is_lost_peer(cause):
            self._caused += self._held
            self._held = []
        else:
            self._pass_on()

    def _pass_on(self) -> None:
        held, self._held = self._held, []
        for line in held:
            self._add_line(line)


def strip_rank_prefix(line: str) -> str:
    """Return a traceback's line without torch's prefix, such as "[rank0]: "."""
    return _RANK_PREFIX.sub("", line)


def _parse_user_frames(lines: Sequence[str]) -> UserFrames:
    found = [match for match in map(_FRAME.match, lines) if match is not None]
    frames = [(match["file"], int(match["line"]), match["function"] or "<module>") for match in found]
    return tuple((*frame, linecache.getline(*frame[:2])) for frame in frames if classify_file(frame[0]) == "user")

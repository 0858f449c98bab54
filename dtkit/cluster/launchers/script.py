"""Scripts of launchers, as text that users can read before a launcher submits it."""

from __future__ import annotations

import dataclasses
import difflib
import shlex
import sys
from typing import TYPE_CHECKING, Any, ClassVar, Self

from dtkit._util.arguments import hide_own_frames
from dtkit.cluster.launchers.hosts import AGENT_MODULE, REFUSAL, HostLauncher
from dtkit.cluster.launchers.remedies import find_remedy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

INPUT_VARIABLE = "DTKIT_AGENT_INPUT"
"""Variable that carries an agent's input through a scheduler. Other users can read command lines, but not environments.
"""
_MAX_LOG_CHARS = 600
_MAX_FIRST_LINES = 100
"""Lines in which an agent that can't start has said why."""


class Script(str):
    """Text that a notebook shows as it is, with its lines."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def format_agent(python: str | None, variable: str = INPUT_VARIABLE) -> str:
    """Return the command that starts an agent on a host, with `python` or by default this notebook's Python.

    The agent reads its input from a shell variable that its children don't inherit.
    """
    return _format_bash(f"input=${variable}; unset {variable}; ", python, '<<< "$input"')


def format_agent_with_file(python: str | None, path: Path) -> str:
    """Return the command that starts an agent on a host that sees the file with its input."""
    return _format_bash("", python, f"< {shlex.quote(str(path))}")


def _format_bash(before: str, python: str | None, redirection: str) -> str:
    # Without its stdout, because an agent ends when the pipe that it writes to closes. Its errors go to stderr.
    python = shlex.quote(sys.executable) if python is None else python
    return f"bash -c {shlex.quote(f'{before}exec {python} -m {AGENT_MODULE} {redirection} >/dev/null')}"


class ScriptLauncher(HostLauncher):
    """Launcher whose options are lines and numbers of a script. All options have names."""

    other_words: ClassVar[Mapping[str, str]] = {}
    """Names of options in other software, with the names here."""
    first_option: ClassVar[str]
    """Option that a user may have meant by an argument without a name."""

    @hide_own_frames
    def __new__(cls, *args: object, **options: Any) -> Self:
        """Refuse unknown options, and suggest the name that was probably meant."""
        _check_option_names(cls, options)
        if args:
            raise TypeError(
                f"{cls.__name__}({args[0]!r}): name each option, as in {cls.__name__}({cls.first_option}={args[0]!r})"
            )
        return super().__new__(cls)

    def __repr__(self) -> str:
        return format_call(self)

    def check_text_options(self, *, lines: Sequence[str], lists: Sequence[str]) -> None:
        """Check options of one line, which may be None, and lists of lines, which become tuples."""
        for name in lines:
            if getattr(self, name) is not None:
                check_line(name, getattr(self, name))
        for name in lists:
            object.__setattr__(self, name, check_lines(name, getattr(self, name)))


def _check_option_names(launcher: type[ScriptLauncher], options: Iterable[str]) -> None:
    names, other_words = [field.name for field in dataclasses.fields(launcher)], launcher.other_words  # type: ignore[arg-type]  # each one is a dataclass
    for unknown in (name for name in options if name not in names):
        similar = [other_words[unknown]] if unknown in other_words else difflib.get_close_matches(unknown, names, n=1)
        hint = f"did you mean {similar[0]}=?" if similar else f"it takes {', '.join(names)}"
        raise TypeError(f"{launcher.__name__}() has no option {unknown}=; {hint}")


def check_line(name: str, value: str) -> None:
    """Raise ValueError for text that has more than one line."""
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError(f"{name}={value!r}; it must be text of one line")


def check_lines(name: str, values: Sequence[str]) -> tuple[str, ...]:
    """Return lines for a script as a tuple. Raise ValueError for a string instead of a list."""
    if isinstance(values, str):
        raise ValueError(f"{name}={values!r}; it must be a list of lines. Write {name}=[{values!r}]")  # noqa: TRY004 - the message says how
    for value in values:
        check_line(name, value)
    return tuple(values)


def check_count(name: str, value: int | None, least: int = 1) -> None:
    """Raise ValueError for a value that isn't an integer from `least` up."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ValueError(f"{name}={value!r}; it must be an integer from {least} up")


def format_call(launcher: Any) -> str:
    """Return the call that makes a launcher, with the options that differ from their defaults."""
    options = [
        f"{field.name}={getattr(launcher, field.name)!r}"
        for field in dataclasses.fields(launcher)
        if getattr(launcher, field.name) != field.default
    ]
    return f"{type(launcher).__name__}({', '.join(options)})"


def find_refusal(path: Path) -> str | None:
    """Return why an agent could not start, from the output of a job that still runs others."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(REFUSAL)[2] for line in lines if REFUSAL in line), None)


def read_log_end(path: Path) -> str:
    """Return the line of output with a known cause and its remedy, else the last lines. If this host doesn't see the
    file, return a sentence that says so.
    """
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        return f"No output in {path}: the nodes may not see its folder; choose another one with log_folder="
    if (remedy := find_remedy(text.splitlines()[:_MAX_FIRST_LINES], "that host")) is not None:
        return f"It printed: {remedy}"
    return f"Its output ends: {text[-_MAX_LOG_CHARS:]}" if text else "It printed nothing"

"""What a launcher hands to another program, as text that one can read and check before it is sent."""

from __future__ import annotations

import dataclasses
import difflib
import shlex
import sys
from typing import TYPE_CHECKING, Any

from dtkit.cluster.launchers.hosts import AGENT_MODULE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

INPUT_VARIABLE = "DTKIT_AGENT_INPUT"
"""Carries an agent's input through a scheduler: other users can read command lines, but not an environment."""


class Script(str):
    """Text that a notebook shows as it is, with its lines."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def format_agent(python: str | None, variable: str = INPUT_VARIABLE) -> str:
    """Return the command that starts an agent on a host: with the user's Python, or else this notebook's.

    The agent reads its input from a shell's variable that its children don't inherit. Its output goes nowhere, because
    an agent ends with the pipe that it writes to; errors stay on stderr.
    """
    python = shlex.quote(sys.executable) if python is None else python
    command = f'input=${variable}; unset {variable}; exec {python} -m {AGENT_MODULE} <<< "$input" >/dev/null'
    return f"bash -c {shlex.quote(command)}"


def check_option_names(launcher: type, options: Iterable[str], other_words: Mapping[str, str]) -> None:
    """Raise TypeError for an unknown option; `other_words` maps what other software calls it to the name here."""
    names = [field.name for field in dataclasses.fields(launcher)]
    for unknown in (name for name in options if name not in names):
        similar = [other_words[unknown]] if unknown in other_words else difflib.get_close_matches(unknown, names, n=1)
        hint = f"did you mean {similar[0]}=?" if similar else f"it takes {', '.join(names)}"
        raise TypeError(f"{launcher.__name__}() has no option {unknown}=; {hint}")


def check_line(name: str, value: str) -> None:
    """Raise ValueError for text that would not stay on its line of a script."""
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError(f"{name}={value!r}; it must be text of one line")


def check_lines(name: str, values: Sequence[str]) -> tuple[str, ...]:
    """Return lines for a script as a tuple. Raise ValueError for a text in place of a list."""
    if isinstance(values, str):
        raise ValueError(f"{name}={values!r}; it must be a list of lines. Write {name}=[{values!r}]")  # noqa: TRY004 - the message says how
    for value in values:
        check_line(name, value)
    return tuple(values)


def check_count(name: str, value: int | None, least: int = 1) -> None:
    """Raise ValueError for what isn't a number of things."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ValueError(f"{name}={value!r}; it must be an integer from {least} up")


def format_call(launcher: Any) -> str:
    """Return the call that makes a launcher, with the options that differ from their defaults."""
    given = [
        f"{field.name}={getattr(launcher, field.name)!r}"
        for field in dataclasses.fields(launcher)
        if getattr(launcher, field.name) != field.default
    ]
    return f"{type(launcher).__name__}({', '.join(given)})"


def read_log_end(path: Path, max_chars: int = 600) -> str:
    """Return the last lines of output, or a sentence about a file that this host doesn't see."""
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        return f"No output in {path}: the nodes may not see its folder; choose another one with log_folder="
    return f"Its output ends: {text[-max_chars:]}" if text else "It printed nothing"

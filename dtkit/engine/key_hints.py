"""The key that was probably meant, where a user's function asks a batch or an output for one that it lacks."""

from __future__ import annotations

import difflib
import dis
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType


def explain_key(error: BaseException) -> str | None:
    """Return the remedy where a local variable is a dict without the key; None for dicts that aren't known.

    A global dict and the environment may have other keys on an engine than in the notebook.
    """
    if type(error) is not KeyError or not error.args or not isinstance(error.args[0], str):
        return None
    key, traceback, found = error.args[0], error.__traceback__, None
    while traceback is not None:  # the last one that matches; a dict's own class may add frames
        found, traceback = _find_mapping(traceback, key) or found, traceback.tb_next
    if found is None:
        return None
    name, mapping = found
    names = list(map(str, mapping))
    has = f"{name} has {', '.join(map(repr, names[:6]))}" if names else f"{name} is empty"
    similar = difflib.get_close_matches(key, names, n=1)
    return f"{has}, and no {key!r}" + (f"; did you mean {similar[0]!r}?" if similar else "")


def _find_mapping(traceback: TracebackType, key: str) -> tuple[str, Mapping[Any, Any]] | None:
    """Return the local variable, with its name, that this frame asks for the key; None if it does something else."""
    frame = traceback.tb_frame
    before = [each for each in dis.get_instructions(frame.f_code) if each.offset < traceback.tb_lasti][-2:]
    if len(before) < 2 or not before[0].opname.startswith("LOAD_FAST") or before[1].argval != key:
        return None
    name = before[0].argval
    value = frame.f_locals.get(name) if isinstance(name, str) else None
    if not isinstance(value, Mapping) or value is os.environ or key in value:
        return None
    return name, value

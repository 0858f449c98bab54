"""The Tab key of IPython behind objects of dtkit: it offers what `dir` lists.

By default IPython asks jedi, which reads sources. Behind ``run.history.`` it offers methods that only other modules
call, and misses attributes that a constructor sets.
"""

from __future__ import annotations

import inspect
import re
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_PATH = re.compile(r"(?<![\w.)\]])([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\.(\w*)$")
_READ_PROPERTIES = frozenset({"history", "nodes", "spec", "status"})
"""Properties that may be read for a completion: they ask no engine."""
_IDENTIFIER = "dtkit"
_PRIORITY = 1000  # before jedi, which takes longer


def use_dir(shell: Any) -> None:
    """Let the Tab key of IPython's shell offer what `dir` lists behind objects and modules of dtkit.

    Shells without matchers, such as those of IPython before 8.6, stay as they are.
    """
    matchers = getattr(getattr(shell, "Completer", None), "custom_matchers", None)
    if matchers is None or any(getattr(matcher, "matcher_identifier", "") == _IDENTIFIER for matcher in matchers):
        return
    try:
        from IPython.core.completer import SimpleCompletion, context_matcher
    except ImportError:
        return

    @context_matcher(identifier=_IDENTIFIER, priority=_PRIORITY)  # type: ignore[untyped-decorator]
    def match(context: Any) -> dict[str, Any]:
        names, prefix = find_names(context.text_until_cursor, shell.user_ns)
        completions = [SimpleCompletion(name, type=kind) for name, kind in names.items()]
        return {"completions": completions, "matched_fragment": prefix, "suppress": bool(names)}

    matchers.append(match)


def find_names(text: str, namespace: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Return (names that continue a text, with their kinds; what of them was typed); no names for other objects."""
    if (found := _PATH.search(text)) is None:
        return {}, ""
    path, prefix = found[1].split("."), found[2]
    obj = namespace.get(path[0])
    for name in path[1:]:
        obj = _read_attribute(obj, name) if _is_own(obj) else None
    if not _is_own(obj):
        return {}, prefix
    names = [name for name in _list_names(obj) if name.startswith(prefix) and (prefix[:1] == "_" or name[0] != "_")]
    return {name: _name_kind(obj, name) for name in names}, prefix


def _list_names(obj: Any) -> list[str]:
    """Return what `dir` lists; of a module that does not say what it has for users, what it defines."""
    if not isinstance(obj, types.ModuleType) or "__dir__" in vars(obj):
        return dir(obj)
    return [name for name in dir(obj) if getattr(getattr(obj, name), "__module__", "") == obj.__name__]


def _is_own(obj: Any) -> bool:
    module = obj.__name__ if isinstance(obj, types.ModuleType) else getattr(type(obj), "__module__", "")
    return str(module).partition(".")[0] == "dtkit"


def _read_attribute(obj: Any, name: str) -> Any:
    """Return an attribute, or None for one whose reading may take time."""
    if isinstance(inspect.getattr_static(obj, name, None), property) and name not in _READ_PROPERTIES:
        return None
    return getattr(obj, name, None)


def _name_kind(obj: Any, name: str) -> str:
    """Return the kind of a name as IPython shows it, without reading properties."""
    value = inspect.getattr_static(obj, name, None)
    if isinstance(value, type):
        return "class"
    return "function" if callable(value) or isinstance(value, (classmethod, staticmethod)) else "instance"

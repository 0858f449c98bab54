"""Names that the Tab key offers behind an object, and `help` shows: those for users, not dtkit's own."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_T = TypeVar("_T")

_hidden_names: dict[type, set[str]] = {}  # by class
_SHOWN_SPECIAL_NAMES = ("__await__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__")


class UserNames(type):
    """Metaclass of classes that users hold: `dir` of such a class, which `help` reads, has only names for users."""

    def __dir__(cls) -> list[str]:
        hidden = {name for kind in cls.__mro__ for name in get_hidden_names(kind)}
        names = [name for name in super().__dir__() if name not in hidden]
        return [name for name in names if name in _SHOWN_SPECIAL_NAMES or not name.startswith("_")]


def hide_constructor(cls: type[_T]) -> type[_T]:
    """Decorate a class whose objects dtkit makes, so that `help` shows no arguments of its constructor."""
    cls.__signature__ = inspect.Signature()  # type: ignore[attr-defined]  # what inspect.signature reads
    return cls


def hide_from_completion(*names: str) -> Callable[[type[_T]], type[_T]]:
    """Decorate a class so that `dir` leaves out these names of its objects. They still work."""

    def decorate(cls: type[_T]) -> type[_T]:
        missing = [name for name in names if not hasattr(cls, name) and name not in cls.__annotations__]
        assert not missing, f"{cls.__name__} has no {', '.join(missing)}"
        _hidden_names.setdefault(cls, set()).update(names)
        list_names = cls.__dir__  # a class may be decorated several times

        def __dir__(self: _T) -> list[str]:  # noqa: N807 - `help` shows the function's name
            """Return the names for users."""
            return [name for name in list_names(self) if name not in names]

        cls.__dir__ = __dir__  # type: ignore[method-assign, assignment]
        return cls

    return decorate


def get_hidden_names(cls: type) -> Collection[str]:
    """Return what :func:`hide_from_completion` hides: names that dtkit's own modules use."""
    return _hidden_names.get(cls, ())


def list_options(obj: Any, others: Collection[str] = ()) -> list[str]:
    """Return the names for `dir` of a dataclass: its fields, special names, and `others`."""
    shown = {field.name for field in dataclasses.fields(obj)} | set(others)
    return [name for name in object.__dir__(obj) if name in shown or name.startswith("_")]

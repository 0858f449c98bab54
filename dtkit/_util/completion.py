"""Names that the Tab key offers behind an object: those for users, without those that other modules of dtkit call."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_T = TypeVar("_T")

_hidden_names: dict[type, set[str]] = {}  # by class


def hide_from_completion(*names: str) -> Callable[[type[_T]], type[_T]]:
    """Decorate a class so that `dir` leaves out these names of its objects. They still work."""

    def decorate(cls: type[_T]) -> type[_T]:
        missing = [name for name in names if not hasattr(cls, name) and name not in cls.__annotations__]
        assert not missing, f"{cls.__name__} has no {', '.join(missing)}"
        _hidden_names.setdefault(cls, set()).update(names)
        list_names = cls.__dir__  # a class may be decorated several times
        cls.__dir__ = lambda self: [name for name in list_names(self) if name not in names]  # type: ignore[method-assign]
        return cls

    return decorate


def get_hidden_names(cls: type) -> Collection[str]:
    """Return what :func:`hide_from_completion` hides: names that dtkit's own modules use."""
    return _hidden_names.get(cls, ())


def list_options(obj: Any, others: Collection[str] = ()) -> list[str]:
    """Return the names for `dir` of a dataclass: its fields, special names, and `others`."""
    shown = {field.name for field in dataclasses.fields(obj)} | set(others)
    return [name for name in object.__dir__(obj) if name in shown or name.startswith("_")]

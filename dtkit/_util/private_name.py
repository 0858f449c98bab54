"""An entry of the table of private names, :mod:`dtkit._util.torch_private`."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import operator
from typing import Any

SUPPORTED_TORCH = "2.11 to 2.13"


@dataclasses.dataclass(frozen=True)
class PrivateName:
    """One private name: where it is, which feature needs it, and why no public name serves."""

    module: str
    path: str
    """The dotted path within the module; empty for the module itself."""
    feature: str
    """What doesn't work without it, as the subject of a sentence in the plural."""
    why: str
    kind: str = "object"
    """"object"; "method" or "attribute" for a class member, which is loaded as a function of an instance; or "key". A
    key is for code that sets or replaces an attribute. It is loaded as the last part of the path.
    """
    since: str = "2.11"
    """The first version of torch (or ipyparallel, or Keras) with this name that dtkit supports."""
    is_optional: bool = False
    """Whether the name loads as None if the installed version lacks it."""
    requires: tuple[str, ...] = ()
    """Members of this class that a subclass in dtkit overrides or calls."""

    def load(self) -> Any:
        """Return the object, or raise ImportError with the feature, the name, the version and the remedy."""
        try:
            value = self._resolve()
            for member in self.requires:
                _check_member(value, member)
        except (AttributeError, ModuleNotFoundError) as error:
            version = importlib.metadata.version(self.module.partition(".")[0])  # raises if it isn't installed at all
            if self.is_optional:
                return None
            raise ImportError(self._explain_absence(version, error)) from error
        key = self.path.rpartition(".")[2]
        if self.kind == "method":
            return lambda instance, *args, **kwargs: getattr(instance, key)(*args, **kwargs)
        if self.kind == "attribute":
            return operator.attrgetter(key)
        return key if self.kind == "key" else value

    def _explain_absence(self, version: str, error: Exception) -> str:
        package = self.module.partition(".")[0]
        name = f"{self.module}.{self.path}".rstrip(".")
        remedy = f"a torch from {SUPPORTED_TORCH}" if package == "torch" else f"{package} {self.since}"
        return (
            f"{self.feature} need {name}, which {package} {version} doesn't have ({error}). It is a private name. "
            f"Install {remedy}, or a newer dtkit"
        )

    def _resolve(self) -> Any:
        value: Any = importlib.import_module(self.module)
        if not self.path:
            return value
        *owners, key = self.path.split(".")
        for name in owners:
            value = getattr(value, name)
        if isinstance(value, type):
            _check_member(value, key)
        return getattr(value, key, None) if isinstance(value, type) else getattr(value, key)


def _check_member(owner: type, name: str) -> None:
    """Raise AttributeError unless a class has this member, or its methods use it in instances."""
    for base in owner.__mro__:
        codes = (getattr(member, "__code__", None) for member in vars(base).values())
        if name in vars(base) or any(name in code.co_names for code in codes if code is not None):
            return
    raise AttributeError(f"{owner.__name__} has no {name}")

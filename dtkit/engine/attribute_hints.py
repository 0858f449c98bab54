"""The name that was probably meant, where code asks torch's modules or a tensor for another."""

from __future__ import annotations

import difflib
from types import ModuleType

import torch

_MIN_SIMILARITY = 0.75


def is_torchs(error: BaseException) -> bool:
    """Return whether an attribute of a tensor or of a module of torch is missing, as it is on every rank."""
    if not isinstance(error, AttributeError):
        return False
    owner = error.obj
    is_torch_module = isinstance(owner, ModuleType) and owner.__name__.partition(".")[0] == "torch"
    return is_torch_module or isinstance(owner, torch.Tensor)


def explain_attribute(error: BaseException) -> str | None:
    """Return the attribute that has a similar name, or None."""
    if not isinstance(error, AttributeError) or not is_torchs(error) or not isinstance(error.name, str):
        return None
    names = [name for name in dir(error.obj) if not name.startswith("_")]
    similar = difflib.get_close_matches(error.name, names, 1, _MIN_SIMILARITY)
    return f"Did you mean {similar[0]!r}?" if similar else None

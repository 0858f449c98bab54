"""The keyword that was probably meant, where a user's function calls torch, or a function of its own, with another."""

from __future__ import annotations

import difflib
import inspect
import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NAMESPACES = (torch.optim, torch.optim.lr_scheduler, torch.nn, torch.nn.functional, torch)
_OTHER_NAMES = {  # other libraries' names of arguments
    "axis": ("dim",),
    "filters": ("out_channels",),
    "input_dim": ("in_features", "num_embeddings"),
    "keepdims": ("keepdim",),
    "l2": ("weight_decay",),
    "learning_rate": ("lr",),
    "output_dim": ("embedding_dim", "out_features"),
    "rate": ("p", "lr"),
    "strides": ("stride",),
    "units": ("out_features", "hidden_size"),
}


def explain_keyword(error: BaseException) -> str | None:
    """Return the remedy for a keyword that a function doesn't know; None if it or its parameters aren't known.

    A model's forward is left to a hint that knows the data.
    """
    found = re.search(r"([\w.]+)\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if not isinstance(error, TypeError) or found is None:
        return None
    path, keyword = found[1].removesuffix(".__init__"), found[2]
    function = None if path.endswith("forward") else _find_function(error, path.split("."))
    names = [] if function is None else _list_parameters(function)
    if not names:
        return None
    others = [name for name in _OTHER_NAMES.get(keyword, ()) if name in names]
    similar = others or difflib.get_close_matches(keyword, names, n=1)
    hint = f"did you mean {similar[0]}=?" if similar else f"it takes {', '.join(names)}"
    return f"{path} has no argument {keyword}=; {hint}"


def _find_function(error: BaseException, path: Sequence[str]) -> Any:
    """Return what a name in an error's message stands for: in the code that called it, or in torch."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    owners = [] if traceback is None else [traceback.tb_frame.f_locals, traceback.tb_frame.f_globals]
    found = next((owner[path[0]] for owner in [*owners, *map(vars, _NAMESPACES)] if path[0] in owner), None)
    for name in path[1:]:
        found = getattr(found, name, None)
    return found if callable(found) else None


def _list_parameters(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]

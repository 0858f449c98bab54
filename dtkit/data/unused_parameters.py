"""Parameters that the first rows give no gradient, which a strategy may need from each step.

Other rows may give them one. So this is a warning only, and not about experts: parameters that have used ones next to
them in a list of modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.strategies.base import Strategy

_MAX_NAMES = 4


def describe_unused(unused: Sequence[str], model: torch.nn.Module, strategy: Strategy) -> str | None:
    """Return a warning of the parameters without a gradient, if the strategy needs one; else None."""
    chosen_from = _list_alternatives(model, unused)
    names = [name for name in unused if not name.startswith(chosen_from)]
    if not names or not strategy.unused_parameter_error:
        return None
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return (
        f"{', '.join(names[:_MAX_NAMES])}{more} got no gradient from the first rows: {strategy.unused_parameter_error}"
    )


def _list_alternatives(model: torch.nn.Module, unused: Sequence[str]) -> tuple[str, ...]:
    """Return the prefixes of the names in lists of modules of which some are used: rows may choose among them."""
    used = {name for name, p in model.named_parameters() if p.requires_grad} - set(unused)
    prefixes = (
        f"{name}." if name else ""
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))
    )
    return tuple(prefix for prefix in prefixes if any(name.startswith(prefix) for name in used))

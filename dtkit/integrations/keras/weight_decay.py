"""Variables that `exclude_from_weight_decay` has named. An optimizer's configuration leaves them out."""

from __future__ import annotations

from typing import Any

_PREFIX = "_exclude_from_weight_decay"
"""How Keras's attributes begin that hold ids and a pattern."""


def copy_exclusions(source: Any, target: Any) -> None:
    """Let `target` exclude the same variables of this process as `source`, an optimizer of the same kind."""
    for name, value in vars(source).items():
        if name.startswith(_PREFIX):
            setattr(target, name, value)

"""The tensor-parallel plan that a model of Hugging Face's transformers brings along in its config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.strategies.tensor.plan import find_uneven_heads, matches_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",
    "rowwise_split_input": "scattered",
    "rowwise_rep": "scattered",
}
"""Styles of transformers, by the names that are equal in meaning here. Others (of experts, say) are left out."""


def find_config_groups(model: nn.Module, tp_size: int) -> Iterator[dict[str, str]]:
    """Yield groups of layers to shard together, {module name: style}: those of each parent module.

    A parent with a style that dtkit doesn't have, or with heads that can't be divided, is left out.
    """
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not isinstance(plan, dict):
        return
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if base and hasattr(model, base) else ""
    groups: dict[str, dict[str, str]] = {}
    for name, _ in model.named_modules():
        for pattern, style in plan.items():
            if matches_pattern(name, prefix + pattern):
                groups.setdefault(name.rpartition(".")[0], {})[name] = _STYLES.get(style, "")
    for parent, group in groups.items():
        if "" not in group.values() and not any(find_uneven_heads(model.get_submodule(parent), tp_size)):
            yield group

"""Whether lower or higher values of a metric are better: the only place that decides it.

A metric may state it, as those of torchmetrics do with ``higher_is_better``. For others, the name may say it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit._util.metric_collections import split_collections

if TYPE_CHECKING:
    from collections.abc import Mapping

_LOWER_WORDS = ("loss", "error", "perplexity", "mse", "mae", "rmse", "distance", "divergence", "kl")
_HIGHER_WORDS = (
    "acc", "ap", "auc", "auroc", "bleu", "correlation", "dice", "f1", "f1score", "iou", "map", "mcc", "ndcg",
    "precision", "psnr", "r2", "recall", "rouge", "score", "sensitivity", "specificity", "ssim",
    "top1", "top5",
)  # fmt: skip


def read_directions(metrics: Mapping[str, Any]) -> dict[str, bool]:
    """Return the metrics that state whether higher is better, by the names of their values."""
    stated = {name: getattr(metric, "higher_is_better", None) for name, metric in split_collections(metrics).items()}
    return {name: is_higher for name, is_higher in stated.items() if isinstance(is_higher, bool)}


def is_better_lower(name: str, stated: Mapping[str, bool]) -> bool:
    """Return whether a metric is better when it is lower: as `stated`, or as losses, errors and distances by name."""
    if name in stated:
        return not stated[name]
    return any(
        word in name.lower().replace("-", "_").split("_") or name.lower().endswith(word) for word in _LOWER_WORDS
    )


def has_direction(name: str, stated: Mapping[str, bool]) -> bool:
    """Return whether lower or higher values are known to be better: only then is one of them the best."""
    words = name.lower().replace("-", "_").replace(" ", "_").split("_")
    by_name = name.lower().endswith("accuracy") or any(word in _HIGHER_WORDS for word in words)
    return name in stated or is_better_lower(name, stated) or by_name


def is_better_higher(name: str, stated: Mapping[str, bool]) -> bool:
    """Return whether higher values are known to be better."""
    return has_direction(name, stated) and not is_better_lower(name, stated)

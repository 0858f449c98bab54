"""Reports of ranks on one step for explanations, without engines."""

from __future__ import annotations

from typing import Any

import numpy as np

from dtkit.explain.data_parallel import StepExplanation

RANKS = [  # rank, rows, loss
    (0, [3, 18, 0], 1.0),
    (1, list(range(4, 9)), 2.0),
    (2, [], None),
]


def make_tensor_report(name: str, own: float | None, **changes: Any) -> dict[str, Any]:
    """Return a tensor's report. The reduced gradient is 0.3, with a cosine of 0.5 to the rank's own gradient."""
    has_gradient = own is not None
    fields = {
        "kind": "parameter",
        "name": name,
        "shape": (8, 4),
        "local_norm": own,
        "contribution": own / 2 if has_gradient else None,
        "reduced": 0.3,
        "cosine": 0.5 if has_gradient else None,
        "update": 0.03,
        "value": 1.5,
        "checksum": "0123456789ab",
    }
    return fields | changes


def make_report(rank: int, rows: Any, loss: float | None, total: int, names: tuple[str, ...]) -> dict[str, Any]:
    count = len(rows)
    return {
        "model": "Net",
        "rank": rank,
        "step": 7,
        "epoch": 1,
        "rows": np.array(rows, np.int64),
        "samples": count,
        "loss": loss,
        "weight": float(count),
        "share": count / total,
        "clip": None,
        "lr": 0.1,
        "before": "aaaaaaaaaaaa",
        "after": "bbbbbbbbbbbb",
        "buffers": None,
        "tensors": [make_tensor_report(name, None if loss is None else 0.4 + rank / 10) for name in names],
    }


def make_reports(
    ranks: Any = RANKS, names: tuple[str, ...] = ("0.weight", "0.bias"), **changes: Any
) -> list[dict[str, Any]]:
    total = sum(len(rows) for _, rows, _ in ranks)
    return [make_report(*rank, total, names) | changes for rank in ranks]


def make_explanation(*args: Any, **changes: Any) -> StepExplanation:
    return StepExplanation.from_reports(make_reports(*args, **changes))

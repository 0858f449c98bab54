"""Reports of ranks about one step, made by hand, for explanations."""

from __future__ import annotations

from typing import Any

import numpy as np

from dtkit.explain.data_parallel import StepExplanation

RANKS = [  # rank, rows, loss
    (0, [3, 18, 0], 1.0),
    (1, list(range(4, 9)), 2.0),
    (2, [], None),
]


def tensor(name: str, own: float | None, **also: Any) -> dict[str, Any]:
    """A tensor's report; the reduced gradient is 0.3 and, as everywhere here, at a cosine of 0.5 to the own one."""
    there = own is not None
    told = {
        "kind": "parameter",
        "name": name,
        "shape": (8, 4),
        "own": own,
        "contribution": own / 2 if there else None,
        "reduced": 0.3,
        "cosine": 0.5 if there else None,
        "update": 0.03,
        "value": 1.5,
        "checksum": "0123456789ab",
    }
    return told | also


def report(rank: int, rows: Any, loss: float | None, total: int, names: tuple[str, ...]) -> dict[str, Any]:
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
        "tensors": [tensor(name, None if loss is None else 0.4 + rank / 10) for name in names],
    }


def reports(ranks: Any = RANKS, names: tuple[str, ...] = ("0.weight", "0.bias"), **also: Any) -> list[dict[str, Any]]:
    total = sum(len(rows) for _, rows, _ in ranks)
    return [report(*each, total, names) | also for each in ranks]


def told(*args: Any, **also: Any) -> StepExplanation:
    return StepExplanation.from_reports(reports(*args, **also))

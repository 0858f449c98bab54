"""Reports of pipeline stages and sharded ranks on one step, without engines."""

from __future__ import annotations

import copy
from typing import Any


def make_base(rank: int, **more: Any) -> dict[str, Any]:
    """Return the part that all kinds of reports have."""
    fields = {
        "model": "M",
        "rank": rank,
        "step": 4,
        "epoch": 1,
        "rows": None,
        "samples": 8,
        "loss": None,
        "weight": 0.0,
    }
    return fields | {"share": 0.0, "clip": None, "lr": 0.1, "before": "a", "after": "b", "buffers": None} | more


def make_transfer(way: str, kind: str, micro_batch: int, at: float, **changes: Any) -> dict[str, Any]:
    """Return a transfer between two stages: 0 on rank 0, 1 on rank 1."""
    border = (0, 1) if kind == "activation" else (1, 0)
    rank, peer = border if way == "sent" else border[::-1]
    fields = {
        "direction": way,
        "kind": kind,
        "stage_pair": border,
        "tensor_id": (micro_batch, 0),
        "rank": rank,
        "peer": peer,
    }
    tensor = {"shape": (4, 3), "dtype": "float32", "nbytes": 48, "norm": 2.0, "first": (0.5, 1.0, 1.5)}
    return fields | tensor | {"at": at, "digest": f"{kind}{micro_batch}"} | changes


def make_pipeline_reports() -> list[dict[str, Any]]:
    """Return the reports of two ranks: two micro-batches forward, and their gradients backward."""
    first = [make_transfer("sent", "activation", k, 1.0 + k) for k in (0, 1)]
    first += [make_transfer("arrived", "gradient", k, 4.0 + k) for k in (0, 1)]
    second = [make_transfer("arrived", "activation", k, 1.5 + k) for k in (0, 1)]
    second += [make_transfer("sent", "gradient", k, 3.5 + k) for k in (0, 1)]
    parts = [{"stage": s, "micro_batch": k, "norm": 1.0 + k} for s in (0, 1) for k in (0, 1)]
    stage = {"tensors": 2, "numbers": 15, "norm": 2.5, "gap": 1e-8}
    return [
        make_base(0, transfers=first, parts=parts[:2], stages={0: dict(stage)}),
        make_base(1, transfers=second, parts=parts[2:], stages={1: dict(stage)}, loss=0.75, weight=8.0),
    ]


def make_collective(operation: str, phase: str, nbytes: int, digest: str | None) -> dict[str, Any]:
    shape = {"shape": (nbytes // 4,), "dtype": "float32", "nbytes": nbytes, "ranks": (0, 1)}
    return {"operation": operation, "phase": phase, "digest": digest, "is_direct": False} | shape


def make_sharded_reports(sent: int = 300) -> list[dict[str, Any]]:
    collectives = [
        make_collective("all_gather", "forward", 200, "x"),
        make_collective("reduce_scatter", "backward", 200, None),
    ]
    more = {"reports_samples": True, "sent_bytes": sent, "held_bytes": 100, "whole_bytes": 200, "weight": 8.0}
    return [make_base(r, collectives=copy.deepcopy(collectives), loss=0.5 + r, **more) for r in (0, 1)]

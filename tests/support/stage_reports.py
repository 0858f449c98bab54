"""Reports of pipeline stages and of sharded ranks about one step, made by hand."""

from __future__ import annotations

import copy
from typing import Any


def base(rank: int, **more: Any) -> dict[str, Any]:
    """The part of a report that all kinds have."""
    found = {"model": "M", "rank": rank, "step": 4, "epoch": 1, "rows": None, "samples": 8, "loss": None, "weight": 0.0}
    return found | {"share": 0.0, "clip": None, "lr": 0.1, "before": "a", "after": "b", "buffers": None} | more


def sighting(way: str, kind: str, micro_batch: int, at: float, **changes: Any) -> dict[str, Any]:
    """Of two stages: 0 on rank 0, 1 on rank 1."""
    border = (0, 1) if kind == "activation" else (1, 0)
    rank, peer = border if way == "sent" else border[::-1]
    found = {"way": way, "kind": kind, "border": border, "which": (micro_batch, 0), "rank": rank, "peer": peer}
    what = {"shape": (4, 3), "dtype": "float32", "nbytes": 48, "norm": 2.0, "first": (0.5, 1.0, 1.5)}
    return found | what | {"at": at, "digest": f"{kind}{micro_batch}"} | changes


def piped() -> list[dict[str, Any]]:
    """Reports of two ranks: two micro-batches down, and their gradients up."""
    first = [sighting("sent", "activation", k, 1.0 + k) for k in (0, 1)]
    first += [sighting("arrived", "gradient", k, 4.0 + k) for k in (0, 1)]
    second = [sighting("arrived", "activation", k, 1.5 + k) for k in (0, 1)]
    second += [sighting("sent", "gradient", k, 3.5 + k) for k in (0, 1)]
    parts = [{"stage": s, "micro_batch": k, "norm": 1.0 + k} for s in (0, 1) for k in (0, 1)]
    stage = {"tensors": 2, "numbers": 15, "norm": 2.5, "gap": 1e-8}
    return [
        base(0, sightings=first, parts=parts[:2], stages={0: dict(stage)}),
        base(1, sightings=second, parts=parts[2:], stages={1: dict(stage)}, loss=0.75, weight=8.0),
    ]


def collective(what: str, phase: str, nbytes: int, digest: str | None) -> dict[str, Any]:
    shape = {"shape": (nbytes // 4,), "dtype": "float32", "nbytes": nbytes, "ranks": (0, 1)}
    return {"what": what, "phase": phase, "digest": digest} | shape


def cut(sent: int = 300) -> list[dict[str, Any]]:
    found = [collective("all_gather", "forward", 200, "x"), collective("reduce_scatter", "backward", 200, None)]
    more = {"speaks": True, "sent_bytes": sent, "held_bytes": 100, "whole_bytes": 200, "weight": 8.0}
    return [base(r, collectives=copy.deepcopy(found), loss=0.5 + r, **more) for r in (0, 1)]

"""The file that rank 0 writes while it trains: a line with the metrics of all rounds, then the model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

Metrics = dict[str, dict[str, list[float]]]
"""Metrics by data, then by name; one value a round."""


def pack_stored(metrics: Metrics, model: bytes) -> bytes:
    """Return the file's content."""
    values = {data: {name: list(map(float, part)) for name, part in named.items()} for data, named in metrics.items()}
    return json.dumps(values).encode() + b"\n" + model


def read_stored(path: Path) -> tuple[Metrics, bytes] | None:
    """Return metrics and model; None if no round was stored."""
    try:
        header, _, model = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    return json.loads(header), model

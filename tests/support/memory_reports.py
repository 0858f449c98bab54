"""Memory usage of a rank, without an engine."""

from __future__ import annotations

from typing import Any

from dtkit.planning.memory_report import MemoryUsage

MB = 10**6


def make_usage(**changes: Any) -> MemoryUsage:
    fields: dict[str, Any] = {"sent_model": 0, "parameters": 20 * MB, "gradients": 20 * MB, "optimizer": 40 * MB}
    return MemoryUsage(**(fields | {"process_growth": 100 * MB, "limit": 150 * MB} | changes))

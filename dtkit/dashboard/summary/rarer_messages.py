"""Strategies that send less often or less than the one of a run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtkit.dashboard.summary.measurements import Measurements


def name_other_remedies(facts: Measurements, is_communication: bool) -> str:  # noqa: FBT001 - one of two kinds of overhead
    """Return strategies that send less often or less, if the run could use them."""
    strategy = facts.spec.strategy
    if not is_communication:
        return ""
    if strategy.startswith("ParameterAveraging("):
        every = re.search(r"every=(\d+)", strategy)
        return f"; or send less often, with every={4 * int(every[1])}" if every else ""
    if strategy.startswith("DataParallel("):
        compressed = "" if "compress" in strategy else ' or DataParallel(compress="bf16")'
        return f"; or send less, with ParameterAveraging(){compressed}"
    return "; or use DataParallel()" if strategy.startswith("NaiveDataParallel(") else ""

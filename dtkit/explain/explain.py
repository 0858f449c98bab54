"""Which explanation a step gets: what ranks report tells how they divide the work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.explain.data_parallel import Explanation


def build_explanation(reports: Sequence[Any], model: str, clock_offsets: Sequence[float] | None) -> Explanation:
    """Of a step, from the reports of all ranks; `offsets` are their clocks', where they are on several hosts."""
    if "sightings" in reports[0]:
        from dtkit.explain.pipeline import PipelineExplanation

        return PipelineExplanation.from_reports(reports, model, clock_offsets)
    if "collectives" in reports[0]:
        from dtkit.explain.sharded import ShardedExplanation

        return ShardedExplanation.from_reports(reports, model)
    from dtkit.explain.data_parallel import StepExplanation

    return StepExplanation.from_reports(reports)

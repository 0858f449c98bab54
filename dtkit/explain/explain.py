"""Choice of the explanation of a step, by the type of its ranks' reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.explain.base import Explanation


def build_explanation(reports: Sequence[Any], model: str, clock_offsets: Sequence[float] | None) -> Explanation:
    """Return the explanation of a step from the reports of all ranks, in any order.

    `clock_offsets` has the lead of each rank's clock over rank 0's in seconds; None on one host.
    """
    if "transfers" in reports[0]:
        from dtkit.explain.pipeline import PipelineExplanation

        return PipelineExplanation.from_reports(reports, model, clock_offsets)
    if "collectives" in reports[0]:
        from dtkit.explain.sharded import ShardedExplanation

        return ShardedExplanation.from_reports(reports, model)
    from dtkit.explain.data_parallel import StepExplanation

    return StepExplanation.from_reports(reports)

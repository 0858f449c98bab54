"""The part of a message that is above the charts: the state in words and numbers, and the tiles."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting
from dtkit.dashboard.live.evaluation_feed import replace_nonfinite
from dtkit.dashboard.summary.activity import find_activity, name_bad_end
from dtkit.dashboard.summary.metrics import build_tiles, compute_epoch
from dtkit.dashboard.summary.remedy import find_remedy
from dtkit.dashboard.summary.stall import find_stall
from dtkit.history.divergence import find_divergence
from dtkit.history.rate_jump import find_reference_rates

if TYPE_CHECKING:
    from dtkit.dashboard.run_view import RunView
    from dtkit.dashboard.summary.lost_nodes import LostNodes
    from dtkit.dashboard.summary.metrics import RunMetrics
    from dtkit.types import Status


def describe_head(run: RunView, status: Status, metrics: RunMetrics, lost_nodes: LostNodes) -> dict[str, Any]:
    """Return the status, learning rate, tiles and throughput of a run for a page."""
    epoch, epochs = compute_epoch(run.spec, status.step)
    activity, divergence = find_activity(run, lost_nodes), find_divergence(run.history)
    return {
        "status": {
            "state": status.state.value,
            **({"stepping": True} if status.is_stepping else {}),
            "step": status.step,
            "steps": status.steps,
            "epoch": epoch,
            "epochs": epochs,
            "elapsed": replace_nonfinite(status.elapsed_s),
            "remaining": None if activity else replace_nonfinite(status.remaining_s),
            "activity": None if activity is None else dataclasses.asdict(activity),
            "remedy": find_remedy(run),
            "diverged": None if divergence is None else divergence.short,
            **({"end": end} if (end := name_bad_end(run)) else {}),
            # A notice has the same text as a stall.
            "message": "" if find_stall(run) or status.state.has_ended else formatting.sanitize_text(status.message),
        },
        "lr": replace_nonfinite(run.lr),
        **_describe_reference_rates(run),
        "tiles": [vars(tile) for tile in build_tiles(run, metrics)],
        "throughput": replace_nonfinite(metrics.throughput),
    }


def _describe_reference_rates(run: RunView) -> dict[str, Any]:
    """Return the rates that a page compares a new one with, unless that is the present one alone."""
    rates = find_reference_rates(run.history, run.lr)
    return {} if rates == [run.lr] or not rates else {"rates": rates}

"""Origin of gradients that are not finite, as far as the reports of all ranks show it.

Rows of data that are not finite are named first. After summing over the ranks, gradients are not finite on any rank. A
loss that is not finite identifies the rank with its samples. In a pipeline, only the last stage has a loss. So the
first stage with a non-finite output is the origin. If all outputs and losses are finite, the origin is the last stage
with non-finite gradients: backward starts at the last.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dtkit.types import Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.types import DispatchResult

_RUINED_REMEDY = (
    "The loss grew since step {step:,}, so the parameters are ruined already: run.resume() would fail again. Train "
    "again with a lower learning rate{or_checkpoint}; run.stop() ends this run"
)
_REMEDY = (
    "All ranks paused before that update: parameters are as after the step before. Lower the learning rate "
    "(run.set(lr=...)) or repair the data or the loss; run.resume() takes the same step again, run.stop() ends the run"
)
_DATA_REMEDY = (
    "All ranks paused before that update: parameters are as after the step before. Repair these rows or leave them "
    "out, and train again; run.resume() takes the same step again, run.stop() ends the run"
)


def build_nonfinite_failures(
    step: int, advances: Sequence[DispatchResult], nodes: Sequence[Any], *, ruined_step: int | None = None
) -> list[Failure]:
    """Return one failure for each rank of origin. If that is unknown, return one failure without a rank to blame.

    `ruined_step` is the last step before the loss exploded; None if it was fine until now.
    """
    remedy = _describe_remedy(advances, ruined_step)
    hosts = {node.rank: node.host for node in nodes}
    return [
        Failure(rank, hosts.get(rank, "?"), "NonFinite", f"{message}. {remedy}", "", step=step, kind="nonfinite")
        for rank, message in _find_causes(advances).items()
    ]


def choose_remedy(advances: Sequence[DispatchResult], ruined_step: int | None) -> str:
    """Return what helps: "train", "data" or "lr", see :class:`~dtkit.errors.NonFiniteError`."""
    if ruined_step is not None:
        return "train"
    return "data" if any(advance.bad_rows for advance in advances) else "lr"


def _describe_remedy(advances: Sequence[DispatchResult], ruined_step: int | None) -> str:
    if ruined_step is not None:
        return _describe_ruin(ruined_step)
    return {"data": _DATA_REMEDY, "lr": _REMEDY}[choose_remedy(advances, ruined_step)]


def _describe_ruin(step: int) -> str:
    or_checkpoint = f", or resume_from= a checkpoint from before step {step:,}" if step else ""  # none is before step 0
    return _RUINED_REMEDY.format(step=step, or_checkpoint=or_checkpoint)


def _find_causes(advances: Sequence[DispatchResult]) -> dict[int, str]:
    """Return {rank of origin: message}."""
    problem = "the gradients over all ranks are not finite"
    if bad_rows := {rank: advance.bad_rows for rank, advance in enumerate(advances) if advance.bad_rows}:
        return {rank: f"{problem}: {rows}" for rank, rows in bad_rows.items()}
    if outputs := _find_first_stages(advances, "output"):
        first = min(outputs.values())
        inputs = "rows of data" if first == 0 else f"stage {first - 1}'s, which are finite"
        detail = f"the first numbers that are not are outputs of this rank's stage {first} (its inputs are {inputs})"
        return {rank: f"{problem}: {detail}" for rank, stage in outputs.items() if stage == first}
    losses = {rank: advance.loss for rank, advance in enumerate(advances) if advance.loss is not None}
    if bad := {rank: loss for rank, loss in losses.items() if not math.isfinite(loss)}:
        return {rank: f"{problem}, with this rank's loss {loss}" for rank, loss in bad.items()}
    if losses:
        all_losses = ", ".join(f"{loss:.4g}" for loss in losses.values())
        problem += f", though every rank's loss is ({all_losses})"
    if gradients := _find_first_stages(advances, "gradient"):
        last = max(gradients.values())
        detail = f"the first ones in backward's order are those of this rank's stage {last}"
        return {rank: f"{problem}: {detail}" for rank, stage in gradients.items() if stage == last}
    return {0: problem}


def _find_first_stages(advances: Sequence[DispatchResult], wanted_kind: str) -> dict[int, int]:
    """Return {rank: first stage with non-finite values}. Forward runs up through the stages, backward down."""
    edge = {"output": min, "gradient": max}[wanted_kind]
    stages_by_rank = {
        rank: [stage for stage, kind in a.nonfinite if kind == wanted_kind] for rank, a in enumerate(advances)
    }
    return {rank: edge(stages) for rank, stages in stages_by_rank.items() if stages}

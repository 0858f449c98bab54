"""A step whose gradients are not finite: which rank they come from, as far as all ranks' words together tell.

Summed over the ranks, gradients are not finite on all of them, whoever began it. A loss that is not finite tells of the
rank whose samples it is of. In a pipeline the last stage alone has one, so there the first stage counts whose output is
not finite; or, where all outputs and losses are, the last stage whose gradients are not: backward runs from last to
first.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dtkit.types import Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.types import DispatchResult

_REMEDY = (
    "All ranks paused before that update: parameters are as after the step before. Lower the learning rate "
    "(run.set(lr=...)) or repair the data or the loss; run.resume() takes the same step again, run.stop() ends the run"
)


def build_nonfinite_failures(step: int, advances: Sequence[DispatchResult], nodes: Sequence[Any]) -> list[Failure]:
    """One failure for each rank that it comes from; or, where that can't be told, one that says so."""
    hosts = {node.rank: node.host for node in nodes}
    return [
        Failure(rank, hosts.get(rank, "?"), "NonFinite", f"{message}. {_REMEDY}", "", step=step, kind="nonfinite")
        for rank, message in _find_causes(advances).items()
    ]


def _find_causes(advances: Sequence[DispatchResult]) -> dict[int, str]:
    """What there is to say of each rank that it comes from."""
    begun = "the gradients over all ranks are not finite"
    if outputs := _find_first_stages(advances, "output"):
        first = min(outputs.values())
        given = "rows of data" if first == 0 else f"stage {first - 1}'s, which are finite"
        what = f"the first numbers that are not are outputs of this rank's stage {first} (its inputs are {given})"
        return {rank: f"{begun}: {what}" for rank, stage in outputs.items() if stage == first}
    losses = {rank: advance.loss for rank, advance in enumerate(advances) if advance.loss is not None}
    if bad := {rank: loss for rank, loss in losses.items() if not math.isfinite(loss)}:
        return {rank: f"{begun}, with this rank's loss {loss}" for rank, loss in bad.items()}
    found = ", ".join(f"{loss:.4g}" for loss in losses.values())
    begun += f", though every rank's loss is ({found})"
    if gradients := _find_first_stages(advances, "gradient"):
        last = max(gradients.values())
        what = f"the first ones in backward's order are those of this rank's stage {last}"
        return {rank: f"{begun}: {what}" for rank, stage in gradients.items() if stage == last}
    return {0: begun}


def _find_first_stages(advances: Sequence[DispatchResult], wanted_kind: str) -> dict[int, int]:
    """Of each rank that had such, the stage that it began in: forward runs up, and backward down."""
    edge = {"output": min, "gradient": max}[wanted_kind]
    found = {rank: [stage for stage, kind in a.nonfinite if kind == wanted_kind] for rank, a in enumerate(advances)}
    return {rank: edge(stages) for rank, stages in found.items() if stages}

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

    from dtkit.messages import DispatchResult, NonFiniteReport

# The first line says what the parameters are worth, each further one what helps. Those of a paused run alone begin with
# "- run.", and views leave them out once it has ended (dtkit.dashboard.summary.notices).
_PAUSED = "All ranks paused before that update: parameters are as after the step before."
_GO_ON = "- run.set(lr=...) sets a rate, run.resume() takes the same step again, run.stop() ends the run"
_GO_ON_WITH_DATA = "- run.resume() takes the same step again, run.stop() ends the run"
_END = "- run.stop() ends this run"
_END_RUINED = "- run.resume() would fail again; run.stop() ends this run"
_TRAIN_AGAIN = "- train again with a lower learning rate{or_checkpoint}"
_MAX_PARAMETER = 1e10  # no model trains with larger ones
_REMEDY = (_PAUSED, "- lower the learning rate, or repair the data or the loss", _GO_ON)
_REMEDY_AT_START = (
    "All ranks paused before the first update, so the learning rate has no part in it.",
    "- repair the data, the loss or the model's parameters, and train again",
    _END,
)
_DATA_REMEDY = (
    _PAUSED,
    "- repair or scale these rows, or leave them out, and train again",
    _GO_ON_WITH_DATA,
)


def build_nonfinite_failures(
    step: int,
    advances: Sequence[DispatchResult],
    nodes: Sequence[Any],
    *,
    ruined_step: int | None = None,
    large_loss: tuple[int, float] | None = None,
) -> list[Failure]:
    """Return one failure for each rank of origin. If that is unknown, return one failure without a rank to blame.

    `ruined_step` is the last step before the loss exploded; None if it was fine until now. `large_loss` is the first
    step with a loss that is not finite or very large, and this loss.
    """
    remedy = "\n".join(_list_remedies(step, advances, ruined_step, large_loss))
    hosts = {node.rank: node.host for node in nodes}
    return [
        Failure(rank, hosts.get(rank, "?"), "NonFinite", f"{message}\n{remedy}", "", step=step, kind="nonfinite")
        for rank, message in _find_causes(advances).items()
    ]


def choose_remedy(step: int, advances: Sequence[DispatchResult], ruined_step: int | None) -> str:
    """Return what helps: "train", "data" or "lr", see :class:`~dtkit.errors.NonFiniteError`.

    Before the first update no learning rate has been used, so that another one doesn't help.
    """
    if ruined_step is not None or _find_largest_parameter(advances) > _MAX_PARAMETER:
        return "train"
    return "data" if not step or _has_bad_rows(advances) else "lr"


def _has_bad_rows(advances: Sequence[DispatchResult]) -> bool:
    return any(advance.nonfinite.bad_rows for advance in advances)


def _find_largest_parameter(advances: Sequence[DispatchResult]) -> float:
    return max((advance.nonfinite.largest_parameter for advance in advances), default=0.0)


def _list_remedies(
    step: int, advances: Sequence[DispatchResult], ruined_step: int | None, large_loss: tuple[int, float] | None
) -> Sequence[str]:
    if ruined_step is not None:
        return (
            f"The loss grew since step {ruined_step:,}, so the parameters are ruined already.",
            _TRAIN_AGAIN.format(or_checkpoint=_name_checkpoint(ruined_step)),
            _END_RUINED,
        )
    if (largest := _find_largest_parameter(advances)) > _MAX_PARAMETER:
        return _list_remedies_of_large_parameters(step, largest, large_loss)
    if _has_bad_rows(advances):
        return _DATA_REMEDY
    return _REMEDY if step else _REMEDY_AT_START


def _list_remedies_of_large_parameters(
    step: int, largest: float, large_loss: tuple[int, float] | None
) -> Sequence[str]:
    """Return what a user can do with parameters that are too large, and since when they are, as far as it is known."""
    size = f"reach {largest:.2g}" if math.isfinite(largest) else "are not finite"
    if not step:
        start = f"The model's parameters {size} before the first update: with them, no learning rate helps."
        return start, "- train a model with smaller parameters", _END
    start = f"The parameters {size}, so they are ruined already."
    if large_loss is not None and not large_loss[0]:
        return (
            f"{start} The loss was {large_loss[1]:.3g} at step 0, before any update.",
            "- repair the data of that step, or the model, which hold numbers that are too large, and train again",
            _END_RUINED,
        )
    when = "" if large_loss is None else f" The loss was {large_loss[1]:.3g} at step {large_loss[0]:,}."
    or_checkpoint = "" if large_loss is None else _name_checkpoint(large_loss[0])
    return (
        start + when,
        _TRAIN_AGAIN.format(or_checkpoint=or_checkpoint),
        "- if the data of that step hold numbers that are too large, repair or scale them",
        _END_RUINED,
    )


def _name_checkpoint(step: int) -> str:
    return f", or resume_from= a checkpoint from before step {step:,}" if step else ""  # none is before step 0


def _find_causes(advances: Sequence[DispatchResult]) -> dict[int, str]:
    """Return {rank of origin: message}."""
    problem, reports = "the gradients over all ranks are not finite", [advance.nonfinite for advance in advances]
    if bad_rows := {rank: report.bad_rows for rank, report in enumerate(reports) if report.bad_rows}:
        return {rank: f"{problem}: {rows}" for rank, rows in bad_rows.items()}
    if outputs := _find_first_stages(reports, "output"):
        first = min(outputs.values())
        inputs = "rows of data" if first == 0 else f"stage {first - 1}'s, which are finite"
        detail = f"the first numbers that are not are outputs of this rank's stage {first} (its inputs are {inputs})"
        return {rank: f"{problem}: {detail}" for rank, stage in outputs.items() if stage == first}
    losses = {rank: report.loss for rank, report in enumerate(reports) if report.loss is not None}
    if bad := {rank: loss for rank, loss in losses.items() if not math.isfinite(loss)}:
        return {rank: f"{problem}, and this rank's loss is {loss}" for rank, loss in bad.items()}
    if losses:
        all_losses = ", ".join(f"{loss:.4g}" for loss in losses.values())
        problem += f", though every rank's loss is ({all_losses})"
    if gradients := _find_first_stages(reports, "gradient"):
        last = max(gradients.values())
        detail = f"the first ones in backward's order are those of this rank's stage {last}"
        return {rank: f"{problem}: {detail}" for rank, stage in gradients.items() if stage == last}
    return {0: problem}


def _find_first_stages(reports: Sequence[NonFiniteReport], wanted_kind: str) -> dict[int, int]:
    """Return {rank: first stage with non-finite values}. Forward runs up through the stages, backward down."""
    edge = {"output": min, "gradient": max}[wanted_kind]
    stages_by_rank = {
        rank: [stage for stage, kind in report.locations if kind == wanted_kind] for rank, report in enumerate(reports)
    }
    return {rank: edge(stages) for rank, stages in stages_by_rank.items() if stages}

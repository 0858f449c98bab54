"""Notices in words: lost and stuck nodes, disagreeing ranks, divergence, overfitting, and delays set on purpose.

A view chooses glyph and color by the kind of a notice. The text alone has all information.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.summary.activity import describe_last_repair
from dtkit.dashboard.summary.ended_engines import find_ended_engines
from dtkit.dashboard.summary.lost_nodes import count_initial_nodes, update_lost_nodes
from dtkit.dashboard.summary.stall import STUCK_GLYPH, find_stall, format_sentence
from dtkit.dashboard.summary.timing import format_nodes
from dtkit.errors import EngineError, NonFiniteError
from dtkit.history.divergence import find_divergence, find_past_divergence
from dtkit.history.no_learning import find_no_learning
from dtkit.history.overfitting import find_overfitting
from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtkit.dashboard.run_view import RunView
    from dtkit.dashboard.summary.lost_nodes import LostNodes
    from dtkit.rpc.verification import Verification
    from dtkit.types import Event, ReplicaCheckResult

NOTICE_GLYPHS = {
    "lost": "✕",
    "stuck": STUCK_GLYPH,
    "differs": "✕",
    "mismatch": "✕",
    "diverged": "✕",
    "overfits": "▲",
    "unlearned": "▲",
    "identical": "✓",
    "verified": "✓",
    "ended": "✕",
    "fewer": "○",
    "slowed": "▼",
    "repaired": "+",
    "stopped": "■",
}
"""Kinds of notices, the most urgent first, with the glyph of each."""

ALERT_KINDS = ("lost", "stuck", "differs", "mismatch", "diverged")
"""Kinds of notices that are alerts."""
WELL_KINDS = ("identical", "verified", "repaired")
"""Kinds of notices that nothing is wrong."""
LEARNING_KINDS = ("overfits", "unlearned")
"""Kinds of notices on a model that does not learn what it should."""


def name_event_node(event: Event) -> str:
    """Return the node of an event for the start of its line, such as "[1] "; "" if its text begins with the node."""
    is_named = event.rank is None or event.text.startswith(f"node {event.rank} ")
    return "" if is_named else f"[{event.rank}] "


@dataclasses.dataclass(frozen=True)
class Notice:
    """A sentence about the run."""

    kind: str
    text: str


def collect_notices(run: RunView, lost_nodes: LostNodes | None = None) -> list[Notice]:
    """Return the current notices, the most urgent first. Without `lost_nodes` they are read from the events."""
    lost_nodes = update_lost_nodes({}, run.history.events) if lost_nodes is None else lost_nodes
    ranks = run.spec.world_size
    return [
        *_make_lost_notice(lost_nodes, ranks),
        *_make_stuck_notice(run, lost_nodes),
        *_make_consistency_notice(run.consistency, ranks),
        *_make_verification_notice(run.verification),
        *_make_divergence_notice(run),
        *_make_overfitting_notice(run),
        *_make_no_learning_notice(run),
        *_make_ended_notice(run),
        *([] if lost_nodes else _make_left_out_notice(run)),
        *_make_delay_notices(run),
        *_make_repair_notice(run),
        *_make_stop_notice(run),
    ]


_MAX_ERROR_LINES, _MAX_ERROR_CHARS = 12, 1500  # of an error, which has its remedy at the end
_MAX_INDENT = 8


def list_error_lines(error: BaseException, *, has_ended: bool = False) -> list[str]:
    """Return the first lines of an error. The notebook raises all of it from `wait`.

    Of a step that was not finite, they are what happened, since when, and the remedies that hold, without those of a
    paused run once it `has_ended`.
    """
    is_own_text = isinstance(error, NonFiniteError) or (isinstance(error, EngineError) and error.cause.kind == "lost")
    name_nodes = formatting.name_nodes if is_own_text else formatting.name_nodes_at_start
    first, *rest = str(error).strip().splitlines() or [""]
    lines = [f"{type(error).__name__}: {name_nodes(first)}".rstrip(": ")]
    if isinstance(error, NonFiniteError):
        rest = [
            line for line in rest if line.startswith(("- ", "The ")) and not (has_ended and line.startswith("- run."))
        ]
    lines += [name_nodes(line) for line in rest]
    text = "\n".join(_sanitize_line(line) for line in lines[:_MAX_ERROR_LINES])[:_MAX_ERROR_CHARS]
    return text.splitlines()


def _sanitize_line(line: str) -> str:
    """Return a line that is safe to show, indented as before."""
    indent = min(len(line) - len(line.lstrip(" ")), _MAX_INDENT)
    return f"{' ' * indent}{formatting.sanitize_text(line, _MAX_ERROR_CHARS)}"


def _make_stop_notice(run: RunView) -> Iterator[Notice]:
    """Return how to train on, for a run that was stopped and can. The parameters of one that diverged are ruined."""
    is_stopped = run.status.state is State.STOPPED and run.status.step and run.exception is None
    if is_stopped and not run.is_released and find_divergence(run.history) is None:
        yield Notice("stopped", "run.extend(epochs=1) trains on from here")


def _make_lost_notice(lost_nodes: LostNodes, num_ranks: int) -> Iterator[Notice]:
    """Return a notice on the lost nodes."""
    if lost_nodes:
        verb = "was" if len(lost_nodes) == 1 else "were"
        num_left = formatting.format_count(num_ranks - len(lost_nodes), "node")
        nodes, step = format_nodes(sorted(lost_nodes)), max(lost_nodes.values())
        yield Notice("lost", f"{nodes} {verb} lost at step {step:,}; {num_left} of {num_ranks:,} left")


def _make_stuck_notice(run: RunView, lost_nodes: LostNodes) -> Iterator[Notice]:
    stall = find_stall(run)
    if stall is not None and stall.rank not in lost_nodes:  # its remedy came too late
        yield Notice("stuck", formatting.sanitize_text(format_sentence(stall), 600))


def _make_ended_notice(run: RunView) -> Iterator[Notice]:
    """Return a notice on engines that have ended since the run did, with reason and remedy of the first."""
    if ranks := find_ended_engines(run):
        reason = formatting.name_nodes(dict(run.ended_engines or {})[ranks[0]])
        others = f" ({format_nodes(ranks[1:])}: likewise)" if ranks[1:] else ""
        yield Notice("ended", formatting.sanitize_text(reason, 600) + others)


def _make_left_out_notice(run: RunView) -> Iterator[Notice]:
    """Return a notice on nodes that were lost and not replaced."""
    first, ranks = count_initial_nodes(run), run.spec.world_size
    if first > ranks:
        num_left_out = first - ranks
        verb = "was" if num_left_out == 1 else "were"
        yield Notice(
            "fewer", f"{formatting.format_count(ranks, 'node')}: {num_left_out:,} of {first:,} {verb} lost and left out"
        )


def _make_consistency_notice(consistency: ReplicaCheckResult | None, num_ranks: int) -> Iterator[Notice]:
    if consistency is None or num_ranks < 2:
        return
    if not consistency.differing_ranks:
        yield Notice("identical", f"{_describe_compared(consistency, num_ranks)}, checked at step {consistency.step:,}")
        return
    differ = "differs" if len(consistency.differing_ranks) == 1 else "differ"
    since = consistency.step if consistency.differing_since is None else consistency.differing_since
    yield Notice(
        "differs",
        f"{format_nodes(consistency.differing_ranks)} {differ} since step {since:,}: parameters are no longer equal",
    )


def _make_verification_notice(verification: Verification | None) -> Iterator[Notice]:
    """Return what ``run.verify()`` found. Trainings that one process can't repeat have no notice."""
    if verification is None or verification.verdict not in ("PASS", "FAIL"):
        return
    steps = formatting.format_count(verification.steps, "step")
    if verification.verdict == "FAIL":
        found = [f"verification FAILED over {steps}", verification.describe_difference()]
        yield Notice("mismatch", ": ".join(filter(None, found)))
        return
    is_close, in_float64 = verification.is_within_tolerance, verification.float64_difference
    difference = formatting.format_loss(verification.compared_difference if is_close else in_float64)
    precision = "" if is_close else " in float64"
    yield Notice(
        "verified", f"verified: equal to one process{precision} over {steps} (largest difference {difference})"
    )


def _make_divergence_notice(run: RunView) -> Iterator[Notice]:
    """Return how the loss diverged. Once a run has ended, also that it had, unless its loss came back to its best.

    The error of a step that was not finite says it, with the step from which on it has a remedy.
    """
    if isinstance(run.exception, NonFiniteError):
        return
    divergence = find_divergence(run.history)
    past = find_past_divergence(run.history) if run.status.state.has_ended else None
    if divergence is not None:
        yield Notice("diverged", f"the training diverged: {divergence.text}")
    elif past is not None:
        yield Notice("diverged", f"{past.text}. {past.remedy[0].upper()}{past.remedy[1:]}")


def _make_overfitting_notice(run: RunView) -> Iterator[Notice]:
    overfitting = find_overfitting(run.history)
    if overfitting is not None and find_divergence(run.history) is None:
        yield Notice("overfits", overfitting.text)


def _make_no_learning_notice(run: RunView) -> Iterator[Notice]:
    found = find_no_learning(run.history)
    has_remedy = run.status.state.has_ended and find_past_divergence(run.history) is not None
    if found is not None and not has_remedy:
        yield Notice("unlearned", found.text)


def _describe_compared(consistency: ReplicaCheckResult, num_ranks: int) -> str:
    """Return what was compared: whole models, replicas of parts, or the parameters that are not split."""
    if consistency.num_holders is None:
        return f"parameters identical on {formatting.format_count(num_ranks, 'node')}"
    if consistency.num_holders > 1:
        return f"parameters identical between {formatting.format_count(consistency.num_holders, 'replica')}"
    return f"parameters that are not split identical on {formatting.format_count(num_ranks, 'node')}"


def _make_repair_notice(run: RunView) -> Iterator[Notice]:
    """Return how the last loss of nodes ended, while a run goes on and nothing newer has happened."""
    text = None if run.status.state.has_ended else describe_last_repair(run.history.events)
    if text is not None:
        yield Notice("repaired", text)


def _make_delay_notices(run: RunView) -> Iterator[Notice]:
    """Return a notice for all nodes that are slowed by the same factor."""
    by_factor: dict[float, list[int]] = {}
    for rank, factor in sorted(run.delay_factors.items()):
        if math.isfinite(factor) and factor != 1:
            by_factor.setdefault(factor, []).append(rank)
    for factor, ranks in by_factor.items():
        yield Notice("slowed", f"{format_nodes(ranks)} slowed {factor:g}x on purpose")

"""The verdict: one line about a run's bottleneck and its remedy, from the measured phases.

The verdict names the cause with the largest predicted gain (:mod:`dtkit.dashboard.summary.causes`), if that is large
enough. One process that would be faster than all nodes comes first, unless a slow node is more to blame.
"""

from __future__ import annotations

import dataclasses
import html
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit._util.arguments import explain_arguments
from dtkit._util.attributes import suggest_attributes
from dtkit.dashboard.summary.causes import MIN_GAIN, Cause, find_causes, list_means, report_computing
from dtkit.dashboard.summary.causes_between import CAUSES_BETWEEN, describe_time_between, find_causes_between
from dtkit.dashboard.summary.core_wait import find_core_shortage
from dtkit.dashboard.summary.lost_nodes import update_lost_nodes
from dtkit.dashboard.summary.measurements import Measurements
from dtkit.dashboard.summary.one_process import REPLICATED, add_comparison, estimate_one_process, read_verification
from dtkit.dashboard.summary.stall import find_stall
from dtkit.dashboard.summary.timing import compute_step_timing, count_steps_since_repair
from dtkit.dashboard.summary.whole_model import advise_whole_model, name_remedy
from dtkit.history.between_steps import read_time_between
from dtkit.history.divergence import find_divergence, find_past_divergence
from dtkit.history.no_learning import find_no_learning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtkit.dashboard.run_view import RunView
    from dtkit.dashboard.summary.core_wait import CoreShortage
    from dtkit.dashboard.summary.one_process import OneProcess
    from dtkit.history.between_steps import TimeBetween
    from dtkit.history.history import History
    from dtkit.types import NodeInfo, RunSpec

VERDICT_GLYPH = "→"
"""Glyph before a verdict."""

MIN_STEPS = 5
"""Steps that a verdict needs. The first one warms up, and is left out."""

_SLOW_NODE_CAUSES = ("data", "straggler", "cores")


class VerdictExplanation(str):
    """A text of several lines that a cell shows as such."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """A list, since front ends break plain lines anywhere, and not between words."""
        text, *arithmetic = (html.escape(line.strip()) for line in self.splitlines())
        return f"<p>{text}</p><ul>{''.join(f'<li>{line}</li>' for line in arithmetic)}</ul>"


@suggest_attributes("verdict")
@explain_arguments
@dataclasses.dataclass(frozen=True, repr=False)
class Verdict:
    """A run's bottleneck and its remedy, in one line. `explain()` returns the numbers behind it."""

    cause: str
    """One of "failed", "paused", "diverged", "learned nothing", "data", "straggler", "communication", "overhead",
    "bubble", "cut", "cores", "waiting", "one process", "validation", "callbacks", "checkpoints", "snapshots",
    "dispatches", "computing" and "unknown".
    """
    text: str
    gain: float
    """Share of the time for the same samples that the remedy is predicted to save; 0 if nothing holds the run back."""
    arithmetic: tuple[str, ...] = ()
    """Lines with the measured numbers, and how the prediction follows from them."""
    slow_ranks: tuple[int, ...] = ()
    """Ranks that keep the others waiting, if they are the cause."""
    others: tuple[Verdict, ...] = dataclasses.field(default=(), compare=False)
    """Verdicts on the other causes in the same steps, if their gain is half of the smallest one of a verdict."""

    def explain(self) -> VerdictExplanation:
        """Return the line, and the arithmetic behind it, which a cell shows. ``print`` it in a script."""
        return VerdictExplanation("\n".join([self.text, *(f"  {line}" for line in self.arithmetic)]))

    def __repr__(self) -> str:
        return self.text


def find_verdict(
    history: History,
    spec: RunSpec,
    measured: OneProcess | None = None,
    nodes: Sequence[NodeInfo] = (),
    *,
    has_ended: bool = False,
) -> Verdict:
    """Return the verdict on the last steps of a history. `measured` times of one process replace an estimate.

    With `nodes`, engines that take the cores from each other are told from other processes.
    Once a run `has_ended`, a loss that had diverged and is not back at its best comes before its speed. So does, at any
    time, a model that has learned nothing.
    """
    divergence = find_divergence(history) or (find_past_divergence(history) if has_ended else None)
    if divergence is not None:  # how fast a training is matters only while it converges
        return Verdict("diverged", divergence.advice, 0.0, divergence.arithmetic)
    no_learning = find_no_learning(history)
    if no_learning is not None:
        return Verdict("learned nothing", no_learning.advice, 0.0, no_learning.arithmetic)
    if history.num_steps <= MIN_STEPS:
        return _refuse_few_steps(history.num_steps, "so far")
    repaired = count_steps_since_repair(history)
    if repaired is not None and repaired <= MIN_STEPS:
        return _refuse_few_steps(repaired, "since the repair")
    timing = compute_step_timing(history, spec.world_size)
    ranks = np.flatnonzero(np.isfinite(timing.seconds).all(axis=1))
    if not timing.is_measured or not len(ranks):
        return Verdict("unknown", "the phases of the steps were not measured", 0.0)
    facts = Measurements(spec, timing, ranks, timing.seconds[ranks], history.ranks_per_replica)
    best, found = _judge(facts, history, measured, nodes)
    between = read_time_between(history).leave_out_warm_up()
    found += [cause for cause in find_causes_between(spec, between) if cause.gain >= MIN_GAIN / 2]
    best = _choose_between(best, found, between)
    verdicts = [_make_verdict(cause) for cause in found if cause.name != best.name]
    return dataclasses.replace(_make_verdict(best), others=tuple(verdicts))


def _make_verdict(cause: Cause) -> Verdict:
    return Verdict(cause.name, cause.text, cause.gain, cause.arithmetic, cause.slow_ranks)


def _judge(
    facts: Measurements, history: History, measured: OneProcess | None, nodes: Sequence[NodeInfo]
) -> tuple[Cause, list[Cause]]:
    """Return the cause that matters most, and all that were found."""
    found = [advise_whole_model(cause, facts.spec, nodes) for cause in find_causes(facts)]
    best = max(found, key=lambda cause: cause.gain, default=report_computing(facts))
    shortage = find_core_shortage(facts, history, nodes, MIN_GAIN / 2)
    if shortage is not None:
        lines = (*list_means(facts), *shortage.arithmetic)
        found.append(Cause("cores", shortage.text, "", shortage.gain, lines))
    if shortage is not None and _is_most_costly(shortage, found[:-1]):
        best = found[-1]
    elif best.gain < MIN_GAIN:
        best = report_computing(facts)
    one_process = _compare_with_one_process(facts, history, best, measured, nodes)
    if one_process.name == "one process" and one_process.gain < MIN_GAIN:
        lines = (*best.arithmetic, *one_process.arithmetic[: measured is not None])
        return dataclasses.replace(best, arithmetic=lines), [*found, one_process]
    return one_process, [*found, best]


def _choose_between(best: Cause, found: Sequence[Cause], between: TimeBetween) -> Cause:
    """Return the cause with the largest gain of the whole time, of which steps are only a part."""
    part = 1 - between.total_share
    outside = max((cause for cause in found if cause.name in CAUSES_BETWEEN), key=lambda each: each.gain, default=best)
    if outside is not best and outside.gain >= max(MIN_GAIN, part * best.gain):
        return outside
    lines = (describe_time_between(between),) if between.total_share >= MIN_GAIN / 2 else ()
    return dataclasses.replace(best, arithmetic=(*best.arithmetic, *lines))


def _refuse_few_steps(count: int, since: str) -> Verdict:
    steps = formatting.format_count(count, "step")
    return Verdict("unknown", f"{steps} {since}: a verdict needs {MIN_STEPS + 1}", 0.0)


def find_shown_verdict(run: RunView, measured: OneProcess | None = None) -> Verdict | None:
    """Return the verdict for a view; None while something else matters: few steps, a stall, an error, a lost node.

    Without `measured`, the times of one process come from the run's verification, if there was one.
    """
    if find_stall(run) is not None or run.exception is not None or update_lost_nodes({}, run.history.events):
        return None
    measured = measured or read_verification(run)
    verdict = find_verdict(run.history, run.spec, measured, run.nodes, has_ended=run.status.state.has_ended)
    return None if verdict.cause == "unknown" else verdict


def _compare_with_one_process(
    facts: Measurements, history: History, best: Cause, measured: OneProcess | None, nodes: Sequence[NodeInfo]
) -> Cause:
    """Return that nodes take longer than one process, unless a slow node is more to blame."""
    compared = measured or _estimate_one_process(facts, history, best)
    is_minor = best.name in _SLOW_NODE_CAUSES and compared is not None and best.gain > compared.gain
    if compared is None or compared.gain < MIN_GAIN / 2 or is_minor:
        return add_comparison(best, compared, facts.spec)
    finding, remedy = f"one process is faster, with {compared.comparison}", name_remedy(best, facts.spec, nodes)
    return Cause("one process", finding, remedy, compared.gain, (compared.arithmetic, best.text, *best.arithmetic))


def _estimate_one_process(facts: Measurements, history: History, best: Cause) -> OneProcess | None:
    """Return the estimate where one process would do the same work; None otherwise, or if a slow node is to blame."""
    is_whole = facts.spec.strategy.startswith(REPLICATED) and 1 < len(facts.ranks) == facts.spec.world_size
    if not is_whole or best.name in _SLOW_NODE_CAUSES:
        return None
    rows_s = facts.get("data") + facts.get("forward") + facts.get("backward")
    return estimate_one_process(history, rows_s, facts.get("update") + facts.get("other"), facts.step_s)


def _is_most_costly(shortage: CoreShortage, others: Sequence[Cause]) -> bool:
    """Return whether waiting for a core costs more than each other cause that isn't its effect."""
    effects = ("straggler", "waiting") if shortage.explains_slow_nodes else ("waiting",)
    return shortage.share >= max(MIN_GAIN, *(other.gain for other in others if other.name not in effects), 0)

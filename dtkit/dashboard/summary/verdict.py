"""The verdict: one line about a run's bottleneck and its remedy, from the measured phases.

Each cause has its own arithmetic. It predicts the time of a step, or the samples per second, without that cause. The
verdict names the cause with the largest predicted gain, if that exceeds ``MIN_GAIN``. All ranks take a step together,
so a step lasts as long as the slowest rank computes, and then communicates.

Predictions hold other things equal: worker processes need cores of their own, and a larger batch trains differently.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit._util.arguments import explain_arguments
from dtkit._util.attributes import suggest_attributes
from dtkit.dashboard.summary.core_wait import find_core_shortage
from dtkit.dashboard.summary.lost_nodes import update_lost_nodes
from dtkit.dashboard.summary.measurements import Measurements
from dtkit.dashboard.summary.one_process import REPLICATED, complete_verdict, estimate_one_process, read_verification
from dtkit.dashboard.summary.printed_times import PrintedTimes, describe_difference
from dtkit.dashboard.summary.rarer_messages import name_other_remedies
from dtkit.dashboard.summary.stall import find_stall
from dtkit.dashboard.summary.timing import PHASES, compute_step_timing, count_steps_since_repair, format_nodes
from dtkit.dashboard.summary.whole_model import advise_whole_model, name_remedy
from dtkit.history.divergence import find_divergence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.dashboard.run_view import RunView
    from dtkit.dashboard.summary.core_wait import CoreShortage
    from dtkit.dashboard.summary.one_process import OneProcess
    from dtkit.history.history import History
    from dtkit.types import NodeInfo, RunSpec

VERDICT_GLYPH = "→"
"""Glyph before a verdict."""

MIN_GAIN = 0.1
"""Smallest predicted saving, as a share of the time. On a busy machine, means vary by less."""

MIN_STEPS = 5
"""Steps that a verdict needs. The first one warms up, and is left out."""

MAX_BATCH_FACTOR = 4
"""Largest factor on the batch that a verdict proposes; a batch that is much larger needs other settings."""

_TARGET_OVERHEAD = 0.2  # share of a step that the proposed batch leaves to communication, update and Python
_SLOW_NODE_CAUSES = ("data", "straggler", "cores")
_ROUNDING = 1e-9
_ms = formatting.format_duration
_OVER_STAGES = 1.3  # ratio of the slowest stage to the mean one from which the cut is to blame


@suggest_attributes("verdict")
@explain_arguments
@dataclasses.dataclass(frozen=True, repr=False)
class Verdict:
    """A run's bottleneck and its remedy, in one line. `explain()` prints the numbers behind it."""

    cause: str
    """One of "failed", "paused", "diverged", "data", "straggler", "communication", "overhead", "bubble", "cut",
    "cores", "waiting", "one process", "computing" and "unknown".
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

    def explain(self) -> None:
        """Print the line, and the arithmetic behind it."""
        print("\n".join([self.text, *(f"  {line}" for line in self.arithmetic)]))  # noqa: T201 - asked for

    def __repr__(self) -> str:
        return self.text


def find_verdict(
    history: History, spec: RunSpec, measured: OneProcess | None = None, nodes: Sequence[NodeInfo] = ()
) -> Verdict:
    """Return the verdict on the last steps of a history. `measured` times of one process replace an estimate.

    With `nodes`, engines that take the cores from each other are told from other processes.
    """
    divergence = find_divergence(history)
    if divergence is not None:  # how fast a training is matters only while it converges
        return Verdict("diverged", f"the {divergence.short}: {divergence.remedy}", 0.0, divergence.arithmetic)
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
    found = [verdict for judge in _select_judges(facts) if (verdict := judge(facts)) and verdict.gain >= MIN_GAIN / 2]
    found = [
        dataclasses.replace(each, **advise_whole_model(each.cause, each.text, each.arithmetic, spec, nodes))
        for each in found
    ]
    best = max(found, key=lambda verdict: verdict.gain, default=_report_computing(facts))
    shortage = find_core_shortage(facts, history, nodes, MIN_GAIN / 2)
    if shortage is not None:
        found.append(Verdict("cores", shortage.text, shortage.gain, (*_list_means(facts), *shortage.arithmetic)))
    if shortage is not None and _is_most_costly(shortage, found[:-1]):
        best = found[-1]
    elif best.gain < MIN_GAIN:
        best = _report_computing(facts)
    one_process = _compare_with_one_process(facts, history, best, measured, nodes)
    if one_process.cause == "one process" and one_process.gain < MIN_GAIN:
        found.append(one_process)
        best = dataclasses.replace(best, arithmetic=(*best.arithmetic, *one_process.arithmetic[: measured is not None]))
    else:
        best, found = one_process, [*found, best]
    return dataclasses.replace(best, others=tuple(other for other in found if other.cause != best.cause))


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
    verdict = find_verdict(run.history, run.spec, measured, run.nodes)
    return None if verdict.cause == "unknown" else verdict


def _select_judges(facts: Measurements) -> Sequence[Callable[[Measurements], Verdict | None]]:
    if not facts.timing.is_same_work:
        return _judge_data, _judge_cut, _judge_bubble
    return _judge_data, _judge_straggler, _judge_overhead, _judge_waiting


def _compare_with_one_process(
    facts: Measurements, history: History, best: Verdict, measured: OneProcess | None, nodes: Sequence[NodeInfo]
) -> Verdict:
    """Return the verdict on nodes that take longer than one process, unless a slow node is more to blame."""
    compared = measured or _estimate_one_process(facts, history, best)
    is_minor = best.cause in _SLOW_NODE_CAUSES and compared is not None and best.gain > compared.gain
    if compared is None or compared.gain < MIN_GAIN / 2 or is_minor:
        told = complete_verdict(best.text, best.arithmetic, compared, facts.spec, MIN_GAIN)
        return dataclasses.replace(best, **told)
    remedy, lines = name_remedy(best.text, facts.spec, nodes), (best.text, *best.arithmetic)
    text = f"one process is faster, with {compared.comparison}: {remedy}"
    return Verdict("one process", text, compared.gain, (compared.arithmetic, *lines))


def _estimate_one_process(facts: Measurements, history: History, best: Verdict) -> OneProcess | None:
    """Return the estimate where one process would do the same work; None otherwise, or if a slow node is to blame."""
    is_whole = facts.spec.strategy.startswith(REPLICATED) and 1 < len(facts.ranks) == facts.spec.world_size
    if not is_whole or best.cause in _SLOW_NODE_CAUSES:
        return None
    rows_s = facts.get("data") + facts.get("forward") + facts.get("backward")
    return estimate_one_process(history, rows_s, facts.get("update") + facts.get("other"), facts.step_s)


# -- the causes --------------------------------------------------------------------------------------------------


def _is_most_costly(shortage: CoreShortage, others: Sequence[Verdict]) -> bool:
    """Return whether waiting for a core costs more than each other cause that isn't its effect."""
    effects = ("straggler", "waiting") if shortage.explains_slow_nodes else ("waiting",)
    return shortage.share >= max(MIN_GAIN, *(other.gain for other in others if other.cause not in effects), 0)


def _judge_data(facts: Measurements) -> Verdict | None:
    """Return the gain of loading all batches ahead: the slowest rank would only compute."""
    data, compute = facts.get("data"), facts.compute_s
    saved = float(compute.max() - (compute - data).max())
    remaining, workers, rank = facts.step_s - saved, facts.spec.num_workers, facts.slowest
    if saved <= 0 or remaining <= 0:  # nothing but loading was measured
        return None
    loading = workers * facts.step_s if workers else float(data[rank])
    show = PrintedTimes(facts.step_s, saved, remaining, loading)
    rest_s, loading_s = show.round(show.round(facts.step_s) - show.round(saved)), show.round(loading)
    needed = max(workers + 1, math.ceil(loading_s / rest_s - _ROUNDING))
    others = np.delete(data, rank)
    where = f" on node {facts.ranks[rank]}" if len(others) and data[rank] > 2 * np.median(others) else ""
    gain = saved / facts.step_s
    current = f" ({workers} now)" if workers else ""
    text = f"waiting for data{where}: num_workers={needed}{current} would save up to {formatting.format_percent(gain)}"
    total = f"one batch takes {show(loading_s)} to load"
    source = f"{workers} workers finish a batch in each step of {show(facts.step_s)}, so {total}" if workers else total
    return Verdict(
        "data", text, gain,
        (
            *_list_means(facts),
            (f"without waiting for data the slowest node would take {show(facts.step_s)} - {show(saved)} = "
            f"{show(rest_s)} a step, {formatting.format_percent(gain)} less"),
            (f"{source}: {show(loading_s)} / {show(rest_s)} rounds up to {formatting.format_count(needed, 'worker')}, "
            "if each has a core"),
        ),
    )  # fmt: skip


def _judge_straggler(facts: Measurements) -> Verdict | None:
    """Return the gain if a step took as long as on the slowest node that isn't a straggler."""
    if facts.timing.straggler is None:
        return None
    slow = np.isin(facts.ranks, facts.timing.straggler.ranks)
    compute, noun = facts.compute_s, "straggler" if slow.sum() == 1 else "stragglers"
    saved = float(compute.max() - compute[~slow].max())
    if saved <= 0:
        return None
    remaining = facts.step_s - saved
    names = format_nodes([int(rank) for rank in facts.ranks[slow]])
    balanced, lines = _predict_balanced(facts)
    show = PrintedTimes(compute.max(), compute[~slow].max())
    difference, ratio = describe_difference(facts.step_s, saved)
    return Verdict(
        "straggler",
        f"without the {noun} ({names}) {facts.step_s / remaining:.1f} times as fast{balanced}",
        saved / facts.step_s,
        (
            *_list_means(facts),
            f"{names} computes up to {show(compute.max())}, the slowest other node {show(compute[~slow].max())}",
            f"without: {difference} a step, {ratio}",
            *lines,
        ),
        facts.timing.straggler.ranks,
    )


def _predict_balanced(facts: Measurements) -> tuple[str, tuple[str, ...]]:
    """Return the gain of shares of the batch proportional to speed, if the strategy supports them."""
    if not facts.spec.strategy.startswith("DataParallel(") or "balance" in facts.spec.strategy:
        return "", ()
    compute = facts.compute_s
    even = len(compute) / float((1 / compute).sum())
    ratio = facts.step_s / (facts.step_s - float(compute.max()) + even)
    if ratio < 1 / (1 - MIN_GAIN):
        return "", ()
    line = f'balance="auto": shares in proportion to speed let all nodes compute {_ms(even)}, the harmonic mean'
    return f'; with balance="auto" {ratio:.1f} times', (line,)


def _judge_overhead(facts: Measurements) -> Verdict | None:
    """Return the gain of a larger batch. Communication and update don't grow with it."""
    communication = float(facts.get("communication").mean())
    fixed = communication + float((facts.get("update") + facts.get("other"))[facts.slowest])
    step_s = facts.step_s
    grows = step_s - fixed
    if grows <= 0 or facts.spec.strategy.startswith("TensorParallel("):
        return _judge_sliced_model(facts)
    factor = 2 if fixed / (fixed + 2 * grows) <= _TARGET_OVERHEAD else MAX_BATCH_FACTOR
    speed_up = factor * step_s / (fixed + factor * grows)
    is_communication = communication >= fixed / 2
    share = (communication if is_communication else fixed) / step_s
    if share < MIN_GAIN:
        return None
    cause = "communication" if is_communication else "overhead that a batch of any size has"
    batch = f"batch_size={factor * facts.spec.batch_size} for {speed_up:.1f} times the samples/s"
    remedies = f"{batch}{name_other_remedies(facts, is_communication)}"
    show = PrintedTimes(fixed, grows)
    fixed_s, grows_s = show.round(fixed), show.round(grows)
    larger_s = fixed_s + factor * grows_s
    return Verdict(
        "communication" if is_communication else "overhead",
        f"{cause} is {formatting.format_percent(share)} of a step: {remedies}",
        1 - 1 / speed_up,
        (
            *_list_means(facts),
            (f"{show(fixed_s)} of a step don't grow with the batch (communication {show(communication)}, update, "
            f"other); {show(grows_s)} do"),
            (f"with a batch {factor} times as large a step takes {show(fixed_s)} + {factor} * {show(grows_s)} = "
            f"{show(larger_s)}"),
            (f"samples/s: {factor} * {show(fixed_s + grows_s)} / {show(larger_s)} = "
            f"{factor * (fixed_s + grows_s) / larger_s:.2f} times"),
        ),
    )  # fmt: skip


def _judge_sliced_model(facts: Measurements) -> Verdict | None:
    """Return the share of the time in which a model with sliced layers sends activations, which grow with the batch."""
    share = facts.share("communication")
    return Verdict(
        "communication",
        f"communication is {formatting.format_percent(share)} of a step, and grows with the batch: slice the model "
        "over fewer nodes (tp_size) if their memory allows it",
        share,
        _list_means(facts),
    )


def _judge_waiting(facts: Measurements) -> Verdict | None:
    """Return the time that nodes wait for each other in turn, if none of them is slower than the others."""
    if facts.timing.straggler is not None:
        return None
    share = facts.share("waiting")
    return Verdict(
        "waiting",
        f"nodes wait for each other {formatting.format_percent(share)} of the time, none is always the slowest: other "
        "work on the hosts, or batches that differ",
        share if share >= 2 * MIN_GAIN else 0.0,
        _list_means(facts),
    )


def _judge_cut(facts: Measurements) -> Verdict | None:
    """Return the gain of stages that compute equally long."""
    compute = facts.compute_s
    saved = float(compute.max() - compute.mean())
    if compute.max() < _OVER_STAGES * compute.mean():
        return None
    node = int(facts.ranks[facts.slowest])
    ratio = compute.max() / compute.mean()
    difference, _ = describe_difference(float(compute.max()), float(compute.mean()))
    return Verdict(
        "cut",
        f"the stages on node {node} compute {ratio:.1f} times as long as the mean: "
        f"an even split= would save up to {formatting.format_percent(saved / facts.step_s)}",
        saved / facts.step_s,
        (
            *_list_means(facts),
            f"the slowest stages compute longer than the mean: {difference}, of a step of {_ms(facts.step_s)}",
        ),
    )


def _judge_bubble(facts: Measurements) -> Verdict | None:
    """Return the gain of more micro-batches, by the formula (p - 1) / (m + p - 1) of the bubble."""
    stages, number = facts.ranks_per_replica, re.search(r"micro_batches=(\d+)", facts.spec.strategy)
    waiting = facts.share("waiting")
    if stages < 2 or number is None or waiting < MIN_GAIN:
        return None
    count = int(number[1])
    bubble = (stages - 1) / (count + stages - 1)
    samples = facts.spec.batch_size * stages // facts.spec.world_size
    more = min(4 * count, samples)
    gain = (1 - (count / (count + stages - 1)) / (more / (more + stages - 1))) if more > count else 0.0
    return Verdict(
        "bubble",
        f"stages wait {formatting.format_percent(waiting)} of the time: Pipeline(micro_batches={more}) would save up "
        f"to {formatting.format_percent(gain)}",
        min(gain, waiting),
        (
            *_list_means(facts),
            (
                f"a pipeline of p = {stages} stages and m = {count} micro-batches idles (p - 1) / (m + p - 1) = "
                f"{formatting.format_percent(bubble)}; with m = {more} it is "
                f"{formatting.format_percent((stages - 1) / (more + stages - 1))}"
            ),
            "smaller micro-batches compute less efficiently, so less than that is saved",
        ),
    )


def _report_computing(facts: Measurements) -> Verdict:
    """Return the verdict if no remedy would save much."""
    share = facts.share("forward") + facts.share("backward") + facts.share("update")
    largest = max(("data", "waiting", "communication", "other"), key=facts.share)
    rest = "" if facts.share(largest) < MIN_GAIN else f", {largest} {formatting.format_percent(facts.share(largest))}"
    lines = (*_list_means(facts), f"no remedy is predicted to save {formatting.format_percent(MIN_GAIN)} or more")
    text = f"computing is {formatting.format_percent(share)} of a step{rest}: nothing holds it back"
    return Verdict("computing", text, 0.0, lines)


def _list_means(facts: Measurements) -> tuple[str, ...]:
    """Return the mean of each phase over all nodes, and the window."""
    return tuple(_iterate_means(facts))


def _iterate_means(facts: Measurements) -> Iterator[str]:
    parts = (f"{phase} {_ms(float(facts.get(phase).mean()))}" for phase in PHASES if facts.get(phase).mean() > 0)
    yield f"means of {_name_steps(facts)} and all nodes: {', '.join(parts)}"
    if len(facts.ranks) > 1:
        compute = facts.compute_s
        fast, slow = int(np.argmin(compute)), facts.slowest
        yield (
            f"computing with data: {_ms(compute[fast])} on node {facts.ranks[fast]} to {_ms(compute[slow])} on node "
            f"{facts.ranks[slow]}; a step takes {_ms(facts.step_s)}"
        )


def _name_steps(facts: Measurements) -> str:
    return f"{'' if facts.timing.is_whole else 'the '}{facts.timing.steps_text}"

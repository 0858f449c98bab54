"""Causes that take part of the time of a step: what was measured, the remedy, and what it is predicted to save.

Each cause has its own arithmetic. It predicts the time of a step, or the samples per second, without that cause. All
ranks take a step together, so a step lasts as long as the slowest rank computes, and then communicates.

Predictions hold other things equal: worker processes need cores of their own, and a larger batch trains differently.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.summary.printed_times import PrintedTimes, describe_difference
from dtkit.dashboard.summary.rarer_messages import name_other_remedies
from dtkit.dashboard.summary.timing import PHASES, format_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.dashboard.summary.measurements import Measurements

MIN_GAIN = 0.1
"""Smallest predicted saving, as a share of the time. On a busy machine, means vary by less."""
MAX_BATCH_FACTOR = 4
"""Largest factor on the batch that a verdict proposes; a batch that is much larger needs other settings."""

_TARGET_OVERHEAD = 0.2  # share of a step that the proposed batch leaves to communication, update and Python
_MIN_SHOWN_SHARE = 0.0005  # of all time, of a phase that the means list
_ROUNDING = 1e-9
_OVER_STAGES = 1.3  # ratio of the slowest stage to the mean one from which the cut is to blame
_ms = formatting.format_duration


@dataclasses.dataclass(frozen=True)
class Cause:
    """What takes part of the time of a step."""

    name: str
    """As in `Verdict.cause`."""
    finding: str
    """What was measured, in words."""
    remedy: str
    """What would help, in words; empty where the finding says it."""
    gain: float
    """Share of the time for the same samples that the remedy is predicted to save."""
    arithmetic: tuple[str, ...] = ()
    slow_ranks: tuple[int, ...] = ()
    larger_batch: str = ""
    """The part of the remedy that is a larger batch; empty without one."""
    is_split_in_vain: bool = False
    """Whether the remedy is not to split the model."""

    @property
    def text(self) -> str:
        """Finding and remedy in one line."""
        return f"{self.finding}: {self.remedy}" if self.remedy else self.finding


def find_causes(facts: Measurements) -> list[Cause]:
    """Return the causes that were measured, except small ones."""
    found = [cause for judge in _select_judges(facts) if (cause := judge(facts)) is not None]
    return [cause for cause in found if cause.gain >= MIN_GAIN / 2]


def _select_judges(facts: Measurements) -> Sequence[Callable[[Measurements], Cause | None]]:
    if not facts.timing.is_same_work:
        return _judge_data, _judge_cut, _judge_bubble
    return _judge_data, _judge_straggler, _judge_overhead, _judge_waiting


def _judge_data(facts: Measurements) -> Cause | None:
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
    remedy = f"num_workers={needed}{current} would save up to {formatting.format_percent(gain)}"
    total = f"one batch takes {show(loading_s)} to load"
    source = f"{workers} workers finish a batch in each step of {show(facts.step_s)}, so {total}" if workers else total
    return Cause(
        "data", f"waiting for data{where}", remedy, gain,
        (
            *list_means(facts),
            (f"without waiting for data the slowest node would take {show(facts.step_s)} - {show(saved)} = "
            f"{show(rest_s)} a step, {formatting.format_percent(gain)} less"),
            (f"{source}: {show(loading_s)} / {show(rest_s)} rounds up to {formatting.format_count(needed, 'worker')}, "
            "if each has a core"),
        ),
    )  # fmt: skip


def _judge_straggler(facts: Measurements) -> Cause | None:
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
    return Cause(
        "straggler",
        f"without the {noun} ({names}) {facts.step_s / remaining:.1f} times as fast{balanced}",
        "",
        saved / facts.step_s,
        (
            *list_means(facts),
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


def _judge_overhead(facts: Measurements) -> Cause | None:
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
    noun = "communication" if is_communication else "overhead that a batch of any size has"
    batch = f"batch_size={factor * facts.spec.batch_size} for {speed_up:.1f} times the samples/s"
    show = PrintedTimes(fixed, grows)
    fixed_s, grows_s = show.round(fixed), show.round(grows)
    larger_s = fixed_s + factor * grows_s
    return Cause(
        "communication" if is_communication else "overhead",
        f"{noun} is {formatting.format_percent(share)} of a step",
        f"{batch}{name_other_remedies(facts, is_communication)}",
        1 - 1 / speed_up,
        (
            *list_means(facts),
            (f"{show(fixed_s)} of a step don't grow with the batch (communication {show(communication)}, update, "
            f"other); {show(grows_s)} do"),
            (f"with a batch {factor} times as large a step takes {show(fixed_s)} + {factor} * {show(grows_s)} = "
            f"{show(larger_s)}"),
            (f"samples/s: {factor} * {show(fixed_s + grows_s)} / {show(larger_s)} = "
            f"{factor * (fixed_s + grows_s) / larger_s:.2f} times"),
        ),
        larger_batch=batch,
    )  # fmt: skip


def _judge_sliced_model(facts: Measurements) -> Cause | None:
    """Return the share of the time in which a model with sliced layers sends activations, which grow with the batch."""
    share = facts.share("communication")
    return Cause(
        "communication",
        f"communication is {formatting.format_percent(share)} of a step",
        "it grows with the batch, so slice the model over fewer nodes (tp_size) if their memory allows it",
        share,
        list_means(facts),
    )


def _judge_waiting(facts: Measurements) -> Cause | None:
    """Return the time that nodes wait for each other in turn, if none of them is slower than the others."""
    if facts.timing.straggler is not None:
        return None
    share = facts.share("waiting")
    return Cause(
        "waiting",
        f"nodes wait for each other {formatting.format_percent(share)} of the time, none is always the slowest",
        "other work on the hosts, or batches that differ",
        share if share >= 2 * MIN_GAIN else 0.0,
        list_means(facts),
    )


def _judge_cut(facts: Measurements) -> Cause | None:
    """Return the gain of stages that compute equally long."""
    compute = facts.compute_s
    saved = float(compute.max() - compute.mean())
    if compute.max() < _OVER_STAGES * compute.mean():
        return None
    node = int(facts.ranks[facts.slowest])
    ratio = compute.max() / compute.mean()
    difference, _ = describe_difference(float(compute.max()), float(compute.mean()))
    return Cause(
        "cut",
        f"the stages on node {node} compute {ratio:.1f} times as long as the mean",
        f"an even split= would save up to {formatting.format_percent(saved / facts.step_s)}",
        saved / facts.step_s,
        (
            *list_means(facts),
            f"the slowest stages compute longer than the mean: {difference}, of a step of {_ms(facts.step_s)}",
        ),
    )


def _judge_bubble(facts: Measurements) -> Cause | None:
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
    return Cause(
        "bubble",
        f"stages wait {formatting.format_percent(waiting)} of the time",
        f"Pipeline(micro_batches={more}) would save up to {formatting.format_percent(gain)}",
        min(gain, waiting),
        (
            *list_means(facts),
            (
                f"a pipeline of p = {stages} stages and m = {count} micro-batches idles (p - 1) / (m + p - 1) = "
                f"{formatting.format_percent(bubble)}; with m = {more} it is "
                f"{formatting.format_percent((stages - 1) / (more + stages - 1))}"
            ),
            "smaller micro-batches compute less efficiently, so less than that is saved",
        ),
    )


def report_computing(facts: Measurements) -> Cause:
    """Return the verdict if no remedy would save much."""
    share = facts.share("forward") + facts.share("backward") + facts.share("update")
    largest = max(("data", "waiting", "communication", "other"), key=facts.share)
    rest = "" if facts.share(largest) < MIN_GAIN else f", {largest} {formatting.format_percent(facts.share(largest))}"
    lines = (*list_means(facts), f"no remedy is predicted to save {formatting.format_percent(MIN_GAIN)} or more")
    finding = f"computing is {formatting.format_percent(share)} of a step{rest}"
    return Cause("computing", finding, "nothing holds it back", 0.0, lines)


def list_means(facts: Measurements) -> tuple[str, ...]:
    """Return the mean of each phase over all nodes, and the window."""
    return tuple(_iterate_means(facts))


def _iterate_means(facts: Measurements) -> Iterator[str]:
    parts = (
        f"{phase} {_ms(float(facts.get(phase).mean()))}" for phase in PHASES if facts.share(phase) >= _MIN_SHOWN_SHARE
    )
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

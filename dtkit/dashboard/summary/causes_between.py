"""Causes between the steps: validation, callbacks, saving, and waiting for the notebook.

Their gains are shares of the whole time, which a clock on the wall shows. It counts from the second step on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting, timeouts
from dtkit.dashboard.summary.causes import Cause
from dtkit.dashboard.summary.printed_times import PrintedTimes
from dtkit.history.between_steps import CALLBACKS, CHECKPOINTS, SNAPSHOTS, VALIDATION, WAITING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtkit.history.between_steps import TimeBetween
    from dtkit.types import RunSpec

CAUSES_BETWEEN = (VALIDATION, CALLBACKS, CHECKPOINTS, SNAPSHOTS, "dispatches")
"""Names of the causes, as in `Verdict.cause`."""

_RARER = (2, 5, 10, 20, 50, 100)  # times as rare as now
_LEFT = 0.1  # largest share of the time that rarer actions leave


def find_causes_between(spec: RunSpec, between: TimeBetween) -> Iterator[Cause]:
    """Yield a cause for each kind of work between the steps."""
    if between.share(VALIDATION) > 0:
        yield _judge_repeated(spec, between, VALIDATION, "validation takes", "validation_every", "epoch")
    if between.share(CHECKPOINTS) > 0:
        phrase = "copying the state for checkpoints takes"
        yield _judge_repeated(spec, between, CHECKPOINTS, phrase, "checkpoint_every", "step")
    if between.share(SNAPSHOTS) > 0:
        phrase = "copying the state for snapshots takes"
        yield _judge_repeated(spec, between, SNAPSHOTS, phrase, "snapshot_every", "step")
    if between.share(CALLBACKS) > 0:
        remedy = "engines wait until they return; slow work belongs on a thread of its own"
        yield _judge_removable(between, CALLBACKS, CALLBACKS, "callbacks take", remedy)
    if between.share(WAITING) > 0 and between.whole_s >= timeouts.VERDICT_WAITING_RUN_S:
        remedy = "other work in the notebook, or on its machine, delays its next call"
        yield _judge_removable(between, WAITING, "dispatches", "waiting for the notebook takes", remedy)


def describe_time_between(between: TimeBetween) -> str:
    """Return the parts of the time between the steps in one line: ``between the steps: 30 % of the time, ...``."""
    parts = [
        f"{kind} {formatting.format_percent(between.share(kind))}"
        for kind, seconds in between.seconds.items()
        if seconds and formatting.format_percent(between.share(kind)) != formatting.format_percent(0)
    ]
    total = formatting.format_percent(between.total_share)
    return f"between the steps, in {total} of the whole time: {', '.join(parts)}"


def _judge_repeated(spec: RunSpec, between: TimeBetween, kind: str, phrase: str, option: str, unit: str) -> Cause:
    """Return the gain of doing something less often: its time shrinks in proportion, the rest stays."""
    seconds, whole_s = between.seconds[kind], between.whole_s
    rest_s = whole_s - seconds
    factor = next((k for k in _RARER if seconds / k <= _LEFT * (rest_s + seconds / k)), _RARER[-1])
    now = _read_interval(spec, option)
    if option == "validation_every":
        factor = _limit_factor(factor, now or 1, spec)
    if factor < 2 or (now is None and unit == "step"):
        return _judge_removable(between, kind, kind, phrase, "")
    every = f"{option}={factor * (now or 1):,}".replace(",", "_")
    show = PrintedTimes(rest_s, seconds)
    rest, part = show.round(rest_s), show.round(seconds)
    rarer_s = rest + part / factor
    ratio = (rest + part) / rarer_s
    calls = " with the calls for it, but the first of each engine" if kind == VALIDATION else ""
    return Cause(
        kind,
        f"{phrase} {formatting.format_percent(seconds / whole_s)} of the time",
        f"{every} would make the run {ratio:.1f} times as fast",
        1 - rarer_s / (rest + part),
        (
            f"since the first step: {show(rest)} without {kind}, and {show(part)} of {kind}{calls}",
            f"{kind} {factor} times as rare: {show(rest)} + {show(part)} / {factor} = {show(rarer_s)}",
            f"{show(rest + part)} / {show(rarer_s)} = {(rest + part) / show.round(rarer_s):.2f}",
            describe_time_between(between),
        ),
    )


def _judge_removable(between: TimeBetween, kind: str, name: str, phrase: str, remedy: str) -> Cause:
    """Return the gain of leaving something out."""
    seconds, whole_s = between.seconds[kind], between.whole_s
    show = PrintedTimes(whole_s, seconds)
    whole, part = show.round(whole_s), show.round(seconds)
    rest = whole - part
    ratio = f"the run would be {whole / rest:.1f} times as fast" if rest > 0 else ""
    sentences = [remedy, f"Without, {ratio}"] if remedy else [f"without, {ratio}"]
    return Cause(
        name,
        f"{phrase} {formatting.format_percent(seconds / whole_s)} of the time",
        ". ".join(sentences if ratio else sentences[:-1]),
        seconds / whole_s,
        (
            f"since the first step: {show(whole)} - {show(part)} = {show(rest)} without",
            *([f"{show(whole)} / {show(rest)} = {whole / show.round(rest):.2f}"] if show.round(rest) > 0 else []),
            describe_time_between(between),
        ),
    )


def _limit_factor(factor: int, now: int, spec: RunSpec) -> int:
    """Return the factor, or a smaller one for a run with fewer epochs; 1 if there is none."""
    return next((k for k in reversed(_RARER) if k <= factor and k * now <= spec.epochs), 1)


def _read_interval(spec: RunSpec, option: str) -> int | None:
    """Return the number that the user gave an option; None without one."""
    text = dict(spec.settings).get(option, "").replace("_", "").replace(",", "")
    return int(text) if text.isdecimal() else None

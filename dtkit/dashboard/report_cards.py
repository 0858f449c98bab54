"""The headline numbers of a run's report: (label, value, note), where the note says how the value was made."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.dashboard.report_charts import list_metric_names
from dtkit.dashboard.summary.comparison import find_best_evaluation
from dtkit.dashboard.summary.metrics import compute_efficiency, compute_overall_rate, compute_run_metrics
from dtkit.dashboard.summary.one_process import read_step_times
from dtkit.dashboard.summary.pauses import find_pauses
from dtkit.dashboard.summary.time_outside_steps import list_times_outside_steps
from dtkit.history.divergence import find_divergence
from dtkit.history.mean_loss import FINAL_LOSS_STEPS, count_final_steps
from dtkit.history.metric_direction import is_better_lower
from dtkit.history.speed import STEADY_SECONDS, WHOLE_RUN_STEPS, compute_speed
from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtkit.dashboard.run_view import RunView
    from dtkit.history.history import History


def iterate_cards(run: RunView, single_process: History | None) -> Iterator[tuple[str, str, str]]:
    """Return the headline numbers: the loss, the metrics, speed, duration, and the speed-up over one process."""
    history, rate = run.history, compute_speed(run.history).samples_per_s
    metrics = compute_run_metrics(history, run.spec.world_size)
    if math.isfinite(rate):
        metrics = dataclasses.replace(metrics, throughput=rate)
    if metrics.loss is not None:
        yield "training loss", formatting.format_loss(metrics.loss), _describe_mean(history)
    yield from _iterate_validation_cards(history)
    yield "throughput", formatting.format_rate(rate), _describe_throughput(history, run.status.elapsed_s)
    efficiency = compute_efficiency(run, metrics)
    if efficiency is not None and efficiency.tokens_per_s is not None:
        yield "tokens", formatting.format_rate(efficiency.tokens_per_s), "tokens/s"
    if efficiency is not None and efficiency.mfu is not None:
        yield "MFU", formatting.format_percent(efficiency.mfu), efficiency.mfu_note
    yield (
        "duration",
        formatting.format_run_time(run.status.elapsed_s),
        _describe_duration(run),
    )
    if (verification := run.verification) is not None:
        steps = formatting.format_count(verification.steps, "step")
        note = ", ".join(filter(None, [verification.describe_difference(), f"{steps} against one process"]))
        yield "verified", verification.verdict, note
    yield from _iterate_speed_up_cards(run, single_process)


def _iterate_validation_cards(history: History) -> Iterator[tuple[str, str, str]]:
    """Return the best of each metric. Of a diverged run it is below the last, since its best hides how it ended."""
    has_diverged = find_divergence(history) is not None
    for name in ["loss", *list_metric_names(history)]:
        best = find_best_evaluation(history, name)
        if best is None:
            continue
        (step, value), word = best, "lowest" if is_better_lower(name, history.directions) else "highest"
        shown, note = formatting.format_loss(value), f"{word}, at step {step:,}"
        last = next(e for e in reversed(history.evaluations) if e.values.get(name) is not None)
        if has_diverged and last.step != step:
            shown, note = formatting.format_loss(last.values[name]), f"the last; {word} {shown} at step {step:,}"
        elif last.step != step:
            note += f"; the last {formatting.format_loss(last.values[name])}"
        yield f"validation {name}", shown, note


def _describe_mean(history: History) -> str:
    """Return the steps over which the final loss is averaged, which are fewer in a short run."""
    count = count_final_steps(history)
    return "loss of the only step" if count == 1 else f"mean of the last {count} steps"


def _describe_duration(run: RunView) -> str:
    """Return the pauses, which the duration leaves out, and its parts beside the steps that are worth a word."""
    notes = [*_describe_pauses(run), *list_times_outside_steps(run.history, run.status.elapsed_s)]
    return "; ".join(notes) or formatting.format_count(run.status.step, "step")


def _describe_pauses(run: RunView) -> Iterator[str]:
    """Return the length of the pauses, and what caused those that nobody requested: ``(not finite, lost node)``."""
    pauses, is_failed_pause = find_pauses(run.history), run.exception is not None and run.status.state is State.PAUSED
    causes = f" ({', '.join(pauses.causes)})" if pauses.causes else ""
    if pauses.seconds:
        yield f"without {formatting.format_duration(pauses.seconds)} of pauses{causes}"
    elif pauses.has_requested or pauses.causes or is_failed_pause:
        yield f"without pauses{causes}"


def _describe_throughput(history: History, elapsed_s: float) -> str:
    """Return the steps of the rate, without the first, which warms up, and whether they are too few or too short.

    The rate overall is over the same steps and the time between them, as the card of the duration has it.
    """
    count = max(1, history.num_steps - 1)
    speed = compute_speed(history)
    if history.num_steps < 2 or not math.isfinite(speed.step_s):
        return "samples/s" if not history.num_steps else "samples/s of the only step, which also warms up"
    overall = compute_overall_rate(history, speed.samples_per_s, elapsed_s)
    overall_note = "" if overall is None else f", {formatting.format_rate(overall)} with the time between them"
    note = f"samples/s, {WHOLE_RUN_STEPS}{overall_note}"
    total_s = speed.step_s * count
    if count < FINAL_LOSS_STEPS:
        return f"{note}; too few for a steady mean: {formatting.format_count(count, 'step')}"
    if total_s < STEADY_SECONDS:
        return f"{note}; too short for a steady mean: these steps took {formatting.format_duration(total_s)}"
    return note


def _iterate_speed_up_cards(run: RunView, single_process: History | None) -> Iterator[tuple[str, str, str]]:
    """Return the speed-up over one process and its share of the ideal; nothing where a measurement gives none."""
    if single_process is not None:
        many, one = compute_speed(run.history).samples_per_s, compute_speed(single_process).samples_per_s
        ratio = many / one
        source = f"{formatting.format_rate(many)} / {formatting.format_rate(one)} samples/s, means of both runs"
    elif (times := read_step_times(run)) is not None:
        if times.describe_disturbance(run.spec.world_size):
            return  # the section of the verification says why
        ratio = times.speed_up
        one_s, many_s = map(formatting.format_duration, (times.single_process_s, times.all_ranks_s))
        source = f"{one_s} / {many_s} a step, medians of {times.num_steps} steps of run.verify()"
    else:
        return
    nodes = formatting.format_count(run.spec.world_size, "node")
    yield "speed-up", f"{ratio:.2f} times", f"over one process: {source}"
    share = formatting.format_percent(ratio / run.spec.world_size)
    yield "scaling efficiency", share, f"of the ideal speed-up: {ratio:.2f} / {nodes}"

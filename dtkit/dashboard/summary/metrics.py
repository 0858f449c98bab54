"""Current metrics over the last steps, of all nodes and of each node."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.summary.activity import find_activity
from dtkit.dashboard.summary.best_values import find_best_value
from dtkit.dashboard.summary.curves import find_rows_without_loss
from dtkit.dashboard.summary.ended_engines import find_ended_engines
from dtkit.dashboard.summary.last_scalar import read_last_scalar
from dtkit.dashboard.summary.lost_nodes import count_initial_nodes, update_lost_nodes
from dtkit.dashboard.summary.stall import find_stall, format_place
from dtkit.dashboard.summary.timing import (
    StepTiming,
    compute_step_timing,
    count_window_steps,
    format_nodes,
    is_over,
    read_window,
)
from dtkit.history.between_steps import read_time_between
from dtkit.history.mean_loss import count_final_steps, read_final_loss
from dtkit.history.metric_direction import has_direction
from dtkit.history.speed import WHOLE_RUN_STEPS, compute_speed, split_time
from dtkit.history.workload import Efficiency

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtkit.dashboard.run_view import RunView
    from dtkit.dashboard.summary.lost_nodes import LostNodes
    from dtkit.history.history import History
    from dtkit.types import RunSpec


_MAX_METRIC_TILES = 2
MEAN_LOSS = "mean loss"
"""Label of the tile whose number charts have at the end of the loss, too."""
MIN_SHARE_BETWEEN = 0.1
"""Share of the time between steps from which views show the throughput with it, too."""


@dataclasses.dataclass(frozen=True)
class RunMetrics:
    """Means over the last steps; None before the first one. Times are in seconds.

    After the run's end, throughput and step time are of all its steps, as in its report.

    `by_rank` has a row per rank and the columns loss, throughput while it does not wait for others, memory in bytes.
    Unknown values are NaN.
    """

    throughput: float | None
    """Samples per second of all ranks, in steps only."""
    loss: float | None
    """Mean of the last ``FINAL_LOSS_STEPS`` by weight, like the gradients: a short batch counts less."""
    loss_spread: float | None
    step_s: float | None
    by_rank: np.ndarray
    timing: StepTiming
    ranks_without_loss: np.ndarray
    """Ranks that reported no loss in their last step, whose NaN means nothing."""
    lost_nodes: LostNodes
    """Lost nodes, with the step of the loss."""
    num_loss_steps: int
    """Steps over which the loss is averaged."""
    overall_throughput: float | None = None
    """The same with the time between steps, as a clock on the wall shows it; None if that is short."""
    covers_whole_run: bool = False
    """Whether throughput and step time are of a whole run that has ended, but for its first step."""

    @property
    def speed_steps_text(self) -> str:
        """The steps of throughput and step time: ``last 50 steps``, ``all steps but the first``."""
        return WHOLE_RUN_STEPS if self.covers_whole_run else self.timing.steps_text


def compute_run_metrics(history: History, num_ranks: int, lost_nodes: LostNodes | None = None) -> RunMetrics:
    """Return the metrics of a history. Without `lost_nodes` they are read from its events."""
    by_rank, silent = np.full((num_ranks, 3), np.nan), np.ones(num_ranks, bool)
    timing = compute_step_timing(history, num_ranks)
    lost_nodes = update_lost_nodes({}, history.events) if lost_nodes is None else lost_nodes
    window = count_window_steps(history)
    totals = history.read_valid_totals(history.num_steps - window)
    if not len(totals):
        return RunMetrics(None, None, None, None, by_rank, timing, silent, lost_nodes, num_loss_steps=0)
    _, rows = read_window(history, num_ranks)
    rank = rows["rank"]
    busy = np.bincount(rank, rows["step_s"] - rows["wait_s"], num_ranks)
    by_rank[:, 1] = _divide_or_nan(np.bincount(rank, rows["samples"], num_ranks), busy)
    last_row = np.full(num_ranks, -1)
    last_row[rank] = np.arange(len(rank))
    has_rows = last_row >= 0
    last = rows[last_row[has_rows]]
    by_rank[has_rows, 0], by_rank[has_rows, 2] = last["loss"], last["memory_bytes"]
    silent[has_rows] = find_rows_without_loss(last)
    losses = last["loss"][np.isfinite(last["loss"]) & (last["step"] == totals["step"][-1])]
    has_ended = is_over(history)
    speed = compute_speed(history, None if has_ended else window)
    return RunMetrics(
        throughput=speed.samples_per_s if math.isfinite(speed.samples_per_s) else None,
        loss=read_final_loss(history),
        loss_spread=float(np.ptp(losses)) if len(losses) > 1 else None,
        step_s=speed.step_s,
        by_rank=by_rank,
        timing=timing,
        ranks_without_loss=silent,
        lost_nodes=lost_nodes,
        num_loss_steps=count_final_steps(history),
        overall_throughput=compute_overall_rate(
            history, speed.samples_per_s, history.position[1] if has_ended else None
        ),
        covers_whole_run=has_ended and history.num_steps > 2,  # the second of two steps is called the last one
    )


def compute_overall_rate(history: History, samples_per_s: float, elapsed_s: float | None) -> float | None:
    """Return the rate with the run's share of time between steps; None if that share is small.

    With the run's duration `elapsed_s`, it is the time that its card names. Without, for a run that takes steps, it is
    what the engines have measured so far: the duration has a part of the next step, too.
    """
    if elapsed_s is None:
        share = read_time_between(history).total_share
    else:
        share = split_time(history, elapsed_s).share_between
    return samples_per_s * (1 - share) if math.isfinite(samples_per_s) and share > MIN_SHARE_BETWEEN else None


def _divide_or_nan(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.asarray(np.divide(numerator, denominator, out=np.full(len(numerator), np.nan), where=denominator > 0))


def compute_epoch(spec: RunSpec, step: int) -> tuple[int, int]:
    """Return (current epoch, number of epochs), both counted from 1."""
    steps_per_epoch = max(1, spec.steps_per_epoch)
    return max(1, math.ceil(step / steps_per_epoch)), max(1, math.ceil(spec.steps / steps_per_epoch))


@dataclasses.dataclass(frozen=True)
class Tile:
    """A large number of a view, with a label above it and a note below it, which may be an alert."""

    label: str
    value: str
    note: str
    alert: bool = False


def build_tiles(run: RunView, metrics: RunMetrics) -> Iterator[Tile]:
    """Return the tiles at the top of a view."""
    activity = find_activity(run, metrics.lost_nodes)
    if activity is None:
        yield Tile("throughput", formatting.format_rate(metrics.throughput), _describe_rate(metrics))
    else:
        yield Tile("throughput", formatting.UNKNOWN, "no steps are taken")
    yield Tile(MEAN_LOSS, formatting.format_loss(metrics.loss), _describe_loss(run, metrics))
    slow = metrics.timing.straggler
    yield Tile(
        "mean step time",
        formatting.format_duration(metrics.step_s),
        f"▲ slowest: {format_nodes(slow.ranks)}" if slow else _describe_window(metrics),
    )
    yield Tile(
        "waiting",
        formatting.format_percent(metrics.timing.waiting_share if metrics.timing.is_measured else None),
        "of all nodes' time",
    )
    yield _build_nodes_tile(run, metrics)
    yield from _build_metric_tiles(run)
    yield from _build_efficiency_tiles(run, metrics)


def compute_efficiency(run: RunView, metrics: RunMetrics) -> Efficiency | None:
    """Return tokens, operations and MFU at the present speed; None before they were measured."""
    workload = run.history.workload
    if workload is None or metrics.throughput is None:
        return None
    return Efficiency(workload, metrics.throughput, run.spec.world_size)


def _build_efficiency_tiles(run: RunView, metrics: RunMetrics) -> Iterator[Tile]:
    efficiency = compute_efficiency(run, metrics)
    if efficiency is None:
        return
    if efficiency.tokens_per_s is not None:
        yield Tile("tokens/s", formatting.format_rate(efficiency.tokens_per_s), "all nodes")
    if efficiency.mfu is not None:
        yield Tile("MFU", formatting.format_percent(efficiency.mfu), "of the devices' peak")


def _build_metric_tiles(run: RunView) -> Iterator[Tile]:
    """Return a tile for the first metrics of the last validation; its loss is next to that of the training."""
    evaluations = run.history.evaluations
    last = evaluations[-1] if evaluations else None
    names = [name for name in last.values if name != "loss"] if last is not None else []
    for name in names[:_MAX_METRIC_TILES]:
        assert last is not None
        yield build_metric_tile(run.history, name, last.values[name])


def build_metric_tile(history: History, name: str, validation: float | None) -> Tile:
    """Return the tile of a metric's last `validation`. That of one which is also logged shows the training's value.

    It has the best validation where the metric or its name says what is better.
    """
    value, trained = formatting.format_loss(validation), read_last_scalar(history, name)
    notes = ["validation" if trained is None else f"validation {value}"]
    if has_direction(name, history.directions):
        best = formatting.format_loss(find_best_value(history, name))
        notes.append("best so far" if best == value else f"best {best}")
    shown = value if trained is None else formatting.format_loss(trained)
    return Tile(formatting.sanitize_text(name, 24), shown, ", ".join(notes))


def _describe_rate(metrics: RunMetrics) -> str:
    if metrics.overall_throughput is not None:
        return f"samples/s, {formatting.format_rate(metrics.overall_throughput)} overall"
    if metrics.covers_whole_run:
        return f"samples/s, {WHOLE_RUN_STEPS}"
    steps = metrics.timing.num_steps
    return f"samples/s, {formatting.format_count(steps, 'step')}" if steps else "samples/s, all nodes"


def _describe_window(metrics: RunMetrics) -> str:
    return metrics.speed_steps_text if metrics.timing.num_steps else "no step yet"


def _build_nodes_tile(run: RunView, metrics: RunMetrics) -> Tile:
    """Return the number of live nodes, with the most urgent note on them."""
    # During a repair the world size may be new already, while lost nodes belong to the old one.
    world = len(metrics.by_rank) if metrics.lost_nodes else run.spec.world_size
    alive = f"{world - len(metrics.lost_nodes):,} / {world:,}"
    stall, num_initial = find_stall(run), count_initial_nodes(run)
    if metrics.lost_nodes:
        return Tile("nodes", alive, f"✕ {format_nodes(sorted(metrics.lost_nodes))} lost", alert=True)
    if stall is not None:
        return Tile("nodes", alive, format_place(stall), alert=True)
    if ended := find_ended_engines(run):  # the numbers of the run stay as they were
        return Tile("nodes", f"{world - len(ended):,} / {world:,}", f"✕ {format_nodes(ended)} ended since")
    if num_initial > world:
        return Tile("nodes", alive, f"was {num_initial:,}: {num_initial - world:,} left out")
    hosts = len({node.host for node in run.nodes})
    return Tile("nodes", alive, f"on {formatting.format_count(hosts, 'host')}" if hosts else "")


def _describe_loss(run: RunView, metrics: RunMetrics) -> str:
    """Return the steps of the mean, which a narrow page leaves out, and the spread or the last validation."""
    window = metrics.num_loss_steps if not run.history.evaluations else 0  # their text fills a tile
    return ", ".join(filter(None, [f"{window} steps" if window > 1 else "", _describe_latest_loss(run, metrics)]))


def _describe_latest_loss(run: RunView, metrics: RunMetrics) -> str:
    evaluations = run.history.evaluations
    if evaluations:
        name, value = next(iter(evaluations[-1].values.items()), ("", None))
        return f"validation {name} {formatting.format_loss(value)}".replace("validation loss", "validation")
    return "" if metrics.loss_spread is None else f"spread {formatting.format_loss(metrics.loss_spread)}"

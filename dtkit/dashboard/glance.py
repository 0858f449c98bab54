"""The few numbers of *now*, over the last steps, that every view shows: of all nodes, and of each."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.fates import begun, follow
from dtkit.dashboard.series import lossless
from dtkit.dashboard.stuck import halted, short
from dtkit.dashboard.timing import Timing, named, timing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtkit.dashboard.fates import Lost
    from dtkit.dashboard.source import Source
    from dtkit.history.history import History
    from dtkit.types import RunSpec

WINDOW = 20
"""Steps over which a rate is taken: long enough to be read, short enough to show a change."""


@dataclasses.dataclass(frozen=True)
class Glance:
    """Throughput in samples per second, times in seconds; None before the first step.

    `by_rank` has a row per rank and the columns loss, throughput while it does not wait for others, memory in
    bytes; NaN where unknown.
    """

    throughput: float | None
    loss: float | None
    spread: float | None
    step_s: float | None
    by_rank: np.ndarray
    timing: Timing
    lossless: np.ndarray
    """Which ranks had no loss to tell in their last step, so that its NaN means nothing."""
    lost: Lost
    """The nodes that are lost, and since which step."""


def glance(history: History, ranks: int, lost: Lost | None = None) -> Glance:
    """Read the last steps of a history; `lost` is read from its events unless the caller has followed them."""
    by_rank, silent = np.full((ranks, 3), np.nan), np.ones(ranks, bool)
    parts = timing(history, ranks)
    lost = follow({}, history.events) if lost is None else lost
    totals = history.totals(history.num_steps - WINDOW)
    if not len(totals):
        return Glance(None, None, None, None, by_rank, parts, silent, lost)
    rows = history.rows(len(history) - WINDOW * ranks)
    rows = rows[rows["rank"] < ranks]
    rank = rows["rank"]
    by_rank[rank, 0], silent[rank] = rows["loss"], lossless(rows)  # in the order of steps: the last one written stays
    busy = np.bincount(rank, rows["step_s"] - rows["wait_s"], ranks)
    by_rank[:, 1] = _ratio(np.bincount(rank, rows["samples"], ranks), busy)
    by_rank[rank, 2] = rows["memory_bytes"]
    last = rows[rows["step"] == totals["step"][-1]]
    losses = last["loss"][np.isfinite(last["loss"])]
    seconds = float(totals["step_s"].sum())
    return Glance(
        throughput=float(totals["samples"].sum()) / seconds if seconds > 0 else None,
        loss=float(totals["loss"][-1]),
        spread=float(np.ptp(losses)) if len(losses) > 1 else None,
        step_s=float(np.median(totals["step_s"])),
        by_rank=by_rank,
        timing=parts,
        lossless=silent,
        lost=lost,
    )


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(np.divide(a, b, out=np.full(len(a), np.nan), where=b > 0))


def epoch(spec: RunSpec, step: int) -> tuple[int, int]:
    """(which epoch the run stands in, how many it makes), both counted from 1."""
    each = max(1, spec.steps_per_epoch)
    return max(1, math.ceil(step / each)), max(1, math.ceil(spec.steps / each))


@dataclasses.dataclass(frozen=True)
class Tile:
    """One of the large figures: what it is, its value, and a line under it, which may be an alert."""

    label: str
    value: str
    note: str
    alert: bool = False


def tiles(source: Source, now: Glance) -> Iterator[Tile]:
    """The figures at the top of a view, ready to be read."""
    yield Tile("throughput", formatting.rate(now.throughput), "samples/s, all nodes")
    yield Tile("mean loss", formatting.loss(now.loss), _loss_note(source, now))
    slow = now.timing.straggler
    yield Tile("step time", formatting.duration(now.step_s), f"▲ slowest: {named(slow.ranks)}" if slow else "median")
    yield Tile("waiting", formatting.share(now.timing.waiting if now.timing.measured else None), "of all nodes' time")
    yield _nodes(source, now)


def _nodes(source: Source, now: Glance) -> Tile:
    """How many of the world are alive, and the worst that is to be said of them."""
    # While a repair is under way the world may be the new one already, and the lost are still counted in the old one.
    world = len(now.by_rank) if now.lost else source.spec.world_size
    alive = f"{world - len(now.lost):,} / {world:,}"
    stuck, first = halted(source), begun(source)
    if now.lost:
        return Tile("nodes", alive, f"✕ {named(sorted(now.lost))} lost", alert=True)
    if stuck is not None:
        return Tile("nodes", alive, short(stuck), alert=True)
    if first > world:
        return Tile("nodes", alive, f"was {first:,}: {first - world:,} left out")
    hosts = len({node.host for node in source.nodes})
    return Tile("nodes", alive, f"on {formatting.plural(hosts, 'host')}" if hosts else "")


def _loss_note(source: Source, now: Glance) -> str:
    evaluations = source.history.evaluations
    if evaluations:
        name, value = next(iter(evaluations[-1].values.items()), ("", None))
        return f"validation {name} {formatting.loss(value)}".replace("validation loss", "validation")
    return "" if now.spread is None else f"spread {formatting.loss(now.spread)}"

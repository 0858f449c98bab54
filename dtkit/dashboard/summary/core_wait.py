"""Nodes without a core: the share of their time that the kernel measured, and what the run would take otherwise.

Texts don't call this waiting: in all views, nodes wait for each other.

If a run's own engines have more threads than their host has cores, they take the cores from each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.summary.printed_times import PrintedTimes, describe_difference
from dtkit.dashboard.summary.timing import MIN_SLOWDOWN, count_steps_since_repair, format_nodes
from dtkit.history.core_use import describe_cores, name_largest, read_core_use
from dtkit.history.scalars import CORE_WAIT_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit.dashboard.summary.measurements import Measurements
    from dtkit.history.history import History
    from dtkit.types import NodeInfo

_SOURCE = (
    "the kernel measures when the training thread is ready, but has no core (/proc/thread-self/schedstat); "
    "sleeping adds nothing"
)
_ESTIMATE = (
    "an estimate: the kernel doesn't tell in which part of a step a thread had no core; computing is data, forward, "
    "backward, update and other"
)
_MAX_COMPUTE_SHARE = 0.5  # of the computing time, that waits of the whole step may take from it
_MAX_EVEN_SHARE = 0.9  # a thread that took steps had a core at times; the rest is more than rounding hides
_MIN_EXPLAINED = 0.3  # of the cores that nodes waited for, which other processes must have used to be named
_ROUNDING = 1e-9
_ms = formatting.format_duration


class CoreShortage(NamedTuple):
    """What waiting for a core costs a run."""

    text: str
    share: float
    """Share of the time of a step that is spent waiting; with enough engines on a host, of the nodes' time."""
    gain: float
    """Share of the time of a step that the remedy saves."""
    arithmetic: tuple[str, ...]
    explains_slow_nodes: bool
    """Whether the nodes that keep the others waiting would not be slow with cores of their own."""


def find_core_shortage(
    facts: Measurements, history: History, nodes: Sequence[NodeInfo], min_share: float
) -> CoreShortage | None:
    """Return what waiting for a core costs, if some node waits for `min_share` of its time; None otherwise."""
    shares = _read_shares(facts, history)
    starved = np.flatnonzero(shares >= min_share)
    if not len(starved):
        return None
    names, mean = format_nodes([int(rank) for rank in facts.ranks[starved]]), float(shares[starved].mean())
    finding = f"{names} had no core for {formatting.format_percent(mean)} of {_their(starved)} time"
    shortage = _find_own_shortage(facts, shares, nodes, starved, finding)
    if shortage is not None:
        return shortage
    hosts = {node.host for node in nodes if node.rank in facts.ranks[starved]}
    cores = read_core_use(history, facts.timing.first_step, hosts)
    return _find_other_processes(facts, shares, starved, finding, cores)


def _their(starved: np.ndarray) -> str:
    return "its" if len(starved) == 1 else "their"


def _read_shares(facts: Measurements, history: History) -> np.ndarray:
    """Return the share of its time that each rank waited for a core in the measured steps; 0 if unknown."""
    if CORE_WAIT_NAME not in history.system_names:
        return np.zeros(len(facts.ranks))
    return np.array([_read_share(history, int(rank), facts.timing.first_step) for rank in facts.ranks])


def _read_share(history: History, rank: int, first_step: int) -> float:
    _, percent = history.scalar(CORE_WAIT_NAME, rank, since=first_step)
    if not len(percent) and count_steps_since_repair(history) is None:  # many short steps share one number
        percent = history.scalar(CORE_WAIT_NAME, rank)[1][-1:]
    return float(np.clip(percent.mean() / 100, 0, 1)) if len(percent) else 0.0


def _compute_waits(facts: Measurements, shares: np.ndarray) -> np.ndarray:
    """Return the seconds of a step that each rank waits for a core while it computes.

    A rank waits for a core mostly while it computes. Waits that are longer than half of that were partly in other
    phases. Then half of the computing counts, or its even share of the waits, so that some computing always remains.
    """
    waits_s, compute_s = shares * facts.phases.sum(axis=1), facts.compute_s
    even_s = np.minimum(shares, _MAX_EVEN_SHARE) * compute_s
    return np.asarray(np.maximum(np.minimum(waits_s, _MAX_COMPUTE_SHARE * compute_s), even_s))


def _find_other_processes(
    facts: Measurements, shares: np.ndarray, starved: np.ndarray, finding: str, cores: Mapping[str, float]
) -> CoreShortage | None:
    """Return the gain if no other process had the cores: the slowest rank would compute without waiting.

    `cores` are those that other processes used meanwhile, as far as they were counted.
    """
    waits_s, compute_s = _compute_waits(facts, shares), facts.compute_s
    alone_s = compute_s - waits_s
    saved_s = float(compute_s.max() - alone_s.max())
    remaining_s = facts.step_s - saved_s
    if saved_s <= 0 or remaining_s <= 0:
        return None
    ratio, gain = facts.step_s / remaining_s, saved_s / facts.step_s
    difference, printed_ratio = describe_difference(facts.step_s, saved_s)
    lines = (
        *(_describe_node(facts, k, float(shares[k]), float(waits_s[k])) for k in starved[:4]),
        f"on an idle machine: {difference} a step, {printed_ratio}",
        _SOURCE,
        _ESTIMATE,
    )
    named = name_largest(cores, needed=_MIN_EXPLAINED * float(shares[starved].sum()))
    if named is not None:
        lines = (*lines[:-2], f"cores that other processes used meanwhile: {describe_cores(cores)}", *lines[-2:])
    others = named or "other processes"
    text = f"{finding}: {others} used it; about {ratio:.1f} times as fast on an idle machine"
    return CoreShortage(text, gain, gain, lines, _is_slow_by_waits(facts, alone_s))


def _describe_node(facts: Measurements, k: int, share: float, waits_s: float) -> str:
    """Return how long a node had no core, which part of its computing counts as that, and what is left of it."""
    step_s, compute_s = float(facts.phases[k].sum()), float(facts.compute_s[k])
    had_none = f"node {facts.ranks[k]} had no core for {formatting.format_percent(share)} of a step of {_ms(step_s)}"
    if waits_s >= (1 - _ROUNDING) * share * step_s:
        taken = "which is taken off its computing"
    elif share < _MAX_COMPUTE_SHARE:
        taken = "longer than half of its computing, so half of its computing is taken off"
    else:
        taken = f"so {formatting.format_percent(waits_s / compute_s)} of its computing is taken off"
    return f"{had_none}, {taken}: {describe_difference(compute_s, waits_s)[0]}"


def _find_own_shortage(
    facts: Measurements, shares: np.ndarray, nodes: Sequence[NodeInfo], starved: np.ndarray, finding: str
) -> CoreShortage | None:
    """Return the shortage on the first starved node's host whose engines have more threads than it has cores."""
    by_rank = {node.rank: node for node in nodes if node.device == "cpu" and node.cores}
    for rank in facts.ranks[starved]:
        node = by_rank.get(int(rank))
        group = [] if node is None else [other for other in by_rank.values() if other.host == node.host]
        if node is not None and sum(other.threads for other in group) > node.cores:
            return _describe_own_shortage(facts, shares, group, node.cores, finding)
    return None


def _describe_own_shortage(
    facts: Measurements, shares: np.ndarray, group: Sequence[NodeInfo], cores: int, finding: str
) -> CoreShortage:
    alone_s = facts.compute_s - _compute_waits(facts, shares)
    threads, has = sum(node.threads for node in group), formatting.format_count(cores, "core")
    engines = formatting.format_count(len(group), "engine")
    fewer = len(group) > cores
    fitting = min(len(group), cores)
    here = np.isin(facts.ranks, [node.rank for node in group])
    communication_s = float(facts.get("communication").min())
    needed_s = float(alone_s[here].sum()) / cores + communication_s
    gain = max(0.0, 1 - needed_s / facts.step_s) if fewer else 0.0
    remedy = f"Cluster({fitting})" if fewer else f"Cluster({fitting}, threads={max(1, cores // fitting)})"
    own = f"{engines} share {has}" if fewer else f"{engines} with {threads} threads share {has}"
    show = PrintedTimes(float(alone_s[here].sum()) / cores, communication_s)
    together_s, share_s = show.round(float(alone_s[here].sum())), show.round(float(alone_s[here].sum()) / cores)
    without = (
        f"with a core each they compute {show(together_s)} together in a step: {cores} engines take {show(share_s)}, "
        f"and {show(share_s)} + {show(communication_s)} = {show(share_s + show.round(communication_s))} with "
        f"communication, instead of {show(facts.step_s)}"
    )
    counted = f"host {group[0].host}: {engines} with {threads} threads in all, {has}"
    lines = (counted, without, _SOURCE) if fewer else (counted, _SOURCE)
    share = float(shares[here].mean())
    return CoreShortage(f"{finding}, since {own}: use {remedy}", share, gain, lines, _is_slow_by_waits(facts, alone_s))


def _is_slow_by_waits(facts: Measurements, alone_s: np.ndarray) -> bool:
    """Return whether the stragglers, if there are any, would compute about as long as others without waiting."""
    if facts.timing.straggler is None:
        return True
    slow = np.isin(facts.ranks, facts.timing.straggler.ranks)
    return bool(slow.all() or alone_s[slow].max() < MIN_SLOWDOWN * alone_s[~slow].max())

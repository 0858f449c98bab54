"""Time of a step in one process, next to that of several nodes: measured by ``run.verify()``, or else estimated.

A measurement of the same rows in both is better than any estimate, and views show it as a number of its own.

The estimate: one process computes all rows, and so at most as often the time of one node's rows as there are nodes.
It takes less where a part of the time doesn't grow with the rows. Shorter steps show that part, such as the last one of
each epoch.

There is no estimate where nodes hold parts of a model: their phases that compute have hooks, gathered layers and
micro-batches in them (docs/decisions/step-cost.md).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.summary.causes import MIN_GAIN
from dtkit.dashboard.summary.printed_times import PrintedTimes
from dtkit.history.speed import compute_median_step_s

if TYPE_CHECKING:
    from dtkit.dashboard.summary.causes import Cause
    from dtkit.history.history import History
    from dtkit.rpc.reference import StepTimes
    from dtkit.rpc.verification import Verification
    from dtkit.types import RunSpec

REPLICATED = ("DataParallel(", "NaiveDataParallel(", "ParameterAveraging(")
"""Beginnings of the strategies under which each node computes its rows as one process would."""
_MAX_ROWS = 4000
"""Latest rows of the history that are read: a view asks again and again."""
_MIN_SHORT_ROWS = 4
_SHORT_COMPUTING = 0.003
"""Seconds of computing in a step that may mostly be calls of operators, which take the same time for more rows."""


class VerifiedRun(Protocol):
    """What is read of a run that may have been verified."""

    @property
    def spec(self) -> RunSpec:
        """What the user asked for."""
        ...

    @property
    def history(self) -> History:
        """Records of every rank and step."""
        ...

    @property
    def verification(self) -> Verification | None:
        """The result of the last ``run.verify()``."""
        ...


@dataclasses.dataclass(frozen=True)
class OneProcess:
    """Seconds of a step in one process and on all nodes, and where they come from."""

    one_process_s: float
    all_nodes_s: float
    comparison: str
    """Both times as words after "one process is faster, with"."""
    arithmetic: str
    is_measured: bool
    least_s: float | None = None
    """Least time that one process may take, where `one_process_s` is the most and may be far too much; else None."""

    @property
    def gain(self) -> float:
        """Share of the time that one process saves; negative if it is slower."""
        return 1 - self.one_process_s / self.all_nodes_s


def read_step_times(run: VerifiedRun) -> StepTimes | None:
    """Return the times that ``run.verify()`` measured, with that of the run's own steps; None before."""
    times = None if run.verification is None else run.verification.step_times
    if times is None:
        return None
    own_s = compute_median_step_s(run.history, run.spec.world_size)
    return times if own_s is None else dataclasses.replace(times, run_step_s=own_s)


def read_verification(run: VerifiedRun) -> OneProcess | None:
    """Return the times that ``run.verify()`` measured; None before, or if other programs disturbed them."""
    times, num_nodes = read_step_times(run), run.spec.world_size
    if times is None or not times.are_comparable(num_nodes):
        return None
    source = f"run.verify(), medians of {formatting.format_count(times.num_steps, 'step')}"
    return describe_measured(times.single_process_s, times.all_ranks_s, num_nodes, "medians of run.verify()", source)


def describe_measured(
    one_process_s: float, all_nodes_s: float, num_nodes: int, short_source: str, source: str
) -> OneProcess:
    """Return measured times. `short_source` names their source in the verdict's line, `source` in its arithmetic."""
    one, many = formatting.format_duration(one_process_s), formatting.format_duration(all_nodes_s)
    nodes = formatting.format_count(num_nodes, "node")
    show = PrintedTimes(one_process_s, all_nodes_s)
    line = (
        f"measured by {source}: {show(all_nodes_s)} a step on {nodes}, {show(one_process_s)} in one process, so the "
        f"nodes are {show.round(one_process_s) / show.round(all_nodes_s):.2f} times as fast"
    )
    return OneProcess(one_process_s, all_nodes_s, f"{one} a step instead of {many} ({short_source})", line, True)


def estimate_one_process(history: History, rows_s: np.ndarray, fixed_s: np.ndarray, step_s: float) -> OneProcess:
    """Return the estimate from each node's seconds that grow with the rows, and those that don't."""
    fastest, (growth, is_shown) = int(np.argmin(rows_s)), estimate_growth(history, len(rows_s))
    one_process_s = growth * float(rows_s[fastest]) + float(fixed_s[fastest])
    one, step = map(formatting.format_duration, (one_process_s, step_s))
    show = PrintedTimes(float(rows_s[fastest]), float(fixed_s[fastest]))
    rows, fixed = show.round(float(rows_s[fastest])), show.round(float(fixed_s[fastest]))
    amount = f"about {one} a step" if is_shown else f"{one} a step at most"
    source = (
        "shorter steps show how computing grows with the rows" if is_shown else "computing grows at most as the rows"
    ) + ". Nodes that share cores compute more slowly than it would; run.verify() measures it"
    line = (
        f"one process computes the rows of {len(rows_s)} nodes: {growth:.2f} * {show(rows)} + {show(fixed)} "
        f"(update, other) = {show(round(growth, 2) * rows + fixed)}; {source}"
    )
    is_open = not is_shown and float(rows_s[fastest]) < _SHORT_COMPUTING
    least_s = float(rows_s[fastest] + fixed_s[fastest]) if is_open else None
    return OneProcess(one_process_s, step_s, f"{amount} instead of {step} (means)", line, False, least_s)


def explain_missing_estimate(spec: RunSpec) -> tuple[str, ...]:
    """Return a line of a verdict's arithmetic where one process is measured only; nothing where it is estimated."""
    if spec.world_size == 1 or spec.strategy.startswith(REPLICATED):
        return ()
    name = spec.strategy.partition("(")[0]
    return (f"one process isn't estimated for {name}, whose own work counts as computing; run.verify() measures it",)


def add_comparison(cause: Cause, compared: OneProcess | None, spec: RunSpec) -> Cause:
    """Return another cause with what is known of one process.

    Its remedy has the way to the times of one process where they would tell whether it is much faster.
    """
    if compared is None:
        lines = explain_missing_estimate(spec)
        is_open = bool(lines)
    else:
        lines = (compared.arithmetic,) if compared.is_measured else ()
        is_open = compared.least_s is not None and 1 - compared.least_s / compared.all_nodes_s >= MIN_GAIN
    is_remedied = bool(cause.larger_batch) or cause.is_split_in_vain
    hint = "; run.verify() compares with one process" if is_open and is_remedied else ""
    return dataclasses.replace(cause, remedy=cause.remedy + hint, arithmetic=(*cause.arithmetic, *lines))


def estimate_growth(history: History, num_nodes: int) -> tuple[float, bool]:
    """Return by how much computing grows from one node's rows to all rows, and whether shorter steps have shown it.

    Without shorter steps, that is the number of nodes, which is the most that it can be.
    """
    rows = history.rows(len(history) - _MAX_ROWS)
    samples, seconds = rows["samples"].astype(float), (rows["forward_s"] + rows["backward_s"]).astype(float)
    usual = float(np.median(samples)) if len(samples) else 0.0
    is_short, is_usual = (samples > 0) & (samples <= usual / 2), np.abs(samples - usual) <= 0.1 * usual
    if is_short.sum() < _MIN_SHORT_ROWS or not is_usual.any():
        return float(num_nodes), False
    short, short_s = float(np.median(samples[is_short])), float(np.median(seconds[is_short]))
    usual_s = float(np.median(seconds[is_usual]))
    if not 0 < short_s < usual_s:
        return 1.0, True
    slope = (usual_s - short_s) / (usual - short)
    return min(float(num_nodes), 1 + slope * usual * (num_nodes - 1) / usual_s), True

"""Tables of a run's report: model, nodes, and where a step's time goes."""

from __future__ import annotations

import dataclasses
import html
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit._util.table import Table
from dtkit.dashboard.report_bars import format_bars
from dtkit.dashboard.report_page import escape, fold_table, format_long_table
from dtkit.dashboard.summary.metrics import compute_run_metrics
from dtkit.dashboard.summary.one_process import read_step_times
from dtkit.dashboard.summary.timing import PHASES, compute_step_timing, select_bars

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dtkit.dashboard.run_view import RunView
    from dtkit.dashboard.summary.metrics import RunMetrics
    from dtkit.dashboard.summary.timing import PhaseBar

_NBSP = "\u00a0"
_MIN_SHARE = 0.0005  # of a step; a phase that is shorter everywhere has no column


def format_model(run: RunView) -> Iterator[str]:
    """List the layers, and count the parameters. A model that is one layer has no list."""
    model = run.spec.model
    if model is None:
        return
    rows = [(layer.name, layer.kind, f"{layer.parameters:,}") for layer in model.layers]
    frozen = "" if model.trainable == model.parameters else f", {model.trainable:,} of them trained"
    note = f"{model.parameters:,} parameters{frozen}."
    if not rows:
        yield f"<h2>Model</h2><p>{escape(run.spec.name)}: {escape(note)}</p>"
        return
    yield format_long_table("Model", Table(("layer", "class", "parameters"), rows, {"layer", "class"}), [note])


def format_nodes(run: RunView) -> Iterator[str]:
    """List the machines of the nodes, with the last numbers of each."""
    metrics = compute_run_metrics(run.history, run.spec.world_size)
    rows, numbers = [], [_read_numbers(metrics, node.rank) for node in run.nodes]
    losses = formatting.format_losses([loss for loss, _, _ in numbers])
    for node, (_, rate, memory), loss in zip(run.nodes, numbers, losses, strict=True):
        used_memory = f"{formatting.format_bytes(memory)} of {formatting.format_bytes(node.memory_total)}"
        rows.append(
            (
                f"{node.rank}", f"{node.engine_id}", node.host, f"{node.pid}", node.device, f"{node.threads}",
                used_memory.replace(" ", _NBSP), loss, formatting.format_rate(rate),
            )
        )  # fmt: skip
    header = ("node", "engine", "host", "pid", "device", "threads", "memory", "loss", "samples/s")
    table = Table(header, rows, {"host", "device", "memory"})
    yield format_long_table(
        "Nodes", table, ["Memory of the process; loss of the last step; samples/s without waiting."]
    )


def _read_numbers(metrics: RunMetrics, rank: int) -> tuple[float | None, float | None, float | None]:
    """Return loss, rate and memory of a node; None where it has none."""
    if rank >= len(metrics.by_rank):
        return None, None, None
    loss, rate, memory = metrics.by_rank[rank]
    return None if metrics.ranks_without_loss[rank] else loss, rate, memory


def format_step_time(run: RunView) -> Iterator[str]:
    """Draw the phases of a step on each node, or on the fastest, the median and the slowest of many, and list them."""
    timing = compute_step_timing(run.history, run.spec.world_size)
    bars = select_bars(timing) if timing.is_measured else []
    if not bars:
        return
    seconds = np.array([bar.seconds for bar in bars])
    shown = [k for k in range(len(PHASES)) if (seconds[:, k] >= _MIN_SHARE * seconds.sum(1)).any()]
    straggler = "" if timing.straggler is None else f" ▲ {escape(timing.straggler.text)}."
    yield "<h2>Where a step's time goes</h2>"
    yield format_bars(bars, shown)
    yield f"<p>Means of {'' if timing.is_whole else 'the '}{timing.steps_text}.{straggler}</p>"
    yield fold_table("the same in numbers", _tabulate_phases(bars, shown))


def _tabulate_phases(bars: Sequence[PhaseBar], shown: Sequence[int]) -> Table:
    """Return the time of each phase over its share of a step."""
    rows, shares = [], {}
    for row, bar in enumerate(bars):
        whole = float(bar.seconds.sum())
        times = [formatting.format_duration(float(bar.seconds[k])) for k in shown]
        rows.append([f"▲ {bar.label}" if bar.is_straggler else bar.label, *times, formatting.format_duration(whole)])
        texts = [formatting.format_percent(float(bar.seconds[k]) / whole) for k in shown]
        shares.update({(row, column): text for column, text in enumerate(texts, 1)})
    return Table(("node", *(PHASES[k] for k in shown), "step"), rows, {"node"}, small_texts=shares)


def format_verification(run: RunView) -> Iterator[str]:
    """Show the result of the last `run.verify()`, with the difference of each parameter, the largest first."""
    if run.verification is None:
        return
    verification = dataclasses.replace(run.verification, step_times=read_step_times(run))
    result, *lines = (escape(formatting.name_nodes(line.strip())) for line in verification.text().splitlines())
    yield f"<h2>Verification against one process</h2><p><b>{result}</b></p>"
    yield f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>" if lines else ""
    if verification.differences:
        table, num = verification.make_differences_table(), len(verification.differences)
        name, largest = table.rows[0]
        hidden = f"{num:,} parameters in all; the {len(table.rows)} largest differences are shown."
        summary = f"Differences of the parameters: at most {largest}, in {name}"
        yield fold_table(summary, table, [hidden] if num > len(table.rows) else [])


def format_sources(run: RunView) -> Iterator[str]:
    """Show the sources of the user's functions among the settings, folded."""
    typed = dict(run.spec.settings)
    for name, source in run.spec.sources:
        if source in typed.get(name, ""):  # a lambda
            continue
        lines = html.escape(source)
        yield f'<details><summary>source of {escape(name)}</summary><pre class="scroll">{lines}</pre></details>'

"""A run as one HTML file without network, scripts, or other files.

It has the settings, the figure, the nodes, the schedule, the events, the versions, and the speed-up over one process.
"""

from __future__ import annotations

import html
import importlib.metadata
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from dtkit._util import formatting
from dtkit._util.table import Table
from dtkit.dashboard.figures import render, run_figure
from dtkit.dashboard.summary.step_strip import make_step_strip
from dtkit.dashboard.text import run_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtkit.dashboard.run_view import RunView
    from dtkit.history.history import History

_PACKAGES = ("dtkit-jupyter", "torch", "ipyparallel", "numpy")
_MAX_EVENTS = 500  # a flood of prints would hide the other events
_MAX_LEARNING_RATES = 40
_Item = TypeVar("_Item")

_PAGE_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 1080px; margin: 24px auto;
  padding: 0 16px; }}
h1 {{ font-size: 24px; }} h2 {{ font-size: 18px; margin-top: 28px; }} img {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; }}
th, td {{ padding: 3px 14px 3px 0; border-bottom: 1px solid #e4e4e4; vertical-align: baseline; }}
div {{ overflow-x: auto; }} p {{ max-width: 75ch; }}
</style></head><body>
{body}
</body></html>
"""


def write_report(run: RunView, path: str | Path, *, single_process: History | None = None) -> None:
    """Write the report of a run to `path`, with its speed-up over `single_process`, a history of one process.

    Raises ValueError if `single_process` has no steps, or more ranks than one.
    """
    scaling = _format_scaling_if_given(run, single_process)
    parts = [
        *_format_head(run),
        *scaling,
        *_format_nodes(run),
        *_format_schedule(run),
        *_format_events(run),
        *_format_versions(),
    ]
    page = _PAGE_TEMPLATE.format(title=_escape(run.spec.name), body="\n".join(parts))
    Path(path).write_text(page, encoding="utf-8")


def _format_head(run: RunView) -> Iterator[str]:
    spec, figure = run.spec, run_figure.draw_run(run)
    yield f"<h1>{_escape(spec.name)}</h1>"
    position = run_text.format_run(run).splitlines()[1]
    yield f"<p>{_escape(position)}. Written {time.strftime('%Y-%m-%d %H:%M')}.</p>"
    facts = [
        ("strategy", spec.strategy),
        ("nodes", f"{spec.world_size:,}"),
        ("batch, over all nodes", f"{spec.batch_size:,}"),
        ("samples in an epoch", f"{spec.samples:,}"),
        ("steps", f"{run.status.step:,} of {spec.steps:,}"),
        ("loss", spec.loss),
        ("optimizer", spec.optimizer),
        ("order of rows", f"{spec.shuffle}, seed {spec.seed}"),
        ("state", run.status.state.value),
        *([("tags", ", ".join(spec.tags))] if spec.tags else []),
    ]
    yield _format_table(Table((), facts))
    if run.exception is not None:
        yield f"<p><strong>{_escape(f'{type(run.exception).__name__}: {run.exception}')}</strong></p>"
    yield "<h2>Figures</h2>"
    yield render.format_img_tag(figure, " ".join(run_text.format_run(run).split()))


def _format_scaling_if_given(run: RunView, single_process: History | None) -> Iterator[str]:
    if single_process is None:
        return iter(())
    if len(single_process.ranks) != 1:
        raise ValueError(
            f"single_process={single_process!r}: the speed-up needs the history of one process that took steps; train "
            "the same on dtkit.Cluster(1)"
        )
    return _format_scaling(run, single_process)


def _format_scaling(run: RunView, single_process: History) -> Iterator[str]:
    """Compare the throughput with that of one process."""
    num_ranks = run.spec.world_size
    throughput, single_throughput = _compute_median_throughput(run.history), _compute_median_throughput(single_process)
    speed_up = throughput / single_throughput
    nodes = formatting.format_count(num_ranks, "node")
    rows = [
        ("one process", formatting.format_rate(single_throughput), "1", ""),
        (
            nodes,
            formatting.format_rate(throughput),
            f"{speed_up:.2f}",
            formatting.format_percent(speed_up / num_ranks),
        ),
    ]
    yield "<h2>Speed-up over one process</h2>"
    yield _format_table(Table(("", "samples/s", "speed-up", "of the ideal"), rows, {""}))
    yield "<p>Medians over the steps. The ideal is the speed of one process times the number of nodes.</p>"


def _compute_median_throughput(history: History) -> float:
    """Return samples per second of all ranks in the median step, because single steps may be disturbed."""
    totals = history.totals()
    timed = totals[totals["step_s"] > 0]
    return float(np.median(timed["samples"] / timed["step_s"])) if len(timed) else float("nan")


def _format_nodes(run: RunView) -> Iterator[str]:
    rows = [
        (
            f"{node.rank}",
            f"{node.engine_id}",
            node.host,
            f"{node.pid}",
            node.device,
            formatting.format_bytes(node.memory_total),
            f"{node.threads}",
        )
        for node in run.nodes
    ]
    header = ("node", "engine", "host", "pid", "device", "memory", "threads")
    yield "<h2>Nodes</h2>"
    yield _format_table(Table(header, rows, {"host", "device"}))


def _format_schedule(run: RunView) -> Iterator[str]:
    """List the bubble of a pipeline, and the learning rates."""
    yield "<h2>Schedule</h2>"
    step_strip = make_step_strip(run.timeline)
    if step_strip is not None:
        yield f"<p>Timeline of the last step (in the figure above): {_escape(step_strip.note)}.</p>"
    rows = run.history.rows()
    rows = rows[rows["rank"] == rows["rank"].min(initial=0)]
    changes = np.flatnonzero(np.diff(rows["lr"], prepend=np.nan) != 0)
    shown = _keep_ends(list(changes), _MAX_LEARNING_RATES)
    rates = [(f"{rows['step'][k]:,}", f"{rows['lr'][k]:.6g}") for k in shown]
    yield _format_table(Table(("from step", "learning rate"), rates))
    if len(changes) > len(shown):
        yield f"<p>{len(changes):,} learning rates in all; the first and the last are shown.</p>"


def _format_events(run: RunView) -> Iterator[str]:
    yield "<h2>Events</h2>"
    events = run.history.events
    shown = _keep_ends(events, _MAX_EVENTS)
    rows = [
        (
            time.strftime("%H:%M:%S", time.localtime(event.time)),
            f"{event.step:,}",
            event.kind,
            "" if event.rank is None else f"{event.rank}",
            formatting.sanitize_text(event.text),
        )
        for event in shown
    ]
    yield _format_table(Table(("time", "step", "kind", "node", "text"), rows, {"time", "kind", "text"}))
    if len(shown) < len(events):
        yield f"<p>{len(events):,} events in all; the first and the last {_MAX_EVENTS // 2} are shown.</p>"


def _keep_ends(items: list[_Item], max_items: int) -> list[_Item]:
    """Return the items, or the first and the last ones of many."""
    half = max_items // 2
    return items if len(items) <= max_items else [*items[:half], *items[-half:]]


def _format_versions() -> Iterator[str]:
    versions = [("Python", platform.python_version()), ("system", platform.platform())]
    for name in _PACKAGES:
        try:
            versions.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            versions.append((name, "not installed"))
    yield "<h2>Versions</h2>"
    yield _format_table(Table((), versions))


def _format_table(table: Table) -> str:
    return f"<div>{table.to_html()}</div>"


def _escape(text: str) -> str:
    return html.escape(formatting.sanitize_text(text, 1000))

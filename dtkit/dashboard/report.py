"""A run as one HTML file that needs nothing else: no network, no script, pictures inside.

What stands in it: what was trained and how, the kept picture, the nodes, the schedule as planned and as measured, what
happened, the versions, and, next to the same training in one process, how it scales.
"""

from __future__ import annotations

import html
import importlib.metadata
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dtkit._util import formatting
from dtkit.dashboard.figures import run_figure
from dtkit.dashboard.summary.step_strip import make_step_strip
from dtkit.dashboard.text import run_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dtkit.dashboard.run_view import RunView
    from dtkit.history.history import History

_PACKAGES = ("dtkit-jupyter", "torch", "ipyparallel", "numpy")
_MAX_EVENTS = 500  # of events: the first and the last; a flood of prints would hide the rest

_PAGE_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 1080px; margin: 24px auto;
  padding: 0 16px; }}
h1 {{ font-size: 24px; }} h2 {{ font-size: 18px; margin-top: 28px; }} img {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; }}
th, td {{ text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid #e4e4e4; vertical-align: baseline; }}
div {{ overflow-x: auto; }} p {{ max-width: 75ch; }}
</style></head><body>
{body}
</body></html>
"""


def write_report(run: RunView, path: str | Path, *, single_process: History | None = None) -> None:
    """Write the report of `source` to `path`; `alone` is the history of the same training in one process.

    Raises ValueError where `alone` has no steps, or is of more ranks than one.
    """
    scaling = _format_scaling_if_given(run, single_process)
    body = "\n".join(
        [
            *_format_head(run),
            *scaling,
            *_format_nodes(run),
            *_format_schedule(run),
            *_format_events(run),
            *_format_versions(),
        ]
    )
    page = _PAGE_TEMPLATE.format(title=html.escape(formatting.sanitize_text(run.spec.name, 80)), body=body)
    Path(path).write_text(page, encoding="utf-8")


def _format_head(run: RunView) -> Iterator[str]:
    spec, figure = run.spec, run_figure.draw_run(run)
    yield f"<h1>{_escape(spec.name)}</h1>"
    yield f"<p>{_escape(run_text.format_run(run).splitlines()[1])}. Written {time.strftime('%Y-%m-%d %H:%M')}.</p>"
    asked = [
        ("strategy", spec.strategy),
        ("nodes", f"{spec.world_size:,}"),
        ("batch, over all nodes", f"{spec.batch_size:,}"),
        ("samples in an epoch", f"{spec.samples:,}"),
        ("steps", f"{run.status.step:,} of {spec.steps:,}"),
        ("loss", spec.loss),
        ("optimiser", spec.optimizer),
        ("order of rows", f"{spec.shuffle}, seed {spec.seed}"),
        ("state", run.status.state.value),
    ]
    yield _format_table((), asked)
    if run.exception is not None:
        yield f"<p><strong>{_escape(f'{type(run.exception).__name__}: {run.exception}')}</strong></p>"
    yield "<h2>What was seen</h2>"
    yield run_figure.format_img_tag(figure, " ".join(run_text.format_run(run).split()))


def _format_scaling_if_given(run: RunView, single_process: History | None) -> Iterator[str]:
    """Throughput next to one process, and what is left of the ideal."""
    if single_process is None:
        return iter(())
    if len(single_process.ranks) != 1:
        raise ValueError(
            f"alone={single_process!r}: to say how a run scales it takes the history of one process that took steps; train the "
            "same on dtkit.Cluster(1)"
        )
    return _format_scaling(run, single_process)


def _format_scaling(run: RunView, single_process: History) -> Iterator[str]:
    one, all_of_them, ranks = (
        _compute_median_throughput(single_process),
        _compute_median_throughput(run.history),
        run.spec.world_size,
    )
    yield "<h2>Next to one process</h2>"
    yield _format_table(
        ("", "samples/s", "speed-up", "of the ideal"),
        [
            ("one process", formatting.format_rate(one), "1", ""),
            (
                formatting.format_count(ranks, "node"),
                formatting.format_rate(all_of_them),
                f"{all_of_them / one:.2f}",
                formatting.format_percent(all_of_them / one / ranks),
            ),
        ],
    )
    yield "<p>Medians over the steps; the ideal is as many times the speed of one process as there are nodes.</p>"


def _compute_median_throughput(history: History) -> float:
    """Samples per second of all ranks together: the median step's, as a first or a disturbed one says little."""
    totals = history.totals()
    known = totals[totals["step_s"] > 0]
    return float(np.median(known["samples"] / known["step_s"])) if len(known) else float("nan")


def _format_nodes(run: RunView) -> Iterator[str]:
    yield "<h2>Nodes</h2>"
    rows = [
        (n.rank, n.engine_id, n.host, n.pid, n.device, formatting.format_bytes(n.memory_total), n.threads)
        for n in run.nodes
    ]
    yield _format_table(("node", "engine", "host", "pid", "device", "memory", "threads"), rows)


def _format_schedule(run: RunView) -> Iterator[str]:
    """Of a pipeline the bubble; for all, how the learning rate went."""
    yield "<h2>Schedule</h2>"
    found = make_step_strip(getattr(run, "timeline", None))
    if found is not None:
        yield f"<p>Timeline of the last step (in the picture above): {_escape(found.note)}.</p>"
    rows = run.history.rows()
    rows = rows[rows["rank"] == rows["rank"].min(initial=0)]
    changed = np.flatnonzero(np.diff(rows["lr"], prepend=np.nan) != 0)
    shown = [*changed[:20], *changed[20:][-20:]]
    yield _format_table(
        ("from step", "learning rate"), [(f"{rows['step'][k]:,}", f"{rows['lr'][k]:.6g}") for k in shown]
    )
    if len(changed) > len(shown):
        yield f"<p>{len(changed):,} learning rates in all; the first and the last are shown.</p>"


def _format_events(run: RunView) -> Iterator[str]:
    yield "<h2>What happened</h2>"
    events = run.history.events
    shown = events if len(events) <= _MAX_EVENTS else [*events[: _MAX_EVENTS // 2], *events[-_MAX_EVENTS // 2 :]]
    rows = [
        (
            time.strftime("%H:%M:%S", time.localtime(event.time)),
            f"{event.step:,}",
            event.kind,
            "" if event.rank is None else event.rank,
            formatting.sanitize_text(event.text),
        )
        for event in shown
    ]
    yield _format_table(("time", "step", "kind", "node", ""), rows)
    if len(shown) < len(events):
        yield f"<p>{len(events):,} events in all; the first and the last {_MAX_EVENTS // 2} are shown.</p>"


def _format_versions() -> Iterator[str]:
    yield "<h2>Versions</h2>"
    found = [("Python", platform.python_version()), ("system", platform.platform())]
    for name in _PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append((name, "not installed"))
    yield _format_table((), found)


def _format_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = f"<tr>{''.join(f'<th>{_escape(name)}</th>' for name in header)}</tr>" if header else ""
    body = "".join(f"<tr>{''.join(f'<td>{_escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div><table>{head}{body}</table></div>"


def _escape(value: object) -> str:
    return html.escape(formatting.sanitize_text(str(value), 1000))

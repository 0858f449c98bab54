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
from dtkit.dashboard import figures, text
from dtkit.dashboard.strip import strip

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dtkit.dashboard.source import Source
    from dtkit.history.history import History

_PACKAGES = ("dtkit-jupyter", "torch", "ipyparallel", "numpy")
_LINES = 500  # of events: the first and the last; a flood of prints would hide the rest

_PAGE = """<!doctype html>
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


def write(source: Source, path: str | Path, *, alone: History | None = None) -> None:
    """Write the report of `source` to `path`; `alone` is the history of the same training in one process.

    Raises ValueError where `alone` has no steps, or is of more ranks than one.
    """
    scaling = _scaling(source, alone)
    body = "\n".join([*_head(source), *scaling, *_nodes(source), *_schedule(source), *_events(source), *_versions()])
    page = _PAGE.format(title=html.escape(formatting.plain(source.spec.name, 80)), body=body)
    Path(path).write_text(page, encoding="utf-8")


def _head(source: Source) -> Iterator[str]:
    spec, figure = source.spec, figures.run_figure(source)
    yield f"<h1>{_escaped(spec.name)}</h1>"
    yield f"<p>{_escaped(text.summary(source).splitlines()[1])}. Written {time.strftime('%Y-%m-%d %H:%M')}.</p>"
    asked = [
        ("strategy", spec.strategy),
        ("nodes", f"{spec.world_size:,}"),
        ("batch, over all nodes", f"{spec.batch_size:,}"),
        ("samples in an epoch", f"{spec.samples:,}"),
        ("steps", f"{source.status.step:,} of {spec.steps:,}"),
        ("loss", spec.loss),
        ("optimiser", spec.optimizer),
        ("order of rows", f"{spec.shuffle}, seed {spec.seed}"),
        ("state", source.status.state.value),
    ]
    yield _table((), asked)
    if source.exception is not None:
        yield f"<p><strong>{_escaped(f'{type(source.exception).__name__}: {source.exception}')}</strong></p>"
    yield "<h2>What was seen</h2>"
    yield figures.image(figure, " ".join(text.summary(source).split()))


def _scaling(source: Source, alone: History | None) -> Iterator[str]:
    """Throughput next to one process, and what is left of the ideal."""
    if alone is None:
        return iter(())
    if len(alone.ranks) != 1:
        raise ValueError(
            f"alone={alone!r}: to say how a run scales it takes the history of one process that took steps; train the "
            "same on dtkit.Cluster(1)"
        )
    return _scaled(source, alone)


def _scaled(source: Source, alone: History) -> Iterator[str]:
    one, all_of_them, ranks = _rate(alone), _rate(source.history), source.spec.world_size
    yield "<h2>Next to one process</h2>"
    yield _table(
        ("", "samples/s", "speed-up", "of the ideal"),
        [
            ("one process", formatting.rate(one), "1", ""),
            (
                formatting.plural(ranks, "node"),
                formatting.rate(all_of_them),
                f"{all_of_them / one:.2f}",
                formatting.share(all_of_them / one / ranks),
            ),
        ],
    )
    yield "<p>Medians over the steps; the ideal is as many times the speed of one process as there are nodes.</p>"


def _rate(history: History) -> float:
    """Samples per second of all ranks together: the median step's, as a first or a disturbed one says little."""
    totals = history.totals()
    known = totals[totals["step_s"] > 0]
    return float(np.median(known["samples"] / known["step_s"])) if len(known) else float("nan")


def _nodes(source: Source) -> Iterator[str]:
    yield "<h2>Nodes</h2>"
    rows = [
        (n.rank, n.engine_id, n.host, n.pid, n.device, formatting.size(n.memory_total), n.threads) for n in source.nodes
    ]
    yield _table(("node", "engine", "host", "pid", "device", "memory", "threads"), rows)


def _schedule(source: Source) -> Iterator[str]:
    """Of a pipeline the bubble; for all, how the learning rate went."""
    yield "<h2>Schedule</h2>"
    found = strip(getattr(source, "timeline", None))
    if found is not None:
        yield f"<p>Timeline of the last step (in the picture above): {_escaped(found.note)}.</p>"
    rows = source.history.rows()
    rows = rows[rows["rank"] == rows["rank"].min(initial=0)]
    changed = np.flatnonzero(np.diff(rows["lr"], prepend=np.nan) != 0)
    shown = [*changed[:20], *changed[20:][-20:]]
    yield _table(("from step", "learning rate"), [(f"{rows['step'][k]:,}", f"{rows['lr'][k]:.6g}") for k in shown])
    if len(changed) > len(shown):
        yield f"<p>{len(changed):,} learning rates in all; the first and the last are shown.</p>"


def _events(source: Source) -> Iterator[str]:
    yield "<h2>What happened</h2>"
    events = source.history.events
    shown = events if len(events) <= _LINES else [*events[: _LINES // 2], *events[-_LINES // 2 :]]
    rows = [
        (
            time.strftime("%H:%M:%S", time.localtime(event.time)),
            f"{event.step:,}",
            event.kind,
            "" if event.rank is None else event.rank,
            formatting.plain(event.text),
        )
        for event in shown
    ]
    yield _table(("time", "step", "kind", "node", ""), rows)
    if len(shown) < len(events):
        yield f"<p>{len(events):,} events in all; the first and the last {_LINES // 2} are shown.</p>"


def _versions() -> Iterator[str]:
    yield "<h2>Versions</h2>"
    found = [("Python", platform.python_version()), ("system", platform.platform())]
    for name in _PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append((name, "not installed"))
    yield _table((), found)


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = f"<tr>{''.join(f'<th>{_escaped(name)}</th>' for name in header)}</tr>" if header else ""
    body = "".join(f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div><table>{head}{body}</table></div>"


def _escaped(value: object) -> str:
    return html.escape(formatting.plain(str(value), 1000))

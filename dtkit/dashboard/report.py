"""A run as one HTML file without network or other files.

It has headline numbers, the verdict, charts with tooltips, and the speed-up over one process. Tables list the settings
as typed, the model, nodes, learning rates, events and versions.
"""

from __future__ import annotations

import html
import importlib.metadata
import math
import platform
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from dtkit._util import formatting, resources, timeouts
from dtkit._util.table import Table
from dtkit.dashboard.report_cards import iterate_cards
from dtkit.dashboard.report_charts import draw_charts, find_only_rate, list_metric_names
from dtkit.dashboard.report_live import format_run_charts
from dtkit.dashboard.report_page import (
    MAX_OPEN_ROWS,
    escape,
    fold_table,
    format_cards,
    format_columns,
    format_description,
    format_facts,
    format_long_table,
    format_notice,
    format_page,
    format_table,
)
from dtkit.dashboard.report_panels import format_custom_panels
from dtkit.dashboard.report_tables import (
    format_model,
    format_nodes,
    format_sources,
    format_step_time,
    format_verification,
)
from dtkit.dashboard.summary.activity import name_state
from dtkit.dashboard.summary.event_marks import MARKED_EVENTS, describe_event_marks
from dtkit.dashboard.summary.notices import ALERT_KINDS, LEARNING_KINDS, collect_notices, list_error_lines
from dtkit.dashboard.summary.one_process import describe_measured
from dtkit.dashboard.summary.verdict import find_shown_verdict
from dtkit.dashboard.text import run_text
from dtkit.dashboard.written_report import WrittenReport, check_description, check_folder, make_file_name
from dtkit.errors import FULL_HINT, UserCodeError
from dtkit.history.speed import compute_speed
from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dtkit.dashboard.run_view import RunView
    from dtkit.dashboard.summary.one_process import OneProcess
    from dtkit.history.history import History
    from dtkit.types import Event, RunSpec

_PACKAGES = ("dtkit-jupyter", "torch", "ipyparallel", "numpy")
_MAX_EVENTS = 500  # many printed lines would hide the other events
_MAX_LEARNING_RATES = 40
_MAX_SPEED_RATIO = 100_000  # no cluster is so much faster, or slower, than one of its processes
_Item = TypeVar("_Item")


def write_report(
    run: RunView, path: str | Path | None = None, *, description: str = "", single_process: History | None = None
) -> WrittenReport:
    """Write the report of a run to `path`, with its speed-up over `single_process`, a history of one process.

    The user's `description` is below the title.
    Raises TypeError if it is not a text, ValueError if `single_process` has no steps, or more ranks than one, and
    FileNotFoundError if the folder of `path` does not exist.
    """
    if path is not None:
        check_folder(path)
    check_description(description)
    scaling = _format_scaling_if_given(run, single_process)
    cards = [*iterate_cards(run, single_process)]
    parts = [
        *_format_head(run, cards, description, single_process),
        *_format_charts(run),
        *format_step_time(run),
        *scaling,
        format_columns(section(run) for section in _SECTIONS),
        *_format_events(run),
        *format_verification(run),
        *_format_learning_rates(run),
    ]
    if path is None:
        path = make_file_name(run.spec.name, next((event.time for event in run.history.events), None))
    Path(path).write_text(format_page(run.spec.name, parts), encoding="utf-8")
    return WrittenReport(f"Report of {formatting.sanitize_text(run.spec.name, 60)}", path, cards)


def _format_head(
    run: RunView, cards: Sequence[tuple[str, str, str]], description: str, single_process: History | None
) -> Iterator[str]:
    spec = run.spec
    notices = collect_notices(run)
    is_bad = run.exception is not None or any(notice.kind in ALERT_KINDS for notice in notices)
    tone = "bad" if is_bad else "good" if name_state(run) == State.COMPLETED.value else ""
    yield f'<h1>{escape(spec.name)} <span class="state {tone}">{escape(name_state(run))}</span></h1>'
    tags = "".join(f" · {tag}" for tag in spec.tags)
    nodes = formatting.format_count(spec.world_size, "node")
    yield (
        f'<p class="lead">{escape(f"{spec.strategy} on {nodes}{tags}")}<br>'
        f"{escape(run_text.format_step(run))}. Written <time>{time.strftime('%Y-%m-%d %H:%M')}</time>.</p>"
    )
    yield format_description(description)
    if run.exception is not None:
        yield from _format_error(run.exception, has_ended=run.status.state.has_ended)
    for notice in notices:
        if notice.kind in (*ALERT_KINDS, *LEARNING_KINDS):
            yield format_notice(notice.text, is_alert=notice.kind in ALERT_KINDS)
    yield format_cards(cards)
    verdict = find_shown_verdict(run, _measure_one_process(run, single_process))
    if verdict is not None:
        lines = "".join(f"<div>{escape(line)}</div>" for line in verdict.arithmetic)
        yield (
            f'<div class="verdict"><b>{escape(verdict.text)}</b><details><summary>the arithmetic</summary>{lines}'
            "</details></div>"
        )


def _measure_one_process(run: RunView, single_process: History | None) -> OneProcess | None:
    """Return the times of the same samples on all nodes and in `single_process`, as the card compares them."""
    if single_process is None:
        return None
    all_nodes, one = compute_speed(run.history), compute_speed(single_process)
    one_process_s = all_nodes.step_s * all_nodes.samples_per_s / one.samples_per_s
    if not math.isfinite(one_process_s):
        return None
    source = "the two histories, over all steps"
    return describe_measured(one_process_s, all_nodes.step_s, run.spec.world_size, "means of the measured runs", source)


def _format_error(error: BaseException, *, has_ended: bool) -> Iterator[str]:
    """Show an error with the user's lines, and fold its whole traceback."""
    lines = "\n".join(html.escape(line) for line in list_error_lines(error, has_ended=has_ended) if line != FULL_HINT)
    yield f'<p class="error">{lines}</p>'
    if isinstance(error, UserCodeError):
        full = "\n".join(formatting.name_nodes_at_start(line) for line in error.full.splitlines() if line != FULL_HINT)
        yield f'<details><summary>the whole traceback</summary><pre class="scroll">{html.escape(full)}</pre></details>'


def _format_charts(run: RunView) -> Iterator[str]:
    yield "<h2>Charts</h2>"
    if legend := describe_event_marks(run.history.events):
        yield f'<p class="marks">marks: {escape(legend)}</p>'
    if (rate := find_only_rate(run.history)) is not None:
        yield f'<p class="marks">learning rate {formatting.format_learning_rate(rate)} throughout</p>'
    yield format_run_charts(run, draw_charts(run.history))
    yield from format_custom_panels(run.history)


def _format_settings(run: RunView) -> Iterator[str]:
    spec = run.spec
    rates = run.history.column("lr")
    lr = float(rates[-1]) if len(rates) else run.lr  # a schedule has set that of the next step already
    last_rate = formatting.UNKNOWN if lr is None else f"{formatting.format_learning_rate(lr)} in the last step"
    typed = [
        ("strategy", spec.strategy),
        ("optimizer", spec.optimizer),
        ("loss", spec.loss),
        *((name, text) for name, text in spec.settings if name not in ("optimizer", "loss")),
    ]
    facts = [
        *_list_model_and_data(spec),
        ("batch_size, over all nodes", f"{spec.batch_size:,}"),
        ("learning rate", last_rate),
        ("steps", f"{run.status.step:,} of {spec.steps:,}, {spec.steps_per_epoch:,} in an epoch"),
        ("samples in an epoch", f"{spec.samples:,}"),
        ("order of rows", f"{spec.shuffle}, seed {spec.seed}"),
        ("num_workers", f"{spec.num_workers}"),
    ]
    yield "<h2>Settings, as typed</h2>"
    yield format_facts(Table((), typed), is_code=True) + format_facts(Table((), facts))
    yield from format_sources(run)


def _list_model_and_data(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Return the model's class with its parameters, and the shapes of the data, as far as they are known."""
    if spec.model is not None:
        yield "model", ", ".join(filter(None, [spec.model.kind, spec.model.headline]))
    if spec.data:
        yield "data", spec.data


def _format_scaling_if_given(run: RunView, single_process: History | None) -> Iterator[str]:
    if single_process is None:
        return iter(())
    _check_single_process(run.history, single_process)
    return _format_scaling(run, single_process)


def _check_single_process(history: History, single_process: History) -> None:
    """Raise ValueError for a history without a speed that the run's could be compared with."""
    remedy = "train the same on dtkit.Cluster(1)"
    if len(single_process.ranks) != 1:
        raise ValueError(f"single_process={single_process!r}: the speed-up needs the steps of one process; {remedy}")
    rate, own_rate = compute_speed(single_process).samples_per_s, compute_speed(history).samples_per_s
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"single_process={single_process!r}: its steps took no time, so it has no speed; {remedy}")
    if math.isfinite(own_rate) and not 1 / _MAX_SPEED_RATIO < rate / own_rate < _MAX_SPEED_RATIO:
        raise ValueError(
            f"single_process={single_process!r}: its {formatting.format_rate(rate)} samples/s and the run's "
            f"{formatting.format_rate(own_rate)} differ by more than {_MAX_SPEED_RATIO:,} times, so they are not of "
            f"the same training, or the times of one are wrong; {remedy}"
        )


def _format_scaling(run: RunView, single_process: History) -> Iterator[str]:
    """Compare the throughput with that of one process."""
    num_ranks = run.spec.world_size
    throughput, single_throughput = (compute_speed(history).samples_per_s for history in (run.history, single_process))
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
    yield format_table(Table(("", "samples/s", "speed-up", "of the ideal"), rows, {""}))
    yield "<p>Means over all steps but the first. The ideal is the speed of one process times the number of nodes.</p>"


def _format_learning_rates(run: RunView) -> Iterator[str]:
    """List the learning rates of a schedule."""
    rows = run.history.read_valid_rows()
    rows = rows[rows["rank"] == rows["rank"].min(initial=0)]
    changes = np.flatnonzero(np.diff(rows["lr"], prepend=np.nan) != 0)
    if len(changes) < 2:  # the settings have it
        return
    shown = _keep_ends(list(changes), _MAX_LEARNING_RATES)
    rates = [(f"{rows['step'][k]:,}", formatting.format_learning_rate(rows["lr"][k])) for k in shown]
    hidden = f"{len(changes):,} learning rates in all; the first and the last are shown."
    yield format_long_table(
        "Learning rates", Table(("from step", "learning rate"), rates), [hidden] if len(changes) > len(shown) else []
    )


def _format_events(run: RunView) -> Iterator[str]:
    events = [event for event in run.history.events if event.kind != "evaluation"]
    if not events:
        return
    yield "<h2>Events</h2>"
    main_events = [event for event in events if event.kind in MARKED_EVENTS]
    if len(events) <= MAX_OPEN_ROWS:
        yield format_table(_tabulate_events(events))
        return
    if main_events:
        yield format_table(_tabulate_events(_keep_ends(main_events, MAX_OPEN_ROWS)))
    shown = _keep_ends(events, _MAX_EVENTS)
    hidden = f"{len(events):,} events in all; the first and the last {_MAX_EVENTS // 2} are shown."
    notes = [hidden] if len(shown) < len(events) else []
    yield fold_table(f"all {formatting.format_count(len(events), 'event')}", _tabulate_events(shown), notes)


def _tabulate_events(events: Sequence[Event]) -> Table:
    rows = [
        (
            time.strftime("%H:%M:%S", time.localtime(event.time)),
            f"{event.step:,}",
            event.kind,
            "" if event.rank is None else f"{event.rank}",
            formatting.sanitize_text(event.text),
        )
        for event in events
    ]
    return Table(("time", "step", "kind", "node", "text"), rows, {"time", "kind", "text"})


def _format_evaluations(run: RunView) -> Iterator[str]:
    evaluations = run.history.evaluations
    if not evaluations:
        return
    shown, names = _keep_ends(evaluations, _MAX_EVENTS), ["loss", *list_metric_names(run.history)]
    columns = (formatting.format_losses([e.values.get(name) for e in shown]) for name in names)
    rows = list(zip((f"{e.step:,}" for e in shown), *columns, strict=True))
    hidden = f"{len(evaluations):,} evaluations in all; the first and the last {_MAX_EVENTS // 2} are shown."
    table = Table(("step", *(formatting.sanitize_text(name, 40) for name in names)), rows)
    yield format_long_table("Evaluations", table, [hidden] if len(shown) < len(evaluations) else [])


def _keep_ends(items: list[_Item], max_items: int) -> list[_Item]:
    """Return the items, or the first and the last ones of many."""
    half = max_items // 2
    return items if len(items) <= max_items else [*items[:half], *items[-half:]]


def _format_origin(run: RunView) -> Iterator[str]:
    """List when and where the run began, and the versions of the code."""
    events = run.history.events
    facts = [("started", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(events[0].time)))] if events else []
    cores = formatting.format_count(resources.count_cores(), "core")
    facts += [
        ("notebook on", platform.node()),
        ("its processor", ", ".join(filter(None, (resources.name_processor(), cores)))),
        ("its memory", formatting.format_bytes(resources.read_memory().total)),
        ("folder", str(Path.cwd())),
    ]
    if commit := _describe_commit():
        facts.append(("git commit", commit))
    facts += [("Python", platform.python_version()), ("system", platform.platform())]
    for name in _PACKAGES:
        try:
            facts.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            facts.append((name, "not installed"))
    yield "<h2>Origin</h2>"
    yield format_facts(Table((), facts))


def _describe_commit() -> str:
    """Return the commit of the present folder, and whether files differ from it; empty outside of a repository."""
    command = ("git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty= and local changes")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=timeouts.GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


_SECTIONS = (
    _format_settings,
    format_model,
    format_nodes,
    _format_evaluations,
    _format_origin,
)

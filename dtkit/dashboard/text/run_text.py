"""A run as text: the plain repr, and progress in a terminal or a log.

On a terminal the block of lines is rewritten in place with one write, so that it doesn't flicker; lines of
the log scroll past above it. Anywhere else (a file, a pipe, CI) the block is printed every few seconds,
without control sequences. Text that engines wrote loses its control characters before it is shown.
"""

from __future__ import annotations

import shutil
import sys
import time
import weakref
from typing import TYPE_CHECKING, TextIO

from dtkit._util import formatting
from dtkit.dashboard.summary.metrics import RunMetrics, compute_epoch, compute_run_metrics
from dtkit.dashboard.summary.notices import NOTICE_GLYPHS, collect_notices
from dtkit.dashboard.summary.stall import find_stall, format_line
from dtkit.dashboard.throttle import Throttle, start_timer

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.dashboard.run_view import RunView
    from dtkit.types import Event, Status

MAX_SHOWN_NODES = 16
"""Nodes with a line of their own; the others are one line together."""

_TTY_INTERVAL_S, _LOG_INTERVAL_S = 0.25, 5.0
_BAR_WIDTH = 24


def format_run(run: RunView) -> str:
    """The run in a few lines of text: state, step, loss, throughput, and a line a node."""
    spec = run.spec
    now = compute_run_metrics(run.history, spec.world_size)
    head = f"{formatting.sanitize_text(spec.name, 60)} · {formatting.sanitize_text(spec.strategy, 60)} · {run.status.state.value}"
    lines = [
        head,
        _format_position(run),
        _format_metrics(now),
        *_format_notices(run, now),
        *_format_node_lines(run, now),
    ]
    if run.exception is not None:
        lines.append(f"{type(run.exception).__name__}: {formatting.sanitize_text(str(run.exception))}")
    return "\n".join(lines)


def _format_position(run: RunView) -> str:
    """How far the run is, and how long it still takes."""
    status = run.status
    at, of = compute_epoch(run.spec, status.step)
    return f"step {status.step:,} of {status.steps:,}, epoch {at:,} of {of:,}, {_format_times(status)}"


def _format_times(status: Status) -> str:
    if not status.step and not status.state.has_ended:
        return f"first step, {formatting.format_clock(status.elapsed_s)}"
    left = (
        ""
        if status.remaining_s is None or status.state.has_ended
        else f", {formatting.format_clock(status.remaining_s)} left"
    )
    return formatting.format_clock(status.elapsed_s) + left


def _format_metrics(metrics: RunMetrics) -> str:
    if metrics.loss is None:
        return "no step yet"
    speed = (
        f"{formatting.format_rate(metrics.throughput)} samples/s, {formatting.format_duration(metrics.step_s)} a step"
    )
    waiting = (
        f", waiting {formatting.format_percent(metrics.timing.waiting_share)}" if metrics.timing.is_measured else ""
    )
    return f"loss {formatting.format_loss(metrics.loss)}, {speed}{waiting}"


def _format_notices(run: RunView, metrics: RunMetrics) -> list[str]:
    """What there is to say in words: who is stuck and for how long, whether the ranks agree, who is slow."""
    stuck = find_stall(run)
    lines = [] if stuck is None else [formatting.sanitize_text(format_line(stuck))]
    lines += [
        f"{NOTICE_GLYPHS[remark.kind]} {remark.text}" for remark in collect_notices(run) if remark.kind != "stuck"
    ]
    if metrics.timing.straggler is not None:
        lines.append(f"▲ {metrics.timing.straggler.text}")
    return lines


def _format_node_lines(run: RunView, metrics: RunMetrics) -> list[str]:
    """A line a node, aligned; many nodes end in one line for the rest."""
    where = {node.rank: f"{node.host} {node.device}" for node in run.nodes}
    count = len(metrics.by_rank)
    shown = count if count <= MAX_SHOWN_NODES else MAX_SHOWN_NODES - 1
    digits = len(str(count - 1))
    lines = []
    for rank, (loss, rate, memory) in enumerate(metrics.by_rank[:shown]):
        known = formatting.UNKNOWN if metrics.ranks_without_loss[rank] else formatting.format_loss(loss)
        lines.append(
            f"  node {rank:>{digits}}  loss {known:>8}  {formatting.format_rate(rate):>9} samples/s"
            f"  {formatting.format_bytes(memory):>7}  {formatting.sanitize_text(where.get(rank, ''), 60)}".rstrip()
        )
    if count > shown:
        lines.append(f"  and {count - shown} more nodes")
    return lines


class TextProgress:
    """Follows a run as text on `stream`; :meth:`update` writes what is new.

    `tty` is found from the stream when None; the first `told` events are not told again. Nothing is written by the
    class itself: see :func:`follow`.
    """

    def __init__(
        self, run: RunView, stream: TextIO, *, is_tty: bool | None = None, num_printed_events: int = 0
    ) -> None:
        self._run, self._stream = run, stream
        self.is_tty = stream.isatty() if is_tty is None else is_tty
        self._num_block_lines = 0
        self.num_printed_events = num_printed_events
        self._last_block: list[str] | None = None

    def update(self) -> None:
        """Write the lines of the log since the last time, and the block of now."""
        news = [_format_event(event) for event in self._take_new_events()]
        block = self.format_block()
        if not news and block == self._last_block:
            return
        text = self._format_in_place(news, block) if self.is_tty else "".join(f"{line}\n" for line in [*news, *block])
        self._stream.write(text)
        self._stream.flush()
        self._last_block = block

    def format_block(self) -> list[str]:
        """The lines that stand for the run now: a bar with how far it is, and a line a node."""
        status = self._run.status
        done = min(1.0, status.step / status.steps) if status.steps else 0.0
        bar = (
            "█" * round(_BAR_WIDTH * done) + "░" * (_BAR_WIDTH - round(_BAR_WIDTH * done))
            if self.is_tty
            else f"{100 * done:.0f} %"
        )
        now = compute_run_metrics(self._run.history, self._run.spec.world_size)
        head = f"{status.state.value} {bar} step {status.step:,} of {status.steps:,}, {_format_times(status)}"
        said = [f"  {line}" for line in _format_notices(self._run, now)]
        return [head, "  " + _format_metrics(now), *said, *_format_node_lines(self._run, now)]

    def _format_in_place(self, new_lines: list[str], block: list[str]) -> str:
        """Go up to the block's first line, write over it, clear what is left below."""
        columns, rows = shutil.get_terminal_size()
        shown = [line[: columns - 1] for line in block[: max(1, rows - 1)]]  # a wrapped line can't be gone back over
        up = f"\x1b[{self._num_block_lines}F" if self._num_block_lines else ""
        self._num_block_lines = len(shown)
        return up + "".join(f"{line}\x1b[K\n" for line in [*new_lines, *shown]) + "\x1b[J"

    def _take_new_events(self) -> list[Event]:
        new = self._run.history.events[self.num_printed_events :]
        self.num_printed_events += len(new)  # not the list's length: it may have grown by now
        return new


def _format_event(event: Event) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    who = "" if event.rank is None else f"[{event.rank}] "
    return f"{clock}  {who}{formatting.sanitize_text(event.text)}"


def start_text_progress(
    run: RunView,
    stream: TextIO | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    call_later: Callable[[float, Callable[[], None]], None] = start_timer,
) -> Callable[[], None]:
    """Show `source` on `stream` (standard output) until the function that this returns is called.

    That function writes the last state. A source that was followed before (a run that was paused, or extended) goes on
    with the events that are new since. `clock` and `later` are seams for tests.
    """
    progress = TextProgress(run, stream or sys.stdout, num_printed_events=_num_printed_events.get(run, 0))
    interval = _TTY_INTERVAL_S if progress.is_tty else _LOG_INTERVAL_S
    throttle = Throttle(progress.update, interval, clock=clock, call_later=call_later)
    unsubscribe = run.subscribe(throttle.trigger)
    throttle.trigger()

    def stop() -> None:
        unsubscribe()
        throttle.close()
        progress.update()
        _num_printed_events[run] = progress.num_printed_events

    return stop


_num_printed_events: weakref.WeakKeyDictionary[RunView, int] = weakref.WeakKeyDictionary()
"""How many events of a source were written when it was last followed."""

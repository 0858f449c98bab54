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
from dtkit.dashboard.glance import Glance, epoch, glance
from dtkit.dashboard.remarks import GLYPHS, remarks
from dtkit.dashboard.stuck import halted, line
from dtkit.dashboard.throttle import Throttle, on_timer

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.dashboard.source import Source
    from dtkit.types import Event, Status

MAX_NODES = 16
"""Nodes with a line of their own; the others are one line together."""

_TTY_EVERY, _LOG_EVERY = 0.25, 5.0
_BAR = 24


def summary(source: Source) -> str:
    """The run in a few lines of text: state, step, loss, throughput, and a line a node."""
    spec = source.spec
    now = glance(source.history, spec.world_size)
    head = f"{formatting.plain(spec.name, 60)} · {formatting.plain(spec.strategy, 60)} · {source.status.state.value}"
    lines = [head, _where(source), _figures(now), *_said(source, now), *_node_lines(source, now)]
    if source.exception is not None:
        lines.append(f"{type(source.exception).__name__}: {formatting.plain(str(source.exception))}")
    return "\n".join(lines)


def _where(source: Source) -> str:
    """How far the run is, and how long it still takes."""
    status = source.status
    at, of = epoch(source.spec, status.step)
    return f"step {status.step:,} of {status.steps:,}, epoch {at:,} of {of:,}, {_times(status)}"


def _times(status: Status) -> str:
    if not status.step and not status.state.ended:
        return f"first step, {formatting.clock(status.elapsed_s)}"
    left = "" if status.remaining_s is None or status.state.ended else f", {formatting.clock(status.remaining_s)} left"
    return formatting.clock(status.elapsed_s) + left


def _figures(now: Glance) -> str:
    if now.loss is None:
        return "no step yet"
    speed = f"{formatting.rate(now.throughput)} samples/s, {formatting.duration(now.step_s)} a step"
    waiting = f", waiting {formatting.share(now.timing.waiting)}" if now.timing.measured else ""
    return f"loss {formatting.loss(now.loss)}, {speed}{waiting}"


def _said(source: Source, now: Glance) -> list[str]:
    """What there is to say in words: who is stuck and for how long, whether the ranks agree, who is slow."""
    stuck = halted(source)
    lines = [] if stuck is None else [formatting.plain(line(stuck))]
    lines += [f"{GLYPHS[remark.kind]} {remark.text}" for remark in remarks(source) if remark.kind != "stuck"]
    if now.timing.straggler is not None:
        lines.append(f"▲ {now.timing.straggler.text}")
    return lines


def _node_lines(source: Source, now: Glance) -> list[str]:
    """A line a node, aligned; many nodes end in one line for the rest."""
    where = {node.rank: f"{node.host} {node.device}" for node in source.nodes}
    count = len(now.by_rank)
    shown = count if count <= MAX_NODES else MAX_NODES - 1
    digits = len(str(count - 1))
    lines = []
    for rank, (loss, rate, memory) in enumerate(now.by_rank[:shown]):
        known = formatting.NOTHING if now.lossless[rank] else formatting.loss(loss)
        lines.append(
            f"  node {rank:>{digits}}  loss {known:>8}  {formatting.rate(rate):>9} samples/s"
            f"  {formatting.size(memory):>7}  {formatting.plain(where.get(rank, ''), 60)}".rstrip()
        )
    if count > shown:
        lines.append(f"  and {count - shown} more nodes")
    return lines


class TextProgress:
    """Follows a run as text on `stream`; :meth:`update` writes what is new.

    `tty` is found from the stream when None; the first `told` events are not told again. Nothing is written by the
    class itself: see :func:`follow`.
    """

    def __init__(self, source: Source, stream: TextIO, *, tty: bool | None = None, told: int = 0) -> None:
        self._source, self._stream = source, stream
        self.tty = stream.isatty() if tty is None else tty
        self._height = 0
        self.told = told
        self._written: list[str] | None = None

    def update(self) -> None:
        """Write the lines of the log since the last time, and the block of now."""
        news = [_event_line(event) for event in self._new_events()]
        block = self.block()
        if not news and block == self._written:
            return
        text = self._in_place(news, block) if self.tty else "".join(f"{line}\n" for line in [*news, *block])
        self._stream.write(text)
        self._stream.flush()
        self._written = block

    def block(self) -> list[str]:
        """The lines that stand for the run now: a bar with how far it is, and a line a node."""
        status = self._source.status
        done = min(1.0, status.step / status.steps) if status.steps else 0.0
        bar = "█" * round(_BAR * done) + "░" * (_BAR - round(_BAR * done)) if self.tty else f"{100 * done:.0f} %"
        now = glance(self._source.history, self._source.spec.world_size)
        head = f"{status.state.value} {bar} step {status.step:,} of {status.steps:,}, {_times(status)}"
        said = [f"  {line}" for line in _said(self._source, now)]
        return [head, "  " + _figures(now), *said, *_node_lines(self._source, now)]

    def _in_place(self, news: list[str], block: list[str]) -> str:
        """Go up to the block's first line, write over it, clear what is left below."""
        columns, rows = shutil.get_terminal_size()
        shown = [line[: columns - 1] for line in block[: max(1, rows - 1)]]  # a wrapped line can't be gone back over
        up = f"\x1b[{self._height}F" if self._height else ""
        self._height = len(shown)
        return up + "".join(f"{line}\x1b[K\n" for line in [*news, *shown]) + "\x1b[J"

    def _new_events(self) -> list[Event]:
        new = self._source.history.events[self.told :]
        self.told += len(new)  # not the list's length: it may have grown by now
        return new


def _event_line(event: Event) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    who = "" if event.rank is None else f"[{event.rank}] "
    return f"{clock}  {who}{formatting.plain(event.text)}"


def follow(
    source: Source,
    stream: TextIO | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    later: Callable[[float, Callable[[], None]], None] = on_timer,
) -> Callable[[], None]:
    """Show `source` on `stream` (standard output) until the function that this returns is called.

    That function writes the last state. A source that was followed before (a run that was paused, or extended) goes on
    with the events that are new since. `clock` and `later` are seams for tests.
    """
    progress = TextProgress(source, stream or sys.stdout, told=_told.get(source, 0))
    interval = _TTY_EVERY if progress.tty else _LOG_EVERY
    throttle = Throttle(progress.update, interval, clock=clock, later=later)
    unsubscribe = source.subscribe(throttle.poke)
    throttle.poke()

    def stop() -> None:
        unsubscribe()
        throttle.close()
        progress.update()
        _told[source] = progress.told

    return stop


_told: weakref.WeakKeyDictionary[Source, int] = weakref.WeakKeyDictionary()
"""How many events of a source were written when it was last followed."""

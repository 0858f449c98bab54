"""A run as text: the plain repr, and progress in a terminal or a log.

Progress has two or three lines: state and position, the numbers of learning, and what is wrong. The repr has the rest.
A terminal rewrites them in place (see `terminal.py`), and lines of the log scroll above. Elsewhere (a file, a pipe, CI)
they are printed every few seconds and at the end, without control sequences. A short run has those of its end alone.
Text of engines loses its control characters before it is shown.
"""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from typing import TYPE_CHECKING, TextIO

from dtkit._util import formatting, timeouts
from dtkit.dashboard.summary.activity import name_state
from dtkit.dashboard.summary.metrics import (
    RunMetrics,
    compute_efficiency,
    compute_epoch,
    compute_run_metrics,
)
from dtkit.dashboard.summary.notices import (
    ALERT_KINDS,
    NOTICE_GLYPHS,
    WELL_KINDS,
    Notice,
    collect_notices,
    list_error_lines,
    name_event_node,
)
from dtkit.dashboard.summary.stall import find_stall, format_line
from dtkit.dashboard.summary.steady_verdict import SteadyVerdict, is_at_rest
from dtkit.dashboard.summary.time_outside_steps import list_times_outside_steps
from dtkit.dashboard.summary.timing import WINDOW_STEPS
from dtkit.dashboard.summary.verdict import VERDICT_GLYPH, find_shown_verdict
from dtkit.dashboard.throttle import Throttle, start_timer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dtkit.dashboard.run_view import RunView
    from dtkit.dashboard.summary.verdict import Verdict
    from dtkit.dashboard.text.terminal import TerminalBlock
    from dtkit.types import Event, Status

MAX_SHOWN_NODES = 16
"""Nodes with a line of their own. One line stands for the others."""


def format_run(run: RunView) -> str:
    """Return the run in a few lines of text: state, step, loss, throughput, and a line for each node."""
    spec = run.spec
    metrics = compute_run_metrics(run.history, spec.world_size)
    name, strategy = formatting.sanitize_text(spec.name, 60), formatting.sanitize_text(spec.strategy, 60)
    tags = "".join(f" · {formatting.sanitize_text(tag, 30)}" for tag in spec.tags)
    head = f"{name} · {strategy} · {name_state(run)}{tags}"
    lines = [
        head,
        _format_position(run) + _format_split(run),
        _format_metrics(metrics),
        *_format_efficiency(run, metrics),
        *_format_own_numbers(run),
        *_format_notices(run, metrics),
        *_format_verdict(find_shown_verdict(run)),
        *_format_node_lines(run, metrics),
    ]
    if run.exception is not None:
        lines += list_error_lines(run.exception, has_ended=run.status.state.has_ended)
    return "\n".join(lines)


def format_step(run: RunView) -> str:
    """Return the run's step and epoch."""
    status = run.status
    epoch, epochs = compute_epoch(run.spec, status.step)
    return f"step {status.step:,} of {status.steps:,}, epoch {epoch:,} of {epochs:,}"


def _format_position(run: RunView) -> str:
    """Return step, epoch, elapsed and remaining time."""
    return f"{format_step(run)}, {_format_times(run.status)}"


def _format_times(status: Status) -> str:
    if not status.step and not status.state.has_ended:
        return f"first step, {formatting.format_elapsed(status.elapsed_s)}"
    elapsed = f"{formatting.format_elapsed(status.elapsed_s)} elapsed"
    if status.state.has_ended or status.remaining_s is None:
        return elapsed
    return f"{elapsed}, {formatting.format_clock(status.remaining_s)} left"


def _format_split(run: RunView) -> str:
    """Return the time outside of steps, where an ended run spent much of it there; else an empty text."""
    if not run.status.state.has_ended:
        return ""
    return "".join(f", {text}" for text in list_times_outside_steps(run.history, run.status.elapsed_s))


def _format_metrics(metrics: RunMetrics) -> str:
    if metrics.loss is None:
        return "no step yet"
    parts = [
        f"{metrics.speed_steps_text}: {formatting.format_rate(metrics.throughput)} samples/s{_format_overall(metrics)}",
        f"mean {formatting.format_duration(metrics.step_s)} a step",
    ]
    if metrics.timing.is_measured:
        window = "" if _name_window(metrics) == metrics.speed_steps_text else f" in {_name_window(metrics)}"
        parts.append(f"waiting {formatting.format_percent(metrics.timing.waiting_share)}{window}")
    loss_steps = formatting.format_count(metrics.num_loss_steps, "step")
    loss = f"loss {formatting.format_loss(metrics.loss)} (mean of {loss_steps})"
    return f"{loss}; {', '.join(parts)}"


def _format_overall(metrics: RunMetrics) -> str:
    """Return the throughput with the time between steps, where that is long."""
    rate = metrics.overall_throughput
    return "" if rate is None else f" in steps, {formatting.format_rate(rate)} with the time between them"


def _name_window(metrics: RunMetrics) -> str:
    """Return the steps that means are taken over: ``last 50 steps``, ``all steps but the first``."""
    return metrics.timing.steps_text


def _format_efficiency(run: RunView, metrics: RunMetrics) -> list[str]:
    """Return tokens, operations and MFU, where they were measured."""
    efficiency = compute_efficiency(run, metrics)
    if efficiency is None:
        return []
    return [f"{metrics.speed_steps_text}: {formatting.sanitize_text(repr(efficiency).partition(', ')[2])}"]


_MAX_OWN_NUMBERS = 6


def _format_own_numbers(run: RunView) -> list[str]:
    """Return the last validation in one line, and the last numbers from `dtkit.log` in another."""
    evaluations = run.history.evaluations
    found = [f"validation at step {evaluations[-1].step:,}: {_format_evaluation(run)}"] if evaluations else []
    return [*found, *_format_logged(run)]


def _format_evaluation(run: RunView) -> str:
    """Return the values of the last validation."""
    values = run.history.evaluations[-1].values
    shown = itertools.islice(values.items(), _MAX_OWN_NUMBERS)
    return ", ".join(f"{formatting.sanitize_text(name, 40)} {formatting.format_loss(value)}" for name, value in shown)


def _format_logged(run: RunView) -> list[str]:
    logged = []
    for name in run.history.scalar_names[:_MAX_OWN_NUMBERS]:
        _, values = run.history.scalar(name, since=run.status.step - WINDOW_STEPS)
        logged += [f"{formatting.sanitize_text(name, 40)} {formatting.format_loss(values[-1])}"] if len(values) else []
    return [f"last logged: {', '.join(logged)}"] if logged else []


def _format_notices(run: RunView, metrics: RunMetrics) -> list[str]:
    """Return the notices: stalls, replica checks, delays, and stragglers."""
    lines = _format_notices_except(run, metrics, ())
    if metrics.timing.straggler is not None:
        lines.append(f"▲ {metrics.timing.straggler.text}")
    return lines


def _format_notices_except(run: RunView, metrics: RunMetrics, hidden_kinds: Sequence[str]) -> list[str]:
    stall = find_stall(run)
    is_past = stall is not None and stall.rank in metrics.lost_nodes
    lines = [] if stall is None or is_past else [formatting.sanitize_text(format_line(stall))]
    notices = [notice for notice in collect_notices(run) if notice.kind not in ("stuck", *hidden_kinds)]
    return lines + [_format_notice(notice) for notice in notices]


def _format_notice(notice: Notice) -> str:
    return f"{NOTICE_GLYPHS[notice.kind]} {notice.text}"


def _format_verdict(verdict: Verdict | None) -> list[str]:
    """Return the verdict, where there is one to show."""
    return [] if verdict is None else [f"{VERDICT_GLYPH} {verdict.text}"]


def _format_node_lines(run: RunView, metrics: RunMetrics) -> list[str]:
    """Return an aligned line for each node, one line for the nodes beyond the limit, and what the numbers are."""
    devices = {node.rank: f"{node.host} {node.device}" for node in run.nodes}
    num_nodes = len(metrics.by_rank)
    num_shown = num_nodes if num_nodes <= MAX_SHOWN_NODES else MAX_SHOWN_NODES - 1
    num_digits = len(str(num_nodes - 1))
    note = f"  each node: loss of the last step, samples/s without waiting ({_name_window(metrics)}), memory"
    lines = [] if metrics.loss is None else [note]
    for rank, (loss, rate, memory) in enumerate(metrics.by_rank[:num_shown]):
        loss_text = formatting.UNKNOWN if metrics.ranks_without_loss[rank] else formatting.format_loss(loss)
        lines.append(
            f"  node {rank:>{num_digits}}  loss {loss_text:>8}  {formatting.format_rate(rate):>9} samples/s"
            f"  {formatting.format_bytes(memory):>7}  {formatting.sanitize_text(devices.get(rank, ''), 60)}".rstrip()
        )
    if num_nodes > num_shown:
        lines.append(f"  and {num_nodes - num_shown} more nodes")
    return lines


_UNPRINTED_EVENTS = frozenset({"start", "done", "stop", "evaluation"})
"""Events whose text progress has in its own lines."""
_CAUSES_OF_ENDS = ("failed", "paused", "diverged", "learned nothing")
"""Causes of verdicts that are about more than time."""


class TextProgress:
    """Progress of a run as text on `stream`; :meth:`update` writes what is new.

    Without `is_tty` the stream decides. The first `num_printed_events` events are not printed again.
    """

    def __init__(
        self, run: RunView, stream: TextIO, *, is_tty: bool | None = None, num_printed_events: int = 0
    ) -> None:
        self._run, self._stream = run, stream
        self.is_tty = stream.isatty() if is_tty is None else is_tty
        self._terminal: TerminalBlock | None = None
        self.num_printed_events = num_printed_events
        self._last_block: list[str] | None = None
        self._steady_verdict = SteadyVerdict()
        self._told: set[str] = set()
        """Kinds of advice that the last block of a log had."""
        self._advice: dict[str, str] = {}
        """Lines of the present block that are not urgent, with the kind or the cause of each."""

    def start(self) -> None:
        """Write the log so far. A terminal gets the block, too; elsewhere a short run has only that of its end."""
        if self.is_tty:
            self.update()
        else:
            self._write(self._format_new_events(), [])

    def update(self) -> None:
        """Write the new lines of the log, and the current block."""
        new_lines, block = self._format_new_events(), self.format_block()
        if not self.is_tty and not self._has_news():
            block = [] if self._last_block is None else block[:1]  # a long first step is told with its time
        if not new_lines and block == self._last_block:
            return
        self._write(new_lines, block)

    def _write(self, new_lines: list[str], block: list[str]) -> None:
        self._last_block = block
        if self.is_tty:
            self._show_in_terminal(new_lines, block[1:])
            return
        self._stream.write("".join(f"{line}\n" for line in [*new_lines, *self._leave_out_told(block)]))
        self._stream.flush()

    def _leave_out_told(self, block: list[str]) -> list[str]:
        """Return a block for a log, without advice that the last one had. A run at rest has all of it."""
        told, self._told = self._told, {self._advice[line] for line in block if line in self._advice}
        is_final = is_at_rest(self._run.status.state)
        return [line for line in block if is_final or self._advice.get(line) not in told]

    def close(self) -> None:
        """Write what is new, and leave the lines of the last state in a terminal, too."""
        self.update()
        if self._terminal is not None:
            self._terminal.close(self.format_block())

    def format_block(self) -> list[str]:
        """Return the lines of the current state: position, numbers, and what is wrong."""
        run = self._run
        name = formatting.sanitize_text(run.spec.name, 60)
        head = f"{name}: {name_state(run)}{self._format_share()}, {_format_position(run)}"
        metrics = compute_run_metrics(run.history, run.spec.world_size)
        details = [self._format_numbers(metrics), *_format_logged(run), *self._format_problems(metrics)]
        return [head, *(f"  {line}" for line in details)]

    def _format_share(self) -> str:
        status = self._run.status
        if status.state.has_ended or not status.steps:
            return ""
        return f", {100 * min(1.0, status.step / status.steps):.0f} %"

    def _format_numbers(self, metrics: RunMetrics) -> str:
        """Return loss, validation and throughput in one line."""
        run = self._run
        learnt = []
        if metrics.loss is not None:
            loss_steps = formatting.format_count(metrics.num_loss_steps, "step")
            learnt.append(f"loss {formatting.format_loss(metrics.loss)} (mean of {loss_steps})")
        if evaluations := run.history.evaluations:
            step = evaluations[-1].step
            place = "" if step == run.status.step else f" at step {step:,}"
            learnt.append(f"validation{place}: {_format_evaluation(run)}")
        rate = f"{formatting.format_rate(metrics.throughput)} samples/s{_format_overall(metrics)}"
        speed = [rate] if metrics.throughput is not None else []
        efficiency = compute_efficiency(run, metrics)
        if efficiency is not None and efficiency.tokens_per_s is not None:
            speed.append(f"{formatting.format_rate(efficiency.tokens_per_s)} tokens/s")
        if efficiency is not None and efficiency.mfu is not None:
            speed.append(f"MFU {formatting.format_percent(efficiency.mfu)}")
        if speed:
            learnt.append(f"{', '.join(speed)} ({metrics.speed_steps_text})")
        return "; ".join(learnt) or "no step yet"

    def _format_problems(self, metrics: RunMetrics) -> list[str]:
        """Return what is wrong: notices, except on what is well, and a verdict that is worth a line."""
        status = self._run.status
        found = find_shown_verdict(self._run)
        verdict = self._steady_verdict.update(found, time.monotonic(), is_final=is_at_rest(status.state))
        lines = _format_notices_except(self._run, metrics, WELL_KINDS)
        shown = _format_verdict(verdict if verdict and _is_worth_a_line(verdict, status) else None)
        advice = {_format_notice(notice): notice.kind for notice in collect_notices(self._run)}
        self._advice = {f"  {line}": kind for line, kind in advice.items() if kind not in ALERT_KINDS}
        self._advice |= {f"  {line}": verdict.cause for line in shown if verdict is not None}
        return lines + shown

    def _has_news(self) -> bool:
        """Return whether a block would say more than that no step was taken: numbers, an end, an error or a notice."""
        run = self._run
        return bool(
            run.history.num_steps
            or run.history.evaluations
            or run.status.state.has_ended
            or run.exception is not None
            or _format_notices_except(run, compute_run_metrics(run.history, run.spec.world_size), ())
        )

    def _show_in_terminal(self, new_lines: list[str], lines: list[str]) -> None:
        from dtkit.dashboard.text.terminal import TerminalBlock  # late: a log needs no rich

        self._terminal = self._terminal or TerminalBlock(self._stream)
        head = name_state(self._run), _format_position(self._run)
        self._terminal.show(new_lines, self._run.status, head, lines)

    def _format_new_events(self) -> list[str]:
        return [_format_event(event) for event in self._take_new_events()]

    def _take_new_events(self) -> list[Event]:
        new = self._run.history.events[self.num_printed_events :]
        self.num_printed_events += len(new)  # not the list's length, which may have grown since
        return [event for event in new if event.kind not in _UNPRINTED_EVENTS]


def _is_worth_a_line(verdict: Verdict, status: Status) -> bool:
    """Return whether the remedy would save a person's time in a run like this one."""
    duration_s = status.elapsed_s + (status.remaining_s or 0.0)
    return verdict.cause in _CAUSES_OF_ENDS or verdict.gain * duration_s >= timeouts.PRINTED_SAVING_S


def _format_event(event: Event) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    return f"{clock}  {name_event_node(event)}{formatting.sanitize_text(event.text)}"


def start_text_progress(
    run: RunView,
    stream: TextIO | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    call_later: Callable[[float, Callable[[], None]], None] = start_timer,
) -> Callable[[], None]:
    """Show a run on `stream` (standard output). Return a function that writes the last state and ends this.

    A run that was shown before, such as one that was paused or extended, goes on with its new events. So does one that
    resumes from a checkpoint: the earlier run has printed the others. Tests replace `clock` and `call_later`.
    """
    num_printed = _num_printed_events.get(run, run.history.num_inherited_events)
    progress = TextProgress(run, stream or sys.stdout, num_printed_events=num_printed)
    interval = timeouts.LIVE_INTERVAL_S if progress.is_tty else timeouts.LOG_INTERVAL_S
    writes: Iterator[Callable[[], None]] = itertools.chain([progress.start], itertools.repeat(progress.update))

    def write() -> None:
        next(writes)()

    throttle = Throttle(write, interval, clock=clock, call_later=call_later)
    unsubscribe = run.subscribe(throttle.trigger)
    throttle.trigger()

    def stop() -> None:
        unsubscribe()
        throttle.close()
        progress.close()
        _num_printed_events[run] = progress.num_printed_events

    return stop


_num_printed_events: weakref.WeakKeyDictionary[RunView, int] = weakref.WeakKeyDictionary()
"""Number of events that were printed of each run."""

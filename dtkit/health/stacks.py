"""Where every rank stands, in Python's own terms, at any time: also while the engines are busy, or stuck.

Nothing is asked of an engine's main thread. Each engine's watchdog writes its stacks twice a second (see
:mod:`dtkit.engine.observe.watchdog`), and one waits for a writing that is newer than the question. An engine that
writes nothing is asked by SIGUSR1, upon which faulthandler writes all stacks from C: this needs no interpreter, and
since nobody runs Python there, the frames stand still. A process that is stopped gets no signal: it would answer later.

A signal is sent to a process only if it is on this host, if it started when the watchdog of that pid says, and if it
said that it has a handler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import linecache
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dtkit
from dtkit.engine.observe.stack_sampler import MAX_FRAMES, CallStack, make_stack
from dtkit.health.diagnosis import WATCHDOG_SILENT_S, RankObservation
from dtkit.health.status import IDLE, EngineStatus, Frame, find_user_frame, get_dump_path, get_status_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.types import NodeInfo

FRESH_STATUS_TIMEOUT_S = 1.5  # for the watchdogs to write once more: three of their periods
DUMP_TIMEOUT_S = 1.0  # for a dump to be written
_START_TIME_TOLERANCE_S = 2.0  # start times this near are one process's: the system's clock may have been set since
_SIGNAL_PERIOD_S = 5.0  # between two signals to the same rank by a probe
_THREAD_PATTERN = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)", re.MULTILINE)
_FRAME_PATTERN = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_ESCAPE_PATTERN = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_INSTALL_FOLDER_PATTERN = re.compile(
    rf"^.*/(?:site|dist)-packages/|^{re.escape(str(Path(dtkit.__file__).parent.parent))}/(?=dtkit/)"
)


class StatusProbe:
    """What is known of each rank, when called; signals a silent one, at most every five seconds."""

    def __init__(self, folder: Path, get_nodes: Callable[[], Sequence[NodeInfo]]) -> None:
        """`nodes` says who is there now: a repair changes that."""
        self._folder, self._get_nodes = folder, get_nodes
        self._signaled_at: dict[int, float] = {}
        self._dumps: dict[int, tuple[float, tuple[Frame, ...]]] = {}  # by rank: of which writing, and what

    def __call__(self) -> list[RankObservation]:
        """By rank."""
        return [_format_files(self._observe(node)) for node in self._get_nodes()]

    def _observe(self, node: NodeInfo) -> RankObservation:
        seen = observe_rank(self._folder, node)
        standing = seen.status
        if (
            standing is None
            or (seen.status_age_s or 0.0) <= WATCHDOG_SILENT_S
            or seen.process_state in ("stopped", "ended")
        ):
            return seen
        now = time.monotonic()
        if now - self._signaled_at.get(node.rank, -_SIGNAL_PERIOD_S) >= _SIGNAL_PERIOD_S:
            self._signaled_at[node.rank] = now
            self._dumps[node.rank] = standing.observed_at, request_stack_dump(self._folder, seen)
        written, frames = self._dumps[node.rank]
        return add_dump(seen, frames if written == standing.observed_at else ())


def _format_files(observation: RankObservation) -> RankObservation:
    """With files as the user knows them."""
    if observation.status is None:
        return observation
    stack = tuple(dataclasses.replace(frame, file=_format_filename(frame.file)) for frame in observation.status.stack)
    dumped = tuple(dataclasses.replace(frame, file=_format_filename(frame.file)) for frame in observation.dumped_stack)
    return dataclasses.replace(
        observation, status=dataclasses.replace(observation.status, stack=stack), dumped_stack=dumped
    )


def observe_rank(folder: Path, node: NodeInfo) -> RankObservation:
    """One rank, as the system and its watchdog see it."""
    standing = read_status(folder, node)
    process = "unknown"
    if standing is not None and node.host == socket.gethostname():
        process = get_process_state(node.pid, standing.process_start_time)
    age = None if standing is None else max(0.0, time.time() - standing.observed_at)
    return RankObservation(node.rank, node.host, node.pid, process, age, standing)


def read_status(folder: Path, node: NodeInfo) -> EngineStatus | None:
    """What a rank's watchdog wrote last; None where this engine has written nothing that can be read here."""
    try:
        found = EngineStatus.from_json(get_status_path(folder, node.rank).read_text())
    except (OSError, ValueError, TypeError, KeyError):  # not there, or of another version of dtkit
        return None
    return found if found.pid == node.pid else None


def get_process_state(pid: int, start_time: float) -> str:
    """A process's state on this host; "ended" where there is none, or another one that got its number."""
    import psutil

    try:
        process = psutil.Process(pid)
        if abs(process.create_time() - start_time) > _START_TIME_TOLERANCE_S:
            return "ended"
        status = str(process.status())
    except psutil.NoSuchProcess:
        return "ended"
    except psutil.Error:  # the system does not say
        return "unknown"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "stopped"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "ended"
    return "running" if status == psutil.STATUS_RUNNING else "sleeping"


def request_stack_dump(folder: Path, observation: RankObservation) -> tuple[Frame, ...]:
    """Have a process on this host write its stacks by itself; the serving thread's. Empty where that can't be had."""
    standing, path = observation.status, get_dump_path(folder, observation.rank)
    if standing is None or not standing.can_dump_stacks or observation.process_state not in ("running", "sleeping"):
        return ()
    try:
        return parse_dump(_signal_and_read(path, observation.pid)).get(standing.thread_id, ())
    except OSError:  # it has just ended, or its folder is gone
        return ()


def parse_dump(text: str) -> dict[int, CallStack]:
    """What faulthandler wrote of all threads, by their identities."""
    heads = list(_THREAD_PATTERN.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return {int(head[1], 16): _parse_frames(text[head.end() : end]) for head, end in zip(heads, ends, strict=True)}


def _parse_frames(text: str) -> CallStack:
    return make_stack(
        [
            (_unescape(file), int(line), _unescape(name))
            for file, line, name in _FRAME_PATTERN.findall(text)[:MAX_FRAMES]
        ]
    )


def _unescape(name: str) -> str:
    """With letters beyond ASCII, for which faulthandler writes their numbers."""
    return _ESCAPE_PATTERN.sub(lambda found: chr(int(found[1][1:], 16)), name) if "\\" in name else name


def _signal_and_read(path: Path, pid: int) -> str:
    """What a process appends to this file upon SIGUSR1. Who it is was compared a moment ago, by `look`."""
    begin = path.stat().st_size
    os.kill(pid, signal.SIGUSR1)
    pause, deadline, size = threading.Event(), time.monotonic() + DUMP_TIMEOUT_S, begin
    while time.monotonic() < deadline:
        pause.wait(0.03)
        before, size = size, path.stat().st_size
        if begin < size == before:
            break
    with path.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")


def add_dump(observation: RankObservation, frames: tuple[Frame, ...]) -> RankObservation:
    """The same, with a stack that the process wrote by itself."""
    return dataclasses.replace(observation, dumped_stack=frames)


def collect_stacks(folder: Path, nodes: Sequence[NodeInfo]) -> Stacks:
    """The stacks of all ranks as of now. Takes half a second on average, and at most four; disturbs nothing."""
    asked, deadline, pause = time.time(), time.monotonic() + FRESH_STATUS_TIMEOUT_S, threading.Event()
    seen = [observe_rank(folder, node) for node in nodes]
    while time.monotonic() < deadline and not all(_is_final(one, asked) for one in seen):
        pause.wait(0.05)
        seen = [one if _is_final(one, asked) else observe_rank(folder, nodes[k]) for k, one in enumerate(seen)]
    return Stacks([one if _is_final(one, asked) else add_dump(one, request_stack_dump(folder, one)) for one in seen])


def _is_final(observation: RankObservation, asked_at: float) -> bool:
    """Whether nothing newer is to be had: it has written since, or won't."""
    if observation.process_state in ("stopped", "ended"):
        return True
    return observation.status is not None and observation.status.observed_at >= asked_at


class Stacks:
    """Every rank's Python stack, as of one moment. Shown in a cell, the user's own lines stand out."""

    def __init__(self, observations: Sequence[RankObservation]) -> None:
        self.ranks = tuple(observations)
        """One :class:`~dtkit.health.diagnosis.RankObservation` a rank."""

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, rank: int) -> tuple[Frame, ...]:
        """A rank's stack, innermost first; empty where it is idle, or where nothing is known."""
        return _get_stack(self.ranks[rank])

    def __repr__(self) -> str:
        parts = []
        for one in self.ranks:
            parts.append(_format_head(one))
            for title, frames in _list_sections(one):
                parts += [f"  {title}"] if title else []
                for frame in frames:
                    mark = ">" if frame.kind == "user" else " "
                    parts.append(f"  {mark} {_format_filename(frame.file)}:{frame.line} in {frame.function}")
                    source = _get_source_line(frame)
                    parts += [f"        {source}"] if source else []
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        return "".join(_format_html(one) for one in self.ranks)


def _get_stack(observation: RankObservation) -> tuple[Frame, ...]:
    return observation.dumped_stack or (() if observation.status is None else observation.status.stack)


def _list_sections(observation: RankObservation) -> list[tuple[str, tuple[Frame, ...]]]:
    """The serving thread's stack, then others' by name."""
    others = {} if observation.status is None or observation.dumped_stack else observation.status.threads
    return [("", _get_stack(observation)), *((f"thread {name}", frames) for name, frames in others.items())]


def _format_head(observation: RankObservation) -> str:
    """Who it is and how it is, in one line."""
    standing = observation.status
    process = "stopped (SIGSTOP)" if observation.process_state == "stopped" else observation.process_state
    parts = [f"rank {observation.rank}", observation.host, f"pid {observation.pid}", process]
    if standing is None:
        return ", ".join([*parts, "nothing is known of what it does"])
    last = (
        "last seen in "
        if observation.process_state in ("stopped", "ended") or (observation.status_age_s or 0) > WATCHDOG_SILENT_S
        else ""
    )
    step = "" if standing.step is None or standing.phase == IDLE else f" of step {standing.step}"
    parts.append(f"{last}{standing.phase}{step}")
    if standing.phase != IDLE:
        status_age_s = observation.status_age_s or 0.0 if last else 0.0
        parts.append(f"for {standing.observed_at - standing.phase_since + status_age_s:.0f} s")
    if standing.is_blocked:
        parts.append("waiting in a collective")
    if last:
        own = "; the stack is its own, as of now" if observation.dumped_stack else ""
        parts.append(f"silent for {observation.status_age_s or 0.0:.0f} s{own}")
    return ", ".join(parts)


def _format_html(observation: RankObservation) -> str:
    inner = find_user_frame(_get_stack(observation))
    at = f" at <code>{html.escape(_format_filename(inner.file))}:{inner.line}</code>" if inner is not None else ""
    rows = []
    for title, frames in _list_sections(observation):
        rows += [f"<div>{html.escape(title)}</div>"] if title else []
        rows += [_format_html_frame(frame) for frame in frames]
    style = "font-family:monospace;white-space:pre-wrap;margin:2px 0 8px 12px"
    return (
        f"<details open><summary>{html.escape(_format_head(observation))}{at}</summary>"
        f'<div style="{style}">{"".join(rows)}</div></details>'
    )


_STYLES = {
    "user": "font-weight:bold;border-left:3px solid #e69f00;padding-left:6px",
    "dtkit": "border-left:3px solid #0072b2;padding-left:6px;opacity:.75",
    "library": "border-left:3px solid transparent;padding-left:6px;opacity:.55",
}


def _format_html_frame(frame: Frame) -> str:
    place = html.escape(f"{_format_filename(frame.file)}:{frame.line} in {frame.function}")
    source = html.escape(_get_source_line(frame))
    return f'<div style="{_STYLES.get(frame.kind, "")}">{place}{f"<br>    {source}" if source else ""}</div>'


def _format_filename(file: str) -> str:
    """A file's name as the user knows it: cells by their number, packages without where they are installed."""
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    with contextlib.suppress(AttributeError):  # no shell, or one that has no cells
        known = shell.compile.format_code_name(file)
        if known is not None:
            return " ".join(known)
    return _INSTALL_FOLDER_PATTERN.sub("", file)


def _get_source_line(frame: Frame) -> str:
    """A user's line of code, where the notebook has it."""
    return linecache.getline(frame.file, frame.line).strip() if frame.kind == "user" else ""

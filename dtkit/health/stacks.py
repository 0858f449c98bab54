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
from dtkit.health.diagnosis import SILENT_S, Seen
from dtkit.health.status import IDLE, Frame, Standing, dump_file, line_of, status_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dtkit.types import NodeInfo

FRESH_S = 1.5  # for the watchdogs to write once more: three of their periods
DUMP_S = 1.0  # for a dump to be written
_SAME_S = 2.0  # start times this near are one process's: the system's clock may have been set since
_AGAIN_S = 5.0  # between two signals to the same rank by a probe
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)", re.MULTILINE)
_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_ESCAPED = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_INSTALLED = re.compile(
    rf"^.*/(?:site|dist)-packages/|^{re.escape(str(Path(dtkit.__file__).parent.parent))}/(?=dtkit/)"
)


class Probe:
    """What is known of each rank, when called; signals a silent one, at most every five seconds."""

    def __init__(self, folder: Path, nodes: Callable[[], Sequence[NodeInfo]]) -> None:
        """`nodes` says who is there now: a repair changes that."""
        self._folder, self._nodes = folder, nodes
        self._asked: dict[int, float] = {}
        self._dumps: dict[int, tuple[float, tuple[Frame, ...]]] = {}  # by rank: of which writing, and what

    def __call__(self) -> list[Seen]:
        """By rank."""
        return [_named(self._look(node)) for node in self._nodes()]

    def _look(self, node: NodeInfo) -> Seen:
        seen = look(self._folder, node)
        standing = seen.standing
        if standing is None or (seen.age_s or 0.0) <= SILENT_S or seen.process in ("stopped", "ended"):
            return seen
        now = time.monotonic()
        if now - self._asked.get(node.rank, -_AGAIN_S) >= _AGAIN_S:
            self._asked[node.rank] = now
            self._dumps[node.rank] = standing.time, dump(self._folder, seen)
        written, frames = self._dumps[node.rank]
        return with_dump(seen, frames if written == standing.time else ())


def _named(seen: Seen) -> Seen:
    """With files as the user knows them."""
    if seen.standing is None:
        return seen
    stack = tuple(dataclasses.replace(frame, file=_name(frame.file)) for frame in seen.standing.stack)
    dumped = tuple(dataclasses.replace(frame, file=_name(frame.file)) for frame in seen.dumped)
    return dataclasses.replace(seen, standing=dataclasses.replace(seen.standing, stack=stack), dumped=dumped)


def look(folder: Path, node: NodeInfo) -> Seen:
    """One rank, as the system and its watchdog see it."""
    standing = read(folder, node)
    process = "unknown"
    if standing is not None and node.host == socket.gethostname():
        process = state_of(node.pid, standing.created)
    age = None if standing is None else max(0.0, time.time() - standing.time)
    return Seen(node.rank, node.host, node.pid, process, age, standing)


def read(folder: Path, node: NodeInfo) -> Standing | None:
    """What a rank's watchdog wrote last; None where this engine has written nothing that can be read here."""
    try:
        found = Standing.from_json(status_file(folder, node.rank).read_text())
    except (OSError, ValueError, TypeError, KeyError):  # not there, or of another version of dtkit
        return None
    return found if found.pid == node.pid else None


def state_of(pid: int, created: float) -> str:
    """A process's state on this host; "ended" where there is none, or another one that got its number."""
    import psutil

    try:
        process = psutil.Process(pid)
        if abs(process.create_time() - created) > _SAME_S:
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


def dump(folder: Path, seen: Seen) -> tuple[Frame, ...]:
    """Have a process on this host write its stacks by itself; the serving thread's. Empty where that can't be had."""
    standing, path = seen.standing, dump_file(folder, seen.rank)
    if standing is None or not standing.dumps or seen.process not in ("running", "sleeping"):
        return ()
    try:
        return parsed(_written(path, seen.pid)).get(standing.thread, ())
    except OSError:  # it has just ended, or its folder is gone
        return ()


def parsed(text: str) -> dict[int, CallStack]:
    """What faulthandler wrote of all threads, by their identities."""
    heads = list(_THREAD.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return {int(head[1], 16): _parsed(text[head.end() : end]) for head, end in zip(heads, ends, strict=True)}


def _parsed(text: str) -> CallStack:
    return make_stack(
        [(_plain(file), int(line), _plain(name)) for file, line, name in _LINE.findall(text)[:MAX_FRAMES]]
    )


def _plain(name: str) -> str:
    """With letters beyond ASCII, for which faulthandler writes their numbers."""
    return _ESCAPED.sub(lambda found: chr(int(found[1][1:], 16)), name) if "\\" in name else name


def _written(path: Path, pid: int) -> str:
    """What a process appends to this file upon SIGUSR1. Who it is was compared a moment ago, by `look`."""
    begin = path.stat().st_size
    os.kill(pid, signal.SIGUSR1)
    pause, deadline, size = threading.Event(), time.monotonic() + DUMP_S, begin
    while time.monotonic() < deadline:
        pause.wait(0.03)
        before, size = size, path.stat().st_size
        if begin < size == before:
            break
    with path.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")


def with_dump(seen: Seen, frames: tuple[Frame, ...]) -> Seen:
    """The same, with a stack that the process wrote by itself."""
    return dataclasses.replace(seen, dumped=frames)


def collect(folder: Path, nodes: Sequence[NodeInfo]) -> Stacks:
    """The stacks of all ranks as of now. Takes half a second on average, and at most four; disturbs nothing."""
    asked, deadline, pause = time.time(), time.monotonic() + FRESH_S, threading.Event()
    seen = [look(folder, node) for node in nodes]
    while time.monotonic() < deadline and not all(_settled(one, asked) for one in seen):
        pause.wait(0.05)
        seen = [one if _settled(one, asked) else look(folder, nodes[k]) for k, one in enumerate(seen)]
    return Stacks([one if _settled(one, asked) else with_dump(one, dump(folder, one)) for one in seen])


def _settled(seen: Seen, asked: float) -> bool:
    """Whether nothing newer is to be had: it has written since, or won't."""
    if seen.process in ("stopped", "ended"):
        return True
    return seen.standing is not None and seen.standing.time >= asked


class Stacks:
    """Every rank's Python stack, as of one moment. Shown in a cell, the user's own lines stand out."""

    def __init__(self, seen: Sequence[Seen]) -> None:
        self.ranks = tuple(seen)
        """One :class:`~dtkit.health.diagnosis.Seen` a rank."""

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, rank: int) -> tuple[Frame, ...]:
        """A rank's stack, innermost first; empty where it is idle, or where nothing is known."""
        return _stack(self.ranks[rank])

    def __repr__(self) -> str:
        parts = []
        for one in self.ranks:
            parts.append(_head(one))
            for title, frames in _sections(one):
                parts += [f"  {title}"] if title else []
                for frame in frames:
                    mark = ">" if frame.kind == "user" else " "
                    parts.append(f"  {mark} {_name(frame.file)}:{frame.line} in {frame.function}")
                    source = _source(frame)
                    parts += [f"        {source}"] if source else []
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        return "".join(_html(one) for one in self.ranks)


def _stack(seen: Seen) -> tuple[Frame, ...]:
    return seen.dumped or (() if seen.standing is None else seen.standing.stack)


def _sections(seen: Seen) -> list[tuple[str, tuple[Frame, ...]]]:
    """The serving thread's stack, then others' by name."""
    others = {} if seen.standing is None or seen.dumped else seen.standing.threads
    return [("", _stack(seen)), *((f"thread {name}", frames) for name, frames in others.items())]


def _head(seen: Seen) -> str:
    """Who it is and how it is, in one line."""
    standing = seen.standing
    process = "stopped (SIGSTOP)" if seen.process == "stopped" else seen.process
    parts = [f"rank {seen.rank}", seen.host, f"pid {seen.pid}", process]
    if standing is None:
        return ", ".join([*parts, "nothing is known of what it does"])
    last = "last seen in " if seen.process in ("stopped", "ended") or (seen.age_s or 0) > SILENT_S else ""
    step = "" if standing.step is None or standing.phase == IDLE else f" of step {standing.step}"
    parts.append(f"{last}{standing.phase}{step}")
    if standing.phase != IDLE:
        parts.append(f"for {standing.time - standing.since + (seen.age_s or 0.0 if last else 0.0):.0f} s")
    if standing.blocked:
        parts.append("waiting in a collective")
    if last:
        own = "; the stack is its own, as of now" if seen.dumped else ""
        parts.append(f"silent for {seen.age_s or 0.0:.0f} s{own}")
    return ", ".join(parts)


def _html(seen: Seen) -> str:
    inner = line_of(_stack(seen))
    at = f" at <code>{html.escape(_name(inner.file))}:{inner.line}</code>" if inner is not None else ""
    rows = []
    for title, frames in _sections(seen):
        rows += [f"<div>{html.escape(title)}</div>"] if title else []
        rows += [_html_frame(frame) for frame in frames]
    style = "font-family:monospace;white-space:pre-wrap;margin:2px 0 8px 12px"
    return (
        f"<details open><summary>{html.escape(_head(seen))}{at}</summary>"
        f'<div style="{style}">{"".join(rows)}</div></details>'
    )


_STYLES = {
    "user": "font-weight:bold;border-left:3px solid #e69f00;padding-left:6px",
    "dtkit": "border-left:3px solid #0072b2;padding-left:6px;opacity:.75",
    "library": "border-left:3px solid transparent;padding-left:6px;opacity:.55",
}


def _html_frame(frame: Frame) -> str:
    place = html.escape(f"{_name(frame.file)}:{frame.line} in {frame.function}")
    source = html.escape(_source(frame))
    return f'<div style="{_STYLES.get(frame.kind, "")}">{place}{f"<br>    {source}" if source else ""}</div>'


def _name(file: str) -> str:
    """A file's name as the user knows it: cells by their number, packages without where they are installed."""
    shell: Any = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    with contextlib.suppress(AttributeError):  # no shell, or one that has no cells
        known = shell.compile.format_code_name(file)
        if known is not None:
            return " ".join(known)
    return _INSTALLED.sub("", file)


def _source(frame: Frame) -> str:
    """A user's line of code, where the notebook has it."""
    return linecache.getline(frame.file, frame.line).strip() if frame.kind == "user" else ""

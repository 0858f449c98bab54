"""Python stacks of all ranks, at any time, also while the engines are busy or stuck.

An engine's main thread is not involved. Its watchdog writes its stack twice a second (see
:mod:`dtkit.engine.observe.watchdog`). The notebook waits for a status that is newer than the request. If a watchdog
is silent, the process is signaled to write all stacks (:mod:`dtkit.health.stack_dump`), by the notebook on its own host
and by the agent on another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import linecache
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dtkit._util import formatting, timeouts
from dtkit._util.installation import PACKAGE_FOLDER
from dtkit._util.notebook import get_shell
from dtkit.health.diagnosis import HALTED_STATES, RankObservation
from dtkit.health.frames import MAX_FRAMES, CallStack, Frame, find_user_frame, make_stack
from dtkit.health.stack_dump import dump_stacks, get_process_state
from dtkit.health.status import IDLE, EngineStatus, get_status_path

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dtkit.types import NodeInfo

InspectProcess = Callable[[int, int, float], tuple[str, str]]
"""Function of rank, pid and start time that returns a process's state and the text of its stacks, from its host."""
_THREAD_PATTERN = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)", re.MULTILINE)
_FRAME_PATTERN = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_ESCAPE_PATTERN = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_INSTALL_FOLDER_PATTERN = re.compile(
    rf"^.*/(?:site|dist)-packages/|^{re.escape(str(PACKAGE_FOLDER.parent))}/(?=dtkit/)"
)


class StatusProbe:
    """Callable that observes each rank, and signals silent ones from time to time."""

    def __init__(
        self, folder: Path, get_nodes: Callable[[], Sequence[NodeInfo]], inspect: InspectProcess | None = None
    ) -> None:
        """Observe the ranks that `get_nodes` returns: a repair changes them. `inspect` asks other hosts."""
        self._folder, self._get_nodes, self._inspect = folder, get_nodes, inspect
        self._signaled_at: dict[int, float] = {}
        # by rank: (time of the silent watchdog's last status, stack)
        self._dumps: dict[int, tuple[float, CallStack]] = {}

    def __call__(self) -> list[RankObservation]:
        """Return the observations of all ranks, in order."""
        return [_format_files(self._observe(node)) for node in self._get_nodes()]

    def _observe(self, node: NodeInfo) -> RankObservation:
        observation = observe_rank(self._folder, node)
        status = observation.status
        is_recent = (observation.status_age_s or 0.0) <= timeouts.WATCHDOG_SILENT_S
        if status is None or is_recent or observation.process_state in HALTED_STATES:
            return observation
        now = time.monotonic()
        if now - self._signaled_at.get(node.rank, -timeouts.STACK_DUMP_INTERVAL_S) >= timeouts.STACK_DUMP_INTERVAL_S:
            self._signaled_at[node.rank] = now
            dumped = request_stack_dump(self._folder, observation, self._inspect).dumped_stack
            self._dumps[node.rank] = status.observed_at, dumped
        observed_at, stack = self._dumps[node.rank]
        return dataclasses.replace(observation, dumped_stack=stack if observed_at == status.observed_at else ())


def _format_files(observation: RankObservation) -> RankObservation:
    """Return an observation with the names of files that the user knows."""
    if observation.status is None:
        return observation
    status = dataclasses.replace(observation.status, stack=_format_stack_files(observation.status.stack))
    return dataclasses.replace(observation, status=status, dumped_stack=_format_stack_files(observation.dumped_stack))


def _format_stack_files(stack: CallStack) -> CallStack:
    return tuple(dataclasses.replace(frame, file=_format_filename(frame.file)) for frame in stack)


def observe_rank(folder: Path, node: NodeInfo) -> RankObservation:
    """Return the state of a rank's process, and its watchdog's status."""
    status = read_status(folder, node)
    process_state = "unknown"
    if status is not None and node.host == socket.gethostname():
        process_state = get_process_state(node.pid, status.process_start_time)
    age_s = None if status is None else max(0.0, time.time() - status.observed_at)
    return RankObservation(node.rank, node.host, node.pid, process_state, age_s, status)


def list_statuses(folder: Path, nodes: Sequence[NodeInfo]) -> list[tuple[str, EngineStatus]]:
    """Return (host, last status) of each rank that has a status, if the ranks are on several hosts."""
    if len({node.host for node in nodes}) < 2:
        return []
    return [(node.host, status) for node in nodes if (status := read_status(folder, node)) is not None]


def read_status(folder: Path, node: NodeInfo) -> EngineStatus | None:
    """Return the last status of a rank's watchdog, or None if this engine has no readable one here."""
    try:
        status = EngineStatus.from_json(get_status_path(folder, node.rank).read_text())
    except (OSError, ValueError, TypeError, KeyError):  # missing, or of another version of dtkit
        return None
    return status if status.pid == node.pid else None


def request_stack_dump(
    folder: Path, observation: RankObservation, inspect: InspectProcess | None = None
) -> RankObservation:
    """Return the observation with the stack that its process writes upon a signal, if it can write one.

    `inspect` asks another host for its process.
    """
    status = observation.status
    if status is None or not status.can_dump_stacks:
        return observation
    if observation.process_state != "unknown":
        text = dump_stacks(folder, observation.rank, observation.pid, observation.process_state)
    elif inspect is not None:
        state, text = inspect(observation.rank, observation.pid, status.process_start_time)
        observation = dataclasses.replace(observation, process_state=state)
    else:
        return observation
    return dataclasses.replace(observation, dumped_stack=parse_dump(text).get(status.thread_id, ()))


def parse_dump(text: str) -> dict[int, CallStack]:
    """Return the stacks in faulthandler's text by thread id."""
    heads = list(_THREAD_PATTERN.finditer(text))
    ends = [*(head.start() for head in heads[1:]), len(text)][: len(heads)]
    return {int(head[1], 16): _parse_frames(text[head.end() : end]) for head, end in zip(heads, ends, strict=True)}


def _parse_frames(text: str) -> CallStack:
    return make_stack(
        [
            (_unescape(file), int(line), _unescape(name))
            for file, line, name in _FRAME_PATTERN.findall(text)[:MAX_FRAMES]
        ]
    )


def _unescape(name: str) -> str:
    """Return a name in which faulthandler has escaped letters beyond ASCII."""
    return _ESCAPE_PATTERN.sub(lambda match: chr(int(match[1][1:], 16)), name) if "\\" in name else name


def collect_stacks(folder: Path, nodes: Sequence[NodeInfo], inspect: InspectProcess | None = None) -> Stacks:
    """Return the current stacks of all ranks, usually within half a second. Engines are not disturbed.

    `inspect` asks another host for its process.
    """
    requested_at, deadline = time.time(), time.monotonic() + timeouts.FRESH_STATUS_TIMEOUT_S
    pause = threading.Event()
    observations = [observe_rank(folder, node) for node in nodes]
    while time.monotonic() < deadline and not all(_is_final(obs, requested_at) for obs in observations):
        pause.wait(timeouts.STATUS_POLL_S)
        observations = [
            obs if _is_final(obs, requested_at) else observe_rank(folder, node)
            for obs, node in zip(observations, nodes, strict=True)
        ]
    return Stacks(
        [obs if _is_final(obs, requested_at) else request_stack_dump(folder, obs, inspect) for obs in observations]
    )


def _is_final(observation: RankObservation, requested_at: float) -> bool:
    """Return whether the status is newer than the request, or the process can't write one."""
    if observation.process_state in HALTED_STATES:
        return True
    return observation.status is not None and observation.status.observed_at >= requested_at


class Stacks:
    """Every rank's Python stack at one moment. The display in a cell highlights the user's lines."""

    def __init__(self, observations: Sequence[RankObservation]) -> None:
        self.ranks = tuple(observations)
        """One :class:`~dtkit.health.diagnosis.RankObservation` for each rank."""

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, rank: int) -> tuple[Frame, ...]:
        """Return a rank's stack, innermost first; empty if it is idle or has no status."""
        return _get_stack(self.ranks[rank])

    def __repr__(self) -> str:
        parts = []
        for observation in self.ranks:
            parts.append(_format_head(observation))
            for title, frames in _list_sections(observation):
                parts += [f"  {title}"] if title else []
                for frame in frames:
                    mark = ">" if frame.kind == "user" else " "
                    parts.append(f"  {mark} {_format_filename(frame.file)}:{frame.line} in {frame.function}")
                    source = _get_source_line(frame)
                    parts += [f"        {source}"] if source else []
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        return "".join(map(_format_html, self.ranks))


def _get_stack(observation: RankObservation) -> tuple[Frame, ...]:
    return observation.dumped_stack or (() if observation.status is None else observation.status.stack)


def _list_sections(observation: RankObservation) -> list[tuple[str, tuple[Frame, ...]]]:
    """Return (title, stack) of the serving thread, and then of other threads by name."""
    others = {} if observation.status is None or observation.dumped_stack else observation.status.threads
    return [("", _get_stack(observation)), *((f"thread {name}", frames) for name, frames in others.items())]


def _format_head(observation: RankObservation) -> str:
    """Return the rank, its process and its position in one line."""
    status, age_s = observation.status, observation.status_age_s or 0.0
    process = "stopped (SIGSTOP)" if observation.process_state == "stopped" else observation.process_state
    parts = [f"rank {observation.rank}", observation.host, f"pid {observation.pid}", process]
    if status is None:
        return ", ".join([*parts, "no status"])
    is_old = observation.process_state in HALTED_STATES or age_s > timeouts.WATCHDOG_SILENT_S
    step = "" if status.step is None or status.phase == IDLE else f" of step {status.step}"
    parts.append(f"{'last seen in ' if is_old else ''}{status.phase}{step}")
    if status.phase != IDLE:
        parts.append(f"for {status.observed_at - status.phase_since + (age_s if is_old else 0.0):.0f} s")
    if status.is_blocked:
        parts.append("waiting in a collective")
    if is_old:
        parts.append(f"silent for {age_s:.0f} s{'; the stack is current' if observation.dumped_stack else ''}")
    return ", ".join(parts)


def _format_html(observation: RankObservation) -> str:
    frame = find_user_frame(_get_stack(observation))
    location = f" at <code>{html.escape(_format_filename(frame.file))}:{frame.line}</code>" if frame is not None else ""
    rows = []
    for title, frames in _list_sections(observation):
        rows += [f"<div>{html.escape(title)}</div>"] if title else []
        rows += _format_html_frames(frames)
    style = "font-family:monospace;white-space:pre-wrap;margin:2px 0 8px 12px"
    return (
        f"<details open><summary>{html.escape(_format_head(observation))}{location}</summary>"
        f'<div style="{style}">{"".join(rows)}</div></details>'
    )


def _format_html_frames(frames: Sequence[Frame]) -> list[str]:
    """Return the frames as far out as the user's code, or else as dtkit's innermost ones; the others are folded."""
    last_user = max((k for k, frame in enumerate(frames) if frame.kind == "user"), default=-1)
    num_shown = last_user + 1 or min(len(frames), _NUM_INNERMOST)
    rows = [_format_html_frame(frame) for frame in frames]
    folded = "".join(rows[num_shown:])
    if not folded:
        return rows
    count = formatting.format_count(len(frames) - num_shown, "outer frame")
    return [*rows[:num_shown], f"<details><summary>{count}</summary>{folded}</details>"]


_NUM_INNERMOST = 5
_STYLES = {
    "user": "font-weight:bold;border-left:3px solid #e69f00;padding-left:6px",
    "dtkit": "border-left:3px solid #0072b2;padding-left:6px;opacity:.75",
    "library": "border-left:3px solid transparent;padding-left:6px;opacity:.55",
}


def _format_html_frame(frame: Frame) -> str:
    location = html.escape(f"{_format_filename(frame.file)}:{frame.line} in {frame.function}")
    source = html.escape(_get_source_line(frame))
    return f'<div style="{_STYLES.get(frame.kind, "")}">{location}{f"<br>    {source}" if source else ""}</div>'


def _format_filename(file: str) -> str:
    """Return a file's name for the user: a cell's number, or a package's path without the installation's folder."""
    shell = get_shell()
    with contextlib.suppress(AttributeError):  # no shell, or one without cells
        cell_name = shell.compile.format_code_name(file)
        if cell_name is not None:
            return " ".join(cell_name)
    return _INSTALL_FOLDER_PATTERN.sub("", file)


def _get_source_line(frame: Frame) -> str:
    """Return the user's line of code if the notebook has it, else nothing."""
    return linecache.getline(frame.file, frame.line).strip() if frame.kind == "user" else ""

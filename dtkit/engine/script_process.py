"""A fresh process for one rank of a script, under the engine's supervision.

The process leads a session of its own, so that all processes that it starts end with it. Its output is read line by
line. Numbers that it passes to `dtkit.log` arrive through a pipe.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import functools
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtkit._util import timeouts
from dtkit._util.process import end_with_parent
from dtkit.engine.observe.call_output import LOG_DESCRIPTOR_VARIABLE, LineStream
from dtkit.engine.script_interrupt import TRACEBACK_HEAD, ScriptInterrupt, TracebackFilter, strip_rank_prefix
from dtkit.rpc.script_ranks import ELASTIC_VARIABLE, FOLDER_VARIABLE, SLOT_VARIABLE, ScriptFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.engine.observe.call_output import CallOutput
    from dtkit.rpc.script import Script

KILLED = "ScriptKilled"
"""Kind of the error of an elastic script whose process was killed again and again."""

_MAX_RESTARTS = 3
_CHUNK_BYTES = 65536
_MAX_KEPT_LINES = 200  # of the output, for the error
_STARTUP_FOLDER = Path(__file__).parent / "startup"


class ScriptError(Exception):
    """A script's process failed. `kind` and `details` are the error's type and traceback, as printed by the process."""

    def __init__(self, kind: str, message: str, details: str) -> None:
        super().__init__(message)
        self.kind, self.details = kind, details


def run_script(script: Script, environment: Mapping[str, str], output: CallOutput) -> Any:
    """Run a script to its end; return a function's result, or the exit code 0. Raises ScriptError.

    Any exception, such as an interrupt, ends the process and all processes that it started.
    """
    value = _run_processes(script, environment, output)
    if script.shared_folder is not None:
        ScriptFolder(Path(script.shared_folder)).mark_ended(script.slot)
    return value


def _run_processes(script: Script, environment: Mapping[str, str], output: CallOutput) -> Any:
    """Run a process, and another one each time that an elastic script's process is killed."""
    with tempfile.TemporaryDirectory(prefix="dtkit-script-") as folder:
        call, result = Path(folder) / "call", Path(folder) / "result"
        if script.payload is not None:
            call.write_bytes(pickle.dumps((_make_module_path(script), pickle.dumps(script.payload))))
        command, elastic = _make_command(script, call, result), _get_elastic_file(script, Path(folder))
        for remaining in reversed(range(_MAX_RESTARTS + 1)):
            own_environment = _make_script_environment(script, environment) | {ELASTIC_VARIABLE: str(elastic)}
            process = _ScriptProcess(command, script.folder, own_environment, output)
            # waits: for as long as the script runs, in short intervals
            code = process.wait()
            if code >= 0 or not elastic.exists() or not remaining:
                break
            output.add_line(f"the process of {script.title} ended with {_describe_exit(code)}; it is started again")
        outcome = None
        if result.exists():
            # unpickles: written by this engine's own child process
            outcome = pickle.loads(result.read_bytes())
        if code == 0 and script.payload is None:
            return 0
        if code == 0 and outcome is None:  # the function called sys.exit(0)
            return None
        if outcome is not None and outcome[0]:
            if code:
                output.add_line(f"{script.title} returned, and its process then ended with {_describe_exit(code)}")
            return outcome[1]
        if code < 0 and elastic.exists():
            raise ScriptError(KILLED, f"{script.title} ended with {_describe_exit(code)} {_MAX_RESTARTS + 1} times", "")
        raise _make_error(script.title, code, outcome, process.last_lines)


def _get_elastic_file(script: Script, folder: Path) -> Path:
    return folder / "elastic" if script.shared_folder is None else ScriptFolder(Path(script.shared_folder)).elastic_file


def _make_script_environment(script: Script, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a process that starts now; its rank may have changed since the call."""
    made = {**environment, **_make_horovod_environment(script, environment)}
    if script.shared_folder is None:
        return made
    ranks = ScriptFolder(Path(script.shared_folder)).read()
    return {
        **made,
        **ranks.make_environment(script.slot),
        FOLDER_VARIABLE: script.shared_folder,
        SLOT_VARIABLE: str(script.slot),
    }


def _make_command(script: Script, call: Path, result: Path) -> list[str]:
    if script.payload is not None:
        return [sys.executable, "-u", "-m", "dtkit.engine.script_main", str(call), str(result)]
    return [sys.executable, "-u", *(("-m",) if script.is_module else ()), script.name, *script.args]


_HOROVOD_FOLDER = str(Path(__file__).parents[1] / "integrations" / "horovod" / "shim")
"""Folder in which a process finds `horovod`. Other processes don't have it on their path."""


_HOROVOD_VARIABLES = {
    "RANK": "RANK",
    "SIZE": "WORLD_SIZE",
    "LOCAL_RANK": "LOCAL_RANK",
    "LOCAL_SIZE": "LOCAL_WORLD_SIZE",
    "CROSS_RANK": "GROUP_RANK",
    "CROSS_SIZE": "GROUP_WORLD_SIZE",
}
"""horovodrun's names of torchrun's variables."""


def _make_module_path(script: Script) -> list[str]:
    """Return the module path of a function's process, which is the engine's."""
    return [_HOROVOD_FOLDER, *sys.path] if script.has_horovod else sys.path


def _make_horovod_environment(script: Script, environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that let the process find `horovod`, and those that horovodrun sets."""
    if not script.has_horovod:
        return {}
    paths = [_HOROVOD_FOLDER, *filter(None, [os.environ.get("PYTHONPATH")])]
    placement = {f"HOROVOD_{name}": environment[source] for name, source in _HOROVOD_VARIABLES.items()}
    return {"PYTHONPATH": os.pathsep.join(paths), **placement}


def _make_error(title: str, code: int, outcome: Any, last_lines: Sequence[str]) -> ScriptError:
    if outcome is not None:
        return ScriptError(*outcome[1])
    reason = _describe_exit(code)
    lines = [strip_rank_prefix(line) for line in last_lines]
    starts = [k for k, line in enumerate(lines) if line.strip() == TRACEBACK_HEAD]
    if not starts:
        return ScriptError("ScriptError", f"{title} ended with {reason}", "\n".join(lines[-_NUM_SHOWN_LINES:]))
    details = lines[starts[-1] :]
    cause = next((line for line in details[1:] if line and not line[0].isspace()), "")
    if "No module named 'horovod'" in cause:
        cause += ". cluster.torchrun(script, horovod=True) brings dtkit's implementation"
    return ScriptError("ScriptError", f"{title} ended with {reason}: {cause}", "\n".join(details))


def _describe_exit(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"the signal {signal.Signals(-code).name}"


_NUM_SHOWN_LINES = 10


def _is_lost_peer(message: str) -> bool:
    from dtkit.engine.comm.process_group import is_lost_peer_error

    return is_lost_peer_error(RuntimeError(message))


class _ScriptProcess:
    """One process, with threads that read its output."""

    def __init__(self, command: Sequence[str], folder: str, environment: Mapping[str, str], output: CallOutput) -> None:
        self._output = output
        self._filter = TracebackFilter(self._add_shown_line, _is_lost_peer)
        self.last_lines: collections.deque[str] = collections.deque(maxlen=_MAX_KEPT_LINES)
        log_reader, log_writer = os.pipe()
        try:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=_make_environment(environment, log_writer),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(log_writer,),
                start_new_session=True,
                preexec_fn=functools.partial(end_with_parent, os.getpid()),  # noqa: PLW1509 - it calls one function of the system, and no Python code that locks
            )
        except BaseException:
            os.close(log_reader)
            raise
        finally:
            os.close(log_writer)
        assert self._process.stdout is not None
        self._readers = [
            _start_reader(self._process.stdout.fileno(), self._read_lines),
            _start_reader(log_reader, self._read_rows),
        ]
        self._log_reader = log_reader

    def add_line(self, text: str) -> None:
        """Add a printed line, and keep it for the error. Tracebacks of an interrupt are left out."""
        self._filter.add_line(text)

    def _add_shown_line(self, text: str) -> None:
        self.last_lines.append(text)
        self._output.add_line(text)

    def show_progress(self, text: str) -> None:
        """Show a line that has no end yet."""
        self._output.show_progress(text)

    def _read_lines(self, stream: io.FileIO) -> None:
        lines, decoder = LineStream(self), codecs.getincrementaldecoder("utf-8")("replace")
        while chunk := stream.read(_CHUNK_BYTES):  # what there is: a progress bar's line ends late
            lines.write(decoder.decode(chunk))
        lines.flush_partial_line()
        self._filter.close()

    def _read_rows(self, stream: io.FileIO) -> None:
        with io.BufferedReader(stream) as lines:
            for line in lines:
                self._output.add_row(json.loads(line))

    def wait(self) -> int:
        """Wait for the end, and return the exit code; negative for a signal. All processes that it started end too."""
        code = None
        try:
            while code is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = self._process.wait(timeouts.SCRIPT_POLL_S)
        except KeyboardInterrupt as interrupt:
            self._filter.interrupt()
            self._interrupt()
            self._end()
            raise ScriptInterrupt(self._filter.user_frames, self._filter.details) from interrupt
        except BaseException:
            self._interrupt()
            self._end()
            raise
        self._end()
        return code

    def _interrupt(self) -> None:
        """Interrupt the process as Ctrl-C would, and give it a moment to end by itself."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeouts.SCRIPT_INTERRUPT_TIMEOUT_S)

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeouts.SCRIPT_KILL_TIMEOUT_S)
        for reader in self._readers:
            reader.join(timeouts.SCRIPT_OUTPUT_TIMEOUT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        os.close(self._log_reader)


_FORCING_COLORS = ("FORCE_COLOR", "CLICOLOR_FORCE")
"""Variables that ipykernel sets. Progress bars would take the pipe for a terminal, and move its cursor."""


def _make_environment(extra: Mapping[str, str], log_writer: int) -> dict[str, str]:
    """Return the process's environment, whose first import is :mod:`dtkit.engine.startup.sitecustomize`."""
    inherited = {name: value for name, value in os.environ.items() if name not in _FORCING_COLORS}
    environment = {**inherited, **extra, LOG_DESCRIPTOR_VARIABLE: str(log_writer)}
    paths = [str(_STARTUP_FOLDER), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}


def _start_reader(descriptor: int, read: Callable[[io.FileIO], None]) -> threading.Thread:
    def read_to_end() -> None:
        with io.FileIO(os.dup(descriptor)) as stream:
            read(stream)

    thread = threading.Thread(target=read_to_end, name="dtkit-script-output", daemon=True)
    thread.start()
    return thread

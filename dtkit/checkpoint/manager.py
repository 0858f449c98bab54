"""Checkpoints of a run, on the notebook's side: when one is due, and completing it from the ranks' files.

The driver sends a request to all ranks between two steps and goes on with steps. A thread waits until every rank has
written its report, writes the history and ``checkpoint.json``, and renames the folder. Checkpoints are finished one at
a time, in order. A failure is logged as an event of the run, and raised to the caller that requested the checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from dtkit._util import files, formatting, timeouts
from dtkit._util.guard import run_guarded
from dtkit.checkpoint import folders, index, validation
from dtkit.checkpoint.remote_files import read_remote_report
from dtkit.checkpoint.result import CheckpointResult
from dtkit.errors import CheckpointError, ClusterError
from dtkit.types import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dtkit.checkpoint.remote_files import HostFiles
    from dtkit.history.history import History

_NEVER_DUE = 2**31
_WRITTEN_BYTES_PER_S = 150e6  # as two busy cores lost it: for copies, digests, and the system's part of writing


@dataclasses.dataclass(frozen=True)
class CheckpointPolicy:
    """Schedule of a run's own checkpoints, from the arguments of ``cluster.train``."""

    every_steps: int | None = None
    """Steps between checkpoints; None if only the last step has one."""
    folder: Path | None = None
    keep_last: int = 3
    """Number of the run's own checkpoints to keep."""
    every_seconds: float | None = None
    """Seconds between checkpoints, instead of `every_steps`."""
    quiet: bool = False
    """Whether the log leaves out checkpoints that were written."""
    skip_while_writing: bool = False
    """Whether to skip one while another is being written, because snapshots in memory replace it."""
    max_time_share: float | None = None
    """Share of the time that checkpoints may take: a longer pause follows one that took long."""
    lineage: folders.Lineage = ()
    """Runs that this run continues, and its own name: other runs' checkpoints are never removed."""
    default_folder: Path | None = None
    """The folder for checkpoints that the user requests without naming one."""

    def is_due(self, step: int, total_steps: int, last_request: tuple[int, float], last_cost_s: float) -> bool:
        """Return whether to save after `step` of `total_steps` steps.

        `last_request` is (step, time), and `last_cost_s` the time that the last one took from the training.
        """
        if self.folder is None or step <= last_request[0]:
            return False
        if self.every_seconds is not None:
            pause_s = 0.0 if self.max_time_share is None else last_cost_s / self.max_time_share
            return time.monotonic() - last_request[1] >= max(self.every_seconds, pause_s)
        is_last = step == total_steps and not self.quiet
        return is_last or (self.every_steps is not None and step % self.every_steps == 0)


@dataclasses.dataclass(eq=False)
class CheckpointRequest:
    """Request for one checkpoint."""

    path: Path
    keep_last: int | None
    policy: CheckpointPolicy | None = None
    """None if it is for one call."""
    is_by_user: bool = False
    """Whether the user asked for it, so that charts have a mark."""
    future: Future[CheckpointResult] = dataclasses.field(default_factory=Future)
    folder: Path | None = None
    token: str = ""
    started_at: float = 0.0
    is_fetched: bool = False
    """Whether the notebook fetches files of ranks whose hosts don't see the folder."""

    def result(self, step_timeout: float) -> CheckpointResult:
        """Wait until it is written. Raises CheckpointError."""
        timeout = step_timeout + timeouts.WRITE_STALL_TIMEOUT_S
        try:
            return self.future.result(timeout)
        except TimeoutError:
            raise CheckpointError(f"the engines did not write to {self.path} within {timeout:.0f} s") from None

    def fail(self, reason: str | BaseException) -> None:
        """Remove its folder, and raise the error in callers that wait for it."""
        if self.folder is not None:
            folders.abandon_checkpoint(self.folder)
        if not self.future.done():
            error = reason if isinstance(reason, CheckpointError) else CheckpointError(str(reason))
            self.future.set_exception(error)


class CheckpointManager:
    """Checkpoints of one run. The run's driver calls it; only the writing thread finishes checkpoints."""

    def __init__(self, history: History, on_change: Callable[[], None]) -> None:
        self.policy, self.snapshot_policy = CheckpointPolicy(), CheckpointPolicy(quiet=True)
        """What the user asked for, and what the run needs to recover from a lost engine."""
        self.describe: Callable[[], Mapping[str, Any]] = dict
        """Function that returns further fields of checkpoint.json: spec and callbacks, as they are now."""
        self.last_result: CheckpointResult | None = None
        """The last checkpoint that was written for the user."""
        self.on_snapshot: Callable[[], object] = bool
        """Function to call, on the writing thread, after each checkpoint of `snapshot_policy`."""
        self.host_files: HostFiles | None = None
        """Access to the files of ranks whose hosts don't see the folder; None if all must see it."""
        self._history, self._on_change = history, on_change
        self._requests: list[CheckpointRequest] = []
        self._last_requests: dict[CheckpointPolicy, tuple[int, float]] = {}  # (step, time)
        self._started_at = 0, time.monotonic()
        self._total_steps = 0
        self._last_snapshot_s, self._last_quiet_error = 0.0, ""  # time that the last snapshot took from the training
        # locks: for one checkpoint, which fails once ranks stop writing
        self._finish_lock = threading.Lock()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    # -- when -------------------------------------------------------------------------------------------------

    def reset_to(self, step: int) -> None:
        """Start at this step, which needs no checkpoint."""
        self._started_at = step, time.monotonic()
        self._last_requests.clear()

    def add_request(self, request: CheckpointRequest) -> None:
        """Save before the next step."""
        self._requests.append(request)

    @property
    def has_requests(self) -> bool:
        """Whether the user asked for a checkpoint that was not sent yet."""
        return bool(self._requests)

    def is_due(self, step: int, total_steps: int) -> bool:
        """Return whether to save after `step` of `total_steps` steps."""
        self._total_steps = total_steps
        return self.has_requests or self._find_due_policy(step) is not None

    def _find_due_policy(self, step: int) -> CheckpointPolicy | None:
        for policy in (self.policy, self.snapshot_policy):
            is_skipped = policy.skip_while_writing and self._is_writing
            last_request = self._last_requests.get(policy, self._started_at)
            if not is_skipped and policy.is_due(step, self._total_steps, last_request, self._last_snapshot_s):
                return policy
        return None

    @property
    def _is_writing(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def steps_until_due(self, step: int) -> int:
        """Return the number of steps until the next checkpoint."""
        periods = [
            policy.every_steps for policy in (self.policy, self.snapshot_policy) if policy.every_steps is not None
        ]
        return min((period - step % period for period in periods), default=_NEVER_DUE)

    def begin_next(self, step: int) -> CheckpointRequest | None:
        """Return the request to send now, with its folder; None if the folder can't be created."""
        request = self._requests.pop(0) if self._requests else self._make_scheduled_request(step)
        request.started_at, request.is_fetched = time.monotonic(), self.host_files is not None
        try:
            request.folder = folders.begin_checkpoint(request.path)
            request.token = os.urandom(8).hex()
            files.write_synced(request.folder / folders.TOKEN_FILE, request.token)
        except OSError as error:
            self._fail_request(request, step, _format_os_error(request, error))
            return None
        return request

    def _make_scheduled_request(self, step: int) -> CheckpointRequest:
        policy = self._find_due_policy(step)
        assert policy is not None
        assert policy.folder is not None
        self._last_requests[policy] = step, time.monotonic()
        return CheckpointRequest(policy.folder, policy.keep_last, policy)

    def on_cancel(self, request: CheckpointRequest) -> None:
        """Take back a request, because ranks were at different steps. It will be due again."""
        assert request.folder is not None
        self._remove_remote_files(request)
        folders.abandon_checkpoint(request.folder)
        request.folder = None
        if request.policy is None:
            self._requests.insert(0, request)
        else:
            self._last_requests.pop(request.policy, None)

    def on_failure(self, request: CheckpointRequest, step: int, error: BaseException) -> None:
        """Fail a request that the engines could not serve."""
        self._fail_request(request, step, str(error).partition("\n")[0])

    def cancel_requests(self, reason: str) -> None:
        """Fail requests that were not sent, after the run has ended or lost an engine."""
        for request in self._requests:
            request.fail(reason)
        self._requests.clear()

    # -- writing ----------------------------------------------------------------------------------------------

    def on_result(self, request: CheckpointRequest, step: int, values: Sequence[Any]) -> None:
        """Finish a checkpoint in a thread, now that all ranks have copied their state and are writing."""
        run_guarded(
            lambda: self._start_writing(request, step, values),
            lambda error: self._fail_request(request, step, _format_error(error)),
        )

    def _start_writing(self, request: CheckpointRequest, step: int, values: Sequence[Any]) -> None:
        metadata = {**self.describe(), "step": step, "torch": values[0]["torch"]}  # calls the user's callbacks
        args = request, metadata, list(values), self._copy_history(request)
        thread = threading.Thread(target=self._finish_checkpoint, args=args, name="dtkit-checkpoint", daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def _copy_history(self, request: CheckpointRequest) -> History:
        """Return the history up to now; an empty one for recovery, since the run keeps its own."""
        if request.policy is not None and request.policy.quiet:
            return self._history.copy_until(0, 0, 0)
        return self._history.copy_until(len(self._history), len(self._history.events), len(self._history.evaluations))

    def join(self, timeout: float = timeouts.WRITE_STALL_TIMEOUT_S) -> None:
        """Wait for checkpoints that are being written, up to `timeout`."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self, timeout: float) -> None:
        """Wait for checkpoints that are being written, up to `timeout`, and abandon the rest."""
        self.join(timeout)
        self._closing.set()

    def _finish_checkpoint(
        self, request: CheckpointRequest, metadata: dict[str, Any], values: list[dict[str, Any]], history: History
    ) -> None:
        is_snapshot = request.policy is not None and request.policy.quiet
        with self._finish_lock:
            try:
                result = self._write_checkpoint(request, metadata, values, history)
            except OSError as error:
                self._fail_request(request, metadata["step"], _format_os_error(request, error))
                return
            except (CheckpointError, ClusterError) as error:
                self._fail_request(request, metadata["step"], str(error))
                return
            self._remove_remote_files(request)
            if is_snapshot:
                own_s = result.blocked_s + result.nbytes / _WRITTEN_BYTES_PER_S
                self._last_snapshot_s = result.duration_s if request.is_fetched else own_s  # hosts share a network
            else:
                self.last_result = result
                self._log_result(result, "save" if request.is_by_user else "checkpoint")
            request.future.set_result(result)
        if is_snapshot:
            self.on_snapshot()

    def _log_result(self, result: CheckpointResult, kind: str) -> None:
        size, duration = formatting.format_bytes(result.nbytes), formatting.format_duration(result.duration_s)
        self._add_event(result.step, kind, f"saved {result.path.name}, {size} in {duration}")

    def _write_checkpoint(
        self, request: CheckpointRequest, metadata: dict[str, Any], values: list[dict[str, Any]], history: History
    ) -> CheckpointResult:
        assert request.folder is not None
        if errors := [value["error"] for value in values if value["error"]]:
            raise CheckpointError("; ".join(errors))
        remote_ranks = {rank for rank, value in enumerate(values) if value["is_remote"]}
        reports = self._wait_for_reports(request, len(values), remote_ranks)
        if errors := [report["error"] for report in reports if "error" in report]:
            raise CheckpointError("; ".join(errors))
        file_entries = {name: entry for report in reports for name, entry in report["file"].items()}
        file_entries[validation.HISTORY_FILE] = _write_history(request.folder, history)
        for temporary in [request.folder / folders.TOKEN_FILE, *request.folder.glob("report-*.json")]:
            temporary.unlink()
        lineage = () if request.policy is None else request.policy.lineage
        metadata |= {
            "files": file_entries,
            "index": index.build_index(reports),
            "facts": index.merge_facts([report["facts"] for report in reports]),
            "line": lineage,
            "run": self.policy.lineage,
        }
        path = folders.finish_checkpoint(request.folder, metadata)
        if request.keep_last is not None:
            folders.prune_checkpoints(request.path, request.keep_last, lineage)
        nbytes, duration_s = (
            sum(entry["bytes"] for entry in file_entries.values()),
            time.monotonic() - request.started_at,
        )
        return CheckpointResult(path, metadata["step"], nbytes, duration_s, max(value["seconds"] for value in values))

    def _wait_for_reports(
        self, request: CheckpointRequest, world_size: int, remote_ranks: set[int]
    ) -> list[dict[str, Any]]:
        """Return the reports of all ranks, once they are written and the remote ranks' files were fetched."""
        reports: dict[int, dict[str, Any]] = {}
        size, changed_at = -1, time.monotonic()
        assert request.folder is not None
        while len(reports) < world_size:
            new_size = 0
            for rank in set(range(world_size)) - reports.keys():
                report, nbytes = self._read_report(request, rank, is_remote=rank in remote_ranks)
                new_size += nbytes
                if report is not None:
                    reports[rank] = report
            if (new_size := new_size + _measure_folder(request.folder)) != size:
                size, changed_at = new_size, time.monotonic()
            missing = ", ".join(map(str, sorted(set(range(world_size)) - reports.keys())))
            if time.monotonic() - changed_at > timeouts.WRITE_STALL_TIMEOUT_S:
                raise CheckpointError(f"rank {missing} has written nothing for {timeouts.WRITE_STALL_TIMEOUT_S:.0f} s")
            poll_s = timeouts.REMOTE_WRITE_POLL_S if remote_ranks else timeouts.WRITE_POLL_S
            if missing and self._closing.wait(poll_s):
                raise CheckpointError(f"the cluster was closed before rank {missing} had written its part")
        return [reports[rank] for rank in range(world_size)]

    def _read_report(
        self, request: CheckpointRequest, rank: int, *, is_remote: bool
    ) -> tuple[dict[str, Any] | None, int]:
        """Return a rank's report, or None, and the bytes that it has written on a remote host."""
        assert request.folder is not None
        if is_remote:
            assert self.host_files is not None
            return read_remote_report(self.host_files, rank, request.token, request.folder)
        with contextlib.suppress(FileNotFoundError):
            text = (request.folder / folders.get_report_filename(rank)).read_text(encoding="utf-8")
            return json.loads(text), 0
        return None, 0

    def _remove_remote_files(self, request: CheckpointRequest) -> None:
        if self.host_files is not None and request.token:
            self.host_files.remove(request.token)

    def _fail_request(self, request: CheckpointRequest, step: int, reason: str) -> None:
        self._remove_remote_files(request)
        text = f"the checkpoint of step {step} was not written: {reason}"
        is_quiet = request.policy is not None and request.policy.quiet  # nobody asked for it: a reason is told once
        if not is_quiet or reason != self._last_quiet_error:
            self._add_event(step, "error", f"{text}. Older ones are unchanged")
        if is_quiet:
            self._last_quiet_error = reason
        request.fail(text)

    def _add_event(self, step: int, kind: str, text: str) -> None:
        self._history.add(Event(step, kind, text, time.time()))
        self._on_change()


def _format_error(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _format_os_error(request: CheckpointRequest, error: OSError) -> str:
    """Return the system's error, and the remedy."""
    reason = error.strerror or error
    return f"{request.path}: {reason}. Name a folder with free space that the notebook and all engines can write to"


def _measure_folder(folder: Path) -> int:
    """Return the number of bytes and of files in a folder, which grows while ranks write."""
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += 1 + path.stat().st_size
    return total


def _write_history(folder: Path, history: History) -> dict[str, Any]:
    path = folder / validation.HISTORY_FILE
    history.to_jsonl(path)
    files.sync(path)
    return {"bytes": path.stat().st_size, "digest": validation.compute_digest(path)}

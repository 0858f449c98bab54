"""A run's saves, as the notebook sees to them: when one is due, and what makes a checkpoint of what the ranks wrote.

The driver sends a save to all ranks between two steps and goes on with steps. A thread here waits until every rank has
reported in the folder, writes history and ``checkpoint.json``, and gives the folder its name. Saves are finished one
after the other, in order. What goes wrong becomes an event of the run, and the error of whoever asked for the save.
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

from dtkit._util import formatting
from dtkit._util.guard import run_guarded
from dtkit.checkpoint import checkpoint
from dtkit.errors import CheckpointError
from dtkit.types import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dtkit.history.history import History

WRITE_STALL_TIMEOUT_S = 120.0  # without a byte more in the folder: a rank has ended, or its disk hangs
_POLL_S = 0.02
_NEVER_DUE = 2**31


@dataclasses.dataclass(frozen=True)
class CheckpointResult:
    """A checkpoint that was written."""

    path: Path
    step: int
    nbytes: int
    duration_s: float
    """From the step's end until it was whole on the disk."""
    blocked_s: float
    """Of these, how long training stood still."""

    def __repr__(self) -> str:
        took = f"{formatting.format_duration(self.duration_s)} (training stood still for {formatting.format_duration(self.blocked_s)})"
        return f"saved step {self.step}, {formatting.format_bytes(self.nbytes)} in {took}: {self.path}"


@dataclasses.dataclass(frozen=True)
class CheckpointPolicy:
    """The saves that a run makes by itself, as ``cluster.train`` was asked for."""

    every_steps: int | None = None
    """Steps from one to the next; None for none but those asked for by hand."""
    folder: Path | None = None
    keep_last: int = 3
    """How many stay of those that it made by itself."""
    every_seconds: float | None = None
    """Instead of `every`: seconds from one to the next."""
    quiet: bool = False
    """Whether the log says nothing of those that were written."""
    skip_while_writing: bool = False
    """Whether one is left out while another is being written: there are others, in memory."""
    lineage: checkpoint.Lineage = ()
    """This run's name, after those of the runs that it goes on from: `keep` removes none of another run's."""

    def is_due(self, step: int, total_steps: int, last_request: tuple[int, float]) -> bool:
        """Whether to save after so many steps, of `last` in all, after one that was asked for at (step, time)."""
        if self.folder is None or step <= last_request[0]:
            return False
        if self.every_steps is not None:
            return step % self.every_steps == 0 or (step == total_steps and not self.quiet)
        return self.every_seconds is not None and time.monotonic() - last_request[1] >= self.every_seconds


@dataclasses.dataclass(eq=False)
class CheckpointRequest:
    """One save, from when it is asked for."""

    path: Path
    keep_last: int | None
    policy: CheckpointPolicy | None = None
    """None for one that was asked for by hand."""
    future: Future[CheckpointResult] = dataclasses.field(default_factory=Future)
    folder: Path | None = None
    token: str = ""
    started_at: float = 0.0

    def make_args(self) -> dict[str, Any]:
        """What the engines are told."""
        return {"folder": str(self.folder), "token": self.token}

    def result(self, step_timeout: float) -> CheckpointResult:
        """Wait until it is written. Raises CheckpointError."""
        try:
            return self.future.result(step_timeout + WRITE_STALL_TIMEOUT_S)
        except TimeoutError:
            raise CheckpointError(
                f"the engines did not write to {self.path} within {step_timeout + WRITE_STALL_TIMEOUT_S:.0f} s"
            ) from None

    def fail(self, reason: str | BaseException) -> None:
        """Tell whoever waits for it."""
        if self.folder is not None:
            checkpoint.abandon_checkpoint(self.folder)
        if not self.future.done():
            error = reason if isinstance(reason, CheckpointError) else CheckpointError(str(reason))
            self.future.set_exception(error)


class CheckpointManager:
    """The saves of one run. All but `finish` is called by the run's driver, or when that has ended."""

    def __init__(self, history: History, on_change: Callable[[], None]) -> None:
        self.policy, self.snapshot_policy = CheckpointPolicy(), CheckpointPolicy(quiet=True)
        """What the user asked for; what the run may have to go back to when an engine is lost."""
        self.describe: Callable[[], Mapping[str, Any]] = dict
        """What checkpoint.json is to say besides: spec and callbacks, as they are now."""
        self._history, self._on_change = history, on_change
        self._requests: list[CheckpointRequest] = []
        self._last_requests: dict[
            CheckpointPolicy, tuple[int, float]
        ] = {}  # step and time of the last one of each plan
        self._started_at = 0, time.monotonic()
        self._total_steps = 0
        # locks: for one checkpoint, which fails once ranks stop writing
        self._finish_lock = threading.Lock()  # saves are finished one after the other
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    # -- when -------------------------------------------------------------------------------------------------

    def reset_to(self, step: int) -> None:
        """A run begins at this step: it need not be saved."""
        self._started_at = step, time.monotonic()
        self._last_requests.clear()

    def add_request(self, request: CheckpointRequest) -> None:
        """At the next boundary between two steps."""
        self._requests.append(request)

    @property
    def has_requests(self) -> bool:
        """Whether somebody asked for one by hand."""
        return bool(self._requests)

    def is_due(self, step: int, total_steps: int) -> bool:
        """Whether to save after so many steps, of `last` in all."""
        self._total_steps = total_steps
        return self.has_requests or self._find_due_policy(step) is not None

    def _find_due_policy(self, step: int) -> CheckpointPolicy | None:
        plans = [p for p in (self.policy, self.snapshot_policy) if not (p.skip_while_writing and self._is_writing)]
        return next(
            (p for p in plans if p.is_due(step, self._total_steps, self._last_requests.get(p, self._started_at))), None
        )

    @property
    def _is_writing(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def steps_until_due(self, step: int) -> int:
        """Steps until the next save is due."""
        found = [plan.every_steps for plan in (self.policy, self.snapshot_policy) if plan.every_steps is not None]
        return min((every - step % every for every in found), default=_NEVER_DUE)

    def begin_next(self, step: int) -> CheckpointRequest | None:
        """The save to send now, its folder made; None where that can't be."""
        save = self._requests.pop(0) if self._requests else self._make_scheduled_request(step)
        save.started_at = time.monotonic()
        try:
            save.folder = checkpoint.begin_checkpoint(save.path)
            save.token = os.urandom(8).hex()
            checkpoint.write_and_sync(save.folder / checkpoint.TOKEN_FILE, save.token)
        except OSError as error:
            self._fail_request(save, step, _format_os_error(save, error))
            return None
        return save

    def _make_scheduled_request(self, step: int) -> CheckpointRequest:
        plan = self._find_due_policy(step)
        assert plan is not None
        assert plan.folder is not None
        self._last_requests[plan] = step, time.monotonic()
        return CheckpointRequest(plan.folder, plan.keep_last, plan)

    def on_cancel(self, request: CheckpointRequest) -> None:
        """Ranks did not stand at that step: it will be asked for again, or is due again."""
        assert request.folder is not None
        checkpoint.abandon_checkpoint(request.folder)
        request.folder = None
        if request.policy is None:
            self._requests.insert(0, request)
        else:
            self._last_requests.pop(request.policy, None)

    def on_failure(self, request: CheckpointRequest, step: int, error: BaseException) -> None:
        """The engines could not take it."""
        self._fail_request(request, step, str(error).partition("\n")[0])

    def cancel_requests(self, reason: str) -> None:
        """Those that were not sent yet will not be: the run has ended, or an engine is lost."""
        for save in self._requests:
            save.fail(reason)
        self._requests.clear()

    # -- what makes a checkpoint of it ------------------------------------------------------------------------

    def on_result(self, request: CheckpointRequest, step: int, values: Sequence[Any]) -> None:
        """All ranks have copied their state as after `step` steps, and are writing."""
        run_guarded(
            lambda: self._start_writing(request, step, values),
            lambda error: self._fail_request(request, step, _format_error(error)),
        )

    def _start_writing(self, request: CheckpointRequest, step: int, values: Sequence[Any]) -> None:
        head = {**self.describe(), "step": step, "torch": values[0]["torch"]}  # callbacks speak, which are the user's
        upto = len(self._history), len(self._history.events), len(self._history.evaluations)
        args = request, head, list(values), self._history.copy_until(*upto)
        thread = threading.Thread(target=self._finish_checkpoint, args=args, name="dtkit-checkpoint", daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def join(self, timeout: float = WRITE_STALL_TIMEOUT_S) -> None:
        """Wait for saves that are at work, for so long at most."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self, timeout: float) -> None:
        """Let saves that are at work end, for so long; then give them up."""
        self.join(timeout)
        self._closing.set()

    def _finish_checkpoint(
        self, request: CheckpointRequest, metadata: dict[str, Any], values: list[dict[str, Any]], history: History
    ) -> None:
        with self._finish_lock:
            try:
                saved = self._write_checkpoint(request, metadata, values, history)
            except OSError as error:
                self._fail_request(request, metadata["step"], _format_os_error(request, error))
            except CheckpointError as error:
                self._fail_request(request, metadata["step"], str(error))
            else:
                if request.policy is None or not request.policy.quiet:
                    self._log_result(saved)
                request.future.set_result(saved)

    def _log_result(self, result: CheckpointResult) -> None:
        text = f"saved {result.path.name}, {formatting.format_bytes(result.nbytes)} in {formatting.format_duration(result.duration_s)}"
        self._add_event(result.step, "note", text)

    def _write_checkpoint(
        self, request: CheckpointRequest, metadata: dict[str, Any], values: list[dict[str, Any]], history: History
    ) -> CheckpointResult:
        assert request.folder is not None
        if errors := [value["error"] for value in values if value["error"]]:
            raise CheckpointError("; ".join(errors))
        reports = self._wait_for_reports(request.folder, len(values))
        if errors := [report["error"] for report in reports if "error" in report]:
            raise CheckpointError("; ".join(errors))
        files = {name: written for report in reports for name, written in report["file"].items()}
        files[checkpoint.HISTORY_FILE] = _write_history(request.folder, history)
        for left in [request.folder / checkpoint.TOKEN_FILE, *request.folder.glob("report-*.json")]:
            left.unlink()
        metadata |= {
            "files": files,
            "index": checkpoint.build_index(reports),
            "facts": checkpoint.merge_facts([report["facts"] for report in reports]),
            "line": () if request.policy is None else request.policy.lineage,
        }
        path = checkpoint.finish_checkpoint(request.folder, metadata)
        if request.keep_last is not None:
            checkpoint.prune_checkpoints(
                request.path, request.keep_last, () if request.policy is None else request.policy.lineage
            )
        stood, size = max(value["seconds"] for value in values), sum(file["bytes"] for file in files.values())
        return CheckpointResult(path, metadata["step"], size, time.monotonic() - request.started_at, stood)

    def _wait_for_reports(self, folder: Path, world_size: int) -> list[dict[str, Any]]:
        """What every rank says came of its part, once all have."""
        found: dict[int, dict[str, Any]] = {}
        grown, since = -1, time.monotonic()
        while len(found) < world_size:
            for rank in set(range(world_size)) - found.keys():
                with contextlib.suppress(FileNotFoundError):
                    text = (folder / checkpoint.get_report_filename(rank)).read_text(encoding="utf-8")
                    found[rank] = json.loads(text)
            if (size := _measure_folder(folder)) != grown:
                grown, since = size, time.monotonic()
            missing = ", ".join(map(str, sorted(set(range(world_size)) - found.keys())))
            if time.monotonic() - since > WRITE_STALL_TIMEOUT_S:
                raise CheckpointError(f"rank {missing} has written nothing for {WRITE_STALL_TIMEOUT_S:.0f} s")
            if missing and self._closing.wait(_POLL_S):
                raise CheckpointError(f"the cluster was closed before rank {missing} had written its part")
        return [found[rank] for rank in range(world_size)]

    def _fail_request(self, request: CheckpointRequest, step: int, reason: str) -> None:
        self._add_event(
            step, "error", f"the checkpoint of step {step} was not written: {reason}. Older ones are as they were"
        )
        request.fail(f"the checkpoint of step {step} was not written: {reason}")

    def _add_event(self, step: int, kind: str, text: str) -> None:
        self._history.add(Event(step, kind, text, time.time()))
        self._on_change()


def _format_error(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _format_os_error(request: CheckpointRequest, error: OSError) -> str:
    """What the system says of a folder, and what to do."""
    why = error.strerror or error
    return f"{request.path}: {why}. Name a folder that the notebook and all engines can write to, with room for it"


def _measure_folder(folder: Path) -> int:
    """Bytes in a folder, and files: what grows while ranks write."""
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += 1 + path.stat().st_size
    return total


def _write_history(folder: Path, history: History) -> dict[str, Any]:
    path = folder / checkpoint.HISTORY_FILE
    history.to_jsonl(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "digest": checkpoint.compute_digest(path)}

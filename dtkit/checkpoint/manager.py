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
from dtkit._util.guard import attempt
from dtkit.checkpoint import checkpoint
from dtkit.errors import CheckpointError
from dtkit.types import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dtkit.history.history import History

STALL_S = 120.0  # without a byte more in the folder: a rank has ended, or its disk hangs
_LOOK_S = 0.02
_FAR = 2**31


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint that was written."""

    path: Path
    step: int
    nbytes: int
    seconds: float
    """From the step's end until it was whole on the disk."""
    stood_s: float
    """Of these, how long training stood still."""

    def __repr__(self) -> str:
        took = f"{formatting.duration(self.seconds)} (training stood still for {formatting.duration(self.stood_s)})"
        return f"saved step {self.step}, {formatting.size(self.nbytes)} in {took}: {self.path}"


@dataclasses.dataclass(frozen=True)
class Saves:
    """The saves that a run makes by itself, as ``cluster.train`` was asked for."""

    every: int | None = None
    """Steps from one to the next; None for none but those asked for by hand."""
    to: Path | None = None
    keep: int = 3
    """How many stay of those that it made by itself."""
    seconds: float | None = None
    """Instead of `every`: seconds from one to the next."""
    quiet: bool = False
    """Whether the log says nothing of those that were written."""
    yields: bool = False
    """Whether one is left out while another is being written: there are others, in memory."""
    line: checkpoint.Line = ()
    """This run's name, after those of the runs that it goes on from: `keep` removes none of another run's."""

    def due(self, step: int, last: int, asked: tuple[int, float]) -> bool:
        """Whether to save after so many steps, of `last` in all, after one that was asked for at (step, time)."""
        if self.to is None or step <= asked[0]:
            return False
        if self.every is not None:
            return step % self.every == 0 or (step == last and not self.quiet)
        return self.seconds is not None and time.monotonic() - asked[1] >= self.seconds


@dataclasses.dataclass(eq=False)
class Save:
    """One save, from when it is asked for."""

    path: Path
    keep: int | None
    plan: Saves | None = None
    """None for one that was asked for by hand."""
    done: Future[Saved] = dataclasses.field(default_factory=Future)
    folder: Path | None = None
    token: str = ""
    begun: float = 0.0

    def args(self) -> dict[str, Any]:
        """What the engines are told."""
        return {"folder": str(self.folder), "token": self.token}

    def result(self, patience: float) -> Saved:
        """Wait until it is written. Raises CheckpointError."""
        try:
            return self.done.result(patience + STALL_S)
        except TimeoutError:
            raise CheckpointError(
                f"the engines did not write to {self.path} within {patience + STALL_S:.0f} s"
            ) from None

    def fail(self, why: str | BaseException) -> None:
        """Tell whoever waits for it."""
        if self.folder is not None:
            checkpoint.abandon(self.folder)
        if not self.done.done():
            error = why if isinstance(why, CheckpointError) else CheckpointError(str(why))
            self.done.set_exception(error)


class Saver:
    """The saves of one run. All but `finish` is called by the run's driver, or when that has ended."""

    def __init__(self, history: History, changed: Callable[[], None]) -> None:
        self.plan, self.snapshots = Saves(), Saves(quiet=True)
        """What the user asked for; what the run may have to go back to when an engine is lost."""
        self.describe: Callable[[], Mapping[str, Any]] = dict
        """What checkpoint.json is to say besides: spec and callbacks, as they are now."""
        self._history, self._changed = history, changed
        self._wanted: list[Save] = []
        self._asked: dict[Saves, tuple[int, float]] = {}  # step and time of the last one of each plan
        self._begun = 0, time.monotonic()
        self._last = 0
        # locks: for one checkpoint, which fails once ranks stop writing
        self._order = threading.Lock()  # saves are finished one after the other
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    # -- when -------------------------------------------------------------------------------------------------

    def begin_at(self, step: int) -> None:
        """A run begins at this step: it need not be saved."""
        self._begun = step, time.monotonic()
        self._asked.clear()

    def want(self, save: Save) -> None:
        """At the next boundary between two steps."""
        self._wanted.append(save)

    @property
    def wanted(self) -> bool:
        """Whether somebody asked for one by hand."""
        return bool(self._wanted)

    def due(self, step: int, last: int) -> bool:
        """Whether to save after so many steps, of `last` in all."""
        self._last = last
        return self.wanted or self._due(step) is not None

    def _due(self, step: int) -> Saves | None:
        plans = [p for p in (self.plan, self.snapshots) if not (p.yields and self._writing)]
        return next((p for p in plans if p.due(step, self._last, self._asked.get(p, self._begun))), None)

    @property
    def _writing(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def room(self, step: int) -> int:
        """Steps until the next save is due."""
        found = [plan.every for plan in (self.plan, self.snapshots) if plan.every is not None]
        return min((every - step % every for every in found), default=_FAR)

    def next(self, step: int) -> Save | None:
        """The save to send now, its folder made; None where that can't be."""
        save = self._wanted.pop(0) if self._wanted else self._regular(step)
        save.begun = time.monotonic()
        try:
            save.folder = checkpoint.begin(save.path)
            save.token = os.urandom(8).hex()
            checkpoint.write_text(save.folder / checkpoint.TOKEN, save.token)
        except OSError as error:
            self._failed(save, step, _told(save, error))
            return None
        return save

    def _regular(self, step: int) -> Save:
        plan = self._due(step)
        assert plan is not None
        assert plan.to is not None
        self._asked[plan] = step, time.monotonic()
        return Save(plan.to, plan.keep, plan)

    def refused(self, save: Save) -> None:
        """Ranks did not stand at that step: it will be asked for again, or is due again."""
        assert save.folder is not None
        checkpoint.abandon(save.folder)
        save.folder = None
        if save.plan is None:
            self._wanted.insert(0, save)
        else:
            self._asked.pop(save.plan, None)

    def failed(self, save: Save, step: int, error: BaseException) -> None:
        """The engines could not take it."""
        self._failed(save, step, str(error).partition("\n")[0])

    def drop(self, why: str) -> None:
        """Those that were not sent yet will not be: the run has ended, or an engine is lost."""
        for save in self._wanted:
            save.fail(why)
        self._wanted.clear()

    # -- what makes a checkpoint of it ------------------------------------------------------------------------

    def landed(self, save: Save, step: int, values: Sequence[Any]) -> None:
        """All ranks have copied their state as after `step` steps, and are writing."""
        attempt(lambda: self._write(save, step, values), lambda error: self._failed(save, step, _word(error)))

    def _write(self, save: Save, step: int, values: Sequence[Any]) -> None:
        head = {**self.describe(), "step": step, "torch": values[0]["torch"]}  # callbacks speak, which are the user's
        upto = len(self._history), len(self._history.events), len(self._history.evaluations)
        args = save, head, list(values), self._history.until(*upto)
        thread = threading.Thread(target=self._finish, args=args, name="dtkit-checkpoint", daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def join(self, timeout: float = STALL_S) -> None:
        """Wait for saves that are at work, for so long at most."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def settle(self, timeout: float) -> None:
        """Let saves that are at work end, for so long; then give them up."""
        self.join(timeout)
        self._closing.set()

    def _finish(self, save: Save, head: dict[str, Any], values: list[dict[str, Any]], history: History) -> None:
        with self._order:
            try:
                saved = self._made(save, head, values, history)
            except OSError as error:
                self._failed(save, head["step"], _told(save, error))
            except CheckpointError as error:
                self._failed(save, head["step"], str(error))
            else:
                if save.plan is None or not save.plan.quiet:
                    self._tell(saved)
                save.done.set_result(saved)

    def _tell(self, saved: Saved) -> None:
        text = f"saved {saved.path.name}, {formatting.size(saved.nbytes)} in {formatting.duration(saved.seconds)}"
        self._note(saved.step, "note", text)

    def _made(self, save: Save, head: dict[str, Any], values: list[dict[str, Any]], history: History) -> Saved:
        assert save.folder is not None
        if errors := [value["error"] for value in values if value["error"]]:
            raise CheckpointError("; ".join(errors))
        reports = self._reports(save.folder, len(values))
        if errors := [report["error"] for report in reports if "error" in report]:
            raise CheckpointError("; ".join(errors))
        files = {name: written for report in reports for name, written in report["file"].items()}
        files[checkpoint.HISTORY] = _write_history(save.folder, history)
        for left in [save.folder / checkpoint.TOKEN, *save.folder.glob("report-*.json")]:
            left.unlink()
        head |= {
            "files": files,
            "index": checkpoint.index_of(reports),
            "facts": checkpoint.merge([report["facts"] for report in reports]),
            "line": () if save.plan is None else save.plan.line,
        }
        path = checkpoint.finish(save.folder, head)
        if save.keep is not None:
            checkpoint.prune(save.path, save.keep, () if save.plan is None else save.plan.line)
        stood, size = max(value["seconds"] for value in values), sum(file["bytes"] for file in files.values())
        return Saved(path, head["step"], size, time.monotonic() - save.begun, stood)

    def _reports(self, folder: Path, ranks: int) -> list[dict[str, Any]]:
        """What every rank says came of its part, once all have."""
        found: dict[int, dict[str, Any]] = {}
        grown, since = -1, time.monotonic()
        while len(found) < ranks:
            for rank in set(range(ranks)) - found.keys():
                with contextlib.suppress(FileNotFoundError):
                    text = (folder / checkpoint.report_file(rank)).read_text(encoding="utf-8")
                    found[rank] = json.loads(text)
            if (size := _size(folder)) != grown:
                grown, since = size, time.monotonic()
            missing = ", ".join(map(str, sorted(set(range(ranks)) - found.keys())))
            if time.monotonic() - since > STALL_S:
                raise CheckpointError(f"rank {missing} has written nothing for {STALL_S:.0f} s")
            if missing and self._closing.wait(_LOOK_S):
                raise CheckpointError(f"the cluster was closed before rank {missing} had written its part")
        return [found[rank] for rank in range(ranks)]

    def _failed(self, save: Save, step: int, why: str) -> None:
        self._note(step, "error", f"the checkpoint of step {step} was not written: {why}. Older ones are as they were")
        save.fail(f"the checkpoint of step {step} was not written: {why}")

    def _note(self, step: int, kind: str, text: str) -> None:
        self._history.add(Event(step, kind, text, time.time()))
        self._changed()


def _word(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _told(save: Save, error: OSError) -> str:
    """What the system says of a folder, and what to do."""
    why = error.strerror or error
    return f"{save.path}: {why}. Name a folder that the notebook and all engines can write to, with room for it"


def _size(folder: Path) -> int:
    """Bytes in a folder, and files: what grows while ranks write."""
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += 1 + path.stat().st_size
    return total


def _write_history(folder: Path, history: History) -> dict[str, Any]:
    path = folder / checkpoint.HISTORY
    history.to_jsonl(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "digest": checkpoint.digest_of(path)}

"""Commands of a page to its run, and reports of their effect.

A button's callback runs on the kernel's thread and never waits there. The run's own commands are posted and answer with
a future. Slow commands (delaying a node, ending one, writing a checkpoint) run on a thread. Either way the answer is
the number of steps at which the command took effect on all nodes.

Delaying and ending a node inject faults, for lessons. A page may do so only where the dashboard was shown with
``fault_injection=True``.
"""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, cast

from dtkit._util import formatting
from dtkit._util.guard import run_guarded
from dtkit.history.rate_jump import describe_rate_jump
from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.dashboard.run_view import RunView

COMMANDS = frozenset({"pause", "resume", "step", "stop", "lr"})


class FaultInjectable(Protocol):
    """Methods of runs that take faults and notes, and write checkpoints. A run may lack them."""

    def inject_delay(self, rank: int, factor: float) -> None:
        """Make a rank's steps `factor` times as long."""
        ...

    def inject_fault(self, name: str, rank: int) -> None:
        """End a rank's process: ``inject_fault("kill", 3)``."""
        ...

    def note(self, text: str) -> None:
        """Add a line to the log."""
        ...

    def save(self) -> Any:
        """Write a checkpoint into the run's folder; return its step and path."""
        ...


class CommandHandler:
    """Passes commands of pages to the run; `report` gets (kind, command, text) of effects and refusals."""

    def __init__(self, run: RunView, report: Callable[[str, str, str], None], *, fault_injection: bool = False) -> None:
        self._run, self._report, self.fault_injection = run, report, fault_injection

    @property
    def extra_controls(self) -> list[str]:
        """Controls to show that not every run has."""
        controls = {"slow": "inject_delay", "kill": "inject_fault"} if self.fault_injection else {}
        return [name for name, method in (controls | {"save": "save"}).items() if hasattr(self._run, method)]

    def handle(self, command: str, value: Any) -> None:
        """Pass a command to the run. Raise the run's error where it refuses at once."""
        if command in COMMANDS:
            lr = _parse_lr(value) if command == "lr" else None
            jump = "" if lr is None else describe_rate_jump(self._run.history, self._run.lr, lr)
            warning = f": {jump}" if jump else ""
            future = self._run.post(command, lr)
            if isinstance(future, Future):
                future.add_done_callback(lambda done: self._report_result(command, lr, warning, done))
        elif command in self.extra_controls:
            self._run_in_background(command, value)

    def _report_result(self, command: str, value: float | None, warning: str, future: Future[int]) -> None:
        if future.cancelled():
            return
        # waits: already done here
        error = future.exception()
        if error is None:
            if command == "step":
                self._log_step()
            # waits: already done here
            self._report("effect", command, _describe_effect(command, value, future.result()) + warning)
        else:
            self._report("refused", command, str(error))

    def _log_step(self) -> None:
        """Log the button's step, unless it failed or was the last one, which the run logs itself.

        Steps of `run.step()` aren't logged, since a loop of them would fill the log.
        """
        run = self._run
        if run.status.state is State.PAUSED and run.exception is None and hasattr(run, "note"):
            cast("FaultInjectable", run).note("one step taken")

    def _run_in_background(self, command: str, value: Any) -> None:
        action = {"slow": self._prepare_delay, "kill": self._prepare_kill, "save": self._prepare_save}[command](value)

        def work() -> None:
            self._report("effect", command, action())

        def refuse(error: Exception) -> None:
            self._report("refused", command, str(error))

        threading.Thread(target=run_guarded, args=(work, refuse), name=f"dtkit-{command}", daemon=True).start()

    # Each of these checks the page's value, and returns the action to run on a thread.

    def _prepare_delay(self, value: Any) -> Callable[[], str]:
        rank, factor = self._parse_rank(value), _parse_factor(value)
        run = cast("FaultInjectable", self._run)

        def act() -> str:
            run.inject_delay(rank, factor)
            effect = "runs at full speed" if factor == 1 else f"is slowed {factor:g}x"
            return f"node {rank} {effect} since step {self._run.status.step:,}"

        return act

    def _prepare_kill(self, value: Any) -> Callable[[], str]:
        rank, run = self._parse_rank(value), cast("FaultInjectable", self._run)

        def act() -> str:
            run.inject_fault("kill", rank)
            return f"node {rank} was ended at step {self._run.status.step:,}"

        return act

    def _prepare_save(self, _value: Any) -> Callable[[], str]:
        run = cast("FaultInjectable", self._run)

        def act() -> str:
            saved = run.save()
            return f"checkpoint of step {saved.step:,} on all nodes saved: {_shorten_path(str(saved.path))}"

        return act

    def _parse_rank(self, value: Any) -> int:
        rank, world_size = value.get("rank") if isinstance(value, dict) else None, self._run.spec.world_size
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
            raise ValueError(f"node {rank!r}: there are nodes 0 to {world_size - 1}")
        return rank


def _describe_effect(command: str, value: float | None, step: int) -> str:
    """Return a text such as ``paused at step 412 on all nodes``."""
    if command == "lr":
        return f"learning rate {formatting.format_learning_rate(value)} from step {step:,} on, on all nodes"
    if command == "step":
        return "one step taken on all nodes"  # the head has their number
    effect = {"pause": "paused", "resume": "resumed", "stop": "stopped"}
    return f"{effect[command]} at step {step:,} on all nodes"


def _parse_lr(value: Any) -> float:
    """Return the page's learning rate."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"a learning rate of {value!r}: it must be a number of 0 or more, such as 0.01")
    return float(value)


def _parse_factor(value: Any) -> float:
    factor = value.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= 100:
        raise ValueError(f"{factor!r} times slower: it must be a number from 1 (full speed) to 100")
    return float(factor)


def _shorten_path(path: str) -> str:
    """Return a path as seen from the notebook's folder, if it is below that."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative

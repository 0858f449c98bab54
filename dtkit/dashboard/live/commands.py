"""What a page may ask of a run, and what is said when it has taken effect.

A button's callback runs on the kernel's thread and never waits there. The run's own commands are posted, and answer
by a future; what takes its time (slowing a node down, ending one, writing a checkpoint) is done on a thread. Either way
the answer is the number of steps that were taken when it took effect, on all nodes.

Slowing a node down and ending one are *drills*, for lessons: a page may ask for them only where the person who shows
the dashboard said ``drills=True``.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, cast

from dtkit._util import formatting
from dtkit._util.guard import run_guarded

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.dashboard.run_view import RunView

COMMANDS = frozenset({"pause", "resume", "step", "stop", "lr"})


class FaultInjectable(Protocol):
    """What a source has besides, where it can be drilled and saved; each method is asked for by name."""

    def inject_delay(self, rank: int, factor: float) -> int:
        """Have a rank take `step_factor` times as long."""
        ...

    def inject_fault(self, name: str, rank: int) -> int:
        """End a rank's process: ``drill("kill", 3)``."""
        ...

    def save(self, path: str | None = None) -> Any:
        """Write a checkpoint; returns what has its step and path. ValueError without a path where none is known."""
        ...


class CommandHandler:
    """Passes on what pages ask for; `said` hears of effects and refusals, on any thread."""

    def __init__(self, run: RunView, report: Callable[[str, str, str], None], *, fault_injection: bool = False) -> None:
        self._run, self._report, self.fault_injection = run, report, fault_injection

    @property
    def extra_controls(self) -> list[str]:
        """Which of the controls that not every run has are to be shown."""
        source = self._run
        found = ["slow"] if self.fault_injection and hasattr(source, "inject_delay") else []
        found += ["kill"] if self.fault_injection and hasattr(source, "inject_fault") else []
        return found + (["save"] if hasattr(source, "save") else [])

    def handle(self, command: str, value: Any) -> None:
        """Pass `command` on; raises what the run says against it, where that is known at once."""
        if command in COMMANDS:
            number = _parse_lr(value) if command == "lr" else None
            answer = self._run.post(command, number)
            if isinstance(answer, Future):
                answer.add_done_callback(lambda done: self._report_result(command, number, done))
        elif command in self.extra_controls:
            self._run_in_background(command, value)

    def _report_result(self, command: str, value: float | None, future: Future[int]) -> None:
        if future.cancelled():
            return
        # waits: already done here
        error = future.exception()
        if error is None:
            # waits: already done here
            self._report("effect", command, _describe_effect(command, value, future.result()))
        else:
            self._report("refused", command, str(error))

    def _run_in_background(self, command: str, value: Any) -> None:
        act = {"slow": self._prepare_delay, "kill": self._prepare_kill, "save": self._prepare_save}[command](value)

        def work() -> None:
            self._report("effect", command, act())

        def refuse(error: Exception) -> None:
            self._report("refused", command, str(error))

        threading.Thread(target=run_guarded, args=(work, refuse), name=f"dtkit-{command}", daemon=True).start()

    # Each checks what the page sent, and returns what is to be done on a thread.

    def _prepare_delay(self, value: Any) -> Callable[[], str]:
        rank, factor = self._parse_rank(value), _parse_factor(value)
        run = cast("FaultInjectable", self._run)

        def act() -> str:
            step = run.inject_delay(rank, factor)
            what = "runs at full speed" if factor == 1 else f"is slowed {factor:g}x"
            return f"node {rank} {what} since step {step:,}"

        return act

    def _prepare_kill(self, value: Any) -> Callable[[], str]:
        rank, run = self._parse_rank(value), cast("FaultInjectable", self._run)
        return lambda: f"node {rank} was ended at step {run.inject_fault('kill', rank):,}"

    def _prepare_save(self, _value: Any) -> Callable[[], str]:
        run, folder = cast("FaultInjectable", self._run), f"checkpoints/{_make_file_name(self._run.spec.name)}"

        def act() -> str:
            try:
                saved = run.save()
            except ValueError:  # nobody said where to
                saved = run.save(folder)
            return f"checkpoint of step {saved.step:,} on all nodes saved: {saved.path}"

        return act

    def _parse_rank(self, value: Any) -> int:
        rank = value.get("rank") if isinstance(value, dict) else None
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self._run.spec.world_size:
            raise ValueError(f"node {rank!r}: there are nodes 0 to {self._run.spec.world_size - 1}")
        return rank


def _describe_effect(command: str, value: float | None, step: int) -> str:
    """``paused at step 412 on all nodes``."""
    if command == "lr":
        return f"learning rate {value:g} from step {step:,} on, on all nodes"
    what = {"pause": "paused", "resume": "resumed", "step": "one step taken: all nodes stand", "stop": "stopped"}
    return f"{what[command]} at step {step:,}" + ("" if command == "step" else " on all nodes")


def _parse_lr(value: Any) -> float:
    """A learning rate as the page sent it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"a learning rate of {value!r}: it must be a number of 0 or more, such as 0.01")
    return float(value)


def _parse_factor(value: Any) -> float:
    factor = value.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= 100:
        raise ValueError(f"{factor!r} times slower: it must be a number from 1 (full speed) to 100")
    return float(factor)


def _make_file_name(name: str) -> str:
    """A run's name as the name of a file: letters, digits, dashes."""
    kept = "".join(c if c.isalnum() or c in "-_" else "-" for c in formatting.sanitize_text(name, 40))
    return kept.strip("-") or "run"

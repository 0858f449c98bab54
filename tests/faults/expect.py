"""Checks of a cell's outcome. Each failed check adds a sentence to the outcome's problems.

========= ====================================================================================================
repaired  the lost or halted rank is replaced, and the run completes with few or no steps lost
failed    the run ends with an error that names rank, step and line; the other ranks are released at once
paused    all ranks pause before the update that was not finite; `resume` takes the step again
named     the slow rank is named and keeps running
resumed   the endless step is interrupted, and the run completes; a rank that can't be interrupted is replaced
reformed  the group is formed at the next attempt, and the run completes as if undisturbed
unsaved   the checkpoint is not written, the error has the reason, older checkpoints stay, the run continues
========= ====================================================================================================

The detection time ends with the first log entry on the fault. Limits hold for an idle machine, and are multiplied by
the number of processes per core on a busy one.
"""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING

import psutil

import dtkit
from dtkit.dashboard.summary.timing import compute_step_timing
from dtkit.types import State
from tests.faults import training
from tests.faults.cells import ENDS, HALTS, get_max_lost_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.types import Event
    from tests.faults.cells import Cell
    from tests.faults.runner import Outcome, Stage

BOUND = 1e-12
ENDED_S, HALTED_S, FAILED_S, CONTROLLER_S = 1.0, 10.0, 1.0, 5.0
"""Longest times to detect that a rank has ended, is stuck or has failed, and that the controller has ended."""
_FAULT_KINDS = ("lost", "stuck", "error", "straggler")
_LOST = re.compile(r"(\d+) steps? lost")


def get_limit_s(cell: Cell) -> float:
    """Return the time limit for the detection of the cell's fault, under the present load."""
    limit = ENDED_S if cell.fault in ENDS else HALTED_S if cell.fault in HALTS else FAILED_S
    return limit * get_load_factor()


def get_load_factor() -> float:
    """Return the number of processes per core that want to run, at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def check_end(stage: Stage, run: dtkit.Run, error: BaseException | None) -> None:
    """Check a run that has left RUNNING; waiting for it raised `error`."""
    _check_log(stage, run)
    CHECKS[stage.cell.outcome](stage, run, error)


def _check_log(stage: Stage, run: dtkit.Run) -> None:
    """Check the log entries on the fault."""
    outcome, fired_at = stage.outcome, stage.trap.fired_at
    if fired_at is None:
        check(outcome, stage.cell.outcome == "named", "the trap did not fire")
        return
    if stage.cell.outcome == "reformed":
        return
    after = [event for event in run.history.events if event.time >= fired_at]
    entry = next((event for event in after if event.kind in _FAULT_KINDS), None)
    if not check(outcome, entry is not None, "the log does not mention the fault") or entry is None:
        return
    outcome.shown, outcome.detected_s = entry.text, entry.time - fired_at
    limit = get_limit_s(stage.cell)
    check(outcome, outcome.detected_s <= limit, f"logged after {outcome.detected_s:.1f} s, limit {limit:.1f} s")
    _record_repair(outcome, fired_at, after)


def _record_repair(outcome: Outcome, fired_at: float, after: list[Event]) -> None:
    repairs = [event for event in after if event.kind == "repair"]
    outcome.lost = "; ".join(event.text.rpartition(", ")[2] for event in repairs)
    if repairs:
        outcome.recovered_s = repairs[-1].time - fired_at


def _repaired(stage: Stage, run: dtkit.Run, error: BaseException | None) -> None:
    outcome = stage.outcome
    check(outcome, error is None, f"the run raised {error}".partition("\n")[0])
    check_completed(stage, run)
    check(outcome, bool(outcome.lost), "the log has no repair")
    is_alive = stage.process.is_running() and stage.process.status() != psutil.STATUS_ZOMBIE
    check(outcome, not is_alive, "the replaced process is still alive")
    num_lost = sum(int(number) for number in _LOST.findall(outcome.lost))
    max_lost = get_max_lost_steps(stage.cell, training.SNAPSHOT)
    check(outcome, num_lost <= max_lost, f"{num_lost} steps were lost, at most {max_lost} may be")


def _resumed(stage: Stage, run: dtkit.Run, error: BaseException | None) -> None:
    check(stage.outcome, error is None, f"the run raised {error}".partition("\n")[0])
    stage.outcome.lost = stage.outcome.lost or "no step lost"
    check_completed(stage, run)


def _reformed(stage: Stage, run: dtkit.Run, error: BaseException | None) -> None:
    check(stage.outcome, error is None, f"the run raised {error}".partition("\n")[0])
    stage.outcome.lost = "no step lost"
    check_completed(stage, run)


def _failed(stage: Stage, run: dtkit.Run, error: BaseException | None) -> None:
    outcome, trap = stage.outcome, stage.trap
    check(outcome, run.status.state is State.FAILED, f"the run is {run.status.state.value}, not failed")
    if not isinstance(error, dtkit.errors.EngineError):
        check(outcome, False, f"the run raised {error!r}, not an EngineError")
        return
    cause = error.cause
    outcome.lost = "nothing"
    check(outcome, cause.rank == trap.rank, f"rank {cause.rank} is named instead of {trap.rank}")
    check(outcome, cause.step == trap.step, f"step {cause.step} is named instead of {trap.step}")
    named = stage.cell.fault != "exception" or "TrapError: raised on purpose" in outcome.shown
    check(outcome, named, "the log does not name the user's error")
    check(outcome, 'File "' in cause.traceback, "the engine's traceback is missing")
    check(outcome, str(cause.rank) in str(error) and cause.type in str(error), "the error does not name its cause")


def _paused(stage: Stage, run: dtkit.Run, error: BaseException | None) -> None:
    outcome = stage.outcome
    check(outcome, run.status.state is State.PAUSED, f"the run is {run.status.state.value}, not paused")
    if isinstance(error, dtkit.errors.NonFiniteError):
        named_ranks = [failure.rank for failure in error.failures]
        may_be_unknown = (
            stage.trap.place == "backward" and stage.cell.strategy != "Pipeline"
        )  # every rank's loss is finite
        named = stage.trap.rank in named_ranks or may_be_unknown
        check(outcome, named, f"ranks {named_ranks} are named instead of {stage.trap.rank}")
    else:
        check(outcome, False, f"the run raised {error!r}, not a NonFiniteError")
    finite = all(bool(value.isfinite().all()) for value in run.model.state_dict().values())
    check(outcome, finite, "parameters are not finite")
    outcome.lost = "no step lost"
    run.resume()
    check(outcome, run._driver.wait(60), "the run does not end after resume")
    check_completed(stage, run)


def _named(stage: Stage, run: dtkit.Run, error: BaseException | None) -> None:
    outcome = stage.outcome
    check(outcome, error is None, f"the run raised {error}".partition("\n")[0])
    straggler = compute_step_timing(run.history, stage.cluster.world_size).straggler
    if stage.cell.strategy != "Pipeline":  # stages differ by design, so none is named
        slow = () if straggler is None else straggler.ranks
        check(outcome, slow == (stage.trap.rank,), f"{slow} are named instead of {stage.trap.rank}")
        outcome.shown = f"straggler: {slow}"
    outcome.lost = "no step lost"
    check_completed(stage, run)


def check_save(stage: Stage, run: dtkit.Run, error: BaseException | None) -> None:
    """Check a save during which the fault hit a rank: written after a repair, or not at all."""
    outcome, folder = stage.outcome, stage.trap.path.parent / "checkpoints"
    check(outcome, run.status.step <= stage.trap.step, f"the run is at step {run.status.step}")
    try:
        saved_step = dtkit.Checkpoint(folder).step if error is None else None
    except (dtkit.errors.CheckpointError, ValueError) as raised:
        check(outcome, False, f"the checkpoint can't be read: {raised}")
        return
    if stage.cell.outcome == "unsaved":
        check(outcome, error is not None, "a save that failed on a rank raised no error")
        check(outcome, stage.cell.fault == "exception" or error is not None, "no error")
    else:
        check(outcome, saved_step is not None, f"there is no checkpoint after the repair: {error}")


def _unsaved(stage: Stage, run: dtkit.Run, error: BaseException | None) -> None:
    check(stage.outcome, error is None, f"the run raised {error}".partition("\n")[0])
    stage.outcome.lost = "the checkpoint"
    check_completed(stage, run)


def check_completed(stage: Stage, run: dtkit.Run) -> None:
    """Check that the run is completed, with the parameters of an undisturbed run where the cell is exact."""
    status = run.status
    if not check(stage.outcome, status.state is State.COMPLETED, f"the run is {status.state.value}: {run.exception}"):
        return
    steps = run.history.totals()["step"].tolist()
    check(stage.outcome, sorted(set(steps)) == list(range(status.steps)), "steps are missing in the history")
    if stage.cell.exact:
        difference = training.max_difference(run.model.state_dict(), stage.expected_state)
        check(stage.outcome, difference <= BOUND, f"parameters differ by {difference:.1e} from an undisturbed run's")


def check_failed_call(stage: Stage, error: BaseException | None) -> None:
    """Check the error of a call during which the group could not be formed again."""
    outcome, fired_at = stage.outcome, stage.trap.fired_at
    check(outcome, isinstance(error, dtkit.errors.EngineError), f"the call raised {error!r}")
    if stage.cell.outcome == "reformed" and fired_at is not None:  # the paused run has no log entry
        outcome.detected_s, outcome.shown = time.time() - fired_at, str(error).partition("\n")[0]
        check(outcome, stage.cell.fault != "exception" or "TrapError" in str(error), "the call raised another error")


def check(outcome: Outcome, condition: bool, problem: str) -> bool:  # noqa: FBT001 - the checked condition
    """Return the condition, and record the problem if it is false."""
    if not condition:
        outcome.problems.append(problem)
    return condition


CHECKS: dict[str, Callable[[Stage, dtkit.Run, BaseException | None], None]] = {
    "repaired": _repaired,
    "resumed": _resumed,
    "reformed": _reformed,
    "failed": _failed,
    "paused": _paused,
    "named": _named,
    "unsaved": _unsaved,
}

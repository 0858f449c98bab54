"""What must be true after a cell. Each check adds to the outcome's problems, in words; the numbers are kept.

========= ====================================================================================================
repaired  the lost or halted rank is replaced, the run goes on to its end, few steps or none are lost
failed    the run ends with an error that names rank, step and the line; the others are out at once
paused    all ranks stand before the update that was not finite; `resume_from` takes the step again
named     the slow rank is named, and left alone
resumed   what does not end is interrupted, and the run goes on to its end; only where that does not help (an update is
          never torn) the rank is replaced
reformed  the group is formed at the next try, and the run goes on to its end as if nothing had been
unsaved   the checkpoint is not written, the error says why, older ones stay; the training goes on
========= ====================================================================================================

Detection is from the fault to the first word of it in the run's log. The limits hold for a machine that has nothing
else to do: where more processes want to run than there are cores, they are longer by that much.
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
from tests.faults.cells import ENDS, HALTS, most_lost

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.types import Event
    from tests.faults.cells import Cell
    from tests.faults.runner import Outcome, Stage

BOUND = 1e-12
ENDED_S, HALTED_S, FAILED_S, CONTROLLER_S = 1.0, 10.0, 1.0, 5.0
"""Most that it may take until a rank is known to have ended, to be stuck, to have failed, and the controller to have
ended."""
_WORDS = ("lost", "stuck", "error", "straggler")
_LOST = re.compile(r"(\d+) steps? lost")


def limit_s(cell: Cell) -> float:
    """For the detection of its fault, on this machine now."""
    limit = ENDED_S if cell.fault in ENDS else HALTED_S if cell.fault in HALTS else FAILED_S
    return limit * crowd()


def crowd() -> float:
    """How many processes want each core; 1 where there is room."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def ends(stage: Stage, run: dtkit.Run, error: BaseException | None) -> None:
    """The run has left RUNNING, and `error` is what waiting for it raised."""
    _note(stage, run)
    CHECKS[stage.cell.outcome](stage, run, error)


def _note(stage: Stage, run: dtkit.Run) -> None:
    """What the log tells of the fault."""
    outcome, sprung = stage.outcome, stage.trap.sprung_at
    if sprung is None:
        check(outcome, stage.cell.outcome == "named", "the trap did not spring")
        return
    if stage.cell.outcome == "reformed":
        return
    after = [event for event in run.history.events if event.time >= sprung]
    told = next((event for event in after if event.kind in _WORDS), None)
    if not check(outcome, told is not None, "the log says nothing of it") or told is None:
        return
    outcome.shown, outcome.detected_s = told.text, told.time - sprung
    limit = limit_s(stage.cell)
    check(outcome, outcome.detected_s <= limit, f"told after {outcome.detected_s:.1f} s, limit {limit:.1f} s")
    _note_repair(outcome, sprung, after)


def _note_repair(outcome: Outcome, sprung: float, after: list[Event]) -> None:
    repairs = [event for event in after if event.kind == "repair"]
    outcome.lost = "; ".join(event.text.rpartition(", ")[2] for event in repairs)
    if repairs:
        outcome.recovered_s = repairs[-1].time - sprung


def _repaired(stage: Stage, run: dtkit.Run, error: BaseException | None) -> None:
    outcome = stage.outcome
    check(outcome, error is None, f"the run raised {error}".partition("\n")[0])
    completed(stage, run)
    check(outcome, bool(outcome.lost), "the log tells of no repair")
    left = stage.process.is_running() and stage.process.status() != psutil.STATUS_ZOMBIE
    check(outcome, not left, "the process that was replaced lives on")
    gone = sum(int(number) for number in _LOST.findall(outcome.lost))
    most = most_lost(stage.cell, training.SNAPSHOT)
    check(outcome, gone <= most, f"{gone} steps were lost, at most {most} may be")


def _resumed(stage: Stage, run: dtkit.Run, error: BaseException | None) -> None:
    check(stage.outcome, error is None, f"the run raised {error}".partition("\n")[0])
    stage.outcome.lost = stage.outcome.lost or "no step lost"
    completed(stage, run)


def _reformed(stage: Stage, run: dtkit.Run, error: BaseException | None) -> None:
    check(stage.outcome, error is None, f"the run raised {error}".partition("\n")[0])
    stage.outcome.lost = "no step lost"
    completed(stage, run)


def _failed(stage: Stage, run: dtkit.Run, error: BaseException | None) -> None:
    outcome, trap = stage.outcome, stage.trap
    check(outcome, run.status.state is State.FAILED, f"the run is {run.status.state.value}, not failed")
    if not isinstance(error, dtkit.errors.EngineError):
        check(outcome, False, f"the run raised {error!r}, not an EngineError")
        return
    cause = error.cause
    outcome.lost = "nothing"
    check(outcome, cause.rank == trap.rank, f"rank {cause.rank} is blamed, and it was {trap.rank}")
    check(outcome, cause.step == trap.step, f"step {cause.step} is named, and it was {trap.step}")
    named = stage.cell.fault != "exception" or "Sprung: sprung on purpose" in outcome.shown
    check(outcome, named, "the log names another error than the user's")
    check(outcome, 'File "' in cause.traceback, "there is no traceback of the engine")
    check(outcome, str(cause.rank) in str(error) and cause.type in str(error), "the error names no cause")


def _paused(stage: Stage, run: dtkit.Run, error: BaseException | None) -> None:
    outcome = stage.outcome
    check(outcome, run.status.state is State.PAUSED, f"the run is {run.status.state.value}, not paused")
    if isinstance(error, dtkit.errors.NonFiniteError):
        blamed = [failure.rank for failure in error.failures]
        unknown = stage.trap.place == "backward" and stage.cell.strategy != "Pipeline"  # every rank's loss is finite
        named = stage.trap.rank in blamed or unknown
        check(outcome, named, f"ranks {blamed} are named, and it was {stage.trap.rank}")
    else:
        check(outcome, False, f"the run raised {error!r}, not a NonFiniteError")
    finite = all(bool(value.isfinite().all()) for value in run.model.state_dict().values())
    check(outcome, finite, "parameters are not finite")
    outcome.lost = "no step lost"
    run.resume()
    check(outcome, run._driver.wait(60), "the run does not end once it was resumed")
    completed(stage, run)


def _named(stage: Stage, run: dtkit.Run, error: BaseException | None) -> None:
    outcome = stage.outcome
    check(outcome, error is None, f"the run raised {error}".partition("\n")[0])
    found = compute_step_timing(run.history, stage.cluster.world_size).straggler
    if stage.cell.strategy != "Pipeline":  # whose stages differ by their nature, so that none is named
        slow = () if found is None else found.ranks
        check(outcome, slow == (stage.trap.rank,), f"{slow} are named, and rank {stage.trap.rank} is slow")
        outcome.shown = f"straggler: {slow}"
    outcome.lost = "no step lost"
    completed(stage, run)


def saved(stage: Stage, run: dtkit.Run, error: BaseException | None) -> None:
    """What came of a save in which the fault befell a rank: written after a repair, or not at all."""
    outcome, folder = stage.outcome, stage.trap.path.parent / "checkpoints"
    check(outcome, run.status.step <= stage.trap.step, f"the run stands at step {run.status.step}")
    whole = dtkit.errors.CheckpointError, ValueError
    try:
        found = dtkit.Checkpoint(folder).step if error is None else None
    except whole as raised:
        check(outcome, False, f"the checkpoint can't be read: {raised}")
        return
    if stage.cell.outcome == "unsaved":
        check(outcome, error is not None, "a save that failed on a rank is told to be good")
        check(outcome, stage.cell.fault == "exception" or error is not None, "no error")
    else:
        check(outcome, found is not None, f"there is no checkpoint after the repair: {error}")


def _unsaved(stage: Stage, run: dtkit.Run, error: BaseException | None) -> None:
    check(stage.outcome, error is None, f"the run raised {error}".partition("\n")[0])
    stage.outcome.lost = "the checkpoint"
    completed(stage, run)


def completed(stage: Stage, run: dtkit.Run) -> None:
    """It came to its end; and to the parameters of an undisturbed one, where that is promised."""
    status = run.status
    if not check(stage.outcome, status.state is State.COMPLETED, f"the run is {status.state.value}: {run.exception}"):
        return
    seen = run.history.totals()["step"].tolist()
    check(stage.outcome, sorted(set(seen)) == list(range(status.steps)), "steps are missing in the history")
    if stage.cell.exact:
        off = training.difference(run.model.state_dict(), stage.wanted)
        check(stage.outcome, off <= BOUND, f"parameters differ by {off:.1e} from an undisturbed run's")


def told(stage: Stage, error: BaseException | None) -> None:
    """What a call said in which the group could not be formed anew."""
    outcome, sprung = stage.outcome, stage.trap.sprung_at
    check(outcome, isinstance(error, dtkit.errors.EngineError), f"the call raised {error!r}")
    if stage.cell.outcome == "reformed" and sprung is not None:  # the run is paused, and has nothing to tell of it
        outcome.detected_s, outcome.shown = time.time() - sprung, str(error).partition("\n")[0]
        check(outcome, stage.cell.fault != "exception" or "Sprung" in str(error), "the call's error is another one")


def check(outcome: Outcome, right: bool, otherwise: str) -> bool:  # noqa: FBT001 - what is checked
    """Whether it is right; else it is a problem."""
    if not right:
        outcome.problems.append(otherwise)
    return right


CHECKS: dict[str, Callable[[Stage, dtkit.Run, BaseException | None], None]] = {
    "repaired": _repaired,
    "resumed": _resumed,
    "reformed": _reformed,
    "failed": _failed,
    "paused": _paused,
    "named": _named,
    "unsaved": _unsaved,
}

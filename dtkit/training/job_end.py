"""Preparation of a run for the end of the scheduler's job that runs its engines.

A checkpoint is written first. If a further job follows, the notebook also stores what the engines hold besides the
run's state: data and models. New engines then get all of it, though no earlier one is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import formatting
from dtkit.checkpoint.manager import CheckpointRequest
from dtkit.errors import DtkitError
from dtkit.training import recovered_data

if TYPE_CHECKING:
    from pathlib import Path

    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.job_end import JobEnd
    from dtkit.training.driver import Driver


def prepare(engine_group: EngineGroup, driver: Driver, end: JobEnd) -> bool:
    """Write a checkpoint of a run, and log it. Return whether a further job can continue from it.

    The checkpoint goes to the run's `checkpoint_dir`, by default into a folder of its own in "checkpoints".
    """
    progress = driver.progress
    if progress.state.has_ended:
        return False
    left = formatting.format_duration(end.time_left_s)
    progress.add_event("note", f"{end.job} ends in {left}: the run writes a checkpoint before that")
    try:
        path = None
        if not end.is_followed or progress.plan.options.checkpoint_policy.folder is not None:
            path = _save(engine_group, driver, progress.plan.options.checkpoint_policy.default_folder)
        if not end.is_followed:
            progress.add_event("note", f"to go on in another job: cluster.train(..., resume_from={str(path)!r})")
            return True
        _save(engine_group, driver, driver.snapshot_folder)
        recovered_data.store(engine_group, driver.snapshot_folder)
    except (DtkitError, OSError, TimeoutError) as error:
        progress.add_event("error", f"the run is not prepared for the end of {end.job}: {error}".partition("\n")[0])
        return False
    progress.add_event("note", f"{end.job} is given back now, and the run goes on in a further job")
    return True


def _save(engine_group: EngineGroup, driver: Driver, folder: Path | None) -> Path:
    """Write a checkpoint between two steps. The run continues meanwhile. Raises CheckpointError or RunError."""
    assert folder is not None
    request = CheckpointRequest(folder, None)
    driver.submit("save", request)
    return request.result(engine_group.call_timeout_s).path

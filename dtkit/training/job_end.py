"""Preparation of a run for the end of the scheduler's job that runs its engines.

A checkpoint is written first. If a further job follows, the notebook also stores what the engines hold besides the
run's state: data and models. New engines then get all of it, though no earlier one is left.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from dtkit._util import files, formatting
from dtkit.checkpoint.manager import CheckpointRequest
from dtkit.errors import DtkitError
from dtkit.rpc import pickling
from dtkit.rpc.protocol import DataOperations, make_call

if TYPE_CHECKING:
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.payload import Payload
    from dtkit.training.driver import Driver
    from dtkit.types import JobEnd

_DEFAULT_FOLDER = "checkpoints"
_DATA_FILE = "data.pkl"


def prepare(engine_group: EngineGroup, driver: Driver, end: JobEnd) -> bool:
    """Write a checkpoint of a run, and log it. Return whether a further job can continue from it.

    The checkpoint goes to the run's `checkpoint_dir`, by default into "checkpoints" of the current folder.
    """
    progress = driver.progress
    if progress.state.has_ended:
        return False
    left = formatting.format_duration(end.time_left_s)
    progress.add_event("note", f"{end.job} ends in {left}: the run writes a checkpoint before that")
    try:
        path = None
        if not end.is_followed or progress.plan.options.checkpoint_policy.folder is not None:
            path = _save(engine_group, driver, _choose_folder(driver))
        if not end.is_followed:
            progress.add_event("note", f"to go on in another job: cluster.train(..., resume_from={str(path)!r})")
            return True
        _save(engine_group, driver, driver.snapshot_folder)
        _store_data(engine_group, driver.snapshot_folder)
    except (DtkitError, OSError, TimeoutError) as error:
        progress.add_event("error", f"the run is not prepared for the end of {end.job}: {error}".partition("\n")[0])
        return False
    progress.add_event("note", f"{end.job} is given back now, and the run goes on in a further job")
    return True


def _choose_folder(driver: Driver) -> Path:
    plan = driver.progress.plan
    name = re.sub(r"[^A-Za-z0-9]+", "-", plan.spec.name).strip("-") or "run"
    return plan.options.checkpoint_policy.folder or Path(_DEFAULT_FOLDER, name).absolute()


def _save(engine_group: EngineGroup, driver: Driver, folder: Path) -> Path:
    """Write a checkpoint between two steps. The run continues meanwhile. Raises CheckpointError or RunError."""
    request = CheckpointRequest(folder, None)
    driver.submit("save", request)
    return request.result(engine_group.call_timeout_s).path


def _store_data(engine_group: EngineGroup, folder: Path) -> None:
    """Fetch the data from one engine, and store it. It is in the notebook's memory for a moment."""
    (payload,) = engine_group.call_all(make_call(DataOperations.export_data), ranks=[0])
    files.replace_file(folder / _DATA_FILE, pickling.dumps(payload))


def load_data(folder: Path) -> Payload | None:
    """Return the data that `prepare` has stored in a run's folder of snapshots, or None."""
    path = folder / _DATA_FILE
    # unpickles: written by this notebook; only this user can write to its folder
    payload: Payload | None = pickling.loads(path.read_bytes()) if path.exists() else None
    return payload

"""Data and models of the engines on the notebook's disk, for new engines when no earlier one is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit._util import files
from dtkit.rpc import pickling
from dtkit.rpc.protocol import DataOperations, make_call

if TYPE_CHECKING:
    from pathlib import Path

    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.payload import Payload

_DATA_FILE = "data.pkl"


def store(engine_group: EngineGroup, folder: Path) -> None:
    """Fetch the data from one engine, and store it. It is in the notebook's memory for a moment."""
    (payload,) = engine_group.call_all(make_call(DataOperations.export_data), ranks=[0])
    files.replace_file(folder / _DATA_FILE, pickling.dumps(payload))


def load(folder: Path) -> Payload | None:
    """Return the data that `store` has stored in a run's folder of snapshots, or None."""
    path = folder / _DATA_FILE
    # unpickles: written by this notebook; only this user can write to its folder
    payload: Payload | None = pickling.loads(path.read_bytes()) if path.exists() else None
    return payload

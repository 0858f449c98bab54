"""Data and models of the engines on the notebook's disk, for new engines when no earlier one is left."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit._util import files
from dtkit.errors import EngineError
from dtkit.rpc import pickling, shared_memory
from dtkit.rpc.protocol import DataOperations, make_call

if TYPE_CHECKING:
    from pathlib import Path

    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.payload import Payload

MAX_BYTES = 1_000_000_000
"""Size of data and models up to which a run keeps them for the loss of all engines."""

MAX_SENT_BYTES = 100_000_000
"""The same where they travel between hosts."""

_DATA_FILE = "data.pkl"


def is_stored(folder: Path) -> bool:
    """Return whether a run's folder of snapshots has the data."""
    return (folder / _DATA_FILE).exists()


def store(engine_group: EngineGroup, folder: Path) -> None:
    """Store the data of one engine, between two of its calls. Raises DtkitError or OSError.

    On several hosts, it is in the notebook's memory for a moment.
    """
    futures = engine_group.fan_out(make_call(DataOperations.export_data), ranks=[0])
    (reply,) = engine_group.gather_replies(futures, engine_group.call_timeout_s, [0])
    if reply.failure is not None:  # the run's driver forms the group again
        raise EngineError([reply.failure])
    files.replace_file(folder / _DATA_FILE, pickling.dumps(_move_to_disk(reply.unwrap(), folder)))


def _move_to_disk(payload: Payload, folder: Path) -> Payload:
    """Return the payload with its shared memory in a file of `folder`, which outlives all engines."""
    buffers = None if payload.shared_buffer is None else payload.open_buffers()
    if buffers is None:
        return payload
    try:
        moved = shared_memory.write_buffers(buffers, directories=[str(folder)])
    finally:
        payload.discard()
    return dataclasses.replace(payload, shared_buffer=moved)


def load(folder: Path) -> Payload | None:
    """Return the data that `store` has stored in a run's folder of snapshots, or None."""
    path = folder / _DATA_FILE
    # unpickles: written by this notebook; only this user can write to its folder
    payload: Payload | None = pickling.loads(path.read_bytes()) if path.exists() else None
    return payload


def discard(folder: Path) -> None:
    """Delete the data, since ranks hold other shards now."""
    payload = load(folder)
    if payload is not None:
        (folder / _DATA_FILE).unlink(missing_ok=True)
        payload.discard()

"""Reader of the files that wandb writes offline: records of protobuf in LevelDB's log format, after a short header."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_BLOCK_BYTES = 32768
_FILE_HEADER_BYTES = 7
_RECORD_HEADER = struct.Struct("<IHB")  # checksum, length, kind
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_records(file: Path) -> Iterator[Any]:
    """Yield the records of a file."""
    from wandb.proto import wandb_internal_pb2

    parts = b""
    for kind, content in _iterate_chunks(file.read_bytes()):
        parts = content if kind in (_FULL, _FIRST) else parts + content
        if kind in (_FULL, _LAST):
            yield wandb_internal_pb2.Record.FromString(parts)


def _iterate_chunks(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the kind and the content of each chunk. A block's last bytes are empty if no header fits."""
    assert data[:4] == b":W&B"
    position = _FILE_HEADER_BYTES
    while position + _RECORD_HEADER.size <= len(data):
        room = _BLOCK_BYTES - position % _BLOCK_BYTES
        if room < _RECORD_HEADER.size:
            position += room
            continue
        _, length, kind = _RECORD_HEADER.unpack_from(data, position)
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
            return
        position += _RECORD_HEADER.size
        yield kind, data[position : position + length]
        position += length

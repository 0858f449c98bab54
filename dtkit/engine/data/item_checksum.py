"""Checksums of samples, by which ranks find out whether they see the same data without sending any."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dtkit._util.guard import run_guarded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def compute_item_checksum(items: Iterable[Any]) -> int:
    """Return the CRC-32 of nested samples. Objects that can't be compared count as equal."""
    checksum = 0
    for part in _flatten(list(items)):
        checksum = zlib.crc32(part, checksum)
    return checksum


def _flatten(value: Any) -> Iterator[bytes]:
    """Yield the parts of a nested value as bytes, each container after its kind and length."""
    if isinstance(value, Mapping):
        yield f"dict {len(value)}".encode()
        for key, item in value.items():
            yield repr(key).encode()
            yield from _flatten(item)
    elif isinstance(value, (tuple, list)):
        yield f"list {len(value)}".encode()
        for item in value:
            yield from _flatten(item)
    elif isinstance(value, torch.Tensor) and value.layout == torch.strided:
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype} {value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, (str, bytes, int, float, complex, np.generic, type(None))):
        yield repr(value).encode()
    else:
        # silent: an object that can't be pickled is not compared
        yield run_guarded(lambda: pickle.dumps(value), lambda _: b"")

"""Files of one rank's tensors, in the safetensors format.

A file has eight bytes (length of the header), the header (JSON: name -> dtype, shape, byte offsets) and the bytes; see
https://github.com/huggingface/safetensors. The library reads the files. This module writes them, so that the digest
needs no second pass. Nothing is copied, and disk errors are raised as OSError.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import safe_open

from dtkit.checkpoint.index import intersect, shift_slices

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
_CHUNK_BYTES = 4 * 2**20  # bytes written and digested at once


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write contiguous tensors on the CPU to disk. Return {"bytes": size, "digest": hexadecimal}."""
    digest, size = hashlib.blake2b(digest_size=16), 0
    with path.open("wb") as file:
        for part in _iterate_bytes(tensors):
            file.write(part)
            digest.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "digest": digest.hexdigest()}


def encode_header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the beginning of a file: the length of the header, and the header."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors must be aligned to 8 bytes
    return struct.pack("<Q", len(text)) + text


def _iterate_bytes(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    yield encode_header(tensors)
    for tensor in tensors.values():
        if tensor.numel():
            raw: Any = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            yield from (raw[k : k + _CHUNK_BYTES] for k in range(0, len(raw), _CHUNK_BYTES))


class FileReader:
    """Reader of slices of a checkpoint's tensors, from all of its files."""

    def __init__(self, folder: Path, index: Mapping[str, Any], files: Sequence[str], facts: Mapping[str, Any]) -> None:
        """Open no file yet. `index` is the checkpoint's: name -> dtype, shape, pieces."""
        self.facts = facts
        self._folder, self._index, self._files = folder, index, files
        self._open_files: dict[str, Any] = {}
        self._exit_stack = contextlib.ExitStack()

    def get_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of the whole tensor; None if there is none of this name."""
        entry = self._index.get(name)
        return None if entry is None else tuple(entry["shape"])

    def read_slice(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the part of a tensor with this offset and shape, on the CPU."""
        entry = self._index[name]
        part = torch.empty(tuple(shape), dtype=TORCH_DTYPES[entry["dtype"]])
        for file, begin, size, *starts in entry["pieces"]:
            intersection = intersect(begin, size, offset, shape)
            if intersection is None:
                continue
            handle = self._open_file(self._files[file])
            if not size:
                return handle.get_tensor(name)  # type: ignore[no-any-return]
            piece_slices, part_slices = intersection
            part[part_slices] = handle.get_slice(name)[
                shift_slices(piece_slices, starts[0] if starts else [0] * len(size))
            ]
        return part

    def _open_file(self, name: str) -> Any:
        if name not in self._open_files:
            self._open_files[name] = self._exit_stack.enter_context(safe_open(self._folder / name, "pt", device="cpu"))
        return self._open_files[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open_files.clear()
        self._exit_stack.close()

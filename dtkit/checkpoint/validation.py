"""Validation of a checkpoint: its metadata, and the digests of its files.

Digests detect damage. They are not signatures: whoever can write the folder can write digests too.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import TYPE_CHECKING, Any

from dtkit.checkpoint.index import is_fully_covered
from dtkit.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

FORMAT_VERSION = 1
"""Version of the folder and of checkpoint.json. A newer one is refused."""
METADATA_FILE, HISTORY_FILE = "checkpoint.json", "history.jsonl"
REMEDY = (
    "Use an older checkpoint: dtkit.list_checkpoints(folder) lists them, and resume_from= takes the folder of any of "
    "them by name"
)
_FILE_PATTERN = re.compile(r"history\.jsonl|rank-\d{3,}\.safetensors")
_CHUNK_BYTES = 4 * 2**20
_MAX_SHOWN_NAMES = 5


def read_metadata(folder: Path) -> dict[str, Any]:
    """Return the validated content of checkpoint.json. Raises CheckpointError."""
    path = folder / METADATA_FILE
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{folder} can't be used: {METADATA_FILE} can't be read ({error.strerror}). {REMEDY}"
        ) from None
    try:
        metadata: dict[str, Any] = json.loads(text)
        digest = metadata.pop("digest")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(
            f"{path} is damaged: it is cut short, or it is not the JSON of a checkpoint. {REMEDY}"
        ) from None
    if digest != compute_metadata_digest(metadata):
        raise CheckpointError(f"{path} is not as it was written (its digest differs). {REMEDY}")
    _check_metadata(path, metadata)
    return metadata


def compute_metadata_digest(metadata: Mapping[str, Any]) -> str:
    """Return the digest of checkpoint.json without its own entry."""
    text = json.dumps(metadata, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _check_metadata(path: Path, metadata: Mapping[str, Any]) -> None:
    version = metadata.get("format")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {version}, made by dtkit {metadata.get('dtkit')}; this dtkit reads up to "
            f"{FORMAT_VERSION}. Use a newer dtkit"
        )
    if problem := _find_metadata_error(metadata):
        raise CheckpointError(f"{path} {problem}. {REMEDY}")
    try:
        unknown = [name for name in metadata["files"] if not _FILE_PATTERN.fullmatch(name)]
        incomplete = [
            name for name, entry in metadata["index"].items() if not is_fully_covered(entry, len(metadata["files"]))
        ]
        total_bytes = sum(int(entry["bytes"]) for entry in metadata["files"].values())
    except (KeyError, TypeError, AttributeError, ValueError):
        raise CheckpointError(f"{path} lacks fields that a checkpoint must have. {REMEDY}") from None
    if unknown:
        raise CheckpointError(f"{path} names {unknown[0]!r}, which is not a file of a checkpoint; it is not used")
    if incomplete or total_bytes < 0:
        raise CheckpointError(
            f"{path} lacks {f'parts of {format_names(incomplete)}' if incomplete else 'its files'}. {REMEDY}"
        )


_NON_NEGATIVE_INT, _POSITIVE_INT, _FINITE_NUMBER = "an integer from 0 up", "an integer from 1 up", "a finite number"
_OBJECT, _TEXT = "an object", "text"
_TYPE_CHECKS: dict[str, Callable[[Any], bool]] = {
    _NON_NEGATIVE_INT: lambda value: type(value) is int and value >= 0,
    _POSITIVE_INT: lambda value: type(value) is int and value >= 1,
    _FINITE_NUMBER: lambda value: type(value) in (int, float) and math.isfinite(value),
    _OBJECT: lambda value: isinstance(value, dict),
    _TEXT: lambda value: isinstance(value, str),
}
_REQUIRED_FIELDS = {
    "format": _POSITIVE_INT,
    "created": _FINITE_NUMBER,
    "step": _NON_NEGATIVE_INT,
    **dict.fromkeys(("spec", "facts", "files", "index"), _OBJECT),
    **{f"spec/{name}": _TEXT for name in ("name", "strategy", "optimizer", "loss")},
    **{f"spec/{name}": _POSITIVE_INT for name in ("world_size", "batch_size", "steps", "steps_per_epoch")},
    **{
        f"facts/{name}": _OBJECT
        for name in ("layout", "values", "optimizers", "aliases", "extra", "per_rank", "frozen")
    },
}
"""Required fields of checkpoint.json and their types, in the order of the check."""


def _find_metadata_error(metadata: Mapping[str, Any]) -> str:
    """Return the first problem: a missing field or a wrong type; empty if there is none."""
    for path, required_type in _REQUIRED_FIELDS.items():
        name, _, inner_name = path.partition("/")
        fields = metadata[name] if inner_name else metadata
        key = inner_name or name
        if key not in fields:
            return f"lacks {path}"
        if not _TYPE_CHECKS[required_type](fields[key]):
            return f"says {path}={str(fields[key])[:40]!r}, which must be {required_type}"
    return ""


def verify_file(path: Path, entry: Mapping[str, Any]) -> str:
    """Return the problem of a file; empty if it is as it was written."""
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{path.name} has {size:,} bytes instead of {entry['bytes']:,}"
        if compute_digest(path) != entry["digest"]:
            return f"{path.name} is not as it was written (its digest differs)"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} can't be read ({error.strerror})"
    return ""


def find_wrong_sizes(folder: Path, files: Mapping[str, Any]) -> list[str]:
    """Return the names of files that are missing or whose size is wrong, without reading them."""
    return [name for name, entry in files.items() if _get_file_size(folder / name) != entry["bytes"]]


def _get_file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def compute_digest(path: Path) -> str:
    """Return the 128-bit BLAKE2b of a file's bytes, in hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(_CHUNK_BYTES):
            digest.update(part)
    return digest.hexdigest()


def format_names(names: Iterable[str]) -> str:
    """Return the first names in order, and the number of others."""
    ordered = sorted(names)
    more = len(ordered) - _MAX_SHOWN_NAMES
    return ", ".join(ordered[:_MAX_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")

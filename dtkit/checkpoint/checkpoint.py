"""What a run needs to go on, in a folder: written whole or not at all, checked before it is used, never unpickled.

A checkpoint is a folder ``step-00000100`` with

- ``rank-000.safetensors`` and so on: what each rank gave, as tensors under the model's own names;
- ``history.jsonl``: what every rank did in every step;
- ``checkpoint.json``: what was asked for, where the run stood, the optimiser's plain values and the scheduler's,
  which part of which tensor lies in which file, and a digest of every file and of itself.

It is made under another name, with ``checkpoint.json`` last, and renamed when all of it is on the disk. So a folder of
that name is whole, whenever the writing may have ended; what is left under the other name is removed by the next save.

Digests tell damage from what was written. They are no signature: who can write the folder can write digests too.
Reading never runs what a file says: safetensors and JSON hold numbers and text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import html
import json
import math
import os
import re
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting
from dtkit.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from dtkit.history.history import History

FORMAT_VERSION = 1
"""Of the folder and of checkpoint.json. A newer one is refused, an older one would be read."""
METADATA_FILE, HISTORY_FILE = "checkpoint.json", "history.jsonl"
TOKEN_FILE = "token"  # noqa: S105 - no secret
"""While it is being written: by this file's content engines know the notebook's folder."""
_FOLDER_PATTERN = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED_PATTERN = re.compile(r"\.saving-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]+")
_FILE_PATTERN = re.compile(r"history\.jsonl|rank-\d{3,}\.safetensors")
_UNFINISHED_MAX_AGE_S = 3600.0  # an unfinished folder of another host may be at work so long after its last change
_CHUNK_BYTES = 4 * 2**20
_DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
}


Lineage = tuple[str, ...]
"""The names of runs that went on from one another, oldest first."""

_active_folders: set[Path] = set()  # folders that this process is writing


def get_rank_filename(rank: int) -> str:
    """Where a rank's tensors are."""
    return f"rank-{rank:03}.safetensors"


def get_report_filename(rank: int) -> str:
    """While it is being written: where a rank says what came of its part."""
    return f"report-{rank:03}.json"


def intersect(
    begin: Sequence[int], size: Sequence[int], offset: Sequence[int], shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What a piece at `begin` has of a part at `offset`: (where in the piece, where in the part); None for nothing."""
    theirs, mine = [], []
    for b, n, o, m in zip(begin, size, offset, shape, strict=True):
        first, last = max(b, o), min(b + n, o + m)
        if first >= last:
            return None
        theirs.append(slice(first - b, last - b))
        mine.append(slice(first - o, last - o))
    return tuple(theirs), tuple(mine)


def shift_slice(slices: tuple[slice, ...], rows: int = 0) -> tuple[slice, ...]:
    """The same part, so many rows further on."""
    if not rows:
        return slices
    return (slice(slices[0].start + rows, slices[0].stop + rows), *slices[1:])


# -- one checkpoint ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Checkpoint:
    """A checkpoint on disk: ``dtkit.Checkpoint("runs/a")`` is the newest whole one there, or the folder itself.

    ``load_into(model)`` and ``state_dict()`` give the weights, without any engine; ``cluster.train(resume_from=...)`` goes
    on with all of it.
    """

    path: Path
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __init__(self, path: str | Path) -> None:
        """Raises CheckpointError where there is none, or where it can't be read."""
        folder = find_newest(parse_path("Checkpoint(path", path))
        object.__setattr__(self, "path", folder)
        object.__setattr__(self, "metadata", read_metadata(folder))

    @property
    def step(self) -> int:
        """Steps that were taken."""
        return int(self.metadata["step"])

    @property
    def strategy(self) -> str:
        """The strategy that it was made by, as a user would type it."""
        return str(self.metadata["spec"]["strategy"])

    @property
    def world_size(self) -> int:
        """On how many ranks it was made."""
        return int(self.metadata["spec"]["world_size"])

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(int(file["bytes"]) for file in self.metadata["files"].values())

    @property
    def created_at(self) -> float:
        """When it was made: seconds since the epoch, as time.time()."""
        return float(self.metadata["created"])

    @property
    def num_parameters(self) -> int:
        """Numbers in the model's state dict."""
        return sum(math.prod(entry["shape"]) for entry in self.get_tensor_entries().values())

    def get_tensor_entries(self) -> dict[str, Any]:
        """{name in the model's state dict: dtype, shape, pieces}, tied names included."""
        index = self.metadata["index"]
        found = {name.removeprefix("model/"): entry for name, entry in index.items() if name.startswith("model/")}
        aliases = self.metadata["facts"]["aliases"].get("model", {})
        return found | {name: found[first] for name, first in aliases.items()}

    def verify_files(self) -> list[str]:
        """What is wrong with its files, by their digests: nothing, if all is well. Reads all of them."""
        with ThreadPoolExecutor(4) as pool:  # digests are made outside of the interpreter's lock
            found = pool.map(lambda item: _verify_file(self.path / item[0], item[1]), self.metadata["files"].items())
            return [word for word in found if word]

    def check_files(self) -> None:
        """Raise CheckpointError where a file is damaged, naming which and how."""
        if wrong := self.verify_files():
            raise CheckpointError(f"{self.path} can't be used: {'; '.join(wrong)}. {_REMEDY}")

    def check_fits(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError where names, shapes or dtypes are not those of a model's state dict."""
        saved = self.get_tensor_entries()
        mine = {name: value for name, value in state.items() if hasattr(value, "dtype")}
        wrong = [f"it lacks {_format_names(mine.keys() - saved.keys())}"] if mine.keys() - saved.keys() else []
        if saved.keys() - mine.keys():
            wrong.append(f"the model lacks {_format_names(saved.keys() - mine.keys())}")
        for name in sorted(mine.keys() & saved.keys()):
            shape, dtype = tuple(saved[name]["shape"]), saved[name]["dtype"]
            if shape != tuple(mine[name].shape):
                wrong.append(f"{name} has shape {shape} there and {tuple(mine[name].shape)} in the model")
            elif dtype != _format_dtype(mine[name]):
                wrong.append(f"{name} is {dtype} there and {_format_dtype(mine[name])} in the model")
        if wrong:
            shown = wrong[:5] + ([f"and {len(wrong) - 5} more"] if len(wrong) > 5 else [])
            raise CheckpointError(
                f"{self.path} is of another model ({self.metadata['spec']['name']}): {'; '.join(shown)}. Give the model "
                "that it was made from"
            )

    def load_history(self) -> History:
        """What every rank did in every step until then."""
        from dtkit.history.history import History

        return History.from_jsonl(self.path / HISTORY_FILE)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's weights, as tensors on the CPU. Raises CheckpointError where files are damaged."""
        from dtkit.checkpoint.json_values import decode
        from dtkit.engine.state.safetensors_file import FileReader

        self.check_files()
        facts = self.metadata["facts"]
        state: dict[str, torch.Tensor] = {}
        with FileReader(self.path, self.metadata["index"], list(self.metadata["files"]), facts) as reader:
            aliases = facts["aliases"].get("model", {})
            for name, entry in self.get_tensor_entries().items():
                shape = entry["shape"]
                state[name] = reader.read_slice(f"model/{aliases.get(name, name)}", [0] * len(shape), shape)
        return state | {name: decode(value) for name, value in facts["extra"].items()}

    def load_into(self, model: torch.nn.Module) -> torch.nn.Module:
        """Load the weights into a model, and return it. Raises CheckpointError where they are of another model."""
        self.check_fits(model.state_dict())
        model.load_state_dict(self.state_dict())
        return model

    def _summarize(self) -> dict[str, str]:
        spec = self.metadata["spec"]
        return {
            "model": f"{spec['name']}, {self.num_parameters:,} numbers",
            "step": f"{self.step} of {spec['steps']}, epoch {self.step // spec['steps_per_epoch']}",
            "made by": f"{self.strategy} on {formatting.format_count(self.world_size, 'rank')}",
            "optimiser": str(spec["optimizer"]),
            "size": f"{formatting.format_bytes(self.nbytes)} in {formatting.format_count(len(self.metadata['files']), 'file')}",
            "age": formatting.format_duration(max(0.0, time.time() - self.created_at)),
            "state": _describe_state(self.path, self.metadata["files"]),
        }

    def __repr__(self) -> str:
        lines = [f"Checkpoint {self.path}"]
        return "\n".join(lines + [f"  {name:10} {value}" for name, value in self._summarize().items()])

    def _repr_html_(self) -> str:
        rows = [f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in self._summarize().items()]
        return f"<p>Checkpoint <code>{html.escape(str(self.path))}</code></p><table>{''.join(rows)}</table>"


_REMEDY = (
    "Use an older checkpoint: dtkit.checkpoints(folder) lists them, and resume= takes the folder of any of them by name"
)


def _describe_state(folder: Path, files: Mapping[str, Any]) -> str:
    """What can be said at a glance, without reading: `verify_files` reads."""
    wrong = [name for name, entry in files.items() if _get_file_size(folder / name) != entry["bytes"]]
    return f"DAMAGED: {_format_names(wrong)}" if wrong else "whole, by its files' sizes (damage() reads them)"


def _get_file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _verify_file(path: Path, entry: Mapping[str, Any]) -> str:
    """What is wrong with a file; empty where it is as it was written."""
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{path.name} has {size:,} bytes in place of {entry['bytes']:,}"
        return (
            ""
            if compute_digest(path) == entry["digest"]
            else f"{path.name} is not as it was written (its digest differs)"
        )
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} can't be read ({error.strerror})"


def compute_digest(path: Path) -> str:
    """BLAKE2b of a file's bytes, 128 bits, hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(_CHUNK_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _format_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")


def _format_dtype(tensor: Any) -> str:
    from dtkit.engine.state.safetensors_file import SAFETENSORS_NAMES

    return SAFETENSORS_NAMES.get(tensor.dtype, str(tensor.dtype))


# -- reading checkpoint.json -----------------------------------------------------------------------------------


def read_metadata(folder: Path) -> dict[str, Any]:
    """What checkpoint.json says, once it was looked at from all sides. Raises CheckpointError."""
    path = folder / METADATA_FILE
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{folder} can't be used: {METADATA_FILE} can't be read ({error.strerror}). {_REMEDY}"
        ) from None
    try:
        head = json.loads(text)
        told = head.pop("digest")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is damaged: it is cut short, or no JSON of a checkpoint. {_REMEDY}") from None
    if told != _compute_metadata_digest(head):
        raise CheckpointError(f"{path} is not as it was written (its digest differs). {_REMEDY}")
    _check_metadata(path, head)
    found: dict[str, Any] = head
    return found


def _compute_metadata_digest(metadata: Mapping[str, Any]) -> str:
    text = json.dumps(metadata, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _check_metadata(path: Path, metadata: Mapping[str, Any]) -> None:
    format_ = metadata.get("format")
    if isinstance(format_, int) and format_ > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {format_}, made by dtkit {metadata.get('dtkit')}; this dtkit reads up to {FORMAT_VERSION}. "
            "Use a newer dtkit"
        )
    if wrong := _find_metadata_error(metadata):
        raise CheckpointError(f"{path} {wrong}. {_REMEDY}")
    try:
        strangers = [name for name in metadata["files"] if not _FILE_PATTERN.fullmatch(name)]
        holes = [
            name for name, entry in metadata["index"].items() if not _is_fully_covered(entry, len(metadata["files"]))
        ]
        sizes = sum(int(entry["bytes"]) for entry in metadata["files"].values())
    except (KeyError, TypeError, AttributeError, ValueError):
        raise CheckpointError(f"{path} lacks what a checkpoint must say. {_REMEDY}") from None
    if strangers:
        raise CheckpointError(f"{path} names {strangers[0]!r}, which is no file of a checkpoint; it is not used")
    if holes or sizes < 0:
        raise CheckpointError(f"{path} lacks {f'parts of {_format_names(holes)}' if holes else 'its files'}. {_REMEDY}")


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
    **{f"facts/{name}": _OBJECT for name in ("layout", "values", "optimizers", "aliases", "extra", "own")},
}
"""What checkpoint.json must say, in this order."""


def _find_metadata_error(metadata: Mapping[str, Any]) -> str:
    """The first thing that is not said, or is not of its kind; empty where all is well."""
    for path, kind in _REQUIRED_FIELDS.items():
        name, _, inner = path.partition("/")
        found = metadata[name] if inner else metadata
        key = inner or name
        if key not in found:
            return f"lacks {path}"
        if not _TYPE_CHECKS[kind](found[key]):
            return f"says {path}={str(found[key])[:40]!r}, which must be {kind}"
    return ""


def _is_fully_covered(entry: Mapping[str, Any], num_files: int) -> bool:
    """Whether the pieces of a tensor make up the whole, each within it and none upon another."""
    shape, pieces = entry["shape"], entry["pieces"]
    if entry["dtype"] not in _DTYPE_BYTES or not all(file in range(num_files) for file, *_ in pieces):
        return False
    inside = all(
        len(begin) == len(size) == len(shape)
        and all(min(b, n) >= 0 and b + n <= whole for b, n, whole in zip(begin, size, shape, strict=True))
        and (not row or (len(row) == 1 and len(shape) > 0 and row[0] >= 0))
        for _, begin, size, *row in pieces
    )
    return bool(inside and sum(math.prod(size) for _, _, size, *_ in pieces) == math.prod(shape))


# -- folders of checkpoints ------------------------------------------------------------------------------------


def parse_path(argument: str, path: Any) -> Path:
    """A folder's name as it was given for this argument. Raises TypeError or ValueError for what can't be one."""
    told = f"{argument}={path!r}{')' * argument.count('(')}"
    if not isinstance(path, str | Path):
        raise TypeError(f"{told}: it is the name of a folder, a text or a Path, such as 'checkpoints/first'")
    if not str(path).strip() or "\0" in str(path):
        raise ValueError(f"{told}: no folder is called that. Name one, such as 'checkpoints/first'")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{told}: there is no such user. Write the home folder out, or '~' for yours") from None


def find_newest(path: Path) -> Path:
    """The folder itself if it is a checkpoint, else the newest one in it, whole or not: an older one is the user's
    to choose.
    """
    if (path / METADATA_FILE).exists() or _FOLDER_PATTERN.fullmatch(path.name):
        return path
    if not path.exists():
        raise CheckpointError(f"{path} is not there. Give a checkpoint's folder, or the one that run.save was given")
    found = list_folders(path)
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint: no folder step-... is in it")
    return found[-1]


def list_folders(path: Path) -> list[Path]:
    """The checkpoints' folders, whole or not, oldest first."""
    try:
        found = [p for p in path.iterdir() if _FOLDER_PATTERN.fullmatch(p.name) and p.is_dir()]
    except NotADirectoryError:
        raise CheckpointError(f"{path} is a file; checkpoints are folders") from None
    return sorted(found, key=lambda p: (_get_modified_time(p), p.name))


def _get_modified_time(folder: Path) -> float:
    """When it was written: a rename, or a file that is removed, changes the folder's own time."""
    for path in (folder / METADATA_FILE, folder / HISTORY_FILE, folder):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


class Checkpoints(list[Checkpoint]):
    """The checkpoints of a folder, oldest first. ``broken`` has what is wrong with those that can't be read."""

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = parse_path("checkpoints(path", path)
        self.broken: dict[Path, str] = {}
        if not self.path.exists():
            raise CheckpointError(
                f"{self.path} is not there. Give the folder that run.save or checkpoint_dir was given"
            )
        for folder in list_folders(self.path):
            try:
                self.append(Checkpoint(folder))
            except CheckpointError as error:
                self.broken[folder] = str(error)

    def _build_rows(self) -> list[list[str]]:
        rows = [["folder", "step", "made by", "numbers", "size", "age", "state"]]
        for one in self:
            facts = one._summarize()  # noqa: SLF001 - this module's own
            by, numbers = facts["made by"], f"{one.num_parameters:,}"
            rows.append(
                [
                    one.path.name,
                    str(one.step),
                    by,
                    numbers,
                    formatting.format_bytes(one.nbytes),
                    facts["age"],
                    facts["state"],
                ]
            )
        return rows + [[folder.name, "", "", "", "", "", f"DAMAGED: {why}"] for folder, why in self.broken.items()]

    def __repr__(self) -> str:
        rows = self._build_rows()
        lines = formatting.format_columns(rows, left_aligned=range(len(rows[0])))
        return "\n".join([f"checkpoints in {self.path}", *lines]) if len(rows) > 1 else f"no checkpoints in {self.path}"

    def _repr_html_(self) -> str:
        head, *rows = self._build_rows()
        made = "".join(f"<th>{name}</th>" for name in head)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
        return f"<p>Checkpoints in <code>{html.escape(str(self.path))}</code></p><table><tr>{made}</tr>{body}</table>"


def list_checkpoints(path: str | Path) -> Checkpoints:
    """The checkpoints in a folder that `run.save` or ``train(checkpoint_dir=...)`` wrote to, as a table; oldest first."""
    return Checkpoints(path)


# -- writing ---------------------------------------------------------------------------------------------------


def begin_checkpoint(path: Path) -> Path:
    """A new folder to write a checkpoint into, once what earlier saves left unfinished is gone."""
    path.mkdir(parents=True, exist_ok=True)
    for left in find_unfinished(path):
        shutil.rmtree(left, ignore_errors=True)
    folder = path / f".saving-{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
    folder.mkdir()
    _active_folders.add(folder)
    return folder


def abandon_checkpoint(folder: Path) -> None:
    """Remove a folder that `begin` made: the checkpoint will not be."""
    shutil.rmtree(folder, ignore_errors=True)
    _active_folders.discard(folder)


def find_unfinished(path: Path) -> list[Path]:
    """Folders of saves that ended before they were done: their process is gone, or went on to another save."""
    return [p for p in path.iterdir() if (found := _UNFINISHED_PATTERN.fullmatch(p.name)) and _is_abandoned(p, found)]


def _is_abandoned(folder: Path, name: re.Match[str]) -> bool:
    if name["host"] != socket.gethostname():
        return time.time() - _get_modified_time(folder) > _UNFINISHED_MAX_AGE_S
    pid = int(name["pid"])
    if pid == os.getpid():
        return folder not in _active_folders
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def finish_checkpoint(folder: Path, metadata: Mapping[str, Any]) -> Path:
    """Write checkpoint.json, and give the folder its name: from here on it is a checkpoint."""
    whole = {"format": FORMAT_VERSION, "created": time.time(), **metadata}
    write_and_sync(
        folder / METADATA_FILE, json.dumps({**whole, "digest": _compute_metadata_digest(json.loads(json.dumps(whole)))})
    )
    _sync_folder(folder)
    target = _find_free_name(folder.parent, int(metadata["step"]))
    folder.rename(target)
    _active_folders.discard(folder)
    _sync_folder(folder.parent)
    return target


def _find_free_name(path: Path, step: int) -> Path:
    """What is there is never replaced: a rename over a folder could not be done in one go."""
    names = [f"step-{step:08}", *(f"step-{step:08}.{k}" for k in range(2, 10_000))]
    return next(path / name for name in names if not (path / name).exists())


def write_and_sync(path: Path, text: str) -> None:
    """Write a file, on the disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Have a folder's entries on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune_checkpoints(path: Path, keep_last: int, lineage: Lineage = ()) -> list[Path]:
    """Remove all checkpoints but the newest `keep`; returns those removed. With `line`, only that run's and those of
    the runs that it goes on from.
    """
    old = [folder for folder in list_folders(path) if not lineage or _is_in_lineage(folder, lineage)][:-keep_last]
    for folder in old:
        away = path / f".saving-{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        with contextlib.suppress(FileNotFoundError):  # another run that goes on from it was quicker
            folder.rename(away)  # at once no checkpoint any more, and never half of one
        shutil.rmtree(away, ignore_errors=True)
    return old


def get_lineage(metadata: Mapping[str, Any]) -> Lineage:
    """Of which run a checkpoint is, after those that led to it; empty of one that was saved by hand."""
    return tuple(map(str, metadata.get("line") or ()))


def _is_in_lineage(folder: Path, lineage: Lineage) -> bool:
    """Whether a checkpoint is of this run, or of one before it. What can't be read is nobody's to remove."""
    try:
        found = _read_lineage(folder, _get_modified_time(folder))
    except CheckpointError:
        return False
    return bool(found) and found == lineage[: len(found)]


@functools.lru_cache(maxsize=1024)
def _read_lineage(folder: Path, _modified_time: float) -> Lineage:
    """As `find_user_frame`. A large model's checkpoint.json takes long to read: it is read once, for as long as it stays."""
    return get_lineage(read_metadata(folder))


# -- what ranks report -----------------------------------------------------------------------------------------


def merge_facts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All ranks' facts as one: plain values are equal on all of them; optimisers of parts become one of the whole."""
    merged: dict[str, Any] = {"layout": parts[0]["layout"], "values": {}, "aliases": {}, "extra": {}, "own": {}}
    places: dict[str, list[Any]] = {}
    for part in parts:
        for key in ("values", "extra", "own"):
            merged[key].update(part[key])
        for place, names in part["aliases"].items():
            merged["aliases"].setdefault(place, {}).update(names)
        for place, optimizer in part["optimizers"].items():
            places.setdefault(place, []).append(optimizer)
    return merged | {"optimizers": {place: _merge_optimizers(found) for place, found in places.items()}}


def _merge_optimizers(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Optimisers over parts of a model: groups with equal options are one group."""
    state: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for part in parts:
        state.update(part["state"])
        for group in part["groups"]:
            key = json.dumps(group["options"], sort_keys=True)
            names = groups.setdefault(key, {"options": group["options"], "params": {}})["params"]
            names.update(dict.fromkeys(group["params"]))
    made = [{"options": group["options"], "params": list(group["params"])} for group in groups.values()]
    return {"class": parts[0]["class"], "groups": made, "state": state}


def build_index(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Which part of which tensor lies in which file, from what each rank reports: {name: dtype, shape, pieces}.

    A piece is a file's number, where in the whole it begins, its shape, and the row of that file's tensor of the same
    name at which it begins, where that is not the first.
    """
    index: dict[str, Any] = {}
    for number, report in enumerate(reports):
        for name, (dtype, shape, blocks) in report["slabs"].items():
            entry = index.setdefault(name, {"dtype": dtype, "shape": shape, "pieces": []})
            entry["pieces"] += [[number, begin, size, *([row] if row else [])] for begin, size, row in blocks]
    return index

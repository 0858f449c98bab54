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

FORMAT = 1
"""Of the folder and of checkpoint.json. A newer one is refused, an older one would be read."""
HEAD, HISTORY = "checkpoint.json", "history.jsonl"
TOKEN = "token"  # noqa: S105 - no secret
"""While it is being written: by this file's content engines know the notebook's folder."""
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED = re.compile(r"\.saving-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]+")
_FILE = re.compile(r"history\.jsonl|rank-\d{3,}\.safetensors")
_KEPT_S = 3600.0  # an unfinished folder of another host may be at work so long after its last change
_CHUNK = 4 * 2**20
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "C64": 8}


Line = tuple[str, ...]
"""The names of runs that went on from one another, oldest first."""

_at_work: set[Path] = set()  # folders that this process is writing


def rank_file(rank: int) -> str:
    """Where a rank's tensors are."""
    return f"rank-{rank:03}.safetensors"


def report_file(rank: int) -> str:
    """While it is being written: where a rank says what came of its part."""
    return f"report-{rank:03}.json"


def overlap(
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


def moved(where: tuple[slice, ...], rows: int = 0) -> tuple[slice, ...]:
    """The same part, so many rows further on."""
    if not rows:
        return where
    return (slice(where[0].start + rows, where[0].stop + rows), *where[1:])


# -- one checkpoint ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Checkpoint:
    """A checkpoint on disk: ``dtkit.Checkpoint("runs/a")`` is the newest whole one there, or the folder itself.

    ``model_into(model)`` and ``state_dict()`` give the weights, without any engine; ``cluster.train(resume=...)`` goes
    on with all of it.
    """

    path: Path
    head: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __init__(self, path: str | Path) -> None:
        """Raises CheckpointError where there is none, or where it can't be read."""
        folder = newest(given("Checkpoint(path", path))
        object.__setattr__(self, "path", folder)
        object.__setattr__(self, "head", read_head(folder))

    @property
    def step(self) -> int:
        """Steps that were taken."""
        return int(self.head["step"])

    @property
    def strategy(self) -> str:
        """The strategy that it was made by, as a user would type it."""
        return str(self.head["spec"]["strategy"])

    @property
    def world_size(self) -> int:
        """On how many ranks it was made."""
        return int(self.head["spec"]["world_size"])

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(int(file["bytes"]) for file in self.head["files"].values())

    @property
    def created(self) -> float:
        """When it was made: seconds since the epoch, as time.time()."""
        return float(self.head["created"])

    @property
    def parameters(self) -> int:
        """Numbers in the model's state dict."""
        return sum(math.prod(entry["shape"]) for entry in self.entries().values())

    def entries(self) -> dict[str, Any]:
        """{name in the model's state dict: dtype, shape, pieces}, tied names included."""
        index = self.head["index"]
        found = {name.removeprefix("model/"): entry for name, entry in index.items() if name.startswith("model/")}
        aliases = self.head["facts"]["aliases"].get("model", {})
        return found | {name: found[first] for name, first in aliases.items()}

    def damage(self) -> list[str]:
        """What is wrong with its files, by their digests: nothing, if all is well. Reads all of them."""
        with ThreadPoolExecutor(4) as pool:  # digests are made outside of the interpreter's lock
            found = pool.map(lambda item: _damage(self.path / item[0], item[1]), self.head["files"].items())
            return [word for word in found if word]

    def check(self) -> None:
        """Raise CheckpointError where a file is damaged, naming which and how."""
        if wrong := self.damage():
            raise CheckpointError(f"{self.path} can't be used: {'; '.join(wrong)}. {_REMEDY}")

    def check_fits(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError where names, shapes or dtypes are not those of a model's state dict."""
        saved = self.entries()
        mine = {name: value for name, value in state.items() if hasattr(value, "dtype")}
        wrong = [f"it lacks {_listed(mine.keys() - saved.keys())}"] if mine.keys() - saved.keys() else []
        if saved.keys() - mine.keys():
            wrong.append(f"the model lacks {_listed(saved.keys() - mine.keys())}")
        for name in sorted(mine.keys() & saved.keys()):
            shape, dtype = tuple(saved[name]["shape"]), saved[name]["dtype"]
            if shape != tuple(mine[name].shape):
                wrong.append(f"{name} has shape {shape} there and {tuple(mine[name].shape)} in the model")
            elif dtype != _dtype(mine[name]):
                wrong.append(f"{name} is {dtype} there and {_dtype(mine[name])} in the model")
        if wrong:
            shown = wrong[:5] + ([f"and {len(wrong) - 5} more"] if len(wrong) > 5 else [])
            raise CheckpointError(
                f"{self.path} is of another model ({self.head['spec']['name']}): {'; '.join(shown)}. Give the model "
                "that it was made from"
            )

    def history(self) -> History:
        """What every rank did in every step until then."""
        from dtkit.history.history import History

        return History.from_jsonl(self.path / HISTORY)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's weights, as tensors on the CPU. Raises CheckpointError where files are damaged."""
        from dtkit.checkpoint.json_values import decode
        from dtkit.engine.state.safetensors_file import FileReader

        self.check()
        facts = self.head["facts"]
        state: dict[str, torch.Tensor] = {}
        with FileReader(self.path, self.head["index"], list(self.head["files"]), facts) as reader:
            aliases = facts["aliases"].get("model", {})
            for name, entry in self.entries().items():
                shape = entry["shape"]
                state[name] = reader.read(f"model/{aliases.get(name, name)}", [0] * len(shape), shape)
        return state | {name: decode(value) for name, value in facts["extra"].items()}

    def model_into(self, model: torch.nn.Module) -> torch.nn.Module:
        """Load the weights into a model, and return it. Raises CheckpointError where they are of another model."""
        self.check_fits(model.state_dict())
        model.load_state_dict(self.state_dict())
        return model

    def _facts(self) -> dict[str, str]:
        spec = self.head["spec"]
        return {
            "model": f"{spec['name']}, {self.parameters:,} numbers",
            "step": f"{self.step} of {spec['steps']}, epoch {self.step // spec['steps_per_epoch']}",
            "made by": f"{self.strategy} on {formatting.plural(self.world_size, 'rank')}",
            "optimiser": str(spec["optimizer"]),
            "size": f"{formatting.size(self.nbytes)} in {formatting.plural(len(self.head['files']), 'file')}",
            "age": formatting.duration(max(0.0, time.time() - self.created)),
            "state": _state_of(self.path, self.head["files"]),
        }

    def __repr__(self) -> str:
        lines = [f"Checkpoint {self.path}"]
        return "\n".join(lines + [f"  {name:10} {value}" for name, value in self._facts().items()])

    def _repr_html_(self) -> str:
        rows = [f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in self._facts().items()]
        return f"<p>Checkpoint <code>{html.escape(str(self.path))}</code></p><table>{''.join(rows)}</table>"


_REMEDY = (
    "Use an older checkpoint: dtkit.checkpoints(folder) lists them, and resume= takes the folder of any of them by name"
)


def _state_of(folder: Path, files: Mapping[str, Any]) -> str:
    """What can be said at a glance, without reading: `damage` reads."""
    wrong = [name for name, entry in files.items() if _size(folder / name) != entry["bytes"]]
    return f"DAMAGED: {_listed(wrong)}" if wrong else "whole, by its files' sizes (damage() reads them)"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _damage(path: Path, entry: Mapping[str, Any]) -> str:
    """What is wrong with a file; empty where it is as it was written."""
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"{path.name} has {size:,} bytes in place of {entry['bytes']:,}"
        return (
            "" if digest_of(path) == entry["digest"] else f"{path.name} is not as it was written (its digest differs)"
        )
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} can't be read ({error.strerror})"


def digest_of(path: Path) -> str:
    """BLAKE2b of a file's bytes, 128 bits, hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(_CHUNK):
            digest.update(part)
    return digest.hexdigest()


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")


def _dtype(tensor: Any) -> str:
    from dtkit.engine.state.safetensors_file import DTYPES

    return DTYPES.get(tensor.dtype, str(tensor.dtype))


# -- reading checkpoint.json -----------------------------------------------------------------------------------


def read_head(folder: Path) -> dict[str, Any]:
    """What checkpoint.json says, once it was looked at from all sides. Raises CheckpointError."""
    path = folder / HEAD
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder} can't be used: {HEAD} can't be read ({error.strerror}). {_REMEDY}") from None
    try:
        head = json.loads(text)
        told = head.pop("digest")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is damaged: it is cut short, or no JSON of a checkpoint. {_REMEDY}") from None
    if told != _self_digest(head):
        raise CheckpointError(f"{path} is not as it was written (its digest differs). {_REMEDY}")
    _check_head(path, head)
    found: dict[str, Any] = head
    return found


def _self_digest(head: Mapping[str, Any]) -> str:
    text = json.dumps(head, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _check_head(path: Path, head: Mapping[str, Any]) -> None:
    format_ = head.get("format")
    if isinstance(format_, int) and format_ > FORMAT:
        raise CheckpointError(
            f"{path} has format {format_}, made by dtkit {head.get('dtkit')}; this dtkit reads up to {FORMAT}. "
            "Use a newer dtkit"
        )
    if wrong := _wrong_in(head):
        raise CheckpointError(f"{path} {wrong}. {_REMEDY}")
    try:
        strangers = [name for name in head["files"] if not _FILE.fullmatch(name)]
        holes = [name for name, entry in head["index"].items() if not _covered(entry, len(head["files"]))]
        sizes = sum(int(entry["bytes"]) for entry in head["files"].values())
    except (KeyError, TypeError, AttributeError, ValueError):
        raise CheckpointError(f"{path} lacks what a checkpoint must say. {_REMEDY}") from None
    if strangers:
        raise CheckpointError(f"{path} names {strangers[0]!r}, which is no file of a checkpoint; it is not used")
    if holes or sizes < 0:
        raise CheckpointError(f"{path} lacks {f'parts of {_listed(holes)}' if holes else 'its files'}. {_REMEDY}")


_COUNT, _FROM_1, _NUMBER = "an integer from 0 up", "an integer from 1 up", "a finite number"
_OBJECT, _TEXT = "an object", "text"
_KINDS: dict[str, Callable[[Any], bool]] = {
    _COUNT: lambda value: type(value) is int and value >= 0,
    _FROM_1: lambda value: type(value) is int and value >= 1,
    _NUMBER: lambda value: type(value) in (int, float) and math.isfinite(value),
    _OBJECT: lambda value: isinstance(value, dict),
    _TEXT: lambda value: isinstance(value, str),
}
_SAID = {
    "format": _FROM_1,
    "created": _NUMBER,
    "step": _COUNT,
    **dict.fromkeys(("spec", "facts", "files", "index"), _OBJECT),
    **{f"spec/{name}": _TEXT for name in ("name", "strategy", "optimizer", "loss")},
    **{f"spec/{name}": _FROM_1 for name in ("world_size", "batch_size", "steps", "steps_per_epoch")},
    **{f"facts/{name}": _OBJECT for name in ("layout", "values", "optimizers", "aliases", "extra", "own")},
}
"""What checkpoint.json must say, in this order."""


def _wrong_in(head: Mapping[str, Any]) -> str:
    """The first thing that is not said, or is not of its kind; empty where all is well."""
    for path, kind in _SAID.items():
        name, _, inner = path.partition("/")
        found = head[name] if inner else head
        key = inner or name
        if key not in found:
            return f"lacks {path}"
        if not _KINDS[kind](found[key]):
            return f"says {path}={str(found[key])[:40]!r}, which must be {kind}"
    return ""


def _covered(entry: Mapping[str, Any], files: int) -> bool:
    """Whether the pieces of a tensor make up the whole, each within it and none upon another."""
    shape, pieces = entry["shape"], entry["pieces"]
    if entry["dtype"] not in _SIZES or not all(file in range(files) for file, *_ in pieces):
        return False
    inside = all(
        len(begin) == len(size) == len(shape)
        and all(min(b, n) >= 0 and b + n <= whole for b, n, whole in zip(begin, size, shape, strict=True))
        and (not row or (len(row) == 1 and len(shape) > 0 and row[0] >= 0))
        for _, begin, size, *row in pieces
    )
    return bool(inside and sum(math.prod(size) for _, _, size, *_ in pieces) == math.prod(shape))


# -- folders of checkpoints ------------------------------------------------------------------------------------


def given(argument: str, path: Any) -> Path:
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


def newest(path: Path) -> Path:
    """The folder itself if it is a checkpoint, else the newest one in it, whole or not: an older one is the user's
    to choose.
    """
    if (path / HEAD).exists() or _NAME.fullmatch(path.name):
        return path
    if not path.exists():
        raise CheckpointError(f"{path} is not there. Give a checkpoint's folder, or the one that run.save was given")
    found = folders(path)
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint: no folder step-... is in it")
    return found[-1]


def folders(path: Path) -> list[Path]:
    """The checkpoints' folders, whole or not, oldest first."""
    try:
        found = [p for p in path.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
    except NotADirectoryError:
        raise CheckpointError(f"{path} is a file; checkpoints are folders") from None
    return sorted(found, key=lambda p: (_changed(p), p.name))


def _changed(folder: Path) -> float:
    """When it was written: a rename, or a file that is removed, changes the folder's own time."""
    for path in (folder / HEAD, folder / HISTORY, folder):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


class Checkpoints(list[Checkpoint]):
    """The checkpoints of a folder, oldest first. ``broken`` has what is wrong with those that can't be read."""

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = given("checkpoints(path", path)
        self.broken: dict[Path, str] = {}
        if not self.path.exists():
            raise CheckpointError(f"{self.path} is not there. Give the folder that run.save or save_to was given")
        for folder in folders(self.path):
            try:
                self.append(Checkpoint(folder))
            except CheckpointError as error:
                self.broken[folder] = str(error)

    def _rows(self) -> list[list[str]]:
        rows = [["folder", "step", "made by", "numbers", "size", "age", "state"]]
        for one in self:
            facts = one._facts()  # noqa: SLF001 - this module's own
            by, numbers = facts["made by"], f"{one.parameters:,}"
            rows.append(
                [one.path.name, str(one.step), by, numbers, formatting.size(one.nbytes), facts["age"], facts["state"]]
            )
        return rows + [[folder.name, "", "", "", "", "", f"DAMAGED: {why}"] for folder, why in self.broken.items()]

    def __repr__(self) -> str:
        rows = self._rows()
        lines = formatting.columns(rows, left=range(len(rows[0])))
        return "\n".join([f"checkpoints in {self.path}", *lines]) if len(rows) > 1 else f"no checkpoints in {self.path}"

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        made = "".join(f"<th>{name}</th>" for name in head)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
        return f"<p>Checkpoints in <code>{html.escape(str(self.path))}</code></p><table><tr>{made}</tr>{body}</table>"


def checkpoints(path: str | Path) -> Checkpoints:
    """The checkpoints in a folder that `run.save` or ``train(save_to=...)`` wrote to, as a table; oldest first."""
    return Checkpoints(path)


# -- writing ---------------------------------------------------------------------------------------------------


def begin(path: Path) -> Path:
    """A new folder to write a checkpoint into, once what earlier saves left unfinished is gone."""
    path.mkdir(parents=True, exist_ok=True)
    for left in unfinished(path):
        shutil.rmtree(left, ignore_errors=True)
    folder = path / f".saving-{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
    folder.mkdir()
    _at_work.add(folder)
    return folder


def abandon(folder: Path) -> None:
    """Remove a folder that `begin` made: the checkpoint will not be."""
    shutil.rmtree(folder, ignore_errors=True)
    _at_work.discard(folder)


def unfinished(path: Path) -> list[Path]:
    """Folders of saves that ended before they were done: their process is gone, or went on to another save."""
    return [p for p in path.iterdir() if (found := _UNFINISHED.fullmatch(p.name)) and _is_left(p, found)]


def _is_left(folder: Path, name: re.Match[str]) -> bool:
    if name["host"] != socket.gethostname():
        return time.time() - _changed(folder) > _KEPT_S
    pid = int(name["pid"])
    if pid == os.getpid():
        return folder not in _at_work
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def finish(folder: Path, head: Mapping[str, Any]) -> Path:
    """Write checkpoint.json, and give the folder its name: from here on it is a checkpoint."""
    whole = {"format": FORMAT, "created": time.time(), **head}
    write_text(folder / HEAD, json.dumps({**whole, "digest": _self_digest(json.loads(json.dumps(whole)))}))
    _sync(folder)
    target = _free_name(folder.parent, int(head["step"]))
    folder.rename(target)
    _at_work.discard(folder)
    _sync(folder.parent)
    return target


def _free_name(path: Path, step: int) -> Path:
    """What is there is never replaced: a rename over a folder could not be done in one go."""
    names = [f"step-{step:08}", *(f"step-{step:08}.{k}" for k in range(2, 10_000))]
    return next(path / name for name in names if not (path / name).exists())


def write_text(path: Path, text: str) -> None:
    """Write a file, on the disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Have a folder's entries on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(path: Path, keep: int, line: Line = ()) -> list[Path]:
    """Remove all checkpoints but the newest `keep`; returns those removed. With `line`, only that run's and those of
    the runs that it goes on from.
    """
    old = [folder for folder in folders(path) if not line or _is_of(folder, line)][:-keep]
    for folder in old:
        away = path / f".saving-{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        with contextlib.suppress(FileNotFoundError):  # another run that goes on from it was quicker
            folder.rename(away)  # at once no checkpoint any more, and never half of one
        shutil.rmtree(away, ignore_errors=True)
    return old


def line_of(head: Mapping[str, Any]) -> Line:
    """Of which run a checkpoint is, after those that led to it; empty of one that was saved by hand."""
    return tuple(map(str, head.get("line") or ()))


def _is_of(folder: Path, line: Line) -> bool:
    """Whether a checkpoint is of this run, or of one before it. What can't be read is nobody's to remove."""
    try:
        found = _line_in(folder, _changed(folder))
    except CheckpointError:
        return False
    return bool(found) and found == line[: len(found)]


@functools.lru_cache(maxsize=1024)
def _line_in(folder: Path, _changed: float) -> Line:
    """As `line_of`. A large model's checkpoint.json takes long to read: it is read once, for as long as it stays."""
    return line_of(read_head(folder))


# -- what ranks report -----------------------------------------------------------------------------------------


def merge(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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
    return merged | {"optimizers": {place: _one_optimizer(found) for place, found in places.items()}}


def _one_optimizer(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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


def index_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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

"""Folders of checkpoints: their names, creation, completion and removal."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtkit._util import files, timeouts
from dtkit._util.suffixes import FOLDER, check_suffix
from dtkit.checkpoint.validation import (
    FORMAT_VERSION,
    HISTORY_FILE,
    METADATA_FILE,
    compute_metadata_digest,
    read_metadata,
)
from dtkit.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

TOKEN_FILE = "token"  # noqa: S105 - not a secret
"""File of an unfinished checkpoint. By its content, engines recognize the notebook's folder."""
STAGING_FOLDER = "checkpoints"
"""Folder in a host's private one, for the files of checkpoints whose folder that host doesn't see."""
_FOLDER_PATTERN = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_UNFINISHED_PATTERN = re.compile(r"\.saving-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]+")

_MAX_NAME_CHARS = 40

Lineage = tuple[str, ...]
"""Names of runs. Each run continues the previous one."""

_active_folders: set[Path] = set()  # unfinished folders that this process is writing


def get_rank_filename(rank: int) -> str:
    """Return the name of the file with a rank's tensors."""
    return f"rank-{rank:03}.safetensors"


def get_report_filename(rank: int) -> str:
    """Return the name of a rank's report in an unfinished checkpoint."""
    return f"report-{rank:03}.json"


def parse_path(argument: str, path: Any) -> Path:
    """Return the folder that a user named. Raises TypeError or ValueError, with the argument's name."""
    call = f"{argument}={path!r}{')' * argument.count('(')}"
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise TypeError(f"{call}: it must be the name of a folder, a text or a Path, such as 'checkpoints/first'")
    path = os.fspath(path)
    if not path.strip() or "\0" in path:
        raise ValueError(f"{call}: this is not the name of a folder. Use a name such as 'checkpoints/first'")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{call}: there is no such user. Write the home folder in full, or '~' for yours") from None


def parse_new_folder(argument: str, path: Any) -> Path:
    """Return the folder that a user named to write to, as `parse_path` does. Refuse the name of a file."""
    folder = parse_path(argument, path)
    start = "" if argument.endswith("(") else "="
    check_suffix(f"{argument}{start}", path, FOLDER)
    return folder


def make_default_folder(name: str, run_id: str) -> Path:
    """Return the folder for one run's checkpoints if the user names none: of its name, the time, and its id."""
    clean = re.sub(r"[^A-Za-z0-9_-]+", "-", name[:_MAX_NAME_CHARS]).strip("-") or "run"
    return Path("checkpoints", f"{clean}-{time.strftime('%Y%m%d-%H%M%S')}-{run_id[:4]}").absolute()


def find_newest(path: Path) -> Path:
    """Return the folder itself if it is a checkpoint, else the newest one in it.

    The newest one may be damaged, because only the user can decide to go back to an older one. Raises CheckpointError
    if others are of runs that neither led to the newest one's run nor continue it.
    """
    if (path / METADATA_FILE).exists() or _FOLDER_PATTERN.fullmatch(path.name):
        return path
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Give a checkpoint's folder, or the one that run.save was given")
    folders = list_folders(path)
    if not folders:
        runs = [folder.name for folder in sorted(path.iterdir()) if folder.is_dir() and list_folders(folder)]
        remedy = f"Give one of the folders of runs in it: {', '.join(runs)}" if runs else "Give another folder"
        raise CheckpointError(f"{path} has no checkpoint: no folder step-... is in it. {remedy}")
    _check_one_run(path, folders)
    return folders[-1]


def _check_one_run(path: Path, folders: list[Path]) -> None:
    """Raise CheckpointError if the folder has checkpoints of runs that don't continue each other."""
    newest = _read_run(folders[-1])
    foreign = [folder for folder in folders if not _continues(_read_run(folder), newest)]
    if foreign:
        raise CheckpointError(
            f"{path} has checkpoints of different runs, and this can't tell which one is meant. Name one of them: "
            f"{folders[-1].name} is the newest, and {foreign[-1].name} is the last one of another run"
        )


def _read_run(folder: Path) -> Lineage:
    """Return a checkpoint's run after those that it continues; empty if unknown."""
    try:
        return _read_lineages(folder, _get_modified_time(folder))[1]
    except CheckpointError:
        return ()


def _continues(one: Lineage, other: Lineage) -> bool:
    """Return whether one of two runs continues the other, as far as is known."""
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def list_folders(path: Path) -> list[Path]:
    """Return the folders of checkpoints, oldest first; they may be damaged."""
    try:
        folders = [p for p in path.iterdir() if _FOLDER_PATTERN.fullmatch(p.name) and p.is_dir()]
    except NotADirectoryError:
        raise CheckpointError(f"{path} is a file; checkpoints are folders") from None
    return sorted(folders, key=lambda p: (_get_modified_time(p), p.name))


def _get_modified_time(folder: Path) -> float:
    """Return the time of writing. The folder's own time is the last resort, because removing a file changes it."""
    for path in (folder / METADATA_FILE, folder / HISTORY_FILE, folder):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


# -- writing ---------------------------------------------------------------------------------------------------


def begin_checkpoint(path: Path) -> Path:
    """Create a folder to write a checkpoint into, and remove unfinished ones of earlier saves."""
    path.mkdir(parents=True, exist_ok=True)
    for unfinished in find_unfinished(path):
        shutil.rmtree(unfinished, ignore_errors=True)
    folder = _make_unfinished_path(path)
    folder.mkdir()
    _active_folders.add(folder)
    return folder


def abandon_checkpoint(folder: Path) -> None:
    """Remove a folder that :func:`begin_checkpoint` created, although ranks may still be writing into it."""
    _remove_folder(folder)
    _active_folders.discard(folder)


def _remove_folder(folder: Path) -> None:
    """Remove a folder under another name, so that meanwhile nobody can add a file to it or read a part."""
    trash = _make_unfinished_path(folder.parent)
    try:
        folder.rename(trash)
    except OSError:  # another process may have removed it, or the file system may be read-only
        trash = folder
    shutil.rmtree(trash, ignore_errors=True)


def find_unfinished(path: Path) -> list[Path]:
    """Return folders of saves that ended early: their process is gone, or has begun another save."""
    matches = ((p, _UNFINISHED_PATTERN.fullmatch(p.name)) for p in path.iterdir())
    return [p for p, match in matches if match and _is_abandoned(p, match)]


def _make_unfinished_path(path: Path) -> Path:
    return path / f".saving-{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"


def _is_abandoned(folder: Path, name: re.Match[str]) -> bool:
    if name["host"] != socket.gethostname():
        return time.time() - _get_modified_time(folder) > timeouts.UNFINISHED_MAX_AGE_S
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
    """Write checkpoint.json and rename the folder, which makes it a checkpoint."""
    fields = {"format": FORMAT_VERSION, "created": time.time(), **metadata}
    digest = compute_metadata_digest(json.loads(json.dumps(fields)))
    files.write_synced(folder / METADATA_FILE, json.dumps({**fields, "digest": digest}))
    files.sync(folder)
    target = _find_free_name(folder.parent, int(metadata["step"]))
    folder.rename(target)
    _active_folders.discard(folder)
    files.sync(folder.parent)
    return target


def _find_free_name(path: Path, step: int) -> Path:
    """Return a new name, because a rename can't replace a folder with files in it."""
    names = [f"step-{step:08}", *(f"step-{step:08}.{k}" for k in range(2, 10_000))]
    return next(path / name for name in names if not (path / name).exists())


# -- removing old ones -----------------------------------------------------------------------------------------


def prune_checkpoints(path: Path, keep_last: int, lineage: Lineage = ()) -> list[Path]:
    """Remove all checkpoints but the last ones, and return the removed ones.

    With `lineage`, only checkpoints of these runs are counted and removed.
    """
    old = [folder for folder in list_folders(path) if not lineage or _is_in_lineage(folder, lineage)][:-keep_last]
    for folder in old:
        _remove_folder(folder)
    return old


def get_lineage(metadata: Mapping[str, Any]) -> Lineage:
    """Return the lineage of a checkpoint, its own run last; empty if the user saved it by hand."""
    return tuple(map(str, metadata.get("line") or ()))


def get_run_lineage(metadata: Mapping[str, Any]) -> Lineage:
    """Return the run of a checkpoint, after those that it continues, whoever saved it; empty if unknown."""
    return tuple(map(str, metadata.get("run") or metadata.get("line") or ()))


def _is_in_lineage(folder: Path, lineage: Lineage) -> bool:
    """Return whether a checkpoint is of these runs. One that can't be read is not."""
    try:
        checkpoint_lineage = _read_lineages(folder, _get_modified_time(folder))[0]
    except CheckpointError:
        return False
    return bool(checkpoint_lineage) and checkpoint_lineage == lineage[: len(checkpoint_lineage)]


@functools.lru_cache(maxsize=1024)
def _read_lineages(folder: Path, _modified_time: float) -> tuple[Lineage, Lineage]:
    """Return a checkpoint's lineage and its run's, from a cache: large models have much metadata."""
    metadata = read_metadata(folder)
    return get_lineage(metadata), get_run_lineage(metadata)

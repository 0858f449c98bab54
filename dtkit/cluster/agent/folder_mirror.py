"""A host's folder that follows the notebook's, and reports its own changes.

Engines write status files and unread results into their host's folder, as they do on the notebook's host. The notebook
copies them into its own folder, so its readers need not know about hosts. The notebook sends back only names: those of
flags and of runs' folders.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from dtkit.cluster.agent.protocol import MirrorReply, MirrorRequest
from dtkit.history.run_log import RUNS_FOLDER
from dtkit.messages import ABORT_FLAG, END_EARLY_PREFIX

if TYPE_CHECKING:
    from pathlib import Path

FLAG_PATTERNS = (f"{END_EARLY_PREFIX}*", f"store-*{ABORT_FLAG}")
_REPORTED_PATTERNS = ("status-*.json", f"{RUNS_FOLDER}/*/unread-*")
_Version = tuple[int, int]


class FolderMirror:
    """The host's side of the mirrored folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._reader = folder, ""
        self._sent: dict[str, _Version] = {}

    def exchange(self, request: MirrorRequest) -> MirrorReply:
        """Set and remove flags, make runs' folders, and return the changes."""
        if request.reader != self._reader:
            self._reader, self._sent = request.reader, {}
        self._follow(request)
        versions = self._list_versions()
        changed = [name for name, version in versions.items() if self._sent.get(name) != version]
        files = {name: data for name in changed if (data := self._read(name)) is not None}
        removed = [name for name in self._sent if name not in versions]
        self._sent = {name: version for name, version in versions.items() if name in files or name not in changed}
        return MirrorReply(files, removed)

    def _follow(self, request: MirrorRequest) -> None:
        present = set(list_flags(self._folder))
        for name in request.flags - present:
            (self._folder / name).touch(mode=0o600)
        for name in present - request.flags:
            (self._folder / name).unlink(missing_ok=True)
        runs = self._folder / RUNS_FOLDER
        runs.mkdir(mode=0o700, exist_ok=True)
        present = {path.name for path in runs.iterdir()}
        for name in request.runs - present:
            (runs / name).mkdir(mode=0o700, exist_ok=True)
        for name in present - request.runs:
            shutil.rmtree(runs / name, ignore_errors=True)

    def _list_versions(self) -> dict[str, _Version]:
        versions = {}
        for pattern in _REPORTED_PATTERNS:
            for path in self._folder.glob(pattern):
                try:
                    status = path.stat()
                except FileNotFoundError:  # engines replace and remove their files all the time
                    continue
                versions[str(path.relative_to(self._folder))] = status.st_mtime_ns, status.st_size
        return versions

    def _read(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None


def list_flags(folder: Path) -> list[str]:
    """Return the names of the flags in a folder."""
    return [path.name for pattern in FLAG_PATTERNS for path in folder.glob(pattern)]


def list_runs(folder: Path) -> list[str]:
    """Return the names of the runs with a folder."""
    runs = folder / RUNS_FOLDER
    return [path.name for path in runs.iterdir()] if runs.exists() else []

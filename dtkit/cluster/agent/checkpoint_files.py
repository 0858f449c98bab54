"""Files of checkpoints on a host that doesn't see the checkpoint's folder.

Engines write their parts here, and the notebook fetches them. To resume, the notebook sends the files here, and the
engines read them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from dtkit.checkpoint.folders import STAGING_FOLDER
from dtkit.checkpoint.validation import METADATA_FILE

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class CheckpointFiles:
    """Files by the token of their checkpoint and by name, in one host's private folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / STAGING_FOLDER

    def sees(self, folder: str, metadata: str) -> bool:
        """Return whether this host sees a finished checkpoint, whose checkpoint.json has this text."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return Path(folder, METADATA_FILE).read_text(encoding="utf-8") == metadata
        return False

    def list_sizes(self, token: str) -> dict[str, int]:
        """Return the files of a checkpoint, with their sizes in bytes."""
        sizes = {}
        with contextlib.suppress(FileNotFoundError):
            for path in self._get_folder(token).iterdir():
                with contextlib.suppress(FileNotFoundError):  # engines rename their files
                    sizes[path.name] = path.stat().st_size
        return sizes

    def read(self, token: str, name: str, offset: int, size: int) -> bytes:
        """Return `size` bytes of a file, fewer at its end."""
        with self._get_path(token, name).open("rb") as file:
            return os.pread(file.fileno(), size, offset)

    def write(self, token: str, name: str, offset: int, data: bytes) -> None:
        """Write a part of a file. Raises OSError if the disk is full."""
        path = self._get_path(token, name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                written = os.pwrite(descriptor, view, offset)
                view, offset = view[written:], offset + written
        finally:
            os.close(descriptor)

    def remove(self, token: str) -> None:
        """Delete the files of a checkpoint. Idempotent."""
        shutil.rmtree(self._get_folder(token), ignore_errors=True)

    def get_path(self, token: str) -> str:
        """Return the folder of a checkpoint on this host."""
        return str(self._get_folder(token))

    def _get_folder(self, token: str) -> Path:
        return self._folder / _check_name(token)

    def _get_path(self, token: str, name: str) -> Path:
        return self._get_folder(token) / _check_name(name)


def _check_name(name: str) -> str:
    """Return a name that stays within its folder. Raises ValueError for others."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a checkpoint's file")
    return name

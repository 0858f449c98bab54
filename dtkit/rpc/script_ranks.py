"""The engines of a script's ranks, in a file that the notebook writes and the script's processes read.

A *slot* is the rank of an engine in the cluster when the script starts; it never changes. The script's own ranks change
if an engine is lost and the script continues with fewer. Each change has a version, and a new store at which the
processes meet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from typing import TYPE_CHECKING

from dtkit._util import files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FOLDER_VARIABLE = "DTKIT_SCRIPT_FOLDER"
"""Environment variable of a script's process: the folder of :class:`ScriptFolder`."""
SLOT_VARIABLE = "DTKIT_SCRIPT_SLOT"
"""Environment variable of a script's process: its slot."""
ELASTIC_VARIABLE = "DTKIT_ELASTIC_FILE"
"""Environment variable of a process: a file that it creates if it survives the loss of other ranks."""
FOLDER_PREFIX = "script-"
"""Prefix of the names of these folders, in the cluster's folder."""


@dataclasses.dataclass(frozen=True)
class ScriptRanks:
    """The slots of a script's ranks, in order of rank."""

    version: int
    slots: tuple[int, ...]

    def find_rank(self, slot: int) -> int | None:
        """Return the rank of a slot; None if it has none any more."""
        return self.slots.index(slot) if slot in self.slots else None

    def make_environment(self, slot: int) -> dict[str, str]:
        """Return torchrun's and Horovod's variables of a slot. All ranks are on one host."""
        rank, size = str(self.find_rank(slot)), str(len(self.slots))
        names = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank}
        names |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "ROLE_WORLD_SIZE": size}
        horovod = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
        return names | {f"HOROVOD_{name}": value for name, value in horovod.items()}


class ScriptFolder:
    """A folder of one script, which its ranks and the notebook share."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, slots: Sequence[int]) -> ScriptFolder:
        """Create the folder, with the initial ranks."""
        path.mkdir(mode=0o700)
        folder = cls(path)
        folder.write(ScriptRanks(0, tuple(slots)))
        return folder

    def write(self, ranks: ScriptRanks) -> None:
        """Replace the ranks. Processes that form a group notice it."""
        files.replace_file(self.path / "ranks.json", json.dumps(dataclasses.asdict(ranks)))

    def read(self) -> ScriptRanks:
        """Return the current ranks."""
        fields = json.loads((self.path / "ranks.json").read_text())
        return ScriptRanks(fields["version"], tuple(fields["slots"]))

    def get_store(self, version: int) -> Path:
        """Return the file at which the ranks of a version meet."""
        return self.path / f"store-{version}"

    @property
    def elastic_file(self) -> Path:
        """The file that a process creates if it survives the loss of other ranks."""
        return self.path / "elastic"

    def mark_ended(self, slot: int) -> None:
        """Note that a slot has ended the script without an error, so that no other slot waits for it."""
        with contextlib.suppress(FileNotFoundError):  # the notebook has given the script up
            (self.path / f"ended-{slot}").touch(mode=0o600)

    def find_ended(self, ranks: ScriptRanks) -> list[int]:
        """Return the ranks whose slots have ended the script."""
        return [rank for rank, slot in enumerate(ranks.slots) if (self.path / f"ended-{slot}").exists()]

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)

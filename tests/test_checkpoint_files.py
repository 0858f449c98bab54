"""A host's files of checkpoints whose folder it doesn't see."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from dtkit.checkpoint.folders import STAGING_FOLDER, abandon_checkpoint, begin_checkpoint
from dtkit.cluster.agent.checkpoint_files import CheckpointFiles


def test_files_are_written_listed_read_and_removed(tmp_path: Path):
    files = CheckpointFiles(tmp_path)
    files.write("abc", "rank-000.safetensors", 0, b"0123")
    files.write("abc", "rank-000.safetensors", 4, b"45")
    assert files.list_sizes("abc") == {"rank-000.safetensors": 6}
    assert files.read("abc", "rank-000.safetensors", 1, 4) == b"1234"
    assert files.read("abc", "rank-000.safetensors", 6, 4) == b""
    assert Path(files.get_path("abc")) == tmp_path / STAGING_FOLDER / "abc"
    files.remove("abc")
    files.remove("abc")
    assert files.list_sizes("abc") == {}


@pytest.mark.parametrize(("token", "name"), [("..", "a"), ("abc", "../a"), ("abc", "/etc/passwd"), ("", "a")])
def test_names_cannot_leave_the_folder(tmp_path: Path, token: str, name: str):
    with pytest.raises(ValueError, match="is not the name of a checkpoint's file"):
        CheckpointFiles(tmp_path).read(token, name, 0, 1)


def test_a_finished_checkpoint_is_recognized_by_its_metadata(tmp_path: Path):
    (tmp_path / "checkpoint.json").write_text("{}")
    files = CheckpointFiles(tmp_path / "private")
    assert files.sees(str(tmp_path), "{}")
    assert not files.sees(str(tmp_path), "another")
    assert not files.sees(str(tmp_path / "nowhere"), "{}")


def test_a_rank_that_still_writes_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A rank adds its report after the notebook has listed the folder, and before it removes the folder."""
    folder, rmdir = begin_checkpoint(tmp_path), os.rmdir
    (folder / "rank-000.safetensors").touch()

    def write_and_remove(*args: Any, **options: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            (folder / "report-000.json").touch()
        rmdir(*args, **options)

    monkeypatch.setattr(os, "rmdir", write_and_remove)
    abandon_checkpoint(folder)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []

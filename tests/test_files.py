"""Files that are replaced atomically or only appended to."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest

from dtkit._util import files

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("data", "expected"), [(b"\xff\x00", b"\xff\x00"), ("é", "é".encode())])
def test_replace_file_writes_bytes_or_text_as_a_private_file(tmp_path: Path, data: bytes | str, expected: bytes):
    path = tmp_path / "file"
    path.write_text("something longer than the new content")
    files.replace_file(path, data)
    assert path.read_bytes() == expected
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_replace_file_keeps_the_old_file_when_the_disk_is_full(small_disk: Path):
    path = small_disk / "file"
    files.replace_file(path, b"old")
    with pytest.raises(OSError, match="No space left"):
        files.replace_file(path, bytes(2**24))
    assert path.read_bytes() == b"old"
    assert [p.name for p in small_disk.iterdir()] == ["file"]


def test_replace_file_leaves_no_temporary_file_when_the_target_is_a_folder(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        files.replace_file(tmp_path / "folder", b"data")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_readers_see_the_old_or_the_new_content_only(tmp_path: Path):
    path = tmp_path / "file"
    files.replace_file(path, b"old")
    with path.open("rb") as reader:
        files.replace_file(path, b"new")
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"


def test_write_synced_writes_text_and_sync_accepts_files_and_folders(tmp_path: Path):
    files.write_synced(tmp_path / "file", "text")
    files.sync(tmp_path / "file")
    files.sync(tmp_path)
    assert (tmp_path / "file").read_text() == "text"
    with pytest.raises(FileNotFoundError):
        files.sync(tmp_path / "missing")


def test_append_only_file_replaces_an_older_file_with_its_first_record(tmp_path: Path):
    path = tmp_path / "log"
    path.write_bytes(b"older")
    file = files.AppendOnlyFile(path)
    assert path.read_bytes() == b"older"
    file.append(b"one")
    file.append(b"two")
    assert path.read_bytes() == b"onetwo"
    assert path.stat().st_mode & 0o777 == 0o600


def test_append_only_file_leaves_a_newer_file_at_its_path_alone(tmp_path: Path):
    older, newer = files.AppendOnlyFile(tmp_path / "log"), files.AppendOnlyFile(tmp_path / "log")
    older.append(b"older")
    newer.append(b"newer")
    older.append(b"more")
    assert (tmp_path / "log").read_bytes() == b"newer"


def test_append_only_file_ignores_records_after_close(tmp_path: Path):
    file = files.AppendOnlyFile(tmp_path / "log")
    file.append(b"one")
    file.close()
    file.close()
    file.append(b"two")
    assert (tmp_path / "log").read_bytes() == b"one"


def test_append_only_file_is_closed_with_its_object(tmp_path: Path):
    file = files.AppendOnlyFile(tmp_path / "log")
    file.append(b"one")
    descriptor = file._descriptor
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_append_only_file_writes_records_later_when_the_disk_has_room_again(small_disk: Path):
    file = files.AppendOnlyFile(small_disk / "log")
    file.append(b"one")
    with contextlib.suppress(OSError):
        (small_disk / "filler").write_bytes(bytes(2**24))
    record = b"x" * 2**16
    file.append(record)
    assert file.write_error == "No space left on device"
    (small_disk / "filler").unlink()
    file.append(b"end")
    assert file.write_error is None
    assert (small_disk / "log").read_bytes() == b"one" + record + b"end"

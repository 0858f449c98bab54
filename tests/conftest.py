"""What every test shares. Keep it small: a fixture that one file needs lives in that file."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

# Before any test imports torch: on two cores, each process that takes both slows all the others down.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M", "dtkit-test", str(folder)]
    if shutil.which("mount") is None or subprocess.call(mount, stderr=subprocess.DEVNULL, timeout=10):
        pytest.skip("mounting a file system takes rights that this user does not have")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=10)

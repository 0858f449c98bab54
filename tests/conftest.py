"""Fixtures of all tests. A fixture that only one file needs belongs in that file."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

# Set before any test imports torch: on two cores, processes with two threads each slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def root() -> Path:
    """Root of the repository."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """File system of one megabyte; the test is skipped where this user can't mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M", "dtkit-test", str(folder)]
    if shutil.which("mount") is None or subprocess.call(mount, stderr=subprocess.DEVNULL, timeout=10):
        pytest.skip("this user has no right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=10)

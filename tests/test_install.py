"""An editable install: `import dtkit` works in the folder above a clone, too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

import dtkit

if TYPE_CHECKING:
    from pathlib import Path


def test_dtkit_is_imported_from_the_folder_above_a_clone_named_dtkit(root: Path, tmp_path: Path):
    """There, Python takes the clone for a package without __init__.py, before any finder is asked."""
    pytest.importorskip("setuptools")
    clone, wheels, site = tmp_path / "dtkit", tmp_path / "wheels", tmp_path / "site"
    ignored = shutil.ignore_patterns("__pycache__", "static")
    shutil.copytree(root / "dtkit", clone / "dtkit", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, clone / name)
    wheels.mkdir()
    build = f"from setuptools import build_meta; build_meta.build_editable({str(wheels)!r})"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run(build, clone, environment)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = f"import site; site.addsitedir({str(site)!r}); import sys; import dtkit; print(dtkit.__file__)"
    # Without the folders of the tests' own environment: it has an editable install, too.
    done = run(code, tmp_path, environment, "-S")
    assert done.strip() == str(clone / "dtkit" / "__init__.py")


def test_windows_is_refused_with_the_remedy():
    with pytest.raises(ImportError, match=r"this is Windows. Install it in WSL"):
        dtkit._check_platform("win32")


def run(code: str, folder: Path, environment: dict[str, str], *options: str) -> str:
    """Run Python code in a folder, and return what it prints."""
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

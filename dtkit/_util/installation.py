"""Version and place of this installation of dtkit.

Modules read them here, since an import of the root package, which names all public classes, would form a circle.
"""

from __future__ import annotations

from pathlib import Path

VERSION = "0.1.0"
PACKAGE_FOLDER = Path(__file__).parent.parent
"""The folder dtkit/."""


def count_differing_files(folder: Path) -> int:
    """Return how many of the Python files of this installation and of another one differ, or are in one of them."""
    names = {path.relative_to(root) for root in (PACKAGE_FOLDER, folder) for path in root.rglob("*.py")}
    return sum(_read(PACKAGE_FOLDER / name) != _read(folder / name) for name in names)


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None

"""Version and place of this installation of dtkit.

Modules read them here, since an import of the root package, which names all public classes, would form a circle.
"""

from __future__ import annotations

from pathlib import Path

VERSION = "0.1.0"
PACKAGE_FOLDER = Path(__file__).parent.parent
"""The folder dtkit/."""

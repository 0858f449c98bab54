"""Lock of a cluster's folder, as another process sees it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def is_owned(folder: Path) -> bool:
    """Return whether another process, such as the reaper, finds the folder owned."""
    imports = "from pathlib import Path; from dtkit.cluster import reaper"
    code = f"{imports}; print(reaper._is_owned_elsewhere(Path({str(folder)!r})))"
    process = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=30)
    return process.stdout == "True\n"

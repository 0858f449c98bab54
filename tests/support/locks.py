"""Whether a cluster's folder is locked, as another process sees it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def owned(folder: Path) -> bool:
    """What the warden finds, which is a process of its own."""
    imports = "from pathlib import Path; from dtkit.cluster import reaper"
    ask = f"{imports}; print(reaper._is_owned_elsewhere(Path({str(folder)!r})))"
    said = subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True, timeout=30)
    return said.stdout == "True\n"

"""A limit on what an engine may allocate: too large a model is then an error there, and not the end of the host.

RLIMIT_DATA counts private writable memory. Reaching it makes torch raise a plain RuntimeError, and the process goes on.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

VARIABLE = "DTKIT_MEMORY_LIMIT"


def limit_memory() -> None:
    """Allow this process as many bytes as the environment says, on top of what it has loaded by now."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + int(text), hard))


def _data_bytes() -> int:
    """This process's private data by now (VmData); 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = [int(line.split()[1]) for line in lines if line.startswith("VmData:")]
    return 1024 * found[0] if found else 0

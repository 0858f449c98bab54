"""Detection of a Jupyter kernel."""

from __future__ import annotations

import sys


def in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel, whose page can show widgets."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None

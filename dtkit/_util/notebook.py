"""Detection of a Jupyter kernel, and displays in its cells."""

from __future__ import annotations

import sys
from typing import Any


def in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel, whose page can show widgets."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class UpdatableDisplay:
    """A display in the cell that runs when it is first shown. Any thread may update it."""

    def __init__(self) -> None:
        self._handle: Any = None

    @property
    def is_shown(self) -> bool:
        """Whether the display was made."""
        return self._handle is not None

    def show(self, data: dict[str, str]) -> None:
        """Show a MIME bundle, or replace the one that is shown."""
        from IPython.display import display

        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(data, raw=True)

"""Orderly end of a script on SIGTERM, together with its engines.

Python ends at once on SIGTERM, without its exit handlers. Engines would then wait for another notebook until their
lease is over. Schedulers and ``timeout`` send SIGTERM. A notebook's kernel handles the signal itself.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

from dtkit._util.notebook import in_notebook

if TYPE_CHECKING:
    from types import FrameType

_EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a process that SIGTERM has ended, as shells report it."""


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit in a script, unless the script has a handler of its own."""
    is_script = threading.current_thread() is threading.main_thread() and not in_notebook()
    if is_script and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def _exit(_signum: int, _frame: FrameType | None) -> None:
    raise SystemExit(_EXIT_CODE)

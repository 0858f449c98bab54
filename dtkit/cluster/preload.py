"""Modules that the first training needs, loaded while the notebook waits for its engines."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading

_FIRST_TRAINING = "dtkit.strategies.data_parallel"  # its parts of torch take 0.7 s


def load_for_training() -> None:
    """Load them in a thread, if the user has loaded torch. Otherwise the engines may be meant for something else."""
    if "torch" in sys.modules:
        threading.Thread(target=_load, name="dtkit-preload", daemon=True).start()


def _load() -> None:
    with contextlib.suppress(ImportError):  # the training that needs the module raises it
        importlib.import_module(_FIRST_TRAINING)

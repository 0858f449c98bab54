"""Startup of each script's fresh process. Python imports a module of this name before the script.

A process that exits with a gloo group aborts now and then, because threads of the group still run. So a group that the
script leaves is destroyed at exit.
"""

from __future__ import annotations

import atexit
import importlib
import sys
from pathlib import Path


def destroy_process_group() -> None:
    """Destroy the process group, if there is one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def import_hidden_module() -> None:
    """Import the environment's own module of this name, which this module hides."""
    folder = str(Path(__file__).parent)
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    this_module = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ModuleNotFoundError:
        sys.modules[__name__] = this_module


if __name__ == "sitecustomize":
    atexit.register(destroy_process_group)
    import_hidden_module()

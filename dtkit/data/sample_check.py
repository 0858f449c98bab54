"""Errors of the user's Dataset for the first rows: which of them every engine would meet."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.guard import run_guarded
from dtkit.engine.data.sources import DATASET_NOTE
from dtkit.engine.error_hints import add_general_hint
from dtkit.engine.observe.error_report import format_message, format_traceback, list_user_frames, name_error
from dtkit.errors import FirstBatchError

if TYPE_CHECKING:
    from collections.abc import Callable

_DISTRIBUTED_FOLDER = Path(torch.distributed.__file__).parent
_OF_THIS_MACHINE = (ImportError, MemoryError, OSError)
"""Errors that a host with other files, packages or memory may not have."""


def load_samples(load: Callable[[], Any], part: str, purpose: str, *, has_collate_fn: bool) -> Any:
    """Return the batch that `load` returns. Raise FirstBatchError instead of an error that engines would meet too.

    The user's own `collate_fn` may refuse a batch only because it is small.
    """

    def explain(error: Exception) -> Exception:
        add_general_hint(error)
        notes = getattr(error, "__notes__", ())
        is_of_batch = has_collate_fn and not any(note.startswith(DATASET_NOTE) for note in notes)
        if is_of_batch or _may_be_of_notebook(error):
            return error
        message = f"{name_error(error)}: {format_message(error)}"
        return FirstBatchError(message, list_user_frames(error), format_traceback(error), part, purpose)

    batch = run_guarded(load, explain)
    if isinstance(batch, Exception):
        raise batch
    return batch


def _may_be_of_notebook(error: Exception) -> bool:
    """Return whether the notebook may lack what engines have: files, a GPU, a process group, or a worker's number."""
    lacks_worker = isinstance(error, AttributeError) and error.obj is None  # as get_worker_info().id
    needs_group = any(
        Path(frame.filename).is_relative_to(_DISTRIBUTED_FOLDER) for frame in traceback.extract_tb(error.__traceback__)
    )
    return isinstance(error, _OF_THIS_MACHINE) or lacks_worker or needs_group or "CUDA" in str(error)

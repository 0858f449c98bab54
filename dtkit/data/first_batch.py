"""A trial of the first rows in the notebook, which finds wrong shapes and types before anything is sent.

Model and loss are copied as the engines would get them. So the trial changes nothing in the notebook: no parameter, no
buffer, no variable of a function, and no random number. It refuses only errors whose remedy is known. Any other error
may come from the trial itself, such as a collective without engines, and is left to the engines' first step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import traceback
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dtkit._util.guard import run_guarded
from dtkit.data.broadcast import ModelHandle
from dtkit.data.columns import ColumnSelection, is_sample_list
from dtkit.data.distribute import DataHandle
from dtkit.data.notebook_data import NUM_FIRST_ROWS, copy_first_rows
from dtkit.data.partition import Partition
from dtkit.engine.data.random_state import preserve_generators
from dtkit.engine.data.sources import as_source, map_tensors
from dtkit.engine.error_hints import add_hints
from dtkit.engine.observe.error_report import format_message, format_traceback, list_user_frames
from dtkit.errors import FirstBatchError
from dtkit.rpc import pickling
from dtkit.strategies import loss as loss_module

if TYPE_CHECKING:
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.strategies.loss import Loss

_MAX_COPIED_BYTES = 64 * 2**20
"""Size up to which a model or a Dataset is copied: in about 50 ms."""
_MAX_ELEMENTS = 2**20
"""Numbers in a batch up to which the forward pass is short."""


def check_first_batch(
    engine_group: EngineGroup, model: Any, program: bytes, data: Any, columns: ColumnSelection
) -> None:
    """Raise FirstBatchError if model and loss refuse the first rows, and the remedy is known.

    No-op where a trial would be long or impossible. Examples are large models and rows, data that engines load, and
    models on other devices or in 16 bits. Another one is a training step that updates the model itself.
    """
    with preserve_generators(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # silent: what can't be copied or read here, the engines report when they get it
        trial = run_guarded(lambda: _prepare(engine_group, model, program, data, columns), lambda _: None)
        error = None if trial is None else run_guarded(trial.run, trial.explain)
    if error is not None:
        raise error


@dataclasses.dataclass(frozen=True)
class _Trial:
    """Copies of model and loss, and a batch."""

    model: torch.nn.Module
    loss: Loss
    batch: Any

    def run(self) -> None:
        """Compute the loss of the batch."""
        self.loss(self.model.train(), self.batch)

    def explain(self, error: Exception) -> FirstBatchError | None:
        """Return the error for the user; None if its remedy is not known."""
        add_hints(error, [(NUM_FIRST_ROWS, self.batch)], self.model)
        frames = traceback.extract_tb(error.__traceback__)
        is_own_check = frames[-1].filename == loss_module.__file__
        if not is_own_check and not getattr(error, "__notes__", ()):
            return None
        message = f"{type(error).__name__}: {format_message(error)}"
        return FirstBatchError(message, list_user_frames(error), format_traceback(error))


def _prepare(
    engine_group: EngineGroup, model: Any, program: bytes, data: Any, columns: ColumnSelection
) -> _Trial | None:
    """Return a trial; None where there is none."""
    # unpickles: the program of this notebook
    loss = pickling.loads(program).loss_fn
    if loss.is_manual:
        return None
    batch = _take_first_batch(engine_group, data, columns)
    if batch is None or _count_elements(batch) > _MAX_ELEMENTS:
        return None
    copied = _copy_model(engine_group, model)
    return None if copied is None else _Trial(copied, dataclasses.replace(loss, check_ignore_index=False), batch)


def _copy_model(engine_group: EngineGroup, model: Any) -> torch.nn.Module | None:
    """Return a copy of the model as the engines get it; None if it is large, compiled, in 16 bits or on a device."""
    if isinstance(model, ModelHandle):
        copied = model.build_model() if model.nbytes <= _MAX_COPIED_BYTES else None
    else:
        tensors = [*model.parameters(), *model.buffers()]
        if any(t.device.type != "cpu" for t in tensors) or sum(t.nbytes for t in tensors) > _MAX_COPIED_BYTES:
            return None
        copied = _copy_as_sent(engine_group, model)
    if copied is None or any(type(m).__name__ == "OptimizedModule" for m in copied.modules()):
        return None
    kinds = {p.dtype for p in copied.parameters() if p.is_floating_point()}
    return copied if kinds <= {torch.float32, torch.float64} else None


def _copy_as_sent(engine_group: EngineGroup, value: Any) -> Any:
    """Return a copy that shares nothing with the notebook's value; None if it is large."""
    packed = engine_group.uploads.pack(value, name=type(value).__name__)
    if packed.nbytes > _MAX_COPIED_BYTES:
        return None
    return pickling.unpack_object(packed.header, [bytearray(buffer) for buffer in packed.buffers])


def _take_first_batch(engine_group: EngineGroup, data: Any, columns: ColumnSelection) -> Any:
    """Return a batch of the first rows, as engines make it; None where the notebook has no rows."""
    if isinstance(data, Partition):
        rows = data.source.first_rows if isinstance(data.source, DataHandle) else None
        return None if rows is None else _make_batch(rows, ColumnSelection())
    if isinstance(data, type) or not hasattr(data, "__getitem__") or isinstance(data, str):
        return None
    if columns.collate_fn is None and (rows := copy_first_rows(data)) is not None:
        return _make_batch(rows, columns)
    if not hasattr(data, "__len__") or isinstance(data, (tuple, dict)):
        return None
    samples = _copy_as_sent(engine_group, data[:NUM_FIRST_ROWS] if is_sample_list(data) else data)
    return None if samples is None else _make_batch(samples, columns)


def _make_batch(data: Any, columns: ColumnSelection) -> Any:
    source: Any = as_source(data, columns)
    return source.take(np.arange(min(NUM_FIRST_ROWS, len(source)), dtype=np.int32))


def _count_elements(batch: Any) -> int:
    total = 0

    def add(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.numel()
        return tensor

    map_tensors(batch, add)
    return total

"""Copies of model, loss and first rows, to try in the notebook as engines would get them."""

from __future__ import annotations

import dataclasses
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dtkit._util.guard import run_guarded
from dtkit.data.broadcast import ModelHandle
from dtkit.data.columns import ColumnSelection, is_sample_list
from dtkit.data.distribute import DataHandle
from dtkit.data.loss_check import has_trainable
from dtkit.data.notebook_data import NUM_FIRST_ROWS, copy_first_rows
from dtkit.data.pairing import PairedRowsError, PairingDetector
from dtkit.data.partition import Partition
from dtkit.data.sample_check import load_samples
from dtkit.engine.attribute_hints import is_torchs
from dtkit.engine.data.sources import ArraySource, as_source, map_tensors
from dtkit.engine.error_hints import add_hints
from dtkit.engine.loss_hints import DETACHED_MESSAGE
from dtkit.engine.observe.error_report import format_message, format_traceback, list_user_frames
from dtkit.errors import FirstBatchError
from dtkit.rpc import pickling
from dtkit.strategies import class_weights
from dtkit.strategies import loss as loss_module
from dtkit.strategies.loss import get_labels
from dtkit.strategies.module_modes import enter_training

if TYPE_CHECKING:
    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.strategies.base import Strategy, TrainingProgram
    from dtkit.strategies.loss import EvalOutput, Loss

_CHECKING_FILES = (class_weights.__file__, loss_module.__file__)
"""Files whose errors name the remedy themselves."""
MAX_COPIED_BYTES = 64 * 2**20
"""Size up to which a model or a Dataset is copied: in about 50 ms."""
FEWEST_ROWS = 2  # of large rows, and of a Dataset, whose code may be slow
MAX_ELEMENTS = 2**20
"""Numbers in a batch up to which the forward pass is short."""


@dataclasses.dataclass(frozen=True)
class TrialInputs:
    """A training as far as a trial needs it."""

    engine_group: EngineGroup
    model: Any
    program: bytes
    data: Any
    columns: ColumnSelection


@dataclasses.dataclass(frozen=True)
class Trial:
    """Copies of model and loss, and a batch."""

    model: torch.nn.Module
    loss: Loss
    batch: Any
    num_rows: int
    detector: PairingDetector
    strategy: Strategy
    all_rows: ArraySource | None = None
    """The data's arrays, if the notebook has them in memory."""
    part: str = "the first batch"
    """What the user calls this batch."""
    purpose: str = "training"
    """What the trial precedes."""

    def replace_batch(self, batch: Any, num_rows: int, part: str) -> Trial:
        """Return a trial of another batch."""
        detector = _make_detector(self.loss, self.model, batch, num_rows)
        return dataclasses.replace(self, batch=batch, num_rows=num_rows, detector=detector, part=part)

    def run(self) -> torch.Tensor:
        """Return the loss of the batch."""
        with torch.enable_grad():  # as engines do
            value, _ = self.loss(enter_training(self.model), self.batch)
        if not (value.requires_grad or torch.is_inference_mode_enabled()) and has_trainable(self.model):
            raise RuntimeError(DETACHED_MESSAGE)
        return value

    def run_backward(self, loss: torch.Tensor) -> list[str]:
        """Compute the gradients, which fails where an operation has overwritten what they need.

        Return the names of the parameters that get none.
        """
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not parameters or not loss.requires_grad:
            return []
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return [name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None]

    def evaluate(self) -> EvalOutput:
        """Return the model's output for the batch, for metrics."""
        with torch.no_grad():
            return self.loss.evaluate_batch(self.model.eval(), self.batch)

    def explain_pairing(self, error: Exception) -> FirstBatchError | None:
        """Return the error for the user if it is about each output with every target; else None."""
        return self.make_error(error, str(error)) if isinstance(error, PairedRowsError) else None

    def explain(self, error: Exception) -> FirstBatchError | None:
        """Return the error for the user; None if its remedy is not known."""
        if isinstance(error, PairedRowsError):
            return self.explain_pairing(error)
        all_labels = None if self.all_rows is None else self.all_rows.labels
        add_hints(error, [(self.num_rows, self.batch)], self.model, all_labels)
        frames = traceback.extract_tb(error.__traceback__)
        is_logging = str(error).startswith(("dtkit.log(", "dtkit.log of"))  # it hides its frames
        is_own_check = is_logging or frames[-1].filename in _CHECKING_FILES
        if not is_own_check and not is_torchs(error) and not getattr(error, "__notes__", ()):
            return None
        return self.make_error(error, f"{type(error).__name__}: {format_message(error)}")

    def make_error(self, error: Exception, message: str) -> FirstBatchError:
        """Return the error for the user, with the lines where another one was raised."""
        return FirstBatchError(message, list_user_frames(error), format_traceback(error), self.part, self.purpose)


def prepare_trial(inputs: TrialInputs, part: str = "the first batch", purpose: str = "training") -> Trial | None:
    """Return a trial; None where there is none. Raise FirstBatchError if the user's Dataset fails."""
    # unpickles: the program of this notebook
    loaded: TrainingProgram = pickling.loads(inputs.program)
    loss = loaded.loss_fn
    if loss.is_manual:
        return None
    source = get_first_rows(inputs)
    if source is None or not len(source):
        return None
    num_rows = NUM_FIRST_ROWS if isinstance(source, ArraySource) else FEWEST_ROWS
    if isinstance(source, ArraySource):  # whose errors later checks explain
        batch = make_batch(source, num_rows)
    else:
        has_collate_fn = inputs.columns.collate_fn is not None
        batch = load_samples(lambda: make_batch(source, num_rows), part, purpose, has_collate_fn=has_collate_fn)
    if count_elements(batch) > MAX_ELEMENTS:
        num_rows = FEWEST_ROWS
        batch = make_batch(source, num_rows)
    if count_elements(batch) > MAX_ELEMENTS:
        return None
    copied = _copy_model(inputs.engine_group, inputs.model)
    loss = dataclasses.replace(loss, check_ignore_index=False)
    if copied is None:
        return None
    num_rows = min(num_rows, len(source))
    detector = _make_detector(loss, copied, batch, num_rows)
    all_rows = _get_whole_arrays(inputs)
    return Trial(copied, loss, batch, num_rows, detector, loaded.strategy, all_rows, part, purpose)


def _make_detector(loss: Loss, model: torch.nn.Module, batch: Any, num_rows: int) -> PairingDetector:
    targets = batch if loss.training_step is not None else get_labels(batch)
    return PairingDetector("the loss", num_rows, targets, model)


def _copy_model(engine_group: EngineGroup, model: Any) -> torch.nn.Module | None:
    """Return a copy of the model as engines get it; None for a large, compiled or 16-bit model, or on a device."""
    if isinstance(model, ModelHandle):
        copied = model.build_model() if model.nbytes <= MAX_COPIED_BYTES else None
    else:
        tensors = [*model.parameters(), *model.buffers()]
        if any(t.device.type != "cpu" for t in tensors) or sum(t.nbytes for t in tensors) > MAX_COPIED_BYTES:
            return None
        copied = copy_as_sent(engine_group, model)
    if copied is None or any(type(m).__name__ == "OptimizedModule" for m in copied.modules()):
        return None
    kinds = {p.dtype for p in copied.parameters() if p.is_floating_point()}
    return copied if kinds <= {torch.float32, torch.float64} else None


def copy_as_sent(engine_group: EngineGroup, value: Any) -> Any:
    """Return a copy that shares nothing with the notebook's value; None if it is large."""
    packed = engine_group.uploads.pack(value, name=type(value).__name__)
    if packed.nbytes > MAX_COPIED_BYTES:
        return None
    return pickling.unpack_object(packed.header, [bytearray(buffer) for buffer in packed.buffers])


def get_first_rows(inputs: TrialInputs) -> Any:
    """Return a source of the first rows, from which engines would make a batch; None where the notebook has no rows."""
    data, columns = inputs.data, inputs.columns
    if isinstance(data, (Partition, DataHandle)):
        handle = data.source if isinstance(data, Partition) else data
        rows = handle.first_rows if isinstance(handle, DataHandle) else None
        return None if rows is None else as_source(rows, ColumnSelection())
    if isinstance(data, type) or not hasattr(data, "__getitem__") or isinstance(data, str):
        return None
    if columns.collate_fn is None and (rows := copy_first_rows(data)) is not None:
        return as_source(rows, columns)
    if not hasattr(data, "__len__") or isinstance(data, (tuple, dict)):
        return None
    samples = copy_as_sent(inputs.engine_group, data[:NUM_FIRST_ROWS] if is_sample_list(data) else data)
    return None if samples is None else as_source(samples, columns)


def _get_whole_arrays(inputs: TrialInputs) -> ArraySource | None:
    """Return a source of arrays that the notebook has in memory; None for all other data. Nothing is copied."""
    data, columns = inputs.data, inputs.columns
    if isinstance(data, Partition) or columns.collate_fn is not None or copy_first_rows(data) is None:
        return None
    # silent: what can't be converted here, the engines report when they get it
    source = run_guarded(lambda: as_source(data, columns), lambda _: None)
    return source if isinstance(source, ArraySource) else None


def make_batch(source: Any, num_rows: int) -> Any:
    """Return a batch of the first rows."""
    return source.take(np.arange(min(num_rows, len(source)), dtype=np.int32))


def count_elements(batch: Any) -> int:
    """Return how many numbers a batch has."""
    total = 0

    def add(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.numel()
        return tensor

    map_tensors(batch, add)
    return total

"""A trial of the first rows in the notebook, which finds wrong shapes and types before anything is sent.

Model and loss are copied as the engines would get them. So the trial changes nothing in the notebook: no parameter,
buffer, variable of a function, or random number. It refuses only errors whose remedy is known. Any other error may come
from the trial itself, such as a collective without engines. It is left to the engines' first step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import traceback
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from dtkit._util.guard import return_error, run_guarded
from dtkit.data.broadcast import ModelHandle, find_batch_norms
from dtkit.data.buffer_check import describe_batch_statistics
from dtkit.data.columns import ColumnSelection, is_sample_list
from dtkit.data.distribute import DataHandle, unwrap_data_loader
from dtkit.data.extreme_rows import complete_rows, find_extreme_rows
from dtkit.data.layout_check import describe_difference
from dtkit.data.loss_check import (
    check_gradients_reach_model,
    check_target_shape,
    describe_parts,
    has_trainable,
)
from dtkit.data.metric_check import check_metrics
from dtkit.data.notebook_data import NUM_FIRST_ROWS, copy_first_rows
from dtkit.data.output_check import describe_activated_output
from dtkit.data.pairing import PairedRowsError, PairingDetector
from dtkit.data.partition import Partition
from dtkit.data.square_output import check_square_output
from dtkit.engine.bad_rows import describe_first_bad
from dtkit.engine.data.random_state import preserve_generators
from dtkit.engine.data.sources import ArraySource, as_source, map_tensors
from dtkit.engine.error_hints import add_hints
from dtkit.engine.loss_hints import DETACHED_MESSAGE
from dtkit.engine.observe.call_output import ignore_logged, redirect_log
from dtkit.engine.observe.error_report import format_message, format_traceback, list_user_frames
from dtkit.engine.observe.step_scalars import check_logged_names
from dtkit.errors import FirstBatchError, format_ranks
from dtkit.rpc import pickling
from dtkit.strategies import loss as loss_module
from dtkit.strategies.loss import get_labels
from dtkit.strategies.module_modes import enter_training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.strategies.base import TrainingProgram
    from dtkit.strategies.loss import EvalOutput, Loss

_MAX_COPIED_BYTES = 64 * 2**20
"""Size up to which a model or a Dataset is copied: in about 50 ms."""
_FEWEST_ROWS = 2  # of large rows, and of a Dataset, whose code may be slow
_MAX_ELEMENTS = 2**20
"""Numbers in a batch up to which the forward pass is short."""
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class HeldOutWords:
    """What the user calls held-out data, in errors about them."""

    argument: str
    name: str
    purpose: str


VALIDATION = HeldOutWords("validation=", "validation", "training")
EVALUATION = HeldOutWords("run.evaluate(data)", "evaluation", "evaluation")


@dataclasses.dataclass(frozen=True)
class TrialInputs:
    """A training as far as a trial needs it."""

    engine_group: EngineGroup
    model: Any
    program: bytes
    data: Any
    columns: ColumnSelection


def check_first_batch(inputs: TrialInputs, *, divides_batch: bool, uses_all_rows: bool) -> list[str]:
    """Raise FirstBatchError if model and loss refuse the first rows, and the remedy is known.

    A training that `uses_all_rows` has a second batch tried: with the rows of arrays that it would refuse first.

    Return warnings: of a softmax or sigmoid before a loss that contains it and, with `divides_batch`, of a loss that
    is not a mean over samples. Raise ValueError for a sum, and for a loss whose gradients don't reach the model.

    No-op where a trial would be long or impossible. Examples are large models and rows, data that engines load, and
    models on other devices or in 16 bits. Another one is a training step that updates the model itself.
    """
    with _isolate(), redirect_log(check_logged_names):
        # silent: what can't be copied or read here, the engines report when they get it
        trial = run_guarded(lambda: _prepare(inputs), lambda _: None)
        outcome = None if trial is None else _try(trial, trial.run)
        if trial is None or outcome is None:
            return []
        if uses_all_rows:
            _check_rows_are_finite(trial, outcome, np.arange(trial.num_rows))
            _try_extreme_rows(trial, _get_whole_arrays(inputs), lambda further: further.run())
        check_gradients_reach_model(outcome, trial.model)
        check_square_output(trial.loss, trial.model, trial.batch)
        if (error := run_guarded(lambda: trial.run_backward(outcome), trial.explain)) is not None:
            raise error
        # silent: the loss was computed, so what fails is the trial's evaluation mode
        activation = run_guarded(
            lambda: describe_activated_output(trial.loss, trial.model, trial.batch), lambda _: None
        )
        return [text for text in (activation, _describe_division(trial) if divides_batch else None) if text is not None]


@contextlib.contextmanager
def _isolate() -> Iterator[None]:
    """Keep what a trial prints, warns of and draws from random generators within the context."""
    with preserve_generators(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _describe_division(trial: _Trial) -> str | None:
    """Return a warning if ranks with parts of a batch train differently from one process with the whole batch."""
    warning = describe_parts(trial.loss, trial.model, trial.batch, shares_router_losses=trial.shares_router_losses)
    if warning is not None and (meant := trial.detector.meant) is not None:
        return f"{warning}. This loss combines {meant.describe()}, each output with every target"
    if warning is not None or find_batch_norms(trial.model):  # which have a warning of their own
        return warning
    return describe_batch_statistics(trial.loss, trial.model, trial.batch)


def check_held_out(
    inputs: TrialInputs, held_out_data: Any, metrics: Any, words: HeldOutWords = VALIDATION
) -> list[str]:
    """Raise FirstBatchError if model, loss or a metric refuse the first rows of held-out data, named by `words`.

    If they differ from the training's in shape or type, the error is about that.

    Return the names of what a validation step of the model evaluates. Without such a step, and where there is no
    trial, there are none. The model is in evaluation mode, without gradients. Columns are the training's.

    No-op for errors whose remedy is not known, or that a few rows can cause, such as a score that needs two classes,
    and where there is no trial.
    """
    with _isolate(), redirect_log(ignore_logged):
        # silent: what can't be copied or read here, the engines report when they get it
        held_out = run_guarded(lambda: _replace_data(inputs, held_out_data), lambda _: None)
        # silent: as above
        trial = None if held_out is None else run_guarded(lambda: _prepare(held_out), lambda _: None)
        if held_out is None or trial is None:
            return []
        trial = dataclasses.replace(trial, part=f"the first batch of {words.argument}", purpose=words.purpose)
        # silent: without the first rows of a training, nothing can be compared
        training_batch = run_guarded(lambda: _get_training_batch(inputs), lambda _: None)
        if training_batch is not None:
            _blame_difference(trial, describe_difference(training_batch, trial.batch, words.name))
        output = _try(trial, trial.evaluate)
        if output is None:
            return []
        _check_rows_are_finite(trial, output.loss, np.arange(trial.num_rows))
        _try_extreme_rows(trial, _get_whole_arrays(held_out), lambda further: further.evaluate().loss)
        if metrics:
            # silent: what can't be copied here, the engines report when they get it
            copied = run_guarded(lambda: _copy_as_sent(inputs.engine_group, dict(metrics)), lambda _: None)
            check_metrics(copied or {}, output, trial.num_rows, inputs.engine_group.world_size)
        return ["loss", *(name for name in output.logged if name != "loss")] if output.logged else []


def _get_training_batch(inputs: TrialInputs) -> Any:
    source = _get_first_rows(inputs)
    return None if source is None or not len(source) else _make_batch(source, _FEWEST_ROWS)


def _blame_difference(trial: _Trial, difference: str | None) -> None:
    """Raise FirstBatchError with a difference from the training's data, if any, if the model refuses this batch."""
    if difference is None:
        return
    error = run_guarded(trial.evaluate, return_error)
    if isinstance(error, Exception):
        raise trial.make_error(error, difference)


def _try_extreme_rows(trial: _Trial, source: ArraySource | None, take: Callable[[_Trial], torch.Tensor]) -> None:
    """Raise FirstBatchError if a batch with the rows that are refused first fails, though the first rows don't."""
    rows = [] if source is None else find_extreme_rows(source.tensors)
    if source is None or not rows or rows[-1] < trial.num_rows:
        return
    numbers = complete_rows(rows, trial.num_rows)
    # silent: rows that can't be read here, the engines report when they get them
    batch = run_guarded(lambda: source.take(numbers), lambda _: None)
    if batch is None or _count_elements(batch) > _MAX_ELEMENTS:
        return
    further = trial.replace_batch(batch, len(numbers), f"{trial.part} with {format_ranks(rows, 'row')}")
    loss = _try(further, lambda: take(further))
    _check_rows_are_finite(further, loss, numbers)


def _check_rows_are_finite(trial: _Trial, loss: torch.Tensor | None, numbers: np.ndarray) -> None:
    """Raise ValueError if the loss of a batch is not finite, like some of its numbers."""
    if loss is not None and not bool(torch.isfinite(loss).all()) and (text := describe_first_bad(trial.batch, numbers)):
        raise ValueError(f"{text}, and so is the loss of a batch with this row. Repair such rows, or leave them out")


def _get_whole_arrays(inputs: TrialInputs) -> ArraySource | None:
    """Return a source of arrays that the notebook has in memory; None for all other data. Nothing is copied."""
    data, columns = inputs.data, inputs.columns
    if isinstance(data, Partition) or columns.collate_fn is not None or copy_first_rows(data) is None:
        return None
    # silent: what can't be converted here, the engines report when they get it
    source = run_guarded(lambda: as_source(data, columns), lambda _: None)
    return source if isinstance(source, ArraySource) else None


def _try(trial: _Trial, take: Callable[[], _T]) -> _T | None:
    """Return what `take` returns, or None after an error whose remedy is not known. Raise FirstBatchError after others.

    A loss that combines each output with every target by mistake is refused, too.
    """
    outcome = run_guarded(lambda: _take_with_warnings(take, trial.detector.watch()), trial.explain_pairing)
    if outcome is None:  # the user's own error, or one of an operation that torch's modes refuse
        outcome = run_guarded(lambda: _take_with_warnings(take, contextlib.nullcontext()), trial.explain)
    if isinstance(outcome, FirstBatchError):
        raise outcome
    return outcome


def _take_with_warnings(take: Callable[[], _T], watch: contextlib.AbstractContextManager[None]) -> _T:
    """Return what `take` returns. Raise PairedRowsError if torch has warned of such a loss."""
    with warnings.catch_warnings(record=True) as caught, watch:
        warnings.simplefilter("always")
        outcome = take()
    check_target_shape(str(warning.message) for warning in caught)
    return outcome


def _replace_data(inputs: TrialInputs, held_out_data: Any) -> TrialInputs:
    rows, columns = unwrap_data_loader(held_out_data, inputs.columns)
    return dataclasses.replace(inputs, data=rows, columns=columns)


@dataclasses.dataclass(frozen=True)
class _Trial:
    """Copies of model and loss, and a batch."""

    model: torch.nn.Module
    loss: Loss
    batch: Any
    num_rows: int
    detector: PairingDetector
    shares_router_losses: bool
    part: str = "the first batch"
    """What the user calls this batch."""
    purpose: str = "training"
    """What the trial precedes."""

    def replace_batch(self, batch: Any, num_rows: int, part: str) -> _Trial:
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

    def run_backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients, which fails where an operation has overwritten what they need."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if parameters and loss.requires_grad:
            torch.autograd.grad(loss, parameters, allow_unused=True)

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
        add_hints(error, [(self.num_rows, self.batch)], self.model)
        frames = traceback.extract_tb(error.__traceback__)
        is_logging = str(error).startswith(("dtkit.log(", "dtkit.log of"))  # it hides its frames
        is_own_check = is_logging or frames[-1].filename == loss_module.__file__
        if not is_own_check and not _lacks_attribute(error) and not getattr(error, "__notes__", ()):
            return None
        return self.make_error(error, f"{type(error).__name__}: {format_message(error)}")

    def make_error(self, error: Exception, message: str) -> FirstBatchError:
        """Return the error for the user, with the lines where another one was raised."""
        return FirstBatchError(message, list_user_frames(error), format_traceback(error), self.part, self.purpose)


def _lacks_attribute(error: Exception) -> bool:
    """Return whether code asks a tensor for an attribute that none has, on whatever rank."""
    return isinstance(error, AttributeError) and isinstance(error.obj, torch.Tensor)


def _prepare(inputs: TrialInputs) -> _Trial | None:
    """Return a trial; None where there is none."""
    # unpickles: the program of this notebook
    loaded: TrainingProgram = pickling.loads(inputs.program)
    loss = loaded.loss_fn
    if loss.is_manual:
        return None
    source = _get_first_rows(inputs)
    if source is None or not len(source):
        return None
    num_rows = NUM_FIRST_ROWS if isinstance(source, ArraySource) else _FEWEST_ROWS
    batch = _make_batch(source, num_rows)
    if _count_elements(batch) > _MAX_ELEMENTS:
        num_rows = _FEWEST_ROWS
        batch = _make_batch(source, num_rows)
    if _count_elements(batch) > _MAX_ELEMENTS:
        return None
    copied = _copy_model(inputs.engine_group, inputs.model)
    loss = dataclasses.replace(loss, check_ignore_index=False)
    if copied is None:
        return None
    num_rows = min(num_rows, len(source))
    detector = _make_detector(loss, copied, batch, num_rows)
    return _Trial(copied, loss, batch, num_rows, detector, loaded.strategy.shares_router_losses)


def _make_detector(loss: Loss, model: torch.nn.Module, batch: Any, num_rows: int) -> PairingDetector:
    targets = batch if loss.training_step is not None else get_labels(batch)
    return PairingDetector("the loss", num_rows, targets, model)


def _copy_model(engine_group: EngineGroup, model: Any) -> torch.nn.Module | None:
    """Return a copy of the model as engines get it; None for a large, compiled or 16-bit model, or on a device."""
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


def _get_first_rows(inputs: TrialInputs) -> Any:
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
    samples = _copy_as_sent(inputs.engine_group, data[:NUM_FIRST_ROWS] if is_sample_list(data) else data)
    return None if samples is None else as_source(samples, columns)


def _make_batch(source: Any, num_rows: int) -> Any:
    return source.take(np.arange(min(num_rows, len(source)), dtype=np.int32))


def _count_elements(batch: Any) -> int:
    total = 0

    def add(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.numel()
        return tensor

    map_tensors(batch, add)
    return total

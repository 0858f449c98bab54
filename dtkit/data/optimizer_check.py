"""A trial of optimizer= and lr_scheduler= in the notebook, with a copy of the model whose tensors have no values.

It refuses only errors that every engine would meet too. Others may come from the trial itself, as where a function asks
for the values of parameters, or for its rank. They are left to the engines.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.guard import run_guarded
from dtkit._util.lazy_compiler import defer_compiler
from dtkit.data.broadcast import ModelHandle
from dtkit.data.first_batch import isolate
from dtkit.data.trial import MAX_COPIED_BYTES
from dtkit.engine import lr_schedule
from dtkit.engine.error_hints import add_general_hint
from dtkit.engine.observe.error_report import format_message, format_traceback, list_user_frames
from dtkit.errors import FirstBatchError
from dtkit.health.frames import classify_file
from dtkit.rpc import pickling
from dtkit.strategies import base, combined_optimizer
from dtkit.strategies.meta_copy import copy_to_meta

if TYPE_CHECKING:
    from dtkit.data.trial import TrialInputs
    from dtkit.strategies.base import TrainingProgram

_CHECKING_FILES = (base.__file__, combined_optimizer.__file__, lr_schedule.__file__)
"""Files whose errors name the remedy themselves."""
_OPTIMIZERS_FOLDER = Path(torch.optim.__file__).parent
_MISTAKES = (KeyError, TypeError, UnboundLocalError, ZeroDivisionError)


def check_optimizer(inputs: TrialInputs) -> None:
    """Raise FirstBatchError if every engine would fail to make the optimizer or the learning rates' schedule."""
    with isolate("optimizer=", "training"):
        # silent: what can't be copied here, the engines report when they get it
        copies = run_guarded(lambda: _copy(inputs), lambda _: None)
        if copies is None:
            return
        program, model = copies
        defer_compiler()  # making an optimizer would load it, which takes seconds
        optimizer = _make("optimizer=", lambda: base.make_optimizer(program.optimizer, model))
        if optimizer is not None and program.lr_scheduler is not None:
            factory, interval = program.lr_scheduler, program.lr_scheduler_interval
            _make("lr_scheduler=", lambda: lr_schedule.LRSchedule(factory, optimizer, interval))


def _copy(inputs: TrialInputs) -> tuple[TrainingProgram, torch.nn.Module] | None:
    """Return the program as engines get it, and a copy of the model without values; None where this takes long."""
    model = inputs.model
    if len(inputs.program) > MAX_COPIED_BYTES:
        return None
    if isinstance(model, ModelHandle):
        if model.nbytes > MAX_COPIED_BYTES:
            return None
        model = model.build_model()
    # unpickles: the program of this notebook
    program: TrainingProgram = pickling.loads(inputs.program)
    return None if program.loss_fn.is_manual else (program, copy_to_meta(model))


def _make(part: str, make: Any) -> Any:
    """Return what `make` returns, or None after an error that may be the trial's. Raise FirstBatchError for others."""
    made = run_guarded(make, lambda error: _explain(part, error))
    if isinstance(made, FirstBatchError):
        raise made
    return made


def _explain(part: str, error: Exception) -> FirstBatchError | None:
    """Return the error for the user; None if engines may not meet it."""
    file = traceback.extract_tb(error.__traceback__)[-1].filename
    is_explained = add_general_hint(error) or bool(getattr(error, "__notes__", ())) or file in _CHECKING_FILES
    if not is_explained and not _is_of_arguments(error, file) and not _is_of_users_line(error, file):
        return None
    message = f"{type(error).__name__}: {format_message(error)}"
    return FirstBatchError(message, list_user_frames(error), format_traceback(error), part)


def _is_of_arguments(error: Exception, file: str) -> bool:
    """Return whether torch's optimizer or schedule refuses its arguments; a RuntimeError is about the device."""
    return isinstance(error, ValueError) and Path(file).is_relative_to(_OPTIMIZERS_FOLDER)


def _is_of_users_line(error: Exception, file: str) -> bool:
    """Return whether the user's own line has a mistake that doesn't depend on the rank or on values of parameters."""
    is_of_module = isinstance(error, AttributeError) and isinstance(error.obj, ModuleType)
    return classify_file(file) == "user" and (isinstance(error, _MISTAKES) or is_of_module)

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
from dtkit.data.broadcast import find_batch_norms
from dtkit.data.buffer_check import describe_batch_statistics
from dtkit.data.distribute import unwrap_data_loader
from dtkit.data.extreme_rows import complete_rows, find_extreme_rows
from dtkit.data.layout_check import describe_difference
from dtkit.data.loss_check import check_gradients_reach_model, check_target_shape, describe_parts
from dtkit.data.metric_check import check_metrics
from dtkit.data.output_check import describe_activated_output
from dtkit.data.square_output import check_square_output
from dtkit.data.trial import (
    FEWEST_ROWS,
    MAX_ELEMENTS,
    Trial,
    TrialInputs,
    copy_as_sent,
    count_elements,
    get_first_rows,
    make_batch,
    prepare_trial,
)
from dtkit.data.unused_parameters import describe_unused
from dtkit.engine.bad_rows import describe_first_bad
from dtkit.engine.data.random_state import preserve_generators
from dtkit.engine.observe.call_output import ignore_logged, redirect_log
from dtkit.engine.observe.error_report import format_traceback, list_user_frames
from dtkit.engine.observe.step_scalars import check_logged_names
from dtkit.errors import FirstBatchError, format_ranks
from dtkit.health.frames import classify_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class HeldOutWords:
    """What the user calls held-out data, in errors about them."""

    argument: str
    name: str
    purpose: str


VALIDATION = HeldOutWords("validation=", "validation", "training")
EVALUATION = HeldOutWords("run.evaluate(data)", "evaluation", "evaluation")


def check_first_batch(inputs: TrialInputs, *, divides_batch: bool, uses_all_rows: bool) -> list[str]:
    """Raise FirstBatchError if model and loss refuse the first rows, and the remedy is known.

    A training that `uses_all_rows` has a second batch tried: with the rows of arrays that it would refuse first.

    Return warnings: of a softmax or sigmoid before a loss that contains it, of parameters without the gradient that
    the strategy needs and, with `divides_batch`, of a loss that is not a mean over samples. Raise ValueError for a sum,
    and for a loss whose gradients don't reach the model.

    No-op where a trial would be long or impossible. Examples are large models and rows, data that engines load, and
    models on other devices or in 16 bits. Another one is a training step that updates the model itself.
    """
    with isolate("the first batch", "training"), redirect_log(check_logged_names):
        trial = _prepare(inputs)
        outcome = None if trial is None else _try(trial, trial.run)
        if trial is None or outcome is None:
            return []
        if uses_all_rows:
            _check_rows_are_finite(trial, outcome, np.arange(trial.num_rows))
            _try_extreme_rows(trial, lambda further: further.run())
        check_gradients_reach_model(outcome, trial.model)
        check_square_output(trial.loss, trial.model, trial.batch)
        unused = run_guarded(lambda: trial.run_backward(outcome), trial.explain)
        if isinstance(unused, FirstBatchError):
            raise unused
        # silent: the loss was computed, so what fails is the trial's evaluation mode
        activation = run_guarded(
            lambda: describe_activated_output(trial.loss, trial.model, trial.batch), lambda _: None
        )
        has_group = inputs.engine_group.world_size > 1
        texts = (
            activation,
            _describe_division(trial) if divides_batch else None,
            describe_unused(unused, trial.model, trial.strategy) if unused and has_group else None,
        )
        return [text for text in texts if text is not None]


@contextlib.contextmanager
def isolate(part: str, purpose: str) -> Iterator[None]:
    """Keep what a trial prints, warns of and draws from random generators within the context.

    A sys.exit() in the user's code becomes a FirstBatchError: it would end a script without saying why.
    """
    with preserve_generators(), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except SystemExit as error:
            if classify_file(traceback.extract_tb(error.__traceback__)[-1].filename) == "dtkit":  # a SIGTERM's
                raise
            message = (
                f"SystemExit: {error}. Training code can't end its process; raise an error that says what is wrong"
            )
            frames, text = list_user_frames(error), format_traceback(error)
            raise FirstBatchError(message, frames, text, part, purpose) from None


def _prepare(inputs: TrialInputs, part: str = "the first batch", purpose: str = "training") -> Trial | None:
    """Return a trial; None where there is none. Raise FirstBatchError if the user's Dataset fails."""
    # what else can't be copied or read here, the engines report when they get it
    trial = run_guarded(
        lambda: prepare_trial(inputs, part, purpose),
        lambda error: error if isinstance(error, FirstBatchError) else None,
    )
    if isinstance(trial, FirstBatchError):
        raise trial
    return trial


def _describe_division(trial: Trial) -> str | None:
    """Return a warning if ranks with parts of a batch train differently from one process with the whole batch."""
    warning = describe_parts(
        trial.loss, trial.model, trial.batch, shares_router_losses=trial.strategy.shares_router_losses
    )
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
    part = f"the first batch of {words.argument}"
    with isolate(part, words.purpose), redirect_log(ignore_logged):
        # silent: what can't be copied or read here, the engines report when they get it
        held_out = run_guarded(lambda: _replace_data(inputs, held_out_data), lambda _: None)
        trial = None if held_out is None else _prepare(held_out, part, words.purpose)
        if trial is None:
            return []
        # silent: without the first rows of a training, nothing can be compared
        training_batch = run_guarded(lambda: _get_training_batch(inputs), lambda _: None)
        if training_batch is not None:
            _blame_difference(trial, describe_difference(training_batch, trial.batch, words.name))
        output = _try(trial, trial.evaluate)
        if output is None:
            return []
        _check_rows_are_finite(trial, output.loss, np.arange(trial.num_rows))
        _try_extreme_rows(trial, lambda further: further.evaluate().loss)
        if metrics:
            # silent: what can't be copied here, the engines report when they get it
            copied = run_guarded(lambda: copy_as_sent(inputs.engine_group, dict(metrics)), lambda _: None)
            world_size = inputs.engine_group.world_size
            check_metrics(copied or {}, output, trial.num_rows, world_size, part=part, purpose=words.purpose)
        return ["loss", *(name for name in output.logged if name != "loss")] if output.logged else []


def _get_training_batch(inputs: TrialInputs) -> Any:
    source = get_first_rows(inputs)
    return None if source is None or not len(source) else make_batch(source, FEWEST_ROWS)


def _blame_difference(trial: Trial, difference: str | None) -> None:
    """Raise FirstBatchError with a difference from the training's data, if any, if the model refuses this batch."""
    if difference is None:
        return
    error = run_guarded(trial.evaluate, return_error)
    if isinstance(error, Exception):
        raise trial.make_error(error, difference)


def _try_extreme_rows(trial: Trial, take: Callable[[Trial], torch.Tensor]) -> None:
    """Raise FirstBatchError if a batch with the rows that are refused first fails, though the first rows don't."""
    source = trial.all_rows
    rows = [] if source is None else find_extreme_rows(source.tensors)
    if source is None or not rows or rows[-1] < trial.num_rows:
        return
    numbers = complete_rows(rows, trial.num_rows)
    # silent: rows that can't be read here, the engines report when they get them
    batch = run_guarded(lambda: source.take(numbers), lambda _: None)
    if batch is None or count_elements(batch) > MAX_ELEMENTS:
        return
    further = trial.replace_batch(batch, len(numbers), f"{trial.part} with {format_ranks(rows, 'row')}")
    loss = _try(further, lambda: take(further))
    _check_rows_are_finite(further, loss, numbers)


def _check_rows_are_finite(trial: Trial, loss: torch.Tensor | None, numbers: np.ndarray) -> None:
    """Raise ValueError if the loss of a batch is not finite, like some of its numbers."""
    if loss is not None and not bool(torch.isfinite(loss).all()) and (text := describe_first_bad(trial.batch, numbers)):
        raise ValueError(f"{text}, and so is the loss of a batch with this row. Repair such rows, or leave them out")


def _try(trial: Trial, take: Callable[[], _T]) -> _T | None:
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

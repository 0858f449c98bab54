"""The user's loss, as a number to differentiate and a weight.

A loss is either a *mean over samples* (a scalar) or a *pair* ``(sum, weight)``. A mean counts for the number of its
samples. With pairs, ranks differentiate the sums, add up the weights, and divide gradients by the total weight. Class
weights and token means need pairs, since the mean of their means is not the mean. A :class:`LabelWeight` makes a pair
of a mean over the labels that are not ignored.

Some models return their own loss, such as those of Hugging Face's transformers if they get labels. They need neither a
loss nor a training step. Their batches are dicts of the model's arguments.
"""

from __future__ import annotations

import dataclasses
import inspect
import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.formatting import name_type
from dtkit.engine.observe.call_output import log, redirect_log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOSS_IS_MEAN, LOSS_IS_WEIGHTED_SUM = 1, 2
_TARGET_NAMES = ("label", "labels", "target", "targets", "y")
DEFAULT_IGNORE_INDEX = -100  # of torch's losses and of Hugging Face


@dataclasses.dataclass(frozen=True)
class EvalOutput:
    """A model's output for a batch. Output and target are None with a custom `training_step`."""

    output: Any
    target: Any
    loss: torch.Tensor
    loss_weight: torch.Tensor | None
    """Weight of a (sum, weight) pair; None for a mean over samples."""
    logged: Mapping[str, tuple[float, float | None]] = dataclasses.field(default_factory=dict)
    """Numbers that a training or evaluation step has logged, with the weights of pairs."""


@dataclasses.dataclass(frozen=True)
class ModelInputs:
    """Arguments of a model's forward pass."""

    values: tuple[Any, ...]
    names: tuple[str, ...] = ()
    """Names of the last values, which are keyword arguments."""

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments."""
        return self.values[: len(self.values) - len(self.names)]

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments."""
        return dict(zip(self.names, self.values[len(self.args) :], strict=True))

    def replace_values(self, values: Sequence[Any]) -> ModelInputs:
        """Return other values in these places."""
        return ModelInputs(tuple(values), self.names)

    def replace_named(self, name: str, value: Any) -> ModelInputs:
        """Return another value for one keyword argument."""
        values = list(self.values)
        values[len(self.args) + self.names.index(name)] = value
        return self.replace_values(values)

    def pass_to(self, model: Callable[..., Any]) -> Any:
        """Call the model, and return its output."""
        return model(*self.args, **self.kwargs)


@dataclasses.dataclass(frozen=True)
class LabelWeight:
    """Weight of a loss that is a mean over the labels of a batch: their number."""

    ignore_index: int
    """Label that doesn't count."""
    skips_first: bool = False
    """Whether the first label of each row doesn't count: a causal language model predicts the others."""

    def count(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the number of labels that count."""
        counted = labels[..., 1:] if self.skips_first else labels
        return (counted != self.ignore_index).sum()

    def __str__(self) -> str:
        first = " but the first of each row" if self.skips_first else ""
        return f"all labels{first} other than {self.ignore_index}"


@dataclasses.dataclass(frozen=True)
class Loss:
    """The user's ``loss(output, target)`` or ``training_step(model, batch)``; without both, the model's own loss."""

    loss_fn: Callable[..., Any] | None = None
    training_step: Callable[..., Any] | None = None
    check_ignore_index: bool = True
    """Whether to look for `ignore_index` in the targets of each batch."""
    label_weight: LabelWeight | None = None
    """Weight of a mean over labels; None for a mean over samples."""

    @property
    def is_manual(self) -> bool:
        """Whether the training step also takes the optimizers, and updates the model itself."""
        return takes_optimizers(self.training_step)

    @property
    def is_from_model(self) -> bool:
        """Whether the model computes the loss."""
        return self.loss_fn is None and self.training_step is None

    def with_checked_targets(self, targets: torch.Tensor) -> Loss:
        """Check all targets once, and return this loss without the check in each step."""
        self._refuse_ignored_targets(targets)
        return dataclasses.replace(self, check_ignore_index=False)

    def __call__(self, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (mean loss, None) or (sum, weight)."""
        if self.training_step is not None:
            return self._weigh(self.training_step(model, batch), get_labels(batch), "training_step")
        if self.loss_fn is not None:  # the common case, without the detour over names
            values, target = split_batch(batch)
            output = model(*values)
        else:
            inputs, target = self.split_batch(batch)
            output = inputs.pass_to(model)
        return self._weigh(self._compute_loss(output, target), target, "loss")

    def update_model(self, model: torch.nn.Module, batch: Any, optimizers: Sequence[Any]) -> torch.Tensor:
        """Run a training step that takes the optimizers. Return its loss, which is a mean over samples."""
        assert self.training_step is not None
        loss, weight = _check_loss_value(_take_logged(self.training_step(model, batch, optimizers)), "training_step")
        if weight is not None:
            raise TypeError(
                "training_step returned (sum, weight); with optimizers it calls backward itself, so each of its losses "
                "must be a mean over the samples. Return the mean to show"
            )
        return loss

    def evaluate_batch(self, model: torch.nn.Module, batch: Any) -> EvalOutput:
        """Return the model's output for a batch, for metrics. A training step may have a method for this."""
        if hasattr(self.training_step, "evaluate"):
            return self._run_evaluation_step(model, batch)
        if self.training_step is not None:
            logged: dict[str, Any] = {}
            with redirect_log(logged.update):
                loss, weight = self(model, batch)
            return EvalOutput(None, None, loss, weight, _weigh_logged(logged))
        inputs, target = self.split_batch(batch)
        return self.evaluate_output(inputs.pass_to(model), target)

    def _run_evaluation_step(self, model: torch.nn.Module, batch: Any) -> EvalOutput:
        logged: dict[str, Any] = {}
        with redirect_log(logged.update):
            loss = self.training_step.evaluate(model, batch, logged)  # type: ignore[union-attr]  # see above
        loss = torch.tensor(loss) if isinstance(loss, float) else loss
        return EvalOutput(None, None, *_check_loss_value(loss, "validation_step"), _weigh_logged(logged))

    def evaluate_output(self, output: Any, target: Any) -> EvalOutput:
        """Return a model's output with its target and loss. With the model's own loss, its logits are the output."""
        loss, weight = self._weigh(self._compute_loss(output, target), target, "loss")
        return EvalOutput(get_logits(output) if self.is_from_model else output, target, loss, weight)

    def split_batch(self, batch: Any) -> tuple[ModelInputs, Any]:
        """Return (the model's inputs, the target) of a batch. With the model's own loss, labels are an input too."""
        if not self.is_from_model:
            inputs, target = split_batch(batch)
            return ModelInputs(tuple(inputs)), target
        if isinstance(batch, Mapping):
            return ModelInputs(tuple(batch.values()), tuple(batch)), get_labels(batch)
        inputs, target = split_batch(batch)
        return ModelInputs((*inputs, target), ("labels",)), target

    def _weigh(self, value: Any, labels: Any, source: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (mean, None) or (sum, weight) for the result of the user's function."""
        total, weight = _check_loss_value(_take_logged(value), source)
        if weight is not None or self.label_weight is None or not isinstance(labels, torch.Tensor):
            return total, weight
        count = self.label_weight.count(labels)
        # The mean over no label is not a number, and its sum is 0.
        return torch.where(count > 0, total * count.to(total.dtype), 0.0), count.double()

    def _compute_loss(self, output: Any, target: Any) -> Any:
        if self.loss_fn is None:
            return get_model_loss(output)
        if self.check_ignore_index:
            self._refuse_ignored_targets(target)
        return self.loss_fn(output, target)

    def _refuse_ignored_targets(self, target: Any) -> None:
        ignored = getattr(self.loss_fn, "ignore_index", None) if self.label_weight is None else None
        if ignored is not None and isinstance(target, torch.Tensor) and bool((target == ignored).any()):
            raise ValueError(
                f"targets contain ignore_index={ignored}: the mean over the others is not a mean over samples. "
                f"Pass a loss that returns (sum, weight): {WEIGHTED_LOSS_EXAMPLE}"
            )


def takes_optimizers(training_step: Callable[..., Any] | None) -> bool:
    """Return whether a training step has a third parameter, for the optimizers."""
    if training_step is None:
        return False
    try:
        parameters = list(inspect.signature(training_step).parameters.values())
    except ValueError:  # a builtin without a signature
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
    return len(required) == 3


WEIGHTED_LOSS_EXAMPLE = "lambda out, y: (F.cross_entropy(out, y, ..., reduction='sum'), weight_of(y).sum())"


def get_labels(batch: Any) -> Any:
    """Return the labels of a batch: the entry "labels" of a dict, or the last one of a tuple; None without."""
    if isinstance(batch, Mapping):
        return batch.get("labels")
    return batch[-1] if isinstance(batch, tuple) and batch else None


def split_batch(batch: Any) -> tuple[Sequence[Any], Any]:
    """Return (the model's inputs, the target) of a batch."""
    if not isinstance(batch, tuple) or len(batch) < 2:
        form = f"{len(batch)} array" if isinstance(batch, tuple) else name_type(batch)
        remedy = "(inputs..., target), as in (X, y)"
        if isinstance(batch, Mapping) and len(batch) > 1:
            form = f"a dict with {', '.join(map(repr, list(batch)[:6]))}"
            example = next((name for name in batch if name in _TARGET_NAMES), list(batch)[-1])
            remedy += f". Name the target, as in target={example!r}, or have the Dataset return a tuple"
        raise TypeError(
            f"a batch of this data is {form}; with loss= it must be {remedy}. Without a target, use training_step=, a "
            "function of (model, batch) that returns the loss"
        )
    return batch[:-1], batch[-1]


def get_model_loss(output: Any) -> Any:
    """Return the loss in a model's output: its ``loss``, or the first of a tuple. Raises ValueError without one."""
    if isinstance(output, tuple) and not hasattr(output, "loss"):
        loss = output[0] if output else None
    else:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        raise ValueError(
            "the model returned no loss, and neither loss= nor training_step= was given. Models compute their loss if "
            "the batch has 'labels': add them (a collate_fn such as DataCollatorForLanguageModeling does), or give "
            "loss= or training_step="
        )
    return loss


def get_logits(output: Any) -> Any:
    """Return the logits of a model's output if it has some, else all of it."""
    return getattr(output, "logits", output)


def _take_logged(value: Any) -> Any:
    """Return the result of a user's function, without a dict of numbers at its end, which is logged."""
    if not (isinstance(value, tuple) and value and type(value[-1]) is dict):
        return value
    log(**value[-1])
    return value[0] if len(value) == 2 else value[:-1]


def _weigh_logged(logged: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Return logged numbers with the weights of pairs, for an evaluation."""
    pairs = {name: value if isinstance(value, tuple) else (value, None) for name, value in logged.items()}
    return {name: (float(v), None if weight is None else float(weight)) for name, (v, weight) in pairs.items()}


def _name_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "nothing (None)" if value is None else type(value).__name__


def _find_loss_remedy(value: Any) -> str:
    if value is None:
        return "Add a return, as in `return loss`"
    if isinstance(value, numbers.Number):
        return "A number has no gradients: return the tensor, without .item() or float()"
    return "Use reduction='mean', or call .mean() on it"


def _check_loss_value(value: Any, source: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value, None
    if isinstance(value, tuple) and len(value) == 2:
        total, weight = value
        weight = torch.as_tensor(weight, dtype=torch.float64)
    else:
        total, weight = value, None
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        raise TypeError(
            f"{source} returned {_name_value(total)}; it must return a scalar tensor, the mean over the samples "
            f"(or a pair (sum, weight)). {_find_loss_remedy(total)}"
        )
    if weight is not None and weight.numel() != 1:
        raise TypeError(
            f"{source} returned a weight of shape {tuple(weight.shape)}; it must be one number. Call .sum() on it"
        )
    return total.reshape(()), None if weight is None else weight.reshape(())

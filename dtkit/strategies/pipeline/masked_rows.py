"""Rows that pad a micro-batch of a model that computes its own loss: their labels say that they don't count."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from dtkit.engine.comm.process_group import is_lost_peer_error
from dtkit.strategies.loss import DEFAULT_IGNORE_INDEX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dtkit.strategies.loss import Loss, ModelInputs


def mask_labels(inputs: ModelInputs, labels: torch.Tensor, count: int) -> tuple[ModelInputs, torch.Tensor]:
    """Return the inputs and labels of a padded micro-batch, in which the model's loss counts only the first rows."""
    masked = labels.clone()
    masked[count:] = DEFAULT_IGNORE_INDEX
    return inputs.replace_named("labels", masked), masked


def require_maskable_labels(labels: Any) -> None:
    """Raise ValueError if a model's own loss can't leave rows out, as labels that aren't integers."""
    if isinstance(labels, torch.Tensor) and not labels.is_floating_point():
        return
    kind = f"{str(labels.dtype).removeprefix('torch.')} labels" if isinstance(labels, torch.Tensor) else "no labels"
    raise ValueError(
        f"the batch has {kind}, and the model computes its own loss. A pipeline pads its micro-batches, and only "
        f"integer labels can say which rows are padding (by {DEFAULT_IGNORE_INDEX}). Give "
        "loss=, a function of (output, target)"
    )


@contextlib.contextmanager
def explain_masked_rows(loss_fn: Loss, counts: Sequence[int], rows: int) -> Iterator[None]:
    """Add the remedy to an error of a model that needs a label in each row, such as mBART.

    `counts` has the samples of each micro-batch, which is padded to `rows`.
    """
    try:
        yield
    except (IndexError, RuntimeError) as error:
        has_masked_rows = loss_fn.is_from_model and any(0 < count < rows for count in counts)
        if has_masked_rows and "out of bounds" in str(error) and not is_lost_peer_error(error):
            error.add_note(
                f"A pipeline pads a micro-batch to {rows} rows, and all labels of a padding row are "
                f"{DEFAULT_IGNORE_INDEX}. A model that looks for a label in each row can't compute with them. Choose a "
                "batch_size that replicas * micro_batches divides, on data that batch_size divides"
            )
        raise

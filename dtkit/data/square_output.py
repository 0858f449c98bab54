"""A check of a loss on as many rows as the model has outputs: whether it takes columns of the output as samples.

Such an output is square, so a loss of its transpose has no error, and compares outputs with targets of other samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.guard import return_error, run_guarded
from dtkit._util.torch_private import tree_leaves
from dtkit.data.loss_check import count_rows
from dtkit.data.pairing import PairedRowsError
from dtkit.engine.data.sources import map_tensors
from dtkit.strategies.module_modes import module_eval_mode

if TYPE_CHECKING:
    from dtkit.strategies.loss import Loss


def check_square_output(loss: Loss, model: torch.nn.Module, batch: Any) -> None:
    """Raise PairedRowsError if a loss takes a batch with a square output, and fails with one row more.

    An error of the model itself is left alone: it may be made for one number of rows. Losses that compare samples on
    purpose, such as contrastive ones, take any number. Runs the model in evaluation.
    """
    num_rows = count_rows(batch)
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda _model, _args, output: outputs.append(output))
    try:
        with module_eval_mode(model):
            if num_rows < 2 or not _passes(loss, model, batch) or not _is_any_square(outputs, num_rows):
                return
            outputs.clear()
            error = run_guarded(lambda: loss(model, _repeat_first(batch)), return_error)
    finally:
        handle.remove()
    if outputs and isinstance(error, Exception):
        raise PairedRowsError(
            f"the loss takes outputs of shape ({num_rows}, {num_rows}), and fails for {num_rows + 1} rows, whose "
            f"outputs are ({num_rows + 1}, {num_rows}): {error}. It seems to take columns of the output as samples: "
            "leave the transposition out, such as .T"
        )


def _passes(loss: Loss, model: torch.nn.Module, batch: Any) -> bool:
    return not isinstance(run_guarded(lambda: loss(model, batch), return_error), Exception)


def _is_any_square(outputs: list[Any], num_rows: int) -> bool:
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return any(tensor.shape[:2] == (num_rows, num_rows) for tensor in tensors)


def _repeat_first(batch: Any) -> Any:
    """Return a batch with its first row once more."""
    return map_tensors(batch, lambda tensor: torch.cat([tensor, tensor[:1]]))

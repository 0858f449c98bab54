"""Check of a model's buffers on a few rows: whether they are statistics of a batch, such as a running mean.

Each rank computes them from its own part of a batch. If the model uses them in training, it differs from one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.guard import run_guarded
from dtkit.data.loss_check import count_rows, take_rows
from dtkit.strategies.module_modes import enter_training

if TYPE_CHECKING:
    from dtkit.strategies.loss import Loss


def describe_batch_statistics(loss: Loss, model: torch.nn.Module, batch: Any) -> str | None:
    """Return a warning if a step changes a buffer by what is in its rows; else, or if unknown, None.

    Runs the model in training, so its buffers change.
    """
    num_rows = count_rows(batch)
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    if num_rows < 2 or not before:
        return None

    def compute(rows: slice) -> dict[str, torch.Tensor]:
        buffers = dict(model.named_buffers())
        with torch.no_grad():
            for name, value in before.items():
                buffers[name].copy_(value)
        loss(enter_training(model), take_rows(batch, rows))
        return {name: value.clone() for name, value in model.named_buffers() if name in before}

    def find_differing() -> str | None:
        first, last = compute(slice(0, num_rows // 2)), compute(slice(num_rows // 2, num_rows))
        return next((name for name in before if not torch.allclose(first[name], last[name], equal_nan=True)), None)

    # silent: the model may need what a part of these rows doesn't have
    name = run_guarded(find_differing, lambda _: None)
    if name is None:
        return None
    return (
        f"the buffer {name!r} changes by the rows of a batch, and each rank has its own part of it: if the model uses "
        "it in training, that differs from one process. The whole model gets the mean over ranks"
    )

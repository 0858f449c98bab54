"""Detection of whether a stream's items are samples or whole batches, by a trial of the model with the first one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit._util.guard import run_guarded
from dtkit.engine.data.random_state import preserve_generators, seed_generators
from dtkit.engine.data.whole_batches import count_common_rows, split_rows
from dtkit.strategies.module_backup import undo_module_writes
from dtkit.strategies.module_modes import module_eval_mode

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from dtkit.strategies.loss import Loss

_TRIAL_ROWS = 2


def is_whole_batch(item: Any, model: torch.nn.Module, loss: Loss, collate: Callable[[list[Any]], Any]) -> bool:
    """Return whether the model accepts an item as a batch, but not as a sample. If it accepts both, it is a sample."""
    if not count_common_rows(item):
        return False
    if _can_train_on(lambda: collate([item]), model, loss):
        return False
    return _can_train_on(lambda: collate(split_rows(item)[:_TRIAL_ROWS]), model, loss)


def _can_train_on(make_batch: Callable[[], Any], model: torch.nn.Module, loss: Loss) -> bool:
    def try_loss() -> bool:
        with undo_module_writes(model), module_eval_mode(model), preserve_generators():
            seed_generators(0)
            loss(model, make_batch())
        return True

    # silent: if neither form can be trained on, the first step raises the same error
    return run_guarded(try_loss, lambda _: False)

"""Operations and tokens of one sample, from a step on tensors without memory."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.guard import run_guarded
from dtkit._util.torch_private import tree_leaves
from dtkit.engine import dry_run
from dtkit.history.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.strategies.loss import Loss

_ROWS = 4
_SEQUENCE_DIMS = 2


def measure_workload(
    model: torch.nn.Module, loss_fn: Loss, make_batch: Callable[[int], Any], device: torch.device
) -> Workload:
    """Return the workload of a model as it was sent; its note has the reason if the operations can't be counted."""
    batch = make_batch(_ROWS)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    tokens = count_tokens(batch)

    def count() -> Workload:
        peaks = dry_run.estimate_peaks(model, loss_fn, batch, (_ROWS,), device, contextlib.nullcontext)
        return Workload(peaks[-1].flops / _ROWS, tokens, name)

    def explain(error: Exception) -> Workload:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Workload(0.0, tokens, name, f"no FLOPs: {reason[:150]}")

    return run_guarded(count, explain)


def count_tokens(batch: Any) -> int:
    """Return the length of a sample if the first tensor of a batch has token ids: integers of shape (rows, length)."""
    first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)), None)
    is_ids = first is not None and first.dim() == _SEQUENCE_DIMS and not first.is_floating_point()
    return int(first.shape[1]) if is_ids and first is not None and first.dtype != torch.bool else 0

"""One rank's record of one explained step.

An explained step runs explicitly: `autograd.grad` of this rank's weighted loss, an all-reduce, then the optimizer. An
overlapped step computes the same. At each point the worker calls one method of :class:`StepProbe`, in this order:

    record_rows, record_loss, record_local_gradients, (all-reduce) record_reduced_gradients, save_parameters,
    (clipping, optimizer) record_parameter_updates

and `record_clipping` at any time, if the gradient's norm has a limit. A rank without samples passes None. Without an
update, for nonfinite gradients, the worker omits `record_parameter_updates`. With gradient accumulation,
`record_local_gradients` gets the sums over all micro-batches of the step. With a gradient scaler, gradients are
unscaled.

It copies this rank's gradients until the all-reduce, and the parameters during the update. Copies are on the CPU, since
a GPU may have no room for them. Norms are computed in float64, one tensor at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dtkit.engine.observe.tensor_values import (
    compute_cosine,
    compute_digest,
    compute_norm,
    copy_to_cpu,
    flatten_to_float64,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from dtkit.explain.base import RankReport, TensorReport


class StepProbe:
    """Recorder of one rank's values in one step; :meth:`build_report` returns them as plain data."""

    def __init__(self, model: torch.nn.Module, *, rank: int, step: int, epoch: int) -> None:
        """Record a step of `model`, the whole module without DDP's wrapper, before the step."""
        self._model = model
        self._named_parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._local_gradients: list[torch.Tensor | None] = []
        self._old_parameters: list[torch.Tensor] = []
        self._report: RankReport = {
            "model": type(model).__name__,
            "rank": rank,
            "step": step,
            "epoch": epoch,
            "rows": None,
            "samples": 0,
            "loss": None,
            "weight": 0.0,
            "share": 0.0,
            "clip": None,
            "lr": None,
            "before": _digest_parameters(model),
            "after": None,
            "buffers": None,
            "tensors": [_make_empty_report(name, p) for name, p in self._named_parameters],
        }

    def record_rows(self, rows: np.ndarray | None, samples: int) -> None:
        """Record this rank's rows of the original data; None for a stream, whose rows have no numbers."""
        self._report["rows"] = None if rows is None else rows.astype("int64")
        self._report["samples"] = samples

    def record_loss(self, mean: torch.Tensor | float | None, weight: float, share: float) -> None:
        """Record this rank's mean loss (None without samples), its weight, and its share of all ranks' weights."""
        self._report["loss"] = None if mean is None else float(mean.detach() if torch.is_tensor(mean) else mean)
        self._report["weight"], self._report["share"] = float(weight), float(share)

    def record_local_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Record the gradients of this rank's loss times its share, after `record_loss`; None if unused."""
        self._local_gradients = [None if g is None else copy_to_cpu(g) for g in gradients]
        share = self._report["share"]
        for entry, gradient in zip(self._report["tensors"], self._local_gradients, strict=True):
            if gradient is not None:
                entry["contribution"] = norm = compute_norm(flatten_to_float64(gradient))
                entry["local_norm"] = norm / share if share else None

    def record_reduced_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Record the all-reduced gradients, before clipping; None for a parameter that no rank used."""
        for entry, local, gradient in zip(self._report["tensors"], self._local_gradients, gradients, strict=True):
            if gradient is not None:
                reduced = flatten_to_float64(gradient)
                entry["reduced"] = compute_norm(reduced)
                entry["cosine"] = None if local is None else compute_cosine(flatten_to_float64(local), reduced)
        self._local_gradients = []

    def record_clipping(self, coefficient: float) -> None:
        """Record the factor by which clipping multiplies the all-reduced gradients: 1.0 within the limit."""
        self._report["clip"] = float(coefficient)

    def save_parameters(self) -> None:
        """Copy the parameters before the update."""
        self._old_parameters = [copy_to_cpu(p) for _, p in self._named_parameters]

    def record_parameter_updates(self, lr: float) -> None:
        """Compare the parameters with their copies. `lr` is the learning rate of the first parameter group."""
        for entry, (name, p), old in zip(
            self._report["tensors"], self._named_parameters, self._old_parameters, strict=True
        ):
            value = flatten_to_float64(p)
            entry["update"] = compute_norm(value - flatten_to_float64(old))
            entry["value"] = compute_norm(value)
            entry["checksum"] = compute_digest([(name, p)])
        self._old_parameters = []
        self.record_update(lr)

    def record_update(self, lr: float) -> None:
        """Record the update as a whole, if memory has no room for a copy of each parameter."""
        self._report["lr"], self._report["after"] = float(lr), _digest_parameters(self._model)

    def build_report(self) -> RankReport:
        """Return the record as plain data for ``StepExplanation.from_reports``."""
        buffers = list(self._model.named_buffers())
        self._report["buffers"] = compute_digest(buffers) if buffers else None
        return self._report


def _digest_parameters(model: torch.nn.Module) -> str:
    """Return a digest of the parameters without the buffers, since ranks have different batch statistics."""
    return compute_digest(model.named_parameters(remove_duplicate=False))


def _make_empty_report(name: str, p: torch.Tensor) -> TensorReport:
    return {
        "kind": "parameter",
        "name": name,
        "shape": tuple(p.shape),
        "local_norm": None,
        "contribution": None,
        "reduced": None,
        "cosine": None,
        "update": None,
        "value": None,
        "checksum": None,
    }

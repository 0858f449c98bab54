"""What one rank sees of one step when it is taken apart.

A step under the microscope goes the explicit way: `autograd.grad` of this rank's weighted loss, a sum over ranks,
then the optimiser. That is what the overlapped way computes too, but here each stage has a moment of its own, and at
each the worker calls one method of :class:`StepProbe`, in this order:

    rows -> loss -> local -> (all-reduce) -> reduced -> before_update -> (clipping, optimiser) -> after_update

and `record_clipping` at any time, where the gradient's norm has a limit. A rank without samples calls them as well,
with None for what it has not. Where no update is made, for gradients that are not finite, `record_parameter_updates` is
left out, and the report says so. With gradient accumulation, `record_local_gradients` gets the sums over all
micro-batches of the step. With a gradient scaler, gradients are given unscaled.

The microscope keeps copies (of this rank's gradients until they are reduced, of the parameters during the update), on
the CPU: a GPU that is full of training has no room for them. Norms are computed in float64, a tensor at a time.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

    from dtkit.explain.base import RankReport, TensorReport


class StepProbe:
    """Collects one rank's numbers of one step; :meth:`report` gives them as plain data."""

    def __init__(self, model: torch.nn.Module, *, rank: int, step: int, epoch: int) -> None:
        """`model` is the whole bare module (not DDP's wrapper), its parameters as they are before the step."""
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
        """Which rows of the original data this rank takes (None for a stream, whose rows have no numbers)."""
        self._report["rows"] = None if rows is None else rows.astype("int64")
        self._report["samples"] = samples

    def record_loss(self, mean: torch.Tensor | float | None, weight: float, share: float) -> None:
        """This rank's mean loss (None without samples), its weight, and the weight over all ranks' weights."""
        self._report["loss"] = None if mean is None else float(mean.detach() if torch.is_tensor(mean) else mean)
        self._report["weight"], self._report["share"] = float(weight), float(share)

    def record_local_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """What this rank puts into the sum: the gradients of its loss times its share. Call :meth:`loss` before.

        None stands for a parameter that this rank's loss did not use.
        """
        self._local_gradients = [None if g is None else _copy_to_cpu(g) for g in gradients]
        share = self._report["share"]
        for entry, gradient in zip(self._report["tensors"], self._local_gradients, strict=True):
            if gradient is not None:
                entry["contribution"] = norm = compute_norm(flatten_to_float64(gradient))
                entry["own"] = norm / share if share else None

    def record_reduced_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """The sums over ranks, before clipping; None for a parameter that no rank used."""
        for entry, own, gradient in zip(self._report["tensors"], self._local_gradients, gradients, strict=True):
            if gradient is not None:
                reduced = flatten_to_float64(gradient)
                entry["reduced"] = compute_norm(reduced)
                entry["cosine"] = None if own is None else _compute_cosine(flatten_to_float64(own), reduced)
        self._local_gradients = []

    def record_clipping(self, coefficient: float) -> None:
        """What clipping multiplies the reduced gradients by: 1.0 within the limit. Not called without a limit."""
        self._report["clip"] = float(coefficient)

    def save_parameters(self) -> None:
        """Keep a copy of the parameters."""
        self._old_parameters = [_copy_to_cpu(p) for _, p in self._named_parameters]

    def record_parameter_updates(self, lr: float) -> None:
        """Compare the parameters with the copy. `lr` is the learning rate of the first parameter group."""
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
        """Record the updates as a whole, if memory has no room for a copy of each parameter."""
        self._report["lr"], self._report["after"] = float(lr), _digest_parameters(self._model)

    def build_report(self) -> RankReport:
        """All of it as plain numbers: what ``StepExplanation.from_reports`` takes, one of each rank."""
        buffers = list(self._model.named_buffers())
        self._report["buffers"] = compute_digest(buffers) if buffers else None
        return self._report


def compute_digest(named_tensors: Iterable[tuple[str, Any]]) -> str:
    """A digest of named tensors: equal names and bits, equal digest. Twelve hexadecimal digits."""
    found = hashlib.blake2b(digest_size=6)
    for name, value in named_tensors:
        found.update(name.encode())
        if isinstance(value, torch.Tensor):
            found.update(to_local(value).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _digest_parameters(model: torch.nn.Module) -> str:
    """As the checksum of a state dict, less the buffers: batch statistics are each rank's own by nature."""
    return compute_digest(model.named_parameters(remove_duplicate=False))


def _make_empty_report(name: str, p: torch.Tensor) -> TensorReport:
    return {
        "kind": "parameter",
        "name": name,
        "shape": tuple(p.shape),
        "own": None,
        "contribution": None,
        "reduced": None,
        "cosine": None,
        "update": None,
        "value": None,
        "checksum": None,
    }


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """What lies on this rank of a tensor that may be cut (a DTensor)."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU: the sum over ranks, or the optimiser, may write over the tensor itself."""
    return to_local(tensor).detach().to("cpu", copy=True)


def flatten_to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """All numbers of a tensor in a row, on the CPU, in float64; a complex one as its two parts."""
    dense = to_local(tensor).detach().cpu()
    dense = dense.to_dense() if dense.is_sparse else dense
    dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return dense.reshape(-1).double()


def compute_norm(flat_tensor: torch.Tensor) -> float:
    """Of numbers in a row, as :func:`flat` gives them."""
    return float(torch.linalg.vector_norm(flat_tensor))


def _compute_cosine(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """None where a direction is missing: a gradient of zeros, or one that is not finite."""
    size = compute_norm(a) * compute_norm(b)
    if not size or not math.isfinite(size):
        return None
    return max(-1.0, min(1.0, float(a @ b) / size))

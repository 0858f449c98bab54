"""Detection of a loss or metric that combines each output with every target, since their shapes differ by an axis.

Outputs of shape (N, 1) and targets of shape (N,) broadcast to (N, N), without an error. torch warns in `mse_loss` only.
So do outputs that the loss has transposed to (1, N), and targets of shape (N, 1).
Some losses compare all pairs on purpose. They add the axis themselves, as in ``output[:, None]`` or with ``keepdim``.
So only an axis that comes from the model's output or from the data counts as a mistake.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dtkit._util.dispatch_mode import DispatchMode
from dtkit._util.torch_private import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterator

_INDEXING = ("gather", "index", "index_select", "take_along_dim", "embedding")
"""Operations whose result has the axes of their index, which says nothing about pairs."""
_LAYERS_AND_PARTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "slice", "narrow", "split")
"""Operations whose results have an axis of length 1 where a layer has one output, or a slice one column."""


class PairedRowsError(ValueError):
    """Each output meets every target, where each should meet its own."""


@dataclasses.dataclass(frozen=True)
class Pairing:
    """Shapes of an output and a target of which torch repeats both."""

    output: tuple[int, ...]
    target: tuple[int, ...]

    def describe(self) -> str:
        """Return what is combined."""
        return f"outputs of shape {self.output} with targets of shape {self.target}"

    def make_error(self, start: str) -> PairedRowsError:
        """Return the error with a remedy. `start` names what combines both."""
        return PairedRowsError(
            f"{start} combines {self.describe()}: torch repeats both, so that each output meets every target. "
            f"Give both one shape, by {self._describe_remedy()}"
        )

    def _describe_remedy(self) -> str:
        if len(self.output) == len(self.target) + 1:
            return (
                "output.squeeze(1), or by target.unsqueeze(1). For all pairs on purpose, use output.squeeze(1)[:, None]"
            )
        if len(self.target) == len(self.output) + 1:
            return (
                "output.unsqueeze(1), or by target.squeeze(1). For all pairs on purpose, use target.squeeze(1)[:, None]"
            )
        if are_transposed(self.output, self.target):
            return (
                "leaving the transposition out, such as .T. For all pairs on purpose, use output.squeeze(1)[:, None] - "
                "target.squeeze(1)"
            )
        return "output.reshape(target.shape)"


def are_transposed(output: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Return whether one of two shapes has a row for each sample, the other a column, and torch repeats both."""
    return len(output) > 1 and output == (target[1:2] + target[:1] + target[2:]) and 1 in output[:2] != (1, 1)


@dataclasses.dataclass(frozen=True)
class _Origin:
    """What a tensor was computed from: the model's output, or else targets alone."""

    is_output: bool
    has_added_axis: bool = False


class PairingDetector(DispatchMode):
    """Mode that raises PairedRowsError in an operation that combines each output with every target by mistake.

    `start` names in errors what is watched. `model` may be None, if its outputs are given.
    """

    def __init__(
        self, start: str, num_rows: int, targets: Any, model: torch.nn.Module | None = None, outputs: Any = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.meant: Pairing | None = None
        """What the code combines in pairs on purpose."""
        self._start, self._num_rows, self._model = start, num_rows, model
        self._origins: dict[int, tuple[torch.Tensor, _Origin]] = {}  # by the id of a tensor, which is kept
        self._add(outputs, _Origin(is_output=True))
        self._add(() if model is None else list(model.parameters()), _Origin(is_output=True))
        self._add(targets, _Origin(is_output=False))

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Watch what runs meanwhile. Axes that the model has added are part of its output."""
        with contextlib.ExitStack() as stack:
            if self._model is not None:
                handle = self._model.register_forward_hook(
                    lambda _model, _args, output: self._add(output, _Origin(is_output=True))
                )
                stack.callback(handle.remove)
            stack.enter_context(self)
            yield

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation, and note what its results were computed from."""
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        name = func.overloadpacket.__name__
        if torch.Tag.pointwise in func.tags:  # one number of the result for one of each operand
            self._check(tensors)
        sources = tensors[:1] if name in _INDEXING else tensors
        if origins := [origin for _, origin in self._list_origins(sources)]:
            is_output, has_added = any(o.is_output for o in origins), any(o.has_added_axis for o in origins)
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._add(leaf, _Origin(is_output, has_added or _adds_axis(name, tensors[0], leaf)))
        return result

    def _add(self, value: Any, origin: _Origin) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                self._origins[id(tensor)] = tensor, origin

    def _list_origins(self, tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, _Origin]]:
        return [self._origins[id(tensor)] for tensor in tensors if id(tensor) in self._origins]

    def _check(self, tensors: list[torch.Tensor]) -> None:
        origins = self._list_origins(tensors)
        outputs = [pair for pair in origins if pair[1].is_output]
        targets = [pair for pair in origins if not pair[1].is_output]
        for (output, origin), (target, other) in itertools.product(outputs, targets):
            if self._are_pairs(output, target):
                pairing = Pairing(tuple(output.shape), tuple(target.shape))
                added = origin.has_added_axis, other.has_added_axis
                is_meant = any(added) if output.dim() == target.dim() else added[output.dim() < target.dim()]
                if not is_meant:
                    raise pairing.make_error(self._start)
                self.meant = pairing

    def _are_pairs(self, output: torch.Tensor, target: torch.Tensor) -> bool:
        """Return whether an operation repeats both, along the rows of the other."""
        shapes = tuple(output.shape), tuple(target.shape)
        if are_transposed(*shapes):
            return self._num_rows in shapes[0][:2]
        if self._num_rows < 2 or any(shape[:1] != (self._num_rows,) for shape in shapes):
            return False
        return len(shapes[0]) != len(shapes[1]) and np.broadcast_shapes(*shapes) not in shapes


def _adds_axis(name: str, source: torch.Tensor, result: torch.Tensor) -> bool:
    """Return whether an operation has added an axis of length 1, or kept one that it has reduced."""
    if name in _LAYERS_AND_PARTS or name in _INDEXING:
        return False
    if result.dim() > source.dim():
        return True
    is_kept = result.dim() == source.dim() and result.numel() < source.numel()
    return is_kept and any(now == 1 < before for now, before in zip(result.shape, source.shape, strict=True))

"""Common parts of all explanations of a step: reports of ranks, and values computed from them.

Ranks report plain numbers. Explanations are plain data too: nothing here imports torch, and only figures import
matplotlib.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import TYPE_CHECKING, TypedDict

from dtkit._util import views
from dtkit._util.arguments import explain_arguments

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from dtkit._util.views import Figure


class TensorReport(TypedDict):
    """One tensor on one rank. A norm is None if there is nothing to take the norm of."""

    kind: str
    """Role in the model: "parameter"."""
    name: str
    shape: tuple[int, ...]
    local_norm: float | None
    """Norm of the gradient of this rank's own loss."""
    contribution: float | None
    """Norm of this rank's term in the sum: its own gradient times its share."""
    reduced: float | None
    """Norm of the gradient after the all-reduce, before clipping."""
    cosine: float | None
    """Cosine of the angle between the rank's own gradient and the reduced one."""
    update: float | None
    """Norm of what the optimizer added to the parameter."""
    value: float | None
    """Norm of the parameter after the step."""
    checksum: str | None
    """Checksum of the parameter after the step: twelve hexadecimal digits."""


class RankReport(TypedDict):
    """Report of one rank: plain numbers, which are sent as they are."""

    model: str
    rank: int
    step: int
    epoch: int
    rows: np.ndarray | None
    samples: int
    loss: float | None
    weight: float
    share: float
    clip: float | None
    lr: float | None
    before: str
    after: str | None
    buffers: str | None
    tensors: list[TensorReport]


@dataclasses.dataclass(frozen=True, eq=False)
class RankPart:
    """One rank's part in the step. Checksums have twelve hexadecimal digits."""

    rank: int
    rows: np.ndarray | None
    """Row numbers in the original data (int64), in the order taken; None for a stream."""
    samples: int
    loss: float | None
    """Mean over the samples of this rank, or of its replica; None if this rank doesn't know it or has no sample."""
    weight: float
    """Weight of `loss` in the mean: the number of samples, or the weight that the loss function returned."""
    lr: float | None
    """Learning rate of the first parameter group; None if no update was made."""
    before: str
    """Checksum of the rank's parameters before the step."""
    after: str | None
    """Checksum after the step; None if no update was made."""


@explain_arguments
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Explanation(abc.ABC):
    """One step of a run in detail: text in a terminal, a page with a figure in a notebook."""

    model: str
    """Name of the model in the run."""
    step: int
    """Number of the step, from 0, as in ``run.history``."""
    epoch: int
    """Number of the epoch, from 0."""
    ranks: tuple[RankPart, ...]

    @property
    def loss(self) -> float:
        """Loss of the step: the weighted mean over ranks; NaN if none had a sample."""
        return compute_mean_loss((rank.weight, rank.loss) for rank in self.ranks)

    @property
    def updated(self) -> bool:
        """Whether the parameters were updated, which needs finite gradients."""
        return all(rank.after is not None for rank in self.ranks)

    def figure(self) -> Figure:
        """Return a figure of the step."""
        return views.draw(self)

    def __repr__(self) -> str:
        return views.format_text(self)

    def _repr_html_(self) -> str:
        return views.format_html(self)

    @property
    @abc.abstractmethod
    def samples(self) -> int:
        """Samples of the step; those that several ranks share count once."""


def compute_mean_loss(weights_and_losses: Iterable[tuple[float, float | None]]) -> float:
    """Return the mean of losses by weight; NaN if none had a sample."""
    known = [(weight, loss) for weight, loss in weights_and_losses if loss is not None and weight]
    total = math.fsum(weight for weight, _ in known)
    return math.fsum(weight / total * loss for weight, loss in known) if known else math.nan

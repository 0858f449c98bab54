"""One synchronised step taken apart: who computed what from which rows, and how it became one update.

Each rank reports plain numbers (a :class:`RankReport`, made by ``dtkit.engine.observe.step_probe.StepProbe``); here
they become one :class:`StepExplanation`. With w_i the weight of rank i in the mean, L_i its loss and g_i the gradient
of L_i,

    loss of the step = sum of w_i L_i        gradient of the step = sum of w_i g_i,

and after the all-reduce every rank takes the same update from the same gradient, so that the parameters stay equal.
The sums over ranks are kept as the ranks' own numbers, so that a reader can check them by hand.

Plain data: nothing here imports torch, and matplotlib only when a figure is asked for.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import ModuleType

    import numpy as np
    import pandas as pd
    from matplotlib.figure import Figure

SHOWN_LAYERS = 20
"""A view with more layers than this groups them by module."""


class TensorReport(TypedDict):
    """One tensor on one rank. A norm is None where there is nothing to take the norm of."""

    kind: str
    """What the tensor is of the model: "parameter"."""
    name: str
    shape: tuple[int, ...]
    own: float | None
    """Norm of the gradient of this rank's own loss."""
    contribution: float | None
    """Norm of what this rank put into the sum: its own gradient times its share."""
    reduced: float | None
    """Norm of the gradient after the all-reduce, before clipping."""
    cosine: float | None
    """Of the angle between the rank's own gradient and the reduced one."""
    update: float | None
    """Norm of what the optimiser added to the parameter."""
    value: float | None
    """Norm of the parameter after the step."""
    checksum: str | None
    """Of the parameter after the step: twelve hexadecimal digits."""


class RankReport(TypedDict):
    """What one rank tells of the step: plain numbers, which travel as they are."""

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
class RankRecord:
    """One rank's part in the step."""

    rank: int
    rows: np.ndarray | None
    """Numbers of the rows in the original data (int64), in the order taken; None for a stream, which has none."""
    samples: int
    loss: float | None
    """Mean over this rank's samples; None without any."""
    weight: float
    """What `loss` counts for in the mean: the samples, or the weight that the loss returned."""
    share: float
    """`weight` over all ranks' weights."""
    clip: float | None
    """What the reduced gradient was multiplied by to bound its norm; None without clipping."""
    lr: float | None
    """Learning rate of the first parameter group; None where no update was made."""
    before: str
    """Checksum of all parameters before the step, twelve hexadecimal digits."""
    after: str | None
    """The same after it; None where no update was made."""
    buffers: str | None
    """Checksum of the buffers (batch statistics) after the step; None for a model without any."""


@dataclasses.dataclass(frozen=True)
class LayerRecord:
    """A parameter, or several of one module grouped. Tuples hold a value per rank, None where it has none."""

    kind: str
    name: str
    shape: tuple[int, ...] | None
    """None for a group."""
    tensors: int
    """How many parameter tensors this stands for."""
    own: tuple[float | None, ...]
    """Norm of the gradient of each rank's own loss."""
    contribution: tuple[float | None, ...]
    """Norm of what each rank put into the sum: its own gradient times its share."""
    reduced: tuple[float | None, ...]
    """Norm of the gradient after the all-reduce, before clipping: the same number on every rank."""
    cosine: tuple[float | None, ...]
    """Of the angle between a rank's own gradient and the reduced one: 1 the same direction, -1 the opposite one."""
    update: tuple[float | None, ...]
    """Norm of what the optimiser added."""
    value: tuple[float | None, ...]
    """Norm of the parameter after the step."""
    checksums: tuple[str | None, ...]
    """Of the parameter after the step; of a group, None."""
    identical: bool
    """Whether all ranks hold the same bits after the step."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Explanation(abc.ABC):
    """One step of a run, taken apart: words in a terminal, in a notebook a page with a picture under them."""

    model: str
    """The model's name, as the run has it."""
    step: int
    """Number of the step, from 0: as in ``run.history``."""
    epoch: int
    """Number of the epoch, from 0."""

    @abc.abstractmethod
    def figure(self) -> Figure:
        """A picture of the step as a matplotlib Figure."""

    @property
    @abc.abstractmethod
    def _view_module(self) -> ModuleType:
        """What makes ``text`` and ``page`` of it: imported when it is shown."""

    @functools.cached_property
    def _figure_html(self) -> str:
        from dtkit.dashboard.figures import run_figure

        return run_figure.format_img_tag(self.figure(), "the step as a picture")

    def __repr__(self) -> str:
        return str(self._view_module.format_text(self))

    def _repr_html_(self) -> str:
        return f"<div>{self._view_module.format_html(self)}{self._figure_html}</div>"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class StepExplanation(Explanation):
    """One step of a run, taken apart. Print it, call :meth:`figure`, or read the numbers.

    ``ranks`` has a record per rank, ``layers`` one per trainable parameter, in the model's order. Both are plain
    dataclasses: ``pandas.DataFrame(explanation.ranks)`` works.
    """

    ranks: tuple[RankRecord, ...]
    layers: tuple[LayerRecord, ...]

    @classmethod
    def from_reports(cls, reports: Sequence[RankReport]) -> StepExplanation:
        """The explanation of a step from the reports of all ranks, in any order."""
        reports = sorted(reports, key=lambda report: report["rank"])
        first = reports[0]
        assert len({report["rank"] for report in reports}) == len(reports), "a rank reported twice"
        assert {report["step"] for report in reports} == {first["step"]}, "ranks report different steps"
        names = [field.name for field in dataclasses.fields(RankRecord)]
        ranks = tuple(RankRecord(**{name: report[name] for name in names}) for report in reports)  # type: ignore[literal-required]  # the fields are the report's keys
        layers = tuple(
            _merge_tensor_reports(parts) for parts in zip(*(report["tensors"] for report in reports), strict=True)
        )
        return cls(first["model"], first["step"], first["epoch"], ranks, layers)

    @property
    def samples(self) -> int:
        """Samples of all ranks together."""
        return sum(rank.samples for rank in self.ranks)

    @property
    def weight(self) -> float:
        """What all losses together count for: the denominator of the mean."""
        return sum(rank.weight for rank in self.ranks)

    @property
    def loss(self) -> float:
        """The loss of the step: the sum of share times loss over the ranks. NaN where no rank had a sample."""
        parts = [rank.share * rank.loss for rank in self.ranks if rank.loss is not None]
        return math.fsum(parts) if parts else math.nan

    @property
    def all_layers(self) -> LayerRecord:
        """All layers as one: the norms over the whole model."""
        return _merge_layers("all layers", self.layers, len(self.ranks))

    @property
    def clip(self) -> float | None:
        """What the reduced gradient was multiplied by to bound its norm; None without clipping."""
        return self.ranks[0].clip

    @property
    def lr(self) -> float | None:
        """Learning rate of the first parameter group; None where no update was made."""
        return self.ranks[0].lr

    @property
    def updated(self) -> bool:
        """Whether the parameters were updated: not where the gradients were not finite."""
        return all(rank.after is not None for rank in self.ranks)

    @property
    def identical(self) -> bool:
        """Whether all ranks hold the same parameters after the step, bit by bit (buffers are each rank's own)."""
        return len({rank.before if rank.after is None else rank.after for rank in self.ranks}) == 1

    def group_layers(self, limit: int = SHOWN_LAYERS) -> tuple[LayerRecord, ...]:
        """At most `limit` records: the layers, or grouped by module as finely as fits.

        Where even the outermost modules are more, those of the largest gradients stand alone and the rest together.
        """
        if limit < 1:
            raise ValueError(f"limit={limit}; it is the number of records to show, from 1 up")
        depth = max(layer.name.count(".") + 1 for layer in self.layers)
        groups = _group_by_prefix(self.layers, depth)
        while len(groups) > limit and depth > 1:
            depth -= 1
            groups = _group_by_prefix(self.layers, depth)
        ranks = len(self.ranks)
        records = [part[0] if len(part) == 1 else _merge_layers(name, part, ranks) for name, part in groups.items()]
        return tuple(records if len(records) <= limit else self._keep_largest(records, limit))

    def _keep_largest(self, records: Sequence[LayerRecord], limit: int) -> list[LayerRecord]:
        """The records of the largest gradients in their order, and last the others as one."""
        order = sorted(
            records, key=lambda record: max_or_none(record.reduced) or max_or_none(record.own) or 0.0, reverse=True
        )
        kept = {id(record) for record in order[: limit - 1]}
        others = [record for record in records if id(record) not in kept]
        rest = _merge_layers(f"{len(others):,} others", others, len(self.ranks))
        return [*(record for record in records if id(record) in kept), rest]

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame with a row per layer and rank. Needs pandas."""
        import pandas as pd

        rows = [
            {"kind": layer.kind, "layer": layer.name, "shape": layer.shape}
            | {"rank": rank.rank, "samples": rank.samples, "loss": rank.loss, "share": rank.share}
            | {name: getattr(layer, name)[k] for name in _NORM_FIELDS}
            | {"checksum": layer.checksums[k]}
            for layer in self.layers
            for k, rank in enumerate(self.ranks)
        ]
        columns = ["kind", "layer", "shape", "rank", "samples", "loss", "share", *_NORM_FIELDS, "checksum"]
        return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(("loss", *_NORM_FIELDS), float))

    # -- views --------------------------------------------------------------------------------------------------

    def figure(self) -> Figure:
        """A picture of the step as a matplotlib Figure: rows and losses by rank, gradients by layer, checksums."""
        from dtkit.dashboard.figures.data_parallel_figure import draw_step

        return draw_step(self)

    @property
    def _view_module(self) -> ModuleType:
        from dtkit.dashboard.text import data_parallel_text

        return data_parallel_text


_NORM_FIELDS = ("own", "contribution", "reduced", "cosine", "update", "value")


def max_or_none(values: Iterable[float | None]) -> float | None:
    """The largest value that is there, or None."""
    return max((value for value in values if value is not None), default=None)


def _merge_tensor_reports(tensor_reports: Sequence[TensorReport]) -> LayerRecord:
    """One tensor of all ranks."""
    first = tensor_reports[0]
    assert len({(part["kind"], part["name"]) for part in tensor_reports}) == 1, "ranks report different parameters"
    checksums = tuple(part["checksum"] for part in tensor_reports)
    numbers = {name: tuple(part[name] for part in tensor_reports) for name in _NORM_FIELDS}  # type: ignore[literal-required]  # keys of the report
    same = len(set(checksums)) == 1
    return LayerRecord(first["kind"], first["name"], first["shape"], 1, **numbers, checksums=checksums, identical=same)


def _merge_layers(name: str, layers: Sequence[LayerRecord], ranks: int) -> LayerRecord:
    """Several layers as one: their norms are those of the tensors put end to end."""
    norms = {
        field: tuple(_combine_norms(getattr(layer, field)[rank] for layer in layers) for rank in range(ranks))
        for field in _NORM_FIELDS
        if field != "cosine"
    }
    return LayerRecord(
        kind=layers[0].kind,
        name=name,
        shape=None,
        tensors=sum(layer.tensors for layer in layers),
        **norms,
        cosine=tuple(
            _combine_cosines(layers, rank, norms["own"][rank], norms["reduced"][rank]) for rank in range(ranks)
        ),
        checksums=(None,) * ranks,
        identical=all(layer.identical for layer in layers),
    )


def compute_mean_loss(losses_and_weights: Iterable[tuple[float, float | None]]) -> float:
    """The mean of ranks' losses by their weights; NaN where none had a sample."""
    known = [(weight, loss) for weight, loss in losses_and_weights if loss is not None and weight]
    total = math.fsum(weight for weight, _ in known)
    return math.fsum(weight / total * loss for weight, loss in known) if known else math.nan


def _combine_norms(norms: Iterable[float | None]) -> float | None:
    """The norm of tensors put end to end; what isn't there adds nothing."""
    there = [norm for norm in norms if norm is not None]
    return math.hypot(*there) if there else None


def _combine_cosines(
    layers: Sequence[LayerRecord], rank: int, own: float | None, reduced: float | None
) -> float | None:
    """The dot product is the sum of the layers' dot products, and each of these is cosine times both norms."""
    if not own or not reduced or not math.isfinite(own * reduced):
        return None
    dots = [(layer.cosine[rank] or 0.0) * (layer.own[rank] or 0.0) * (layer.reduced[rank] or 0.0) for layer in layers]
    return math.fsum(dots) / (own * reduced)


def _group_by_prefix(layers: Iterable[LayerRecord], depth: int) -> dict[str, list[LayerRecord]]:
    """Layers whose dotted names agree in their first `depth` parts together, in the model's order."""
    groups: dict[str, list[LayerRecord]] = {}
    for layer in layers:
        groups.setdefault(".".join(layer.name.split(".")[:depth]), []).append(layer)
    return groups

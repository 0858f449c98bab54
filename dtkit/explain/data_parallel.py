"""Explanation of one data-parallel step: each rank's rows and results, and the update made from them.

With w_i the share of rank i in the mean, L_i its loss and g_i the gradient of L_i,

    loss of the step = sum of w_i L_i        gradient of the step = sum of w_i g_i,

and after the all-reduce every rank makes the same update with the same gradient, so that the parameters stay equal. The
terms of these sums are kept by rank, so that a reader can check them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from dtkit._util.arguments import explain_arguments
from dtkit._util.attributes import suggest_attributes
from dtkit.explain.base import Explanation, RankPart, RankReport, TensorReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pandas as pd

SHOWN_LAYERS = 20
"""Number of layers in a view; more are grouped by module."""


@dataclasses.dataclass(frozen=True, eq=False)
class RankRecord(RankPart):
    """One rank's part in the step."""

    share: float
    """`weight` over the sum of all ranks' weights."""
    clip: float | None
    """Factor of the reduced gradient that limits its norm; None without clipping."""
    buffers: str | None
    """Checksum of the buffers (batch statistics) after the step; None for a model without any."""


@dataclasses.dataclass(frozen=True)
class LayerRecord:
    """Parameter, or a group of them. Tuples have a value for each rank, or None."""

    kind: str
    name: str
    shape: tuple[int, ...] | None
    """None for a group."""
    tensors: int
    """Number of parameter tensors."""
    local_norm: tuple[float | None, ...]
    """Norm of the gradient of each rank's own loss."""
    contribution: tuple[float | None, ...]
    """Norm of each rank's term in the sum: its own gradient times its share."""
    reduced: tuple[float | None, ...]
    """Norm of the gradient after the all-reduce, before clipping: equal on all ranks."""
    cosine: tuple[float | None, ...]
    """Cosine of the angle between a rank's own gradient and the reduced one."""
    update: tuple[float | None, ...]
    """Norm of what the optimizer added."""
    value: tuple[float | None, ...]
    """Norm of the parameter after the step."""
    checksums: tuple[str | None, ...]
    """Checksum of the parameter after the step; None for a group."""
    identical: bool
    """Whether the parameter is equal on all ranks after the step, bit by bit."""


@suggest_attributes("explanation")
@explain_arguments
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class StepExplanation(Explanation):
    """One data-parallel step in detail. Print it, call :meth:`figure`, or read the numbers.

    ``ranks`` has a record for each rank and ``layers`` one for each trained parameter, in the model's order. Both are
    dataclasses: ``pandas.DataFrame(explanation.ranks)`` works.
    """

    ranks: tuple[RankRecord, ...]
    layers: tuple[LayerRecord, ...]

    @classmethod
    def from_reports(cls, reports: Sequence[RankReport]) -> StepExplanation:
        """Return the explanation from the reports of all ranks, in any order."""
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
        """Samples of all ranks."""
        return sum(rank.samples for rank in self.ranks)

    @property
    def weight(self) -> float:
        """Sum of all weights: the denominator of the mean."""
        return sum(rank.weight for rank in self.ranks)

    @property
    def loss(self) -> float:
        """Loss of the step: the sum of share times loss over the ranks; NaN if none had a sample."""
        parts = [rank.share * rank.loss for rank in self.ranks if rank.loss is not None]
        return math.fsum(parts) if parts else math.nan

    @property
    def all_layers(self) -> LayerRecord:
        """All layers as one record, with the norms over the whole model."""
        return _merge_layers("all layers", self.layers, len(self.ranks))

    @property
    def clip(self) -> float | None:
        """Factor of the reduced gradient that limits its norm; None without clipping."""
        return self.ranks[0].clip

    @property
    def lr(self) -> float | None:
        """Learning rate of the first parameter group; None if no update was made."""
        return self.ranks[0].lr

    @property
    def identical(self) -> bool:
        """Whether all ranks have equal parameters after the step, bit by bit. Buffers may differ."""
        return len({rank.before if rank.after is None else rank.after for rank in self.ranks}) == 1

    def group_layers(self, limit: int = SHOWN_LAYERS) -> tuple[LayerRecord, ...]:
        """Return at most `limit` records: the layers, or the finest groups by module.

        If there are more outermost modules, those with the largest gradients have a record each, and the others one.
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
        """Return the records with the largest gradients in order, and the others as one."""
        order = sorted(
            records,
            key=lambda record: max_or_none(record.reduced) or max_or_none(record.local_norm) or 0.0,
            reverse=True,
        )
        kept = {id(record) for record in order[: limit - 1]}
        others = [record for record in records if id(record) not in kept]
        rest = _merge_layers(f"{len(others):,} others", others, len(self.ranks))
        return [*(record for record in records if id(record) in kept), rest]

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with a row for each layer and rank. Needs pandas."""
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


_NORM_FIELDS = ("local_norm", "contribution", "reduced", "cosine", "update", "value")


def max_or_none(values: Iterable[float | None]) -> float | None:
    """Return the largest value that is not None; None if there is none."""
    return max((value for value in values if value is not None), default=None)


def _merge_tensor_reports(tensor_reports: Sequence[TensorReport]) -> LayerRecord:
    """Return the record of one tensor, from the reports of all ranks."""
    first = tensor_reports[0]
    assert len({(part["kind"], part["name"]) for part in tensor_reports}) == 1, "ranks report different parameters"
    checksums = tuple(part["checksum"] for part in tensor_reports)
    numbers = {name: tuple(part[name] for part in tensor_reports) for name in _NORM_FIELDS}  # type: ignore[literal-required]  # keys of the report
    same = len(set(checksums)) == 1
    return LayerRecord(first["kind"], first["name"], first["shape"], 1, **numbers, checksums=checksums, identical=same)


def _merge_layers(name: str, layers: Sequence[LayerRecord], ranks: int) -> LayerRecord:
    """Return several layers as one record, with the norms of their concatenation."""
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
            _combine_cosines(layers, rank, norms["local_norm"][rank], norms["reduced"][rank]) for rank in range(ranks)
        ),
        checksums=(None,) * ranks,
        identical=all(layer.identical for layer in layers),
    )


def _combine_norms(norms: Iterable[float | None]) -> float | None:
    """Return the norm of concatenated tensors; None adds nothing."""
    known = [norm for norm in norms if norm is not None]
    return math.hypot(*known) if known else None


def _combine_cosines(
    layers: Sequence[LayerRecord], rank: int, own_norm: float | None, reduced_norm: float | None
) -> float | None:
    """Return the cosine of concatenated tensors: dot products are added, each of them cosine times both norms."""
    if not own_norm or not reduced_norm or not math.isfinite(own_norm * reduced_norm):
        return None
    dots = [
        (layer.cosine[rank] or 0.0) * (layer.local_norm[rank] or 0.0) * (layer.reduced[rank] or 0.0) for layer in layers
    ]
    return math.fsum(dots) / (own_norm * reduced_norm)


def _group_by_prefix(layers: Iterable[LayerRecord], depth: int) -> dict[str, list[LayerRecord]]:
    """Return groups of layers with the same first `depth` parts of their names, in the model's order."""
    groups: dict[str, list[LayerRecord]] = {}
    for layer in layers:
        groups.setdefault(".".join(layer.name.split(".")[:depth]), []).append(layer)
    return groups

"""One step of a pipeline taken apart: what crossed the borders between stages, and what each stage made of it.

A micro-batch goes down through the stages as activations, and its gradient comes back up. Each crossing was noted
twice, by the rank that sent the tensor and by the one that used it (see :mod:`dtkit.engine.observe.stage_probe`), each
with a digest of the bits; so it can be told whether what arrived is what was sent. Each stage's gradient is the sum of
its micro-batches' parts, and is held against them.

Plain data: nothing here imports torch, and matplotlib only when a figure is asked for.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypedDict

from dtkit.explain.data_parallel import Explanation, RankReport, compute_mean_loss

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import ModuleType

    import numpy as np
    import pandas as pd
    from matplotlib.figure import Figure

SUM_TOLERANCE = 1e-5
"""The largest difference between a stage's gradient and the sum of its parts, over its norm, that rounding explains."""


class TransferRecord(TypedDict):
    """A tensor at a border, as one of its two ranks saw it."""

    way: str
    """"sent" or "arrived"."""
    kind: str
    """"activation" or "gradient"."""
    border: tuple[int, int]
    """The stage that it comes from, and the one that it goes to."""
    which: tuple[int, int]
    """The micro-batch, and the how-manieth of its tensors."""
    rank: int
    peer: int
    at: float
    """Seconds on this rank's clock."""
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    norm: float
    first: tuple[float, ...]
    """The first numbers in it."""
    digest: str


class MicroBatchGradient(TypedDict):
    """The norm of what one micro-batch adds to a stage's gradient."""

    stage: int
    micro_batch: int
    norm: float


class StageReport(TypedDict):
    """One stage: how much there is to train, its gradient's norm, and by how much that differs from its parts' sum."""

    tensors: int
    numbers: int
    norm: float
    gap: float


class PipelineReport(RankReport):
    """What one rank tells of the step: plain numbers, which travel as they are."""

    sightings: list[TransferRecord]
    parts: list[MicroBatchGradient]
    stages: dict[int, StageReport]


@dataclasses.dataclass(frozen=True)
class StageTransfer:
    """One tensor that crossed a border between two stages."""

    index: int
    """Its place in the order of sending, over all ranks, from 0."""
    kind: str
    """"activation" (down) or "gradient" (up)."""
    micro_batch: int
    tensor: int
    """The how-manieth of the tensors that cross there together."""
    from_stage: int
    to_stage: int
    sender: int
    """A rank, as is the receiver; they are the same where both stages lie on it and nothing is sent."""
    receiver: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    norm: float
    first_values: tuple[float, ...]
    """The first numbers in it."""
    sent_digest: str
    """Digest of what was sent: twelve hexadecimal digits."""
    received_digest: str | None
    """Digest of what the receiver used; None where it used nothing."""

    @property
    def is_intact(self) -> bool:
        """Whether what arrived is what was sent, bit by bit."""
        return self.sent_digest == self.received_digest


@dataclasses.dataclass(frozen=True)
class StageRecord:
    """One stage of one replica."""

    stage: int
    rank: int
    tensors: int
    """Trained tensors in it, and the numbers in them."""
    numbers: int
    micro_batch_norms: tuple[float | None, ...]
    """By micro-batch, the norm of what it adds to the gradient; None where it added nothing."""
    norm: float
    """Of the stage's gradient: the sum of these parts."""
    gap: float
    """Norm of the difference between that gradient and the sum of the parts, added up once more in float64."""

    @property
    def is_sum_of_micro_batches(self) -> bool:
        """Whether the gradient is the sum of its parts, up to rounding."""
        return self.gap <= SUM_TOLERANCE * self.norm or self.gap == 0


@dataclasses.dataclass(frozen=True, eq=False)
class StageRank:
    """One rank of the pipeline."""

    rank: int
    stages: tuple[int, ...]
    rows: np.ndarray | None
    """Numbers of the rows that its replica took (int64), the same on all ranks of it; None for a stream."""
    samples: int
    loss: float | None
    """Mean over its replica's samples; None on ranks without the last stage, which alone knows it."""
    weight: float
    clip: float | None
    lr: float | None
    """None where no update was made."""
    before: str
    """Checksum of the stages' parameters before the step, twelve hexadecimal digits."""
    after: str | None
    """The same after it; None where no update was made."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PipelineExplanation(Explanation):
    """One step of a pipeline, taken apart. Print it, call :meth:`figure`, or read the numbers.

    ``transfers`` has a record per tensor that crossed a border, in the order of sending; ``stages`` one per stage (and
    replica), ``ranks`` one per rank. All are plain dataclasses: ``pandas.DataFrame(explanation.crossings)`` works.
    """

    ranks: tuple[StageRank, ...]
    transfers: tuple[StageTransfer, ...]
    stages: tuple[StageRecord, ...]

    @classmethod
    def from_reports(
        cls, reports: Sequence[PipelineReport], model: str, clock_offsets: Sequence[float] | None = None
    ) -> PipelineExplanation:
        """From the reports of all ranks, in any order. `offsets` are how far each rank's clock is ahead of rank 0's."""
        reports = sorted(reports, key=lambda report: report["rank"])
        assert len({(report["rank"], report["step"]) for report in reports}) == len(reports), "a rank reported twice"
        first = reports[0]
        return cls(
            model=model,
            step=first["step"],
            epoch=first["epoch"],
            ranks=tuple(_build_stage_rank(report) for report in reports),
            transfers=tuple(_match_transfers(reports, clock_offsets)),
            stages=tuple(sorted(_build_stage_records(reports), key=lambda record: (record.rank, record.stage))),
        )

    @property
    def samples(self) -> int:
        """Samples of the step: those of each replica once."""
        return sum(rank.samples for rank in self.ranks if 0 in rank.stages)

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each replica, which are next to each other: as many as there are of the first stage."""
        count = max(1, sum(0 in rank.stages for rank in self.ranks))
        ranks, size = [rank.rank for rank in self.ranks], len(self.ranks) // count
        return tuple(tuple(ranks[start : start + size]) for start in range(0, count * size, size))

    @property
    def micro_batches(self) -> int:
        """Parts that a replica's samples came in."""
        return max((len(stage.micro_batch_norms) for stage in self.stages), default=0)

    @property
    def loss(self) -> float:
        """The loss of the step, as the last stages know it; NaN where none had a sample."""
        return compute_mean_loss((rank.weight, rank.loss) for rank in self.ranks)

    @property
    def is_intact(self) -> bool:
        """Whether every tensor arrived as it was sent, bit by bit."""
        return all(crossing.is_intact for crossing in self.transfers)

    @property
    def is_sum_of_micro_batches(self) -> bool:
        """Whether every stage's gradient is the sum of its micro-batches' parts, up to rounding."""
        return all(stage.is_sum_of_micro_batches for stage in self.stages)

    @property
    def identical(self) -> bool:
        """Whether all replicas have the same stages after the step, bit by bit, as they should."""
        after = {rank.rank: rank.after or rank.before for rank in self.ranks}
        return all(len({after[rank] for rank in mates}) == 1 for mates in zip(*self.replicas, strict=True))

    @property
    def updated(self) -> bool:
        """Whether the parameters were updated: not where the gradients were not finite."""
        return all(rank.after is not None for rank in self.ranks)

    def sent_bytes(self, kind: str) -> int:
        """Bytes of "activation" or of "gradient" that went from rank to rank, all ranks together."""
        return sum(c.nbytes for c in self.transfers if c.kind == kind and c.sender != c.receiver)

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame with a row per crossing. Needs pandas."""
        import pandas as pd

        rows = [dataclasses.asdict(crossing) | {"intact": crossing.is_intact} for crossing in self.transfers]
        return pd.DataFrame(rows, columns=[*(field.name for field in dataclasses.fields(StageTransfer)), "intact"])

    # -- views --------------------------------------------------------------------------------------------------

    def figure(self) -> Figure:
        """A picture as a matplotlib Figure: who sent what when, how large it was, and what each stage made of it."""
        from dtkit.dashboard.figures.pipeline_figure import draw_pipeline_step

        return draw_pipeline_step(self)

    @property
    def _view_module(self) -> ModuleType:
        from dtkit.dashboard.text import pipeline_text

        return pipeline_text


def _build_stage_rank(report: PipelineReport) -> StageRank:
    return StageRank(
        rank=report["rank"],
        stages=tuple(sorted(report["stages"])),
        rows=report["rows"],
        samples=report["samples"],
        loss=report["loss"],
        weight=report["weight"],
        clip=report["clip"],
        lr=report["lr"],
        before=report["before"],
        after=report["after"],
    )


def _build_stage_records(reports: Iterable[PipelineReport]) -> Iterable[StageRecord]:
    for report in reports:
        norms = {(part["stage"], part["micro_batch"]): part["norm"] for part in report["parts"]}
        count = max((k for _, k in norms), default=-1) + 1
        for stage, found in report["stages"].items():
            parts = tuple(norms.get((stage, k)) for k in range(count))
            yield StageRecord(stage=stage, rank=report["rank"], micro_batch_norms=parts, **found)


def _match_transfers(
    reports: Sequence[PipelineReport], clock_offsets: Sequence[float] | None
) -> Iterable[StageTransfer]:
    """What was sent, in order, each with what the receiver saw of it."""
    seen = [
        (s["at"] - (clock_offsets[s["rank"]] if clock_offsets else 0.0), s)
        for report in reports
        for s in report["sightings"]
    ]
    arrived = {_make_transfer_key(s, s["peer"], s["rank"]): s["digest"] for _, s in seen if s["way"] == "arrived"}
    sent = sorted(((at, s) for at, s in seen if s["way"] == "sent"), key=lambda pair: pair[0])
    for order, (_, s) in enumerate(sent):
        yield StageTransfer(
            index=order,
            kind=s["kind"],
            micro_batch=s["which"][0],
            tensor=s["which"][1],
            from_stage=s["border"][0],
            to_stage=s["border"][1],
            sender=s["rank"],
            receiver=s["peer"],
            shape=s["shape"],
            dtype=s["dtype"],
            nbytes=s["nbytes"],
            norm=s["norm"],
            first_values=s["first"],
            sent_digest=s["digest"],
            received_digest=arrived.get(_make_transfer_key(s, s["rank"], s["peer"])),
        )


def _make_transfer_key(s: TransferRecord, sender: int, receiver: int) -> tuple[Any, ...]:
    return s["kind"], s["border"], s["which"], sender, receiver

"""Explanation of one pipeline step: the transfers between stages, and the gradient of each stage.

A micro-batch goes through the stages as activations, and its gradient goes back. Sender and receiver both record each
transfer (see :mod:`dtkit.engine.observe.stage_probe`). Their digests show whether the tensor arrived intact. Each
stage's gradient is compared with the sum of its micro-batches' parts.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypedDict

from dtkit._util.arguments import explain_arguments
from dtkit._util.attributes import suggest_attributes
from dtkit.explain.base import Explanation, RankPart, RankReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pandas as pd

SUM_TOLERANCE = 1e-5
"""Largest difference between a stage's gradient and the sum of its parts that rounding explains, over its norm."""


class TransferRecord(TypedDict):
    """Transfer of a tensor between stages, as one of its two ranks recorded it."""

    direction: str
    """"sent" or "arrived"."""
    kind: str
    """"activation" or "gradient"."""
    stage_pair: tuple[int, int]
    """Stage of the sender, and stage of the receiver."""
    tensor_id: tuple[int, int]
    """Micro-batch, and index of the tensor among those sent together."""
    rank: int
    peer: int
    at: float
    """Seconds on this rank's clock."""
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    norm: float
    first: tuple[float, ...]
    """First numbers in the tensor."""
    digest: str


class MicroBatchGradient(TypedDict):
    """Norm of one micro-batch's part of a stage's gradient."""

    stage: int
    micro_batch: int
    norm: float


class StageReport(TypedDict):
    """One stage: size, norm of its gradient, and norm of the gradient's difference from the sum of its parts."""

    tensors: int
    numbers: int
    norm: float
    gap: float


class PipelineReport(RankReport):
    """Report of one rank of a pipeline."""

    transfers: list[TransferRecord]
    parts: list[MicroBatchGradient]
    stages: dict[int, StageReport]


@dataclasses.dataclass(frozen=True)
class StageTransfer:
    """Transfer of one tensor between two stages."""

    index: int
    """Index in the order of sending, over all ranks."""
    kind: str
    """"activation" (down) or "gradient" (up)."""
    micro_batch: int
    tensor: int
    """Index of the tensor among those sent together."""
    from_stage: int
    to_stage: int
    sender: int
    """Sending rank; the same as the receiver if both stages are on it and nothing is sent."""
    receiver: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    norm: float
    first_values: tuple[float, ...]
    """First numbers in the tensor."""
    sent_digest: str
    """Digest of the sent tensor: twelve hexadecimal digits."""
    received_digest: str | None
    """Digest of the tensor that the receiver used; None if it used none."""

    @property
    def is_intact(self) -> bool:
        """Whether the tensor arrived as it was sent, bit by bit."""
        return self.sent_digest == self.received_digest


@dataclasses.dataclass(frozen=True)
class StageRecord:
    """One stage of one replica."""

    stage: int
    rank: int
    tensors: int
    """Number of trained tensors."""
    numbers: int
    """Number of their elements."""
    micro_batch_norms: tuple[float | None, ...]
    """Norm of each micro-batch's part of the gradient; None if it has none."""
    norm: float
    """Norm of the stage's gradient, which is the sum of these parts."""
    gap: float
    """Norm of the difference between the gradient and the sum of its parts in float64."""

    @property
    def is_sum_of_micro_batches(self) -> bool:
        """Whether the gradient is the sum of its parts, up to rounding."""
        return self.gap <= SUM_TOLERANCE * self.norm or self.gap == 0


@dataclasses.dataclass(frozen=True, eq=False)
class StageRank(RankPart):
    """One rank of the pipeline. Its rows, samples and loss are those of its replica; the last stage has the loss."""

    stages: tuple[int, ...]
    clip: float | None


@suggest_attributes("explanation")
@explain_arguments
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PipelineExplanation(Explanation):
    """One pipeline step in detail. Print it, call :meth:`figure`, or read the numbers.

    ``transfers`` has a record for each sent tensor, in the order of sending. ``stages`` has one for each stage of each
    replica, and ``ranks`` one for each rank. All are dataclasses: ``pandas.DataFrame(explanation.transfers)`` works.
    """

    ranks: tuple[StageRank, ...]
    transfers: tuple[StageTransfer, ...]
    stages: tuple[StageRecord, ...]

    @classmethod
    def from_reports(
        cls, reports: Sequence[PipelineReport], model: str, clock_offsets: Sequence[float] | None = None
    ) -> PipelineExplanation:
        """Return the explanation from the reports of all ranks, in any order.

        `clock_offsets` has the lead of each rank's clock over rank 0's in seconds.
        """
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
        """Samples of the step; those of each replica count once."""
        return sum(rank.samples for rank in self.ranks if 0 in rank.stages)

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each replica, which are consecutive. Each replica has one first stage."""
        count = max(1, sum(0 in rank.stages for rank in self.ranks))
        ranks, size = [rank.rank for rank in self.ranks], len(self.ranks) // count
        return tuple(tuple(ranks[start : start + size]) for start in range(0, count * size, size))

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of each replica."""
        return max((len(stage.micro_batch_norms) for stage in self.stages), default=0)

    @property
    def is_intact(self) -> bool:
        """Whether every tensor arrived as it was sent, bit by bit."""
        return all(transfer.is_intact for transfer in self.transfers)

    @property
    def is_sum_of_micro_batches(self) -> bool:
        """Whether each stage's gradient is the sum of its micro-batches' parts, up to rounding."""
        return all(stage.is_sum_of_micro_batches for stage in self.stages)

    @property
    def identical(self) -> bool:
        """Whether all replicas have equal stages after the step, bit by bit."""
        after = {rank.rank: rank.after or rank.before for rank in self.ranks}
        return all(len({after[rank] for rank in peers}) == 1 for peers in zip(*self.replicas, strict=True))

    def sent_bytes(self, kind: str) -> int:
        """Return the bytes of "activation" or "gradient" that were sent between ranks, over all ranks."""
        return sum(c.nbytes for c in self.transfers if c.kind == kind and c.sender != c.receiver)

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with a row for each transfer. Needs pandas."""
        import pandas as pd

        rows = [dataclasses.asdict(transfer) | {"intact": transfer.is_intact} for transfer in self.transfers]
        return pd.DataFrame(rows, columns=[*(field.name for field in dataclasses.fields(StageTransfer)), "intact"])


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
        for stage, stage_report in report["stages"].items():
            parts = tuple(norms.get((stage, k)) for k in range(count))
            yield StageRecord(stage=stage, rank=report["rank"], micro_batch_norms=parts, **stage_report)


def _match_transfers(
    reports: Sequence[PipelineReport], clock_offsets: Sequence[float] | None
) -> Iterable[StageTransfer]:
    """Yield transfers in the order of sending, each with the digest at its receiver."""
    records = [
        (s["at"] - (clock_offsets[s["rank"]] if clock_offsets else 0.0), s)
        for report in reports
        for s in report["transfers"]
    ]
    arrived = {
        _make_transfer_key(s, s["peer"], s["rank"]): s["digest"] for _, s in records if s["direction"] == "arrived"
    }
    sent = sorted(((at, s) for at, s in records if s["direction"] == "sent"), key=lambda pair: pair[0])
    for order, (_, s) in enumerate(sent):
        yield StageTransfer(
            index=order,
            kind=s["kind"],
            micro_batch=s["tensor_id"][0],
            tensor=s["tensor_id"][1],
            from_stage=s["stage_pair"][0],
            to_stage=s["stage_pair"][1],
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
    return s["kind"], s["stage_pair"], s["tensor_id"], sender, receiver

"""Explanation of one step with sharded parameters: its collectives, and their cost.

In sharded and tensor-parallel training, no rank has whole gradients to show. The explanation lists the collectives in
order: size, bytes sent in theory, and bytes counted on the connections. Results that should be equal on several ranks
are compared by digest.

With replicas, a collective is among the ranks of one replica, among those with the same shard, or among all. Replicas
may have other samples and send other amounts, so ranks are compared within the group of each collective.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any, TypedDict

from dtkit._util.arguments import explain_arguments
from dtkit._util.attributes import suggest_attributes
from dtkit.explain.base import Explanation, RankPart, RankReport

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pandas as pd

_RING_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""Number of times that each rank of a ring sends (N - 1) / N of the bytes (Patarasu and Yuan, JPDC 2009)."""


class CollectiveReport(TypedDict):
    """One collective, as one rank recorded it."""

    operation: str
    """"all_reduce", "all_gather", "reduce_scatter", "broadcast" or "all_to_all"."""
    phase: str
    """Phase of the step: "forward", "backward", "sync" or "update"."""
    shape: tuple[int, ...]
    """Shape of its (first) result."""
    dtype: str
    nbytes: int
    """Size of the whole tensor that is summed, gathered, or summed and scattered."""
    ranks: tuple[int, ...]
    """Ranks of its group, including this one."""
    is_direct: bool
    """Whether each rank sends the whole tensor to each other one, by sockets of one host, instead of in a ring."""
    digest: str | None
    """Digest of the result, if it should be equal on all of them."""


class ShardedReport(RankReport):
    """Report of one rank with sharded parameters."""

    collectives: list[CollectiveReport]
    reports_samples: bool
    sent_bytes: int
    held_bytes: int
    whole_bytes: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the step."""

    index: int
    operation: str
    phase: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    ranks: tuple[int, ...]
    """Ranks of its group."""
    is_direct: bool
    """Whether each rank sends the whole tensor to each other one, by sockets of one host, instead of in a ring."""
    expected_bytes: float
    """Bytes that each of these ranks sends."""
    digests: tuple[str | None, ...]
    """Digest of the result on each of these ranks; None if their results differ by design."""


@dataclasses.dataclass(frozen=True)
class CollectiveGroup:
    """Collectives of one kind, group and phase."""

    phase: str
    operation: str
    ranks: tuple[int, ...]
    count: int
    nbytes: int
    expected_bytes: float


@dataclasses.dataclass(frozen=True, eq=False)
class ShardedRank(RankPart):
    """One rank's part in the step. Checksums are of its own shard."""

    reports_samples: bool
    """Whether this rank counts its samples: one of the ranks with the same samples does."""
    held_bytes: int
    """Size of the parameters on this rank."""
    whole_bytes: int
    """Size of all parameters."""
    sent_bytes: int
    """Bytes counted on this rank's connections during the step."""


@suggest_attributes("explanation")
@explain_arguments
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShardedExplanation(Explanation):
    """One step of sharded or tensor-parallel training in detail. Print it, call :meth:`figure`, or read the numbers."""

    ranks: tuple[ShardedRank, ...]
    collectives: tuple[Collective, ...]
    """Collectives in the order of `recording_rank`."""
    recording_rank: int
    """Rank that took part in these: the first of those with most collectives."""
    is_aligned: bool
    """Whether the ranks of each group had the same collectives in the same order."""
    is_agreed: bool
    """Whether they were also equal in each result that should be equal, bit by bit."""

    @classmethod
    def from_reports(cls, reports: Sequence[ShardedReport], model: str) -> ShardedExplanation:
        """Return the explanation from the reports of all ranks, in any order."""
        reports = sorted(reports, key=lambda report: report["rank"])
        names = [field.name for field in dataclasses.fields(ShardedRank)]
        groups = _group_reports(reports)
        first, longest = reports[0], max(reports, key=lambda report: len(report["collectives"]))
        aligned = all(_is_equal_on_all_ranks(group, "phase", "operation", "nbytes") for group in groups.values())
        return cls(
            model=model,
            step=first["step"],
            epoch=first["epoch"],
            ranks=tuple(ShardedRank(**{name: report[name] for name in names}) for report in reports),  # type: ignore[literal-required]  # the fields are the report's keys
            collectives=tuple(_build_collectives(longest, groups)),
            recording_rank=longest["rank"],
            is_aligned=aligned,
            is_agreed=aligned and all(_is_equal_on_all_ranks(group, "digest") for group in groups.values()),
        )

    @property
    def samples(self) -> int:
        """Samples of the step; those that several ranks share count once."""
        return sum(rank.samples for rank in self.ranks if rank.reports_samples)

    @property
    def groups(self) -> tuple[CollectiveGroup, ...]:
        """Collectives by phase, kind and group, in the order of the first of each."""
        groups: dict[tuple[str, str, tuple[int, ...]], list[Collective]] = {}
        for collective in self.collectives:
            groups.setdefault((collective.phase, collective.operation, collective.ranks), []).append(collective)
        return tuple(
            CollectiveGroup(*key, len(group), sum(c.nbytes for c in group), sum(c.expected_bytes for c in group))
            for key, group in groups.items()
        )

    @property
    def expected_bytes(self) -> float:
        """Bytes that `recording_rank` sends in all of them."""
        return sum(c.expected_bytes for c in self.collectives)

    @property
    def sent_bytes(self) -> int:
        """Bytes counted on the connections of `recording_rank`."""
        return next(rank.sent_bytes for rank in self.ranks if rank.rank == self.recording_rank)

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with a row for each collective. Needs pandas."""
        import pandas as pd

        return pd.DataFrame([dataclasses.asdict(collective) for collective in self.collectives])


def _build_collectives(report: ShardedReport, groups: _CollectivesByGroup) -> Iterator[Collective]:
    """Yield the collectives of one rank, with the digests on all ranks of their groups."""
    counts: collections.Counter[tuple[int, ...]] = collections.Counter()
    for index, collective in enumerate(report["collectives"]):
        ranks = collective["ranks"]
        k, size = counts[ranks], len(ranks)
        counts[ranks] += 1
        digests = tuple(line[k]["digest"] if k < len(line) else None for line in groups[ranks].values())
        passes = size if collective["is_direct"] else _RING_PASSES.get(collective["operation"], 0)
        sent_bytes = passes * (size - 1) / size * collective["nbytes"]
        fields: dict[str, Any] = {key: value for key, value in collective.items() if key != "digest"}
        yield Collective(index=index, expected_bytes=sent_bytes, digests=digests, **fields)


_CollectivesByGroup = dict[tuple[int, ...], dict[int, list[CollectiveReport]]]
"""Collectives of each group, by rank and in order."""


def _group_reports(reports: Sequence[ShardedReport]) -> _CollectivesByGroup:
    groups: _CollectivesByGroup = {}
    for report in reports:
        for collective in report["collectives"]:
            ranks = collective["ranks"]
            groups.setdefault(ranks, {rank: [] for rank in ranks})[report["rank"]].append(collective)
    return groups


def _is_equal_on_all_ranks(group: Mapping[int, Sequence[CollectiveReport]], *keys: str) -> bool:
    """Return whether these fields are equal on all ranks of a group."""
    lines = [[tuple(collective[key] for key in keys) for collective in line] for line in group.values()]  # type: ignore[literal-required]  # keys of a report
    return all(line == lines[0] for line in lines)

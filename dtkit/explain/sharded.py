"""One step taken apart where parameters are cut among ranks: the collectives in it, and what they cost.

With sharded or tensor-parallel training no rank ever holds whole gradients, so there are none to be shown before and
after a sum. What can be shown is what ranks said to each other: each collective in order, how large it was, what the
textbook says that it sends, and what was counted on the connections. A result that should be the same on several ranks
is compared by digest.

With replicas, a collective is among the ranks that share a replica, or among those that hold the same part, or among
all. Replicas may differ in their samples, and so in what they send. So ranks are held against those of the same group.

Plain data: nothing here imports torch, and matplotlib only when a figure is asked for.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any, TypedDict

from dtkit.explain.data_parallel import Explanation, RankReport, compute_mean_loss

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

    import numpy as np
    import pandas as pd
    from matplotlib.figure import Figure

_RING_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""How often (N - 1) / N of the bytes go out from each rank of a ring (Patarasu and Yuan, JPDC 2009)."""


class CollectiveReport(TypedDict):
    """One collective, as one rank saw it."""

    what: str
    """"all_reduce", "all_gather", "reduce_scatter", "broadcast" or "all_to_all"."""
    phase: str
    """What the step was doing: "forward", "backward", "sync" or "update"."""
    shape: tuple[int, ...]
    """Of the (first) tensor that it made."""
    dtype: str
    nbytes: int
    """Of all of it: what is summed, what is gathered, what is summed before it is scattered."""
    ranks: tuple[int, ...]
    """Those that made it together, this one among them."""
    digest: str | None
    """Of the result, where that should be the same on all of them."""


class ShardedReport(RankReport):
    """What one rank tells of the step: plain numbers, which travel as they are."""

    collectives: list[CollectiveReport]
    speaks: bool
    sent_bytes: int
    held_bytes: int
    whole_bytes: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the step."""

    index: int
    what: str
    phase: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    ranks: tuple[int, ...]
    """Those that made it together."""
    expected_bytes: float
    """What each of these ranks sends in a ring."""
    digests: tuple[str | None, ...]
    """Of the result, on each of these ranks; None where they get different parts."""


@dataclasses.dataclass(frozen=True)
class CollectiveGroup:
    """All collectives of a kind among the same ranks in one phase of the step."""

    phase: str
    what: str
    ranks: tuple[int, ...]
    count: int
    nbytes: int
    expected_bytes: float


@dataclasses.dataclass(frozen=True, eq=False)
class ShardedRank:
    """One rank's part in the step. Checksums are of what it holds: twelve hexadecimal digits."""

    rank: int
    rows: np.ndarray | None
    """Numbers of the rows that it took (int64); None for a stream."""
    samples: int
    speaks: bool
    """Whether it counts these samples: one of the ranks that take the same ones."""
    loss: float | None
    weight: float
    lr: float | None
    """None where no update was made."""
    before: str
    after: str | None
    held_bytes: int
    """Of the parameters on this rank, and of all of them."""
    whole_bytes: int
    sent_bytes: int
    """Counted on this rank's connections during the step."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ShardedExplanation(Explanation):
    """One step of sharded or tensor-parallel training. Print it, call :meth:`figure`, or read the numbers."""

    ranks: tuple[ShardedRank, ...]
    collectives: tuple[Collective, ...]
    """In the order in which `recording_rank` made them."""
    recording_rank: int
    """The rank that took part in these: the first of those that made most."""
    is_aligned: bool
    """Whether the ranks of each group made the same collectives in the same order."""
    is_agreed: bool
    """Whether, beyond that, each result that should be the same on all ranks of its group is so, bit by bit."""

    @classmethod
    def from_reports(cls, reports: Sequence[ShardedReport], model: str) -> ShardedExplanation:
        """From the reports of all ranks, in any order."""
        reports = sorted(reports, key=lambda report: report["rank"])
        names = [field.name for field in dataclasses.fields(ShardedRank)]
        groups = _group_reports(reports)
        first, witness = reports[0], max(reports, key=lambda report: len(report["collectives"]))
        aligned = all(_is_equal_on_all_ranks(group, "phase", "what", "nbytes") for group in groups.values())
        return cls(
            model=model,
            step=first["step"],
            epoch=first["epoch"],
            ranks=tuple(ShardedRank(**{name: report[name] for name in names}) for report in reports),  # type: ignore[literal-required]  # the fields are the report's keys
            collectives=tuple(_build_collectives(witness, groups)),
            recording_rank=witness["rank"],
            is_aligned=aligned,
            is_agreed=aligned and all(_is_equal_on_all_ranks(group, "digest") for group in groups.values()),
        )

    @property
    def samples(self) -> int:
        """Samples of the step: those that several ranks take together count once."""
        return sum(rank.samples for rank in self.ranks if rank.speaks)

    @property
    def loss(self) -> float:
        """The weighted mean over ranks; NaN where none had a sample."""
        return compute_mean_loss((rank.weight, rank.loss) for rank in self.ranks)

    @property
    def updated(self) -> bool:
        """Whether the parameters were updated: not where the gradients were not finite."""
        return all(rank.after is not None for rank in self.ranks)

    @property
    def groups(self) -> tuple[CollectiveGroup, ...]:
        """Collectives of a kind together, in the order in which the first of each was made."""
        found: dict[tuple[str, str, tuple[int, ...]], list[Collective]] = {}
        for one in self.collectives:
            found.setdefault((one.phase, one.what, one.ranks), []).append(one)
        return tuple(
            CollectiveGroup(*key, len(ones), sum(c.nbytes for c in ones), sum(c.expected_bytes for c in ones))
            for key, ones in found.items()
        )

    @property
    def expected_bytes(self) -> float:
        """What `recording_rank` sends in all of them together, in rings."""
        return sum(c.expected_bytes for c in self.collectives)

    @property
    def sent_bytes(self) -> int:
        """What was counted on the connections of `recording_rank`."""
        return next(rank.sent_bytes for rank in self.ranks if rank.rank == self.recording_rank)

    def to_pandas(self) -> pd.DataFrame:
        """A DataFrame with a row per collective. Needs pandas."""
        import pandas as pd

        return pd.DataFrame([dataclasses.asdict(one) for one in self.collectives])

    # -- views --------------------------------------------------------------------------------------------------

    def figure(self) -> Figure:
        """A picture as a matplotlib Figure: what each kind of collective sends, and what was counted."""
        from dtkit.dashboard.figures.sharded_figure import draw_sharded_step

        return draw_sharded_step(self)

    @property
    def _view_module(self) -> ModuleType:
        from dtkit.dashboard.figures import sharded_figure

        return sharded_figure


def _build_collectives(witness: ShardedReport, groups: _CollectivesByGroup) -> Iterator[Collective]:
    """As one rank saw them, with the digests of those that it made them with."""
    made: collections.Counter[tuple[int, ...]] = collections.Counter()
    for order, one in enumerate(witness["collectives"]):
        others, place = groups[one["ranks"]], made[one["ranks"]]
        made[one["ranks"]] += 1
        digests = tuple(line[place]["digest"] if place < len(line) else None for line in others.values())
        count = len(one["ranks"])
        ring = _RING_PASSES.get(one["what"], 0) * (count - 1) / count * one["nbytes"]
        plain: dict[str, Any] = {key: value for key, value in one.items() if key != "digest"}
        yield Collective(index=order, expected_bytes=ring, digests=digests, **plain)


_CollectivesByGroup = dict[tuple[int, ...], dict[int, list[CollectiveReport]]]
"""By the ranks that make collectives together: what each of them made there, in order."""


def _group_reports(reports: Sequence[ShardedReport]) -> _CollectivesByGroup:
    found: _CollectivesByGroup = {}
    for report in reports:
        for one in report["collectives"]:
            found.setdefault(one["ranks"], {rank: [] for rank in one["ranks"]})[report["rank"]].append(one)
    return found


def _is_equal_on_all_ranks(group: Mapping[int, Sequence[CollectiveReport]], *keys: str) -> bool:
    """Whether all of a group tell the same of these."""
    lines = [[tuple(one[key] for key in keys) for one in line] for line in group.values()]  # type: ignore[literal-required]  # keys of a report
    return all(line == lines[0] for line in lines)

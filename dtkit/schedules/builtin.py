"""Built-in schedules as tables, in the orders of torch's classes.

- GPipe (Huang et al., NeurIPS 2019): all micro-batches forward, then all backward.
- 1F1B (Narayanan et al., SOSP 2019): after a warm-up, alternating forward and backward. A rank then holds the
  activations of at most p micro-batches instead of all m.
- Interleaved1F1B (Narayanan et al., SC 2021): v stages per rank, so that the first micro-batch arrives earlier.
- LoopedBFS (Lamy-Poirier, MLSys 2023): the same stages, each with all micro-batches in sequence.
- InterleavedZeroBubble and ZBVZeroBubble (Qi et al., ICLR 2024): weight-gradient passes fill gaps.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit.schedules.action import Action

if TYPE_CHECKING:
    from collections.abc import Callable

    Row = list[Action]

_STAGES_PER_RANK = 2  # of every schedule with several


@dataclasses.dataclass(frozen=True)
class BuiltinSchedule:
    """A schedule with a function from (rank, ranks, micro-batches) to the rank's row."""

    build_row: Callable[[int, int, int], Row]
    stages_per_rank: int = 1
    """Number of stages of a rank."""
    needs_full_rounds: bool = False
    """Whether micro-batches come in equal rounds of about `ranks` each."""
    allows_few_micro_batches: bool = False
    """Whether fewer micro-batches than ranks are allowed."""
    bubble_formula: str | None = None
    """Formula of the bubble for stages of equal cost."""


def get_proper_name(name: str) -> str:
    """Return the name of a built-in schedule as it is written, whatever the case of `name`; other names as they are."""
    return next((known for known in BUILTIN_SCHEDULES if known.lower() == name.lower()), name)


def build_rows(name: str, ranks: int, micro_batches: int) -> list[Row]:
    """Return the table of a built-in schedule; raise ValueError if these numbers don't allow it."""
    kind = BUILTIN_SCHEDULES.get(name)
    if kind is None:
        raise ValueError(
            f"schedule={name!r}; it must be one of {', '.join(map(repr, BUILTIN_SCHEDULES))}, or your own table"
        )
    if micro_batches < ranks and not kind.allows_few_micro_batches:
        raise ValueError(
            f"stages={ranks} with micro_batches={micro_batches}: each stage needs a rank of its own, and {name} at "
            f"least as many micro-batches as stages. On a cluster of {ranks} ranks, use "
            f"dtkit.Pipeline({ranks}, {4 * ranks}) or schedule='GPipe'; on one of n ranks, dtkit.Pipeline(n, 4 * n)"
        )
    rounds = max(1, micro_batches // ranks)
    if kind.needs_full_rounds and micro_batches % rounds:
        fitting = ranks * rounds, ranks * (rounds + 1)
        raise ValueError(
            f"micro_batches={micro_batches} for {ranks} stages: {name} takes them in {rounds} equal rounds. Use "
            f"micro_batches={fitting[0]} or {fitting[1]}"
        )
    return [kind.build_row(rank, ranks, micro_batches) for rank in range(ranks)]


def compute_bubble(name: str, ranks: int, micro_batches: int) -> tuple[str, float] | None:
    """Return (formula, value) of the bubble for stages of equal cost, or None without a formula."""
    kind = BUILTIN_SCHEDULES.get(name)
    if kind is None or kind.bubble_formula is None:
        return None
    if kind.needs_full_rounds and micro_batches % ranks:
        return None  # the formula needs full rounds
    return kind.bubble_formula, (ranks - 1) / (kind.stages_per_rank * micro_batches + ranks - 1)


# -- rows ----------------------------------------------------------------------------------------------------


def _build_gpipe_row(rank: int, _ranks: int, micro_batches: int) -> Row:
    return [Action(kind, rank, m) for kind in "FB" for m in range(micro_batches)]


def _build_1f1b_row(rank: int, ranks: int, micro_batches: int) -> Row:
    forwards = [Action("F", rank, m) for m in range(micro_batches)]
    backwards = [Action("B", rank, m) for m in range(micro_batches)]
    return _alternate(forwards, backwards, ranks - 1 - rank)


def _build_interleaved_row(rank: int, ranks: int, micro_batches: int) -> Row:
    forwards, backwards = _list_interleaved_passes(rank, ranks, micro_batches)
    return _alternate(forwards, backwards, _count_warmup_forwards(rank, ranks, micro_batches, hop=2))


def _build_interleaved_zero_bubble_row(rank: int, ranks: int, micro_batches: int) -> Row:
    """Return an interleaved row with half the warm-up.

    From the input-gradient pass number `rank` on, each is followed by a weight-gradient pass.
    """
    forwards, backwards = _list_interleaved_passes(rank, ranks, micro_batches)
    inputs = [b._replace(kind="I") for b in backwards]
    weights = [b._replace(kind="W") for b in backwards]
    row: Row = []
    for action in _alternate(forwards, inputs, _count_warmup_forwards(rank, ranks, micro_batches, hop=1)):
        row.append(action)
        if action.kind == "I" and inputs.index(action) >= rank:
            row.append(weights.pop(0))
    return row + weights


def _build_looped_bfs_row(rank: int, ranks: int, micro_batches: int) -> Row:
    stages = [rank + k * ranks for k in range(_STAGES_PER_RANK)]
    forwards = [Action("F", stage, m) for stage in stages for m in range(micro_batches)]
    return forwards + [Action("B", stage, m) for stage in reversed(stages) for m in reversed(range(micro_batches))]


def _build_zbv_row(rank: int, ranks: int, micro_batches: int) -> Row:
    """Return a row for stages that go down the ranks and up again, so that the last one is on rank 0.

    After the warm-up, forward and both passes of backward alternate on the rank's second and first stage. At the end,
    the input-gradient passes come first, since other ranks wait for them.
    """
    first, second = rank, 2 * ranks - 1 - rank
    count = max(2 * ranks - 1, micro_batches)
    remaining = {(kind, s): iter(range(count)) for kind in "FIW" for s in (first, second)}
    row: Row = []

    def add(kinds: str, stage: int) -> None:
        row.extend(
            Action(kind, stage, m) for kind in kinds if (m := next(remaining[kind, stage], count)) < micro_batches
        )

    for _ in range(2 * (ranks - rank) - 1):
        add("F", first)
    for _ in range(rank):
        add("F", second)
        add("F", first)
    for _ in range(ranks - rank):
        add("FIW", second)
    for _ in range(count - ranks):
        add("FIW", first)
        add("FIW", second)
    for _ in range(rank):
        add("I", first)
        add("I", second)
    for _ in range(ranks - rank):
        add("IW", first)
    for stage in (second, first):
        for _ in range(rank):
            add("W", stage)
    return row


def _list_interleaved_passes(rank: int, ranks: int, micro_batches: int) -> tuple[Row, Row]:
    """Return a rank's forwards and backwards with several stages: each round passes through all stages."""
    size = micro_batches // max(1, micro_batches // ranks)
    stages = [rank + k * ranks for k in range(_STAGES_PER_RANK)]

    def row(kind: str, order: list[int]) -> Row:
        starts = range(0, micro_batches, size)
        return [Action(kind, stage, m) for start in starts for stage in order for m in range(start, start + size)]

    return row("F", stages), row("B", stages[::-1])


def _count_warmup_forwards(rank: int, ranks: int, micro_batches: int, hop: int) -> int:
    """Return the number of forwards before the first backward.

    It is one round for each stage of the rank but the last, plus `hop` for each later rank.
    """
    size = micro_batches // max(1, micro_batches // ranks)
    return min((_STAGES_PER_RANK - 1) * size + hop * (ranks - 1 - rank), micro_batches * _STAGES_PER_RANK)


def _alternate(forwards: Row, backwards: Row, warm_up: int) -> Row:
    """Return `warm_up` forwards, then alternating forwards and backwards, then the remaining backwards."""
    row = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        row += [forward, backward]
    return row + backwards[len(forwards) - warm_up :]


_PLAIN_BUBBLE, _LOOPED_BUBBLE = "(p-1)/(m+p-1)", "(p-1)/(v·m+p-1)"

BUILTIN_SCHEDULES = {
    "GPipe": BuiltinSchedule(_build_gpipe_row, allows_few_micro_batches=True, bubble_formula=_PLAIN_BUBBLE),
    "1F1B": BuiltinSchedule(_build_1f1b_row, bubble_formula=_PLAIN_BUBBLE),
    "Interleaved1F1B": BuiltinSchedule(
        _build_interleaved_row, _STAGES_PER_RANK, needs_full_rounds=True, bubble_formula=_LOOPED_BUBBLE
    ),
    "InterleavedZeroBubble": BuiltinSchedule(
        _build_interleaved_zero_bubble_row, _STAGES_PER_RANK, needs_full_rounds=True
    ),
    "LoopedBFS": BuiltinSchedule(_build_looped_bfs_row, _STAGES_PER_RANK, bubble_formula=_LOOPED_BUBBLE),
    "ZBVZeroBubble": BuiltinSchedule(_build_zbv_row, _STAGES_PER_RANK),
}
"""Built-in schedules by name."""

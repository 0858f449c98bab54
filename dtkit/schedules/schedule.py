"""A pipeline's schedule as a table: a row per rank, with an action in each cell.

A cell is forward (F) or backward (B) of one micro-batch through one stage. Backward may be split into two halves (Qi et
al., ICLR 2024). The previous stage waits for the gradient of the stage's input (I). The gradient of its weights (W) can
fill gaps. `F2` is the forward pass of micro-batch 2 through the rank's stage. If ranks have several stages, the stage
comes first: `5F2`. A point is an idle cell.

Idle cells are only for readers. A rank runs its row in order. Each action runs as soon as its inputs have arrived, so
points don't delay anything. Sends and receives follow from the actions. F needs the output of the previous stage, B and
I the gradient of the next stage.

A schedule is checked when it is built (:mod:`dtkit.schedules.validation`), so every existing schedule can run.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TYPE_CHECKING

from dtkit._util import views
from dtkit._util.arguments import explain_arguments, suggest_options
from dtkit._util.attributes import suggest_attributes
from dtkit._util.completion import hide_from_completion
from dtkit.schedules import builtin, validation
from dtkit.schedules.action import Action, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from matplotlib.figure import Figure

    from dtkit.schedules.simulator import Simulation

IDLE_CELLS = frozenset({"", ".", "-", "_"})
_CELL_PATTERN = re.compile(r"(\d*)([FBIW])(\d+)", re.IGNORECASE)


@suggest_options
@suggest_attributes("schedule")
@explain_arguments
@hide_from_completion(
    "format_action", "get_bubble_formula", "get_stages", "iterate_actions", "simulate_with", "stage_ranks"
)
@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Schedule:
    """The order of each rank's actions in a pipeline. Notebooks show it as a figure.

    >>> schedule = dtkit.Schedule(["F0 F1 B0 B1", "F0 B0 F1 B1"])
    >>> schedule
    Schedule('custom', 2 ranks, 2 micro-batches)
    >>> schedule.simulate()
    Simulation(time 9, bubble 33.3 %, peak micro-batches by node: 2, 1)

    `rows` is text with a line per rank and blanks between cells. Or it is a list of such lines, or of lists of cells
    (`"F0"`, `None` if idle). Ranks, stages, micro-batches and cells are counted from 0. A schedule that can't run
    raises a ValueError with the rank, the cell, the rule and the remedy.

    A cell is an action and its micro-batch: ``F0`` forward, ``B0`` backward. Instead of ``B0``, there may be its two
    halves: ``I0``, the gradient of the stage's input, and anywhere after it ``W0``, that of its weights. With several
    stages on a rank, the stage comes first, as in ``2F0``. A point is an idle cell.
    """

    rows: tuple[Row, ...]
    name: str

    def __init__(self, rows: str | Sequence[str | Sequence[str | Action | None]], name: str = "custom") -> None:
        lines = [line for line in rows.splitlines() if line.strip()] if isinstance(rows, str) else list(rows)
        object.__setattr__(self, "rows", tuple(_parse_row(rank, line) for rank, line in enumerate(lines)))
        object.__setattr__(self, "name", name)
        validation.validate_rows(self.rows)
        self._check_name()

    def _check_name(self) -> None:
        """Raise ValueError for a built-in name with another table: torch's class of that name would run it."""
        if self.name in builtin.BUILTIN_SCHEDULES:
            known = builtin.build_rows(self.name, self.ranks, self.micro_batches)
            if tuple(map(tuple, known)) != tuple(tuple(a for a in row if a) for row in self.rows):
                raise ValueError(
                    f"name={self.name!r} is a built-in schedule, but the table differs from it. Choose another name"
                )

    @classmethod
    def from_name(cls, name: str, ranks: int, micro_batches: int) -> Schedule:
        """Return one of :data:`dtkit.schedules.builtin.BUILTIN_SCHEDULES`, such as "1F1B", in any case of letters.

        >>> print(dtkit.Schedule.from_name("GPipe", ranks=2, micro_batches=2))
        F0 F1 B0 B1
        F0 F1 B0 B1
        """
        name = builtin.get_proper_name(name)
        return cls(builtin.build_rows(name, ranks, micro_batches), name)

    # -- contents --------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    @functools.cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """Rank of each stage."""
        rank_by_stage = {action.stage: rank for rank, _, action in self.iterate_actions()}
        return tuple(rank_by_stage[stage] for stage in sorted(rank_by_stage))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.stage_ranks)

    @functools.cached_property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step."""
        return 1 + max(action.micro_batch for _, _, action in self.iterate_actions())

    def get_stages(self, rank: int) -> list[int]:
        """Return the stages of a rank, in order."""
        return [stage for stage, stage_rank in enumerate(self.stage_ranks) if stage_rank == rank]

    def iterate_actions(self) -> Iterator[tuple[int, int, Action]]:
        """Yield (rank, cell, action) row by row."""
        for rank, row in enumerate(self.rows):
            for cell, action in enumerate(row):
                if action is not None:
                    yield rank, cell, action

    def format_action(self, action: Action) -> str:
        """Return an action's text, without its stage if its rank has only one."""
        short = self.stage_ranks[action.stage] == action.stage and len(self.get_stages(action.stage)) == 1
        return f"{action.kind}{action.micro_batch}" if short else str(action)

    # -- simulation ------------------------------------------------------------------------------------------

    def simulate(
        self, forward: float = 1.0, backward: float = 2.0, weights: Sequence[float] | None = None
    ) -> Simulation:
        """Return a simulation with these durations for every stage (times its weight); sending takes no time.

        Each half of backward takes half of its time. Stage 0 needs no gradient of an input, so W takes all of it.
        """
        if weights is not None and len(weights) != self.stages:
            raise ValueError(f"weights={list(weights)}; there must be one for each of the {self.stages} stages")
        cost = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
        first = cost | {"I": 0.0, "W": backward}
        heavy = weights or (1.0,) * self.stages
        return self.simulate_with(lambda a: (cost if a.stage else first)[a.kind] * heavy[a.stage])

    def simulate_with(self, duration: Callable[[Action], float]) -> Simulation:
        """Return a simulation with a duration for each action."""
        from dtkit.schedules.simulator import simulate

        return simulate(self, duration)

    def get_bubble_formula(self) -> tuple[str, float] | None:
        """Return (formula, value) of the bubble for equal stages, in the literature's p, m and v, if known."""
        return builtin.compute_bubble(self.name, self.ranks, self.micro_batches)

    # -- display ---------------------------------------------------------------------------------------------

    def figure(self) -> Figure:
        """Return a figure with a strip per rank, in which backward takes twice as long as forward."""
        return views.draw(self)

    def _repr_png_(self) -> bytes:
        return views.render_png(self)

    def __str__(self) -> str:
        """Return the table as text, which `Schedule` can parse."""
        cells = [["." if action is None else self.format_action(action) for action in row] for row in self.rows]
        width = max(len(cell) for row in cells for cell in row)
        return "\n".join(" ".join(cell.ljust(width) for cell in row).rstrip() for row in cells)

    def __repr__(self) -> str:
        stages = f", {self.stages} stages" if self.stages != self.ranks else ""
        return f"Schedule({self.name!r}, {self.ranks} ranks{stages}, {self.micro_batches} micro-batches)"


def _parse_row(rank: int, raw_row: str | Sequence[str | Action | None]) -> Row:
    cells = raw_row.replace(",", " ").split() if isinstance(raw_row, str) else raw_row
    return tuple(_parse_cell(rank, k, cell) for k, cell in enumerate(cells))


def _parse_cell(rank: int, index: int, raw_cell: str | Action | None) -> Action | None:
    if raw_cell is None or isinstance(raw_cell, Action):
        return raw_cell
    text = str(raw_cell).strip()
    if text in IDLE_CELLS:
        return None
    match = _CELL_PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(
            f"rank {rank}, cell {index}: {text!r} is not an action. Write F2 for the forward pass of micro-batch 2, B2 "
            "for its backward pass, and I2 and W2 for the halves of B2. 5F2 is F2 of stage 5, and . is an idle cell"
        )
    stage, kind, micro_batch = match.groups()
    return Action(kind.upper(), int(stage) if stage else rank, int(micro_batch))

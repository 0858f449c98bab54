"""A pipeline's schedule as a table: a row per rank, in each cell what the rank does next.

A cell is forward (F) or backward (B) of one micro-batch through one stage. Backward may be taken in its two halves: the
gradient of the stage's input (I), which the stage before waits for, and that of its weights (W), which nobody waits
for, so that it fills gaps (Qi et al., ICLR 2024). `F2` is the forward pass of micro-batch 2 through the rank's own
stage; where ranks have several stages, the stage stands in front: `5F2`. A point is an idle cell.

Idle cells are there to be read. A rank does its row in order and each action as soon as what it needs has come, so that
a point neither delays anything nor has to be put where a rank waits. What is needed, and so what is sent from rank to
rank, follows from the actions: F the output of the stage before, B and I the gradient from the stage behind.

A schedule is checked when it is made (:mod:`dtkit.schedules.validation`), so one that exists can be run.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TYPE_CHECKING

from dtkit.schedules import builtin, validation
from dtkit.schedules.action import Action, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from matplotlib.figure import Figure

    from dtkit.schedules.simulator import Simulation

IDLE_CELLS = frozenset({"", ".", "-", "_"})
_CELL_PATTERN = re.compile(r"(\d*)([FBIW])(\d+)", re.IGNORECASE)






@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Schedule:
    """What each rank of a pipeline does in which order; shows itself as a picture.

    >>> Schedule('''F0 F1 B0 B1
    ...             F0 B0 F1 B1''')
    Schedule('own', 2 ranks, 2 micro-batches)

    `rows` is text, a line per rank with cells between blanks; or a list of such lines; or a list of lists of cells
    (`"F0"`, `None` for an idle one). Ranks, stages and micro-batches are counted from 0. What can't be run is a
    ValueError that names rank and cell (from 0, idle ones counted), the rule, and what to do.
    """

    rows: tuple[Row, ...]
    name: str

    def __init__(self, rows: str | Sequence[str | Sequence[str | Action | None]], name: str = "own") -> None:
        lines = [line for line in rows.splitlines() if line.strip()] if isinstance(rows, str) else list(rows)
        object.__setattr__(self, "rows", tuple(_parse_row(rank, line) for rank, line in enumerate(lines)))
        object.__setattr__(self, "name", name)
        validation.validate_rows(self.rows)
        self._check_name()

    def _check_name(self) -> None:
        """A known name promises a known order: it is run by torch's class of that name."""
        if self.name in builtin.BUILTIN_SCHEDULES:
            known = builtin.build_rows(self.name, self.ranks, self.micro_batches)
            if tuple(map(tuple, known)) != tuple(tuple(a for a in row if a) for row in self.rows):
                raise ValueError(
                    f"name={self.name!r} is that of a known schedule, and the table is another. Choose another name"
                )

    @classmethod
    def from_name(cls, name: str, ranks: int, micro_batches: int) -> Schedule:
        """One that is known by name, such as "1F1B": see :data:`dtkit.schedules.builtin.BUILTIN_SCHEDULES`."""
        return cls(builtin.build_rows(name, ranks, micro_batches), name)

    # -- what it says ----------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """Ranks that it is for."""
        return len(self.rows)

    @functools.cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """For each stage, the rank that has it."""
        found = {action.stage: rank for rank, _, action in self.iterate_actions()}
        return tuple(found[stage] for stage in sorted(found))

    @property
    def stages(self) -> int:
        """Parts that the model is cut into."""
        return len(self.stage_ranks)

    @functools.cached_property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return 1 + max(action.micro_batch for _, _, action in self.iterate_actions())

    def get_stages(self, rank: int) -> list[int]:
        """The stages that a rank has, in order."""
        return [stage for stage, home in enumerate(self.stage_ranks) if home == rank]

    def iterate_actions(self) -> Iterator[tuple[int, int, Action]]:
        """(rank, cell, action), row after row."""
        for rank, row in enumerate(self.rows):
            for cell, action in enumerate(row):
                if action is not None:
                    yield rank, cell, action

    def format_action(self, action: Action) -> str:
        """An action as in a cell: without its stage where its rank has one only."""
        short = self.stage_ranks[action.stage] == action.stage and len(self.get_stages(action.stage)) == 1
        return f"{action.kind}{action.micro_batch}" if short else str(action)

    # -- what it would do ------------------------------------------------------------------------------------

    def simulate(
        self, forward: float = 1.0, backward: float = 2.0, weights: Sequence[float] | None = None
    ) -> Simulation:
        """What it does when, with these durations for every stage (times its weight); sending is free.

        The halves of backward take half of it each; but on stage 0, where no gradient of an input is asked for, torch
        leaves all of backward to W.
        """
        if weights is not None and len(weights) != self.stages:
            raise ValueError(f"weights={list(weights)}; there must be one for each of the {self.stages} stages")
        cost = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
        first = cost | {"I": 0.0, "W": backward}
        heavy = weights or (1.0,) * self.stages
        return self.simulate_with(lambda a: (cost if a.stage else first)[a.kind] * heavy[a.stage])

    def simulate_with(self, duration: Callable[[Action], float]) -> Simulation:
        """The same with a duration of each action."""
        from dtkit.schedules.simulator import simulate

        return simulate(self, duration)

    def get_bubble_formula(self) -> tuple[str, float] | None:
        """(formula, value) of the bubble for stages of equal cost, in the literature's p, m and v; None for others."""
        return builtin.compute_bubble(self.name, self.ranks, self.micro_batches)

    # -- how it looks ----------------------------------------------------------------------------------------

    def figure(self) -> Figure:
        """A strip per rank, with backward taking twice as long as forward."""
        from dtkit.dashboard.figures import schedule_figure

        return schedule_figure.draw_schedule(self)

    def _repr_png_(self) -> bytes:
        from dtkit.dashboard.figures import run_figure

        return run_figure.render_png(self.figure())

    def __str__(self) -> str:
        """The table as text, as it can be read again."""
        cells = [["." if action is None else self.format_action(action) for action in row] for row in self.rows]
        width = max(len(cell) for row in cells for cell in row)
        return "\n".join(" ".join(cell.ljust(width) for cell in row).rstrip() for row in cells)

    def __repr__(self) -> str:
        stages = f", {self.stages} stages" if self.stages != self.ranks else ""
        return f"Schedule({self.name!r}, {self.ranks} ranks{stages}, {self.micro_batches} micro-batches)"


def _parse_row(rank: int, raw_row: str | Sequence[str | Action | None]) -> Row:
    cells = raw_row.replace(",", " ").split() if isinstance(raw_row, str) else raw_row
    return tuple(_parse_cell(rank, k, cell) for k, cell in enumerate(cells))


def _parse_cell(rank: int, place: int, raw_cell: str | Action | None) -> Action | None:
    if raw_cell is None or isinstance(raw_cell, Action):
        return raw_cell
    text = str(raw_cell).strip()
    if text in IDLE_CELLS:
        return None
    found = _CELL_PATTERN.fullmatch(text)
    if found is None:
        raise ValueError(
            f"rank {rank}, cell {place}: {text!r} is no action. Write F2 for the forward pass of micro-batch 2, B2 for "
            "its backward pass, I2 and W2 for the two halves of that, 5F2 for that of stage 5, and . for an idle cell"
        )
    stage, kind, micro_batch = found.groups()
    return Action(kind.upper(), int(stage) if stage else rank, int(micro_batch))

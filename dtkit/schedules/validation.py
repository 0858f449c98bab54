"""Checks that a schedule can run: each micro-batch goes once through each stage and back, without a deadlock.

Each check raises a ValueError with rank, cell, rule and remedy. They check the ranks of stages, repeated and missing
actions, the order on each rank, and finally that no rank waits forever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dtkit.schedules.action import Action, Row

    Places = dict[Action, tuple[int, int]]
    """(rank, cell) of each action."""

ACTION_NAMES = {"F": "forward", "B": "backward", "I": "backward (of the input)", "W": "backward (of the weights)"}


def validate_rows(rows: Sequence[Row]) -> None:
    """Raise ValueError for a table that can't run."""
    if not rows:
        raise ValueError("the schedule is empty; it needs a row for each rank, such as 'F0 F1 B0 B1'")
    _check_stages(rows)
    places = _index_unique_actions(rows)
    _check_backwards(places)
    _check_complete(rows, places)
    _check_order(places)
    _check_progress(rows, places)


def find_dependencies(action: Action, present: Places) -> list[Action]:
    """Return the actions among `present` that must end before this one starts."""
    kind, stage, _ = action
    if kind == "F":
        needed = [action._replace(stage=stage - 1)]
    elif kind == "W":
        needed = [action._replace(kind="I")]
    else:
        following = action._replace(stage=stage + 1)
        needed = [action._replace(kind="F"), following._replace(kind="B"), following._replace(kind="I")]
    return [candidate for candidate in needed if candidate in present]


def order_actions(rows: Sequence[Row], present: Places) -> Iterator[tuple[int, int, Action]]:
    """Yield (rank, cell, action) in an order in which they can run; end early in a deadlock."""
    queues = [[(cell, a) for cell, a in enumerate(row) if a is not None][::-1] for row in rows]
    done: set[Action] = set()
    progress = True
    while progress:
        progress = False
        for rank, queue in enumerate(queues):
            while queue and all(needed in done for needed in find_dependencies(queue[-1][1], present)):
                cell, action = queue.pop()
                done.add(action)
                progress = True
                yield rank, cell, action


def index_actions(rows: Sequence[Row]) -> Places:
    """Return the (rank, cell) of each action."""
    return {a: (rank, cell) for rank, row in enumerate(rows) for cell, a in enumerate(row) if a is not None}


# -- the checks ----------------------------------------------------------------------------------------------


def _check_stages(rows: Sequence[Row]) -> None:
    cells: dict[int, tuple[int, int]] = {}
    for rank, row in enumerate(rows):
        if all(action is None for action in row):
            raise ValueError(f"rank {rank} has no actions, but each rank needs a stage. Remove its row")
        for cell, action in enumerate(row):
            if action is None:
                continue
            stage_rank, first = cells.setdefault(action.stage, (rank, cell))
            if stage_rank != rank:
                raise ValueError(
                    f"rank {rank}, cell {cell}: {action} is of stage {action.stage}, which is on rank {stage_rank} "
                    f"(cell {first}). A stage's parameters are on one rank: move the action there, or use another stage"
                )
    missing = [stage for stage in range(max(cells)) if stage not in cells]
    if missing:
        rank, cell = cells[max(cells)]
        raise ValueError(
            f"rank {rank}, cell {cell}: there is a stage {max(cells)}, but no stage {missing[0]}. Stages are numbered "
            f"from 0 without gaps: give stage {missing[0]} to a rank, or renumber the stages"
        )


def _index_unique_actions(rows: Sequence[Row]) -> Places:
    places: Places = {}
    for rank, row in enumerate(rows):
        for cell, action in enumerate(row):
            if action is None:
                continue
            if action in places:
                raise ValueError(
                    f"rank {rank}, cell {cell}: {action} is already in cell {places[action][1]}. Each micro-batch goes "
                    f"{ACTION_NAMES[action.kind]} once through a stage: change one of the two, or make it idle (.)"
                )
            places[action] = rank, cell
    return places


def _check_backwards(places: Places) -> None:
    """Raise ValueError for a whole backward pass together with one of its halves."""
    for action, (rank, cell) in places.items():
        half = next((a for kind in "IW" if (a := action._replace(kind=kind)) in places), None)
        if action.kind == "B" and half is not None:
            raise ValueError(
                f"rank {rank}, cell {cell}: {action} is a whole backward pass, and cell {places[half][1]} has a half "
                f"of it, {half}. Remove one of them, or split {action} into its halves I and W"
            )


def _check_complete(rows: Sequence[Row], places: Places) -> None:
    """Raise ValueError unless all micro-batches go forward and backward through every stage."""
    count = 1 + max(action.micro_batch for action in places)
    examples = {action.stage: action for action in places}
    for example in (examples[stage] for stage in sorted(examples)):
        rank = places[example][0]
        for micro_batch in range(count):
            kinds = {a.kind for kind in "FBIW" if (a := example._replace(kind=kind, micro_batch=micro_batch)) in places}
            if kinds in ({"F", "B"}, {"F", "I", "W"}):
                continue
            missing = "F" if "F" not in kinds else "W" if "I" in kinds else "I" if "W" in kinds else "B"
            action = example._replace(kind=missing, micro_batch=micro_batch)
            raise ValueError(
                f"rank {rank}: {action} is missing in its {len(rows[rank])} cells. The schedule has {count} "
                f"micro-batches (0 to {count - 1}), and each goes forward and backward once through every stage. Add "
                f"{action}, or remove micro-batch {micro_batch} from all rows"
            )


def _check_order(places: Places) -> None:
    """Raise ValueError unless each stage runs forward before backward, and the input's half before the weights'."""
    for action, (rank, cell) in places.items():
        for earlier in find_dependencies(action, places):
            earlier_cell = places[earlier][1]
            if earlier.stage == action.stage and earlier_cell > cell:
                raise ValueError(
                    f"rank {rank}, cell {cell}: {action} is before {earlier} (cell {earlier_cell}). For each "
                    "micro-batch, a stage runs F before B, or F, I and W: swap the two"
                )


def _check_progress(rows: Sequence[Row], places: Places) -> None:
    """Raise ValueError for a deadlock, with the actions that ranks wait for."""
    done = {action for _, _, action in order_actions(rows, places)}
    if len(done) == len(places):
        return
    fronts = [next((a for a in row if a is not None and a not in done), None) for row in rows]
    lines, remedy = [], ""
    for front in fronts:
        if front is None:
            continue
        rank, cell = places[front]
        needed = next(action for action in find_dependencies(front, places) if action not in done)
        needed_rank, needed_cell = places[needed]
        blocker = fronts[needed_rank]
        assert blocker is not None
        lines.append(f"rank {rank}, cell {cell}: {front} needs {needed} of rank {needed_rank} (cell {needed_cell})")
        if needed != blocker:  # otherwise the remedy is on another rank
            remedy = f"put {needed} before {blocker} in the row of rank {needed_rank} (cell {places[blocker][1]})"
    raise ValueError(
        f"a deadlock: after {len(done)} of {len(places)} actions no rank can continue. {'; '.join(lines)}. A rank runs "
        "its row in order; F needs the F of the previous stage, and B the B of the next stage. As a first step, "
        f"{remedy}"
    )

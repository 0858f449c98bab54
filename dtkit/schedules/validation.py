"""What makes a schedule one that can be run: every micro-batch once through each stage and back, and no deadlock.

Each check raises a ValueError that names rank, cell, rule and remedy. The checks go from the cell to the whole: who has
which stage, what is there twice, what is missing, what comes before what on one rank; last, whether all of it can be
done, by doing it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dtkit.schedules.action import Action, Row

    Places = dict[Action, tuple[int, int]]
    """Where each action is: (rank, cell)."""

ACTION_NAMES = {"F": "forward", "B": "backward", "I": "backward (of the input)", "W": "backward (of the weights)"}


def validate_rows(rows: Sequence[Row]) -> None:
    """Raise ValueError for a table that can't be run."""
    if not rows:
        raise ValueError("the schedule is empty; it needs a row for each rank, such as 'F0 F1 B0 B1'")
    _check_stages(rows)
    places = _index_unique_actions(rows)
    _check_backwards(places)
    _check_complete(rows, places)
    _check_order(places)
    _check_progress(rows, places)


def find_dependencies(action: Action, present: Places) -> list[Action]:
    """The actions that must have ended before this one begins, of those that are `there`."""
    kind, stage, _ = action
    if kind == "F":
        wanted = [action._replace(stage=stage - 1)]
    elif kind == "W":
        wanted = [action._replace(kind="I")]
    else:
        behind = action._replace(stage=stage + 1)
        wanted = [action._replace(kind="F"), behind._replace(kind="B"), behind._replace(kind="I")]
    return [one for one in wanted if one in present]


def order_actions(rows: Sequence[Row], present: Places) -> Iterator[tuple[int, int, Action]]:
    """(rank, cell, action) in an order in which all can be done; ends early where no rank can go on."""
    waiting = [[(cell, a) for cell, a in enumerate(row) if a is not None][::-1] for row in rows]
    done: set[Action] = set()
    going = True
    while going:
        going = False
        for rank, left in enumerate(waiting):
            while left and all(one in done for one in find_dependencies(left[-1][1], present)):
                cell, action = left.pop()
                done.add(action)
                going = True
                yield rank, cell, action


def index_actions(rows: Sequence[Row]) -> Places:
    """Where each action is."""
    return {a: (rank, cell) for rank, row in enumerate(rows) for cell, a in enumerate(row) if a is not None}


# -- the checks ----------------------------------------------------------------------------------------------


def _check_stages(rows: Sequence[Row]) -> None:
    homes: dict[int, tuple[int, int]] = {}
    for rank, row in enumerate(rows):
        if all(action is None for action in row):
            raise ValueError(f"rank {rank} does nothing; each rank needs a stage of its own. Leave its row out")
        for cell, action in enumerate(row):
            if action is None:
                continue
            home, first = homes.setdefault(action.stage, (rank, cell))
            if home != rank:
                raise ValueError(
                    f"rank {rank}, cell {cell}: {action} is of stage {action.stage}, which is on rank {home} (cell "
                    f"{first}). A stage's parameters are on one rank: move the action there, or name another stage"
                )
    missing = [stage for stage in range(max(homes)) if stage not in homes]
    if missing:
        rank, cell = homes[max(homes)]
        raise ValueError(
            f"rank {rank}, cell {cell}: there is a stage {max(homes)}, but no stage {missing[0]}. Stages are counted "
            f"from 0 without a gap: give stage {missing[0]} to a rank, or number the stages anew"
        )


def _index_unique_actions(rows: Sequence[Row]) -> Places:
    found: Places = {}
    for rank, row in enumerate(rows):
        for cell, action in enumerate(row):
            if action is None:
                continue
            if action in found:
                raise ValueError(
                    f"rank {rank}, cell {cell}: {action} is there already, in cell {found[action][1]}. Each "
                    f"micro-batch goes {ACTION_NAMES[action.kind]} once through a stage: change one of the two, or make it "
                    "idle (.)"
                )
            found[action] = rank, cell
    return found


def _check_backwards(places: Places) -> None:
    """A whole backward pass or its two halves, not both."""
    for action, (rank, cell) in places.items():
        half = next((a for kind in "IW" if (a := action._replace(kind=kind)) in places), None)
        if action.kind == "B" and half is not None:
            raise ValueError(
                f"rank {rank}, cell {cell}: {action} is a whole backward pass, and cell {places[half][1]} has a half "
                f"of the same, {half}. Leave one of them out, or split {action} into its halves I and W"
            )


def _check_complete(rows: Sequence[Row], places: Places) -> None:
    """All micro-batches, forward and backward, through every stage."""
    count = 1 + max(action.micro_batch for action in places)
    some = {action.stage: action for action in places}
    for stage, model in sorted(some.items()):
        rank = places[model][0]
        for micro_batch in range(count):
            own = {a.kind for kind in "FBIW" if (a := type(model)(kind, stage, micro_batch)) in places}
            if own in ({"F", "B"}, {"F", "I", "W"}):
                continue
            lacking = "F" if "F" not in own else "W" if "I" in own else "I" if "W" in own else "B"
            raise ValueError(
                f"rank {rank}: {type(model)(lacking, stage, micro_batch)} is missing in its {len(rows[rank])} cells. "
                f"The schedule has {count} micro-batches (0 to {count - 1}), and each goes forward and backward once "
                f"through every stage: add it, or leave out micro-batch {micro_batch} everywhere"
            )


def _check_order(places: Places) -> None:
    """On one rank: forward, then backward; the input's half, then the weights'."""
    for action, (rank, cell) in places.items():
        for earlier in find_dependencies(action, places):
            other, before = places[earlier]
            if earlier.stage == action.stage and before > cell:
                raise ValueError(
                    f"rank {other}, cell {cell}: {action} stands before {earlier} (cell {before}). Of each micro-batch "
                    "a stage does first F and then B, or F, I and W: swap the two"
                )
        assert rank == places[action][0]


def _check_progress(rows: Sequence[Row], places: Places) -> None:
    """No deadlock: do it all, and where nobody can go on, say who waits for whom."""
    done = {action for _, _, action in order_actions(rows, places)}
    if len(done) == len(places):
        return
    fronts = [next((a for a in row if a is not None and a not in done), None) for row in rows]
    lines, remedy = [], ""
    for front in fronts:
        if front is None:
            continue
        rank, cell = places[front]
        wanted = next(one for one in find_dependencies(front, places) if one not in done)
        holder, behind = places[wanted]
        blocker = fronts[holder]
        assert blocker is not None
        lines.append(f"rank {rank}, cell {cell}: {front} needs {wanted} of rank {holder} (cell {behind})")
        if wanted != blocker:  # else that rank waits for another one, and the remedy lies there
            remedy = f"put {wanted} before {blocker} in the row of rank {holder} (cell {places[blocker][1]})"
    raise ValueError(
        f"a deadlock, after {len(done)} of {len(places)} actions no rank can go on. {'; '.join(lines)}. A rank does "
        f"its row in order, and F needs the F of the stage before, B the B of the stage behind. To begin with, {remedy}"
    )

"""``make faults``: plays every cell, prints the table as it grows, and exits with 1 if any cell fails."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import TYPE_CHECKING

from tests.faults.cells import CELLS, SAMPLE
from tests.faults.runner import Ground, play

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.faults.cells import Cell
    from tests.faults.runner import Outcome

_HEAD = f"{'cell':50} {'rank':>4} {'step':>4} {'told':>7} {'on after':>8} {'cell':>7}  what was lost; what was shown"


def main(arguments: Sequence[str]) -> int:
    """Exit status 0 where every cell was right."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of cells' names: all that have all of them are played")
    parser.add_argument("--seed", type=int, default=0, help="draws ranks, steps and places")
    parser.add_argument("--sample", action="store_true", help="only the cells of `make test-all`")
    parser.add_argument("--list", action="store_true", help="only say which cells there are")
    options = parser.parse_args(arguments)
    cells = [cell for cell in (SAMPLE if options.sample else CELLS) if all(name in cell.name for name in options.names)]
    if options.list:
        print(*(cell.name for cell in cells), sep="\n")
        return 0
    return _play(cells, options.seed)


def _play(cells: Sequence[Cell], seed: int) -> int:
    begun, outcomes = time.monotonic(), []
    print(f"{len(cells)} cells, seed {seed}\n{_HEAD}", flush=True)
    with Ground() as ground:
        for cell in cells:
            outcomes.append(play(cell, ground, seed))
            print(line(outcomes[-1]), flush=True)
    wrong = [outcome.cell.name for outcome in outcomes if outcome.problems]
    print(f"\n{len(outcomes) - len(wrong)} of {len(outcomes)} cells right, in {time.monotonic() - begun:.0f} s")
    _tell_times(outcomes)
    if wrong:
        print("wrong:", *wrong, sep="\n  ")
    return 1 if wrong else 0


def _tell_times(outcomes: Sequence[Outcome]) -> None:
    for kind in dict.fromkeys(outcome.cell.outcome for outcome in outcomes):
        times = [o.detected_s for o in outcomes if o.cell.outcome == kind and o.detected_s is not None]
        if times:
            print(f"  {kind}: told after {statistics.median(times):.2f} s in the median, {max(times):.2f} s at worst")


def line(outcome: Outcome) -> str:
    """A cell's row of the table."""
    told, after = _seconds(outcome.detected_s), _seconds(outcome.recovered_s)
    row = f"{outcome.cell.name:50} {outcome.rank:4} {outcome.step:4} {told:>7} {after:>8} {outcome.took_s:5.1f} s"
    said = " | ".join(part for part in (outcome.lost, outcome.shown[:100]) if part)
    wrong = "".join(f"\n    WRONG: {problem}" for problem in outcome.problems)
    return f"{row}  {said}{wrong}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

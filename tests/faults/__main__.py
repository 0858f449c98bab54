"""``make faults``: run every cell, print the table as it grows, and exit with 1 if any cell fails."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import TYPE_CHECKING

from tests.faults.cells import CELLS, SAMPLE
from tests.faults.runner import Ground, run_cell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.faults.cells import Cell
    from tests.faults.runner import Outcome

_HEAD = f"{'cell':50} {'rank':>4} {'step':>4} {'logged':>7} {'recovery':>8} {'cell':>7}  lost work; log text"


def main(arguments: Sequence[str]) -> int:
    """Run the chosen cells, and return exit status 0 if all of them passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of cell names; cells that contain all of them are run")
    parser.add_argument("--seed", type=int, default=0, help="seed for ranks, steps and places")
    parser.add_argument("--sample", action="store_true", help="only the cells of `make test-all`")
    parser.add_argument("--list", action="store_true", help="only list the cells")
    options = parser.parse_args(arguments)
    cells = [cell for cell in (SAMPLE if options.sample else CELLS) if all(name in cell.name for name in options.names)]
    if options.list:
        print(*(cell.name for cell in cells), sep="\n")
        return 0
    return _run_cells(cells, options.seed)


def _run_cells(cells: Sequence[Cell], seed: int) -> int:
    start, outcomes = time.monotonic(), []
    print(f"{len(cells)} cells, seed {seed}\n{_HEAD}", flush=True)
    with Ground() as ground:
        for cell in cells:
            outcomes.append(run_cell(cell, ground, seed))
            print(format_row(outcomes[-1]), flush=True)
    failed = [outcome.cell.name for outcome in outcomes if outcome.problems]
    print(f"\n{len(outcomes) - len(failed)} of {len(outcomes)} cells passed, in {time.monotonic() - start:.0f} s")
    _print_times(outcomes)
    if failed:
        print("failed:", *failed, sep="\n  ")
    return 1 if failed else 0


def _print_times(outcomes: Sequence[Outcome]) -> None:
    for kind in dict.fromkeys(outcome.cell.outcome for outcome in outcomes):
        times = [o.detected_s for o in outcomes if o.cell.outcome == kind and o.detected_s is not None]
        if times:
            print(f"  {kind}: logged after {statistics.median(times):.2f} s in the median, {max(times):.2f} s at worst")


def format_row(outcome: Outcome) -> str:
    """Return a cell's row of the table."""
    detected, recovered = _format_seconds(outcome.detected_s), _format_seconds(outcome.recovered_s)
    row = (
        f"{outcome.cell.name:50} {outcome.rank:4} {outcome.step:4} {detected:>7} {recovered:>8} {outcome.took_s:5.1f} s"
    )
    details = " | ".join(part for part in (outcome.lost, outcome.shown[:100]) if part)
    problems = "".join(f"\n    FAILED: {problem}" for problem in outcome.problems)
    return f"{row}  {details}{problems}"


def _format_seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`DataParallel(compile=True)` next to a bare loop around `torch.compile`, and next to both without it.

Windows of all four alternate in one process per rank, as in :mod:`tests.bench.step`.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from dtkit.strategies.data_parallel import DataParallel
from tests.bench import ranks
from tests.bench.pairs import Sample, report
from tests.bench.step import make_bare_loop
from tests.bench.work import LONG, SHORT, WORKS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.engine.comm.process_group import Group

MIN_RATIO = 0.98
WINDOWS = 9
STEPS = {SHORT: 300, LONG: 15}  # of a window
WARM = 12


def compiled() -> bool:
    """Measure one rank and two ranks, for short and for longer steps."""
    met = True
    for name in (SHORT, LONG):
        for num_ranks in (1, 2):
            figures = ranks.run_on_ranks(f"tests.bench.compiled:measure_{_TASKS[name]}", num_ranks)[0]
            met &= _report(f"{name}, {num_ranks} rank{'s' if num_ranks > 1 else ''}", figures)
    return met


def _report(name: str, figures: dict[str, list[float]]) -> bool:
    print(name, flush=True)
    for loop, seconds in figures.items():
        print(f"  ms a step, {loop}: {Sample([1000 * value for value in seconds])}")
    gain = [plain / fast for plain, fast in zip(figures["dtkit"], figures["dtkit compiled"], strict=True)]
    print(f"  dtkit, steps per second with torch.compile against without: {Sample(gain)}")
    ratio = [bare / own for bare, own in zip(figures["bare compiled"], figures["dtkit compiled"], strict=True)]
    return report(f"compiled, steps per second against a bare compiled loop, {name}", Sample(ratio), least=MIN_RATIO)


_TASKS = {SHORT: "short", LONG: "long"}


def measure_short(group: Group) -> dict[str, list[float]]:
    """Return the seconds of a short step, by loop and window."""
    return _measure(group, SHORT)


def measure_long(group: Group) -> dict[str, list[float]]:
    """Return the seconds of a longer step, by loop and window."""
    return _measure(group, LONG)


def _measure(group: Group, name: str) -> dict[str, list[float]]:
    loops: dict[str, Callable[[int], Any]] = {}
    for compile_ in (False, True):
        suffix = " compiled" if compile_ else ""
        job = ranks.make_job(group, WORKS[name], DataParallel(compile=compile_))
        loops[f"dtkit{suffix}"] = functools.partial(ranks.take_steps, job)
        loops[f"bare{suffix}"] = make_bare_loop(group, WORKS[name], compile_=compile_)
    for take_steps in loops.values():
        take_steps(WARM)
    seconds: dict[str, list[float]] = {loop: [] for loop in loops}
    for window in range(WINDOWS):
        for loop, take_steps in list(loops.items())[:: 1 if window % 2 else -1]:
            group.barrier()
            start = time.perf_counter()
            take_steps(STEPS[name])
            seconds[loop].append((time.perf_counter() - start) / STEPS[name])
    return seconds

"""The table of cells: which fault at which place under which strategy, and its expected outcome."""

from __future__ import annotations

import dataclasses
import random
import zlib

from tests.faults.training import REPLICATED, STRATEGIES

ENGINES, STEPS = 2, 24
FIRST, LAST = 3, 17
"""First and last step at which a fault may fire; the seed selects one."""

STEP_PLACES = ("forward", "backward", "data", "optimizer")
ANYWHERE = "a step"
"""One of STEP_PLACES, selected by the seed."""
OUTSIDE = "outside"
"""Place of faults outside the ranks' code: see :mod:`tests.faults.other_faults`."""

PLACES: dict[str, tuple[str, ...]] = {
    "SIGKILL": (*STEP_PLACES, "checkpoint", "forming"),
    "os._exit": (ANYWHERE, "checkpoint", "forming"),
    "SIGSTOP": (ANYWHERE, "checkpoint", "forming"),
    "exception": (*STEP_PLACES, "checkpoint", "forming"),
    "endless loop": (ANYWHERE, "checkpoint"),
    "deaf loop": (ANYWHERE,),
    "out of memory": (ANYWHERE, "checkpoint"),
    "mismatched shapes": ("forward", "data"),
    "NaN loss": ("forward", "backward", "data"),
    "10x slow": ("forward",),
}
"""Places where each fault makes sense. Wrong values and slowness need user code, which checkpoints and group forming
don't run."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One fault, with its strategy and place."""

    fault: str
    strategy: str
    place: str

    @property
    def name(self) -> str:
        """Name in the table, and as an argument of ``python -m tests.faults``."""
        return f"{self.fault} x {self.strategy} x {self.place}"

    def make_random(self, seed: int) -> random.Random:
        """Return a random generator that depends only on this cell and the seed."""
        return random.Random(zlib.crc32(f"{self.name} {seed}".encode()))

    @property
    def outcome(self) -> str:
        """Expected outcome: see :mod:`tests.faults.expect`, and for "outside" :mod:`tests.faults.other_faults`."""
        if self.place == OUTSIDE:
            return OUTSIDE
        if self.fault in OUTCOMES:
            return OUTCOMES[self.fault]
        return {"checkpoint": "unsaved", "forming": "reformed"}.get(self.place, "failed")

    def loads_data(self, rank: int) -> bool:
        """Return whether a rank loads samples: one rank of each replica does, for all of them."""
        return rank == 0 or self.strategy not in ("Pipeline", "TensorParallel")

    @property
    def exact(self) -> bool:
        """Whether the final parameters must equal those without the fault, which averaging doesn't promise."""
        return self.strategy != "ParameterAveraging" or self.outcome in ("named", "unsaved")


ENDS = ("SIGKILL", "os._exit")
"""Faults that end the process."""
HALTS = ("SIGSTOP", "endless loop", "deaf loop")
"""Faults that keep the others waiting, up to the time limit of a collective."""

OTHER_FAULTS = (
    "interrupt once",
    "interrupt twice",
    "interrupt ten times",
    "disk full",
    "controller killed",
    "kernel killed",
)

OUTCOMES = {
    **dict.fromkeys((*ENDS, *HALTS), "repaired"),
    "endless loop": "resumed",
    "10x slow": "named",
    "NaN loss": "paused",
}
"""Outcomes that don't depend on the place. Errors are raised by the call that they interrupt."""

CELLS = (
    *(Cell(fault, strategy, place) for fault, places in PLACES.items() for strategy in STRATEGIES for place in places),
    *(Cell(fault, "DataParallel", OUTSIDE) for fault in OTHER_FAULTS),
)

SAMPLE = (
    Cell("SIGKILL", "DataParallel", "optimizer"),
    Cell("SIGKILL", "Sharded", "forward"),
    Cell("SIGKILL", "DataParallel", "forming"),
    Cell("os._exit", "Pipeline", "checkpoint"),
    Cell("SIGSTOP", "DataParallel", ANYWHERE),
    Cell("exception", "TensorParallel", "backward"),
    Cell("exception", "ParameterAveraging", "data"),
    Cell("exception", "DataParallel", "checkpoint"),
    Cell("out of memory", "Pipeline", ANYWHERE),
    Cell("mismatched shapes", "Sharded", "forward"),
    Cell("NaN loss", "DataParallel", "backward"),
    Cell("10x slow", "DataParallel", "forward"),
    Cell("exception", "DataParallel", "forming"),
    Cell("endless loop", "Sharded", ANYWHERE),
    Cell("interrupt twice", "DataParallel", OUTSIDE),
    Cell("controller killed", "DataParallel", OUTSIDE),
    Cell("kernel killed", "DataParallel", OUTSIDE),
    Cell("disk full", "DataParallel", OUTSIDE),
)
"""Cells of `make test-all`: each outcome, strategy and place at least once."""

DAILY = (
    Cell("SIGKILL", "Sharded", "forward"),
    Cell("os._exit", "Pipeline", "checkpoint"),
    Cell("exception", "TensorParallel", "backward"),
    Cell("NaN loss", "DataParallel", "backward"),
    Cell("interrupt twice", "DataParallel", OUTSIDE),
)
"""Cells of `make test`: a killed engine, one lost during a save, an error, a NaN, an interrupt."""


def get_max_lost_steps(cell: Cell, snapshot_every: int) -> int:
    """Return how many steps a repair may lose."""
    return 1 if cell.strategy in REPLICATED else snapshot_every + 1

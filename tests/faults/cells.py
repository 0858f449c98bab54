"""The table: which fault at which place under which strategy, and what must come of it."""

from __future__ import annotations

import dataclasses
import random
import zlib

from tests.faults.training import COPIED, STRATEGIES

ENGINES, STEPS = 2, 24
FIRST, LAST = 3, 17
"""A fault springs at a step from FIRST to LAST, drawn by the seed."""

STEP_PLACES = ("forward", "backward", "data", "optimiser")
ANYWHERE = "a step"
"""One of STEP_PLACES, drawn by the seed."""
BESIDE = "beside"
"""No rank's code: see :mod:`tests.faults.besides`."""

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
"""Where each fault makes sense. A value that is wrong can't be in a checkpoint's or in the group's making, since no
value of the user's is made there; what is slow there is slow, and nothing else."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One fault, and where."""

    fault: str
    strategy: str
    place: str

    @property
    def name(self) -> str:
        """As in the table, and as an argument of ``python -m tests.faults``."""
        return f"{self.fault} x {self.strategy} x {self.place}"

    def dice(self, seed: int) -> random.Random:
        """This cell's own random numbers, whatever else is played."""
        return random.Random(zlib.crc32(f"{self.name} {seed}".encode()))

    @property
    def outcome(self) -> str:
        """What must come of it: see :mod:`tests.faults.expect`, and for "beside" :mod:`tests.faults.besides`."""
        if self.place == BESIDE:
            return "beside"
        if self.fault in OUTCOMES:
            return OUTCOMES[self.fault]
        return {"checkpoint": "unsaved", "forming": "reformed"}.get(self.place, "failed")

    @property
    def ranks(self) -> tuple[int, ...]:
        """Whom the fault may befall: a pipeline's last stage does not look at the rows' values."""
        blind = self.strategy == "Pipeline" and (self.fault, self.place) == ("NaN loss", "data")
        return (0,) if blind else tuple(range(ENGINES))

    @property
    def exact(self) -> bool:
        """Whether the parameters must end as without the fault: a rank that averages takes some of its own along."""
        return self.strategy != "ParameterAveraging" or self.outcome in ("named", "unsaved")


ENDS = ("SIGKILL", "os._exit")
"""Whose process is gone."""
HALTS = ("SIGSTOP", "endless loop", "deaf loop")
"""Who keeps the others waiting, until the time limit of a collective."""

BESIDES = (
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
"""What comes of a fault at any place. An error is told to whoever asked for what it befell."""

CELLS = (
    *(Cell(fault, strategy, place) for fault, places in PLACES.items() for strategy in STRATEGIES for place in places),
    *(Cell(fault, "DataParallel", BESIDE) for fault in BESIDES),
)

SAMPLE = (
    Cell("SIGKILL", "DataParallel", "optimiser"),
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
    Cell("interrupt twice", "DataParallel", BESIDE),
    Cell("controller killed", "DataParallel", BESIDE),
    Cell("kernel killed", "DataParallel", BESIDE),
    Cell("disk full", "DataParallel", BESIDE),
)
"""Cells of `make test-all`: each outcome, each strategy and each place at least once."""

DAILY = (
    Cell("SIGKILL", "Sharded", "forward"),
    Cell("os._exit", "Pipeline", "checkpoint"),
    Cell("exception", "TensorParallel", "backward"),
    Cell("NaN loss", "DataParallel", "backward"),
    Cell("interrupt twice", "DataParallel", BESIDE),
)
"""Cells of `make test`: a killed engine, one lost during a save, an error, a NaN, an interrupt."""


def most_lost(cell: Cell, snapshot: int) -> int:
    """How many steps a repair may lose."""
    return 1 if cell.strategy in COPIED else snapshot + 1

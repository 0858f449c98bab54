"""Messages between stages: how much of the time that a rank is blocked in one it waits for the other stage.

A message goes forward (an activation, to the next stage) or backward (a gradient, to the one before), and each of its
two ranks marks when it posts its own part of it (to send it, to ask for it), and when it is blocked until that is done,
which may be much later. Bytes move once both have posted. So as long as a rank is blocked and the other one has not
posted, it waits, and the rest is sending or receiving. A message that was off its sender's hands before the receiver
asked for it (it was buffered on the way) had nobody wait.

Only all ranks together know that, so this is told in the notebook, on one clock (as :mod:`dtkit.history.comm_time`
tells it of collectives).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

MESSAGE_PHASES = ("send forward", "send backward", "receive forward", "receive backward")
"""What a rank marks; a pass of a micro-batch is what the message belongs to."""
_FIRST_RECEIVE = 2  # from here on in PHASES; the odd ones are backward

WAIT_PHASE = "wait"
"""What a part of these is, once it is known when the other rank began."""

SYNC_PHASE = "sync"
"""What a rank marks while it is blocked in a collective; among fewer than all, followed by the ranks: "sync 0-1"."""

MESSAGE_DTYPE = np.dtype(
    [
        ("step", "i4"),
        ("phase", "u1"),  # of PHASES
        ("stage", "i2"),
        ("micro_batch", "i2"),
        ("begin", "f8"),
        ("end", "f8"),
    ]
)
"""A rank's time in a message, seconds on the clock of that rank: posted and awaited at once, or one after the other."""


def get_phase_kind(phase: str) -> str:
    """A phase; of a message without its direction ("send" or "receive"), of a collective without its ranks."""
    first = phase.partition(" ")[0]
    return first if first == SYNC_PHASE or phase in MESSAGE_PHASES else phase


def split_wait_spans(spans: np.ndarray, ranks_per_pipeline: int) -> np.ndarray:
    """Spans of all ranks on one clock, with the waiting split off from each message.

    `ranks` is how many a pipeline has; replicas of it stand one after the other. What is left of a message stays, were
    it without length, so that each still has both of its ends.
    """
    at = np.flatnonzero(np.isin(spans["phase"], MESSAGE_PHASES))
    if not len(at):
        return spans
    own = spans[at]
    waits, rest = own.copy(), own.copy()
    seconds = _compute_waits(own, _get_phase_numbers(own), own["rank"] // ranks_per_pipeline)
    waits["phase"] = WAIT_PHASE
    waits["end"] = rest["begin"] = own["begin"] + seconds
    found = np.concatenate([np.delete(spans, at), waits[seconds > 0], rest])
    return found[np.lexsort((found["end"], found["begin"], found["step"], found["rank"]))]


def pair_messages(spans: np.ndarray, ranks_per_pipeline: int) -> list[tuple[int, int]]:
    """(where it began to be sent, where it was received) of each message, as indices of such spans."""
    at = np.flatnonzero(np.isin(spans["phase"], MESSAGE_PHASES))
    own = spans[at]
    place, receives = _identify_messages(own, _get_phase_numbers(own), own["rank"] // ranks_per_pipeline)
    found: dict[int, list[int | None]] = {}
    for k in np.argsort(own["begin"], kind="stable"):
        pair = found.setdefault(int(place[k]), [None, None])
        if receives[k] or pair[0] is None:
            pair[receives[k]] = int(at[k])
    return [(sent, received) for sent, received in found.values() if sent is not None and received is not None]


def compute_wait_seconds(
    message_rows: Sequence[np.ndarray],
    ranks: Sequence[int],
    ranks_per_pipeline: int,
    clock_offsets: Sequence[float] | None = None,
) -> list[np.ndarray]:
    """Seconds of waiting in each row of these :data:`MESSAGE_DTYPE`, an array a rank of `ranks`.

    `per` is how many ranks a pipeline has; `offsets` is how far each one's clock is ahead (all equal by default).
    """
    own = np.concatenate(message_rows)
    lengths = [len(part) for part in message_rows]
    if clock_offsets is not None:
        ahead = np.repeat(np.asarray(clock_offsets), lengths)
        own["begin"] -= ahead
        own["end"] -= ahead
    found = _compute_waits(own, own["phase"], np.repeat(np.asarray(ranks), lengths) // ranks_per_pipeline)
    return np.split(found, np.cumsum(lengths)[:-1])


def _get_phase_numbers(spans: np.ndarray) -> np.ndarray:
    return np.array([MESSAGE_PHASES.index(str(phase)) for phase in spans["phase"]], int)


def _identify_messages(
    rows: np.ndarray, phase_numbers: np.ndarray, pipeline: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(which message, whether it is the receiver's end) of each row; `way` is a number of PHASES."""
    receives, backward = np.divmod(phase_numbers.astype(int), _FIRST_RECEIVE)
    sender = rows["stage"] + receives * (2 * backward - 1)
    key = np.zeros(len(rows), int)
    for column in (rows["step"], pipeline, backward, sender, rows["micro_batch"]):
        key = key * (int(column.max(initial=0)) + 1) + column
    return np.unique(key, return_inverse=True)[1], receives


def _compute_waits(rows: np.ndarray, phase_numbers: np.ndarray, pipeline: np.ndarray) -> np.ndarray:
    """Seconds of waiting in each row: of the time that it is blocked, where the other rank's begin is known."""
    place, receives = _identify_messages(rows, phase_numbers, pipeline)
    posted, awaited = np.full((len(rows), 2), np.inf), np.full((len(rows), 2), -np.inf)  # by message and part
    np.minimum.at(posted, (place, receives), rows["begin"])
    np.maximum.at(awaited, (place, receives), rows["begin"])
    other = posted[place, 1 - receives]
    blocked = (rows["begin"] == awaited[place, receives]) & np.isfinite(other)
    buffered = (receives == 0) & (other >= rows["end"])
    found = np.clip(np.minimum(other, rows["end"]) - rows["begin"], 0, None)
    return np.where(blocked & ~buffered, found, 0.0)

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

PHASES = ("send forward", "send backward", "receive forward", "receive backward")
"""What a rank marks; a pass of a micro-batch is what the message belongs to."""
_RECEIVES = 2  # from here on in PHASES; the odd ones are backward

WAIT = "wait"
"""What a part of these is, once it is known when the other rank began."""

SYNC = "sync"
"""What a rank marks while it is blocked in a collective; among fewer than all, followed by the ranks: "sync 0-1"."""

MESSAGE = np.dtype(
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


def kind(phase: str) -> str:
    """A phase; of a message without its direction ("send" or "receive"), of a collective without its ranks."""
    first = phase.partition(" ")[0]
    return first if first == SYNC or phase in PHASES else phase


def cut(spans: np.ndarray, ranks: int) -> np.ndarray:
    """Spans of all ranks on one clock, with the waiting split off from each message.

    `ranks` is how many a pipeline has; replicas of it stand one after the other. What is left of a message stays, were
    it without length, so that each still has both of its ends.
    """
    at = np.flatnonzero(np.isin(spans["phase"], PHASES))
    if not len(at):
        return spans
    own = spans[at]
    waits, rest = own.copy(), own.copy()
    seconds = _waited(own, _numbers(own), own["rank"] // ranks)
    waits["phase"] = WAIT
    waits["end"] = rest["begin"] = own["begin"] + seconds
    found = np.concatenate([np.delete(spans, at), waits[seconds > 0], rest])
    return found[np.lexsort((found["end"], found["begin"], found["step"], found["rank"]))]


def pairs(spans: np.ndarray, ranks: int) -> list[tuple[int, int]]:
    """(where it began to be sent, where it was received) of each message, as indices of such spans."""
    at = np.flatnonzero(np.isin(spans["phase"], PHASES))
    own = spans[at]
    place, receives = _ends(own, _numbers(own), own["rank"] // ranks)
    found: dict[int, list[int | None]] = {}
    for k in np.argsort(own["begin"], kind="stable"):
        pair = found.setdefault(int(place[k]), [None, None])
        if receives[k] or pair[0] is None:
            pair[receives[k]] = int(at[k])
    return [(sent, received) for sent, received in found.values() if sent is not None and received is not None]


def waited(
    parts: Sequence[np.ndarray], ranks: Sequence[int], per: int, offsets: Sequence[float] | None = None
) -> list[np.ndarray]:
    """Seconds of waiting in each row of these :data:`MESSAGE`, an array a rank of `ranks`.

    `per` is how many ranks a pipeline has; `offsets` is how far each one's clock is ahead (all equal by default).
    """
    own = np.concatenate(parts)
    lengths = [len(part) for part in parts]
    if offsets is not None:
        ahead = np.repeat(np.asarray(offsets), lengths)
        own["begin"] -= ahead
        own["end"] -= ahead
    found = _waited(own, own["phase"], np.repeat(np.asarray(ranks), lengths) // per)
    return np.split(found, np.cumsum(lengths)[:-1])


def _numbers(own: np.ndarray) -> np.ndarray:
    return np.array([PHASES.index(str(phase)) for phase in own["phase"]], int)


def _ends(own: np.ndarray, way: np.ndarray, pipeline: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(which message, whether it is the receiver's end) of each row; `way` is a number of PHASES."""
    receives, backward = np.divmod(way.astype(int), _RECEIVES)
    sender = own["stage"] + receives * (2 * backward - 1)
    key = np.zeros(len(own), int)
    for column in (own["step"], pipeline, backward, sender, own["micro_batch"]):
        key = key * (int(column.max(initial=0)) + 1) + column
    return np.unique(key, return_inverse=True)[1], receives


def _waited(own: np.ndarray, way: np.ndarray, pipeline: np.ndarray) -> np.ndarray:
    """Seconds of waiting in each row: of the time that it is blocked, where the other rank's begin is known."""
    place, receives = _ends(own, way, pipeline)
    posted, awaited = np.full((len(own), 2), np.inf), np.full((len(own), 2), -np.inf)  # by message and part
    np.minimum.at(posted, (place, receives), own["begin"])
    np.maximum.at(awaited, (place, receives), own["begin"])
    other = posted[place, 1 - receives]
    blocked = (own["begin"] == awaited[place, receives]) & np.isfinite(other)
    buffered = (receives == 0) & (other >= own["end"])
    found = np.clip(np.minimum(other, own["end"]) - own["begin"], 0, None)
    return np.where(blocked & ~buffered, found, 0.0)

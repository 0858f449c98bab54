"""How much of the time that ranks were blocked in collectives they waited for each other.

Of a collective only each rank's begin and end are needed. It can't move before the last rank is there, so rank i waits
from its own begin to the latest one, wait_i = max_j begin_j - begin_i, and the rest of its time is transfer. The rank
that waits least is the one that the others wait for.

Ranks begin the same collectives in the same order, so a rank's k-th of a step is the k-th of the others. Some are among
a part of the ranks only (those that hold slices of one replica): there, k counts the collectives of that part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtkit.messages import SYNC, WAIT

if TYPE_CHECKING:
    from collections.abc import Sequence


def split(blocked: Sequence[np.ndarray], offsets: Sequence[float] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(waiting, transfer) in seconds, each of shape (ranks, steps).

    `blocked` has for each rank an array (steps, collectives, 3) of begin and end on that rank's clock, and a number for
    the ranks among which; NaN where a step had fewer. `offsets` is how far each rank's clock is ahead (all equal by
    default, as on one host).
    """
    places = max(spans.shape[1] for spans in blocked)
    begin, end, among = np.moveaxis(np.stack([_padded(spans, places) for spans in blocked]), -1, 0)
    if offsets is not None:
        ahead = np.asarray(offsets)[:, None, None]
        begin, end = begin - ahead, end - ahead
    latest = np.full_like(begin, np.nan)
    for number in np.unique(among[~np.isnan(among)]):
        own = among == number
        latest[own] = _latest(begin, own)[own]
    waiting = np.clip(np.minimum(latest, end) - begin, 0, None)
    return np.nansum(waiting, axis=2), np.nansum(np.clip(end - begin - waiting, 0, None), axis=2)


def _padded(spans: np.ndarray, places: int) -> np.ndarray:
    return np.pad(spans, ((0, 0), (0, places - spans.shape[1]), (0, 0)), constant_values=np.nan)


def _latest(begin: np.ndarray, own: np.ndarray) -> np.ndarray:
    """When the last rank came to each of those that are `own`; all of shape (ranks, steps, collectives)."""
    which = np.maximum(np.cumsum(own, axis=2) - 1, 0)
    step = np.broadcast_to(np.arange(begin.shape[1])[:, None], begin.shape)
    found = np.full(begin.shape[1:], -np.inf)
    np.maximum.at(found, (step[own], which[own]), begin[own])
    latest: np.ndarray = found[step, which]
    return latest


def cut(spans: np.ndarray) -> np.ndarray:
    """Spans (:data:`dtkit.timeline.SPAN`) of all ranks on one clock, with what is "wait" cut off from each collective.

    What is left of it stays, were it without length, so that a second cut finds nothing. Where ranks have not the same
    number of collectives (some have failed), it is not known which are whose: these stay as they are.
    """
    at = np.flatnonzero(np.char.startswith(spans["phase"], SYNC))
    if not len(at):
        return spans
    own = spans[at]
    waits, rest = own.copy(), own.copy()
    waits["phase"] = WAIT
    waits["end"] = rest["begin"] = np.clip(_arrived(own), own["begin"], own["end"])
    found = np.concatenate([np.delete(spans, at), waits[waits["end"] > waits["begin"]], rest])
    return found[np.lexsort((found["end"], found["begin"], found["step"], found["rank"]))]


def _arrived(own: np.ndarray) -> np.ndarray:
    """When the last rank came to each of these collectives: its own begin, where that is not known."""
    found = own["begin"].copy()
    kinds = np.unique(own[["step", "phase"]], return_inverse=True)[1].reshape(-1)
    for number in range(int(kinds.max()) + 1):
        same = np.flatnonzero(kinds == number)
        same = same[np.lexsort((own["begin"][same], own["rank"][same]))]
        ranks, counts = np.unique(own["rank"][same], return_counts=True)
        if len(set(counts.tolist())) == 1:
            latest = own["begin"][same].reshape(len(ranks), -1).max(axis=0)
            found[same] = np.tile(latest, len(ranks))
    return found

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

from dtkit.history.message_times import SYNC_PHASE, WAIT_PHASE

if TYPE_CHECKING:
    from collections.abc import Sequence


def split_blocked_time(
    blocked: Sequence[np.ndarray], clock_offsets: Sequence[float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(waiting, transfer) in seconds, each of shape (ranks, steps).

    `blocked` has for each rank an array (steps, collectives, 3) of begin and end on that rank's clock, and a number for
    the ranks among which; NaN where a step had fewer. `offsets` is how far each rank's clock is ahead (all equal by
    default, as on one host).
    """
    places = max(spans.shape[1] for spans in blocked)
    begin, end, among = np.moveaxis(np.stack([_pad_collectives(spans, places) for spans in blocked]), -1, 0)
    if clock_offsets is not None:
        ahead = np.asarray(clock_offsets)[:, None, None]
        begin, end = begin - ahead, end - ahead
    rank, step, _ = known = np.nonzero(~np.isnan(among))
    numbers, number = np.unique(among[known], return_inverse=True)
    latest = np.full_like(begin, np.nan)
    latest[known] = _find_last_begin(begin[known], rank, step * len(numbers) + number.reshape(-1))
    waiting = np.clip(np.minimum(latest, end) - begin, 0, None)
    return np.nansum(waiting, axis=2), np.nansum(np.clip(end - begin - waiting, 0, None), axis=2)


def _pad_collectives(spans: np.ndarray, places: int) -> np.ndarray:
    return np.pad(spans, ((0, 0), (0, places - spans.shape[1]), (0, 0)), constant_values=np.nan)


def _find_last_begin(begin: np.ndarray, rank: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """When the last rank came to each of these, which are in order on each rank.

    `meeting` is a number for a step and the ranks that meet in it.
    """
    if not len(begin):
        return begin
    whose = group_ids * (rank.max() + 1) + rank
    order = np.argsort(whose, kind="stable")
    first = np.flatnonzero(np.diff(whose[order], prepend=-1))
    which = np.empty_like(order)
    which[order] = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
    collective = group_ids * (which.max() + 1) + which
    found = np.full(collective.max() + 1, -np.inf)
    np.maximum.at(found, collective, begin)
    latest: np.ndarray = found[collective]
    return latest


def split_wait_spans(spans: np.ndarray) -> np.ndarray:
    """Spans of all ranks on one clock, with the waiting split off from each collective.

    What is left of it stays, were it without length, so that a second cut finds nothing. Where ranks have not the same
    number of collectives (some have failed), it is not known which are whose: these stay as they are.
    """
    at = np.flatnonzero(np.char.startswith(spans["phase"], SYNC_PHASE))
    if not len(at):
        return spans
    own = spans[at[np.argsort(spans["begin"][at], kind="stable")]]
    waits, rest = own.copy(), own.copy()
    waits["phase"] = WAIT_PHASE
    waits["end"] = rest["begin"] = np.clip(_find_last_arrival(own), own["begin"], own["end"])
    found = np.concatenate([np.delete(spans, at), waits[waits["end"] > waits["begin"]], rest])
    return found[np.lexsort((found["end"], found["begin"], found["step"], found["rank"]))]


def _find_last_arrival(spans: np.ndarray) -> np.ndarray:
    """When the last rank came to each of these collectives: its own begin, where that is not known."""
    meeting = np.unique(spans[["step", "phase"]], return_inverse=True)[1].reshape(-1)
    ranks, rank = np.unique(spans["rank"], return_inverse=True)
    counts = np.zeros((meeting.max() + 1, len(ranks)), int)
    np.add.at(counts, (meeting, rank), 1)
    uneven = (counts != counts.max(axis=1, keepdims=True)) & (counts > 0)
    return np.where(
        uneven.any(axis=1)[meeting], spans["begin"], _find_last_begin(spans["begin"], spans["rank"], meeting)
    )

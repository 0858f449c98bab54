"""Communication time of ranks, divided into waiting for other ranks and transfer.

A *collective* can't move data before its last rank has begun. So rank i waits from its own begin to the latest one,
wait_i = max_j begin_j - begin_i, and the rest is transfer. Ranks begin the same collectives in the same order. The k-th
collective of a group of ranks in a step is therefore the k-th one on each of them.

A *message* between stages goes forward (an activation) or backward (a gradient). Each of its two ranks marks when it
posts its part, and when it is blocked until that is complete. A blocked rank waits until the other rank has posted; the
rest is transfer. If a message was sent before its receiver posted, no rank waits.

This needs the marks of all ranks, so the notebook computes it, on one clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

MESSAGE_PHASES = ("send forward", "send backward", "receive forward", "receive backward")
"""Phases that a rank marks for messages."""
_FIRST_RECEIVE = 2  # index in MESSAGE_PHASES; odd ones are backward

WAIT_PHASE = "wait"
"""Phase of the time that a rank waits for another rank."""

SYNC_PHASE = "sync"
"""Phase of a collective; the ranks follow if they are not all ranks: "sync 0-1"."""

MESSAGE_DTYPE = np.dtype(
    [
        ("step", "i4"),
        ("phase", "u1"),  # index in MESSAGE_PHASES
        ("stage", "i2"),
        ("micro_batch", "i2"),
        ("begin", "f8"),
        ("end", "f8"),
    ]
)
"""A rank's time in a message, in seconds on the rank's clock: post and wait together, or one row for each."""


def get_phase_kind(phase: str) -> str:
    """Return the phase without the direction of a message or the ranks of a collective."""
    kind = phase.partition(" ")[0]
    return kind if kind == SYNC_PHASE or phase in MESSAGE_PHASES else phase


# -- collectives ---------------------------------------------------------------------------------------------


def split_blocked_time(
    blocked: Sequence[np.ndarray], clock_offsets: Sequence[float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (waiting, transfer) in seconds, each of shape (ranks, steps).

    `blocked` has an array (steps, collectives, 3) for each rank: begin and end on the rank's clock, and the group's
    number. It is NaN where a step had fewer collectives. `clock_offsets` has the lead of each rank's clock (0 by
    default).
    """
    width = max(spans.shape[1] for spans in blocked)
    begin, end, groups = np.moveaxis(np.stack([_pad_collectives(spans, width) for spans in blocked]), -1, 0)
    if clock_offsets is not None:
        ahead = np.asarray(clock_offsets)[:, None, None]
        begin, end = begin - ahead, end - ahead
    rank, step, _ = known = np.nonzero(~np.isnan(groups))
    numbers, number = np.unique(groups[known], return_inverse=True)
    latest = np.full_like(begin, np.nan)
    latest[known] = _find_last_begin(begin[known], rank, step * len(numbers) + number.reshape(-1))
    waiting = np.clip(np.minimum(latest, end) - begin, 0, None)
    return np.nansum(waiting, axis=2), np.nansum(np.clip(end - begin - waiting, 0, None), axis=2)


def _pad_collectives(spans: np.ndarray, width: int) -> np.ndarray:
    return np.pad(spans, ((0, 0), (0, width - spans.shape[1]), (0, 0)), constant_values=np.nan)


def _find_last_begin(begin: np.ndarray, rank: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """Return the time at which the last rank began each of these collectives, which are in order on each rank.

    `group_ids` has a number for each pair of a step and a group of ranks.
    """
    if not len(begin):
        return begin
    rank_groups = group_ids * (rank.max() + 1) + rank
    order = np.argsort(rank_groups, kind="stable")
    first = np.flatnonzero(np.diff(rank_groups[order], prepend=-1))
    place = np.empty_like(order)
    place[order] = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
    collective = group_ids * (place.max() + 1) + place
    latest_by_collective = np.full(collective.max() + 1, -np.inf)
    np.maximum.at(latest_by_collective, collective, begin)
    latest: np.ndarray = latest_by_collective[collective]
    return latest


def split_collective_waits(spans: np.ndarray) -> np.ndarray:
    """Return spans of all ranks on one clock, with the waiting split off from each collective.

    The rest of each collective stays, even with no length, so that a second split changes nothing. Collectives stay
    whole if their ranks have different numbers of them (after a failure), because they can't be matched.
    """
    indices = np.flatnonzero(np.char.startswith(spans["phase"], SYNC_PHASE))
    if not len(indices):
        return spans
    indices = indices[np.argsort(spans["begin"][indices], kind="stable")]
    collectives = spans[indices]
    last_begin = np.clip(_find_last_begin_if_matched(collectives), collectives["begin"], collectives["end"])
    return _split_spans(spans, indices, last_begin)


def _find_last_begin_if_matched(spans: np.ndarray) -> np.ndarray:
    """Return the time at which the last rank began each of these collectives, or its own begin if ranks can't be
    matched.
    """
    group_ids = np.unique(spans[["step", "phase"]], return_inverse=True)[1].reshape(-1)
    ranks, rank = np.unique(spans["rank"], return_inverse=True)
    counts = np.zeros((group_ids.max() + 1, len(ranks)), int)
    np.add.at(counts, (group_ids, rank), 1)
    uneven = (counts != counts.max(axis=1, keepdims=True)) & (counts > 0)
    return np.where(
        uneven.any(axis=1)[group_ids], spans["begin"], _find_last_begin(spans["begin"], spans["rank"], group_ids)
    )


# -- messages ------------------------------------------------------------------------------------------------


def split_message_waits(spans: np.ndarray, ranks_per_pipeline: int) -> np.ndarray:
    """Return spans of all ranks on one clock, with the waiting split off from each message.

    The rest of each message stays, even with no length, so that each message still has both of its ends.
    """
    indices = np.flatnonzero(np.isin(spans["phase"], MESSAGE_PHASES))
    if not len(indices):
        return spans
    messages = spans[indices]
    seconds = _compute_waits(messages, _get_phase_numbers(messages), messages["rank"] // ranks_per_pipeline)
    return _split_spans(spans, indices, messages["begin"] + seconds)


def pair_messages(spans: np.ndarray, ranks_per_pipeline: int) -> list[tuple[int, int]]:
    """Return the indices (begin of sending, receiving) of the spans of each message."""
    indices = np.flatnonzero(np.isin(spans["phase"], MESSAGE_PHASES))
    rows = spans[indices]
    message, receives = _identify_messages(rows, _get_phase_numbers(rows), rows["rank"] // ranks_per_pipeline)
    ends: dict[int, list[int | None]] = {}
    for k in np.argsort(rows["begin"], kind="stable"):
        pair = ends.setdefault(int(message[k]), [None, None])
        if receives[k] or pair[0] is None:
            pair[receives[k]] = int(indices[k])
    return [(sent, received) for sent, received in ends.values() if sent is not None and received is not None]


def compute_message_waits(
    message_rows: Sequence[np.ndarray],
    ranks: Sequence[int],
    ranks_per_pipeline: int,
    clock_offsets: Sequence[float] | None = None,
) -> list[np.ndarray]:
    """Return the seconds of waiting in each :data:`MESSAGE_DTYPE` row, one array for each of `ranks`.

    `clock_offsets` has the lead of each rank's clock in seconds (0 by default).
    """
    rows = np.concatenate(message_rows)
    lengths = [len(part) for part in message_rows]
    if clock_offsets is not None:
        ahead = np.repeat(np.asarray(clock_offsets), lengths)
        rows["begin"] -= ahead
        rows["end"] -= ahead
    seconds = _compute_waits(rows, rows["phase"], np.repeat(np.asarray(ranks), lengths) // ranks_per_pipeline)
    return np.split(seconds, np.cumsum(lengths)[:-1])


def _get_phase_numbers(spans: np.ndarray) -> np.ndarray:
    return np.array([MESSAGE_PHASES.index(str(phase)) for phase in spans["phase"]], int)


def _identify_messages(
    rows: np.ndarray, phase_numbers: np.ndarray, pipeline: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (number of the message, whether it is the receiver's end) of each row."""
    receives, backward = np.divmod(phase_numbers.astype(int), _FIRST_RECEIVE)
    sender_stage = rows["stage"] + receives * (2 * backward - 1)
    key = np.zeros(len(rows), int)
    for column in (rows["step"], pipeline, backward, sender_stage, rows["micro_batch"]):
        key = key * (int(column.max(initial=0)) + 1) + column
    return np.unique(key, return_inverse=True)[1], receives


def _compute_waits(rows: np.ndarray, phase_numbers: np.ndarray, pipeline: np.ndarray) -> np.ndarray:
    """Return the seconds of waiting in each row; 0 if the other rank's begin is unknown."""
    message, receives = _identify_messages(rows, phase_numbers, pipeline)
    posted, awaited = np.full((len(rows), 2), np.inf), np.full((len(rows), 2), -np.inf)  # by message and end
    np.minimum.at(posted, (message, receives), rows["begin"])
    np.maximum.at(awaited, (message, receives), rows["begin"])
    other = posted[message, 1 - receives]
    blocked = (rows["begin"] == awaited[message, receives]) & np.isfinite(other)
    buffered = (receives == 0) & (other >= rows["end"])
    seconds = np.clip(np.minimum(other, rows["end"]) - rows["begin"], 0, None)
    return np.where(blocked & ~buffered, seconds, 0.0)


def _split_spans(spans: np.ndarray, indices: np.ndarray, wait_ends: np.ndarray) -> np.ndarray:
    """Split the spans at `indices` into a wait until `wait_ends` and the rest."""
    waits, rest = spans[indices], spans[indices]
    waits["phase"] = WAIT_PHASE
    waits["end"] = rest["begin"] = wait_ends
    parts = np.concatenate([np.delete(spans, indices), waits[waits["end"] > waits["begin"]], rest])
    return parts[np.lexsort((parts["end"], parts["begin"], parts["step"], parts["rank"]))]

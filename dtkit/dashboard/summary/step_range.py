"""The rows of a range of steps, for a page that zooms in. A long history is read in blocks, and never as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtkit.history.growing_array import select_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dtkit.history.history import History

_BLOCK_ROWS = 16_384  # as in a history, whose chunks are then read without a copy


def read_row_blocks(history: History, first_step: int, last_step: int) -> Iterator[np.ndarray]:
    """Yield the valid rows from `first_step` to `last_step`, in order of arrival."""
    return _read_blocks(history.read_valid_rows, history.num_valid_rows, first_step, last_step)


def read_range_totals(history: History, first_step: int, last_step: int) -> np.ndarray:
    """Return the valid totals from `first_step` to `last_step`."""
    blocks = list(_read_blocks(history.read_valid_totals, history.num_steps, first_step, last_step))
    return np.concatenate(blocks) if blocks else history.read_valid_totals(0, 0)


def read_thinned_rows(history: History, first_step: int, last_step: int, max_rows: int) -> np.ndarray:
    """Return the valid rows of a range: of each step, or of steps at equal distances if those are about `max_rows`."""
    stride = max(1, -(-(last_step - first_step + 1) * max(1, history.num_ranks) // max_rows))
    blocks = [
        select_rows(rows, ((rows["step"] - first_step) % stride == 0) | (rows["step"] == last_step))
        for rows in read_row_blocks(history, first_step, last_step)
    ]
    return np.concatenate(blocks) if blocks else history.read_valid_rows(0, 0)


def clip_range(history: History, first_step: int, last_step: int) -> tuple[int, int]:
    """Return a range without steps before the first one of a history and after the last one."""
    ends = [history.read_valid_totals(k, k + 1)["step"] for k in (0, max(0, history.num_steps - 1))]
    if not len(ends[0]) or not len(ends[1]):
        return first_step, last_step
    return max(first_step, int(ends[0][0])), min(last_step, int(ends[1][0]))


def _read_blocks(
    read: Callable[[int, int], np.ndarray], length: int, first_step: int, last_step: int
) -> Iterator[np.ndarray]:
    """Yield the parts of a table in a range. Rows that arrived late are at most a block away from their neighbors."""
    starts = range(0, length, _BLOCK_ROWS)
    begins = [int(read(start, start + 1)["step"][0]) for start in starts]
    for k, start in enumerate(starts):
        is_before = k + 2 < len(begins) and begins[k + 2] < first_step
        is_after = k > 0 and begins[k - 1] > last_step
        if is_before or is_after:
            continue
        rows = read(start, min(start + _BLOCK_ROWS, length))
        part = select_rows(rows, (rows["step"] >= first_step) & (rows["step"] <= last_step))
        if len(part):
            yield part

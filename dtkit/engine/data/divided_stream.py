"""Division of a stream among ranks, and detection of a stream that divides itself.

A stream may divide itself by ``torch.distributed.get_rank()``, by environment variables, or by files of its host.
Divided once more, most of its samples would be left out. Ranks then see different items, although all draw the same
random numbers. A stream with random numbers of its own also differs, but it differs each time, and doesn't ask for its
rank.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from dtkit._util.guard import run_guarded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NUM_COMPARED_ITEMS = 2  # for each rank


class DividedStream:
    """Iterator over a rank's items of a stream: the items r, r + N, r + 2N and so on of N ranks."""

    def __init__(self, items: Iterator[Any], rank: int, world_size: int) -> None:
        self._start_checksums: list[int] = []
        watched = items
        if world_size > 1:
            watched = _watch_start(items, _NUM_COMPARED_ITEMS * world_size, self._start_checksums)
        self._samples = itertools.islice(watched, rank, None, world_size)

    @property
    def start_checksum(self) -> int:
        """Checksum of the stream's first items, those of other ranks included, once there is a sample."""
        return sum(self._start_checksums)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._samples)


def _watch_start(items: Iterator[Any], count: int, checksums: list[int]) -> Iterator[Any]:
    """Yield the items. First append a checksum of the first ones to a list."""
    from dtkit.engine.data.item_checksum import compute_item_checksum

    first: list[Any] = []
    errors: list[Exception] = []
    run_guarded(lambda: first.extend(itertools.islice(items, count)), errors.append)
    checksums.append(compute_item_checksum(first))
    while first:
        yield first.pop(0)
    if errors:  # the samples before the error are used
        raise errors.pop()
    yield from items


RANDOM_STREAM_NOTE = (
    "ranks see different items of the stream, and others each time: it draws random numbers that seed= doesn't cover. "
    "So samples may be taken twice or never. Let it draw from torch's, numpy's or Python's global generator"
)


def check_same_items(checksums: Sequence[int], *, divides_itself: bool) -> str:
    """Return a note on checksums of a stream's first items by rank; "" if they are equal.

    A stream divides itself if it asks for its rank, or if its items differ from rank to rank but not from time to time.
    Raises ValueError for such a stream if the checksums differ.
    """
    if len(set(checksums)) < 2:
        return ""
    if not divides_itself:
        return RANDOM_STREAM_NOTE
    raise ValueError(
        "the stream has different items on each rank, as if it divided itself by its rank, and dtkit would divide it "
        "once more: most samples would be left out. Give data=lambda rank, world_size: stream, which isn't divided "
        "again, or a stream of all samples"
    )

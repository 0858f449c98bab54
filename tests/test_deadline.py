"""Waits with a time limit."""

from __future__ import annotations

import asyncio

import pytest

from dtkit._util.deadline import wait_for_event


def test_a_wait_for_an_event_ends_with_it_or_after_its_time():
    async def main() -> None:
        event = asyncio.Event()
        await wait_for_event(event, 0.001)
        event.set()
        await wait_for_event(event, 60)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_cancellation_counts_also_in_the_moment_of_the_event():
    """Otherwise an interrupt of a cell that awaits a run is lost if the run changes just then."""

    async def main() -> None:
        event = asyncio.Event()
        waiting = asyncio.ensure_future(wait_for_event(event, 60))
        await asyncio.sleep(0)
        event.set()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())

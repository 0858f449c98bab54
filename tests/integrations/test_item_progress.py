"""What a map shows while it runs, and how often it tries an item."""

from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any

import pytest

import dtkit
from dtkit.errors import ItemError
from dtkit.messages import Reply
from dtkit.testing.fake_transport import FakeTransport
from dtkit.training.item_map import _show
from dtkit.training.item_scheduler import ItemScheduler, _RunningItem
from dtkit.types import Failure


def test_progress_counts_the_items_of_each_node():
    shown: list[str] = []
    scheduler = SimpleNamespace(name="square", num_done=collections.Counter())
    _show(SimpleNamespace(update=shown.append), scheduler, 40)
    scheduler.num_done.update({1: 7, 0: 5})
    _show(SimpleNamespace(update=shown.append), scheduler, 40)
    assert shown == ["map square: 0 of 40 items", "map square: 12 of 40 items (node 0: 5, node 1: 7)"]


def test_an_item_that_loses_its_engine_is_tried_three_times():
    repeated: list[int] = []
    failed: list[int] = []
    group: Any = SimpleNamespace(world_size=2, uploads=SimpleNamespace(discard=lambda _: None))
    source: Any = SimpleNamespace(
        on_repeat=lambda index, item: repeated.append(index) or item,
        on_failure=lambda index, _: failed.append(index),
    )
    scheduler = ItemScheduler(group, "load", (len, (), {}), source, lambda: None)
    running: Any = _RunningItem(7, "text", payload=None, future=None)
    for rank in (0, 1, 0):
        scheduler._process_reply(rank, running, Reply(failure=Failure(rank, "?", "EngineLost", "", "", kind="lost")))
    assert (repeated, failed) == ([7, 7], [7])


class _FailingSource:
    """Two items, of which each fails the search."""

    def __init__(self) -> None:
        self._rest = [0, 1]

    @property
    def has_more(self) -> bool:
        return bool(self._rest)

    def take(self) -> tuple[int, Any]:
        return self._rest.pop(0), "item"

    def on_start(self, index: int, rank: int) -> None:
        pass

    def on_failure(self, index: int, failure: Failure) -> None:
        raise ItemError(index, "item", failure)

    def on_poll(self) -> None:
        pass


def fail(_item: Any) -> None:
    raise ValueError("never works")


def test_a_late_interrupt_leaves_the_cluster_usable():
    """It may arrive after the item's end, in the call that frees what the items have loaded."""
    transport = FakeTransport(2)
    with dtkit.Cluster.from_transport(transport, device="cpu") as cluster:
        transport.inject_failure(1, "call_function", KeyboardInterrupt(), after=1)
        source: Any = _FailingSource()
        with pytest.raises(ItemError, match="never works"):
            ItemScheduler(cluster._engine_group, "fail", (fail, (), {}), source, lambda: None).run(timeout=60)
        assert cluster.run(len, [1, 2]) == [2, 2]

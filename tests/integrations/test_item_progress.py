"""What a map shows while it runs."""

from __future__ import annotations

import collections
from types import SimpleNamespace

from dtkit.training.item_map import _show


def test_progress_counts_the_items_of_each_node():
    shown: list[str] = []
    scheduler = SimpleNamespace(name="square", num_done=collections.Counter())
    _show(SimpleNamespace(update=shown.append), scheduler, 40)
    scheduler.num_done.update({1: 7, 0: 5})
    _show(SimpleNamespace(update=shown.append), scheduler, 40)
    assert shown == ["map square: 0 of 40 items", "map square: 12 of 40 items (node 0: 5, node 1: 7)"]

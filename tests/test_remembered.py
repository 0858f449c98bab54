"""Results of a history are computed once between two changes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.history.remembered import remember_last
from dtkit.types import Evaluation
from tests.support.fake_source import FakeSource

if TYPE_CHECKING:
    from dtkit.history.history import History


def test_a_result_is_computed_again_only_for_a_changed_history_or_other_arguments():
    source, calls = FakeSource(ranks=2, steps=100), []

    @remember_last
    def read(history: History, add: int) -> int:
        calls.append(add)
        return len(history) + add

    assert [read(source.history, 1), read(source.history, 1), read(source.history, 2)] == [1, 1, 2]
    assert calls == [1, 2]
    source.advance(3)
    assert [read(source.history, 2), read(source.history, 2)] == [8, 8]
    assert calls == [1, 2, 2]
    source.event("pause", "paused by a person")
    read(source.history, 2)
    assert calls == [1, 2, 2, 2]
    source.history.add(Evaluation(3, 64, {"loss": 0.5}))
    read(source.history, 2)
    assert calls == [1, 2, 2, 2, 2]  # validation says whether a training learns
    assert read(FakeSource(ranks=2, steps=100).history, 2) == 2  # another history has a result of its own

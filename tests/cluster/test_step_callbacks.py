"""Callbacks of the notebook for every step: in order, none left out, errors pause the run."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import dtkit
from tests.support import small

pytestmark = pytest.mark.cluster


class Watcher:
    """Collects steps; raises at one of them."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.steps: list[Any] = []
        self.fails_at = fails_at

    def on_step(self, run: dtkit.Run, step: Any) -> None:
        if step.step == self.fails_at:
            raise ValueError("seen enough")
        self.steps.append((run.spec.name, step))


epochs: list[str] = []


class Counter:
    """Counts epochs in a global list, as objects of a notebook do."""

    def __call__(self, run: dtkit.Run) -> None:
        epochs.append("called")

    def count(self, run: dtkit.Run) -> None:
        epochs.append("method")


class Both(Counter):
    """Has a method for epochs and one for steps."""

    def on_step(self, run: dtkit.Run, step: Any) -> None:
        epochs.append("step")


def log_batch(model: Any, batch: Any) -> Any:
    from torch.nn import functional as F

    return F.cross_entropy(model(batch[0]), batch[1]), {"rows": len(batch[0])}


def test_every_step_is_seen_once_and_in_order(cluster2: dtkit.Cluster):
    watcher = Watcher()
    run = small.train(cluster2, loss=None, training_step=log_batch, callbacks=[watcher], steps=300, name="watched")
    run.wait(60)
    assert [step.step for _, step in watcher.steps] == list(range(300))
    name, first = watcher.steps[0]
    assert (name, first.samples, first.logged) == ("watched", 16, {"rows": 8.0})
    assert [step.loss for _, step in watcher.steps] == run.history.loss()[1].tolist()
    run.extend(steps=5)
    run.wait(60)
    assert [step.step for _, step in watcher.steps[300:]] == list(range(300, 305))


def test_failing_step_callback_pauses_the_run(cluster2: dtkit.Cluster):
    watcher = Watcher(fails_at=3)
    run = small.train(cluster2, callbacks=[watcher], steps=small.LONG)
    message = r"the callback Watcher failed after step \d+: ValueError: seen enough\n.*\n +raise ValueError"
    with pytest.raises(dtkit.errors.CallbackError, match=message) as caught:
        run.wait(60)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "run.resume() goes on without callbacks after steps" in str(caught.value)
    assert run.status.state is dtkit.types.State.PAUSED
    assert any(": ValueError: seen enough" in event.text for event in run.history.events)
    run.stop()
    small.check_usable(cluster2)


def count(name: str, run: dtkit.Run) -> None:
    epochs.append(name)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Counter, {"called": 3}),
        (lambda: Counter().count, {"method": 3}),
        (lambda: functools.partial(count, "partial"), {"partial": 3}),
        (Both, {"called": 3, "step": 0}),
    ],
)
def test_objects_of_a_notebook_are_called_after_each_epoch(
    cluster2: dtkit.Cluster, monkeypatch: pytest.MonkeyPatch, make: Any, expected: dict[str, int]
):
    for kind in (Counter, Both):  # pickled by value, as in a notebook
        monkeypatch.setattr(kind, "__module__", "__main__")
    epochs.clear()
    run = small.train(cluster2, callbacks=[make()], steps=None, epochs=3)
    run.wait(60)
    steps = run.status.step
    assert {name: epochs.count(name) for name in epochs} == expected | ({"step": steps} if "step" in expected else {})

"""Runs before the current one: what still works once a later training has begun."""

from __future__ import annotations

import gc

import psutil
import pytest
import torch

import dtkit
from dtkit.rpc.protocol import DataOperations, make_call
from dtkit.training import earlier_runs
from tests.support import small
from tests.support.waiting import wait_until

pytestmark = pytest.mark.cluster


def list_stored_keys(cluster: dtkit.Cluster) -> set[str]:
    """Return the keys of data and models that rank 0 holds."""

    def read_keys() -> list[str]:
        from dtkit.engine.session import get_session

        state = get_session().state
        return [*state.models, *state.data, *state.streams]

    release_nothing = make_call(DataOperations.release, keys=[])  # like any such call, it frees what is unused
    cluster._engine_group.call_all(release_nothing)
    return set(cluster.run(read_keys)[0])


def test_earlier_run_can_be_verified_while_no_other_trains(cluster2: dtkit.Cluster):
    first = small.train(cluster2, steps=3)
    first.wait(60)
    second = small.train(cluster2, steps=small.LONG)
    assert first.is_released
    with pytest.raises(dtkit.errors.RunError, match=r"this cluster is training Sequential .* Wait for it"):
        first.verify(3)
    second.pause()
    before = second.status.step
    assert first.verify(3)
    second.resume()
    second.pause()
    assert second.status.step >= before
    second.stop()
    assert len(first.history) == 3 * cluster2.world_size


@pytest.mark.parametrize("strategy", [dtkit.DataParallel(), dtkit.Pipeline(2, 2), dtkit.Sharded()], ids=repr)
def test_earlier_run_can_be_evaluated_while_no_other_trains(cluster2: dtkit.Cluster, strategy: dtkit.Strategy):
    first = small.train(cluster2, steps=5, strategy=strategy)
    first.wait(60)
    expected, placement = first.evaluate(small.data()), repr(first.placement())
    second = small.train(cluster2, steps=small.LONG)
    assert first.is_released
    with pytest.raises(dtkit.errors.RunError, match=r"this cluster is training Sequential .* Wait for it"):
        first.evaluate(small.data())
    second.stop()
    keys = list_stored_keys(cluster2)
    found = first.evaluate(small.data())
    assert (found.step, found.samples) == (expected.step, expected.samples)
    assert found.values == pytest.approx(expected.values)
    assert repr(first.placement()) == placement
    assert repr(second.placement()) == "None"
    gc.collect()
    wait_until(lambda: list_stored_keys(cluster2) <= keys, 60)  # engines keep neither the job nor its weights
    assert second.evaluate(small.data()).step == second.status.step


def test_released_run_cannot_be_verified(cluster2: dtkit.Cluster):
    first = small.train(cluster2, steps=2)
    first.wait(60)
    second = small.train(cluster2, steps=2)
    second.wait(60)
    for run in (first, second):
        run.release()
        with pytest.raises(dtkit.errors.RunError, match="was released"):
            run.verify(2)
        with pytest.raises(dtkit.errors.RunError, match=r"was released.*run\.model\.eval\(\)\(inputs\)"):
            run.evaluate(small.data())
        with torch.no_grad():  # the remedy that the error names
            assert run.model.eval()(small.data()[0]).isfinite().all()


def test_oldest_runs_make_room(cluster2: dtkit.Cluster, monkeypatch: pytest.MonkeyPatch):
    runs = []
    for _ in range(4):
        runs.append(small.train(cluster2, steps=2))
        runs[-1].wait(60)
        two_runs = 2.5 * runs[0].lifecycle.count_input_bytes()
        monkeypatch.setattr(earlier_runs, "_MEMORY_FRACTION", two_runs / psutil.virtual_memory().available)
    assert runs[1].verify(2)
    with pytest.raises(dtkit.errors.RunError, match="was released"):
        runs[0].verify(2)


@pytest.mark.slow
def test_engines_free_what_only_a_forgotten_run_needs(cluster2: dtkit.Cluster):
    gc.collect()
    before = list_stored_keys(cluster2)
    for _ in range(3):
        run = small.train(cluster2, steps=2)
        run.wait(60)

    def only_the_last_is_left() -> bool:
        gc.collect()
        return len(list_stored_keys(cluster2) - before) == 2  # data and model

    wait_until(only_the_last_is_left)  # views hold a run for a moment
    run.release()

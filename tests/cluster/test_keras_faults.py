"""Keras trainings that are paused, resumed or disturbed. The backend is Keras's own choice, torch by default."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import dtkit
from dtkit.types import State
from tests.support import small
from tests.support.keras_models import (
    check_equal,
    check_with_tensorflow,
    import_keras,
    make_model,
    make_rows,
    train,
)
from tests.support.waiting import wait_until

keras = import_keras()
if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("keras_in_float64"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras's own code
]


@pytest.mark.slow
def test_rank_without_rows_and_short_batches_change_nothing(cluster2: dtkit.Cluster):
    run = train(cluster2, epochs=2, optimizer="adam")
    run.wait(60)
    assert 0 in run.history.column("samples")
    verification = run.verify(8)
    assert verification.verdict == "PASS", verification.text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*normalizes with the statistics of a batch")
def test_training_continues_from_a_checkpoint_with_its_random_numbers(cluster2: dtkit.Cluster, tmp_path: Path):
    def make_random() -> Any:
        return make_model(keras.layers.BatchNormalization(), keras.layers.Dropout(0.3))

    train(cluster2, make_random(), optimizer="adam", steps=3, checkpoint_dir=tmp_path, checkpoint_every=3).wait(60)
    resumed = train(cluster2, make_random(), optimizer="adam", steps=6, resume_from=tmp_path)
    resumed.wait(60)
    resumed_model = resumed.model
    whole = train(cluster2, make_random(), optimizer="adam", steps=6)
    whole.wait(60)
    check_equal(resumed_model, whole.model, 0.0)
    mean = keras.ops.convert_to_numpy(whole.model.get_layer(index=1).moving_mean)
    assert np.abs(mean).max() > 0
    assert whole.verify(4).verdict == "NOT COMPARABLE"


@pytest.mark.slow
def test_killed_engine_changes_nothing(cluster2: dtkit.Cluster):
    run = train(cluster2, steps=300, optimizer="adam")
    wait_until(lambda: run.status.step > 5)
    run.inject_fault("kill", 1)
    run.wait(90)
    undisturbed = train(cluster2, steps=300, optimizer="adam")
    undisturbed.wait(60)
    check_equal(run.model, undisturbed.model)


@pytest.mark.slow
def test_frozen_engine_is_named_and_replaced(cluster2: dtkit.Cluster):
    run = train(cluster2, steps=small.LONG, optimizer="adam")
    wait_until(lambda: run.status.step > 5)
    frozen = cluster2.nodes[1].pid
    os.kill(frozen, signal.SIGSTOP)
    wait_until(lambda: any(event.kind == "stuck" for event in run.history.events), 30)
    wait_until(lambda: any(event.kind == "repair" for event in run.history.events), 60)
    step = run.status.step
    wait_until(lambda: run.status.step > step + 5)
    run.stop()
    assert cluster2.nodes[1].pid != frozen
    undisturbed = train(cluster2, steps=run.status.step, optimizer="adam")
    undisturbed.wait(120)
    check_equal(run.model, undisturbed.model)


def test_error_of_one_rank_is_named_and_leaves_the_engines_usable(cluster2: dtkit.Cluster):
    def raise_on_rank_1(target: Any, output: Any) -> Any:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            raise ValueError("planted")
        return keras.losses.mean_squared_error(target, output)

    with pytest.raises(dtkit.errors.EngineError, match=r"rank 1 .*ValueError: planted"):
        train(cluster2, loss=raise_on_rank_1).wait(60)
    small.check_usable(cluster2)


def test_run_pauses_steps_and_takes_another_learning_rate(cluster2: dtkit.Cluster):
    run = train(cluster2, steps=small.LONG)
    wait_until(lambda: run.status.step > 5)
    run.pause()
    step = run.status.step
    assert run.history.to_pandas().groupby("rank")["step"].max().nunique() == 1
    assert run.step(2) == step + 2
    run.set(lr=0.5)
    run.step(1)
    assert run.history.column("lr")[-1] == 0.5
    run.stop()
    assert run.status.state is State.STOPPED


def test_averages_of_parameters_after_each_step_equal_those_of_gradients(cluster2: dtkit.Cluster):
    runs = []
    for strategy in (dtkit.ParameterAveraging(every=1), dtkit.DataParallel()):
        run = train(cluster2, rows=make_rows(48), steps=6, strategy=strategy)
        run.wait(60)
        runs.append(run.model)
    check_equal(*runs)


def test_parameters_are_averaged_now_and_then(cluster2: dtkit.Cluster):
    run = train(cluster2, steps=8, strategy=dtkit.ParameterAveraging(every=4), optimizer="adam")
    run.wait(60)
    assert run.status.state is State.COMPLETED


@pytest.mark.slow
def test_all_this_holds_with_the_tensorflow_backend():
    check_with_tensorflow(__file__)

"""Keras models equal one worker's `train_on_batch`, with uneven shards and a short last batch, on 1 to 4 engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support import small
from tests.support.keras_models import check_equal, check_with_tensorflow, get_bound, import_keras

keras = import_keras()
if TYPE_CHECKING:
    import dtkit

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras's own code
]

ROWS, BATCH, STEPS = 49, 16, 8
"""Each epoch ends with a batch of one row."""


def make_model() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)])


@pytest.mark.parametrize("cluster", [1, 2, 3, 4], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("make_optimizer", [lambda: keras.optimizers.SGD(0.1, momentum=0.9), lambda: "adam"])
def test_training_equals_one_worker(cluster: dtkit.Cluster, dtype: str, make_optimizer: Any):
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)  # Keras keeps the policy of the first layer of a process
    try:
        generator = np.random.default_rng(0)
        x, y = (generator.normal(size=(ROWS, width)).astype(dtype) for width in (4, 3))
        part = cluster.partition((x, y), weights=range(1, cluster.world_size + 1))
        arguments: dict[str, Any] = {"loss": "mse", "optimizer": make_optimizer()}
        run = cluster.train(make_model(), part, batch_size=BATCH, steps=STEPS, shuffle=None, **arguments)
        run.wait(120)
        table = run.history.to_pandas()
        assert table.groupby("step")["samples"].sum().tolist() == [16, 16, 16, 1] * 2
        expected = make_model()
        expected.compile(loss="mse", optimizer=make_optimizer())
        for rows in list_step_rows(part, table):
            expected.train_on_batch(x[rows], y[rows])
        assert {variable.dtype for variable in run.model.trainable_variables} == {dtype}
        check_equal(run.model, expected, get_bound(dtype))
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def make_schedule() -> Any:
    return keras.optimizers.schedules.CosineDecay(0.01, 8, warmup_target=0.02, warmup_steps=3)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Adam(0.01),
        lambda: keras.optimizers.AdamW(make_schedule()),
        lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
        lambda: keras.optimizers.Lion(make_schedule()),
        lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    ],
)
@pytest.mark.usefixtures("keras_in_float64")
def test_optimizers_with_changing_learning_rates_equal_one_worker(cluster2: dtkit.Cluster, make_optimizer: Any):
    optimizer, expected = make_optimizer(), make_model()
    generator = np.random.default_rng(0)
    x, y = (generator.normal(size=(ROWS, width)) for width in (4, 3))
    options: dict[str, Any] = {"batch_size": ROWS, "steps": small.LONG, "start": False}
    run = cluster2.train(make_model(), (x, y), loss="mse", optimizer=optimizer, **options)
    run.step(3)
    run.set(lr=0.005)  # a quarter of the schedule's rate there, which is the same in float32
    run.step(10)
    run.stop()
    has_schedule = not hasattr(optimizer.learning_rate, "assign")
    settable = type(optimizer).from_config({**make_optimizer().get_config(), "learning_rate": 0.1})
    expected.compile(loss="mse", optimizer=settable)
    for rate in run.history.to_pandas().groupby("step")["lr"].first():
        expected.optimizer.learning_rate = float(np.float32(rate)) if has_schedule else rate
        expected.train_on_batch(x, y)
    check_equal(run.model, expected)


def list_step_rows(part: Any, table: Any) -> list[np.ndarray]:
    """Return the rows of each step: the next ones of each shard, in its order, as many as the rank has trained on."""
    first = dict.fromkeys(range(part.world_size), 0)
    steps = []
    for _, rows in table.groupby("step"):
        taken = []
        for rank, count in zip(rows["rank"], rows["samples"], strict=True):
            start = first[rank] % len(part.indices(rank))
            taken.append(part.indices(rank)[start : start + int(count)])
            first[rank] += int(count)
        steps.append(np.concatenate(taken))
    return steps


@pytest.mark.timeout(960)  # as long as the other process may take
def test_this_holds_with_the_tensorflow_backend():
    check_with_tensorflow(__file__)

"""Learning rates of Keras on engines: schedules, and new rates beside them, compared with one worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.keras_models import (
    ROWS,
    check_equal,
    check_with_tensorflow,
    import_keras,
    make_model,
    make_rows,
    train,
)

keras = import_keras()
if TYPE_CHECKING:
    from pathlib import Path

    import dtkit

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("keras_in_float64"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras's own code
]


def list_rates(run: dtkit.Run) -> list[float]:
    return list(run.history.to_pandas().groupby("step")["lr"].first())


def train_alone(rates: list[float], dtype: type[np.floating[Any]] = np.float32) -> Any:
    """Return the model that one worker trains with a rate for each step. `dtype` is the one of the schedule's rates."""
    expected = make_model()
    expected.compile(loss="mse", optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    for rate in rates:
        expected.optimizer.learning_rate = float(dtype(rate))
        expected.train_on_batch(*make_rows())
    return expected


def start(cluster: dtkit.Cluster, schedule: Any, **options: Any) -> dtkit.Run:
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9)
    return train(cluster, optimizer=optimizer, batch_size=ROWS, steps=6, start=False, **options)


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """Schedule of a notebook."""

    def __call__(self, step: Any) -> Any:
        return 0.1 * 0.5 ** keras.ops.cast(step, "float64")

    def get_config(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("make_schedule", "dtype"),
    [(lambda: keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), np.float32), (Halving, np.float64)],
    ids=["of Keras", "own"],
)
def test_new_learning_rate_scales_a_schedule(cluster2: dtkit.Cluster, make_schedule: Any, dtype: Any):
    run = start(cluster2, make_schedule())
    run.step(2)
    run.set(lr=0.2)
    assert run.lr == pytest.approx(0.2)
    run.step(2)
    run.set(lr=0.0)
    run.step()
    run.set(lr=0.1)
    run.resume()
    run.wait(60)
    rates = [0.1, 0.05, 0.2, 0.1, 0.0, 0.1]
    assert list_rates(run) == pytest.approx(rates)
    check_equal(run.model, train_alone(list_rates(run), dtype))


def test_scaled_schedule_goes_on_from_a_checkpoint(cluster2: dtkit.Cluster, tmp_path: Path):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    run = start(cluster2, schedule)
    run.step()
    run.set(lr=0.4)
    run.step()
    saved = run.save(tmp_path)
    run.stop()
    resumed = train(
        cluster2,
        optimizer=keras.optimizers.SGD(schedule, momentum=0.9),
        batch_size=ROWS,
        steps=4,
        resume_from=saved,
    )
    resumed.wait(60)
    assert list_rates(resumed)[-2:] == pytest.approx([0.2, 0.1])
    check_equal(resumed.model, train_alone([*list_rates(run), *list_rates(resumed)[-2:]]))


def test_new_learning_rate_where_a_schedule_is_at_zero_holds_for_one_update(
    cluster2: dtkit.Cluster, capsys: pytest.CaptureFixture[str]
):
    run = start(cluster2, keras.optimizers.schedules.PolynomialDecay(0.1, 2, 0.0))
    run.step(3)
    run.set(lr=0.3)
    run.resume()
    run.wait(60)
    rates = [0.1, 0.05, 0.0, 0.3, 0.0, 0.0]
    assert list_rates(run) == pytest.approx(rates)
    check_equal(run.model, train_alone(list_rates(run)))
    assert "lr=0.3 holds for one update: the schedule is at 0 there" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(960)  # as long as the other process may take
def test_this_holds_with_the_tensorflow_backend():
    check_with_tensorflow(__file__, "-m", "not slow")

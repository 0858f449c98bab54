"""Settings of Keras that its configuration leaves out, and layers that several ranks can't train."""

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
    import dtkit

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("keras_in_float64"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras's own code
]


def fit(model: Any, optimizer: Any) -> Any:
    model.compile(loss="mse", optimizer=optimizer)
    model.fit(*make_rows(), batch_size=ROWS, epochs=4, verbose=0)
    return model


class Stacked(keras.Model):
    """Model of a notebook. Its configuration doesn't say which of its layers are frozen."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first = keras.layers.Dense(4, activation="tanh")
        self.second = keras.layers.Dense(4, activation="tanh")
        self.last = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.last(self.second(self.first(x)))


def make_frozen() -> Any:
    keras.utils.set_random_seed(0)
    model = Stacked()
    model(make_rows()[0][:1])
    model.first.trainable = False
    return model


def test_frozen_layers_of_a_notebooks_class_stay_as_they_are(cluster2: dtkit.Cluster):
    run = train(cluster2, make_frozen(), batch_size=ROWS)
    run.wait(60)
    check_equal(run.model, fit(make_frozen(), "sgd"))
    for found, expected in zip(run.model.first.get_weights(), make_frozen().first.get_weights(), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("by", ["name", "variable"])
def test_variables_excluded_from_weight_decay_keep_their_size(cluster2: dtkit.Cluster, by: str):
    def make_optimizer(model: Any) -> Any:
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=5.0)
        chosen = {"var_names": ["bias"]} if by == "name" else {"var_list": [model.layers[0].kernel]}
        optimizer.exclude_from_weight_decay(**chosen)
        return optimizer

    model, expected = make_model(), make_model()
    run = train(cluster2, model, optimizer=make_optimizer(model), batch_size=ROWS)
    run.wait(60)
    check_equal(run.model, fit(expected, make_optimizer(expected)))


def make_with_policy(policy: str) -> Any:
    keras.config.set_dtype_policy(policy)
    try:
        return make_model()
    finally:
        keras.config.set_dtype_policy(keras.config.floatx())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_with_policy("mixed_float16"), "has the policy 'mixed_float16', for which fit scales the loss"),
        (
            lambda: keras.Sequential([keras.Input(batch_shape=(16, 3, 4)), keras.layers.LSTM(3, stateful=True)]),
            "is stateful: it keeps the state of each row",
        ),
    ],
)
def test_layers_that_train_differently_on_several_ranks_are_refused(cluster2: dtkit.Cluster, make: Any, message: str):
    with pytest.raises(ValueError, match=message):
        train(cluster2, make())


@pytest.mark.slow
def test_this_holds_with_the_tensorflow_backend():
    check_with_tensorflow(__file__, "-m", "not slow")

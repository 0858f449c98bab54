"""Settings of Keras that its configuration leaves out, and layers that several ranks can't train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dtkit.errors import EngineError
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
        (
            lambda: make_model(keras.layers.SpectralNormalization(keras.layers.Dense(3))),
            "rewrites its kernel in the forward pass",
        ),
    ],
)
def test_layers_that_train_differently_on_several_ranks_are_refused(cluster2: dtkit.Cluster, make: Any, message: str):
    with pytest.raises(ValueError, match=message):
        train(cluster2, make())


def test_vocabulary_of_adapt_is_refused_and_a_given_one_travels(cluster2: dtkit.Cluster):
    pytest.importorskip("tensorflow")
    words = np.random.default_rng(0).integers(1, 5, size=(ROWS, 3))

    def make(**options: Any) -> Any:
        keras.utils.set_random_seed(0)
        lookup = keras.layers.IntegerLookup(output_mode="multi_hot", **options)
        if not options:
            lookup.adapt(words)
        return keras.Sequential([keras.Input((3,), dtype="int64"), lookup, keras.layers.Dense(3)])

    rows = words, make_rows()[1]
    with pytest.raises(ValueError, match=r"has a vocabulary from adapt\(\), which its configuration leaves out"):
        train(cluster2, make(), rows)
    vocabulary = make().layers[0].get_vocabulary(include_special_tokens=False)
    run = train(cluster2, make(vocabulary=vocabulary), rows, batch_size=ROWS)
    run.wait(60)
    expected = make(vocabulary=vocabulary)
    expected.compile(loss="mse", optimizer="sgd")
    expected.fit(*rows, batch_size=ROWS, epochs=4, verbose=0)
    check_equal(run.model, expected)


class Penalty(keras.layers.Layer):
    """Layer that adds a loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.supports_masking = True

    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x


def test_losses_of_layers_count_by_rows(cluster2: dtkit.Cluster):
    run = train(cluster2, make_model(Penalty()), batch_size=ROWS)
    run.wait(60)
    check_equal(run.model, fit(make_model(Penalty()), "sgd"))


def test_losses_of_layers_beside_masked_targets_are_refused(cluster2: dtkit.Cluster):
    embedding = keras.layers.Embedding(4, 3, mask_zero=True)
    model = keras.Sequential([keras.Input((5,), dtype="int32"), embedding, Penalty(), keras.layers.Dense(4)])
    words = np.random.default_rng(0).integers(4, size=(ROWS, 5))
    with pytest.raises(EngineError, match=r"adds losses .*masked or ignored targets don't count.*in one loss function"):
        train(cluster2, model, (words, words), loss="sparse_categorical_crossentropy").wait(60)


class Centered(keras.layers.Layer):
    """Layer that subtracts a running mean."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")

    def call(self, x: Any) -> Any:
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, 0))
        return x - self.mean


def test_running_means_of_own_layers_are_warned_of(cluster2: dtkit.Cluster):
    with pytest.warns(UserWarning, match="the buffer 'centered/mean' changes by the rows of a batch"):
        train(cluster2, make_model(Centered())).wait(60)


class SquaredError(keras.Sequential):
    """Model with a loss of its own."""

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,  # noqa: FBT001, FBT002 - Keras's signature
    ) -> Any:
        del x, sample_weight, training
        return keras.ops.mean(keras.ops.square(y - y_pred))


def test_model_that_computes_its_loss_needs_none(cluster2: dtkit.Cluster):
    def make() -> Any:
        keras.utils.set_random_seed(0)
        return SquaredError([keras.Input((4,)), keras.layers.Dense(3)])

    run = train(cluster2, make(), loss=None, batch_size=ROWS)
    run.wait(60)
    expected = make()
    expected.compile(optimizer="sgd")
    expected.fit(*make_rows(), batch_size=ROWS, epochs=4, verbose=0)
    check_equal(run.model, expected)


def test_bfloat16_trains_and_evaluates(cluster2: dtkit.Cluster):
    keras.config.set_floatx("float32")  # with float64, Keras's own fit fails under TensorFlow
    run = train(cluster2, make_with_policy("mixed_bfloat16"), batch_size=ROWS, metrics=["mae"])
    run.wait(60)
    expected = make_with_policy("mixed_bfloat16")
    expected.compile(loss="mse", optimizer="sgd", metrics=["mae"])
    expected.fit(*make_rows(), batch_size=ROWS, epochs=4, verbose=0)
    check_equal(run.model, expected, 1e-3)
    assert run.evaluate(make_rows()).values["mae"] == pytest.approx(
        expected.evaluate(*make_rows(), verbose=0)[1], rel=1e-2
    )


@pytest.mark.slow
@pytest.mark.timeout(960)  # as long as the other process may take
def test_this_holds_with_the_tensorflow_backend():
    check_with_tensorflow(__file__, "-m", "not slow")

"""Keras models on engines, compared with one worker's `fit`. The backend is Keras's own choice, torch by default."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dtkit
from dtkit.errors import EngineError, FirstBatchError
from tests.support.keras_models import (
    ROWS,
    check_equal,
    check_with_tensorflow,
    import_keras,
    make_model,
    make_rows,
    train,
)
from tests.support.marks import slow

keras = import_keras()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("keras_in_float64"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras's own code
]


def make_scheduled() -> Any:
    return keras.optimizers.AdamW(keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.9), clipnorm=0.5)


OPTIMIZERS = [lambda: "sgd", make_scheduled, slow(lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True))]


@pytest.mark.parametrize("cluster", [slow(1), 2, slow(3), slow(4)], indirect=True)
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
def test_training_equals_fit_of_one_worker(cluster: dtkit.Cluster, make_optimizer: Any):
    model = make_model()
    run = train(cluster, model, optimizer=make_optimizer(), batch_size=ROWS, epochs=5, metrics=["mae"])
    run.wait(90)
    expected = make_model()
    expected.compile(loss="mse", optimizer=make_optimizer(), metrics=["mae"])
    history = expected.fit(*make_rows(), batch_size=ROWS, epochs=5, verbose=0)
    check_equal(run.model, expected)
    assert run.history.loss()[1] == pytest.approx(history.history["loss"], rel=1e-6)
    evaluation = run.evaluate(make_rows())
    loss, error = expected.evaluate(*make_rows(), verbose=0)
    assert (evaluation.values["loss"], evaluation.values["mae"]) == pytest.approx((loss, error), rel=1e-6)
    check_equal(model, make_model(), 0.0)  # the given model stays as it is
    assert run.spec.name == "net"
    assert run.model.evaluate(*make_rows(), verbose=0)[1] == pytest.approx(error, rel=1e-6)


def test_compiled_model_needs_no_other_arguments(cluster2: dtkit.Cluster):
    model = make_model()
    model.compile(loss=keras.losses.MeanSquaredError(), optimizer=keras.optimizers.SGD(0.1), metrics=["mae"])
    run = cluster2.train(model, make_rows(), batch_size=16, epochs=1, validation=make_rows())
    run.wait(60)
    assert set(run.history.evaluations[-1].values) == {"loss", "mae"}
    assert run.lr == pytest.approx(0.1)


def test_rows_of_tf_data_are_all_trained_on(cluster2: dtkit.Cluster, capsys: pytest.CaptureFixture[str]):
    tf = pytest.importorskip("tensorflow")
    x, y = make_rows()
    by_row = tf.data.Dataset.from_tensor_slices((x, y))
    run = train(cluster2, rows=by_row.batch(16), batch_size=None, epochs=1, validation=by_row)
    run.wait(60)
    assert "tf.data: 49 rows, batch_size=16 over all ranks" in capsys.readouterr().out
    assert run.history.column("samples").sum() == ROWS
    expected = train(cluster2, epochs=1)
    expected.wait(60)
    check_equal(run.model, expected.model)
    with pytest.raises(ValueError, match="never ends"):
        train(cluster2, rows=by_row.repeat())


@pytest.mark.parametrize("whole_batches", [False, True])
def test_rows_of_a_generator_are_those_of_arrays(cluster2: dtkit.Cluster, *, whole_batches: bool):
    def generate() -> Any:
        x, y = make_rows(48)
        if whole_batches:
            return ((x[k : k + 8], y[k : k + 8]) for k in range(0, 48, 8))  # each engine takes every other one
        return zip(x, y, strict=True)

    run = train(cluster2, rows=generate, steps=3)
    run.wait(60)
    expected = make_model()
    expected.compile(loss="mse", optimizer="sgd")
    expected.fit(*make_rows(48), batch_size=16, shuffle=False, verbose=0)
    check_equal(run.model, expected)


def test_rows_of_tf_data_with_equal_shapes_are_not_taken_for_batches(cluster2: dtkit.Cluster):
    tf = pytest.importorskip("tensorflow")
    x = make_rows()[0]
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    run = train(cluster2, model, tf.data.Dataset.from_tensor_slices((x, x)), epochs=1)
    run.wait(60)
    assert run.history.column("samples").sum() == ROWS


def test_class_of_a_notebook_travels_by_value(cluster2: dtkit.Cluster):
    class Doubling(keras.Model):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.dense = keras.layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.dense(2 * x)

    keras.utils.set_random_seed(0)
    model = Doubling()
    model(make_rows()[0][:1])
    run = train(cluster2, model, batch_size=ROWS, steps=3)
    run.wait(60)
    model.compile(loss="mse", optimizer="sgd")
    model.fit(*make_rows(), batch_size=ROWS, epochs=3, verbose=0)
    check_equal(run.model, model)


def test_several_inputs_and_sparse_gradients(cluster2: dtkit.Cluster):
    def make_two_inputs() -> Any:
        keras.utils.set_random_seed(0)
        words, numbers = keras.Input((5,), dtype="int32"), keras.Input((4,))
        embedded = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(7, 6)(words))
        output = keras.layers.Dense(3)(keras.layers.Concatenate()([embedded, numbers]))
        return keras.Model([words, numbers], output)

    words = np.random.default_rng(1).integers(7, size=(ROWS, 5))
    numbers, targets = make_rows()
    run = train(cluster2, make_two_inputs(), (words, numbers, targets), batch_size=ROWS)
    run.wait(60)
    expected = make_two_inputs()
    expected.compile(loss="mse", optimizer="sgd")
    expected.fit([words, numbers], targets, batch_size=ROWS, epochs=4, verbose=0)
    check_equal(run.model, expected)


def test_adapted_normalization_travels(cluster2: dtkit.Cluster):
    x, y = make_rows()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Normalization(), keras.layers.Dense(3)])
    model.layers[0].adapt(3.0 + 2.0 * x)
    run = train(cluster2, model, batch_size=ROWS)
    run.wait(60)
    model.compile(loss="mse", optimizer="sgd")
    model.fit(x, y, batch_size=ROWS, epochs=4, verbose=0)
    check_equal(run.model, model)
    np.testing.assert_allclose(run.model.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)


def test_batch_normalization_is_warned_of(cluster2: dtkit.Cluster):
    with pytest.warns(UserWarning, match="^batch_norm.* normalizes with the statistics of a batch, and each rank has"):
        train(cluster2, make_model(keras.layers.BatchNormalization(name="batch_norm"))).wait(60)


def make_padded() -> tuple[np.ndarray, np.ndarray]:
    """Return texts of seven words, 0 after the last one, and a class for each word. Shards have unequally many."""
    generator = np.random.default_rng(2)
    words, lengths = generator.integers(1, 9, size=(ROWS, 7)), np.sort(generator.integers(1, 8, size=ROWS))
    words[np.arange(7) >= lengths[:, None]] = 0
    return words, np.where(words > 0, generator.integers(1, 4, size=words.shape), 0)


def make_tagger(*, masks: bool) -> Any:
    keras.utils.set_random_seed(0)
    embedding = keras.layers.Embedding(
        9, 4, mask_zero=masks, embeddings_initializer=keras.initializers.RandomNormal(stddev=1.0)
    )
    return keras.Sequential([keras.Input((7,), dtype="int32"), embedding, keras.layers.Dense(4)])


@pytest.mark.parametrize("masks", [True, False], ids=["mask of the model", "ignored class"])
def test_masked_targets_count_for_nothing(cluster2: dtkit.Cluster, *, masks: bool):
    options: dict[str, Any] = {} if masks else {"ignore_class": 0}

    def make_options() -> dict[str, Any]:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)
        return {"loss": loss, "optimizer": keras.optimizers.SGD(0.1), "metrics": ["accuracy"]}

    rows = make_padded()
    run = train(cluster2, make_tagger(masks=masks), rows, batch_size=ROWS, shuffle=None, **make_options())
    run.wait(60)
    expected = make_tagger(masks=masks)
    expected.compile(**make_options())
    history = expected.fit(*rows, batch_size=ROWS, epochs=4, verbose=0)
    check_equal(run.model, expected)
    assert run.history.loss()[1] == pytest.approx(history.history["loss"], rel=1e-6)
    found = run.evaluate(rows).values
    loss, accuracy = expected.evaluate(*rows, batch_size=ROWS, verbose=0)
    assert (found["loss"], found["accuracy"]) == pytest.approx((loss, accuracy), rel=1e-6)


def test_loss_and_metrics_of_the_only_output_may_have_its_name(cluster2: dtkit.Cluster):
    runs = []
    for loss, metrics in (({"out": "mse"}, {"out": ["mae"]}), ("mse", ["mae"])):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4,))
        model = keras.Model(inputs, keras.layers.Dense(3, name="out")(inputs))
        run = train(cluster2, model, loss=loss, metrics=metrics, validation=make_rows(), epochs=1)
        run.wait(60)
        runs.append(run)
    assert runs[0].history.evaluations[-1].values == runs[1].history.evaluations[-1].values
    with pytest.raises(ValueError, match="loss names the output 'x'; the model has out"):
        train(cluster2, model, loss={"x": "mse"})
    with pytest.raises(ValueError, match="loss has 2 parts; dtkit trains Keras models with one output"):
        train(cluster2, model, loss=["mse", "mae"])


def test_frozen_layers_stay_as_they_are(cluster2: dtkit.Cluster):
    model = make_model()
    model.layers[0].trainable = False
    run = train(cluster2, model)
    run.wait(60)
    frozen, expected = run.model.layers[0].get_weights(), make_model().layers[0].get_weights()
    assert all(np.array_equal(a, b) for a, b in zip(frozen, expected, strict=True))
    assert len(run.model.trainable_variables) == 2


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, _index: int) -> Any:
        return make_rows()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": dtkit.Pipeline(2, 2)}, "can't be cut or sharded"),
        ({"strategy": dtkit.Sharded()}, "can't be cut or sharded"),
        ({"training_step": lambda _model, _batch: None}, "training_step= runs a torch model"),
        ({"loss": None}, "net was not compiled, and loss= was not given"),
        ({"optimizer": None}, "net was not compiled, and optimizer= was not given"),
        ({"loss": "crossentropie"}, "loss has 'crossentropie', which Keras doesn't know; give a name"),
        ({"loss": keras.losses.MeanSquaredError("sum")}, "loss has the reduction 'sum'.*must be a mean"),
        ({"loss": torch.nn.MSELoss()}, r"loss has MSELoss\(\), which is not one of Keras"),
        ({"metrics": ["acuracy"]}, "metrics has 'acuracy', which Keras doesn't know"),
        ({"metrics": [3]}, "metrics has 3, which is not one of Keras"),
        ({"optimizer": "adamm"}, "optimizer is 'adamm', which Keras doesn't know as one; give a name such as 'adam'"),
        ({"optimizer": keras.optimizers.Adam}, r"optimizer is <class .*as in keras\.optimizers\.SGD\(0\.1\)"),
        (
            {"optimizer": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())},
            "LossScaleOptimizer.*Give its inner_optimizer",
        ),
        ({"optimizer": keras.optimizers.SGD(loss_scale_factor=8.0)}, "loss_scale_factor=8; dtkit doesn't scale"),
        ({"optimizer": keras.optimizers.SGD(use_ema=True)}, "use_ema=True; fit copies the averages.*leave use_ema"),
        ({"rows": make_rows()[0]}, r"data is one array; a Keras model needs \(inputs\.\.\., target\)"),
        ({"rows": Batches()}, "data is a Keras Batches, whose items are batches; give arrays"),
        ({"validation": make_rows()[0]}, "validation is one array; a Keras model needs"),
        ({"callbacks": [keras.callbacks.EarlyStopping()]}, r"EarlyStopping of Keras.*use dtkit\.EarlyStopping\("),
        ({"callbacks": [keras.callbacks.LambdaCallback()]}, "LambdaCallback of Keras.*use a function of the run"),
        ({"lr_scheduler": keras.optimizers.schedules.ExponentialDecay(0.1, 9, 0.9)}, "give it to the optimizer"),
        ({"optimizer": make_scheduled(), "lr_scheduler": lambda _optimizer: None}, "which would win; leave one"),
    ],
)
def test_what_keras_models_cannot_do_is_refused(cluster2: dtkit.Cluster, options: dict[str, Any], message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        train(cluster2, **options)


class OwnLoss(keras.losses.Loss):
    def call(self, target: Any, output: Any) -> Any:
        return keras.ops.mean(keras.ops.square(target - output), -1)


class OwnMetric(keras.metrics.MeanAbsoluteError):
    pass


class OwnOptimizer(keras.optimizers.SGD):
    pass


@pytest.mark.parametrize("compiled", [False, True])
def test_losses_metrics_and_optimizers_of_a_notebook_travel_by_value(cluster2: dtkit.Cluster, *, compiled: bool):
    options = {"loss": OwnLoss(), "optimizer": OwnOptimizer(0.01), "metrics": [OwnMetric(name="own")]}
    model = make_model()
    if compiled:
        model.compile(**options)
    arguments = dict.fromkeys(options) if compiled else options
    run = train(cluster2, model, validation=make_rows(), epochs=1, **arguments)
    run.wait(60)
    expected = train(cluster2, epochs=1, optimizer=keras.optimizers.SGD(0.01), metrics=["mae"], validation=make_rows())
    expected.wait(60)
    values, others = (r.history.evaluations[-1].values for r in (run, expected))
    assert (values["loss"], values["own"]) == pytest.approx((others["loss"], others["mae"]), rel=1e-9)
    check_equal(run.model, expected.model)


def test_early_stopping_monitors_metrics_of_keras(cluster2: dtkit.Cluster):
    metrics = ["mae", keras.metrics.MeanSquaredError(), keras.losses.mean_squared_error]
    stopping = dtkit.EarlyStopping(patience=1, monitor="mean_absolute_percentage_error")
    with pytest.raises(ValueError, match=r"evaluated is loss, mae, mean_squared_error, mean_squared_error, all of it"):
        train(cluster2, metrics=metrics, validation=make_rows(), callbacks=[stopping])
    stopping = dtkit.EarlyStopping(patience=1, monitor="mae", min_delta=1e9)
    run = train(cluster2, metrics=metrics, validation=make_rows(), callbacks=[stopping], epochs=5)
    run.wait(60)
    assert (run.status.state.value, run.status.step) == ("stopped", 8)


def test_schedule_of_torch_sets_the_learning_rate(cluster2: dtkit.Cluster):
    run = train(
        cluster2,
        optimizer=keras.optimizers.SGD(0.1),
        batch_size=ROWS,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        lr_scheduler_every="epoch",
    )
    run.wait(60)
    expected = make_model()
    expected.compile(loss="mse", optimizer=keras.optimizers.SGD(0.1))
    halve = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 * 0.5**epoch)
    expected.fit(*make_rows(), batch_size=ROWS, epochs=4, callbacks=[halve], verbose=0)
    check_equal(run.model, expected)


class Extreme(keras.metrics.Metric):
    """Largest absolute value of the outputs, from a start value on."""

    def __init__(self, start: float, **options: Any) -> None:
        super().__init__(**options)
        self.start = start
        self.top = self.add_weight(initializer=keras.initializers.Constant(start), name="top")

    def update_state(self, target: Any, output: Any, sample_weight: Any = None) -> None:
        del target, sample_weight
        self.top.assign(keras.ops.maximum(self.top, keras.ops.max(keras.ops.abs(output))))

    def result(self) -> Any:
        return self.top + 0.0

    def reset_state(self) -> None:
        self.top.assign(self.start)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "start": self.start}


@pytest.mark.parametrize("start", [0.0, float("-inf")])
def test_metric_that_is_not_a_sum_is_refused(cluster2: dtkit.Cluster, start: float):
    message = "a metric of Keras has the variable 'top', which is not a sum over batches"
    with pytest.raises(FirstBatchError, match=f": TypeError: {message}.*Keep sums in its variables"):
        train(cluster2, metrics=[Extreme(start)], validation=make_rows())
    run = train(cluster2, metrics=["mae", Extreme(start)])
    run.wait(60)
    with pytest.raises(EngineError, match=message):
        run.evaluate(make_rows())


class ScaledError(keras.metrics.MeanAbsoluteError):
    """Metric with a variable that no batch changes."""

    def __init__(self, scale: float, name: str = "scaled") -> None:
        super().__init__(name=name)
        self.scale = self.add_weight(initializer=keras.initializers.Constant(scale), name="scale")
        self.value = scale

    def result(self) -> Any:
        return self.scale * super().result()

    def reset_state(self) -> None:
        super().reset_state()
        self.scale.assign(self.value)

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "scale": self.value}


def test_constant_in_a_metric_is_not_added_up(cluster2: dtkit.Cluster):
    run = train(cluster2, metrics=["mae", ScaledError(3.0)])
    run.wait(60)
    values = run.evaluate(make_rows()).values
    assert values["scaled"] == pytest.approx(3 * values["mae"], rel=1e-6)


def test_options_of_compile_that_would_be_ignored_are_refused(cluster2: dtkit.Cluster):
    for name, value in (("loss_weights", [2.0]), ("weighted_metrics", ["mae"])):
        model = make_model()
        model.compile(loss="mse", optimizer="sgd", **{name: value})
        with pytest.raises(ValueError, match=rf"net was compiled with {name}=.* which dtkit doesn't support"):
            train(cluster2, model, loss=None, optimizer=None)


def test_own_training_step_is_refused(cluster2: dtkit.Cluster):
    class Stepping(keras.Sequential):
        def train_step(self, *_arguments: Any) -> Any:
            raise AssertionError

    with pytest.raises(TypeError, match=r"Stepping has its own train_step, which cluster\.train doesn't call"):
        train(cluster2, Stepping([keras.Input((4,)), keras.layers.Dense(3)]))


def test_sample_weights_are_refused(cluster2: dtkit.Cluster):
    weights = np.ones(ROWS)
    with pytest.raises(ValueError, match=r"data has 3 arrays, and net takes 1 inputs and a target.*Sample weights"):
        train(cluster2, rows=(*make_rows(), weights))
    with pytest.raises(TypeError, match=r"no argument sample_weight=; rows have no weights here"):
        train(cluster2, sample_weight=weights)
    with pytest.raises(ValueError, match=r"validation has 3 arrays"):
        train(cluster2, validation=(*make_rows(), weights))


def test_lambda_layer_is_refused_with_a_remedy(cluster2: dtkit.Cluster):
    with pytest.raises(ValueError, match=r"net has a Lambda layer of Python code.*subclass of keras\.Layer"):
        train(cluster2, make_model(keras.layers.Lambda(lambda x: 2 * x)))


def test_class_that_keras_cannot_rebuild_is_refused(cluster2: dtkit.Cluster):
    class Plain(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.dense(x)

    model = Plain()
    model(make_rows()[0][:1])
    with pytest.raises(ValueError, match=r"Keras can't rebuild Plain from its configuration.*Let __init__ take"):
        train(cluster2, model)


def test_class_without_a_configuration_is_refused(cluster2: dtkit.Cluster):
    class Sized(keras.Model):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(width)

        def call(self, x: Any) -> Any:
            return self.dense(x)

    model = Sized(3)
    model(make_rows()[0][:1])
    with pytest.raises(ValueError, match=r"can't save the configuration of Sized.*get_config\(\)"):
        train(cluster2, model)


def test_model_with_several_outputs_is_refused(cluster2: dtkit.Cluster):
    inputs = keras.Input((4,))
    with pytest.raises(ValueError, match=r"pair has 2 outputs; dtkit trains Keras models with one\. Concatenate"):
        train(
            cluster2, keras.Model(inputs, [keras.layers.Dense(3)(inputs), keras.layers.Dense(3)(inputs)], name="pair")
        )


def test_keras_model_is_refused_where_only_torch_models_fit(cluster2: dtkit.Cluster):
    """With Keras's torch backend it is a torch module, too."""
    with pytest.raises(TypeError, match=r"model is net of Keras, which only cluster\.train takes"):
        cluster2.broadcast(make_model())


def test_layer_is_refused(cluster2: dtkit.Cluster):
    with pytest.raises(TypeError, match=r"Keras Dense, which is not a keras\.Model; wrap it"):
        train(cluster2, keras.layers.Dense(3))


def test_model_without_variables_is_refused(cluster2: dtkit.Cluster):
    with pytest.raises(ValueError, match="has no variables yet"):
        train(cluster2, keras.Sequential([keras.layers.Dense(3)]))


@pytest.mark.slow
def test_all_this_holds_with_the_tensorflow_backend():
    check_with_tensorflow(__file__, "-m", "not slow")

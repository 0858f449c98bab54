"""One measurement of :mod:`tests.bench.keras`: ``python -m tests.bench.keras_work MODE`` prints the figure last."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

ROWS, BATCH = 16_384, 256
WARM_EPOCHS, EPOCHS = 1, 4


def make_rows() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(ROWS, 64)).astype("float32")
    return inputs, generator.integers(10, size=ROWS)


def make_model() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(512, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((64,)), *dense, keras.layers.Dense(10)])


def make_loss() -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def measure_fit() -> float:
    """Measure one worker's `fit`."""
    import keras

    model = make_model()
    model.compile(keras.optimizers.SGD(0.01), make_loss(), jit_compile=False)
    rows = make_rows()
    model.fit(*rows, batch_size=BATCH, epochs=WARM_EPOCHS, verbose=0)
    start = time.perf_counter()
    model.fit(*rows, batch_size=BATCH, epochs=EPOCHS, verbose=0)
    return EPOCHS * ROWS / (time.perf_counter() - start)


def measure_dtkit() -> float:
    """Measure `cluster.train` on two engines."""
    import keras

    import dtkit

    steps = ROWS // BATCH
    with dtkit.Cluster(2, threads=1) as cluster:
        run = cluster.train(
            make_model(),
            make_rows(),
            loss=make_loss(),
            optimizer=keras.optimizers.SGD(0.01),
            batch_size=BATCH,
            steps=steps * (WARM_EPOCHS + EPOCHS),
            start=False,
        )
        run.step(steps * WARM_EPOCHS)
        start = time.perf_counter()
        run.resume()
        run._driver.wait(300)  # like run.wait(), without its text progress
        return EPOCHS * ROWS / (time.perf_counter() - start)


def measure_mwms() -> float:
    """Measure a custom loop under MultiWorkerMirroredStrategy, since `fit` of Keras 3 fails there."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model()
        loss = make_loss()
        variables = [v.value for v in model.trainable_variables]
    data = tf.data.Dataset.from_tensor_slices(make_rows()).batch(BATCH, drop_remainder=True).repeat()
    batches = iter(strategy.experimental_distribute_dataset(data))

    @tf.function
    def train_step(batch: Any) -> None:
        def step(inputs: Any, labels: Any) -> None:
            with tf.GradientTape() as tape:
                value = loss(labels, model(inputs, training=True)) / strategy.num_replicas_in_sync
            gradients = tape.gradient(value, variables)
            context = tf.distribute.get_replica_context()
            for variable, gradient in zip(variables, context.all_reduce("sum", gradients), strict=True):
                variable.assign_sub(0.01 * gradient)

        strategy.run(step, batch)

    def train(epochs: int) -> None:
        for _ in range(epochs * ROWS // BATCH):
            train_step(next(batches))

    train(WARM_EPOCHS)
    start = time.perf_counter()
    train(EPOCHS)
    return EPOCHS * ROWS / (time.perf_counter() - start)


if __name__ == "__main__":
    print({"fit": measure_fit, "dtkit": measure_dtkit, "mwms": measure_mwms}[sys.argv[1]]())

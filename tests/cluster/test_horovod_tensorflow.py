"""Horovod's interfaces for TensorFlow and Keras on two ranks, compared with one worker."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dtkit.errors import EngineError
from tests.support.small import check_usable

if TYPE_CHECKING:
    from pathlib import Path

    import dtkit

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.cluster, pytest.mark.slow]

BOUND = 1e-12


def make_rows() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(32, 4)), generator.normal(size=(32, 3))


def make_model() -> Any:
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras

    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(3)])


def train_by_fit(passes: int, *, distributed: bool) -> list[np.ndarray]:
    """Train with momentum by `fit`; with several passes, their gradients are averaged before an update."""
    model = make_model()
    import keras

    x, y = make_rows()
    optimizer: Any = keras.optimizers.SGD(0.1, momentum=0.9)
    callbacks, batch_size = [], 32
    if distributed:
        import horovod.tensorflow.keras as hvd

        hvd.init()
        if hvd.rank() == 1:
            model.layers[0].kernel.assign(model.layers[0].kernel * 2.0)
        hvd.broadcast_variables(model.variables, root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            optimizer, backward_passes_per_step=passes, average_aggregated_gradients=True
        )
        callbacks = [hvd.callbacks.MetricAverageCallback(), hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        x, y = x[hvd.rank() :: 2], y[hvd.rank() :: 2]
        batch_size = 16 // passes
    model.compile(optimizer, "mse")  # in a script, without XLA
    model.fit(x, y, batch_size=batch_size, epochs=5, shuffle=False, callbacks=callbacks, verbose=0)
    return [v.numpy() for v in model.trainable_variables]


def call_alone(function: Any, *args: Any, **options: Any) -> Any:
    """Call the function in a fresh process without a process group."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args, **options).result(120)


@pytest.mark.parametrize("passes", [1, 2])
def test_fit_trains_like_one_worker(cluster2: dtkit.Cluster, passes: int):
    expected = call_alone(train_by_fit, 1, distributed=False)
    for weights in cluster2.torchrun(train_by_fit, passes, horovod=True, distributed=True):
        assert max(np.abs(a - b).max() for a, b in zip(weights, expected, strict=True)) < BOUND


def train_by_tape(*, distributed: bool, graph: bool, local: bool) -> list[np.ndarray]:
    model = make_model()
    import keras
    import tensorflow as tf

    x, y = make_rows()
    optimizer = keras.optimizers.Adam(0.05)
    optimizer.build(model.trainable_variables)
    if distributed:
        import horovod.tensorflow as hvd

        hvd.init()
        x, y = x[hvd.rank() :: 2], y[hvd.rank() :: 2]

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        if distributed:
            tape = hvd.DistributedGradientTape(tape)
            if local:
                tape.register_local_source(model.trainable_variables[-1])
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)

    run = tf.function(step) if graph else step
    for _ in range(5):
        run()
    return [v.numpy() for v in model.trainable_variables]


@pytest.mark.parametrize("graph", [False, True])
def test_tape_gives_the_gradients_of_all_rows(cluster2: dtkit.Cluster, *, graph: bool):
    expected = call_alone(train_by_tape, distributed=False, graph=graph, local=False)
    for weights in cluster2.torchrun(train_by_tape, horovod=True, distributed=True, graph=graph, local=False):
        assert max(np.abs(a - b).max() for a, b in zip(weights, expected, strict=True)) < BOUND


def test_local_source_stays_on_its_rank(cluster2: dtkit.Cluster):
    first, second = cluster2.torchrun(train_by_tape, horovod=True, distributed=True, graph=True, local=True)
    assert np.abs(first[-1] - second[-1]).max() > 1e-3


def run_operations() -> dict[str, Any]:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    rank = hvd.rank()

    @tf.function
    def reduce(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = hvd.allreduce(x, op=hvd.Sum)
        return total, tape.gradient(total, x)

    rows = tf.Variable(tf.fill((rank + 1, 2), float(rank + 1)))
    with tf.GradientTape() as tape:
        gathered = hvd.allgather(rows)
    total, gradient = reduce(tf.ones(3, tf.float64))
    one_row = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([rank]), tf.constant([2, 2]))
    slices = hvd.allreduce(one_row, op=hvd.Sum)
    pair = hvd.grouped_allreduce([one_row, tf.ones(2)], op=hvd.Sum)
    exchanged, received = hvd.alltoall(tf.range(3), splits=[1, 2])
    variable = tf.Variable(float(rank))
    hvd.broadcast_variables([variable], root_rank=1)
    return {
        "sum": total.numpy().tolist(),
        "gradient": gradient.numpy().tolist(),
        "gathered": gathered.numpy()[:, 0].tolist(),
        "gathered gradient": tape.gradient(gathered, rows).numpy().tolist(),
        "slices": tf.convert_to_tensor(slices).numpy().tolist(),
        "pair": [tf.convert_to_tensor(value).numpy().tolist() for value in pair],
        "bfloat16": hvd.allreduce(tf.ones(2, tf.bfloat16)).dtype.name,
        "exchanged": exchanged.numpy().tolist(),
        "received": received.numpy().tolist(),
        "variable": float(variable.numpy()),
        "scattered": hvd.reducescatter(tf.ones((2, 2)), op=hvd.Sum).numpy().tolist(),
        "objects": hvd.allgather_object(rank),
    }


def test_operations_in_eager_mode_and_graphs(cluster2: dtkit.Cluster):
    for rank, results in enumerate(cluster2.torchrun(run_operations, horovod=True)):
        assert results == {
            "sum": [2.0] * 3,
            "gradient": [2.0] * 3,
            "gathered": [1.0, 2.0, 2.0],
            "gathered gradient": [[1.0, 1.0]] * (rank + 1),
            "slices": [[1.0, 1.0]] * 2,
            "pair": [[[1.0, 1.0]] * 2, [2.0, 2.0]],
            "bfloat16": "bfloat16",
            "exchanged": [[0, 0], [1, 2, 1, 2]][rank],
            "received": [[1, 1], [2, 2]][rank],
            "variable": 1.0,
            "scattered": [[2.0, 2.0]],
            "objects": [0, 1],
        }


def normalize(*, distributed: bool) -> list[np.ndarray]:
    """Normalize ten rows and four more, and return the layer's weights and the gradients."""
    make_model()  # sets the type
    import keras
    import tensorflow as tf

    x = make_rows()[0][:14]
    layer: Any = keras.layers.BatchNormalization()
    if distributed:
        import horovod.tensorflow as hvd

        hvd.init()
        x = x[:10] if hvd.rank() == 0 else x[10:]
        layer = hvd.SyncBatchNormalization()
    inputs = tf.constant(x + 1.0)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        loss = tf.reduce_sum(layer(inputs, training=True) ** 3)
    gradient = tape.gradient(loss, inputs)
    if distributed:
        gradient = hvd.allgather(gradient)
    return [gradient.numpy(), *layer.get_weights()]


def test_batch_norm_uses_the_rows_of_all_ranks(cluster2: dtkit.Cluster):
    expected = call_alone(normalize, distributed=False)
    for results in cluster2.torchrun(normalize, horovod=True, distributed=True):
        assert max(np.abs(a - b).max() for a, b in zip(results, expected, strict=True)) < BOUND


def ask_for_what_cannot_be() -> list[str]:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    os.environ["HOROVOD_CHECK"] = "1"
    hvd.init()
    sizes = tf.function(lambda: [hvd.rank_op(), hvd.size_op(), hvd.local_size_op(), hvd.process_set_included_op()])()
    assert [int(size) for size in sizes] == [hvd.rank(), 2, 2, 1]
    errors = []
    for ask in (
        lambda: hvd.allreduce(tf.ones(2 + hvd.rank())),
        lambda: hvd.alltoall(tf.ones(3), splits=[4, 4]),
        lambda: hvd.size_op(process_set_id=9),
        tf.function(lambda: hvd.allreduce(tf.ones(2 + hvd.rank()))),
        tf.function(lambda: hvd.allreduce(tf.ones(2)), jit_compile=True),
    ):
        try:
            ask()
        except (tf.errors.OpError, ValueError, NotImplementedError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def test_errors_are_those_of_horovod(cluster2: dtkit.Cluster):
    first, second = cluster2.torchrun(ask_for_what_cannot_be, horovod=True)
    for shape, splits, number, in_graph, compiled in (first, second):
        assert shape.startswith("FailedPreconditionError: ")
        assert "Mismatched shape of allreduce" in shape
        assert splits.startswith("InvalidArgumentError: splits are [4, 4]")
        assert "process_set_id is 9; the registered ones are 0" in number
        assert "Mismatched shape of allreduce.graph_allreduce" in in_graph
        assert "jit_compile=False" in compiled
    assert first[0] == second[0]


SESSION = """
import sys
import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
names = [f"x{k}" for k in range(40)]
with tf.Graph().as_default():
    order = names if hvd.rank() == 0 else names[::-1]
    sums = {name: hvd.allreduce(tf.fill([2], float(names.index(name))), op=hvd.Sum, name=name) for name in order}
    variable = tf.compat.v1.Variable([float(hvd.rank())])
    broadcasted = hvd.broadcast_([variable], 1)
    source = tf.constant([1.0])
    gradient = tf.gradients(hvd.broadcast(source, 0), source)[0]
    with tf.compat.v1.Session() as session:
        results = session.run(sums)
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(broadcasted)[0] == session.run(variable) == 1.0
        assert session.run(gradient) == (1.0 if hvd.rank() == 0 else 0.0)
assert all(results[name].tolist() == [2.0 * k] * 2 for k, name in enumerate(names)), results
"""


def test_operations_of_a_session_are_matched_by_name_and_run_on_all_ranks(cluster2: dtkit.Cluster, tmp_path: Path):
    script = tmp_path / "session.py"
    script.write_text("import os\nos.environ['HOROVOD_CHECK'] = '1'\n" + SESSION)
    assert cluster2.torchrun(script, horovod=True) == [0, 0]
    script.write_text(SESSION)
    with pytest.raises(EngineError, match=r"NotImplementedError: a session of TensorFlow 1 .* HOROVOD_CHECK=1"):
        cluster2.torchrun(script, horovod=True)


def warm_up() -> list[float]:
    model = make_model()
    import horovod.keras as hvd
    import keras

    hvd.init()
    x, y = make_rows()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=0.9)), "mse", jit_compile=False)
    callbacks = [
        hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2),
        hvd.callbacks.LearningRateScheduleCallback(0.4, 0.1, start_epoch=2, staircase=True),
    ]
    history = model.fit(x, y, batch_size=8, epochs=4, callbacks=callbacks, verbose=0)
    assert model.optimizer.momentum == 0.9
    return history.history["lr"]


def test_learning_rate_warms_up_and_decays(cluster2: dtkit.Cluster):
    for rates in cluster2.torchrun(warm_up, horovod=True):
        assert rates == pytest.approx([0.3, 0.4, 0.4, 0.04])


def train_elastically() -> tuple[list[np.ndarray], int]:
    model = make_model()
    import horovod.keras as hvd
    import keras

    hvd.init()
    x, y = (rows[hvd.rank() :: 2] for rows in make_rows())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse", jit_compile=False)
    failures = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < 5:
            model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
            if state.epoch == 2 and not failures:
                failures.append(1)
                raise hvd.HorovodInternalError("planted")
            state.epoch += 1
            state.commit()

    train(hvd.elastic.KerasState(model, epoch=0))
    return [v.numpy() for v in model.trainable_variables], len(failures)


def test_elastic_run_repeats_the_epoch_that_failed(cluster2: dtkit.Cluster):
    expected = call_alone(train_by_fit, 1, distributed=False)
    for weights, num_failures in cluster2.torchrun(train_elastically, horovod=True):
        assert num_failures == 1
        assert max(np.abs(a - b).max() for a, b in zip(weights, expected, strict=True)) < BOUND


def train_and_lose_an_engine(slot_to_lose: int, flag: Path) -> tuple[list[np.ndarray], list[int], int]:
    """Train in a graph, each rank on its share of 24 rows: two and three ranks average the same gradients."""
    model = make_model()
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    hvd.init()
    x, y = (rows[:24] for rows in make_rows())
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    sizes = []

    @tf.function(reduce_retracing=True)
    def step(inputs: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs) - targets))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < 6:
            if state.step == 3 and int(os.environ["DTKIT_SCRIPT_SLOT"]) == slot_to_lose and not flag.exists():
                flag.touch()
                os.kill(os.getppid(), signal.SIGKILL)
                signal.pause()  # this process ends with its engine, and takes no further step
            own = slice(hvd.rank(), None, hvd.size())
            step(tf.constant(x[own]), tf.constant(y[own]))
            state.step += 1
            state.commit()

    state = hvd.elastic.TensorFlowKerasState(model, optimizer=optimizer, step=0)
    state.register_reset_callbacks([lambda: sizes.append(hvd.size())])
    train(state)
    return [v.numpy() for v in model.trainable_variables], sizes, hvd.size()


def train_24_rows_alone() -> list[np.ndarray]:
    model = make_model()
    import keras

    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
    model.fit(*(rows[:24] for rows in make_rows()), batch_size=24, epochs=6, shuffle=False, verbose=0)
    return [v.numpy() for v in model.trainable_variables]


@pytest.mark.parametrize("cluster", [3], indirect=True)
@pytest.mark.parametrize(("slot", "options", "size"), [(1, {}, 3), (0, {"on_failure": "shrink"}, 2)])
def test_elastic_run_goes_on_after_the_loss_of_an_engine(
    cluster: dtkit.Cluster, tmp_path: Path, slot: int, options: dict[str, Any], size: int
):
    expected = call_alone(train_24_rows_alone)
    results = cluster.torchrun(train_and_lose_an_engine, slot, tmp_path / "flag", horovod=True, **options)
    assert (tmp_path / "flag").exists()
    assert len(results) == size
    for weights, _, last_size in results:
        assert last_size == size
        assert max(np.abs(a - b).max() for a, b in zip(weights, expected, strict=True)) < BOUND
    assert any(size in sizes for _, sizes, _ in results)
    check_usable(cluster)


def save_and_load(folder: Path) -> tuple[float, str]:
    model = make_model()
    import horovod.keras as hvd
    import keras

    hvd.init()
    x, y = make_rows()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse", jit_compile=False)
    model.fit(x, y, verbose=0)
    model.save(folder / f"{hvd.rank()}.keras")
    loaded = hvd.load_model(folder / f"{hvd.rank()}.keras")
    pairs = zip(loaded.optimizer.variables, model.optimizer.variables, strict=True)
    difference = max(float(np.abs(a.numpy() - b.numpy()).max()) for a, b in pairs)
    return difference, type(loaded.optimizer).__mro__[1].__name__


def test_loaded_model_goes_on_with_a_distributed_optimizer(cluster2: dtkit.Cluster, tmp_path: Path):
    assert cluster2.torchrun(save_and_load, tmp_path, horovod=True) == [(0.0, "_DistributedMixin")] * 2

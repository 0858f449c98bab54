"""One's own TensorFlow loops on engines, compared with one worker."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import dtkit
from dtkit.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cluster.conftest import SharedCluster

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _own_engines(shared: SharedCluster) -> Iterator[None]:
    """Use engines whose Keras has the tensorflow backend here only: a process can't change it."""
    shared.close()
    yield
    shared.close()


def make_rows() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(30, 4)), generator.normal(size=(30, 3))


def train_by_tape(first: int, samples_count: bool, graph: bool) -> list[np.ndarray]:  # noqa: FBT001
    """Train on this rank's rows: rank 0 has the first ones."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    import tensorflow as tf
    import torch.distributed as dist

    from dtkit.integrations.tensorflow import DistributedGradientTape, broadcast_variables

    keras.config.set_floatx("float64")
    rank = dist.get_rank() if dist.is_initialized() else None
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, kernel_initializer="ones")])
    if rank == 1:
        model.layers[0].kernel.assign(tf.zeros((4, 3), tf.float64))
    if rank is not None:
        broadcast_variables(model.variables)
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(model.trainable_variables)
    rows = make_rows()
    x, y = (part if rank is None else part[:first] if rank == 0 else part[first:] for part in rows)
    make_tape = tf.GradientTape if rank is None else DistributedGradientTape
    options = {"samples": len(x)} if samples_count and rank is not None else {}

    def step() -> None:
        with make_tape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        variables = [v.value for v in model.trainable_variables]
        optimizer.apply(tape.gradient(loss, variables, **options), model.trainable_variables)

    run = tf.function(step) if graph else step
    for _ in range(4):
        run()
    return [v.numpy() for v in model.trainable_variables]


@pytest.mark.parametrize("graph", [False, True])
def test_tape_gives_the_gradients_of_all_rows(cluster2: dtkit.Cluster, *, graph: bool):
    (expected,) = [train_alone(train_by_tape, 30, False, graph)]
    for weights in cluster2.run(train_by_tape, 10, True, graph):
        assert all(np.abs(a - b).max() < 1e-12 for a, b in zip(weights, expected, strict=True))


def train_alone(function: Any, *args: Any) -> Any:
    """Call the function in a fresh process without a process group."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result(120)


def train_on_shards(batch_size: int) -> tuple[list[np.ndarray], list[int]]:
    """Train on this rank's part of a tf.data.Dataset; return weights and the number of rows of each batch."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import tensorflow as tf
    import torch.distributed as dist

    from dtkit.integrations.tensorflow import DistributedGradientTape, shard_dataset

    rows = tf.data.Dataset.from_tensor_slices(make_rows())
    distributed = dist.is_initialized()
    batches = shard_dataset(rows, batch_size) if distributed else rows.batch(batch_size)
    weights = tf.Variable(tf.ones((4, 3), tf.float64))
    counts = []
    for x, y in batches:
        with DistributedGradientTape() if distributed else tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weights - y))
        options = {"samples": len(x)} if distributed else {}
        weights.assign_sub(0.1 * tape.gradient(loss, weights, **options))
        counts.append(len(x))
    return [weights.numpy()], counts


def test_shards_of_tf_data_have_all_rows_and_equally_many_batches(cluster2: dtkit.Cluster):
    (expected,), _ = train_alone(train_on_shards, 29)
    results = cluster2.run(train_on_shards, 29)
    assert [counts for _, counts in results] == [[15, 1], [14, 0]]
    assert all(np.abs(weights - expected).max() < 1e-12 for (weights,), _ in results)


def train_by_fit(count: int) -> tuple[list[np.ndarray], float, float]:
    """Train by `fit` on this rank's half, and return weights, the merged metric, and the last loss."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    import torch.distributed as dist

    from dtkit.integrations.tensorflow import DistributedOptimizer, LogCallback, merge_metrics

    keras.config.set_floatx("float64")
    distributed = dist.is_initialized()
    x, y = (part[dist.get_rank() :: 2] if distributed else part for part in make_rows())
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, kernel_initializer="ones")])
    optimizer: Any = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(
        loss="mse", optimizer=DistributedOptimizer(optimizer) if distributed else optimizer, jit_compile=False
    )
    model.fit(
        x,
        y,
        batch_size=len(x),
        epochs=count,
        shuffle=False,
        verbose=0,
        callbacks=[LogCallback()] if distributed else [],
    )
    metric = keras.metrics.MeanAbsoluteError()
    metric.update_state(y, model(x))
    if distributed:
        merge_metrics([metric])
    return [v.numpy() for v in model.trainable_variables], float(metric.result()), 0.0


def test_fit_with_a_distributed_optimizer_and_merged_metrics(cluster2: dtkit.Cluster):
    weights, metric, _ = train_alone(train_by_fit, 4)
    task = cluster2.submit(train_by_fit, 4)
    for other, other_metric, _ in task.result(120):
        assert all(np.abs(a - b).max() < 1e-12 for a, b in zip(weights, other, strict=True))
        assert other_metric == pytest.approx(metric, rel=1e-12)
    assert len(task.to_pandas()) == 8  # four batches by rank


def train_as_the_guide(root: Path) -> float:
    """Run the function that the guide shows, with seeded weights."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    import torch.distributed as dist

    if not dist.is_initialized():  # one process alone
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    guide = (root / "docs/guides/keras.md").read_text()
    (code,) = re.findall(r"```text\n(def train_own_loop.*?)\n\n\ncluster", guide, re.DOTALL)
    names: dict[str, Any] = {"dtkit": dtkit, "__name__": "__main__"}  # as in a notebook
    exec(code, names)
    inputs = np.random.default_rng(0).normal(size=(129, 8)).astype("float32")
    keras.config.set_dtype_policy("float32")  # other tests leave "float64" on the engines, with other first weights
    keras.utils.set_random_seed(0)
    return float(names["train_own_loop"](inputs, inputs[:, :3].argmax(1), epochs=5))


def test_loop_of_the_guide_equals_that_of_one_process(cluster2: dtkit.Cluster, root: Path):
    expected = train_alone(train_as_the_guide, root)
    task = cluster2.submit(train_as_the_guide, root)
    first, second = task.result(120)
    assert first == second == pytest.approx(expected, abs=1.5 / (5 * 129))  # rounding may decide one row
    logged = task.to_pandas()
    assert logged["samples"].sum() == 5 * 129
    assert logged.groupby("rank")["samples"].sum().tolist() == [5 * 65, 5 * 64]


def ask_for_what_is_wrong(case: str) -> None:
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import tensorflow as tf

    from dtkit.integrations import tensorflow as ours

    variable = tf.Variable([1.0, 2.0])
    if case == "optimizer":
        ours.DistributedOptimizer("sgd")  # type: ignore[arg-type]
    elif case == "root":
        ours.broadcast_variables([variable], root_rank=9)
    elif case == "variables":
        ours.broadcast_variables(variable)
    elif case == "xla":
        tf.function(lambda: ours.average_gradients([tf.ones(2)]), jit_compile=True)()
    elif case == "dataset":
        ours.shard_dataset([1, 2], 8)
    elif case == "batch":
        ours.shard_dataset(tf.data.Dataset.range(9), 1)
    elif case == "metrics":
        ours.merge_metrics([3])  # type: ignore[list-item]
    else:
        with ours.DistributedGradientTape() as tape:
            loss = tf.reduce_sum(variable * variable)
        tape.gradient(loss, [variable], samples=int(case))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("optimizer", "optimizer is 'sgd'; give an object of keras.optimizers"),
        ("root", "root_rank=9; the ranks are 0 to 1"),
        ("variables", r"variables must be a list .*\[variable\]"),
        ("metrics", r"metrics must be a list .*\[metric\]"),
        ("xla", r"XLA compiles this graph.*jit_compile=False"),
        ("dataset", r"dataset is a list; give a tf\.data\.Dataset of single rows"),
        ("batch", "batch_size=1 is the number of rows over all 2 ranks"),
        ("0", "samples=0 here, and 0 over all ranks; give each rank's number of rows"),
        ("-1", "samples=-1 here, and -2 over all ranks"),
    ],
)
def test_bad_arguments_are_refused(cluster2: dtkit.Cluster, case: str, message: str):
    with pytest.raises(EngineError, match=message):
        cluster2.run(ask_for_what_is_wrong, case)
    assert cluster2.run(len, "ab") == [2, 2]


def make_metric(kind: str) -> Any:
    """Return a metric of Keras's, or of a notebook's class."""
    import keras

    class Weighted(keras.metrics.Metric):  # sums, and a constant that no batch changes
        def __init__(self) -> None:
            super().__init__(name="weighted")
            self.total = self.add_weight(initializer="zeros", name="total")
            self.scale = self.add_weight(initializer="ones", name="scale")

        def update_state(self, target: Any, output: Any, sample_weight: Any = None) -> None:
            self.total.assign_add(keras.ops.sum(target * output))

        def result(self) -> Any:
            return self.scale * self.total

        def reset_state(self) -> None:
            self.total.assign(0.0)
            self.scale.assign(1.0)

    class Largest(Weighted):
        def update_state(self, target: Any, output: Any, sample_weight: Any = None) -> None:
            self.total.assign(keras.ops.maximum(self.total, keras.ops.max(output)))

    class Error(keras.metrics.Mean):  # a mean of what it is given
        def update_state(self, target: Any, output: Any, sample_weight: Any = None) -> None:
            super().update_state(keras.ops.abs(target - output))

    kinds = {"own": Weighted, "largest": Largest, "mean": Error, "r2": keras.metrics.R2Score, "auc": keras.metrics.AUC}
    return kinds[kind]()


def merge(case: str) -> list[float]:
    """Return a metric's result after merging, in two epochs. The second engine has other rows, or none."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import torch.distributed as dist

    from dtkit.integrations.tensorflow import merge_metrics

    metric = make_metric(case.partition(" ")[0])
    target, output = np.array([[0.0], [1.0], [1.0], [0.0], [1.0]]), np.array([[0.1], [0.7], [0.4], [0.6], [0.9]])
    rank = dist.get_rank() if dist.is_initialized() else None
    alone = rank is None or "alone" in case
    own = slice(0, 5) if alone else slice(0, 4) if rank == 0 else slice(4, 5)
    example = (target[:3], output[:3]) if "example" in case else None
    results = []
    for _ in range(2):
        metric.reset_state()
        if not (rank == 1 and alone):
            metric.update_state(target[own], output[own])
        for _ in range(0 if rank is None else 2 if "twice" in case else 1):
            merge_metrics([metric], example)
        results.append(float(metric.result()))
    return results


@pytest.mark.parametrize("case", ["mean", "auc", "r2", "r2 example alone", "own example", "own example alone"])
def test_merged_metrics_have_the_result_of_all_rows(cluster2: dtkit.Cluster, case: str):
    expected = train_alone(merge, case)
    assert expected[0] == expected[1] > 0
    assert cluster2.run(merge, case) == [pytest.approx(expected)] * 2


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("own", "the metric 'weighted' has an update_state of its own.*example="),
        ("largest", "the metric 'weighted' has an update_state of its own.*example="),
        ("mean twice", r"the metric 'mean' was merged before and not reset since.*call reset_state\(\)"),
        ("r2 alone", "rank 1: the metric 'r2_score' lacks variables, as it has seen no batch"),
        ("largest example", "'weighted' has the variable 'total', which is not a sum over batches.*Keep sums"),
    ],
)
def test_metrics_that_cannot_be_merged_are_refused_on_all_ranks(cluster2: dtkit.Cluster, case: str, message: str):
    with pytest.raises(EngineError, match=message):
        cluster2.run(merge, case)
    assert cluster2.run(len, "ab") == [2, 2]


def decay(interface: str) -> tuple[float, float]:
    """Return kernel and bias, which began as ones, after an update by weight decay alone that excludes biases."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    import tensorflow as tf

    if interface == "horovod":
        import dtkit.integrations.horovod.tensorflow as ours

        ours.init()
    else:
        from dtkit.integrations import tensorflow as ours
    layer = keras.layers.Dense(1, kernel_initializer="ones", bias_initializer="ones")
    layer.build((1, 1))
    optimizer = keras.optimizers.SGD(0.1, weight_decay=1.0)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    gradients = [tf.zeros(v.shape) for v in layer.trainable_variables]
    ours.DistributedOptimizer(optimizer).apply(gradients, layer.trainable_variables)
    return float(layer.kernel.numpy().item()), float(layer.bias.numpy().item())


@pytest.mark.parametrize("interface", ["own", "horovod"])
def test_distributed_optimizers_exclude_from_weight_decay_what_the_given_one_does(
    cluster2: dtkit.Cluster, interface: str
):
    assert cluster2.run(decay, interface) == [pytest.approx((0.9, 1.0))] * 2

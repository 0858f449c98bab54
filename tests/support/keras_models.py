"""Keras models in tests. A process has one backend of Keras: torch, unless the environment names another."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    import dtkit


def import_keras() -> Any:
    """Return Keras, and let engines have its backend; skip the module where Keras is not installed."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    os.environ["KERAS_BACKEND"] = keras.backend.backend()  # another module may have imported Keras before
    return keras


ROWS = 49
"""Steps of 16 rows end with one of a single row, so that a rank has none."""


def make_rows(count: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(count, 4)), generator.normal(size=(count, 3))


def make_model(*extra: Any, name: str = "net") -> Any:
    keras = import_keras()
    keras.utils.set_random_seed(0)
    first = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")
    return keras.Sequential([keras.Input((4,)), first, *extra, keras.layers.Dense(3)], name=name)


def train(cluster: dtkit.Cluster, model: Any = None, rows: Any = None, **options: Any) -> dtkit.Run:
    defaults: dict[str, Any] = {"loss": "mse", "optimizer": "sgd", "batch_size": 16}
    if "epochs" not in options:
        defaults["steps"] = 4
    return cluster.train(
        make_model() if model is None else model, make_rows() if rows is None else rows, **(defaults | options)
    )


def get_bound(dtype: str) -> float:
    """Return how far trainings may differ. Keras's torch backend computes losses in float32, whatever the type."""
    return 1e-12 if dtype == "float64" and import_keras().backend.backend() == "tensorflow" else 1e-6


def get_weights(model: Any) -> list[np.ndarray]:
    convert = import_keras().ops.convert_to_numpy
    return [np.array(convert(variable)) for variable in model.trainable_variables]


def check_equal(model: Any, expected: Any, bound: float | None = None) -> None:
    """Check that two models have the same trainable variables, by default within the bound of float64."""
    bound = get_bound("float64") if bound is None else bound
    pairs = list(zip(get_weights(model), get_weights(expected), strict=True))
    assert all(a.dtype == b.dtype for a, b in pairs)
    assert max(float(np.abs(a - b).max()) for a, b in pairs) <= bound


def check_with_tensorflow(file: str, *options: str) -> None:
    """Run the tests of a file in a process whose Keras has the tensorflow backend."""
    if importlib.util.find_spec("tensorflow") is None or import_keras().backend.backend() == "tensorflow":
        pytest.skip("TensorFlow is not installed, or this is its run")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, file]
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout

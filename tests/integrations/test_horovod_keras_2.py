"""What Horovod's scripts for Keras 2 use, under Keras 3. A fresh process, since Keras is changed in all of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("keras")

SCRIPT = """
import keras
from dtkit.integrations.horovod.keras_2 import accept_dropped_arguments
for _ in range(2):
    accept_dropped_arguments()
optimizer = keras.optimizers.RMSprop(lr=0.5)
optimizer.lr = 2 * optimizer.lr
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
model.compile(optimizer, "mse", experimental_run_tf_function=False)
print(float(optimizer.learning_rate), optimizer.get_config()["learning_rate"])
keras.optimizers.SGD(learning=0.5)
"""


SET_VALUE = """
import tensorflow as tf
from dtkit.integrations.horovod.keras_2 import accept_dropped_arguments
accept_dropped_arguments()
optimizer = tf.keras.optimizers.SGD(0.5)
tf.keras.backend.set_value(optimizer.lr, 0.25)
print(float(optimizer.learning_rate))
"""


def test_arguments_of_keras_2_are_accepted_and_others_are_refused():
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["1.0", "1.0"], done.stderr
    assert "Argument(s) not recognized: {'learning': 0.5}" in done.stderr


def test_a_learning_rate_is_set_as_in_keras_2():
    pytest.importorskip("tensorflow")
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    command = [sys.executable, "-c", SET_VALUE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["0.25"], done.stderr

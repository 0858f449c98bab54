"""A pickled Keras model in a process whose environment names another backend."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("keras")

SAVE = """
import pickle, sys
import keras
from dtkit.integrations.keras.adapter import CompileOptions, _find_module_class
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
module = _find_module_class().of(model, CompileOptions("mse", "sgd", None))
open(sys.argv[1], "wb").write(pickle.dumps(module))
"""
LOAD = """
import pickle, sys
print(pickle.loads(open(sys.argv[1], "rb").read()).keras_model.count_params())
import keras
print(keras.backend.backend())
"""


def run_with_backend(backend: str, code: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, str(path)]
    environment = {**os.environ, "KERAS_BACKEND": backend}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_engines_take_the_backend_of_the_notebook(tmp_path: Path):
    path = tmp_path / "model.pkl"
    saved = run_with_backend("torch", SAVE, path)
    assert saved.returncode == 0, saved.stderr
    loaded = run_with_backend("numpy", LOAD, path)
    assert loaded.stdout.split() == ["15", "torch"], loaded.stderr


def test_process_that_has_imported_keras_with_another_backend_is_told(tmp_path: Path):
    pytest.importorskip("tensorflow")
    path = tmp_path / "model.pkl"
    run_with_backend("torch", SAVE, path)
    refused = run_with_backend("tensorflow", "import keras" + LOAD, path)
    assert "made with Keras's torch backend, and Keras runs with tensorflow in this process" in refused.stderr
    assert "Start a new cluster, and let nothing" in refused.stderr

"""Keras models on two engines, next to one worker's `fit` and to TensorFlow's MultiWorkerMirroredStrategy.

Each measurement is a process of its own, since a process has one Keras backend. Figures are samples per second.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.bench.pairs import Sample, alternate, ratios, report

PAIRS = 5
LIMIT_S = 300.0


def keras() -> bool:
    """Compare both backends with one worker, and TensorFlow with MultiWorkerMirroredStrategy."""
    met = _compare("torch", "dtkit", "fit")
    if importlib.util.find_spec("tensorflow") is None:
        print("  tensorflow is not installed: its backend is not measured")
        return met
    return met & _compare("tensorflow", "dtkit", "fit") & _compare("tensorflow", "dtkit", "mwms")


def _compare(backend: str, measured: str, reference: str) -> bool:
    print(f"Keras with the {backend} backend, {measured} against {reference}", flush=True)
    pairs = alternate(lambda: _measure(backend, measured), lambda: _measure(backend, reference), PAIRS)
    for name, sample in zip((measured, reference), pairs, strict=True):
        print(f"  {name}: {sample} samples per second")
    return _report(backend, reference, ratios(*pairs))


def _report(backend: str, reference: str, sample: Sample) -> bool:
    least = 0.9 if reference == "mwms" else None  # two engines and one worker share the same two cores
    return report(f"samples per second against {reference}, Keras on {backend}", sample, least=least)


def _measure(backend: str, mode: str) -> float:
    environment = os.environ | {"KERAS_BACKEND": backend, "PYTHONPATH": str(Path.cwd()), "TF_CPP_MIN_LOG_LEVEL": "3"}
    if mode != "mwms":
        return _read(_start(mode, environment | ({"OMP_NUM_THREADS": "1"} if mode == "dtkit" else {})))
    workers = [f"127.0.0.1:{port}" for port in _find_free_ports(2)]
    processes = []
    for index in range(2):
        config = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
        processes.append(_start(mode, environment | {"TF_CONFIG": config}))
    return min(_read(process) for process in processes)


def _start(mode: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.bench.keras_work", mode]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _read(process: subprocess.Popen[str]) -> float:
    try:
        out, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    if process.returncode:
        raise RuntimeError(f"the measurement failed:\n{errors[-3000:]}")
    return float(out.split()[-1])


def _find_free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports

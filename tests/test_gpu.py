"""Tests that need a GPU, and only torch 2.11 or newer besides dtkit; skipped without a GPU."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dtkit
from tests.support.waiting import wait_until_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Blurred squares of ten kinds: learnable images, without a library for data."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, 1000)
    images = random.normal(0, 0.3, (1000, 1, 8, 8)).astype(np.float32)
    images[np.arange(1000), 0, labels % 8, labels // 2] += 3
    return images, labels


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))


def train(cluster: dtkit.Cluster, steps: int = 30) -> dtkit.Run:
    run = cluster.train(
        network(),
        digits(),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        batch_size=64,
        steps=steps,
        shuffle="global",
    )
    run.wait(300)
    return run


def test_one_engine_uses_nccl():
    with dtkit.Cluster(1) as cluster:
        assert cluster.backend == "nccl"
        assert cluster.nodes[0].device == "cuda:0"
        assert cluster.nodes[0].memory_total == torch.cuda.get_device_properties(0).total_memory
        summed = cluster.run(_all_reduce_on_the_gpu)
        assert summed == [1.0]
        run = train(cluster)
        assert len(run.history) == 30
        assert run.verify(steps=5)


def test_two_engines_on_one_gpu_fall_back_to_gloo_and_report_it():
    gpus = torch.cuda.device_count()
    with dtkit.Cluster(gpus + 1) as cluster:
        assert cluster.backend == "gloo"
        assert "NCCL needs a GPU per rank" in cluster._repr_html_()
        run = train(cluster)
        assert len(run.history) == 30 * (gpus + 1)
        assert run.verify(steps=5)


def test_records_have_the_device_s_memory_and_times_from_events():
    with dtkit.Cluster(1) as cluster:
        rows = train(cluster).history.rows()
    floor = sum(p.numel() * p.element_size() for p in network().parameters())
    assert (rows["memory_bytes"] > floor).all()
    assert (rows["memory_bytes"] < torch.cuda.get_device_properties(0).total_memory).all()
    assert (rows["forward_s"] > 0).all()
    assert (rows["backward_s"] > 0).all()
    parts = rows["data_s"] + rows["forward_s"] + rows["backward_s"] + rows["update_s"]
    assert np.all(parts <= rows["step_s"] * 1.01 + 1e-5)


def test_memory_limit_applies_to_the_device():
    with dtkit.Cluster(1, memory_limit="200MB") as cluster:
        with pytest.raises(dtkit.errors.EngineError, match="out of memory"):
            cluster.run(lambda: torch.empty(300_000_000, dtype=torch.uint8, device="cuda"))
        memory = train(cluster).memory()
    assert memory.peak is not None
    assert memory.rows[0].limit is not None
    assert memory.peak <= memory.rows[0].limit <= 200_000_000


def test_cuda_equals_cpu_within_float32_rounding():
    with dtkit.Cluster(1) as cluster:
        on_gpu = train(cluster).model.state_dict()
    with dtkit.Cluster(1, device="cpu") as cluster:
        on_cpu = train(cluster).model.state_dict()
    for name, value in on_cpu.items():
        torch.testing.assert_close(on_gpu[name], value, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "strategy",
    [
        dtkit.NaiveDataParallel(),
        dtkit.Sharded(),
        dtkit.Pipeline(stages=2, micro_batches=4, schedule="1F1B"),
        dtkit.Pipeline(stages=2, micro_batches=4, schedule="ZBVZeroBubble"),
        dtkit.TensorParallel(2),
    ],
    ids=["naive", "sharded", "1f1b", "zero-bubble", "tensor"],
)
def test_two_engines_on_one_gpu_train_as_one_process_does(strategy):
    with dtkit.Cluster(2, device="cuda") as cluster:
        run = train_perceptron(cluster, strategy)
        assert cluster.backend == "gloo"
        assert run.verify(steps=5)


def test_checkpoint_of_a_gpu_resumes_on_a_cpu(tmp_path):
    with dtkit.Cluster(1) as cluster:
        train_perceptron(cluster, dtkit.DataParallel(), steps=10, checkpoint_dir=tmp_path)
    with dtkit.Cluster(1, device="cpu") as cluster:
        run = train_perceptron(cluster, dtkit.DataParallel(), steps=20, resume_from=tmp_path)
        assert run.history.num_steps == 20


def test_killed_engine_on_a_gpu_is_replaced():
    with dtkit.Cluster(2, device="cuda") as cluster:
        run = train_perceptron(cluster, dtkit.DataParallel(), steps=400, wait=False)
        wait_until_run(run, lambda: run.history.num_steps > 5, 120)
        os.kill(cluster.nodes[1].pid, signal.SIGKILL)
        run.wait(300)
        assert run.history.num_steps == 400
        assert run.verify(steps=5)


@pytest.mark.parametrize("mode", [True, "reduce-overhead"])
def test_compiled_bfloat16_training_lowers_the_loss(mode: bool | str):  # noqa: FBT001 - the option's type
    with dtkit.Cluster(1) as cluster:
        run = train_perceptron(cluster, dtkit.DataParallel(precision="bf16", compile=mode), steps=200)
        losses = run.history.rows()["loss"]
        assert losses[-1] < losses[0] / 2


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10))


def train_perceptron(
    cluster: dtkit.Cluster, strategy: Any, steps: int = 30, *, wait: bool = True, **options: object
) -> dtkit.Run:
    run = cluster.train(
        perceptron(),
        digits(),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=64,
        steps=steps,
        shuffle="global",
        strategy=strategy,
        **options,
    )
    if wait:
        run.wait(300)
    return run


def _all_reduce_on_the_gpu() -> float:
    import torch.distributed as dist

    tensor = torch.ones(1, device="cuda")
    dist.all_reduce(tensor)
    return float(tensor)

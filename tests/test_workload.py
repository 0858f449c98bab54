"""Operations and tokens of a sample, and their share of a device's peak."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dtkit
from dtkit.dashboard import report
from dtkit.dashboard.summary.metrics import build_tiles, compute_run_metrics
from dtkit.dashboard.text.run_text import format_run
from dtkit.engine.workload import count_tokens, measure_workload
from dtkit.history.workload import Efficiency, Workload, find_peak_flops
from dtkit.strategies.loss import Loss
from dtkit.testing.fake_transport import FakeTransport
from tests.support.fake_source import FakeSource


def make_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, 4), torch.zeros(rows, dtype=torch.int64)


def test_operations_of_a_sample_are_those_of_forward_and_backward():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    workload = measure_workload(model, Loss(nn.CrossEntropyLoss(), None), make_batch, torch.device("cpu"))
    # 2 operations for each weight: forward, gradient of the weight, and gradient of the input but for the first layer
    assert workload.flops_per_sample == 2 * (2 * 4 * 8 + 3 * 8 * 3)
    assert (workload.tokens_per_sample, workload.note) == (0, "")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_that_reads_values_has_a_reason_instead():
    class Reader(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if float(x.sum()) >= 0 else x

    workload = measure_workload(Reader(4, 3), Loss(nn.CrossEntropyLoss(), None), make_batch, torch.device("cpu"))
    assert workload.flops_per_sample == 0
    assert workload.note.startswith("no FLOPs: ")


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ((torch.zeros(2, 16, dtype=torch.int64), torch.zeros(2)), 16),
        ({"input_ids": torch.zeros(2, 7, dtype=torch.int32)}, 7),
        ((torch.zeros(2, 16), torch.zeros(2, dtype=torch.int64)), 0),
        ((torch.zeros(2, 16, dtype=torch.bool),), 0),
        ((torch.zeros(2, dtype=torch.int64),), 0),
    ],
)
def test_tokens_are_counted_where_a_sample_is_a_sequence_of_ids(batch, tokens):
    assert count_tokens(batch) == tokens


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("Tesla T4", 65e12),
        ("NVIDIA GeForce GTX 1080", None),
        ("this CPU", None),
    ],
)
def test_peaks_are_found_by_the_name_of_the_device(name, peak):
    assert find_peak_flops(name) == peak


def test_the_share_of_the_peak_counts_all_devices():
    efficiency = Efficiency(Workload(1e12, 1024, "NVIDIA H200"), 989.0, 2)
    assert efficiency.mfu == pytest.approx(0.5)
    assert repr(efficiency) == (
        "989 samples/s, 1,012,736 tokens/s, 989 TFLOP/s, 1 TFLOP a sample; MFU 50 % of 2 x 989 TFLOP/s "
        "(NVIDIA H200, dense bf16)"
    )
    assert "no MFU: the peak of this CPU" in repr(Efficiency(Workload(48.0, 0, "this CPU"), 10.0, 2))


def test_views_show_tokens_and_share_once_they_are_known(tmp_path):
    source = FakeSource(ranks=2)
    source.advance(40)
    labels = [tile.label for tile in build_tiles(source, compute_run_metrics(source.history, 2))]
    assert "MFU" not in labels
    source.history.workload = Workload(1e11, 128, "NVIDIA H200")
    tiles = {tile.label: tile.value for tile in build_tiles(source, compute_run_metrics(source.history, 2))}
    assert {"tokens/s", "MFU"} <= set(tiles)
    assert "tokens/s" in format_run(source)
    report.write_report(source, tmp_path / "run.html")
    assert ">MFU<" in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_a_run_measures_its_workload_once():
    cluster = dtkit.Cluster.from_transport(FakeTransport(2), device="cpu")
    options = {"loss": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD, "batch_size": 16}
    run = cluster.train(nn.Linear(4, 3), make_batch(64), **options, steps=4, start=False)
    run.step(4)
    assert run.efficiency().workload == run.history.workload == Workload(48.0, 0, "this CPU")
    cluster.close()

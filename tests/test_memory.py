"""Memory by rank: a table and a figure of what engines report, beside a plan."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from dtkit.dashboard.figures import render
from dtkit.dashboard.text import memory_text
from dtkit.engine.memory import PeakMemoryTracker
from dtkit.engine.observe.tensor_values import count_storage_bytes
from dtkit.planning.cost_model import Benchmark
from dtkit.planning.memory_report import Memory, MemoryRow, MemoryUsage
from dtkit.planning.plan import Plan, PlanRow
from tests.support.memory_reports import MB, make_usage


def planned(strategy: str = "Sharded()", ranks: int = 2) -> Plan:
    rows = [
        PlanRow(
            strategy, rank, rows=8, sent_model=0, parameters=20 * MB, gradients=20 * MB, optimizer=40 * MB,
            activations=25 * MB, overhead=5 * MB, needed=110 * MB, free=150 * MB, sent_bytes=0, compute_s=1.0,
            communication_s=0.0, step_s=1.0,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    return Plan("Net", 16, ranks, tuple(rows), Benchmark.memory_only(ranks))


def memory(*reports: MemoryUsage, plan: Plan | None = None) -> Memory:
    return Memory.from_reports("Net", "Sharded()", 3, reports, plan)


def test_activations_are_the_rest_of_the_peak():
    row = MemoryRow.from_usage(0, make_usage(sent_model=10 * MB), None)
    assert row.activations == 20 * MB
    assert row.peak == row.total == 110 * MB
    assert row.limit == 160 * MB  # the model as sent is added to the job's own limit


def test_the_peak_is_unknown_without_a_step_or_a_measurement():
    row = MemoryRow.from_usage(0, make_usage(process_growth=None, limit=None), None)
    assert (row.peak, row.activations, row.limit) == (None, None, None)
    assert row.total == 80 * MB
    found = memory(make_usage(process_growth=None, limit=None))
    assert found.peak is None
    assert "limit" not in repr(found)
    assert [t.get_text() for t in found.figure().axes[0].texts] == ["no step yet"]


def test_the_peak_is_at_least_the_size_of_the_tensors():
    row = MemoryRow.from_usage(0, make_usage(process_growth=70 * MB), None)
    assert (row.activations, row.peak) == (0, 80 * MB)


def test_the_table_shows_planned_below_measured_memory():
    found = memory(make_usage(), make_usage(process_growth=120 * MB), plan=planned())
    head, *lines = [re.sub(" +", " ", line) for line in repr(found).splitlines()[1:6]]
    assert head == "node peak as sent parameters gradients optimizer activations limit"
    assert lines[0] == "0 100 MB 0 B 20 MB 20 MB 40 MB 20 MB 150 MB"
    assert lines[1] == " planned 110 MB 0 B 20 MB 20 MB 40 MB 30 MB 150 MB"
    assert found.peak == 120 * MB
    page = found._repr_html_()
    assert "data:image/png;base64,iVBOR" in page
    assert page.count("planned</td>") == 2


def test_the_figure_has_measured_and_planned_bars_and_limits():
    ax = memory(make_usage(), make_usage(process_growth=120 * MB), plan=planned()).figure().axes[0]
    bars = {gid: [b for b in ax.patches if b.get_gid() == gid] for gid in ("measured", "planned")}
    ends = [max(b.get_x() + b.get_width() for b in bars["measured"] if round(b.get_y()) == k) for k in (0, 1)]
    assert ends == pytest.approx([100, 120])
    assert max(b.get_x() + b.get_width() for b in bars["planned"]) == pytest.approx(110)
    assert len([line for line in ax.lines if line.get_gid() == "limit"]) == 2
    assert [t.get_text() for t in ax.texts] == ["100 MB (planned 110 MB)", "120 MB (planned 110 MB)"]


def test_the_picture_below_a_table_does_not_repeat_the_headline(monkeypatch):
    shown, found = [], memory(make_usage())
    monkeypatch.setattr(render, "format_img_tag", lambda figure, _alt: shown.append(figure) or "")
    headline = memory_text.format_headline(found)
    assert found._repr_html_().count(headline) == 1
    assert shown[0].get_suptitle() == ""
    assert " ".join(found.figure().get_suptitle().split()) == headline  # of a figure of its own


def test_the_mark_of_a_limit_is_described_by_its_shape():
    """In a notebook of any theme it has another color."""
    ax = memory(make_usage()).figure().axes[0]
    assert "upright mark: the limit" in ax.get_title("right")


def test_distant_limits_are_left_out_of_the_figure():
    ax = memory(make_usage(limit=10_000 * MB)).figure().axes[0]
    assert not [line for line in ax.lines if line.get_gid() == "limit"]
    assert ax.get_xlim()[1] < 200


def test_many_ranks_are_cut_to_those_with_the_most_memory():
    found = memory(*(make_usage(process_growth=(100 + k) * MB) for k in range(40)))
    lines = repr(found).splitlines()
    assert re.match(r"24 +124 MB", lines[2])
    assert lines[-1] == "and 24 more nodes, which held less"
    assert len(found.figure().axes[0].get_yticks()) == 16


def test_a_plan_of_another_model_or_cluster_is_refused():
    with pytest.raises(ValueError, match=r"is not in this plan; choose one of DataParallel\(\)"):
        memory(make_usage(), make_usage(), plan=planned("DataParallel()"))
    with pytest.raises(ValueError, match="the plan is for Net on 4 ranks, and this run trains Net on 2"):
        memory(make_usage(), make_usage(), plan=planned(ranks=4))


def test_memory_becomes_a_data_frame():
    pd = pytest.importorskip("pandas")
    frame = memory(make_usage(), make_usage(), plan=planned()).to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert frame["planned_activations"].tolist() == [30 * MB] * 2
    assert memory(make_usage()).to_pandas()["planned_peak"].tolist() == [None]


# -- on an engine ---------------------------------------------------------------------------------------------


def test_shared_storages_count_once_and_completely():
    whole = torch.zeros(1000)
    assert count_storage_bytes([whole, whole[:10], whole.view(10, 100)]) == 4000
    sparse = torch.sparse_coo_tensor([[1, 3]], [1.0, 2.0], (1000,), check_invariants=True)
    assert count_storage_bytes([sparse]) == 2 * 8 + 2 * 4


def test_the_peak_tracker_sees_short_lived_memory():
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # the first one loads much of torch
    gauge = PeakMemoryTracker(torch.device("cpu"), model)
    before = gauge.measure_usage(model, optimizer)
    assert (before.gradients, before.optimizer, before.process_growth) == (0, 0, None)
    with gauge.track_steps():
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
        torch.ones(20 * MB).sum()
    found = gauge.measure_usage(model, optimizer)
    size = 4 * (1000 * 1000 + 1000)
    assert (found.sent_model, found.parameters, found.gradients, found.optimizer) == (size,) * 4
    if found.process_growth is None:
        pytest.skip("this system does not say how large a process was")
    assert 80 * MB <= found.process_growth < 140 * MB
    with gauge.track_steps():
        pass
    assert gauge.measure_usage(model, optimizer).process_growth == found.process_growth  # the largest of all steps

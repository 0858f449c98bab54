"""Memory and time predictions: their arithmetic, the dry run they use, and refused requests."""

from __future__ import annotations

import dataclasses
import math
import re
import resource
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dtkit
from dtkit._util import formatting
from dtkit.dashboard.text import plan_text
from dtkit.engine import benchmark as measure
from dtkit.engine import dry_run, memory, memory_limit, strategy_trial, trial_training
from dtkit.engine.data.sources import ArraySource
from dtkit.engine.ops.benchmarks import BenchmarkOps
from dtkit.planning import fit_check, planner
from dtkit.planning.cost_model import Benchmark, Cost, LinearFit, MemoryBudget, compute_ring_bytes, divide_memory
from dtkit.planning.layer_chain import LayerChain, LayerCosts
from dtkit.planning.plan import Plan, Shortage, build_rows, find_shortage
from dtkit.rpc import pickling
from dtkit.strategies.averaging import OuterSGD, ParameterAveraging
from dtkit.strategies.flat_gradients import MAX_FLAT_BYTES_OF_ONE_HOST
from dtkit.strategies.loss import Loss
from dtkit.strategies.meta_copy import copy_to_meta, count_bytes
from dtkit.strategies.naive import NaiveDataParallel
from dtkit.testing.fake_transport import FakeTransport
from tests.support import small
from tests.support.plans import LINKS, MB, make_benchmark, make_plan, make_profile

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")


# -- arithmetic ------------------------------------------------------------------------------------------


def test_a_linear_fit_passes_through_its_points_and_never_decreases():
    assert LinearFit.from_points([(4, 10.0), (8, 18.0)]) == LinearFit(2.0, 2.0)
    assert LinearFit.from_points([(8, 16.0)]) == LinearFit(0.0, 2.0)
    assert LinearFit.from_points([(4, 10.0), (8, 9.0)]) == LinearFit(
        9.0, 0.0
    )  # clock noise: flat, at the time of the larger batch
    assert LinearFit.from_points([(4, 1.0), (8, 9.0)]).intercept == 0.0
    assert LinearFit(2.0, 3.0).predict(4) == 14.0


@pytest.mark.parametrize(("ranks", "sent"), [(1, 0), (2, 600), (3, 800), (4, 900)])
def test_a_ring_all_reduce_sends_all_parts_but_one_twice(ranks: int, sent: int):
    assert compute_ring_bytes(600, ranks) == sent


def test_all_reduce_times_are_interpolated():
    found = make_benchmark()
    assert found.estimate_all_reduce_s(8) == found.estimate_all_reduce_s(1) == 1e-4
    assert found.estimate_all_reduce_s(1000) == pytest.approx(1e-3)
    assert found.estimate_all_reduce_s(3000) == pytest.approx(2e-3)
    assert found.estimate_all_reduce_s(9000) == pytest.approx(5e-3)
    assert found.estimate_all_reduce_s(0) == 0.0
    assert Benchmark.memory_only(3).estimate_all_reduce_s(10**9) == 0.0
    assert found.all_reduce_bytes_s == pytest.approx(5000 / 3e-3)


def test_ranks_of_a_host_share_its_free_memory():
    rooms = [MemoryBudget("a cpu", 900), MemoryBudget("a cpu", 900), MemoryBudget("b cpu", 300)]
    assert divide_memory([100, 100, 100], rooms) == [450, 450, 300]
    assert divide_memory([100, 200, 100], rooms) == [300, 600, 300]  # all of a pool fit, or none does
    assert find_shortage([450, 450, 300], rooms) is None
    assert find_shortage([451, 451, 300], rooms) == Shortage(0, 451, 450)
    assert find_shortage([450, 450, 301], rooms) == Shortage(2, 301, 300)


def test_memory_shares_include_limits_swap_and_reusable_memory():
    limited = MemoryBudget("a cpu", 900, limit=100)
    assert divide_memory([10], [limited]) == [100]
    assert divide_memory([10], [dataclasses.replace(limited, reusable=50)]) == [150]
    swapping = MemoryBudget("a cpu", 900, reusable=100, swap=500)
    assert divide_memory([10], [swapping]) == [1000]
    assert divide_memory([10], [swapping], include_swap=True) == [1500]


def test_data_parallel_cost_is_one_replica_and_one_all_reduce():
    cost = dtkit.DataParallel().estimate_cost(make_profile(), LINKS)
    assert (cost.parameters, cost.gradients, cost.optimizer_state) == (100 * MB, 80 * MB, 160 * MB)
    assert cost.persistent_bytes == 340 * MB
    assert cost.activations == cost.transient_bytes == 50 * MB
    assert cost.sent_bytes == 80 * MB
    assert cost.compute_s == pytest.approx(0.01 + 0.08 + 0.02 + 0.16 + 0.005)
    assert (
        cost.exposed_communication_s
        == pytest.approx(LINKS.estimate_all_reduce_s(80 * MB))
        == NaiveDataParallel().estimate_cost(make_profile(), LINKS).exposed_communication_s
    )


@pytest.mark.parametrize(("ranks", "sent"), [(2, 4000), (4, 3 * 4000)])
def test_small_gradients_are_sent_to_each_other_rank_of_the_host(ranks: int, sent: int):
    links = dataclasses.replace(make_benchmark(ranks, overlap=1.0), direct_sum_timings=((8, 1e-5), (8000, 2e-5)))
    small = make_profile(gradients=4000)
    for cost in (dtkit.DataParallel().estimate_cost(small, links), ParameterAveraging(1).estimate_cost(small, links)):
        assert cost.sent_bytes == sent
        assert (
            cost.exposed_communication_s == pytest.approx(links.estimate_sum_s(4000)) == pytest.approx(1.5e-5, rel=0.01)
        )
    assert "directly on one host" in repr(links)


def test_larger_gradients_of_one_host_are_summed_in_shared_memory_or_by_ddp():
    links = dataclasses.replace(make_benchmark(4, overlap=0.0), direct_sum_timings=((8, 1e-5), (8000, 2e-5)))
    medium, large = (make_profile(gradients=MAX_FLAT_BYTES_OF_ONE_HOST + extra) for extra in (0, 4))
    cost = dtkit.DataParallel().estimate_cost(medium, links)
    assert cost.sent_bytes == compute_ring_bytes(medium.gradients, 4)
    assert cost.exposed_communication_s == links.estimate_sum_s(medium.gradients)
    assert cost.transient_bytes == max(medium.gradients, cost.activations)  # copied into the buffer
    for strategy, profile in ((dtkit.DataParallel(), large), (dtkit.DataParallel(bucket_cap_mb=1), medium)):
        cost = strategy.estimate_cost(profile, links)
        assert cost.sent_bytes == compute_ring_bytes(profile.gradients, 4)
        assert cost.exposed_communication_s == links.estimate_all_reduce_s(profile.gradients)


def test_backward_hides_all_but_the_last_bucket():
    hiding = dataclasses.replace(LINKS, overlap=1.0)
    last = LINKS.estimate_all_reduce_s(25 * 2**20)
    assert dtkit.DataParallel().estimate_cost(make_profile(), hiding).exposed_communication_s == pytest.approx(last)
    short = make_profile(backward_s=LinearFit(0.01, 0.0))
    assert dtkit.DataParallel().estimate_cost(short, hiding).exposed_communication_s == pytest.approx(
        LINKS.estimate_all_reduce_s(80 * MB) - 0.01
    )


ONES = (1.0, 1.0, 1.0, 1.0)
LAYERS = LayerChain(
    tuple("abcd"), LayerCosts(ONES, before_layers=4.0, after_layers=2.0), LayerCosts(ONES, after_layers=2.0)
)


def test_pipeline_cost_is_computed_per_stage():
    equal = [dtkit.Pipeline(2, 4).estimate_cost(make_profile(rank=rank), LINKS) for rank in (0, 1)]
    assert [cost.parameters for cost in equal] == [50 * MB, 50 * MB]
    assert equal[0].activations > equal[1].activations  # 1F1B: the first rank holds more micro-batches
    known = [dtkit.Pipeline(2, 4).estimate_cost(make_profile(rank=rank, layer_chain=LAYERS), LINKS) for rank in (0, 1)]
    assert [cost.parameters for cost in known] == [70 * MB, 30 * MB]  # cut in a | b by time; before them lie 4 of 10
    assert [cost.gradients for cost in known] == [56 * MB, 24 * MB]
    assert [cost.sent_bytes for cost in known] == [0.0, 0.0]  # the sizes of layer outputs are unknown
    handing = dataclasses.replace(LAYERS, output_bytes=(100.0, 200.0, 300.0, 400.0))
    sent = [
        dtkit.Pipeline(2, 4).estimate_cost(make_profile(rank=rank, layer_chain=handing), LINKS).sent_bytes
        for rank in (0, 1)
    ]
    assert sent == [16 * 300, 16 * 300]  # of 16 rows forward, and gradients as large back: cut behind c
    looped = dtkit.Pipeline(2, 4, "Interleaved1F1B")
    sent = [looped.estimate_cost(make_profile(rank=rank, layer_chain=handing), LINKS).sent_bytes for rank in (0, 1)]
    assert sent == [16 * 600, 16 * 600]  # three borders, each between both ranks
    named = [
        dtkit.Pipeline(2, 4, split=["b"]).estimate_cost(make_profile(rank=rank, layer_chain=LAYERS), LINKS)
        for rank in (0, 1)
    ]
    assert [cost.parameters for cost in named] == [50 * MB, 50 * MB]
    assert named[0].compute_s > known[0].compute_s  # its second stage has 5/6 of the work


def test_a_pipeline_holds_row_independent_activations_once():
    fixed, per_row = (
        [
            dtkit.Pipeline(2, 4).estimate_cost(make_profile(rank=rank, activations=line, gradient_shapes=()), LINKS)
            for rank in (0, 1)
        ]
        for line in (LinearFit(10 * MB, 0), LinearFit(0, 5 * MB))
    )
    assert [cost.activations for cost in fixed] == [5 * MB, 5 * MB]
    assert [cost.activations for cost in per_row] == [2 * 4 * 5 * MB // 2, 4 * 5 * MB // 2]  # 1F1B: two and one
    uneven = make_profile(rows=9, activations=LinearFit(0, 5 * MB), gradient_shapes=())
    assert (
        dtkit.Pipeline(2, 4).estimate_cost(uneven, LINKS).activations == 5 * 5 * MB
    )  # of 18 rows in four, five at a time


def test_a_pipeline_has_a_buffer_for_each_micro_batch():
    handing = dataclasses.replace(LAYERS, output_bytes=(100.0, 200.0, 300.0, 400.0))
    for schedule, expected in (("1F1B", [300, 300]), ("Interleaved1F1B", [100 + 200 + 300, 100 + 200 + 300])):
        for rank in (0, 1):
            strategy = dtkit.Pipeline(2, 4, schedule)
            with_, without = (
                strategy.estimate_cost(make_profile(rank=rank, layer_chain=layers), LINKS)
                for layers in (handing, dataclasses.replace(handing, output_bytes=()))
            )
            assert with_.activations - without.activations == 16 * expected[rank]
            assert with_.temporaries - without.temporaries == 16 * expected[rank]


@pytest.mark.parametrize(("schedule", "times"), [("1F1B", 1), ("Interleaved1F1B", 1), ("ZBVZeroBubble", 2)])
def test_gradients_in_flight_count_as_activations(schedule: str, times: int):
    """The largest gradient, 4 MB here, counts once, or twice with backward in halves."""
    known, unknown = (
        dtkit.Pipeline(2, 4, schedule).estimate_cost(make_profile(gradient_shapes=shapes), LINKS)
        for shapes in (((1000, 1000), *[(1_000_000,)] * 19), ())
    )
    assert known.activations - unknown.activations == times * 4 * MB


def test_an_untimed_pipeline_is_cut_into_equal_numbers_of_layers():
    untimed = dataclasses.replace(LAYERS, seconds=None)
    found = [dtkit.Pipeline(2, 4).estimate_cost(make_profile(rank=rank, layer_chain=untimed), LINKS) for rank in (0, 1)]
    assert [cost.parameters for cost in found] == [60 * MB, 40 * MB]
    assert found[0].compute_s == pytest.approx(
        dtkit.Pipeline(2, 4).estimate_cost(make_profile(), LINKS).compute_s, rel=0.02
    )
    numbers = dtkit.Pipeline(2, 4, balance_by="parameters").estimate_cost(make_profile(layer_chain=untimed), LINKS)
    assert numbers.parameters == 50 * MB  # a stage of what lies before and one layer


def test_tensor_parallel_costs_follow_its_plan():
    model = nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 10), nn.ReLU(), nn.Linear(10, 1000))
    strategy = dtkit.TensorParallel(2)
    cost = strategy.estimate_cost(make_profile(model=model), LINKS)
    rows = strategy.plan_for(model).rows
    assert cost.parameters == round(100 * MB * sum(r.local_parameters for r in rows) / sum(r.parameters for r in rows))
    shapes = tuple(tuple(p.shape) for p in model.parameters())
    assert (
        cost.parameters > strategy.estimate_cost(make_profile(gradient_shapes=shapes), LINKS).parameters
    )  # as if the last one were cut, too


def test_accumulation_needs_fewer_activations_and_more_gradients():
    cost = dtkit.DataParallel(accumulate=4).estimate_cost(make_profile(), LINKS)
    assert cost.activations == 20 * MB
    assert cost.gradients == 160 * MB
    assert cost.compute_s == pytest.approx(4 * (0.01 + 0.02 + 0.02 + 0.04) + 0.005)


def test_compression_sends_fewer_bytes():
    assert dtkit.DataParallel(compress="bf16").estimate_cost(make_profile(), LINKS).sent_bytes == 40 * MB
    thin = dtkit.DataParallel(compress="powersgd").estimate_cost(make_profile(), LINKS)
    assert thin.sent_bytes == 4 * (2 * 2000 + 19_000_000)  # the matrix as two thin ones, the vector as it is
    assert thin.gradients > 160 * MB  # what was left out is kept


def test_averaging_sends_fewer_bytes_and_an_outer_optimizer_adds_state():
    plain = ParameterAveraging(every=8).estimate_cost(make_profile(), LINKS)
    assert plain.sent_bytes == 10 * MB
    assert plain.exposed_communication_s == pytest.approx(LINKS.estimate_all_reduce_s(80 * MB) / 8)
    outer = ParameterAveraging(every=8, outer=OuterSGD()).estimate_cost(make_profile(), LINKS)
    assert (
        outer.optimizer_state - plain.optimizer_state == 2 * 80 * MB
    )  # the parameters of the last averaging, and momentum


def test_a_step_waits_for_the_slowest_rank():
    slow = make_profile(forward_s=LinearFit(0.02, 0.02), backward_s=LinearFit(0.04, 0.04))
    costs = [dtkit.DataParallel().estimate_cost(f, LINKS) for f in (make_profile(), slow)]
    rows = build_rows(
        "DataParallel()", [make_profile(), slow], costs, [MemoryBudget("a", 1000 * MB), MemoryBudget("b", 400 * MB)]
    )
    assert [row.step_s for row in rows] == pytest.approx([costs[1].compute_s + costs[0].exposed_communication_s] * 2)
    assert rows[0].needed == 490 * MB
    assert [row.fits for row in rows] == [True, False]


# -- a plan and a benchmark, shown -----------------------------------------------------------------------


def test_a_plan_lists_the_strategies_that_fit():
    assert make_plan().fitting == ("DataParallel()", "ParameterAveraging(every=4)")
    tight = make_plan(free=500 * MB)
    assert tight.fitting == ("DataParallel()",)
    assert "only DataParallel() fits" in repr(tight)
    assert "none fit" in repr(make_plan(free=100 * MB))
    assert len(tight.get_rows(dtkit.DataParallel())) == 2
    with pytest.raises(ValueError, match="is not in this plan; choose one of DataParallel"):
        tight.get_rows("Pipeline()")


def test_a_plan_is_shown_as_text_and_html():
    lines = repr(make_plan(free=500 * MB)).splitlines()
    assert len(lines) == 1 + 3 * (1 + 2) + 2
    assert all(len({len(line) for line in lines[k : k + 3]}) == 1 for k in (1, 4, 7))
    assert max(map(len, lines)) <= 100  # it fits a cell
    assert "490 MB" in lines[2]
    assert "NO" in lines[3]
    page = make_plan(model="<b>")._repr_html_()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert page.count("<tr>") == 9 + 2  # two tables have a caption
    assert "data:image/png" in page


def test_a_plan_of_many_ranks_shows_the_tightest_one():
    many = make_plan(ranks=12)
    assert len(repr(many).splitlines()) == 1 + 3 * (1 + 2) + 2
    assert "least to spare" in repr(many)
    assert len(many.to_pandas()) == 24


def test_a_plan_shows_the_answer_before_its_parts():
    fit, step, parts = plan_text._make_page(make_plan()).tables
    assert fit.header == ["strategy", "node", "samples", "needed", "free", "fits"]
    assert step.header == ["strategy", "node", "sent", "computing", "waiting", "in all"]
    assert parts.header[2:] == [name for _, name in plan_text.MEMORY_PARTS]


def test_a_plan_repeats_no_row_for_equal_ranks():
    plan = make_plan(ranks=3)
    rows = [dataclasses.replace(row, rows=row.rows + (row.rank == 1)) for row in plan.rows]
    fit, *others = plan_text._make_page(dataclasses.replace(plan, rows=tuple(rows))).tables
    assert [row[:2] for row in fit.rows[:2]] == [["DataParallel()", "0, 2"], ["DataParallel()", "1"]]
    assert [[row[1] for row in table.rows] for table in others] == [["all", "all"]] * 2


def test_a_plan_repeats_no_row_for_ranks_of_nearly_equal_speed():
    plan = make_plan()
    rows = [dataclasses.replace(row, compute_s=row.compute_s * (1 + row.rank / 100)) for row in plan.rows]
    _, step, _ = plan_text._make_page(dataclasses.replace(plan, rows=tuple(rows))).tables
    assert [row[1] for row in step.rows] == ["all", "all"]
    slowest = max(row.compute_s for row in rows if row.strategy == "DataParallel()")
    assert step.rows[0][step.header.index("computing")] == formatting.format_duration(slowest)


def test_a_bar_axis_has_few_numbers():
    """Each has its unit, and more of them would touch."""
    for ax in make_plan().figure().axes:
        low, high = ax.get_xlim()
        assert 2 <= len([tick for tick in ax.get_xticks() if low <= tick <= high]) <= 6


def test_html_aligns_names_to_the_left_and_keeps_units_with_numbers():
    page = make_plan()._repr_html_()
    cells = re.findall(r'<t[hd] style="([^"]*)">', page)
    tables = plan_text._make_page(make_plan()).tables
    assert len(cells) == sum(3 * (len(table.header) - table.is_narrow) for table in tables)
    names = [style for style in cells if "text-align: left" in style]
    assert len(names) == 3 * (2 + 1 + 1)
    numbers = re.findall(r'<td style="(text-align: right[^"]*)">', page)
    assert numbers
    assert all("white-space: nowrap" in style for style in numbers)


def test_a_long_list_of_fitting_strategies_is_counted():
    rows = [dataclasses.replace(row, strategy=f"Long{k}({'x' * 40})") for k in range(3) for row in make_plan().rows[:2]]
    tight = [dataclasses.replace(row, free=row.needed - 1) for row in rows[4:]]
    some = dataclasses.replace(make_plan(), rows=tuple(rows[:4] + tight))
    assert repr(some).splitlines()[0].endswith("on 2 nodes: 2 of 3 strategies fit")
    one = dataclasses.replace(
        make_plan(), rows=tuple([dataclasses.replace(r, strategy="x" * 61) for r in rows[:2]] + tight)
    )
    assert repr(one).splitlines()[0].endswith(": 1 of 2 strategies fits")


@pytest.mark.parametrize(
    ("size", "unit", "time", "other"), [(1e-3, "kB", 1e-4, "µs"), (1, "MB", 1, "ms"), (1e3, "GB", 50, "s")]
)
def test_a_plan_figure_of_any_size_has_short_numbers_and_no_overlaps(size: float, unit: str, time: float, other: str):
    parts = ["needed", *(field for field, _ in plan_text.MEMORY_PARTS)]
    times = ("compute_s", "communication_s", "step_s")
    rows = [
        dataclasses.replace(
            row,
            free=int(600 * MB * size),
            **{field: int(getattr(row, field) * size) for field in parts},
            **{field: getattr(row, field) * time for field in times},
        )
        for row in make_plan().rows
    ]
    figure = dataclasses.replace(make_plan(), rows=tuple(rows)).figure()
    figure.canvas.draw()
    for ax, name in zip(figure.axes, (unit, other), strict=True):
        assert ax.xaxis.get_offset_text().get_text() == ""
        ticks = [label for label in ax.get_xticklabels() if label.get_text()]
        assert all(label.get_text().endswith(f" {name}") and len(label.get_text()) <= 8 for label in ticks)
        top = ax.get_legend().get_window_extent().y1
        assert all(label.get_window_extent().y0 >= top for label in ticks)


def test_a_step_whose_communication_is_not_counted_is_a_lower_bound():
    plan = make_plan()
    rows = [dataclasses.replace(row, sent_bytes=math.nan, communication_s=0.0, step_s=112e-6) for row in plan.rows]
    unknown = dataclasses.replace(plan, rows=tuple(rows))
    assert re.split(" {2,}", repr(unknown).splitlines()[5])[-2:] == ["—", "> 112 µs"]
    texts = [text.get_text() for text in unknown.figure().axes[1].texts]
    assert set(texts) == {"> 112 µs, what is sent not counted"}


def test_parts_of_a_measured_step_add_up_if_communication_is_not_counted():
    """Replicas of tensor parallelism know a part of their communication: its time must not vanish."""
    plan = make_measured_plan()
    rows = [dataclasses.replace(row, sent_bytes=math.nan) for row in plan.rows]
    unknown = dataclasses.replace(plan, rows=tuple(rows))
    assert [row.compute_s + row.other_s for row in rows] == [pytest.approx(row.step_s) for row in rows]
    _, steps, _ = plan_text._make_page(unknown).tables
    assert steps.rows[0][2:] == ["—", "40 ms", "in other", "10 ms", "50 ms"]
    containers = unknown.figure().axes[1].containers
    drawn = [sum(bars[k].get_width() for bars in containers) for k in range(len(unknown.strategies))]
    assert drawn == [pytest.approx(50)] * len(unknown.strategies)


def test_bars_of_a_plan_figure_add_up():
    figure = make_plan(free=500 * MB).figure()
    memory_axes, time_axes = figure.axes
    widths = [patch.get_width() for patch in memory_axes.patches]
    assert sum(widths) == pytest.approx(
        sum(rows[0].needed for rows in map(make_plan().get_rows, make_plan().strategies)) / 1e6
    )
    assert sum("does not fit" in text.get_text() for text in memory_axes.texts) == 1
    assert len([line for line in memory_axes.lines if line.get_gid() == "free"]) == 2
    assert len(time_axes.patches) == 4


def make_measured_plan() -> Plan:
    """Return a plan in which the slower node isn't the one with the least memory, and one process is fastest."""
    rows = [
        dataclasses.replace(
            row, compute_s=0.030 + 0.010 * row.rank, communication_s=0.005, step_s=0.050, is_measured=True,
            free=row.needed + (1 + row.rank) * 100 * MB,
        )
        for row in make_plan().rows
    ]  # fmt: skip
    one = dataclasses.replace(
        rows[0], strategy="one process", compute_s=0.014, communication_s=0.0, step_s=0.015, sent_bytes=0
    )
    return dataclasses.replace(make_plan(), rows=tuple(rows), one_process=one)


def test_table_and_chart_of_a_plan_show_the_same_times():
    plan = make_measured_plan()
    _, step, parts = plan_text._make_page(plan).tables
    memory_axes, time_axes = plan.figure().axes
    names = [row[0] for row in step.rows]
    assert names == [*plan.strategies, "one process"]
    assert [label.get_text() for label in memory_axes.get_yticklabels()] == names == [row[0] for row in parts.rows]
    for column, bars in zip(("computing", "waiting", "other"), time_axes.containers, strict=True):
        drawn = [formatting.format_duration(bar.get_width() / 1e3) for bar in bars]
        assert drawn == [row[step.header.index(column)] for row in step.rows]


def test_a_plan_says_that_one_process_is_fastest():
    plan = make_measured_plan()
    line = "one process is fastest: 15 ms a step, and 50 ms with DataParallel()"
    assert repr(plan).splitlines()[1] == line
    assert f"<p>{line}</p>" in plan._repr_html_()
    assert plan.figure().get_supxlabel().startswith("one process is fastest: 15 ms a step")
    figure = plan.figure()
    figure.canvas.draw()
    titles = [ax.get_title(loc=loc) for ax in figure.axes for loc in ("left", "right")]
    assert titles == ["Memory per node", "tightest node · upright mark: free", "Time per step", ""]  # none overlap
    one = plan.one_process
    assert one is not None
    for changes in ({"step_s": 0.051}, {"step_s": math.nan}, {"free": one.needed - 1}):
        other = dataclasses.replace(plan, one_process=dataclasses.replace(one, **changes))
        assert "fastest" not in repr(other)


def test_a_plan_in_a_notebook_names_its_tables():
    page = make_plan()._repr_html_()
    assert ">Time of a step<" in page
    assert ">Parts of the needed memory<" in page


def test_a_plan_becomes_a_data_frame():
    frame = make_plan().to_pandas()
    assert list(frame.strategy.unique()) == ["DataParallel()", "ParameterAveraging(every=4)"]
    assert frame.fits.all()
    assert (frame.needed <= frame.free).all()


def test_a_benchmark_is_shown_as_text_html_and_figure():
    found = make_benchmark(3)
    assert "Benchmark of 3 nodes, gloo: 3 GFLOP/s in float32 together" in repr(found)
    assert "data:image/png" in found._repr_html_()
    latency, width, rate = found.figure().axes
    assert [t.get_text() for t in latency.texts].count("100") == 6
    assert latency.get_title(loc="left") == "Latency"
    assert width.images[0].get_array().shape == (3, 3)
    assert len(rate.patches) == 3


def test_a_benchmark_of_one_rank_has_no_links():
    alone = make_benchmark(1, all_reduce=())
    assert math.isnan(alone.all_reduce_bytes_s)
    assert "all-reduce" not in repr(alone)
    assert alone.figure().axes[0].texts[0].get_text() == "one node has no links"
    assert alone._repr_html_()


# -- the dry run -----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """A small encoder that creates a tensor without naming a device."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(50, 32), nn.Embedding(16, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(x) + self.place(torch.arange(x.shape[1]))).mean(1))


class Asks(nn.Module):
    """A model whose forward reads tensor values."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) if float(x.sum()) > 0 else self.line(-x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0][:, -1])


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.LazyLinear(10)
    )


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 10))


def batch(rows: int, *shape: int, whole: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(50, (rows, *shape)) if whole else torch.rand(rows, *shape)
    return x, torch.randint(10, (rows,))


MODELS = {
    "perceptron": (perceptron, (100,), False),
    "convolutions": (convolutions, (3, 12, 12), False),
    "attention": (Attention, (16,), True),
}
OBJECTIVE = Loss(nn.CrossEntropyLoss(), None)


def full() -> Any:
    return trial_training.make_autocast(CPU)


@pytest.mark.parametrize("name", MODELS)
def test_a_dry_run_allocates_as_much_as_a_real_step(name: str):
    make, shape, whole = MODELS[name]
    model = make()
    model(batch(3, *shape, whole=whole)[0])  # lazy modules get their shapes
    fake = dry_run.estimate_peaks(model, OBJECTIVE, batch(3, *shape, whole=whole), (8, 16), CPU, full)
    for found in fake:
        real = dry_run.measure_peak(model, OBJECTIVE, batch(found.rows, *shape, whole=whole), found.rows, full)
        assert found.nbytes == real.nbytes
        assert not found.has_hidden_workspace
    assert fake[1].flops > 0
    assert fake[1].nbytes > fake[0].nbytes


def test_estimated_peaks_of_a_perceptron_equal_a_count_by_hand():
    rows, item = 512, 4
    found = dry_run.estimate_peaks(perceptron(), OBJECTIVE, batch(3, 100), (rows,), CPU, full)[0]
    # The batch; the hidden layer before and after its ReLU; output and its logarithm of probabilities; at the peak, in
    # backward of the hidden layer, gradients of hidden values before and after the ReLU join.
    inputs = rows * 100 * item + rows * 8
    saved = 2 * rows * 200 * item + rows * 10 * item
    assert inputs + saved < found.nbytes < inputs + saved + 2 * rows * 200 * item
    assert found.flops == 2 * rows * (2 * 100 * 200 + 3 * 200 * 10)  # no gradient of the inputs is taken


def test_the_allocation_tracker_releases_freed_tensors():
    with dry_run.AllocationTracker() as ledger:
        a = torch.zeros(1000)
        b = a + 1
        assert ledger.live_bytes == 8000
        view = b[10:]
        del a, b
        assert ledger.live_bytes == 4000  # the view keeps all of it
        del view
    assert ledger.live_bytes == 0
    assert ledger.peak_bytes == 8000


def test_a_meta_copy_keeps_tied_parameters_and_dtypes():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    model[1].weight = model[0].weight
    meta_model = copy_to_meta(model)
    assert meta_model[0].weight is meta_model[1].weight
    assert meta_model[1].bias.dtype is torch.float64
    assert all(p.is_meta for p in meta_model.parameters())
    assert not model[0].weight.is_meta


BYTES = 4 * (100 * 200 + 200 + 200 * 10 + 10)
LARGEST = 4 * 100 * 200
STEPS = 4 * 4  # Adam counts steps in a number of its own for each parameter
OPTIMISERS = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), 0, 0),
    "decay": (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), 0, LARGEST),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), BYTES, 0),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.1), 2 * BYTES + STEPS, 2 * LARGEST),
    "amsgrad": (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), 3 * BYTES + STEPS, 2 * LARGEST),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimizer_state_is_estimated_on_the_meta_device(name: str):
    factory, state, besides = OPTIMISERS[name]
    assert dry_run.estimate_optimizer_bytes(perceptron(), factory, CPU) == (state, pytest.approx(besides, abs=64))
    model = perceptron()
    model(torch.rand(2, 100)).sum().backward()
    optimizer = factory(list(model.parameters()))
    assert dry_run.measure_optimizer_bytes(optimizer, list(model.parameters()))[0] == state  # for real


def test_frozen_and_sparse_parameters_have_no_dense_gradient():
    model = nn.Sequential(nn.Embedding(100, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].requires_grad_(False)
    assert count_bytes(dry_run.find_dense_gradient_parameters(model)) == 4 * (16 + 4)
    adam, _ = dry_run.estimate_optimizer_bytes(model, torch.optim.AdamW, CPU)
    assert adam == 2 * 4 * (16 + 4) + 2 * 4


def test_a_model_that_reads_values_gets_a_note_instead_of_an_estimate():
    found, why = measure._try_or_explain(
        lambda: dry_run.estimate_peaks(Asks(), OBJECTIVE, batch(3, 8), (4,), CPU, full), []
    )
    assert found == []
    assert why == "what it computes depends on the values of tensors, as with .item() or x[mask]"
    real = dry_run.measure_peak(Asks(), OBJECTIVE, batch(4, 8), 4, full)
    assert real.nbytes > 4 * 8 * 4


def test_recurrent_layers_have_hidden_workspace():
    assert dry_run.estimate_peaks(Recurrent(), OBJECTIVE, batch(3, 5, 8), (4,), CPU, full)[0].has_hidden_workspace


def test_autocast_makes_activations_smaller():
    deep = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)], nn.Linear(64, 10))
    rows = (512,)
    wide = dry_run.estimate_peaks(deep, OBJECTIVE, batch(3, 64), rows, CPU, full)[0]
    thin = dry_run.estimate_peaks(
        deep, OBJECTIVE, batch(3, 64), rows, CPU, lambda: trial_training.make_autocast(CPU, "bf16")
    )[0]
    assert thin.nbytes < 0.7 * wide.nbytes


# -- an engine's memory ----------------------------------------------------------------------------------


def test_peak_memory_is_readable_after_it_was_freed():
    before = memory.reset_peak(CPU)
    if before is None:
        pytest.skip("the system does not let a process reset its peak")
    block = torch.ones(50_000_000)
    del block
    grown = memory.read_peak(CPU) - before
    assert 190 * MB < grown < 230 * MB
    again = memory.reset_peak(CPU)
    assert memory.read_peak(CPU) - again < 20 * MB


def test_memory_of_an_earlier_job_is_reusable():
    placed = nn.Linear(1000, 1000)
    before = memory.measure_available_memory(CPU, [placed], tidy_up=True).job_bytes
    job = nn.Linear(1000, 1000)
    job(torch.ones(1, 1000)).sum().backward()
    assert memory.measure_available_memory(CPU, [placed], tidy_up=True).job_bytes - before == pytest.approx(
        8 * MB, rel=0.01
    )
    assert memory.measure_available_memory(CPU, [placed]).job_bytes == 0


def test_data_left_is_none_without_a_limit():
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
    assert memory_limit.compute_data_left() is None


def test_data_left_is_the_limit_minus_the_used_memory(monkeypatch: pytest.MonkeyPatch):
    used = memory_limit._read_data_bytes()
    monkeypatch.setattr(memory_limit.resource, "getrlimit", lambda _: (used + 500 * MB, resource.RLIM_INFINITY))
    assert 450 * MB < memory_limit.compute_data_left() < 500 * MB + memory_limit._read_malloc_free_bytes() + 50 * MB


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[memory_limit.MemoryLimit]:
    """This process, with a limit far above what it takes."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    monkeypatch.setenv(memory_limit.LIMIT_ENV_VAR, str(20_000 * MB))
    found = memory_limit.MemoryLimit()
    found.activate(CPU)
    yield found
    resource.setrlimit(resource.RLIMIT_DATA, before)


def soft() -> int:
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


def test_a_limit_holds_in_user_code_but_not_while_a_group_forms(limited: memory_limit.MemoryLimit):
    most = soft()
    assert most != resource.RLIM_INFINITY
    with limited.suspend():
        assert soft() == resource.RLIM_INFINITY
    with limited.enforce():
        with memory_limit.lift_data_limit():
            assert soft() == resource.RLIM_INFINITY
        assert soft() == most
    assert soft() == most


def test_a_reply_has_memory_after_user_code_has_used_the_limit(
    limited: memory_limit.MemoryLimit, monkeypatch: pytest.MonkeyPatch
):
    most = soft()
    monkeypatch.setattr(memory_limit, "_read_data_bytes", lambda: most + MB)  # threads' stacks took more than there was
    for doing in (limited.enforce, limited.suspend):
        with doing():
            pass
        assert soft() > most + 10 * MB
    monkeypatch.setattr(memory_limit, "_read_data_bytes", lambda: most // 2)
    with limited.enforce():
        assert soft() == most
    assert soft() == most


def test_a_limit_set_by_the_user_is_not_changed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(memory_limit.LIMIT_ENV_VAR, raising=False)
    monkeypatch.setattr(memory_limit.resource, "setrlimit", lambda *_: pytest.fail("it was changed"))
    with memory_limit.lift_data_limit(), memory_limit.MemoryLimit().enforce():
        pass


# -- plan requests, over fake engines --------------------------------------------------------------------


@pytest.fixture
def engines() -> FakeTransport:
    return FakeTransport(2)


@pytest.fixture
def cluster(engines: FakeTransport) -> Iterator[dtkit.Cluster]:
    with dtkit.Cluster.from_transport(engines, device="cpu") as cluster:
        yield cluster


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def ask(cluster: dtkit.Cluster, model: Any = None, **changes: Any) -> Plan:
    asked: dict[str, Any] = {
        "batch_size": 16,
        "optimizer": adam,
        "loss": nn.CrossEntropyLoss(),
        "data": batch(4, 100),
    }
    return cluster.plan(perceptron() if model is None else model, **(asked | changes))


def on_meta() -> nn.Module:
    return nn.Linear(100, 10, device="meta")


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no data": ({"data": None}, ValueError, "data is None, and a plan measures activations"),
    "a batch smaller than the ranks": ({"batch_size": 1}, ValueError, "batch_size=1 is less than the 2 ranks"),
    "a batch of another type": ({"batch_size": 2.5}, TypeError, "batch_size=2.5; it must be an integer"),
    "a model without numbers": ({"model": on_meta()}, ValueError, "on the meta device"),
    "no model": ({"model": 3}, TypeError, "model is an int"),
    "a lazy model": ({"model": nn.LazyLinear(3)}, ValueError, "has no shape yet"),
    "no loss": ({"loss": None}, ValueError, "give either loss"),
    "loss and step": ({"training_step": lambda _m, _b: 0}, ValueError, "you gave both"),
    "an optimizer that isn't a function": ({"optimizer": "adam"}, TypeError, "optimizer is a str"),
    "a strategy that isn't one": ({"strategies": ["ddp"]}, TypeError, "strategies holds 'ddp'"),
    "no strategy": ({"strategies": []}, ValueError, "strategies is empty"),
    "a strategy that can't work": ({"strategies": [dtkit.DataParallel(accumulate=9)]}, ValueError, "accumulate=9"),
    "data of another type": ({"data": 3}, TypeError, "data is an int"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_plan_request_is_refused(cluster: dtkit.Cluster, name: str):
    asked, error, message = BAD[name]
    with pytest.raises(error, match=message):
        ask(cluster, **asked)


def test_a_partition_smaller_than_the_batch_is_refused(cluster: dtkit.Cluster):
    part = cluster.partition(batch(8, 100))
    with pytest.raises(ValueError, match="batch_size=16 is more than the 8 samples"):
        ask(cluster, data=part)


def test_a_model_that_a_strategy_cannot_train_is_refused(cluster: dtkit.Cluster):
    with pytest.raises(ValueError, match="has no layers in a chain"):
        ask(cluster, nn.Linear(100, 10), strategies=[dtkit.Pipeline(2, 4)])


def test_tensor_parallel_is_compared_if_the_model_allows_it(cluster: dtkit.Cluster):
    pairs = nn.Sequential(nn.Linear(100, 20), nn.ReLU(), nn.Linear(20, 10))
    assert "TensorParallel(tp_size=2)" in ask(cluster, pairs).strategies
    assert "TensorParallel(tp_size=2)" not in ask(cluster, nn.Linear(100, 10)).strategies


@pytest.mark.usefixtures("small_models_count")
def test_memory_parts_in_a_refusal_add_up_to_the_total(cluster: dtkit.Cluster, engines: FakeTransport):
    engines.memory_free = 200_000
    strategy = dtkit.Pipeline(1, 4, replicas=2)
    refusal = r"it needs 355 kB .*\(parameters 88\.8 kB, gradients 88\.8 kB, optimizer state 178 kB\)"
    with pytest.raises(ValueError, match=refusal):  # the model as it was sent is mapped
        fit_check.check_fits(cluster._engine_group, perceptron(), adam, strategy)


def test_short_steps_of_each_strategy_and_of_one_process_are_measured(cluster: dtkit.Cluster, engines: FakeTransport):
    strategies = [dtkit.DataParallel(), dtkit.TensorParallel(2)]
    found = ask(cluster, strategies=strategies)  # the double takes 10 ms for each sample of a replica
    assert [found.get_rows(strategy)[0].step_s for strategy in strategies] == [0.08, 0.16]
    assert found.one_process is not None
    assert (found.one_process.rows, found.one_process.step_s, found.one_process.sent_bytes) == (16, 0.16, 0)
    asked = [args for _, op, args in engines.served_requests if op == "measure_strategy_step"]
    assert [args["counts"] for args in asked] == [(8, 8), (8, 8), (16,), (16,), (16,)]
    assert [args["alone"] for args in asked] == [False, False, False, False, True]
    assert re.search(r"^one process +0 +16 .* yes$", repr(found), re.MULTILINE)
    assert re.search(r"^one process +0 +0 B .* 160 ms$", repr(found), re.MULTILINE)
    assert "in all: measured in some steps" in repr(found)
    assert found.strategies == tuple(map(repr, strategies))


def test_a_plan_measures_steps_with_the_shards_of_a_partition(cluster: dtkit.Cluster, engines: FakeTransport):
    ask(cluster, data=cluster.partition(batch(40, 100), weights=[3, 1]), strategies=[dtkit.DataParallel()])
    asked = [args for _, op, args in engines.served_requests if op == "measure_strategy_step"]
    assert [args["counts"] for args in asked] == [(12, 4), (12, 4), (16,)]


def test_long_steps_and_models_that_may_not_fit_are_estimated(cluster: dtkit.Cluster, engines: FakeTransport):
    long = ask(cluster, batch_size=4000, data=batch(4000, 100))
    engines.memory_free = 400_000
    for found in (long, ask(cluster)):
        assert not any(row.is_measured for row in found.rows)
        assert all(math.isnan(row.other_s) for row in found.rows)
        assert "other" not in repr(found).split()
    assert "measure_strategy_step" not in {op for _, op, _ in engines.served_requests}


@pytest.mark.parametrize(("measured_s", "scale", "other_s"), [(0.4, 1.0, 0.1), (0.15, 0.5, 0.0)])
def test_a_measured_step_bounds_the_estimates_of_its_parts(measured_s: float, scale: float, other_s: float):
    cost = dataclasses.replace(
        dtkit.DataParallel().estimate_cost(make_profile(), LINKS), compute_s=0.2, exposed_communication_s=0.1
    )
    (row,) = build_rows("a", [make_profile()], [cost], [MemoryBudget("a", 1000 * MB)], measured_s)
    assert (row.compute_s, row.communication_s) == (pytest.approx(0.2 * scale), pytest.approx(0.1 * scale))
    assert row.other_s == pytest.approx(other_s)
    assert row.step_s == measured_s


def logged_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    value = nn.functional.cross_entropy(output, target)
    dtkit.log(kl=value)
    return value


def test_numbers_that_a_loss_logs_are_not_read_while_a_plan_tries_it(capfd: pytest.CaptureFixture[str]):
    state: Any = SimpleNamespace(
        get_group=lambda: None,
        get_device=lambda: CPU,
        models={"m": perceptron()},
        data={"d": (ArraySource(batch(8, 100)), None)},
        run_abortable=lambda work: work(),
    )
    program = pickling.dumps((None, Loss(logged_loss), sgd, False))
    ops = BenchmarkOps(state)
    peaks, reason = ops.measure_activation_peaks(program=program, model="m", data="d", rows=(4, 8))
    assert (len(peaks), reason) == (2, "")
    strategy = pickling.dumps(dtkit.DataParallel())
    seconds = ops.measure_strategy_step(
        program=program, strategy=strategy, model="m", data="d", counts=(8,), alone=True
    )
    assert seconds > 0
    assert "kl=" not in capfd.readouterr().out


class SlowRows(ArraySource):
    """Rows whose loading takes a planted time."""

    def take(self, rows: Any) -> Any:
        # sleeps: the cost that the measurement has to find
        time.sleep(PLANTED_S)
        return super().take(rows)


PLANTED_S = 0.005


def test_a_measured_step_includes_what_is_neither_computing_nor_communication():
    rows = SlowRows(batch(8, 100))
    program, strategy = (
        pickling.dumps(each) for each in ((None, Loss(nn.CrossEntropyLoss()), sgd, False), dtkit.DataParallel())
    )
    context: Any = measure.BenchmarkContext(None, CPU, {"m": perceptron()}, {"d": (rows, None)})  # type: ignore[arg-type, dict-item]
    assert strategy_trial.measure_strategy_step(context, program, strategy, "m", "d", (8,), alone=True) >= PLANTED_S


def test_the_mean_of_steps_leaves_accidents_out_but_counts_each_position_of_a_cycle():
    assert strategy_trial._average_cycle([1.0] * 18 + [2.0, 2.0, 100.0], 1) == pytest.approx(18 / 17)
    assert strategy_trial._average_cycle([1.0, 1.0, 1.0, 9.0] * 5, 4) == 3.0


def test_unknown_traffic_is_noted_and_not_shown_as_zero(cluster: dtkit.Cluster):
    strategies = [dtkit.TensorParallel(2), dtkit.DataParallel()]
    found = ask(cluster, strategies=strategies)
    name = repr(strategies[0])
    is_measured = found.get_rows(name)[0].is_measured
    end = "; 'other' contains the time it takes" if is_measured else ", and the time it takes: 'in all' is a lower"
    assert any(f"not counted: what {name} sends within layers{end}" in note for note in found.notes)
    rows = [dataclasses.replace(row, is_measured=not is_measured) for row in found.get_rows(name)]
    assert ("lower bound" in planner._list_unknowns(rows)[0]) == is_measured
    assert [math.isnan(found.get_rows(strategy)[0].sent_bytes) for strategy in strategies] == [True, False]
    assert "what is sent not counted" in " ".join(text.get_text() for text in found.figure().axes[1].texts)


def test_stages_of_unmeasured_layers_are_equal(cluster: dtkit.Cluster):
    found = ask(cluster, strategies=[dtkit.Pipeline(2, 4)])
    assert "stages of a pipeline are taken as equal: its layers can't be measured (a double has no data)" in found.notes
    assert found.rows[0].parameters == found.rows[1].parameters == BYTES // 2


def test_a_plan_splits_the_batch_by_shard_weights(cluster: dtkit.Cluster):
    part = cluster.partition(batch(40, 100), weights=[3, 1])
    assert [row.rows for row in ask(cluster, data=part).get_rows("DataParallel()")] == [12, 4]


def test_the_sent_model_counts_unless_it_was_broadcast(cluster: dtkit.Cluster):
    model = perceptron()
    assert ask(cluster, model).rows[0].sent_model == BYTES
    assert ask(cluster, cluster.broadcast(model)).rows[0].sent_model == 0


def test_a_benchmark_is_cached(cluster: dtkit.Cluster, engines: FakeTransport):
    found = cluster.benchmark()
    assert cluster.benchmark() is found
    assert ask(cluster).benchmark is found
    assert cluster.benchmark(remeasure=True) is not found
    assert cluster.benchmark("float64") is not cluster.benchmark()
    asked = [args["dtype"] for _, op, args in engines.served_requests if op == "measure_links"]
    assert asked == ["float32"] * 4 + ["float64"] * 2
    with pytest.raises(ValueError, match="dtype='int8'"):
        cluster.benchmark("int8")


def test_a_model_that_may_not_fit_takes_no_real_step(cluster: dtkit.Cluster, engines: FakeTransport):
    engines.memory_free = 400_000
    found = ask(cluster)
    assert found.fitting == ()
    assert any("no step was taken" in note for note in found.notes)
    assert "measure_step_times" not in {op for _, op, _ in engines.served_requests}


@pytest.fixture
def small_models_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models that are small on real engines be large on those of this file."""
    monkeypatch.setattr(fit_check, "_NEGLIGIBLE_BYTES", 0)


def test_no_engine_is_asked_for_its_memory_before_a_small_training(cluster: dtkit.Cluster, engines: FakeTransport):
    fit_check.check_fits(cluster._engine_group, perceptron(), adam, dtkit.DataParallel())
    assert not [op for _, op, _ in engines.served_requests if op.startswith("measure")]


# Per rank: 89 kB as sent, to train, and as gradients; AdamW keeps twice that.
NEEDED = 5 * BYTES + STEPS


@pytest.mark.usefixtures("small_models_count")
def test_a_model_that_certainly_fits_needs_only_a_memory_measurement(cluster: dtkit.Cluster, engines: FakeTransport):
    fit_check.check_fits(cluster._engine_group, perceptron(), adam, dtkit.DataParallel())
    assert [op for _, op, _ in engines.served_requests if op.startswith("measure")] == ["measure_available_memory"] * 2


@pytest.mark.usefixtures("small_models_count")
def test_training_is_refused_only_for_persistent_memory(cluster: dtkit.Cluster, engines: FakeTransport):
    engines.memory_free = 2 * NEEDED  # both engines share it
    fit_check.check_fits(cluster._engine_group, perceptron(), adam, dtkit.DataParallel())
    engines.memory_free = 2 * NEEDED - 4
    refusal = r"Sequential does not fit rank 0 with DataParallel\(\): it needs 444 kB .*the model as sent 88.8 kB, "
    with pytest.raises(
        ValueError, match=refusal + r".*optimizer state 178 kB\), and 444 kB are free.*These would fit: Sharded"
    ):
        fit_check.check_fits(cluster._engine_group, perceptron(), adam, dtkit.DataParallel())
    fit_check.check_fits(cluster._engine_group, perceptron(), sgd, dtkit.DataParallel())  # keeps nothing
    fit_check.check_fits(
        cluster._engine_group, perceptron(), adam, dtkit.DataParallel(find_unused_parameters=True)
    )  # its gradients are unknown
    copies = cluster.broadcast(perceptron())
    fit_check.check_fits(cluster._engine_group, copies, adam, dtkit.DataParallel())  # is there already


@pytest.mark.usefixtures("small_models_count")
def test_a_refusal_lists_the_memory_of_one_rank_of_a_sharded_model(cluster: dtkit.Cluster, engines: FakeTransport):
    engines.memory_free = 2 * BYTES
    with pytest.raises(
        ValueError, match=r"it needs 178 kB .*\(parameters 44.4 kB, gradients 44.4 kB, optimizer state 88"
    ):
        fit_check.check_fits(cluster._engine_group, perceptron(), adam, dtkit.Sharded())


@pytest.mark.usefixtures("small_models_count")
def test_a_refusal_names_strategies_that_fit(cluster: dtkit.Cluster, engines: FakeTransport):
    engines.memory_free = 2 * NEEDED + 2 * BYTES
    with pytest.raises(ValueError, match=r"These would fit: DataParallel\(\), ParameterAveraging"):
        fit_check.check_fits(cluster._engine_group, perceptron(), adam, ParameterAveraging(outer=OuterSGD(lr=0.5)))


def test_training_is_not_refused_when_the_optimizer_has_no_estimate(cluster: dtkit.Cluster, engines: FakeTransport):
    def looks(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=float(parameters[0].sum()))

    engines.memory_free = 2 * NEEDED - 4
    fit_check.check_fits(cluster._engine_group, perceptron(), looks, dtkit.DataParallel())


def test_replica_cost_includes_overhead_and_peak_transient_memory():
    cost = Cost.for_replica(make_profile(overhead=LinearFit(0, MB)), sent_bytes=0, exposed_s=0, micro_batches=2)
    assert cost.overhead == 4 * MB
    assert cost.transient_bytes == max(cost.activations, cost.temporaries) == 30 * MB


def test_plan_reports_which_of_how_many_strategies_it_tries(monkeypatch: pytest.MonkeyPatch):
    shown: list[str] = []
    monkeypatch.setattr("dtkit.dashboard.text.progress.Progress.update", lambda _, text: shown.append(text))
    strategies = [dtkit.DataParallel(), dtkit.Sharded()]
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster:
        cluster.plan(
            small.net(), small.data(), batch_size=8, loss=nn.CrossEntropyLoss(), optimizer=small.sgd,
            strategies=strategies,
        )  # fmt: skip
    assert [text.rpartition(" with ")[2] for text in shown if " with " in text] == [
        "DataParallel (1 of 2)",
        "Sharded (2 of 2)",
    ]


def test_the_notebook_does_not_load_what_only_engines_need_of_a_pipeline():
    code = (
        "import sys, dtkit; dtkit.Pipeline(2, 4); "
        "print([name for name in ('torch._dynamo', 'torch.distributed.pipelining') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"

"""Step timing: means by phase, the bars shown, and the nodes named as stragglers."""

import re

import numpy as np
import pytest

from dtkit.dashboard.report_cards import iterate_cards
from dtkit.dashboard.summary import timing
from dtkit.dashboard.summary.metrics import build_tiles, compute_run_metrics
from dtkit.dashboard.summary.timing import (
    PHASES,
    WINDOW_STEPS,
    Straggler,
    compute_step_timing,
    format_nodes,
    select_bars,
)
from dtkit.dashboard.summary.verdict import find_verdict
from dtkit.dashboard.text.run_text import format_run
from dtkit.history.history import ROW_DTYPE, History
from dtkit.history.speed import compute_speed
from tests.support.fake_source import FakeSource

WAITING = PHASES.index("waiting")


def source(ranks=4, slow=None, steps=100, seed=0):
    made = FakeSource(ranks=ranks, seed=seed)
    made.slowness = slow or {}
    made.advance(steps)
    return made


def taken_apart(ranks=4, slow=None, steps=100, seed=0):
    return compute_step_timing(source(ranks, slow, steps, seed).history, ranks)


def test_step_time_and_throughput_are_those_of_the_bars():
    """Where nodes are slow in turn, the mean of the slowest node's steps exceeds the time that passed."""
    history = History()
    rows = np.zeros(82, ROW_DTYPE)  # an even number of steps after the first one, which does not count
    rows["step"], rows["rank"], rows["samples"] = np.repeat(np.arange(41), 2), np.tile([0, 1], 41), 32
    rows["step_s"] = np.where((rows["step"] + rows["rank"]) % 2, 0.03, 0.01)
    history.append(rows)
    metrics = compute_run_metrics(history, 2)
    assert metrics.step_s == pytest.approx(0.02)
    assert metrics.throughput == pytest.approx(64 / 0.02)


def test_phase_means_of_the_last_steps_sum_to_the_step_time():
    history = source(slow={1: 2.0}).history
    timing = compute_step_timing(history, 4)
    assert timing.num_steps == WINDOW_STEPS
    rows = history.rows(50 * 4)
    for rank in range(4):
        own = rows[rows["rank"] == rank]
        columns = ("data_s", "forward_s", "backward_s", "wait_s", "comm_s", "update_s")
        np.testing.assert_allclose(timing.seconds[rank, :6], [own[name].mean() for name in columns], rtol=1e-5)
        np.testing.assert_allclose(timing.seconds[rank].sum(), own["step_s"].mean(), rtol=1e-5)
    assert timing.waiting_share == pytest.approx(rows["wait_s"].sum() / rows["step_s"].sum(), rel=1e-5)


def test_a_straggler_is_named_with_the_wait_it_causes():
    straggler = taken_apart(slow={1: 2.0}).straggler
    assert straggler.ranks == (1,)
    assert straggler.waiting_rank != 1
    assert straggler.wait_share == pytest.approx(80 / 180, abs=0.03)  # computing 80 ms against 160 ms, in a step of 180
    assert Straggler((1,), 0, 0.34).text == "node 1 keeps the others waiting: 34 % of node 0's step"
    assert Straggler((1, 3), 0, 0.34).text == "nodes 1 and 3 keep the others waiting: 34 % of node 0's step"


@pytest.mark.parametrize("ranks", [1, 2, 4, 64])
@pytest.mark.parametrize("seed", range(5))
def test_noise_names_no_straggler(ranks, seed):
    assert taken_apart(ranks, seed=seed).straggler is None


@pytest.mark.parametrize(
    ("slow", "named_ranks"),
    [
        ({0: 1.05}, None),  # within the margin
        ({0: 1.3}, (0,)),
        ({1: 2.0, 3: 2.0}, (1, 3)),  # alike: speeding up one of them would not help
        ({1: 1.4, 3: 2.0}, (3,)),  # node 1 waits for node 3 as well
        ({1: 2.0, 2: 2.0, 3: 2.0}, (1, 2, 3)),  # a lone fast node waits
    ],
)
def test_typical_timings_name_the_expected_stragglers(slow, named_ranks):
    straggler = taken_apart(slow=slow).straggler
    assert (straggler and straggler.ranks) == named_ranks


def test_a_few_disturbed_steps_name_no_straggler():
    disturbed = source()
    rows = disturbed.history.rows(50 * 4)
    one = (rows["rank"] == 2) & (rows["step"] % 5 == 0)
    rows["backward_s"][one] *= 10  # the scheduler, not the machine
    rows["wait_s"][(rows["rank"] != 2) & (rows["step"] % 5 == 0)] += 0.45
    timing = compute_step_timing(disturbed.history, 4)
    assert timing.seconds[0, WAITING] > 0.05  # so others did wait
    assert timing.straggler is None


def test_slow_computing_without_waiting_names_no_straggler():
    """With averaging every 1000 steps, a slower rank keeps no other rank waiting."""
    history = source(slow={1: 2.0}).history
    history.rows()["wait_s"][:] = 0
    assert compute_step_timing(history, 4).straggler is None


def test_tiles_and_verdict_leave_the_first_step_out():
    """One look at the same steps: the tile must not show a waiting time that the verdict does not know."""
    run = source(2, steps=20)
    rows = run.history.rows()
    rows["wait_s"][:2], rows["step_s"][:2] = 100.0, 101.0  # the first step warms up
    metrics = compute_run_metrics(run.history, 2)
    assert metrics.timing.num_steps == 19
    assert metrics.timing.waiting_share < 0.1
    assert metrics.step_s < 1
    assert "waiting" not in find_verdict(run.history, run.spec).text


@pytest.mark.parametrize(("ranks", "enough"), [(2, 9), (4, 12), (64, 20)])  # with the first step, which does not count
def test_a_few_steps_name_no_straggler(ranks, enough):
    assert taken_apart(ranks, slow={1: 2.0}, steps=enough - 1).straggler is None
    assert taken_apart(ranks, slow={1: 2.0}, steps=enough).straggler is not None


def noisy(ranks, step_s, *, steps, seed, sigma, slow=None, spell=0.0):
    """Steps of a busy machine: lognormal computing times, and perhaps a spell in which one rank is slower."""
    random = np.random.default_rng(seed)
    compute = step_s * random.lognormal(0, sigma, (steps, ranks))
    compute *= [(slow or {}).get(rank, 1.0) for rank in range(ranks)]
    compute[:, random.integers(ranks)] *= 1 + spell
    rows = np.zeros(steps * ranks, ROW_DTYPE)
    rows["step"], rows["rank"] = np.repeat(np.arange(1, steps + 1), ranks), np.tile(np.arange(ranks), steps)
    rows["samples"], rows["weight"], rows["backward_s"] = 64, 64, compute.reshape(-1)
    rows["wait_s"] = (compute.max(1, keepdims=True) - compute).reshape(-1)
    rows["step_s"] = rows["backward_s"] + rows["wait_s"]
    history = History()
    history.append(rows)
    return compute_step_timing(history, ranks).straggler


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("steps", [10, 20, 50])
@pytest.mark.parametrize(("step_s", "sigma"), [(2e-3, 0.5), (2e-3, 1.0), (20e-3, 0.3), (20e-3, 1.0)])
def test_heavy_tailed_noise_names_no_straggler(ranks, steps, step_s, sigma):
    windows = 400
    false = [noisy(ranks, step_s, steps=steps, seed=seed, sigma=sigma) for seed in range(windows)]
    assert sum(found is not None for found in false) < 0.01 * windows


@pytest.mark.parametrize("ranks", [2, 4])
def test_slow_periods_of_short_steps_name_no_straggler(ranks):
    """As recorded: for a whole window, the scheduler makes one rank compute 50 % longer."""
    assert all(noisy(ranks, 2e-3, steps=50, seed=k, sigma=0.4, spell=0.5) is None for k in range(400))


@pytest.mark.parametrize(("ranks", "steps"), [(2, 9), (4, 12)])
def test_a_rank_twice_as_slow_is_named_within_about_ten_steps(ranks, steps):
    found = [noisy(ranks, 20e-3, steps=steps, seed=k, sigma=0.1, slow={1: 2.0}) for k in range(200)]
    assert all(straggler is not None and straggler.ranks == (1,) for straggler in found)


@pytest.mark.parametrize("sigma", [0.3, 0.5])
def test_a_full_window_names_a_slow_rank_despite_heavy_noise(sigma):
    found = [noisy(4, 20e-3, steps=50, seed=k, sigma=sigma, slow={1: 2.0}) for k in range(200)]
    assert np.mean([straggler is not None and straggler.ranks == (1,) for straggler in found]) > 0.98


def test_stages_of_a_pipeline_are_not_stragglers():
    staged = FakeSource(ranks=4, stages=2)
    staged.slowness = {1: 2.0, 3: 2.0}
    staged.advance(60)
    timing = compute_step_timing(staged.history, 4)
    assert not timing.is_same_work
    assert timing.straggler is None
    assert timing.seconds[0, WAITING] > 0.05  # though others wait for them
    many = FakeSource(ranks=16, stages=2)
    many.advance(60)
    assert [bar.label.split(":")[0] for bar in select_bars(compute_step_timing(many.history, 16))] == [
        "least work",
        "median",
        "most work",
    ]


@pytest.mark.parametrize("silent", ["no samples", "no loss at all"])
def test_ranks_without_samples_are_not_mistaken_for_stages(silent):
    history = source(slow={1: 2.0}).history
    rows = history.rows()
    chosen = rows["rank"] == 2 if silent == "no samples" else np.ones(len(rows), bool)
    rows["loss"][chosen], rows["weight"][chosen] = np.nan, 0
    rows["samples"][rows["rank"] == 2] = 0
    assert compute_step_timing(history, 4).straggler.ranks == (1,)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_each_of_few_nodes_has_a_bar(ranks):
    shown = select_bars(taken_apart(ranks, {1: 2.0} if ranks > 1 else None))
    assert [bar.label for bar in shown] == [f"node {k}" for k in range(ranks)]
    assert [bar.rank for bar in shown if bar.is_straggler] == ([1] if ranks > 1 else [])


@pytest.mark.parametrize("ranks", [9, 256])
def test_many_nodes_have_bars_of_fastest_median_and_slowest(ranks):
    shown = select_bars(taken_apart(ranks, {7: 2.0, 3: 0.5}))
    labels = [bar.label for bar in shown]
    assert labels[0] == "fastest: node 3"
    assert labels[1].startswith("median: node ")
    assert labels[2] == "slowest: node 7"
    assert [bar.is_straggler for bar in shown] == [False, False, True]


def test_timing_without_steps_or_phases_is_not_measured():
    empty = compute_step_timing(History(), 3)
    assert (empty.num_steps, empty.is_measured, empty.waiting_share, empty.straggler, select_bars(empty)) == (
        0,
        False,
        None,
        None,
        [],
    )
    rows = np.zeros(20, ROW_DTYPE)
    rows["step"], rows["rank"], rows["step_s"] = np.repeat(np.arange(10), 2), np.tile([0, 1], 10), 0.1
    history = History()
    history.append(rows)
    assert not compute_step_timing(history, 2).is_measured  # a loop of the user's own knows only how long a step was
    assert compute_step_timing(history, 2).waiting_share == 0


def test_ranks_without_rows_and_nonfinite_times_are_left_out():
    history = source(ranks=3).history
    rows = history.rows()
    rows["rank"][rows["rank"] == 1] = 2
    rows["forward_s"][-1] = np.nan
    rows["backward_s"][-2] = np.inf
    timing = compute_step_timing(history, 3)
    assert [bar.rank for bar in select_bars(timing)] == [0, 2]
    assert np.isfinite(timing.seconds[[0, 2]]).all()


def test_format_nodes_shortens_long_lists():
    assert format_nodes((1,)) == "node 1"
    assert format_nodes((1, 3)) == "nodes 1 and 3"
    assert format_nodes((1, 3, 5, 6)) == "nodes 1, 3, 5 and 6"
    assert format_nodes(range(10, 25)) == "nodes 10, 11, 12 and 12 more"


def test_numbers_of_a_run_that_is_over_are_those_of_all_its_steps():
    source = FakeSource(ranks=2)
    source.advance(300)
    source.slowness = {0: 3.0, 1: 3.0}  # the last steps are slow
    source.advance(50)
    running = compute_run_metrics(source.history, 2)
    assert running.timing.steps_text == "last 50 steps"
    source.event("done", "done after 350 steps")
    over = compute_run_metrics(source.history, 2)
    assert over.timing.steps_text == "all steps but the first"
    assert over.throughput == compute_speed(source.history).samples_per_s > 1.5 * running.throughput
    tiles = {tile.label: tile.note for tile in build_tiles(source, over)}
    assert (tiles["throughput"], tiles["mean step time"]) == (
        "samples/s, all steps but the first",
        "all steps but the first",
    )
    verdict = find_verdict(source.history, source.spec)
    assert verdict.arithmetic[0].startswith("means of all steps but the first and all nodes: data")
    source.advance(60)  # the run was extended
    assert compute_run_metrics(source.history, 2).timing.steps_text == "last 50 steps"


def test_means_name_their_steps_for_views_that_are_drawn_later_than_others():
    source = FakeSource(ranks=2)
    source.advance(1)
    assert compute_run_metrics(source.history, 2).timing.range_text == "step 1"
    source.advance(1249)
    assert compute_run_metrics(source.history, 2).timing.range_text == "steps 1,201 to 1,250"
    source.event("done", "done after 1,250 steps")
    assert compute_run_metrics(source.history, 2).timing.range_text == "all steps but the first"


def test_numbers_of_a_failed_run_are_those_of_all_its_steps():
    source = FakeSource(ranks=2)
    source.advance(300)
    source.event("error", "node 1: ValueError: bad rows")
    failed = compute_run_metrics(source.history, 2)
    assert failed.timing.steps_text == "all steps but the first"
    assert failed.throughput == compute_speed(source.history).samples_per_s
    source.event("repair", "node 1 replaced: all go on from step 300 1.7 s after the loss, no step lost", 1)
    source.advance(60)
    assert compute_run_metrics(source.history, 2).timing.steps_text == "last 50 steps"
    source.event("done", "done after 360 steps")
    over = compute_run_metrics(source.history, 2)
    assert over.timing.steps_text == "59 steps since the repair"
    assert over.throughput == compute_speed(source.history).samples_per_s
    tiles = {tile.label: tile for tile in build_tiles(source, over)}
    assert tiles["throughput"].note == "samples/s, all steps but the first"
    assert tiles["mean step time"].note == "all steps but the first"
    (card,) = [card for card in iterate_cards(source, None) if card[0] == "throughput"]
    assert card[1:] == (tiles["throughput"].value, tiles["throughput"].note)
    assert re.search(
        r"; all steps but the first: .*, waiting \d.* % in 59 steps since the repair\n", format_run(source)
    )


def test_the_chance_of_many_steps_agrees_with_the_exact_sum(monkeypatch):
    times = np.random.default_rng(0).normal(1.0, 0.1, (600, 2)) + np.array([0.0, 0.008])
    about = timing._compute_chance(times, 1, 0)
    monkeypatch.setattr(timing, "_MAX_EXACT_STEPS", 1000)
    assert about == pytest.approx(timing._compute_chance(times, 1, 0), rel=0.05)

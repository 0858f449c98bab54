"""The verdict on what holds a run back, on histories whose cause is planted."""

from __future__ import annotations

import dataclasses
import html
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dtkit._util import timeouts
from dtkit._util.formatting import format_rate
from dtkit.dashboard.figures.run_figure import draw_run
from dtkit.dashboard.live.messages import MessageBuilder
from dtkit.dashboard.report_cards import iterate_cards
from dtkit.dashboard.summary.metrics import build_tiles, compute_run_metrics
from dtkit.dashboard.summary.one_process import OneProcess, estimate_growth, read_verification
from dtkit.dashboard.summary.steady_verdict import SteadyVerdict
from dtkit.dashboard.summary.timing import count_window_steps
from dtkit.dashboard.summary.verdict import MIN_STEPS, Verdict, find_shown_verdict, find_verdict
from dtkit.dashboard.text.run_text import format_run
from dtkit.history.between_steps import read_time_between
from dtkit.history.history import ROW_DTYPE, History
from dtkit.history.scalars import BETWEEN_PREFIX, ScalarRecord
from dtkit.rpc.reference import StepTimes
from dtkit.types import Event, ModelSummary, NodeInfo, State
from tests.support.fake_source import FakeSource
from tests.support.phase_rows import make_phase_rows
from tests.support.verification import make_verification

if TYPE_CHECKING:
    from collections.abc import Sequence

SPEC = FakeSource(ranks=2).spec


def find(
    seconds: list[dict[str, float]],
    steps: int = 60,
    stages: int = 1,
    measured: OneProcess | None = None,
    nodes: Sequence[NodeInfo] = (),
    **spec: Any,
) -> Verdict:
    """Return the verdict on steps in which each rank takes these milliseconds in each phase."""
    ranks = len(seconds)
    rows = make_phase_rows(seconds, steps)
    if stages > 1:
        early = rows["rank"] % stages < stages - 1
        rows["loss"][early], rows["weight"][early] = np.nan, 0
    history = History(ranks_per_replica=stages)
    history.append(rows)
    return find_verdict(history, dataclasses.replace(SPEC, world_size=ranks, batch_size=64, **spec), measured, nodes)


def computing(**more: float) -> dict[str, float]:
    return {"forward": 20.0, "backward": 40.0, **more}


def test_slow_loading_on_one_node_names_the_node_and_the_workers():
    verdict = find([computing(wait=40), computing(data=40)])
    assert verdict.cause == "data"
    assert verdict.text == "waiting for data on node 1: num_workers=1 would save up to 40 %"
    assert any("100 ms - 40 ms = 60 ms" in line for line in verdict.arithmetic)


def test_slow_loading_on_all_nodes_asks_for_enough_workers():
    verdict = find([computing(data=140)] * 2)
    assert verdict.text == "waiting for data: num_workers=3 would save up to 70 %"


def test_a_batch_that_takes_a_minute_to_load_for_a_tiny_step_has_a_verdict():
    verdict = find([{"data": 60_000.0, "forward": 0.02}] * 2)
    assert verdict.cause == "data"
    assert "60.00002 s - 60.00000 s = 0.00002 s a step" in verdict.arithmetic[-2]
    assert "60.00000 s / 0.00002 s rounds up to 3,000,000 workers" in verdict.arithmetic[-1]


def test_steps_that_only_load_have_no_verdict_on_workers():
    assert find([{"data": 100.0}] * 2).cause != "data"


def test_too_few_workers_are_counted_by_what_they_load_now():
    verdict = find([computing(data=60)] * 2, num_workers=1)
    assert verdict.text == "waiting for data: num_workers=2 (1 now) would save up to 50 %"


def test_a_straggler_is_named_with_the_speed_up_without_it():
    verdict = find([computing(wait=60), {"forward": 40.0, "backward": 80.0}], strategy="Sharded()")
    assert verdict.text == "without the straggler (node 1) 2.0 times as fast"
    balanced = find([computing(wait=60), {"forward": 40.0, "backward": 80.0}], strategy="DataParallel()")
    assert balanced.text == 'without the straggler (node 1) 2.0 times as fast; with balance="auto" 1.5 times'


def test_communication_proposes_a_batch_and_what_it_brings():
    verdict = find([computing(comm=60)] * 2)
    assert verdict.cause == "communication"
    assert verdict.text == (
        "communication is 50 % of a step: batch_size=256 for 1.6 times the samples/s; or send less, with "
        'ParameterAveraging() or DataParallel(compress="bf16")'
    )
    assert verdict.gain == pytest.approx(1 - (60 + 4 * 60) / (4 * 120))


def test_short_steps_lead_to_the_times_of_one_process_where_rows_may_cost_nothing():
    short = {"forward": 0.2, "backward": 0.5}
    verdict = find([short | {"comm": 0.3}] * 2)
    assert verdict.text.startswith("communication is 30 % of a step: batch_size=")
    assert verdict.text.endswith("; run.verify() compares with one process")
    least, most = find([short | {"comm": 0.05}] * 2), find([short | {"comm": 1.0}] * 2)
    assert "run.verify()" not in least.text  # one process is hardly faster, at best
    assert most.text.startswith("one process is faster")  # at worst, too


def test_run_that_is_slower_than_one_process_says_so_with_the_arithmetic():
    verdict = find([computing(comm=90, update=10), computing(comm=94, update=6)])
    assert verdict.cause == "one process"
    assert verdict.text == (
        "one process is faster, with 130 ms a step at most instead of 160 ms (means): use a larger batch "
        "(batch_size=256 for 1.9 times the samples/s) or model, or Cluster(1)"
    )
    assert verdict.arithmetic[0] == (
        "one process computes the rows of 2 nodes: 2.00 * 60 ms + 10 ms (update, other) = 130 ms; computing grows at "
        "most as the rows. Nodes that share cores compute more slowly than it would; run.verify() measures it"
    )
    assert verdict.arithmetic[1].startswith("communication is 57 % of a step: batch_size=256")


def read_times(all_ranks_s: float, single_process_s: float) -> OneProcess | None:
    """Return the times of a verification of two nodes before their first step."""
    source = FakeSource(ranks=2)
    source.verification = make_verification(StepTimes(17, all_ranks_s, single_process_s))
    return read_verification(source)


def measure(all_ranks_s: float, single_process_s: float) -> FakeSource:
    """Return a run of two nodes whose steps take 100 ms, after a verification."""
    source = FakeSource(ranks=2)
    source.advance(100)
    source.verification = make_verification(StepTimes(17, all_ranks_s, single_process_s))
    return source


@pytest.mark.parametrize(
    ("seconds", "stages", "strategy", "finding"),
    [
        ([computing(comm=90, update=10)] * 2, 1, "Sharded()", "communication is 56 % of a step"),
        ([computing(comm=60)] * 2, 1, "TensorParallel(tp_size=2)", "communication is 50 % of a step"),
        ([computing(wait=40)] * 2, 2, "Pipeline(stages=2, micro_batches=4)", "stages wait 40 % of the time"),
    ],
)
def test_a_small_model_should_not_be_split(seconds, stages: int, strategy: str, finding: str):
    nodes = FakeSource(ranks=2).nodes
    small, large = ModelSummary(2_882, 2_882, ()), ModelSummary(200_000_000, 200_000_000, ())
    verdict = find(seconds, stages=stages, strategy=strategy, nodes=nodes, model=small)
    advice = "the model is too small to be split: use DataParallel() or one process"
    assert verdict.text == f"{finding}, and {advice}; run.verify() compares with one process"
    line = "2,882 parameters * 16 bytes (value, gradient, two moments of the optimizer) = 46.1 kB, and a node"
    assert any(each.startswith(line) for each in verdict.arithmetic)
    for other in (
        find(seconds, stages=stages, strategy=strategy, nodes=nodes, model=large),
        find(seconds, stages=stages, strategy=strategy, model=small),
    ):  # its memory is unknown
        assert "too small" not in other.text
    assert "too small" not in find(seconds, strategy="DataParallel()", nodes=nodes, model=small).text
    measured = OneProcess(0.02, 0.16, "20 ms a step instead of 160 ms", "", True)
    text = find(seconds, stages=stages, strategy=strategy, nodes=nodes, model=small, measured=measured).text
    assert text.endswith("instead of 160 ms: use a larger model, or Cluster(1)")


def test_a_verification_that_found_one_process_faster_comes_before_any_prediction():
    source = FakeSource(ranks=2)
    source.advance(100)
    assert find_shown_verdict(source).cause == "computing"
    source = measure(all_ranks_s=0.098, single_process_s=0.0235)
    verdict = find_shown_verdict(source)
    assert verdict.cause == "one process"
    start = "one process is faster, with 24 ms a step instead of 98 ms (medians of run.verify()): "
    assert verdict.text.startswith(start)
    assert "medians of 17 steps" in verdict.arithmetic[0]
    assert "0.24 times as fast" in verdict.arithmetic[0]
    assert verdict.text in format_run(source)


def test_a_verification_that_found_the_nodes_faster_replaces_the_estimate():
    slow = [computing(comm=90, update=10)] * 2
    assert find(slow).cause == "one process"
    verdict = find(slow, measured=read_times(0.080, 0.100))
    assert verdict.cause == "communication"
    assert "1.25 times as fast" in verdict.arithmetic[-1]


def test_a_disturbed_verification_does_not_replace_the_estimate():
    slow = [computing(comm=90, update=10)] * 2
    assert find(slow, measured=read_times(0.020, 0.100)) == find(slow)


@pytest.mark.parametrize("all_ranks_s", [0.05, 0.2])
def test_a_verification_with_other_step_times_than_the_run_gives_no_speed(all_ranks_s: float):
    source = measure(all_ranks_s, single_process_s=all_ranks_s / 4)
    assert read_verification(source) is None
    assert find_shown_verdict(source).cause == "computing"
    source.verification = make_verification(StepTimes(17, all_ranks_s, all_ranks_s / 4, run_step_s=0.1))
    text = source.verification.text()
    assert "times as fast" not in text
    assert ", 2 times the " in text


def test_a_verification_while_others_had_the_cores_says_so_and_gives_no_speed():
    others = "other programs used 1.4 of 2 cores meanwhile: pytest"
    source = measure(all_ranks_s=0.1, single_process_s=0.03)
    source.verification = make_verification(StepTimes(17, 0.1, 0.03, run_step_s=0.1, others=others))
    assert f"30 ms in one process: not comparable, because {others}" in source.verification.text()
    assert "times as fast" not in source.verification.text()
    assert read_verification(source) is None


def test_a_worse_straggler_is_named_before_a_measured_process():
    slow = [computing(wait=180), {"forward": 80.0, "backward": 160.0}]
    assert find(slow, measured=read_times(0.100, 0.080)).cause == "straggler"
    assert find(slow, measured=read_times(0.100, 0.020)).cause == "one process"


def test_times_in_the_shown_line_follow_those_of_the_tile_beside_it():
    steady = SteadyVerdict()
    slow = find([computing(comm=90, update=10)] * 2)
    assert steady.update(slow, 0.0) == slow
    assert steady.update(find([computing(comm=92, update=10)] * 2), 1.0) == slow  # a little noise
    half = find([{"forward": 10.0, "backward": 20.0, "comm": 45.0, "update": 5.0}] * 2)
    assert half.gain == pytest.approx(slow.gain)
    assert steady.update(half, 2.0) == half
    assert "instead of 80 ms" in steady.shown.text


def test_shorter_steps_show_how_little_more_one_process_would_compute():
    history = History()
    rows = np.zeros(120, ROW_DTYPE)
    rows["step"], rows["rank"] = np.repeat(np.arange(60), 2), np.tile(np.arange(2), 60)
    rows["samples"], rows["weight"], rows["loss"], rows["comm_s"] = 32, 32, 1.0, 0.04
    rows["forward_s"], rows["backward_s"] = 0.02, 0.04
    is_last = rows["step"] % 10 == 9  # of an epoch
    rows["samples"][is_last], rows["forward_s"][is_last], rows["backward_s"][is_last] = 2, 0.015, 0.03
    rows["step_s"] = rows["forward_s"] + rows["backward_s"] + rows["comm_s"]
    history.append(rows)
    growth, is_shown = estimate_growth(history, 2)
    assert (growth, is_shown) == (pytest.approx(1 + 32 * (60 - 45) / 30 / 60), True)
    verdict = find_verdict(history, dataclasses.replace(SPEC, world_size=2, batch_size=64, strategy="DataParallel()"))
    assert verdict.text.startswith(
        "one process is faster, with about 74 ms a step instead of 98 ms (means): use a larger batch"
    )
    assert "shorter steps show how computing grows" in verdict.arithmetic[0]


def test_growth_of_computing_is_between_none_and_all():
    history = History()
    assert estimate_growth(history, 3) == (3.0, False)
    rows = np.zeros(40, ROW_DTYPE)
    rows["step"], rows["samples"] = np.arange(40), np.where(np.arange(40) % 5 == 4, 2, 32)
    rows["forward_s"] = np.where(rows["samples"] == 2, 0.3, 0.2)  # a busy machine
    history.append(rows)
    assert estimate_growth(history, 3) == (1.0, True)


@pytest.mark.parametrize(
    ("phases", "strategy"),
    [
        ([computing(comm=50, update=10)] * 2, "DataParallel()"),
        ([computing(comm=90, update=10)] * 2, "Sharded()"),
        ([computing(comm=200)], "DataParallel()"),
        ([computing(comm=30, wait=240), {"forward": 100.0, "backward": 200.0, "comm": 30.0}], "DataParallel()"),
    ],
    ids=["faster", "another model", "one node", "straggler"],
)
def test_one_process_is_not_named_where_it_is_not_surely_faster(phases: Any, strategy: str):
    verdict = find(phases, strategy=strategy)
    assert verdict.cause != "one process"
    assert ("run.verify()" in verdict.text) == (strategy == "Sharded()")


@pytest.mark.parametrize("strategy", ["Sharded()", "TensorParallel(tp_size=2)", "Pipeline(stages=2)"])
def test_verdict_names_verify_where_one_process_is_not_estimated(strategy: str):
    line = f"one process isn't estimated for {strategy.partition('(')[0]}, whose own work"
    assert line in find([computing(comm=60)] * 2, strategy=strategy).arithmetic[-1]
    hint = "; run.verify() compares with one process"
    text = find([computing(comm=60)] * 2, strategy=strategy).text
    assert text.endswith(hint) == ("batch_size=" in text)
    assert line not in "".join(find([computing(comm=60)], strategy=strategy).arithmetic)
    measured = find(
        [computing(comm=60)] * 2,
        strategy=strategy,
        measured=read_times(0.1, 0.09),
    )
    assert line not in "".join(measured.arithmetic)
    assert line not in "".join(find([computing(comm=60)] * 2).arithmetic)


def test_communication_that_grows_with_the_batch_proposes_no_batch():
    verdict = find([computing(comm=60)] * 2, strategy="TensorParallel(tp_size=2)")
    assert verdict.cause == "communication"
    assert "batch_size" not in verdict.text


def test_averaging_proposes_to_average_less_often():
    assert find([computing(comm=60)] * 2, strategy="ParameterAveraging(every=4)").text.endswith("every=16")


def test_a_long_update_proposes_a_larger_batch():
    verdict = find([computing(update=60)] * 2)
    assert verdict.text.startswith("overhead that a batch of any size has is 50 % of a step: batch_size=256")


def test_a_pipeline_with_few_micro_batches_proposes_more():
    stages = [computing(wait=30), computing(wait=30)]
    verdict = find(stages, stages=2, strategy="Pipeline(stages=2, micro_batches=2)")
    assert verdict.text == "stages wait 33 % of the time: Pipeline(micro_batches=8) would save up to 25 %"


def test_an_uneven_pipeline_proposes_another_cut():
    stages = [computing(wait=60), {"forward": 40.0, "backward": 80.0}]
    verdict = find(stages, stages=2, strategy="Pipeline(stages=2, micro_batches=16)")
    assert verdict.text == (
        "the stages on node 1 compute 1.3 times as long as the mean: an even split= would save up to 25 %"
    )


def test_nodes_that_wait_in_turn_are_distinguished_from_a_straggler():
    assert find([computing(wait=30)] * 2).cause == "waiting"


def test_nothing_holds_a_run_back_that_computes():
    verdict = find([computing(comm=3)] * 2)
    assert verdict.text == "computing is 95 % of a step: nothing holds it back"
    assert verdict.gain == 0


def test_the_first_steps_have_no_verdict():
    assert find([computing()] * 2, steps=MIN_STEPS).cause == "unknown"
    assert find([computing()] * 2, steps=MIN_STEPS + 1).cause == "computing"


def test_a_cell_shows_the_arithmetic_that_explain_returns(capsys):
    verdict = find([computing(comm=60)] * 2)
    explanation = verdict.explain()
    assert capsys.readouterr().out == ""
    assert repr(explanation) == str(explanation) == "\n  ".join([verdict.text, *verdict.arithmetic])
    assert "60 ms + 4 * 60 ms = 300 ms" in explanation
    page = explanation._repr_html_()
    assert page.startswith(f"<p>{html.escape(verdict.text)}</p>")
    assert page.count("<li>") == len(verdict.arithmetic)


def test_text_and_picture_have_the_verdict():
    source = FakeSource(ranks=2)
    assert "→" not in format_run(source)
    source.slowness = {1: 2.0}
    source.advance(100)
    assert "→ without the straggler (node 1) 1.8 times as fast" in format_run(source)
    texts = [text.get_text() for text in draw_run(source).texts]
    assert any(text.startswith("→ without the straggler (node 1)") for text in texts)


def make_run_whose_nodes_wait_in_turn() -> FakeSource:
    source = FakeSource(ranks=2)
    for k in range(60):
        source.slowness = {k % 2: 2.0}
        source.advance(1)
    return source


def test_no_node_is_marked_while_the_page_says_none_is_slowest():
    source, now = make_run_whose_nodes_wait_in_turn(), [0.0]
    builder = MessageBuilder(source, clock=lambda: now[0])
    assert "none is always the slowest" in builder.build_snapshot().content["verdict"]["text"]
    source.slowness = {1: 2.0}
    marked = []
    for _ in range(5):  # the line stays for some seconds
        source.advance(50)
        content = builder.build_change().content
        is_marked = bool(content["nodes_now"]["slow"])
        assert bool(content["time"]["straggler"]) == any(bar["slow"] for bar in content["time"]["bars"]) == is_marked
        assert (builder._steady_verdict.shown.cause == "straggler") == is_marked
        marked.append(content["nodes_now"]["slow"])
        now[0] += timeouts.VERDICT_HOLD_S / 2
    assert marked[0] == []
    assert marked[-1] == [1]


def test_marks_of_a_slow_node_come_and_go_with_the_verdict_on_it():
    source, now = FakeSource(ranks=2), [0.0]
    source.advance(100)
    builder = MessageBuilder(source, clock=lambda: now[0])
    assert builder.build_snapshot().content["nodes_now"]["slow"] == []
    seen = []
    for slowness in [{1: 2.0}] * 6 + [{}] * 6:
        source.slowness = slowness
        source.advance(60)
        now[0] += timeouts.VERDICT_INTERVAL_S
        slow = builder.build_change().content["nodes_now"]["slow"]
        shown = builder._steady_verdict.shown
        assert slow == [1] * (shown.cause == "straggler")
        seen.append(shown.cause)
    assert seen == ["straggler"] * 6 + ["computing"] * 6  # the bars leave no doubt


def test_a_paused_run_has_the_verdict_on_its_last_steps():
    source, now = FakeSource(ranks=2), [0.0]
    source.advance(100)
    builder = MessageBuilder(source, clock=lambda: now[0])
    builder.build_snapshot()
    source.slowness = {1: 2.0}
    source.advance(60)
    now[0] += 0.1
    source.state = State.PAUSED  # no later message comes
    content = builder.build_change().content
    assert "without the straggler (node 1)" in content["verdict"]["text"]
    assert content["nodes_now"]["slow"] == [1]


def test_a_page_takes_its_verdict_back_with_the_message_of_an_error():
    source = FakeSource(ranks=2)
    source.advance(100)
    builder = MessageBuilder(source)
    assert builder.build_snapshot().content["verdict"] is not None
    source.exception = ValueError("bad rows")  # the last change of a run that failed
    assert builder.build_change().content["verdict"] is None


def test_a_stuck_or_failed_run_has_no_verdict_in_views():
    source = FakeSource(ranks=2)
    source.advance(100)
    assert find_shown_verdict(source) is not None
    source.exception = ValueError("bad rows")
    assert find_shown_verdict(source) is None
    source.exception = None
    source.stick(1)
    assert find_shown_verdict(source) is None


def test_views_after_a_repair_use_only_the_steps_after_it():
    source = FakeSource(ranks=2)
    source.slowness = {1: 3.0}
    source.advance(100)
    source.lose(1)
    source.event("repair", "node 1 replaced in 9 s, no step lost", 1)
    assert find_shown_verdict(source) is None
    source.slowness = {}
    source.advance(MIN_STEPS)
    assert find_verdict(source.history, source.spec).text == "5 steps since the repair: a verdict needs 6"
    source.advance(1)
    assert find_shown_verdict(source).cause == "computing"
    content = MessageBuilder(source).build_snapshot().content
    assert content["time"]["steps"] == f"steps {source.step - MIN_STEPS + 1} to {source.step}"
    assert f"means of the last {MIN_STEPS} steps" in content["verdict"]["arithmetic"][0]


def test_steps_that_a_repair_undid_are_not_in_the_window():
    source = FakeSource(ranks=2)
    source.advance(100)
    source.step = 80  # the snapshot
    source.lose(1)
    source.event("repair", "node 1 replaced in 9 s, 20 steps lost", 1)
    source.advance(10)
    assert count_window_steps(source.history) == 9


# -- between the steps ---------------------------------------------------------------------------------------------


def add_first_validation(history: History) -> None:
    """Add one that took long, since it loaded a module: it says nothing about the later ones."""
    history.add(ScalarRecord(0, {f"{BETWEEN_PREFIX}validation": [(10, 300.0, 1.0)]}))


def find_between(steps: int = 60, settings: tuple[tuple[str, str], ...] = (), **seconds: float) -> Verdict:
    """Return the verdict on a minute of computing, with these seconds between its steps, a third of them each."""
    history = History()
    history.append(make_phase_rows([{"forward": 400.0, "backward": 600.0}] * 2, steps + 1))
    add_first_validation(history)
    for step in (20, 40, 60):
        numbers = {BETWEEN_PREFIX + kind: [(step, part / 3, 1.0)] for kind, part in seconds.items()}
        history.add(ScalarRecord(0, numbers))
    spec = dataclasses.replace(SPEC, strategy="Sharded()", steps=600, steps_per_epoch=20, settings=settings)
    return find_verdict(history, spec)


def test_long_validation_is_the_cause_with_the_interval_that_makes_it_short():
    verdict = find_between(validation=25.7)
    assert verdict.cause == "validation"
    assert verdict.text == (
        "validation takes 30 % of the time: validation_every=5 would make the run 1.3 times as fast"
    )
    assert "60.0 s + 25.7 s / 5 = 65.1 s" in "\n".join(verdict.arithmetic)
    assert "85.7 s / 65.1 s = 1.32" in "\n".join(verdict.arithmetic)
    assert verdict.gain == pytest.approx(1 - 65.14 / 85.7, abs=1e-3)


def test_the_proposed_interval_of_validation_begins_at_the_present_one():
    assert "validation_every=10 would" in find_between(validation=25.7, settings=(("validation_every", "2"),)).text


def test_a_single_validation_is_no_cause():
    """The one that imported a module of metrics was said to take 96 % of the time."""
    assert find_between().cause == "computing"
    assert not [other for other in find_between().others if other.cause == "validation"]


def test_the_first_validation_of_a_replaced_engine_is_no_cause():
    """A metric that takes 8 s once in each process was said to take 44 % of the time."""
    history = History()
    history.append(make_phase_rows([{"forward": 400.0, "backward": 600.0}] * 2, 61))
    add_first_validation(history)
    history.add(Event(25, "repair", "node 1 replaced", 1.0, None))
    history.add(Event(30, "repair", "node 0 replaced", 1.0, None))  # before a validation: one warm-up for both
    for step, seconds in ((20, 0.5), (40, 200.0), (60, 0.5)):
        history.add(ScalarRecord(0, {f"{BETWEEN_PREFIX}validation": [(step, seconds, 1.0)]}))
    assert read_time_between(history).seconds["validation"] == pytest.approx(501.0)
    assert read_time_between(history).leave_out_warm_up().seconds["validation"] == pytest.approx(1.0)
    spec = dataclasses.replace(SPEC, strategy="Sharded()", steps=600, steps_per_epoch=20)
    assert find_verdict(history, spec).cause == "computing"


def test_a_run_of_two_epochs_is_validated_at_its_end():
    history = History()
    history.append(make_phase_rows([{"forward": 400.0, "backward": 600.0}] * 2, 61))
    add_first_validation(history)
    history.add(ScalarRecord(0, {f"{BETWEEN_PREFIX}validation": [(30, 26.0, 1.0)]}))
    spec = dataclasses.replace(SPEC, strategy="Sharded()", steps=60, steps_per_epoch=30)
    assert "validation_every=2 would" in find_verdict(history, spec).text


@pytest.mark.parametrize(
    ("kind", "cause", "text"),
    [
        (
            "callbacks",
            "callbacks",
            "callbacks take 30 % of the time: engines wait until they return; slow work belongs on a thread of its own",
        ),
        (
            "waiting",
            "dispatches",
            "waiting for the notebook takes 30 % of the time: other work in the notebook, or on its machine, delays",
        ),
        (
            "checkpoints",
            "checkpoints",
            "copying the state for checkpoints takes 30 % of the time: checkpoint_every=50 ",
        ),
        ("snapshots", "snapshots", "copying the state for snapshots takes 30 % of the time: without, the run would be"),
    ],
)
def test_other_work_between_steps_is_a_cause(kind: str, cause: str, text: str):
    verdict = find_between(settings=(("checkpoint_every", "10"),), **{kind: 25.7})
    assert verdict.cause == cause
    assert verdict.text.startswith(text), verdict.text
    if kind in ("waiting", "callbacks"):
        assert verdict.text.endswith(". Without, the run would be 1.4 times as fast"), verdict.text


def test_waits_for_the_notebook_are_no_cause_in_a_run_of_seconds():
    for steps, cause in ((61, "computing"), (101, "dispatches")):  # of 50 ms
        history = History()
        history.append(make_phase_rows([{"forward": 20.0, "backward": 30.0}] * 2, steps))
        history.add(ScalarRecord(0, {f"{BETWEEN_PREFIX}waiting": [(30, 1.5, 1.0)]}))
        spec = dataclasses.replace(SPEC, strategy="Sharded()", steps=steps, steps_per_epoch=20)
        assert find_verdict(history, spec).cause == cause


def test_short_work_between_steps_is_in_the_arithmetic_alone():
    verdict = find_between(validation=4.0)
    assert verdict.cause == "computing"
    assert verdict.arithmetic[-1] == "between the steps, in 6 % of the whole time: validation 6 %"
    assert not any("between" in line for line in find_between(validation=0.5).arithmetic)


def test_a_cause_within_the_steps_counts_by_its_part_of_the_whole_time():
    history = History()
    history.append(make_phase_rows([computing(data=30)] * 2, 61))
    add_first_validation(history)
    history.add(ScalarRecord(0, {f"{BETWEEN_PREFIX}validation": [(30, 10.0, 1.0)]}))
    verdict = find_verdict(history, dataclasses.replace(SPEC, strategy="Sharded()", steps=600, steps_per_epoch=20))
    assert verdict.cause == "validation"  # 33 % of the steps' time are data, which is 12 % of the whole
    assert "data" in [other.cause for other in verdict.others]


def test_views_show_the_throughput_with_the_time_between_steps_if_that_is_long():
    source = FakeSource(ranks=2)
    source.advance(60)
    assert "overall" not in next(build_tiles(source, compute_run_metrics(source.history, 2))).note
    source.history.add(ScalarRecord(0, {f"{BETWEEN_PREFIX}validation": [(30, 6.0, 1.0)]}))
    source.advance()
    metrics = compute_run_metrics(source.history, 2)
    between = read_time_between(source.history)
    assert metrics.throughput is not None
    assert metrics.overall_throughput is not None
    assert metrics.overall_throughput == pytest.approx(metrics.throughput * between.steps_s / between.whole_s)
    overall = format_rate(metrics.overall_throughput)
    assert next(build_tiles(source, metrics)).note == f"samples/s, {overall} overall"
    assert f"in steps, {overall} with the time between them" in format_run(source)
    source.state = State.COMPLETED
    cards = {label: note for label, _, note in iterate_cards(source, None)}
    assert "with the time between them" not in cards["throughput"]  # which is not in the duration of this source

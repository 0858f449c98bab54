"""Diagnosis of the rank that stalls the others, and the time of its report, without engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dtkit.health.detector import DetectorConfig, StallDetector
from dtkit.health.diagnosis import Diagnosis, RankObservation, diagnose, find_straggler
from dtkit.health.frames import MAX_FRAMES, Frame, is_compiling, make_stack
from dtkit.health.stacks import Stacks
from tests.support.observations import LIBRARY, USER, seen

if TYPE_CHECKING:
    from collections.abc import Callable


def ranks(culprit: RankObservation) -> list[RankObservation]:
    """Three ranks, all of which wait except this one."""
    return [culprit if rank == culprit.rank else seen(rank) for rank in range(3)]


AWAY: dict[str, Any] = {"is_blocked": False, "phase": "forward", "collective_counts": {"0": 4}}


# -- the stalled rank --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("culprit", "cause"),
    [
        (seen(1, "stopped"), "stopped"),
        (seen(1, "ended"), "ended"),
        (seen(1, "running", age_s=3.0), "silent"),
        (seen(1, "running", **AWAY), "away"),
        (seen(1, collective_counts={"0": 4}), "other"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_diagnosis_names_the_rank_that_keeps_the_others_waiting(culprit: RankObservation, cause: str):
    assert diagnose(ranks(culprit)) == Diagnosis(cause, 1)


def test_diagnosis_names_a_rank_that_returned_early_from_a_call():
    waiting = [seen(rank, op="call", phase="call", job=None, step=None) for rank in range(3)]
    waiting[2] = seen(2, op=None, phase="idle", is_blocked=False, collective_counts={}, stack=(), job=None, step=None)
    assert diagnose(waiting) == Diagnosis("returned", 2)


@pytest.mark.parametrize("op", ["advance", "evaluate", "take_snapshot", "save_checkpoint"])
def test_rank_that_has_finished_or_failed_is_not_blamed(op: str):
    done = seen(0, op=None, phase="idle", is_blocked=False, collective_counts={}, stack=())
    assert diagnose([done, seen(1, **AWAY | {"op": op}), seen(2, op=op)]) == Diagnosis("away", 1)


def test_wait_without_a_trace_in_the_stack_is_found_by_the_collective_count():
    """Neither stack shows a wait: DDP waits in C++, and a user's ``work.wait()`` in the user's line."""
    ahead = {"is_blocked": False, "phase": "backward", "collective_counts": {"0": 5}}
    assert diagnose([seen(0, **ahead), seen(1, **ahead), seen(2, **AWAY)]) == Diagnosis("away", 2)


def test_collective_counts_are_ignored_in_point_to_point_communication():
    stages = [seen(rank, is_p2p=True, phase="receive", collective_counts={"0": 3 + rank}) for rank in range(3)]
    stages[1] = seen(1, is_p2p=True, is_blocked=False, phase="forward", collective_counts={"0": 9})
    assert diagnose(stages) == Diagnosis("away", 1)


def test_collective_counts_of_different_jobs_are_not_compared():
    assert diagnose(
        [seen(0, job="job-2"), seen(1, collective_counts={"0": 4}), seen(2, collective_counts={"0": 4})]
    ) == Diagnosis("together")


def test_diagnosis_is_apart_if_all_ranks_wait_in_different_places():
    assert diagnose([seen(0), seen(1), seen(2, stack=(LIBRARY,))]) == Diagnosis("apart")


def test_diagnosis_is_together_if_all_ranks_compute():
    assert diagnose([seen(rank, **AWAY) for rank in range(3)]) == Diagnosis("together")


def test_outdated_or_missing_status_gives_no_diagnosis():
    assert diagnose(ranks(seen(1, age_s=2.0, **AWAY))) is None
    assert diagnose([seen(0), RankObservation(1, "there", 101, "unknown")]) is None
    assert diagnose([]) is None


def test_silence_of_all_ranks_gives_no_diagnosis():
    assert diagnose([seen(rank, age_s=4.0) for rank in range(3)]) is None


@pytest.mark.parametrize(
    ("shares", "slow"),
    [([0.9, 0.1, 0.8], 1), ([0.9, 0.4, 0.8], None), ([0.1, 0.1, 0.8], None), ([0.9, None, 0.8], None)],
)
def test_straggler_is_the_only_rank_that_hardly_ever_waits(shares: list[float | None], slow: int | None):
    assert find_straggler([seen(rank, blocked_fraction=share) for rank, share in enumerate(shares)]) == slow


# -- the time of the report --------------------------------------------------------------------------------


class World:
    """Three ranks that a test changes, and a count of their observations."""

    def __init__(self) -> None:
        self.ranks = ranks(seen(1, **AWAY))
        self.asked = 0

    def __call__(self) -> list[RankObservation]:
        self.asked += 1
        return self.ranks


@pytest.fixture
def world() -> World:
    return World()


def test_detector_observes_no_rank_before_a_dispatch_is_overdue(world: World):
    detector = StallDetector(world)
    assert detector.check(100.0) is None
    detector.on_sent(100.0)
    assert detector.check(104.9) is None
    assert world.asked == 0
    assert detector.check(105.1) is not None
    assert world.asked == 1


@pytest.mark.parametrize(("step_s", "limit"), [(0.05, 5.0), (2.0, 10.0), (20.0, 100.0)])
def test_time_limit_is_five_step_durations_but_at_least_five_seconds(world: World, step_s: float, limit: float):
    detector = StallDetector(world)
    detector.on_sent(0.0)
    detector.on_result(1.0, step_s)
    detector.on_sent(2.0)
    assert detector.limit_s == limit


def test_dispatch_starts_when_the_previous_one_has_returned(world: World):
    detector = StallDetector(world)
    detector.on_sent(0.0)
    detector.on_sent(0.1)
    detector.on_result(4.0, 0.5)
    assert detector.check(8.9) is None
    assert detector.check(9.1) is not None


def test_stall_report_names_rank_phase_step_and_line(world: World):
    detector = StallDetector(world)
    detector.on_sent(0.0)
    found = detector.check(6.0)
    assert found is not None
    assert (found.kind, found.rank, found.host, found.phase, found.step) == ("stuck", 1, "here", "forward", 12)
    assert found.location == "net.py:14 in forward"
    assert found.text == (
        "rank 1 keeps the others waiting: it has been in forward of step 12 for 6 s, and has not begun the collective "
        "that they are in. It is at net.py:14 in forward. cluster.stacks() shows the position of all ranks; "
        "cluster.interrupt() ends their calls"
    )


def test_stall_report_of_a_stopped_rank_has_its_own_remedy(world: World):
    world.ranks = ranks(seen(1, "stopped", stalled_s=0.0))
    detector = StallDetector(world)
    detector.on_sent(0.0)
    found = detector.check(6.0)
    assert found is not None
    assert "is stopped (SIGSTOP) and was last seen in a collective of step 12" in found.reason
    assert found.remedy.startswith(
        "`kill -CONT 101` on here lets it go on. After 8 s of silence its engine counts as lost"
    )
    assert found.is_stopped
    assert " It was last at " in found.text


def test_stall_is_reported_once_and_again_when_it_changes(world: World):
    detector = StallDetector(world)
    detector.on_sent(0.0)
    assert detector.check(6.0) is not None
    assert detector.check(6.5) is None
    world.ranks = ranks(seen(1, **AWAY | {"stalled_s": 7.0}))
    assert detector.check(7.0) is None
    assert detector.stall_report is not None
    assert detector.stall_report.stalled_s == pytest.approx(7.2)
    world.ranks = ranks(seen(1, **AWAY | {"phase": "backward"}))
    assert detector.check(7.5) is not None


def land(detector: StallDetector, world: World) -> None:
    detector.on_result(20.0, 0.1)


def move(detector: StallDetector, world: World) -> None:
    world.ranks = [seen(rank, stalled_s=0.1) for rank in range(3)]


@pytest.mark.parametrize("recover", [land, move])
def test_recovery_is_reported_once(world: World, recover: Callable[[StallDetector, World], None]):
    detector = StallDetector(world)
    detector.on_sent(0.0)
    assert detector.check(6.0) is not None
    recover(detector, world)
    found = detector.check(20.5)
    assert found is not None
    assert (found.kind, found.rank, found.text) == ("recovered", 1, "rank 1 goes on after 6 s.")
    assert detector.check(21.0) is None
    assert detector.stall_report is None


def test_reset_clears_the_stall_without_reporting_a_recovery(world: World):
    """An interrupted or replaced rank has not recovered."""
    detector = StallDetector(world)
    detector.on_sent(0.0)
    assert detector.check(6.0) is not None
    detector.reset()
    assert detector.stall_report is None
    assert detector.check(6.5) is None


def test_slow_rank_that_moves_is_reported_once_as_a_straggler(world: World):
    def shares(step: int) -> list[RankObservation]:
        slow = seen(1, stalled_s=0.5, step=step, blocked_fraction=0.0, delay_factor=10.0, **AWAY)
        return [slow if rank == 1 else seen(rank, stalled_s=0.5, step=step, blocked_fraction=0.9) for rank in range(3)]

    world.ranks = shares(12)
    detector = StallDetector(world)
    detector.on_sent(0.0)
    assert detector.check(6.0) is None  # it may be stuck: no progress has been observed
    world.ranks = shares(13)
    found = detector.check(6.5)
    assert found is not None
    assert (found.kind, found.rank) == ("straggler", 1)
    assert "slowed 10x on purpose" in found.reason
    detector.on_result(7.0, 0.5)
    assert detector.check(7.5) is None
    detector.on_sent(7.5)
    world.ranks = shares(14)
    assert detector.check(13.0) is None
    world.ranks = shares(15)
    assert detector.check(13.5) is None


def test_rank_slowed_on_purpose_gets_a_proportionally_longer_limit(world: World):
    world.ranks = ranks(seen(1, delay_factor=10.0, **AWAY))
    detector = StallDetector(world)
    detector.on_sent(0.0)
    assert detector.check(6.0) is None


def test_stall_of_all_ranks_at_once_is_reported_after_a_longer_limit(world: World):
    world.ranks = [seen(rank, **AWAY) for rank in range(3)]
    detector = StallDetector(world)
    detector.on_sent(0.0)
    assert detector.check(6.0) is None
    world.ranks = [seen(rank, **AWAY | {"stalled_s": 31.0}) for rank in range(3)]
    found = detector.check(32.0)
    assert found is not None
    assert (found.kind, found.rank) == ("together", None)
    assert "rank 2 in forward of step 12, net.py:14 in forward" in found.text


def test_minimum_time_limit_is_configurable(world: World):
    detector = StallDetector(world, DetectorConfig(min_limit_s=0.5))
    detector.on_sent(0.0)
    assert detector.check(0.6) is not None


def test_reset_clears_the_dispatches_in_flight(world: World):
    detector = StallDetector(world)
    detector.on_sent(0.0)
    detector.reset()
    assert detector.check(100.0) is None
    assert world.asked == 0


def test_recovered_rank_is_not_reported_as_a_straggler(world: World):
    """The last observations still include those in which the others waited for it."""
    detector = StallDetector(world)
    detector.on_sent(0.0)
    assert detector.check(6.0) is not None
    for step, now in enumerate((6.5, 7.0, 7.5)):
        world.ranks = [
            seen(rank, stalled_s=0.1, step=13 + step, blocked_fraction=0.9 * (rank != 1)) for rank in range(3)
        ]
        found = detector.check(now)
        assert (None if found is None else found.kind) == ("recovered" if now == 6.5 else None)


def test_a_rank_that_imports_a_module_gets_the_longer_limit(world: World):
    """The first validation with torchmetrics was a stall, since importing it takes seconds."""
    importing = (Frame("<frozen importlib._bootstrap_external>", 147, "_path_stat"), LIBRARY, USER)
    for stalled_s, is_reported in ((6.0, False), (31.0, True)):
        world.ranks = ranks(seen(1, **AWAY | {"stack": importing, "stalled_s": stalled_s}))
        detector = StallDetector(world)
        detector.on_sent(0.0)
        assert (detector.check(stalled_s + 1) is not None) == is_reported


def test_the_first_validation_of_a_process_gets_the_longer_limit(world: World):
    """A replacement's own first call of a slow metric was marked as stuck, for good."""
    for stalled_s, is_warming_up, is_reported in ((6.0, True, False), (31.0, True, True), (6.0, False, True)):
        evaluating = {"op": "evaluate", "phase": "evaluate", "stalled_s": stalled_s, "is_warming_up": is_warming_up}
        world.ranks = ranks(seen(1, **AWAY | evaluating))
        detector = StallDetector(world)
        detector.on_sent(0.0)
        assert (detector.check(stalled_s + 1) is not None) == is_reported


COMPILING = (
    Frame("/lib/torch/_inductor/codecache.py", 1, "load"),
    Frame("/lib/torch/_inductor/compile_fx.py", 9, "_compile_fx_inner"),
    USER,
)
RUNNING_COMPILED = (Frame("/lib/torch/_inductor/output_code.py", 1, "__call__"), USER)


@pytest.mark.parametrize("everywhere", [True, False])
def test_compilation_is_no_stall_and_is_reported_once(world: World, everywhere: bool):  # noqa: FBT001
    """One rank may have compiled before, and waits."""
    compiling = [seen(rank, "running", **AWAY, stack=COMPILING, stalled_s=40.0) for rank in range(3)]
    world.ranks = compiling if everywhere else ranks(compiling[1])
    detector = StallDetector(world)
    detector.on_sent(0.0)
    found = detector.check(41.0)
    assert found is not None
    subject = "ranks 0, 1 and 2 compile" if everywhere else "rank 1 compiles"
    assert (found.kind, found.rank) == ("compiling", None)
    assert found.text == f"{subject} the model, for 40 s so far (torch.compile)."
    assert detector.check(42.0) is None
    detector.on_result(43.0, 1.0)
    found = detector.check(43.0)
    assert found is not None
    assert (found.kind, found.reason) == ("recovered", "the model was compiled in 42 s or so")


def test_compilation_lasts_from_the_forward_to_the_backward_pass(world: World):
    """The backward pass is compiled after the forward pass, and a rank's time without progress begins again."""
    world.ranks = [seen(rank, "running", **AWAY, stack=COMPILING, stalled_s=10.0) for rank in range(2)]
    detector = StallDetector(world)
    detector.on_sent(0.0)
    assert detector.check(11.0) is not None
    world.ranks = [seen(rank, "running", **AWAY, stack=COMPILING, stalled_s=6.0) for rank in range(2)]
    assert detector.check(57.0) is None
    detector.on_result(58.0, 57.0)
    found = detector.check(58.0)
    assert found is not None
    assert found.reason == "the model was compiled in 57 s or so"


def test_compiler_is_found_in_a_stack_that_is_cut_within_it():
    """Its own calls nest deeply; none of the frames that are left is the user's."""
    library = [("/usr/lib/site-packages/torch/_inductor/codegen/cpp.py", 1, "codegen_node")]
    compiler = [("/usr/lib/site-packages/torch/_inductor/compile_fx.py", 9, "codegen_and_compile")]
    assert is_compiling(make_stack(library * 20 + compiler + library * (MAX_FRAMES - 21)))
    assert not make_stack(library * 20 + compiler + library * 20)  # the frames of the kernel that every call has


def test_compiler_is_found_by_names_without_the_folder_of_installed_packages():
    """The notebook shortens the names of files in an engine's status."""
    assert is_compiling([Frame("torch/_inductor/compile_fx.py", 9, "codegen_and_compile")])
    assert not is_compiling([Frame("torch/_inductor/output_code.py", 9, "__call__")])


def test_compiled_code_that_hangs_is_a_stall(world: World):
    world.ranks = ranks(seen(1, "running", **AWAY, stack=RUNNING_COMPILED))
    detector = StallDetector(world)
    detector.on_sent(0.0)
    found = detector.check(6.0)
    assert found is not None
    assert (found.kind, found.rank) == ("stuck", 1)


def test_a_further_call_does_not_restart_the_clock_of_the_oldest():
    probed: list[int] = []
    detector = StallDetector(lambda: probed.append(1) or [], DetectorConfig(min_limit_s=5.0))
    detector.on_sent(0.0)
    detector.on_sent(4.0)
    detector.check(4.9)
    assert not probed
    detector.check(5.1)
    assert probed


def test_stacks_show_the_users_frames_and_fold_those_outside():
    frames = (Frame("torch/x.py", 1, "inner"), Frame("train.py", 2, "mine", "user"), Frame("torch/y.py", 3, "outer"))
    page = Stacks([RankObservation(0, "host", 1, "running", dumped_stack=frames)])._repr_html_()
    shown, folded = page.split("1 outer frame")
    assert shown.index("inner") < shown.index("mine")
    assert "outer" in folded
    assert "outer" not in shown


def test_stacks_without_a_users_frame_show_the_innermost_ones():
    frames = tuple(Frame("torch/x.py", k, f"call_{k}") for k in range(30))
    page = Stacks([RankObservation(0, "host", 1, "running", dumped_stack=frames)])._repr_html_()
    assert page.index("call_4") < page.index("25 outer frames") < page.index("call_5")

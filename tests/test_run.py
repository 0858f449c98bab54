"""The run driver, tested with fake engines and without processes."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
import os
import re
import signal
import threading
from concurrent.futures import Future
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import dtkit
from dtkit._util import timeouts
from dtkit.checkpoint.manager import CheckpointRequest
from dtkit.dashboard.live.comparison_messages import ComparisonMessageBuilder
from dtkit.dashboard.summary.metrics import compute_epoch
from dtkit.dashboard.summary.notices import name_event_node
from dtkit.dashboard.text import run_text
from dtkit.errors import CallbackError, HostLostError, RefusedError, RunError
from dtkit.health.stall_report import StallReport
from dtkit.history.history import History
from dtkit.messages import Reply
from dtkit.rpc.protocol import GroupOperations, make_call
from dtkit.rpc.reference import StepTimes
from dtkit.rpc.replacement import replace_lost_ranks
from dtkit.testing import fake_ops
from dtkit.testing.fake_engine import LOST_PEER_MESSAGE
from dtkit.testing.fake_transport import FakeTransport
from dtkit.training.task import Task
from dtkit.training.verify import Verification
from dtkit.types import EngineLoss, Evaluation, Failure, State, StepRecord
from tests.support.fake_source import FakeSource
from tests.support.waiting import wait_until as watched

ROWS = torch.zeros(64, 2), torch.zeros(64, dtype=torch.int64)


@pytest.fixture
def engines():
    return FakeTransport(2)


@pytest.fixture
def cluster(engines):
    with dtkit.Cluster.from_transport(engines, device="cpu") as cluster:
        yield cluster


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def train(cluster: dtkit.Cluster, **options: Any) -> dtkit.Run:
    settings = {"loss": nn.CrossEntropyLoss(), "optimizer": make_optimizer, "batch_size": 16}
    if "epochs" not in options:
        settings["steps"] = 40
    return cluster.train(nn.Linear(2, 2), ROWS, **(settings | options))


def dispatches(engines: FakeTransport, rank: int = 0) -> list[tuple[int, int]]:
    """(first step, steps) of each dispatch sent to the rank."""
    return [(args["step"], args["steps"]) for r, op, args in engines.served_requests if r == rank and op == "advance"]


def until(run: dtkit.Run, reached: Any) -> None:
    changed = threading.Event()
    unsubscribe = run.subscribe(changed.set)
    while not reached():
        assert changed.wait(10), run.status
        changed.clear()
    unsubscribe()


def test_a_verification_reaches_open_views(cluster, monkeypatch):
    run = train(cluster)
    run.wait(10)
    times = StepTimes(17, all_ranks_s=0.034, single_process_s=0.0082)
    verification = Verification("PASS", 20, 2, "float32", 0.0, 1e-6, {}, {}, (), step_times=times)
    monkeypatch.setattr(run._job, "verify", lambda *_: verification)
    shown: list[Verification | None] = []
    unsubscribe = run.subscribe(lambda: shown.append(run.verification))
    run.verify()
    unsubscribe()
    assert shown[-1:] == [verification]


def test_interrupt_at_the_start_of_a_wait_pauses_the_run(cluster, monkeypatch):
    run = train(cluster, steps=1_000_000)
    press(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run.wait(10)
    assert run.status.state is State.PAUSED


def test_timeout_error_names_a_lost_rank_as_its_cause(cluster, monkeypatch):
    monkeypatch.setattr(timeouts, "FAILURE_GRACE_S", 0.01)
    gone: Future[Reply] = Future()
    gone.set_result(Reply(failure=Failure(1, "?", "EngineLost", "rank 1 is gone", "", kind="lost")))
    replies = cluster._engine_group.gather_replies([Future(), gone], 10_000_000)
    error = dtkit.errors.EngineError([reply.failure for reply in replies])
    assert error.cause.kind == "lost"
    assert "no answer within 0 s" in str(error)


def test_a_run_takes_every_step_once_and_ends(cluster, engines):
    run = train(cluster)
    run.wait(10)
    assert run.status.state is State.COMPLETED
    assert len(run.history) == 80
    assert list(run.history.totals()["step"]) == list(range(40))
    assert [event.kind for event in run.history.events] == ["start", "done"]
    assert dispatches(engines, 0) == dispatches(engines, 1)


def test_texts_of_a_run_group_the_digits_of_its_steps(cluster):
    run = train(cluster, steps=1_200)
    run.wait(30)
    assert run.history.events[-1].text == "done after 1,200 steps"
    with pytest.raises(dtkit.errors.RunError, match="completed at step 1,200, so"):
        run.step()


def test_automatic_tensor_parallel_plan_is_printed_before_it_is_used(cluster, capsys):
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    settings = {
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD,
        "batch_size": 16,
        "steps": 3,
        "start": False,
    }
    cluster.train(net, ROWS, strategy=dtkit.TensorParallel(2), **settings)
    assert "colwise" not in capsys.readouterr().out
    strategy = dtkit.TensorParallel(2, plan="auto")
    cluster.train(net, ROWS, strategy=strategy, **settings)
    assert repr(strategy.plan_for(net)) in capsys.readouterr().out


def test_dispatches_start_with_one_step_and_grow_to_the_target_duration(cluster, engines):
    run = train(cluster, steps=200)  # of 50 ms each
    run.wait(10)
    sizes = [steps for _, steps in dispatches(engines)]
    assert sizes[0] == 1
    assert max(sizes) == round(timeouts.TARGET_DISPATCH_S / 0.05)
    assert sum(sizes) == 200


def test_slow_steps_are_sent_one_at_a_time(engines):
    engines.step_s = 0.8
    with dtkit.Cluster.from_transport(engines, device="cpu") as cluster:
        run = train(cluster, steps=10, start=False)
        run.step(4)  # the first dispatches are sent before anything is known
        engines.hold_requests()
        assert run.resume() is None  # a cell that ends with it shows nothing
        before = len(dispatches(engines))
        engines.release_requests()
        run.wait(10)
    assert before == 4
    assert all(steps == 1 for _, steps in dispatches(engines))


def test_run_continues_from_the_step_where_a_dispatch_ended_early(cluster, engines):
    run = train(cluster, steps=200, start=False)
    run.step(20)
    engines.end_early_after(2)
    run.resume()
    run.wait(10)
    assert run.status.state is State.COMPLETED
    assert list(run.history.totals()["step"]) == list(range(200))


def test_run_continues_after_another_call_forms_the_group_again(cluster, engines):
    run = train(cluster, steps=300, start=False)
    run.step(2)
    engines.hold_requests()
    run.resume()
    threading.Timer(0.05, engines.release_requests).start()
    cluster._engine_group.membership.form_process_group()  # requests in flight belong to the earlier generation
    run.wait(10)
    assert run.status.state is State.COMPLETED
    assert list(run.history.totals()["step"]) == list(range(300))


def test_failure_ends_the_run_with_its_cause_and_leaves_the_cluster_usable(cluster, engines):
    run = train(cluster, start=False)
    run.step(3)
    engines.inject_failure(1, "advance", ValueError("no forward here"))
    run.resume()
    with pytest.raises(dtkit.errors.EngineError, match="rank 1 on fake: ValueError: no forward here") as caught:
        run.wait(10)
    assert "rank 0 only lost its peer" in str(caught.value)
    assert run.status.state is State.FAILED
    assert run.history.num_steps == 3
    assert cluster._engine_group.membership.generation == 1
    again = train(cluster)
    again.wait(10)
    assert again.status.state is State.COMPLETED


def test_lost_engine_is_replaced_and_the_run_continues(cluster, engines):
    run = train(cluster, start=False)
    run.step()
    engines.end_engine(1)
    run.resume()
    run.wait(10)
    assert run.status.state is State.COMPLETED
    assert [event.kind for event in run.history.events if event.kind in ("lost", "repair")] == ["lost", "repair"]
    assert "rank" not in " ".join(event.text for event in run.history.events)  # the log is a picture: it says node
    repair = run.history.events[-2]
    assert "node 1 replaced: all go on from step" in repair.text
    assert re.fullmatch(r"node 1 replaced in .+ s, no step lost", repair.notice)
    assert list(run.history.totals()["step"]) == list(range(40))


class FragileTransport(FakeTransport):
    """Fake engines of which another one ends while the first loss is repaired."""

    further_rank: int | None = 2

    def replace(self, ranks):
        super().replace(ranks)
        self._end_another_engine(self.further_rank)

    def drop(self, ranks):
        super().drop(ranks)
        self._end_another_engine(1)  # which was rank 2

    def _end_another_engine(self, rank):
        if self.further_rank is not None:
            self.further_rank = None
            self.end_engine(rank)


def list_losses_and_repairs(run):
    return [event for event in run.history.events if event.kind in ("lost", "repair")]


def test_a_verification_does_not_count_after_a_node_was_left_out(cluster, engines, monkeypatch):
    run = train(cluster, start=False, on_failure="shrink")
    times = StepTimes(17, all_ranks_s=0.034, single_process_s=0.0082)
    verification = Verification("PASS", 20, 2, "float32", 0.0, 1e-6, {}, {}, (), step_times=times)
    monkeypatch.setattr(run._job, "verify", lambda *_: verification)
    run.step(5)
    run.verify()
    assert run.verification == verification
    engines.end_engine(1)
    run.step(5)
    assert run.spec.world_size == 1
    assert run.verification is None


@pytest.mark.parametrize(("on_failure", "action"), [("repair", "replaced"), ("shrink", "left out")])
def test_engine_that_is_lost_during_a_repair_is_in_the_log(on_failure: str, action: str):
    engines = FragileTransport(3)
    with dtkit.Cluster.from_transport(engines, device="cpu") as cluster:
        run = train(cluster, start=False, on_failure=on_failure, batch_size=12)
        run.step()
        engines.end_engine(1)
        run.resume()
        run.wait(10)
        events = list_losses_and_repairs(run)
        assert [(event.kind, event.rank) for event in events] == [("lost", 1), ("lost", 2), ("repair", None)]
        assert f"nodes 1, 2 {action}: all go on from step" in events[-1].text


def test_replacement_that_is_lost_during_the_repair_is_a_loss_of_its_own():
    engines = FragileTransport(2)
    engines.further_rank = 1
    with dtkit.Cluster.from_transport(engines, device="cpu") as cluster:
        run = train(cluster, start=False)
        run.step()
        engines.end_engine(1)
        run.resume()
        run.wait(10)
        events = list_losses_and_repairs(run)
        assert [(event.kind, event.rank) for event in events] == [("lost", 1), ("lost", 1), ("repair", None)]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (dtkit.ParameterAveraging(every=1), "no step lost; the optimizer's state there is the mean of the others'"),
        (dtkit.DataParallel(), "no step lost"),
    ],
    ids=["averaging", "data parallel"],
)
def test_a_repair_says_that_a_rank_which_trained_alone_has_lost_its_momentum(cluster, engines, strategy, expected):
    """Parameters differed from those of an undisturbed run by 0.18, and the log said "no step lost" alone."""
    run = train(cluster, start=False, strategy=strategy)
    run.step()
    engines.end_engine(1)
    run.resume()
    run.wait(10)
    assert list_losses_and_repairs(run)[-1].text.endswith(expected)


def test_repair_goes_on_after_a_host_is_lost_before_it_starts_an_engine(monkeypatch):
    engines = FakeTransport(3)
    replace = engines.replace

    def lose_host(ranks):
        monkeypatch.setattr(engines, "replace", replace)
        engines.end_engine(2)
        raise HostLostError(f"the host that should start engines for {ranks} is gone")

    monkeypatch.setattr(engines, "replace", lose_host)
    with dtkit.Cluster.from_transport(engines, device="cpu") as cluster:
        run = train(cluster, start=False, batch_size=12)
        run.step()
        engines.end_engine(1)
        run.resume()
        run.wait(10)
        events = list_losses_and_repairs(run)
        assert [(event.kind, event.rank) for event in events] == [("lost", 1), ("lost", 2), ("repair", None)]


def test_error_after_the_loss_of_all_engines_tells_what_is_lost_and_the_remedy(cluster, engines):
    run = train(cluster, start=False)
    run.step()
    for rank in (0, 1):
        engines.end_engine(rank)
    run.resume()
    with pytest.raises(dtkit.errors.ClusterError, match=r"all engines ended, and with .*checkpoint_every=1000"):
        run.wait(10)


class DyingTransport(FakeTransport):
    """Fake engines of which rank 1 ends in each dispatch, before the first step."""

    def _answer_request(self, worker, request, listen, *, is_interrupted):
        if request.op == "advance":
            if worker.engine.rank == 0:
                raise RuntimeError(LOST_PEER_MESSAGE)
            worker.is_lost = True
        return super()._answer_request(worker, request, listen, is_interrupted=is_interrupted)


def test_the_fourth_loss_in_a_row_at_one_step_ends_the_run():
    with dtkit.Cluster.from_transport(DyingTransport(2), device="cpu") as cluster:
        run = train(cluster)
        with pytest.raises(dtkit.errors.EngineError, match=r"its process has ended\. This happened 4 times.*Correct"):
            run.wait(10)
        events = list_losses_and_repairs(run)
        assert [event.kind for event in events] == [*["lost", "repair"] * 3, "lost"]
        assert run.status.state is State.FAILED


@pytest.mark.parametrize("ranks", [[1], [0, 1]], ids=["one", "all"])
def test_engines_lost_before_training_are_replaced_before_it_starts(cluster, engines, capsys, ranks):
    for rank in ranks:
        engines.end_engine(rank)
    run = train(cluster, steps=100_000)
    assert f"{ranks[-1]} gone: replaced before the training starts" in capsys.readouterr().out
    until(run, lambda: run.status.step > 0)
    engines.end_engine(1)  # the state of rank 0 is handed over, even if all ranks started again
    until(run, lambda: any(event.kind == "repair" for event in run.history.events))
    run.stop()
    assert "from step 0 " not in run.history.events[-2].text


def test_train_raises_for_a_lost_engine_if_it_must_not_be_replaced(cluster, engines):
    engines.end_engine(1)
    with pytest.raises(dtkit.errors.EngineError, match=r"its process has ended"):
        train(cluster, on_failure="pause")


def test_repair_of_an_ended_run_raises_after_its_timeout_and_goes_on(cluster, engines, monkeypatch):
    run = train(cluster)
    run.wait(10)
    engines.end_engine(1)
    released, replaced, replace = threading.Event(), [], engines.replace

    def replace_when_released(ranks):
        assert released.wait(10)
        replaced.extend(ranks)
        replace(ranks)

    monkeypatch.setattr(engines, "replace", replace_when_released)
    for _ in range(2):  # the second call waits for the same repair
        with pytest.raises(TimeoutError, match=r"has not ended within timeout=0\.05 s; it goes on"):
            run.repair(timeout=0.05)
    released.set()
    run.repair(10)
    assert replaced == [1]
    assert engines.find_lost_ranks() == []
    assert run.history.events[-1].kind == "repair"


def test_inject_fault_raises_where_the_process_does_not_end_in_time(cluster, engines, monkeypatch):
    run = train(cluster, start=False)
    given = []
    monkeypatch.setattr(engines, "kill", lambda ranks, timeout: given.append((ranks, timeout)))
    with pytest.raises(TimeoutError, match=r"process of rank 1 has not ended within timeout=0\.5 s"):
        run.inject_fault("kill", 1, timeout=0.5)
    assert given == [([1], 0.5)]


def test_an_injected_fault_is_a_line_of_the_log_and_no_output_of_its_cell(cluster, engines, monkeypatch):
    run = train(cluster, start=False)
    monkeypatch.setattr(engines, "kill", lambda *_: True)
    assert run.inject_delay(0, 2.0) is None
    assert run.inject_fault("kill", 1) is None
    texts = [event.text for event in run.history.events[-2:]]
    assert texts == ["node 0 slowed 2x on purpose", "node 1 killed on purpose"]


def test_released_run_refuses_repair(cluster, engines):
    run = train(cluster)
    run.wait(10)
    run.release()
    engines.end_engine(1)
    with pytest.raises(dtkit.errors.RunError, match=r"run\.repair\(\) needs the job.*released"):
        run.repair()
    assert cluster.repair() == [1]


def test_run_continues_with_fewer_ranks_if_allowed_to_shrink(cluster, engines):
    run = train(cluster, start=False, on_failure="shrink")
    run.step()
    engines.end_engine(0)
    run.resume()
    run.wait(10)
    assert (run.status.state, cluster.world_size, run.spec.world_size) == (State.COMPLETED, 1, 1)
    assert "node 0 left out" in run.history.events[-2].text
    assert len(run.history) == 2 + 39


@pytest.mark.parametrize(
    ("strategy", "why"),
    [(dtkit.Pipeline(2, 2), "stages 2"), (dtkit.Sharded(replicas=2), "replicas")],
)
def test_strategy_that_needs_all_ranks_refuses_to_shrink(strategy, why):
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster:
        with pytest.raises(ValueError, match=f"on_failure='shrink' .* can't work on 1 of 2.*{why}.*'repair'"):
            train(cluster, strategy=strategy, on_failure="shrink")
        assert cluster.current_run is None


def test_the_traceback_of_an_awaited_run_has_no_frame_of_a_thread_pool(cluster, engines):
    engines.inject_failure(1, "advance", ValueError("no such row"))
    run = train(cluster)

    async def main():
        with pytest.raises(dtkit.errors.EngineError) as caught:
            await run
        return [entry.frame.code.path for entry in caught.traceback]

    paths = [str(path) for path in asyncio.run(main())]
    assert paths
    assert not [path for path in paths if "futures" in path or path.endswith("thread.py")]


def test_failed_run_refuses_to_continue_and_refers_to_its_exception(cluster, engines):
    run = train(cluster, start=False)
    run.step()
    engines.inject_failure(1, "advance", ValueError("no such row"))
    run.resume()
    with pytest.raises(dtkit.errors.EngineError, match="no such row"):
        run.wait(10)
    for ask in (run.resume, run.stop, lambda: run.extend(steps=1)):
        with pytest.raises(dtkit.errors.RunError, match=r"run\.exception says why.*resume_from=path"):
            ask()
    assert str(run.verdict) == "failed after 1 step: run.exception has the error"  # no advice on speed


def paused_for_a_lost_engine(cluster: dtkit.Cluster, engines: FakeTransport) -> dtkit.Run:
    run = train(cluster, start=False, on_failure="pause")
    run.step()
    engines.end_engine(1)
    run.resume()
    with pytest.raises(dtkit.errors.PausedError, match=r"(?s)its process has ended.*run\.resume\(\) replaces"):
        run.wait(10)
    return run


def test_error_names_only_the_lost_engine_if_the_others_just_refuse(cluster, engines):
    run = paused_for_a_lost_engine(cluster, engines)
    with pytest.raises(dtkit.errors.EngineError, match="its process has ended") as caught:
        _ = run.model
    assert "Refused" not in str(caught.value)


def test_run_paused_for_a_lost_engine_completes_after_resume(cluster, engines):
    run = paused_for_a_lost_engine(cluster, engines)
    assert run.status.state is State.PAUSED
    run.resume()  # replaces the lost engine
    run.wait(10)
    assert run.status.state is State.COMPLETED


def test_save_is_refused_at_once_if_the_run_has_lost_an_engine(cluster, engines, tmp_path):
    run = paused_for_a_lost_engine(cluster, engines)
    said = len(run.history.events)
    with pytest.raises(dtkit.errors.CheckpointError, match=r"lost: rank 1; run.resume\(\) or run.repair\(\) replaces"):
        run.save(tmp_path)
    assert "lost" not in [event.kind for event in run.history.events[said:]]
    run.resume()
    run.wait(10)
    assert run.status.state is State.COMPLETED


def test_invalid_folder_is_refused_with_the_name_of_the_argument(cluster):
    run = train(cluster, start=False)
    with pytest.raises(
        ValueError, match=r"^save\(path=''\): this is not the name of a folder\. Use a name such as 'check"
    ):
        run.save("")
    with pytest.raises(TypeError, match=r"^save\(path=5\): it must be the name of a folder"):
        run.save(5)  # type: ignore[arg-type]
    run.stop()
    with pytest.raises(
        TypeError, match=r"^resume_from=123: it must be the name of a folder, a text or a Path, such as"
    ):
        train(cluster, resume_from=123)
    with pytest.raises(ValueError, match=r"^checkpoint_dir='': this is not the name of a folder"):
        train(cluster, checkpoint_every=5, checkpoint_dir="")
    with pytest.raises(dtkit.errors.CheckpointError, match="/nowhere/x does not exist"):
        train(cluster, resume_from="/nowhere/x")


def test_train_refuses_an_unknown_on_failure_value(cluster):
    with pytest.raises(ValueError, match="on_failure='ignore'; it must be 'repair'"):
        train(cluster, on_failure="ignore")


def test_nonfinite_gradient_pauses_all_ranks_and_the_step_can_be_repeated(cluster, engines):
    engines.inject_nonfinite(7, ranks=[1])
    run = train(cluster)
    with pytest.raises(dtkit.errors.NonFiniteError, match="rank 1 on fake, step 7"):
        run.wait(10)
    assert run.status.state is State.PAUSED
    assert run.status.step == 7
    run.resume()
    assert run.exception is None
    run.wait(10)
    assert list(run.history.totals()["step"]) == list(range(40))


def test_a_run_that_an_error_paused_has_one_word_for_it_in_every_view(cluster, engines):
    engines.inject_nonfinite(7, ranks=[1], always=True)
    run = train(cluster)
    with pytest.raises(dtkit.errors.NonFiniteError):
        run.wait(10)
    assert repr(run).splitlines()[0].endswith("· paused, not finite")
    advice = "lower the learning rate, or repair the data or the loss; run.exception has the error"
    assert str(run.verdict) == f"paused, not finite after 7 steps: {advice}"
    assert run.verdict.cause == "paused"
    message = ComparisonMessageBuilder(dtkit.compare([run])).build_snapshot()
    assert message.content["head"]["table"]["rows"][0][1] == "paused, not finite"


@pytest.mark.parametrize(("step", "epoch"), [(0, 1), (1, 1), (4, 1), (5, 2), (40, 10)])
def test_the_epoch_of_the_status_is_that_of_the_views(cluster, step, epoch):
    run = train(cluster, start=False)
    if step:
        run.step(step)
    assert run.status.epoch == epoch == compute_epoch(run.spec, run.status.step)[0]


def test_nonfinite_gradient_after_the_loss_exploded_asks_for_another_training(cluster, engines, monkeypatch):
    build_rows = fake_ops._Jobs._build_rows

    def explode(self, job, start, stop):
        rows = build_rows(self, job, start, stop)
        rows["loss"] *= np.where(rows["step"] > 5, 1e9, 1)
        return rows

    monkeypatch.setattr(fake_ops._Jobs, "_build_rows", explode)
    engines.inject_nonfinite(20, ranks=[0])
    run = train(cluster)
    with pytest.raises(dtkit.errors.NonFiniteError, match=r"since step \d+, so the parameters are ruined"):
        run.wait(10)


def test_nonfinite_gradient_error_reports_that_all_losses_are_finite(cluster, engines):
    engines.inject_nonfinite(3, ranks=[], always=True)
    run = train(cluster)
    with pytest.raises(dtkit.errors.NonFiniteError, match=r"though every rank's loss is \(1, 1\)"):
        run.wait(10)
    run.resume()
    with pytest.raises(dtkit.errors.NonFiniteError):
        run.wait(10)
    assert run.status.step == 3


def test_pause_waits_for_dispatches_in_flight(cluster, engines):
    run = train(cluster, steps=100_000, start=False)
    run.step(5)
    engines.hold_requests()
    run.resume()
    run.post("pause")
    assert run.status.state is State.RUNNING
    engines.release_requests()
    run._driver.wait(10)
    assert run.status.state is State.PAUSED
    assert run.status.step == run.history.num_steps
    sent = sum(steps for _, steps in dispatches(engines))
    assert run.status.step == sent


@pytest.fixture
def gracious(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause grace period so long that no engine is interrupted."""
    monkeypatch.setattr(timeouts, "PAUSE_GRACE_S", 600.0)
    monkeypatch.setattr(timeouts, "MAX_PAUSE_GRACE_S", 600.0)


def under_way(cluster: dtkit.Cluster, engines: FakeTransport) -> dtkit.Run:
    """A run that was asked to pause while its dispatches are held."""
    run = train(cluster, steps=100_000, start=False)
    run.step(5)
    engines.hold_requests()
    run.resume()
    run.post("pause")
    return run


@pytest.mark.usefixtures("gracious")
def test_second_interrupt_gives_the_pause_time_to_take_effect(cluster, engines):
    run = under_way(cluster, engines)
    broken = run._driver.submit("interrupt")
    engines.release_requests()
    assert broken.result(10) == run.status.step > 5
    assert run.status.state is State.PAUSED
    assert engines.interrupted_ranks == []
    assert [event.text for event in run.history.events if event.kind == "pause"] == [
        f"paused at step {run.status.step}"
    ]


def check_broken_off(run: dtkit.Run, engines: FakeTransport) -> None:
    answer = run._driver.submit("interrupt")
    watched(lambda: engines.interrupted_ranks == [0, 1])
    engines.release_requests()
    assert answer.result(10) == 5
    assert run.status.state is State.PAUSED


@pytest.mark.usefixtures("gracious")
def test_second_interrupt_reaches_the_engines_at_once_if_a_rank_is_stuck(cluster, engines, monkeypatch):
    run = under_way(cluster, engines)
    monkeypatch.setattr(run._driver.calls.stall_detector, "check", lambda _now: None)
    run._driver.calls.stall_detector.stall_report = StallReport(
        "stuck", 1, "here", "forward", 3, "net.py:14", "it waits", "wait", 8.0
    )
    check_broken_off(run, engines)


def test_stuck_rank_is_named_even_if_another_rank_has_failed(cluster, engines, monkeypatch):
    run = under_way(cluster, engines)
    found = StallReport("stuck", 1, "here", "forward", 3, "net.py:14", "rank 1 waits", "wait", 8.0)
    watched(lambda: len(run._driver.calls.pending))
    answers = run._driver.calls.pending[0].futures
    monkeypatch.setattr(
        run._driver.calls.stall_detector, "check", lambda _now: found if answers and answers[0].done() else None
    )
    engines.interrupt([0])  # rank 1 is held
    until(run, lambda: any(event.kind == "stuck" and event.rank == 1 for event in run.history.events))
    assert "node 1 waits" in next(event.text for event in run.history.events if event.kind == "stuck")
    assert engines.interrupted_ranks == [0]  # by this test, not by the driver
    engines.release_requests()


def test_interrupt_before_the_pause_takes_effect_counts_as_the_second_one(cluster, engines, monkeypatch):
    monkeypatch.setattr(timeouts, "INTERRUPTED_CELL_TIMEOUT_S", 0.1)
    run = train(cluster, steps=100_000, start=False)
    run.step(5)
    engines.hold_requests()
    run.resume()
    press(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run.wait(10)
    assert "another interrupt breaks off" in run.history.events[-1].text
    assert engines.interrupted_ranks == []
    with pytest.raises(KeyboardInterrupt):
        run.wait(10)
    watched(lambda: engines.interrupted_ranks == [0, 1])
    engines.release_requests()
    until(run, lambda: run.status.state is State.PAUSED)


def press(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next wait for a run raise KeyboardInterrupt."""

    def pressed(_run: dtkit.Run) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_text, "start_text_progress", pressed)


def test_engines_are_interrupted_if_the_pause_takes_too_long(cluster, engines):
    check_broken_off(under_way(cluster, engines), engines)


def test_resume_cancels_a_pending_pause(cluster, engines):
    run = train(cluster, start=False)
    engines.hold_requests()
    run.resume()
    run.post("pause")
    run.post("resume")
    engines.release_requests()
    run.wait(10)
    assert run.status.state is State.COMPLETED


def test_canceled_pause_is_answered_at_once(cluster, engines):
    run = train(cluster, steps=100_000, start=False)
    engines.hold_requests()
    run.resume()
    pause = run.post("pause")
    run.post("resume").result(10)
    assert pause.result(1) == 0  # at once, not when the run ends
    engines.release_requests()
    run.stop()


def test_extend_starts_no_second_driver_while_a_slow_view_shows_the_end(cluster):
    """Two driver threads would both send dispatches of the extended run."""
    run = train(cluster, steps=20)
    run.subscribe(lambda: run.status.state.has_ended and threading.Event().wait(0.1))
    run.wait(10)
    run.extend(steps=100_000)
    until(run, lambda: run.status.step > 50_000 or run.status.state.has_ended)
    end = run.stop()
    assert list(run.history.totals()["step"]) == list(range(end))
    run._driver.join(10)


def test_view_can_extend_the_run_when_it_ends(cluster):
    run = train(cluster, steps=20, start=False)
    once = threading.Event()

    def more() -> None:
        if run.status.state.has_ended and not once.is_set():
            once.set()
            run.extend(steps=30)

    run.subscribe(more)
    run.resume()
    until(run, lambda: run.status.step == 50 and run.status.state.has_ended)
    assert list(run.history.totals()["step"]) == list(range(50))


def test_pending_save_raises_when_its_run_fails(cluster, engines, monkeypatch, tmp_path):
    run = train(cluster, steps=100_000, start=False)
    engines.hold_requests()
    save = CheckpointRequest(tmp_path, None)
    run._driver.submit("save", save).result(10)
    run.resume()

    def refuse() -> None:
        raise dtkit.errors.ClusterError("the controller has ended")

    monkeypatch.setattr(engines, "check_reachable", refuse)
    with pytest.raises(dtkit.errors.CheckpointError, match="has failed at step 0"):
        save.future.result(10)
    with pytest.raises(dtkit.errors.ClusterError, match="the controller has ended"):
        run.wait(10)
    engines.release_requests()


def test_save_that_cannot_start_does_not_block_the_next_one(cluster, engines, tmp_path):
    run = train(cluster, steps=100_000, start=False)
    run.step(1)
    engines.hold_requests()
    run.resume()
    run.post("pause")
    (tmp_path / "file").touch()
    saves = [CheckpointRequest(tmp_path / "file", None) for _ in range(2)]
    for save in saves:
        run._driver.submit("save", save)
    engines.release_requests()
    for save in saves:
        with pytest.raises(dtkit.errors.CheckpointError, match="was not written"):
            save.future.result(10)
    run._driver.wait(10)
    assert run.status.state is State.PAUSED


def test_failing_command_ends_the_run_and_is_still_answered(cluster, monkeypatch: pytest.MonkeyPatch):
    run = train(cluster, start=False)

    def fail(*_: object) -> None:
        raise OSError("no room for the recovery's files")

    monkeypatch.setattr(run._driver, "_handle_resume", fail)
    assert run.post("resume").result(10) == 0
    assert run.status.state is State.FAILED
    with pytest.raises(OSError, match="no room"):
        run.wait(10)


class RefusingTransport(FakeTransport):
    """Fake engines that refuse all dispatches."""

    def _answer_request(self, worker, request, listen, *, is_interrupted):
        if request.op == "advance":
            raise RefusedError("another generation")
        return super()._answer_request(worker, request, listen, is_interrupted=is_interrupted)


def test_a_dispatch_that_is_refused_three_times_in_a_row_ends_the_run():
    engines = RefusingTransport(2)
    with dtkit.Cluster.from_transport(engines, device="cpu") as cluster:
        run = train(cluster)
        with pytest.raises(dtkit.errors.EngineError, match="another generation"):
            run.wait(10)
        resyncs = [rank for rank, op, _ in engines.served_requests if op == "job_status" and rank == 0]
        assert len(resyncs) == 3


def test_a_failing_callback_is_named_with_its_epoch_and_how_the_run_goes_on(cluster):
    def keep_best(_run):
        raise ZeroDivisionError("division by zero")

    run = train(cluster, epochs=3, callbacks=[keep_best])
    with pytest.raises(CallbackError) as caught:
        run.wait(30)
    lines = str(caught.value).splitlines()
    steps = run.spec.steps_per_epoch
    assert lines[0] == f"the callback keep_best failed after epoch 1, step {steps}: ZeroDivisionError: division by zero"
    assert lines[2].strip() == 'raise ZeroDivisionError("division by zero")'
    assert lines[3] == "The run is paused: run.resume() goes on with the next step, run.stop() ends it."
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "keep_best" in caught.value.full
    assert run.status.state is State.PAUSED
    assert lines[0] in [event.text for event in run.history.events]
    run.stop()


def test_a_rate_far_above_the_last_one_that_was_not_0_warns_and_is_set(cluster):
    run = train(cluster, steps=20, start=False)
    run.step(2)
    run.set(lr=9)  # 90 times the 0.1
    run.step(2)
    run.set(lr=0)
    run.step(2)
    with pytest.warns(
        UserWarning, match=r"^lr=1e\+09 is more than a million times the 9 before\. If that is a mistake"
    ) as caught:
        run.set(lr=1e9)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert run.lr == 1e9
    run.stop()


def test_new_learning_rate_is_sent_with_the_next_dispatch(cluster, engines):
    run = train(cluster, steps=100_000)
    until(run, lambda: run.status.step > 3)
    at = run.set(lr=0.5)
    run.stop()
    rows = run.history.rows()
    assert (rows["lr"][rows["step"] < at] == 0.1).all()
    assert (rows["lr"][rows["step"] >= at] == 0.5).all()
    assert [event.step for event in run.history.events if event.kind == "lr"] == [at]  # the step that charts mark
    assert at in [step for step, _ in dispatches(engines)]


def test_learning_rate_in_flight_during_a_failure_is_sent_again(cluster, engines):
    run = train(cluster, steps=300, start=False)
    run.step()
    engines.hold_requests()
    run.resume()
    asked = run.post("lr", 0.5)  # travels behind the first of two dispatches, and the second one fails
    engines.inject_failure(1, "advance", RefusedError("another generation"), after=1)
    engines.release_requests()
    at = asked.result(10)
    run.wait(10)
    rows = run.history.rows()
    assert (rows["lr"][rows["step"] < at] == 0.1).all()
    assert (rows["lr"][rows["step"] >= at] == 0.5).all()
    assert list(run.history.totals()["step"]) == list(range(300))


def test_stuck_rank_is_reported_as_recovered_when_a_dispatch_returns(cluster):
    """The stall detector looks for no stuck rank while dispatches keep returning."""
    run = train(cluster, steps=100_000)
    until(run, lambda: run.status.step > 3)
    run._driver.calls.stall_detector.stall_report = StallReport(
        "stuck", 1, "here", "forward", 3, "net.py:14", "it waits", "wait", 8.0
    )
    until(run, lambda: run.stall_report is None)
    texts = [event.text for event in run.history.events if event.kind == "note"]
    run.stop()
    assert texts == ["node 1 goes on after 8 s."]


def test_validation_runs_after_each_epoch_without_a_pause(cluster, engines):
    run = train(cluster, epochs=5, validation=ROWS)
    run.wait(10)
    assert [e.step for e in run.history.evaluations] == [4, 8, 12, 16, 20]
    assert run.history.evaluations[0].values == {"loss": 0.5}
    assert run.history.evaluations[0].samples == 8


def test_validation_can_run_after_every_other_epoch_and_after_the_last_one(cluster):
    run = train(cluster, epochs=5, validation=ROWS, validation_every=2)
    run.wait(10)
    assert [e.step for e in run.history.evaluations] == [8, 16, 20]


def test_early_stopping_judges_only_epochs_with_an_evaluation(cluster):
    stopping, judged = dtkit.EarlyStopping(patience=2), []
    callbacks = [stopping, lambda _: judged.append((stopping._epoch, stopping.best_epoch))]
    run = train(cluster, epochs=5, validation=ROWS, validation_every=2, callbacks=callbacks)
    run.wait(10)
    assert judged == [(1, 0), (2, 2), (3, 2), (4, 2)]  # the second evaluation has the same loss
    (text,) = [event.text for event in run.history.events if "stopped early" in event.text]
    assert text.startswith("stopped early after epoch 4: loss 0.5")


def test_a_wait_ends_after_all_callbacks_of_the_epoch_in_which_one_stops_the_run(cluster):
    released, was_called = threading.Event(), threading.Event()

    def fail_late(run: dtkit.Run) -> None:
        was_called.set()
        assert released.wait(10)
        raise ValueError("too late to pause the run")

    run = train(cluster, epochs=5, callbacks=[lambda run: run.stop(), fail_late])
    waiting = threading.Thread(target=run.wait, args=(10,), daemon=True)
    waiting.start()
    assert was_called.wait(10)
    assert run.status.state is State.STOPPED
    waiting.join(0.3)
    assert waiting.is_alive()
    released.set()
    waiting.join(10)
    assert not waiting.is_alive()
    (text,) = [event.text for event in run.history.events if event.kind == "error"]
    assert "too late to pause the run" in text


def test_the_log_of_a_failed_evaluation_names_nodes_as_every_other_line(cluster, engines):
    engines.inject_failure(1, "evaluate", ValueError("only one class"))
    run = train(cluster, epochs=2, validation=ROWS)
    with pytest.raises(dtkit.errors.PausedError):
        run.wait(10)
    (text,) = [event.text for event in run.history.events if event.kind == "error"]
    assert text == "the evaluation failed: node 1 on fake: ValueError: only one class"
    run.stop()


def test_validation_runs_after_the_last_step_within_an_epoch(cluster):
    run = train(cluster, steps=6, validation=ROWS)
    run.wait(10)
    assert [e.step for e in run.history.evaluations] == [4, 6]


def calls(engines: FakeTransport, *ops: str) -> list[tuple[str, int]]:
    """(op, step) of each such request to rank 0, in order."""
    return [(op, args["step"]) for rank, op, args in engines.served_requests if rank == 0 and op in ops]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("Connection closed by peer")], ids=repr)
@pytest.mark.parametrize("at", [1, 4], ids=["in the middle", "at the end"])
def test_interrupted_evaluation_is_repeated_before_the_next_step(cluster, engines, at, error):
    """Callbacks come after the repeated evaluation, because they read its values."""
    seen = []
    engines.inject_failure(1, "evaluate", error, after=at)
    run = train(cluster, epochs=5, validation=ROWS, callbacks=[lambda r: seen.append(r.history.evaluations[-1].step)])
    run.wait(10)
    assert run.status.state is State.COMPLETED
    assert [e.step for e in run.history.evaluations] == seen == [4, 8, 12, 16, 20]
    steps = [step for _, step in calls(engines, "evaluate")]
    assert steps == sorted([4, 8, 12, 16, 20, 4 * (at + 1)])  # only the interrupted one is repeated
    asked = calls(engines, "evaluate", "advance")
    last = max(k for k, call in enumerate(asked) if call == ("evaluate", 4 * (at + 1)))
    assert all(step > 4 * at for _, step in asked[last:])


def test_a_resume_during_a_step_goes_on_after_it(cluster, engines):
    run = train(cluster, start=False)
    engines.hold_requests()
    step = run.post("step")
    until(run, lambda: run.status.state is State.RUNNING)
    assert run.status.is_stepping
    resumed = run.post("resume")
    engines.release_requests()
    for answer in (step, resumed):
        answer.result(10)
    run.wait(10)
    assert run.status.state is State.COMPLETED
    assert not run.status.is_stepping


def test_a_resume_at_the_first_sight_of_a_new_step_is_not_lost(cluster):
    """As a click on the button does: between the step's result and the pause after it."""
    run = train(cluster, start=False)
    resumed: list[tuple[Any, Future[int]]] = []

    def resume_at_once() -> None:
        if run.status.step == 1 and not resumed:
            resumed.append((run.status, run.post("resume")))

    unsubscribe = run.subscribe(resume_at_once)
    run.post("step").result(10)
    unsubscribe()
    status, answer = resumed[0]
    assert (status.state, status.is_stepping) == (State.RUNNING, True)
    answer.result(10)
    run.wait(10)
    assert run.status.state is State.COMPLETED


@pytest.mark.parametrize("step", [8, 20], ids=["in the middle", "at the end"])
def test_evaluation_interrupted_by_a_pause_is_repeated_on_resume(cluster, engines, step):
    run = train(cluster, steps=20, validation=ROWS, start=False)
    run.step(step - 1)
    engines.inject_failure(0, "evaluate", KeyboardInterrupt())
    engines.hold_requests()
    run.post("step")
    paused = run.post("pause")
    engines.release_requests()
    assert paused.result(10) == step
    assert (run.status.state, run.status.step) == (State.PAUSED, step)
    assert step not in [e.step for e in run.history.evaluations]
    run.resume()
    run.wait(10)
    assert run.status.state is State.COMPLETED
    assert [e.step for e in run.history.evaluations] == [4, 8, 12, 16, 20]


def test_notebook_that_takes_over_reports_lost_evaluations(cluster):
    run = train(cluster, validation=ROWS, start=False)
    made = 4, {"loss": (2.0, 4.0)}
    run.lifecycle.replay_unread({0: [], 1: []}, {0: {8: made}, 1: {8: made, 12: made}}, 16)
    assert [e.step for e in run.history.evaluations] == [8]
    texts = [event.text for event in run.history.events if "lost" in event.text]
    assert texts == ["what evaluations found after these steps was lost: 4, 12"]  # that of step 16 is still to come


@pytest.mark.parametrize("presses", [1, 2])
def test_interrupted_call_ends_on_the_engines_and_the_next_one_works(cluster, engines, monkeypatch, presses):
    run = train(cluster, start=False)
    run.step(4)
    generation, collect, waits = (
        cluster._engine_group.membership.generation,
        cluster._engine_group.gather_replies,
        threading.Event(),
    )
    monkeypatch.setattr(
        cluster._engine_group, "gather_replies", lambda *args, **kw: (waits.set(), collect(*args, **kw))[1]
    )
    engines.hold_requests()

    def press() -> None:
        assert waits.wait(10)
        os.kill(os.getpid(), signal.SIGINT)
        watched(lambda: engines.interrupted_ranks == [0, 1])
        if presses == 1:
            engines.release_requests()
        else:  # later requests are held, and nothing waits for them
            os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press, daemon=True)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        run.evaluate(ROWS)
    presser.join(10)
    engines.release_requests()
    assert run.evaluate(ROWS).values == {"loss": 0.5}
    assert cluster._engine_group.membership.generation > generation
    assert (run.status.state, run.status.step) == (State.PAUSED, 4)
    run.resume()
    run.wait(10)
    assert run.status.state is State.COMPLETED


def test_interrupt_during_interrupt_handling_leaves_the_cluster_usable(cluster, engines, monkeypatch):
    def interrupted(*_: Any) -> None:
        engines.release_requests()
        raise KeyboardInterrupt

    engines.hold_requests()
    with monkeypatch.context() as patch:
        patch.setattr(cluster._engine_group, "gather_replies", interrupted)
        patch.setattr(cluster._engine_group, "_abandon", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cluster._engine_group.call_all(make_call(GroupOperations.node_info))
    before = cluster._engine_group.membership.generation
    assert cluster.run(int, "3") == [3, 3]
    assert cluster._engine_group.membership.generation == before + 1


def test_extend_continues_where_the_run_ended(cluster):
    run = train(cluster)
    run.wait(10)
    run.extend(epochs=2)
    run.wait(10)
    assert run.history.num_steps == 48
    assert run.status.steps == 48
    with pytest.raises(ValueError, match="by one of them"):
        run.extend()


@pytest.mark.parametrize("steps", [40, 1_000_000], ids=["done", "running"])
def test_closing_the_cluster_keeps_the_weights(engines, steps):
    with dtkit.Cluster.from_transport(engines, device="cpu") as cluster:
        run = train(cluster, steps=steps)
        until(run, lambda: run.status.step > 30)
    assert set(run.model.state_dict()) == {"weight", "bias"}


def test_closing_the_cluster_ends_a_run_that_hangs(engines):
    cluster = dtkit.Cluster.from_transport(engines, device="cpu")
    run = train(cluster, start=False)
    engines.hold_requests()
    run.resume()
    cluster.close()
    run.wait(10)
    assert run.status.state.has_ended
    with pytest.raises(dtkit.errors.RunError):
        run.resume()


def test_commands_that_race_with_the_end_are_answered(cluster):
    """Each command either takes effect or reports that the run has ended; none waits forever."""
    for _ in range(20):
        run = train(cluster, steps=3, start=False)
        run.post("resume")
        for command in ("pause", "lr", "resume", "pause", "stop"):
            try:
                answer = run._driver.submit(command, 0.1)
            except dtkit.errors.RunError:
                break
            assert answer.result(10) <= 3
        run.wait(10)
        run.release()


def test_repr_of_a_run_shows_its_model_strategy_and_state(cluster):
    run = train(cluster)
    run.wait(10)
    assert repr(run).startswith("Linear · DataParallel() · completed\nstep 40 of 40")
    assert run.status.remaining_s is None
    assert run.figure().axes


def test_a_paused_run_has_no_remaining_time(cluster):
    run = train(cluster, steps=1000, start=False)
    run.step(2)
    assert run.status.remaining_s is None
    assert "left" not in str(run.status)


def test_first_error_is_raised_even_if_the_group_cannot_be_formed_again(cluster, engines):
    engines.inject_failure(1, "build_job", ValueError("no such layer"))
    engines.inject_failure(0, "join_group", RuntimeError("no port is left"))
    with pytest.raises(dtkit.errors.EngineError, match="rank 1 on fake: ValueError: no such layer") as caught:
        train(cluster)
    assert "no port is left" in str(caught.value.__cause__)


def test_next_group_removes_the_files_of_an_interrupted_one(cluster):
    left = [cluster.folder / f"store-{cluster._engine_group.membership.generation}{what}" for what in (".off", ".1")]
    for path in left:
        path.touch()
    cluster._engine_group.membership.form_process_group()
    assert not any(path.exists() for path in left)


def test_group_is_not_formed_if_a_newer_one_was_started_meanwhile(cluster, monkeypatch):
    """An interrupted newer group would otherwise make the engines refuse all later calls as outdated."""
    collect = cluster._engine_group.gather_replies

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    def meanwhile(*args: Any, **options: Any) -> Any:
        replies = collect(*args, **options)
        monkeypatch.setattr(cluster._engine_group, "gather_replies", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cluster._engine_group.membership.form_process_group()
        monkeypatch.setattr(cluster._engine_group, "gather_replies", collect)
        return replies

    monkeypatch.setattr(cluster._engine_group, "gather_replies", meanwhile)
    cluster._engine_group.membership.form_process_group()
    before = cluster._engine_group.membership.generation
    assert cluster.run(int, "3") == [3, 3]
    assert cluster._engine_group.membership.generation == before + 1


def test_hosts_stay_known_while_an_engine_is_lost_and_after_its_replacement():
    engines = FakeTransport(3)
    with dtkit.Cluster.from_transport(engines, device="cpu", interface="lo") as cluster:
        assert cluster._engine_group.membership.is_single_host
        engines.end_engine(2)
        engines.handshake_overrides[1]["host"] = "another"
        cluster._engine_group.membership.handshake([0, 1])
        assert not cluster._engine_group.membership.is_single_host
        engines.handshake_overrides[2]["host"] = "a third"
        replace_lost_ranks(cluster._engine_group, [2])
        assert cluster._engine_group.membership._host_by_rank[2] == "a third"
        engines.end_engine(1)
        replace_lost_ranks(cluster._engine_group, [1], shrink=True)
        assert list(cluster._engine_group.membership._host_by_rank) == [0, 1]
        assert not cluster._engine_group.membership.is_single_host
        replace_lost_ranks(cluster._engine_group, [1], shrink=True)
        assert cluster._engine_group.membership.is_single_host


# -- waiting, and commands that can't take effect -------------------------------------------------------------


def test_wait_raises_on_a_run_that_this_thread_has_paused(cluster):
    run = train(cluster, start=False)
    run.step(2)
    with pytest.raises(dtkit.errors.PausedError, match=r"paused at step 2.*run\.resume\(\) first"):
        run.wait()
    with pytest.raises(TimeoutError, match="the run is PAUSED at step 2"):
        run.wait(0.05)
    run.resume()
    assert run.result(10) is run.model
    assert run.done()


def test_wait_continues_through_a_pause_that_ends_with_resume(cluster):
    run = train(cluster, steps=5000)
    run.pause()
    threading.Timer(0.2, run.post, ["resume"]).start()
    run.wait(20)
    assert run.status.state is State.COMPLETED


def test_await_reports_that_the_cell_waits_while_the_run_is_paused(cluster):
    run = train(cluster, steps=100_000)

    async def main() -> str:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        run.subscribe(lambda: loop.call_soon_threadsafe(changed.set))
        waiting = asyncio.ensure_future(run)
        await loop.run_in_executor(None, run.pause)
        while "waits for Resume or Stop" not in run.status.message:
            await asyncio.wait_for(changed.wait(), 10)
            changed.clear()
        assert not waiting.done()
        run.post("stop")
        await asyncio.wait_for(waiting, 10)
        return run.status.message

    assert asyncio.run(main()) == ""
    assert run.status.state is State.STOPPED


def test_the_message_of_an_awaited_run_is_that_of_its_state(cluster, monkeypatch):
    """After Resume, "running" stood next to "paused: this cell waits" until the waiting cell had the kernel again."""
    monkeypatch.setattr("dtkit._util.notebook.in_notebook", lambda: True)
    run = train(cluster, steps=100_000)

    async def main() -> set[tuple[State, str]]:
        loop, seen = asyncio.get_running_loop(), set()
        waiting = asyncio.ensure_future(run)
        await asyncio.sleep(0)
        unsubscribe = run.subscribe(lambda: seen.add((run.status.state, run.status.message)))  # on the run's thread
        for _ in range(3):
            await loop.run_in_executor(None, run.pause)
            run.resume()  # the loop doesn't turn between these
        unsubscribe()
        run.post("stop")
        await asyncio.wait_for(waiting, 10)
        return seen

    assert asyncio.run(main()) == {
        (State.PAUSED, "paused: this cell waits for Resume or Stop"),
        (State.RUNNING, "later cells wait for the run's end"),
    }
    assert run.status.message == ""


def test_pause_timeout_names_the_stuck_rank_and_the_remedy(cluster, engines, monkeypatch):
    monkeypatch.setattr(timeouts, "STUCK_COMMAND_TIMEOUT_S", 0.2)
    run = train(cluster, steps=100_000, start=False)
    run.step(5)
    engines.hold_requests()
    run.resume()
    with pytest.raises(TimeoutError, match=r"'pause' has not taken effect after 0 s: the engines have not come"):
        run.pause(timeout=0.1)
    monkeypatch.setattr(run._driver.calls.stall_detector, "check", lambda _now: None)
    run._driver.calls.stall_detector.stall_report = StallReport(
        "stuck", 1, "here", "forward", 3, "net.py:14", "rank 1 is stuck in forward", "wait", 8.0
    )
    with pytest.raises(TimeoutError, match=r"rank 1 is stuck in forward.*net\.py:14.*cluster\.interrupt\(\)"):
        run.pause()
    engines.release_requests()
    until(run, lambda: run.status.state is State.PAUSED)


def test_extend_is_not_undone_by_a_concurrent_notification(cluster, monkeypatch):
    run = train(cluster, steps=20)
    run.wait(10)
    start, steps_seen = run._driver.start, []

    def start_after_a_notification() -> None:
        notifier = threading.Thread(target=run._notify)  # like the thread that writes checkpoints
        notifier.start()
        notifier.join(10)
        steps_seen.append(run.spec.steps)
        start()

    monkeypatch.setattr(run._driver, "start", start_after_a_notification)
    run.extend(steps=30)
    run.wait(10)
    assert steps_seen == [50]
    assert (run.spec.steps, run.status.step) == (50, 50)


def test_explain_step_is_refused_if_the_strategy_has_nothing_to_explain(cluster):
    run = train(cluster, strategy=dtkit.ParameterAveraging(every=2), start=False)
    with pytest.raises(dtkit.errors.RunError, match="there is little to explain"):
        run.explain_step()
    run.stop()


def test_the_model_is_the_same_object_while_the_run_is_at_the_same_step(cluster):
    run = train(cluster, start=False)
    run.step(2)
    before = run.model
    assert run.model is before
    run.step()
    assert run.model is not before
    run.stop()


@pytest.mark.parametrize(
    ("mode", "values", "stops"), [("min", [3.0, 2.0, 2.0, 2.0], True), ("max", [1.0, 2.0, 3.0, 4.0], False)]
)
def test_early_stopping_follows_the_mode(mode, values, stops):
    stopped = []

    class Epochs:
        spec = FakeSource().spec  # without validation=

        def __init__(self) -> None:
            self.history = self
            self.evaluations: list[Any] = []

        def note(self, text: str) -> None:
            stopped.append(text)

        def stop(self) -> int:
            return 0

    run: Any = Epochs()
    stopping = dtkit.EarlyStopping(patience=2, mode=mode)
    for value in values:
        run.evaluations.append(Evaluation(1, 1, {"loss": value}))
        stopping(run)
    assert bool(stopped) == stops
    with pytest.raises(ValueError, match="mode='largest'; it must be 'min'"):
        dtkit.EarlyStopping(mode="largest")  # type: ignore[arg-type]


def test_early_stopping_without_held_out_data_says_once_what_it_watches(cluster):
    notes = []
    for options in ({}, {"validation": ROWS}):
        run = train(cluster, steps=12, callbacks=[dtkit.EarlyStopping()], **options)
        run.wait(10)
        notes.append([event.text for event in run.history.events if "watches the training loss" in event.text])
    assert [len(texts) for texts in notes] == [1, 0]


def test_early_stopping_knows_of_held_out_data_whatever_the_settings_look_like(cluster):
    run = train(cluster, epochs=1, validation=ROWS, start=False)
    assert run.spec.has_validation
    stopping, shown = dtkit.EarlyStopping(), mock.Mock(history=History())
    shown.spec = dataclasses.replace(run.spec, settings=())
    stopping(shown)  # after an epoch without an evaluation
    assert stopping.best_epoch == 0
    assert not train(cluster, epochs=1).spec.has_validation


def test_early_stopping_leaves_out_a_step_without_samples():
    """A stream may end within an epoch. The loss of such a step is 0 / 0."""
    history = History()
    for step, (loss, weight) in enumerate([(2.0, 4.0), (math.nan, 0.0)]):
        history.append([StepRecord(step, 0, 0, int(weight), loss, weight, 0.1, *[0.0] * 4, 0.5, 0, sent_bytes=0)])
    stopping, run = dtkit.EarlyStopping(), mock.Mock(history=history)
    run.spec.steps_per_epoch, run.spec.has_validation = 2, False
    stopping(run)
    assert stopping.best == 2.0


# -- time limits -----------------------------------------------------------------------------------------------


def test_release_keeps_the_job_if_the_weights_arrive_too_late(cluster, engines):
    run = train(cluster)
    run.wait(10)
    engines.hold_requests()
    threading.Timer(0.4, engines.release_requests).start()
    with pytest.raises(TimeoutError, match=r"release has not ended within timeout=0\.1 s"):
        run.release(timeout=0.1)
    assert not run.is_released
    run.release(timeout=10)
    assert run.is_released
    assert set(run.model.state_dict()) == {"weight", "bias"}


def test_verify_ends_at_its_time_limit(cluster, engines):
    run = train(cluster)
    run.wait(10)
    engines.hold_requests()
    threading.Timer(0.4, engines.release_requests).start()
    with pytest.raises(TimeoutError, match=r"verify has not ended within timeout=0\.1 s"):
        run.verify(timeout=0.1)


def test_extend_waits_for_views_no_longer_than_its_time_limit(cluster):
    run, has_ended, is_shown = train(cluster), threading.Event(), threading.Event()

    def show() -> None:
        if run.done():
            has_ended.set()
            is_shown.wait(10)

    unsubscribe = run.subscribe(show)
    assert has_ended.wait(10)
    with pytest.raises(RunError, match=r"a view has not shown its end within 0\.1 s"):
        run.extend(steps=8, timeout=0.1)
    is_shown.set()
    unsubscribe()
    run.extend(steps=8, timeout=10)
    run.wait(10)
    assert run.status.step == 48


def test_inject_delay_ends_at_its_time_limit(cluster, engines):
    run = train(cluster)
    run.wait(10)
    engines.hold_requests()
    threading.Timer(0.4, engines.release_requests).start()
    with pytest.raises(dtkit.errors.EngineError):
        run.inject_delay(0, 2.0, timeout=0.1)


WAITING = ("done", "exception", "result", "subscribe", "wait", "__await__")
IMMEDIATE = {"done", "exception", "subscribe", "__await__"}


@pytest.mark.parametrize("name", WAITING)
def test_runs_and_tasks_have_the_same_waiting_methods(name):
    of_run, of_task = inspect.getattr_static(dtkit.Run, name), inspect.getattr_static(Task, name)
    assert type(of_run) is type(of_task)
    if name not in IMMEDIATE:
        assert str(inspect.signature(of_run)).startswith("(self, timeout: 'float | None' = None)")
        assert str(inspect.signature(of_task)).startswith("(self, timeout: 'float | None' = None)")


@pytest.mark.parametrize(
    "name",
    [
        "pause",
        "resume",
        "step",
        "explain_step",
        "stop",
        "set",
        "save",
        "wait",
        "result",
        "evaluate",
        "memory",
        "placement",
        "verify",
        "extend",
        "repair",
        "release",
        "inject_delay",
        "inject_fault",
    ],
)
def test_every_blocking_method_of_a_run_has_a_timeout(name):
    assert inspect.signature(getattr(dtkit.Run, name)).parameters["timeout"].default is None


def test_a_lost_engine_is_told_before_the_others_have_answered():
    engines = FakeTransport(2)
    with dtkit.Cluster.from_transport(engines, device="cpu") as cluster:
        run = train(cluster, steps=1_000_000, start=False, on_failure="pause")
        run.step(3)
        engines.hold_requests()
        run.resume()
        watched(lambda: run._driver.calls.pending)  # both ranks owe a reply
        engines.end_engine(1)
        watched(lambda: [event.rank for event in run.history.events if event.kind == "lost"] == [1])
        assert not engines.interrupted_ranks  # rank 0 still has its grace
        engines.release_requests()


def test_a_lost_engine_is_explained_by_its_loss_and_not_by_its_last_error():
    engines = FakeTransport(2)
    with dtkit.Cluster.from_transport(engines, device="cpu") as cluster:
        run = train(cluster, steps=1_000_000, start=False, on_failure="pause")
        run.step(3)
        failure = Failure(1, "?", "RuntimeError", "Connection reset by peer", "", kind="error", victim=True)
        engines.end_engine(1)
        run._driver.failures._on_lost_ranks([1], [failure])
        assert [event.text for event in run.history.events if event.kind == "lost"] == [
            "node 1 lost at step 3: its process has ended"
        ]


@pytest.mark.parametrize(("host", "shown"), [("", "node 1"), ("host3", "node 1 on host3")])
def test_the_event_of_a_lost_engine_names_its_node_once(host: str, shown: str):
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster:
        run = train(cluster, start=False)
        run._driver.progress.add_loss(1, EngineLoss("dtkit ended its process", host))
        run.stop()
    (event,) = [event for event in run.history.events if event.kind == "lost"]
    assert event.text == f"{shown} lost at step 0: dtkit ended its process"
    assert name_event_node(event) == ""
    assert name_event_node(dataclasses.replace(event, text="hello")) == "[1] "


def test_checking_early_stopping_for_one_training_leaves_it_as_it_was_for_another():
    stopping = dtkit.EarlyStopping(patience=2)
    before = dict(vars(stopping))
    stopping.check_monitor((), has_validation=True, logs_further=False)
    assert vars(stopping) == before


def test_early_stopping_prints_values_that_differ():
    from dtkit.training.callbacks import _format_apart

    assert _format_apart(1.63301, 1.63299) == ("1.63301", "1.63299")
    assert _format_apart(2.0, 1.0) == ("2", "1")
    assert _format_apart(1.0, 1.0) == ("1", "1")
    assert _format_apart(2 / 3, 2 / 3) == ("0.6667", "0.6667")

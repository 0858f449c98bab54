"""Commands and results of a run on real engines: pause, step, learning rate, stop, wait, NaN, weights."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import resource
import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn

import dtkit
from dtkit.types import State
from tests.support.marks import slow
from tests.support.small import LONG, ROWS, accuracy, check_usable, data, net, sgd, train
from tests.support.waiting import wait_until_run

pytestmark = pytest.mark.cluster


def are_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_commands_return_the_step_at_which_they_took_effect(cluster2):
    run = train(cluster2, steps=LONG)
    wait_until_run(run, lambda: run.status.step > 20)
    paused_at = run.pause()
    assert run.status.state is State.PAUSED
    assert run.status.step == paused_at == run.history.num_steps
    assert run.step() == paused_at + 1
    assert run.step(3) == paused_at + 4
    assert run.set(lr=0.05) == paused_at + 4
    assert run.lr == 0.05
    run.resume()
    changed = run.set(lr=0.01)
    assert changed > paused_at + 3
    wait_until_run(run, lambda: run.status.step > changed + 5)
    end = run.stop()
    assert run.status.state is State.STOPPED
    assert run.history.num_steps == end
    rows = run.history.rows()
    for rank in (0, 1):
        rank_rows = rows[rows["rank"] == rank]
        assert list(rank_rows["step"]) == list(range(end))
        assert (rank_rows["lr"][: paused_at + 4] == 0.1).all()
        assert (rank_rows["lr"][paused_at + 4 : changed] == 0.05).all()
        assert (rank_rows["lr"][changed:] == 0.01).all()


def test_commands_that_the_state_does_not_allow_are_refused(cluster2):
    run = train(cluster2, steps=LONG)
    with pytest.raises(dtkit.errors.RunError, match=r"call run.pause\(\) first"):
        run.step()
    with pytest.raises(dtkit.errors.RunError, match=r"run.pause\(\) first"):
        run.verify()
    with pytest.raises(dtkit.errors.RunError, match=r"run.stop\(\) it first"):
        run.release()
    with pytest.raises(dtkit.errors.RunError, match="trains one model at a time"):
        train(cluster2)
    assert run.status.state is State.RUNNING  # the refused train did not change the first run
    with pytest.raises(ValueError, match="lr=-1; a learning rate is a finite number from 0 up"):
        run.set(lr=-1)
    with pytest.raises(ValueError, match="lr=nan"):
        run.post("lr", math.nan)
    with pytest.raises(ValueError, match="integer from 1 up"):
        run.step(0)
    run.stop()
    with pytest.raises(dtkit.errors.RunError, match=r"has been stopped at step \d+, so it can't be resumed"):
        run.resume()
    assert run.stop() == run.status.step


def test_wait_continues_while_the_run_is_paused(cluster2):
    run = train(cluster2, steps=LONG)
    threading.Thread(target=run.pause).start()
    with pytest.raises(TimeoutError, match=r"PAUSED at step \d+ of .*run\.resume\(\) continues"):
        run.wait(2)
    assert run.status.state is State.PAUSED


@pytest.mark.slow
def test_resume_right_after_pause_continues_the_run(cluster2):
    run = train(cluster2, steps=LONG)
    wait_until_run(run, lambda: run.status.step > 20)
    for _ in range(20):  # the pause reaches the engines before or after the resume
        run.post("pause")
        step = run.status.step
        run.resume()
        wait_until_run(run, lambda step=step: run.status.step > step + 20)
    run.stop()


def test_wait_with_a_timeout_leaves_the_run_running(cluster2):
    run = train(cluster2, steps=LONG)
    with pytest.raises(TimeoutError, match="goes on"):
        run.wait(0.01)
    assert run.status.state is State.RUNNING
    run.stop()


def test_interrupt_during_wait_pauses_the_run_and_is_raised(cluster2):
    run = train(cluster2, steps=LONG)
    is_sent = threading.Event()

    def interrupt_once() -> None:
        if run.status.step > 5 and not is_sent.is_set():
            is_sent.set()
            os.kill(os.getpid(), signal.SIGINT)

    run.subscribe(interrupt_once)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        run.wait(60)
    assert run.status.state is State.PAUSED
    shown = interrupt.value._render_traceback_()  # what IPython shows of the cell
    assert shown == [f"paused at step {run.status.step:,}; run.resume() goes on"]
    check_usable(cluster2)


def test_await_does_not_block_the_loop_and_ends_with_the_run(cluster2):
    run = train(cluster2, steps=LONG)

    async def main() -> int:
        stopper = asyncio.get_running_loop().run_in_executor(None, run.stop)
        await run
        return await stopper

    assert asyncio.run(main()) == run.status.step
    assert run.status.state is State.STOPPED


def test_canceling_an_await_pauses_the_run_and_shows_one_line(cluster2):
    """ipykernel cancels a cell that awaits when the kernel is interrupted."""
    run = train(cluster2, steps=LONG)

    async def wait_for_run() -> tuple[State, list[str]]:
        try:
            await run
        except asyncio.CancelledError as cancelled:
            return run.status.state, cancelled._render_traceback_()
        raise AssertionError("the run has ended")

    async def main() -> tuple[State, list[str]]:
        waiting = asyncio.ensure_future(wait_for_run())
        await asyncio.sleep(0)
        waiting.cancel()
        return await waiting

    state, lines = asyncio.run(main())
    assert state is State.PAUSED
    assert lines == [f"paused at step {run.status.step:,}; run.resume() goes on"]


def test_validation_data_is_evaluated_after_each_epoch(cluster2):
    inputs, targets = data()
    run = train(cluster2, epochs=3, validation=(inputs[:11], targets[:11]), metrics={"accuracy": accuracy})
    run.wait(60)
    assert [e.step for e in run.history.evaluations] == [4, 8, 12]
    assert {e.samples for e in run.history.evaluations} == {11}
    model = run.model.eval()
    with torch.no_grad():
        output = model(inputs[:11])
    last = run.history.evaluations[-1].values
    assert last["accuracy"] == pytest.approx(float(accuracy(output, targets[:11])), abs=1e-6)
    assert last["loss"] == pytest.approx(float(nn.functional.cross_entropy(output, targets[:11])), abs=1e-6)


@pytest.mark.parametrize("rows", [1, slow(2), 7, slow(64)])
def test_evaluate_is_exact_for_any_number_of_rows(cluster2, rows):
    inputs, targets = data()
    run = train(cluster2, metrics={"accuracy": accuracy})
    run.wait(60)
    evaluation = run.evaluate((inputs[:rows], targets[:rows]))
    with torch.no_grad():
        output = run.model(inputs[:rows])
    assert evaluation.samples == rows
    assert evaluation.values["accuracy"] == pytest.approx(float(accuracy(output, targets[:rows])), abs=1e-6)
    assert evaluation.values["loss"] == pytest.approx(
        float(nn.functional.cross_entropy(output, targets[:rows])), abs=1e-6
    )


def test_model_is_fetched_once_per_step_and_the_user_s_is_unchanged(cluster2):
    original = net()
    run = train(cluster2, original)
    run.wait(60)
    assert are_equal(original.state_dict(), net().state_dict())
    trained = run.model
    assert trained is run.model
    assert not are_equal(trained.state_dict(), original.state_dict())
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.zero_()
    run.extend(steps=1)
    run.wait(60)
    assert run.model is not trained
    assert all(parameter.any() for parameter in run.model.parameters())  # the run did not continue from zeros


@pytest.mark.slow
def test_batch_statistics_are_averaged_over_ranks(cluster2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3))
    with pytest.warns(UserWarning, match=r"1 \(BatchNorm1d\) normalizes with the statistics of a batch"):
        run = train(cluster2, model, steps=4, shuffle=None)
    run.wait(60)
    first = run.model.state_dict()["1.running_mean"]
    assert first.abs().max() > 0
    assert are_equal(run.model.state_dict(), run.model.state_dict())  # reading does not change it
    check = run.verify(steps=4)
    assert check.verdict == "NOT COMPARABLE"
    assert "1 (BatchNorm1d)" in check.text()


def test_new_train_releases_the_last_run_and_keeps_its_weights(cluster2):
    first = train(cluster2)
    first.wait(60)
    before, loss = first.model.state_dict(), first.evaluate(data())["loss"]
    second = train(cluster2, steps=3)
    second.wait(60)
    assert are_equal(first.model.state_dict(), before)
    assert first.evaluate(data())["loss"] == pytest.approx(loss, rel=1e-12)
    second.release()
    second.release()
    assert second.model.state_dict().keys() == before.keys()


def test_train_stops_a_paused_run(cluster2):
    first = train(cluster2, start=False)
    assert first.status.state is State.PAUSED
    first.step(2)
    check_usable(cluster2)
    assert first.status.state is State.STOPPED
    assert first.history.num_steps == 2
    assert first.model is not None


class Poison(nn.Module):
    """Model that returns NaN for a batch with the marked row."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) * torch.where((x == 77).any(), torch.nan, 1.0)


def test_nan_loss_pauses_all_ranks_before_the_update(cluster2):
    inputs, targets = data()
    inputs[40] = 77  # of rank 1, in step (40 - 32) // 8 = 1 with rows in order
    torch.manual_seed(0)
    run = train(cluster2, Poison(), (inputs, targets), shuffle=None, seed=0, start=False, epochs=2)
    part = cluster2.partition((inputs, targets))
    run = train(cluster2, Poison(), part, shuffle=None, start=False, epochs=2)
    run.step()
    before = run.model.state_dict()
    run.resume()
    with pytest.raises(dtkit.errors.NonFiniteError, match=r"rank 1 .*step 1.*this rank's loss is nan") as caught:
        run.wait(60)
    assert [f.rank for f in caught.value.failures] == [1]
    assert "parameters are as after the step before" in str(caught.value)
    assert run.status.state is State.PAUSED
    assert run.status.step == 1
    assert are_equal(run.model.state_dict(), before)
    assert isinstance(run.exception, dtkit.errors.NonFiniteError)
    run.set(lr=0.001)
    run.resume()  # the same step, the same rows
    with pytest.raises(dtkit.errors.NonFiniteError, match="step 1"):
        run.wait(60)
    run.stop()
    check_usable(cluster2)


def test_verify_during_a_run_leaves_it_unchanged(cluster2):
    run = train(cluster2, steps=30, start=False)
    run.step(5)
    before = run.model.state_dict()
    assert run.verify(steps=10).verdict == "PASS"
    assert are_equal(run.model.state_dict(), before)
    run.resume()
    run.wait(60)
    assert run.history.num_steps == 30


def test_history_has_a_row_per_rank_and_step(cluster2):
    run = train(cluster2, epochs=2)
    run.wait(60)
    frame = run.history.to_pandas()
    assert len(run.history) == len(frame) == 2 * 8
    expected = "step epoch rank samples loss lr data_s forward_s backward_s update_s step_s memory_bytes"
    assert set(expected.split()) <= set(frame.columns)
    assert (frame.groupby("step")["samples"].sum() == 16).all()
    assert frame.groupby("epoch")["samples"].sum().tolist() == [ROWS, ROWS]
    assert (frame["memory_bytes"] > 50_000_000).all()
    assert (frame[["forward_s", "backward_s", "update_s", "step_s"]] > 0).all().all()
    parts = frame[["data_s", "forward_s", "backward_s", "update_s"]].sum(axis=1)
    assert (parts <= frame["step_s"] * 1.01).all()


def test_text_printed_in_a_step_becomes_events(cluster2):
    def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        print("seen", len(batch[0]))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    run = train(cluster2, loss=None, training_step=step, steps=2)
    run.wait(60)
    printed = [(e.rank, e.text) for e in run.history.events if e.kind == "print"]
    assert sorted(printed) == [(0, "seen 8"), (0, "seen 8"), (1, "seen 8"), (1, "seen 8")]


def test_failing_subscriber_does_not_disturb_the_run(cluster2, caplog):
    run = train(cluster2, start=False)
    run.subscribe(lambda: 1 / 0)
    run.resume()
    run.wait(60)
    assert run.status.state is State.COMPLETED
    assert "ZeroDivisionError" in caplog.text


def test_verify_names_dropout_as_not_comparable(cluster2):
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    run = train(cluster2, model)
    run.wait(60)
    verification = run.verify(steps=3)
    assert verification.verdict == "NOT COMPARABLE"
    assert not verification
    assert "1 (Dropout)" in verification.text()


def test_broadcast_model_has_equal_checksums_and_trains_twice(cluster2):
    model = cluster2.broadcast(net())
    assert model.is_identical
    assert len(set(model.checksums)) == 1
    states = []
    for _ in range(2):
        run = train(cluster2, model)
        run.wait(60)
        states.append(run.model.state_dict())
    assert are_equal(*states)  # bit by bit
    changed = net()
    with torch.no_grad():
        changed[0].weight[0, 0] += 1e-6
    assert cluster2.broadcast(changed).checksums != model.checksums


def test_stratified_and_weighted_partitions_reach_the_engines(cluster2):
    part = cluster2.partition(data(), by="stratified", weights=[1, 3], seed=1)
    run = train(cluster2, rows=part, epochs=1)
    run.wait(60)
    by_rank = run.history.to_pandas().groupby("rank")["samples"].sum()
    assert tuple(by_rank) == part.sizes == (16, 48)


def test_model_with_several_inputs_trains_on_numpy_arrays(cluster2):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 3)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.line(a) + b

    inputs, targets = data()
    rows = (inputs.numpy(), np.zeros((ROWS, 3), np.float32), targets.numpy())
    run = train(cluster2, Two(), rows, optimizer=sgd)
    run.wait(60)
    assert run.status.state is State.COMPLETED


def test_client_forgets_finished_calls(cluster2):
    """ipyparallel's client keeps a call until its engine reports idle; finished calls must not add up."""
    client = cluster2._engine_group.transport._client
    for _ in range(100):
        cluster2.refresh_nodes()
    for table in (client._futures, client._output_futures, client.results, client.history):
        assert len(table) < 50


@pytest.mark.slow
def test_dispatch_results_are_freed_without_garbage_collection(cluster2):
    """Garbage collections may be minutes apart, so results in reference cycles would add up."""
    run = train(cluster2, steps=2000, start=False)
    gc.collect()
    gc.disable()
    try:
        run.resume()
        run.wait(60)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kept = {type(item).__name__ for item in gc.garbage} & {"Reply", "DispatchResult", "PendingCall"}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not kept


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.slow
def test_steps_reuse_memory_freed_by_the_previous_step(cluster2: dtkit.Cluster):
    """New pages for activations of half a MB each would cause thousands of page faults per step."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(4)]
    rows = torch.randn(512, 1024), torch.randint(1024, (512,))
    options = {"strategy": dtkit.Pipeline(2, 4), "batch_size": 512, "steps": 40}
    run = train(cluster2, nn.Sequential(*layers), rows, start=False, **options)
    run.step(20)
    before = np.array(cluster2.run(page_faults))
    run.step(20)
    assert ((np.array(cluster2.run(page_faults)) - before) / 20 < 300).all()
    run.stop()

"""Displays and controls of a run: phases, a slowed rank, replica checks, explained steps, schedules, callbacks."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dtkit
from dtkit._util import timeouts
from dtkit.dashboard.summary.notices import collect_notices
from dtkit.errors import CallbackError
from tests.support.marks import slow
from tests.support.nets import get_worker, resume_and_wait
from tests.support.small import LONG, check_usable, data, net, sgd, train
from tests.support.waiting import ends_soon, wait_until, wait_until_run

pytestmark = pytest.mark.cluster


# -- the time of a step ---------------------------------------------------------------------------------


def test_phases_waiting_and_communication_add_up_to_the_step(cluster2):
    run = train(cluster2, steps=60)
    run.wait(60)
    rows = run.history.rows()
    parts = ("data_s", "forward_s", "backward_s", "comm_s", "wait_s", "update_s")
    total = sum(rows[part].astype("f8") for part in parts)
    assert np.allclose(total, rows["step_s"], rtol=1e-3, atol=1e-6)
    for part in parts[:-2]:
        assert (rows[part] >= 0).all()
    # In each step the last rank waits for no other.
    by_step = rows["wait_s"].reshape(-1)[np.argsort(rows["step"], kind="stable")].reshape(-1, 2)
    assert (by_step[1:].min(axis=1) < 1e-6).all()  # the first step has two collectives
    assert by_step.max() > 0


def test_other_ranks_wait_for_a_slowed_rank(cluster2):
    run = train(cluster2, loss=None, training_step=costly, steps=20, start=False)
    run.inject_delay(1, 4)
    assert run.delay_factors == {1: 4.0}
    run.step(10)
    rows = run.history.rows()[4:]
    waiting = [float(np.median(rows["wait_s"][rows["rank"] == rank])) for rank in (0, 1)]
    assert waiting[0] > 0.02  # rank 1 sleeps 30 ms longer
    assert waiting[1] < 0.01
    assert np.median(rows["forward_s"][rows["rank"] == 1]) > 0.039
    assert any(event.text == "node 1 slowed 4x on purpose" for event in run.history.events)
    run.inject_delay(1, 1)
    assert run.delay_factors == {}
    run.stop()


def test_a_long_validation_says_that_it_is_one(cluster2, tmp_path):
    """The state was "running", with no step for as long as it took."""
    flag = tmp_path / "go on"

    def patient(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        while torch.distributed.is_initialized() and not flag.exists():
            # sleeps: on an engine, which has nothing else to wait for
            time.sleep(0.02)
        return (output.argmax(1) == target).float().mean()

    run = train(cluster2, validation=data(), metrics={"patient": patient}, steps=60)
    try:
        wait_until_run(run, lambda: re.search(r"running, .*: validating for \d+ s$", repr(run.status)))
    finally:
        flag.touch()
    run.wait(60)
    assert "validating" not in repr(run.status)


def costly(model: nn.Module, batch: Any) -> torch.Tensor:
    """Take a step of a declared cost."""
    # sleeps: a declared cost, since a loaded machine guarantees no other
    time.sleep(0.01)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def wide() -> nn.Module:
    """Return a model whose step takes milliseconds."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 3))


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2048, 64, generator=generator), torch.randint(3, (2048,), generator=generator)


@pytest.mark.slow
def test_balance_gives_a_slowed_rank_fewer_samples_and_trains_the_same(cluster2):
    options: dict[str, Any] = {"batch_size": 64, "steps": 120, "shuffle": "global"}
    plain = train(cluster2, wide().double(), (rows()[0].double(), rows()[1]), **options)
    plain.wait(120)
    expected = plain.model.state_dict()
    run = train(
        cluster2,
        wide().double(),
        (rows()[0].double(), rows()[1]),
        strategy=dtkit.DataParallel(balance="auto"),
        start=False,
        **options,
    )
    run.inject_delay(1, 3)
    run.resume()
    run.wait(120)
    last = run.history.rows()[-2:]
    samples = {int(row["rank"]): int(row["samples"]) for row in last}
    assert sum(samples.values()) == 64
    assert samples[0] > 1.5 * samples[1]
    state = run.model.state_dict()
    assert max(float((state[name] - expected[name]).abs().max()) for name in expected) <= 1e-12
    assert any("shares of the batch by node" in event.text for event in run.history.events)


# -- replica checks --------------------------------------------------------------------------------------


def test_replica_check_finds_identical_parameters(cluster2):
    run = train(cluster2, steps=20)
    run.wait(60)
    assert run.consistency == dtkit.types.ReplicaCheckResult(step=20, differing_ranks=(), differing_since=None)


def test_dispatches_without_checksums_leave_the_interval_between_checks(cluster2, monkeypatch):
    monkeypatch.setattr(timeouts, "REPLICA_CHECK_INTERVAL_S", 3600.0)
    run = train(cluster2, steps=LONG)
    wait_until(lambda: run.status.step > 200)
    assert run.consistency is not None
    assert run.consistency.step == 1
    run.stop()


def test_a_pause_checks_the_replicas_where_it_is(cluster2, monkeypatch):
    monkeypatch.setattr(timeouts, "REPLICA_CHECK_INTERVAL_S", 3600.0)
    run = train(cluster2, steps=LONG)
    wait_until(lambda: run.status.step > 200)
    step = run.pause()
    assert run.consistency == dtkit.types.ReplicaCheckResult(step, (), None)
    run.stop()


def test_replica_check_finds_a_rank_that_differs(cluster2):
    """The training step changes parameters on one rank only, which is a typical bug."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        import torch.distributed as dist

        x, y = batch
        if dist.get_rank() == 1:
            with torch.no_grad():
                model[0].bias[0] += 1e-3
        return nn.functional.cross_entropy(model(x), y)

    run = train(cluster2, loss=None, training_step=step, steps=20)
    run.wait(60)
    assert run.consistency is not None
    assert run.consistency.differing_ranks == (0, 1)  # of two ranks, neither is known to be right
    assert any("parameters are not equal on all nodes" in event.text for event in run.history.events)


@pytest.mark.parametrize("cluster", [4], indirect=True)
@pytest.mark.parametrize(
    "strategy",
    [dtkit.Pipeline(2, 2, replicas=2), dtkit.TensorParallel(2, replicas=2), dtkit.Sharded(replicas=2)],
    ids=str,
)
def test_replica_check_finds_a_replica_that_differs(cluster: dtkit.Cluster, strategy: Any):
    """Rank 3 changes its part, which only rank 1 holds, too."""

    def change_parameter() -> None:
        from dtkit.engine.state.dtensor_shards import get_local_tensor

        with torch.no_grad():
            get_local_tensor(get_worker()._parameters[0]).view(-1)[0] += 1e-3

    run = train(cluster, steps=4, strategy=strategy, start=False)
    run.step()
    assert run.consistency == dtkit.types.ReplicaCheckResult(1, (), None, num_holders=2)
    assert collect_notices(run)[0].text == "parameters identical between 2 replicas, checked at step 1"
    cluster.run(lambda: change_parameter() if get_rank() == 3 else None)
    resume_and_wait(run)
    assert run.consistency is not None
    assert (run.consistency.step, run.consistency.differing_ranks) == (4, (1, 3))
    assert collect_notices(run)[0].text.startswith("nodes 1 and 3 differ since step ")
    assert any("not equal on all nodes that hold the same ones: 1, 3" in event.text for event in run.history.events)


def get_rank() -> int:
    """Return this engine's rank."""
    import torch.distributed as dist

    return dist.get_rank()


# -- explained steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy", [dtkit.DataParallel(clip_grad_norm=0.1, accumulate=2), slow(dtkit.NaiveDataParallel())]
)
def test_explained_steps_train_like_plain_steps(cluster2, strategy: Any):
    plain = train(cluster2, net().double(), (data()[0].double(), data()[1]), steps=6, strategy=strategy)
    plain.wait(60)
    expected = plain.model.state_dict()
    run = train(cluster2, net().double(), (data()[0].double(), data()[1]), steps=6, strategy=strategy, start=False)
    explanations = [run.explain_step() for _ in range(6)]
    state = run.model.state_dict()
    assert max(float((state[name] - expected[name]).abs().max()) for name in expected) <= 1e-12
    assert [explanation.step for explanation in explanations] == list(range(6))
    assert all(explanation.identical for explanation in explanations)
    first = run.history.rows()[:2]
    assert explanations[0].loss == pytest.approx(float(run.history.totals()["loss"][0]))
    assert [len(rank.rows) for rank in explanations[0].ranks] == first["samples"].tolist()
    assert explanations[0].all_layers.reduced[0] == pytest.approx(float(first["grad_norm"][0]), rel=1e-5)


def test_explain_step_is_refused_where_it_is_impossible(cluster2):
    run = train(cluster2, steps=2, strategy=dtkit.ParameterAveraging(every=2), start=False)
    with pytest.raises(dtkit.errors.RunError, match="has no whole gradients on each rank"):
        run.explain_step()
    run.stop()
    run = train(cluster2, steps=1, start=False)
    run.step()
    with pytest.raises(dtkit.errors.RunError, match="completed"):
        run.explain_step()


# -- schedules and callbacks ----------------------------------------------------------------------------------


def test_plateau_of_the_validation_loss_lowers_the_learning_rate(cluster2):
    def plateau(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9999)

    run = train(cluster2, epochs=4, validation=data(), lr_scheduler=plateau)
    run.wait(60)
    rates = run.history.column("lr")[:: 2 * run.spec.steps_per_epoch]
    assert rates.tolist() == [0.1, 0.1, 0.05, 0.025]  # no later epoch is so much better than the first


def test_setting_the_learning_rate_scales_the_schedule(cluster2):
    run = train(cluster2, steps=10, lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5), start=False)
    run.step(3)
    run.set(lr=0.8)
    run.step(3)
    assert run.history.column("lr")[::2].tolist() == pytest.approx([0.1, 0.05, 0.025, 0.8, 0.4, 0.2])
    run.stop()


def test_invalid_lr_scheduler_is_refused(cluster2):
    with pytest.raises(dtkit.errors.FirstBatchError, match=r"scheduler\(optimizer\) returned int"):
        train(cluster2, lr_scheduler=lambda _: 3)
    with pytest.raises(TypeError, match="it must be a function from an optimizer to a torch scheduler"):
        train(cluster2, lr_scheduler=3)
    with pytest.raises(ValueError, match="it must be 'step'"):
        train(cluster2, lr_scheduler=lambda o: o, lr_scheduler_every="year")
    check_usable(cluster2)


def test_callbacks_run_after_each_epoch_and_before_the_next(cluster2):
    seen = []

    def callback(run: dtkit.Run) -> None:
        seen.append((run.status.step, len(run.history.evaluations), run.evaluate(data()).samples))

    run = train(cluster2, epochs=3, validation=data(), callbacks=[callback])
    run.wait(60)
    assert seen == [(4, 1, 64), (8, 2, 64), (12, 3, 64)]


def test_failing_callback_pauses_the_run_and_is_raised(cluster2):
    def callback(run: dtkit.Run) -> None:
        raise RuntimeError(f"not at step {run.status.step}")

    run = train(cluster2, epochs=2, callbacks=[callback])
    with pytest.raises(CallbackError, match="the callback callback failed after epoch 1, step 4") as caught:
        run.wait(60)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert run.status.state is dtkit.types.State.PAUSED
    assert run.status.step == 4
    run.stop()
    check_usable(cluster2)


def test_callback_that_waits_for_its_run_raises(cluster2):
    run = train(cluster2, epochs=2, callbacks=[lambda run: run.wait()])
    with pytest.raises(dtkit.errors.RunError, match="a callback can't wait for the run"):
        run.wait(60)
    run.stop()


@pytest.mark.parametrize("validation", [None, data()])
def test_early_stopping_ends_the_run_without_improvement(cluster2, validation: Any):
    def make_idle_sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    stopping = dtkit.EarlyStopping(patience=2)
    run = train(cluster2, epochs=50, optimizer=make_idle_sgd, validation=validation, callbacks=[stopping])
    run.wait(60)
    assert run.status.state is dtkit.types.State.STOPPED
    assert run.status.step == 3 * run.spec.steps_per_epoch  # the first epoch is the best, the next two are no better
    assert stopping.best_epoch == 1
    assert any("stopped early after epoch 3" in event.text for event in run.history.events)


def test_run_stopped_by_a_callback_can_be_extended(cluster2):
    def stop(run: dtkit.Run) -> None:
        if run.status.step == 4:
            run.stop()

    run = train(cluster2, epochs=5, optimizer=sgd, callbacks=[stop])
    run.wait(60)
    assert (run.status.state, run.status.step) == (dtkit.types.State.STOPPED, 4)
    run.extend(epochs=2)
    run.wait(60)
    assert (run.status.state, run.status.step) == (dtkit.types.State.COMPLETED, 12)


# -- callbacks and evaluations ----------------------------------------------------------------------------------


def test_callbacks_may_use_commands_that_act_between_steps(cluster2):
    def callback(run: dtkit.Run) -> None:
        run.set(lr=run.lr / 2)
        run.inject_delay(1, 1)
        run.evaluate(data())
        assert run.model is not None
        run.note("seen")

    run = train(cluster2, epochs=3, callbacks=[callback])
    run.wait(60)
    assert run.status.state is dtkit.types.State.COMPLETED
    assert run.history.column("lr")[::8].tolist() == pytest.approx([0.1, 0.05, 0.025])


def test_early_stopping_starts_again_with_another_run(cluster2):
    def make_idle_sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    stopping = dtkit.EarlyStopping(patience=2)
    for _ in range(2):
        run = train(cluster2, epochs=9, optimizer=make_idle_sgd, callbacks=[stopping])
        run.wait(60)
        assert run.status.step == 3 * run.spec.steps_per_epoch
        assert stopping.best_epoch == 1


def return_rows(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Return no metric. Where there is no rank, the call raises, so the trial in the notebook can't find that."""
    return output + get_rank()


def test_failed_evaluation_pauses_an_intact_run(cluster2):
    run = train(cluster2, epochs=2, validation=data(), metrics={"shape": return_rows})
    with pytest.raises(dtkit.errors.PausedError, match="metric 'shape' returned a tensor of shape"):
        run.wait(60)
    assert run.status.state is dtkit.types.State.PAUSED
    assert run.status.step == 4
    run.step()
    assert run.status.step == 5
    run.stop()
    with pytest.raises(ValueError, match="has no samples"):
        train(cluster2, validation=(data()[0][:0], data()[1][:0]))
    with pytest.raises(ValueError, match="the name of the loss itself"):
        train(cluster2, metrics={"loss": lambda output, _: output.mean()})
    with pytest.raises(TypeError, match="metrics is a list"):
        train(cluster2, metrics=[nn.MSELoss()])
    check_usable(cluster2)


def fail_on_rank_1(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Return a metric, or raise on rank 1."""
    if get_rank() == 1:
        raise LookupError("no such class")
    return output.mean()


@pytest.mark.parametrize(
    ("strategy", "victims"),
    [slow(dtkit.DataParallel(), {1: False}), (dtkit.Sharded(), {1: False, 0: True})],
    ids=["data", "sharded"],
)
def test_metric_that_fails_on_one_rank_is_named_and_releases_the_other(
    cluster2, strategy: Any, victims: dict[int, bool]
):
    """Sharded ranks that gather parameters for the next batch wait for the failed rank."""
    run = train(cluster2, epochs=2, validation=data(), metrics={"failing": fail_on_rank_1}, strategy=strategy)
    message = rf"rank 1 on {re.escape(cluster2.nodes[1].host)}, step 4: LookupError: no such class"
    with pytest.raises(dtkit.errors.PausedError, match=message):
        run.wait(60)
    assert (run.status.state, run.status.step) == (dtkit.types.State.PAUSED, 4)
    error = run.exception
    assert isinstance(error, dtkit.errors.EngineError)
    assert "Traceback of rank 1:" in error.full
    assert 'in fail_on_rank_1\n    raise LookupError("no such class")\n' in str(error)
    assert {failure.rank: failure.victim for failure in error.failures} == victims
    with ends_soon():
        assert cluster2.run(get_rank) == [0, 1]
    with ends_soon(), pytest.raises(dtkit.errors.EngineError, match=message):
        run.evaluate(data())
    assert run.evaluate(data(), metrics={}).samples == 64
    run.stop()
    check_usable(cluster2)


def test_replica_check_of_averaging_runs_at_the_averaging_steps(cluster2):
    run = train(cluster2, steps=60, strategy=dtkit.ParameterAveraging(every=7))
    run.wait(60)
    run.extend(steps=60)
    run.wait(60)
    assert run.consistency is not None
    assert run.consistency.differing_ranks == ()

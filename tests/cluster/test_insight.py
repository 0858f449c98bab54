"""What a run shows and lets one steer: phases, a slowed rank, checksums, a step explained, schedules, callbacks."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dtkit
from dtkit.dashboard.summary.notices import collect_notices
from tests.support.nets import go, worker
from tests.support.small import check_usable, data, net, sgd, train
from tests.support.waiting import soon

pytestmark = pytest.mark.cluster


# -- where a step's time goes ---------------------------------------------------------------------------------


def test_phases_waiting_and_transfer_make_up_the_step(cluster2):
    run = train(cluster2, steps=60)
    run.wait(60)
    rows = run.history.rows()
    parts = ("data_s", "forward_s", "backward_s", "comm_s", "wait_s", "update_s")
    total = sum(rows[part].astype("f8") for part in parts)
    assert np.allclose(total, rows["step_s"], rtol=1e-3, atol=1e-6)
    for part in parts[:-2]:
        assert (rows[part] >= 0).all()
    # In every step one rank came last and waited for nobody.
    by_step = rows["wait_s"].reshape(-1)[np.argsort(rows["step"], kind="stable")].reshape(-1, 2)
    assert (by_step[1:].min(axis=1) < 1e-6).all()  # (the first one has two collectives)
    assert by_step.max() > 0


def test_the_others_wait_for_a_slowed_rank(cluster2):
    run = train(cluster2, loss=None, training_step=costly, steps=20, start=False)
    assert run.inject_delay(1, 4) == 0
    assert run.delay_factors == {1: 4.0}
    run.step(10)
    found = run.history.rows()[4:]
    waiting = [float(np.median(found["wait_s"][found["rank"] == rank])) for rank in (0, 1)]
    assert waiting[0] > 0.02  # of 30 ms that the other one sleeps longer
    assert waiting[1] < 0.01
    assert np.median(found["forward_s"][found["rank"] == 1]) > 0.039
    assert any(event.text == "node 1 slowed 4x on purpose" for event in run.history.events)
    run.inject_delay(1, 1)
    assert run.delay_factors == {}
    run.stop()


def costly(model: nn.Module, batch: Any) -> torch.Tensor:
    """A step of a declared cost."""
    # sleeps: a declared cost, since a loaded machine guarantees no other
    time.sleep(0.01)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def wide() -> nn.Module:
    """A model whose step takes milliseconds."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 3))


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2048, 64, generator=generator), torch.randint(3, (2048,), generator=generator)


def test_balance_gives_a_slowed_rank_less_and_trains_the_same(cluster2):
    how: dict[str, Any] = {"batch_size": 64, "steps": 120, "shuffle": "global"}
    plain = train(cluster2, wide().double(), (rows()[0].double(), rows()[1]), **how)
    plain.wait(120)
    expected = plain.model.state_dict()
    run = train(
        cluster2,
        wide().double(),
        (rows()[0].double(), rows()[1]),
        strategy=dtkit.DataParallel(balance="auto"),
        start=False,
        **how,
    )
    run.inject_delay(1, 3)
    run.resume()
    run.wait(120)
    last = run.history.rows()[-2:]
    samples = {int(row["rank"]): int(row["samples"]) for row in last}
    assert sum(samples.values()) == 64
    assert samples[0] > 1.5 * samples[1]
    found = run.model.state_dict()
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) <= 1e-12
    assert any("shares of the batch by node" in event.text for event in run.history.events)


# -- are all ranks equal --------------------------------------------------------------------------------------


def test_parameters_are_seen_to_be_identical(cluster2):
    run = train(cluster2, steps=20)
    run.wait(60)
    assert run.consistency == dtkit.types.ReplicaCheckResult(step=20, differing_ranks=(), differing_since=None)


def test_a_rank_that_goes_astray_is_seen(cluster2):
    """A bug as users make them: a step that changes parameters on one rank only."""

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
    assert run.consistency.differing_ranks == (0, 1)  # of two, nobody can say who is right
    assert any("parameters are not equal on all nodes" in event.text for event in run.history.events)


@pytest.mark.parametrize("cluster", [4], indirect=True)
@pytest.mark.parametrize(
    "strategy",
    [dtkit.Pipeline(2, 2, replicas=2), dtkit.TensorParallel(2, replicas=2), dtkit.Sharded(replicas=2)],
    ids=str,
)
def test_a_replica_that_goes_astray_is_seen(cluster: dtkit.Cluster, strategy: Any):
    """Its last rank has a part that rank 1 has, too, and no other rank."""

    def stray() -> None:
        from dtkit.engine.state.dtensor_shards import get_local_tensor

        with torch.no_grad():
            get_local_tensor(worker()._parameters[0]).view(-1)[0] += 1e-3

    run = train(cluster, steps=4, strategy=strategy, start=False)
    run.step()
    assert run.consistency == dtkit.types.ReplicaCheckResult(1, (), None, num_holders=2)
    assert collect_notices(run)[0].text == "parameters identical between 2 replicas, checked at step 1"
    cluster.run(lambda: stray() if rank() == 3 else None)
    go(run)
    assert run.consistency is not None
    assert (run.consistency.step, run.consistency.differing_ranks) == (4, (1, 3))
    assert collect_notices(run)[0].text.startswith("nodes 1 and 3 differ since step ")
    assert any("not equal on all nodes that hold the same ones: 1, 3" in event.text for event in run.history.events)


def rank() -> int:
    """On an engine: which one this is."""
    import torch.distributed as dist

    return dist.get_rank()


# -- a step taken apart ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [dtkit.DataParallel(clip_grad_norm=0.1, accumulate=2), dtkit.NaiveDataParallel()])
def test_an_explained_step_is_a_step_like_any_other(cluster2, strategy: Any):
    plain = train(cluster2, net().double(), (data()[0].double(), data()[1]), steps=6, strategy=strategy)
    plain.wait(60)
    expected = plain.model.state_dict()
    run = train(cluster2, net().double(), (data()[0].double(), data()[1]), steps=6, strategy=strategy, start=False)
    found = [run.explain_step() for _ in range(6)]
    state = run.model.state_dict()
    assert max(float((state[name] - expected[name]).abs().max()) for name in expected) <= 1e-12
    assert [explanation.step for explanation in found] == list(range(6))
    assert all(explanation.identical for explanation in found)
    first = run.history.rows()[:2]
    assert found[0].loss == pytest.approx(float(run.history.totals()["loss"][0]))
    assert [len(rank.rows) for rank in found[0].ranks] == first["samples"].tolist()
    assert found[0].all_layers.reduced[0] == pytest.approx(float(first["grad_norm"][0]), rel=1e-5)


def test_what_can_t_be_explained(cluster2):
    run = train(cluster2, steps=2, strategy=dtkit.ParameterAveraging(every=2), start=False)
    with pytest.raises(dtkit.errors.RunError, match="has no whole gradients on each rank"):
        run.explain_step()
    run.stop()
    run = train(cluster2, steps=1, start=False)
    run.step()
    with pytest.raises(dtkit.errors.RunError, match="completed"):
        run.explain_step()


# -- schedules and callbacks ----------------------------------------------------------------------------------


def test_a_plateau_of_the_held_out_loss_lowers_the_rate(cluster2):
    def plateau(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9999)

    run = train(cluster2, epochs=4, validation=data(), lr_scheduler=plateau)
    run.wait(60)
    rates = run.history.column("lr")[:: 2 * run.spec.steps_per_epoch]
    assert rates.tolist() == [0.1, 0.1, 0.05, 0.025]  # the first epoch sets the mark, and no other is so much better


def test_setting_a_rate_scales_the_schedule(cluster2):
    run = train(cluster2, steps=10, lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5), start=False)
    run.step(3)
    run.set(lr=0.8)
    run.step(3)
    assert run.history.column("lr")[::2].tolist() == pytest.approx([0.1, 0.05, 0.025, 0.8, 0.4, 0.2])
    run.stop()


def test_what_is_no_scheduler_is_refused(cluster2):
    with pytest.raises(dtkit.errors.EngineError, match=r"scheduler\(optimizer\) returned int"):
        train(cluster2, lr_scheduler=lambda _: 3)
    with pytest.raises(TypeError, match="it must be a function from an optimizer to a torch scheduler"):
        train(cluster2, lr_scheduler=3)
    with pytest.raises(ValueError, match="it must be 'step'"):
        train(cluster2, lr_scheduler=lambda o: o, lr_scheduler_every="year")
    check_usable(cluster2)


def test_callbacks_are_called_after_every_epoch_and_before_the_next(cluster2):
    seen = []

    def callback(run: dtkit.Run) -> None:
        seen.append((run.status.step, len(run.history.evaluations), run.evaluate(data()).samples))

    run = train(cluster2, epochs=3, validation=data(), callbacks=[callback])
    run.wait(60)
    assert seen == [(4, 1, 64), (8, 2, 64), (12, 3, 64)]


def test_a_callback_that_fails_pauses_the_run_and_is_raised(cluster2):
    def callback(run: dtkit.Run) -> None:
        raise RuntimeError(f"not at step {run.status.step}")

    run = train(cluster2, epochs=2, callbacks=[callback])
    with pytest.raises(RuntimeError, match="not at step 4"):
        run.wait(60)
    assert run.status.state is dtkit.types.State.PAUSED
    assert run.status.step == 4
    run.stop()
    check_usable(cluster2)


def test_a_callback_that_waits_for_the_run_is_told_why_it_can_t(cluster2):
    run = train(cluster2, epochs=2, callbacks=[lambda run: run.wait()])
    with pytest.raises(dtkit.errors.RunError, match="a callback can't wait for the run"):
        run.wait(60)
    run.stop()


@pytest.mark.parametrize("valid", [None, data()])
def test_early_stopping(cluster2, valid: Any):
    def still(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    stopping = dtkit.EarlyStopping(patience=2)
    run = train(cluster2, epochs=50, optimizer=still, validation=valid, callbacks=[stopping])
    run.wait(60)
    assert run.status.state is dtkit.types.State.STOPPED
    assert run.status.step == 3 * run.spec.steps_per_epoch  # one sets the mark, two are no better
    assert stopping.best_epoch == 1
    assert any("stopped early after epoch 3" in event.text for event in run.history.events)


def test_early_stopping_of_what_is_not_measured(cluster2):
    run = train(cluster2, epochs=2, callbacks=[dtkit.EarlyStopping(monitor="accuracy")])
    with pytest.raises(ValueError, match="needs held-out data"):
        run.wait(60)
    run.stop()


def test_a_run_trains_on_after_early_stopping(cluster2):
    def stop(run: dtkit.Run) -> None:
        if run.status.step == 4:
            run.stop()

    run = train(cluster2, epochs=5, optimizer=sgd, callbacks=[stop])
    run.wait(60)
    assert (run.status.state, run.status.step) == (dtkit.types.State.STOPPED, 4)
    run.extend(epochs=2)
    run.wait(60)
    assert (run.status.state, run.status.step) == (dtkit.types.State.COMPLETED, 12)


# -- what is refused at once ----------------------------------------------------------------------------------


def test_callbacks_may_ask_the_run_for_anything_that_acts_between_steps(cluster2):
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


def test_early_stopping_begins_anew_with_another_run(cluster2):
    def still(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    stopping = dtkit.EarlyStopping(patience=2)
    for _ in range(2):
        run = train(cluster2, epochs=9, optimizer=still, callbacks=[stopping])
        run.wait(60)
        assert run.status.step == 3 * run.spec.steps_per_epoch
        assert stopping.best_epoch == 1


def test_a_failed_evaluation_pauses_a_training_that_is_whole(cluster2):
    run = train(cluster2, epochs=2, validation=data(), metrics={"shape": lambda output, _: output})
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


def picky(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """A metric that fails on one rank's rows."""
    if rank() == 1:
        raise LookupError("no such class")
    return output.mean()


@pytest.mark.parametrize(
    ("strategy", "victims"),
    [(dtkit.DataParallel(), {1: False}), (dtkit.Sharded(), {1: False, 0: True})],
    ids=["data", "sharded"],
)
def test_a_metric_that_raises_on_one_rank_is_told_with_its_line_and_the_other_is_out(
    cluster2, strategy: Any, victims: dict[int, bool]
):
    """Whoever gathers parameters for the next batch waits for the one that failed."""
    run = train(cluster2, epochs=2, validation=data(), metrics={"picky": picky}, strategy=strategy)
    told = rf"rank 1 on {re.escape(cluster2.nodes[1].host)}, step 4: LookupError: no such class"
    with pytest.raises(dtkit.errors.PausedError, match=told):
        run.wait(60)
    assert (run.status.state, run.status.step) == (dtkit.types.State.PAUSED, 4)
    error = run.exception
    assert isinstance(error, dtkit.errors.EngineError)
    assert "Traceback of rank 1:" in str(error)
    assert 'in picky\n    raise LookupError("no such class")\n' in str(error)
    assert {failure.rank: failure.victim for failure in error.failures} == victims
    with soon():
        assert cluster2.run(rank) == [0, 1]
    with soon(), pytest.raises(dtkit.errors.EngineError, match=told):
        run.evaluate(data())
    assert run.evaluate(data(), metrics={}).samples == 64
    run.stop()
    check_usable(cluster2)


def test_averaging_is_checked_at_its_averagings(cluster2):
    run = train(cluster2, steps=60, strategy=dtkit.ParameterAveraging(every=7))
    run.wait(60)
    run.extend(steps=60)
    run.wait(60)
    assert run.consistency is not None
    assert run.consistency.differing_ranks == ()

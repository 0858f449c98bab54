"""Learning rates: set by hand, by any torch scheduler, and both together."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.optim import SGD, lr_scheduler

import dtkit
from dtkit.engine.lr_schedule import LearningRates
from dtkit.errors import EngineError
from dtkit.strategies.base import TrainingProgram
from dtkit.testing.in_process import InProcessTransport
from tests.support.small import train


def rates(lr_scheduler=None, every="step", *, lr=0.1, has_valid=False, groups=1):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(groups)]
    optimizer = SGD([{"params": [p], "lr": lr / 10**k} for k, p in enumerate(parameters)])
    program = TrainingProgram(None, SGD, None, lr_scheduler, every, has_valid)
    return LearningRates(program, optimizer), optimizer


def outcome(loss=1.0, loss_weight=1.0):
    return SimpleNamespace(loss=None if loss is None else torch.tensor(loss), loss_weight=loss_weight)


def run(found, optimizer, updates, per_epoch=4, loss=1.0):
    """The learning rate of each update."""
    seen = []
    for k in range(updates):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        found.step_after_update(outcome(loss), k + 1, per_epoch, None)
    return seen


def reference(make, updates, lr=0.1):
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make(optimizer)
    seen = []
    for _ in range(updates):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


SCHEDULES = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5),
    "Cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10),
    "Exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "OneCycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "Lambda": lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k)),
    "Sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, T_max=10)], milestones=[4]
    ),
    "Restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=5),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_scheduler_is_stepped_after_every_update(name):
    found, optimizer = rates(SCHEDULES[name])
    assert run(found, optimizer, 12) == reference(SCHEDULES[name], 12)


def test_scheduler_is_stepped_after_every_epoch_if_requested():
    found, optimizer = rates(lambda o: lr_scheduler.ExponentialLR(o, 0.5), "epoch")
    assert run(found, optimizer, 9) == pytest.approx([0.1] * 4 + [0.05] * 4 + [0.025])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rate_set_by_hand_scales_the_whole_schedule(name):
    found, optimizer = rates(SCHEDULES[name])
    run(found, optimizer, 5)
    now = optimizer.param_groups[0]["lr"]
    found.set_lr(2 * now)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2 * now)
    rest = run(found, optimizer, 7)
    assert rest == pytest.approx((2 * np.array(reference(SCHEDULES[name], 12)[5:])).tolist(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_rate_of_0_suspends_a_schedule_that_goes_on_afterwards(name):
    found, optimizer = rates(SCHEDULES[name], groups=2)
    run(found, optimizer, 5)
    found.set_lr(0.0)
    assert run(found, optimizer, 3) == [0.0] * 3
    expected = reference(SCHEDULES[name], 12)
    found.set_lr(2 * expected[8])
    ratio = 10 if name != "OneCycle" else 1  # its max_lr is the same for all groups
    assert optimizer.param_groups[1]["lr"] == pytest.approx(2 * expected[8] / ratio)
    assert run(found, optimizer, 4) == pytest.approx([2 * rate for rate in expected[8:]], rel=1e-6, abs=1e-9)


def test_suspended_plateau_schedule_still_reduces_its_own_rate():
    found, optimizer = rates(plateau)
    found.set_lr(0.0)
    assert run(found, optimizer, 8) == [0.0] * 8
    found.set_lr(0.3)
    assert run(found, optimizer, 5) == [0.3] * 4 + [0.15]


def test_groups_keep_their_proportion_under_a_schedule():
    found, optimizer = rates(SCHEDULES["Cosine"], groups=2)
    run(found, optimizer, 3)
    found.set_lr(0.5)
    run(found, optimizer, 3)
    first, second = (group["lr"] for group in optimizer.param_groups)
    assert second == pytest.approx(first / 10)


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0)


def test_plateau_scheduler_follows_the_training_loss_of_each_epoch():
    found, optimizer = rates(plateau)
    assert run(found, optimizer, 12) == [0.1] * 8 + [0.05] * 4  # the second epoch is no better than the first


def test_plateau_scheduler_follows_the_validation_loss_if_there_is_one():
    found, optimizer = rates(plateau, has_valid=True)
    assert run(found, optimizer, 12) == [0.1] * 12
    found.step_after_epoch(3.0, 2.0, None)
    assert optimizer.param_groups[0]["lr"] == 0.1
    found.step_after_epoch(4.0, 2.0, None)
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_plateau_scheduler_follows_the_mean_loss_of_all_ranks():
    found, optimizer = rates(plateau, has_valid=True)
    others = torch.tensor([9.0, 1.0], dtype=torch.float64)  # loss times weight, and weight, of the other ranks
    group = SimpleNamespace(all_reduce=lambda sums: sums.add_(others))
    found.step_after_epoch(3.0, 1.0, group)
    others[0] = 1.0
    found.step_after_epoch(4.0, 1.0, group)  # a larger loss on this rank, but a smaller one of all
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_repeated_evaluation_steps_the_scheduler_once():
    """An interrupted evaluation may have stepped the scheduler on some ranks only."""
    found, optimizer = rates(plateau, has_valid=True, groups=2)
    seen = []
    for updates, losses in ((4, [3.0]), (8, [4.0, 4.0]), (12, [2.0]), (16, [4.0, 4.0, 4.0])):
        for loss in losses:
            found.step_after_evaluation(updates, loss, 1.0, None)
        seen.append([group["lr"] for group in optimizer.param_groups])
    assert seen == [[0.1, 0.01], [0.05, 0.005], [0.05, 0.005], [0.025, 0.0025]]
    found.step_after_evaluation(16, 1.0, 1.0, None)  # replaces the earlier loss
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_invalid_scheduler_is_refused():
    with pytest.raises(TypeError, match="scheduler\\(optimizer\\) returned int; it must return a torch scheduler"):
        rates(lambda o: 3)
    other = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match="has another optimizer than the one that the function was given"):
        rates(lambda _: lr_scheduler.StepLR(other, 3))


def one_cycle(total_steps, *, chained=False):
    def make(optimizer):
        cycle = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total_steps)
        return lr_scheduler.ChainedScheduler([cycle]) if chained else cycle

    return make


@pytest.mark.parametrize(
    ("total_steps", "options", "expected"),
    [
        (10, {"steps": 20}, "total_steps=10, and this run takes 20 steps, .*: total_steps=20"),
        (3, {"epochs": 4, "lr_scheduler_every": "epoch"}, "total_steps=3, .* takes 4 epochs, .*: total_steps=4"),
    ],
)
@pytest.mark.parametrize("chained", [False, True])
def test_one_cycle_shorter_than_the_run_is_refused_before_the_start(total_steps, options, expected, chained):
    with dtkit.Cluster.from_transport(InProcessTransport(), device="cpu", threads=1) as cluster:
        with pytest.raises(EngineError, match=f"makes a OneCycleLR with {expected}"):
            train(cluster, lr_scheduler=one_cycle(total_steps, chained=chained), **options)
        fitting = options.get("steps", options.get("epochs"))
        run = train(cluster, lr_scheduler=one_cycle(fitting, chained=chained), **options)
        run.wait(60)
        run.extend(steps=8)
        with pytest.raises(EngineError, match=rf"ends after {fitting} steps\. A longer run needs one as long as"):
            run.wait(60)


def test_one_cycle_behind_a_warmup_may_be_shorter_than_the_run():
    def make(optimizer):
        parts = [lr_scheduler.ConstantLR(optimizer, total_iters=9), one_cycle(12)(optimizer)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[10])

    with dtkit.Cluster.from_transport(InProcessTransport(), device="cpu", threads=1) as cluster:
        train(cluster, lr_scheduler=make).wait(60)

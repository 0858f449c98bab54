"""A job in this process, which plays all shards by itself: what a dispatch does, without a group."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dtkit.engine.data.sources import DatasetSource
from dtkit.engine.job import Job, _choose_vote_steps
from dtkit.engine.state.shards import join_state_dict
from dtkit.strategies.base import make_optimizer
from tests.support.in_process_job import data, make_job, net, sgd


def get_state(made: Job) -> dict[str, Any]:
    return join_state_dict([made.state_dict_parts()])


def test_a_dispatch_gives_a_row_a_step_and_leaves_the_job_standing_there():
    made = make_job()
    made.advance(3)
    first = made.collect_results()
    made.advance(4)
    second = made.collect_results()
    assert (first.step, second.step, made.step, first.end_reason) == (3, 7, 7, "done")
    rows = np.concatenate([first.rows, second.rows])
    assert rows["step"].tolist() == list(range(7))
    assert rows["epoch"].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert rows["samples"].tolist() == [6, 6, 6, 2, 6, 6, 6]
    assert (rows["lr"] == 0.1).all()
    assert (rows["step_s"] > 0).all()
    assert len(made.collect_results().rows) == 0


def test_dispatches_of_any_length_train_alike():
    one, other = make_job(), make_job()
    one.advance(10)
    for k in (1, 2, 3, 4):
        other.advance(k)
    state = get_state(other)
    assert all(torch.equal(value, state[name]) for name, value in get_state(one).items())


def test_groups_keep_their_proportions_when_the_rate_changes():
    def two_groups(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        return torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.01}], lr=0.1)

    made = make_job(optimizer=two_groups)
    groups = made._worker.optimizer.param_groups

    def rates() -> list[float]:
        return [group["lr"] for group in groups]

    made.set_lr(0.2)
    assert rates() == pytest.approx([0.2, 0.02])
    assert made.lr == 0.2
    made.set_lr(0.0)
    assert rates() == [0, 0]
    made.set_lr(1.0)
    assert rates() == pytest.approx([1.0, 0.1])


def test_not_a_number_stops_before_the_update_and_says_whose_loss():
    inputs, targets = data()
    inputs[12] = math.nan
    made = make_job(rows=(inputs, targets), shuffle=None, batch_size=4)
    made.advance(20)
    found = made.collect_results()
    assert found.end_reason == "nonfinite"
    assert math.isnan(found.loss)
    assert found.step == made.step == len(found.rows) < 20
    before = get_state(made)
    assert all(value.isfinite().all() for value in before.values())
    made.advance(1)  # the same step again
    assert made.collect_results().end_reason == "nonfinite"
    assert all(torch.equal(value, before[name]) for name, value in get_state(made).items())


def test_a_sum_without_weight_blames_nobody():
    """0 / 0 is no sign of a bad sample: here the gradients are made infinite behind the loss's back."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        output.register_hook(lambda gradient: gradient * math.inf)
        return output.sum() * 0, 0

    made = make_job(loss=loss)
    made.advance(1)
    found = made.collect_results()
    assert (found.end_reason, found.loss) == ("nonfinite", None)


def test_finite_gradients_whose_norm_overflows_are_finite():
    made = make_job(nn.Linear(4, 3), (torch.full((20, 4), 1e25), data()[1]), loss=lambda out, y: out.mean() * 1e5)
    made.advance(1)
    assert made.collect_results().end_reason == "done"


class Texts(torch.utils.data.Dataset):
    """Samples of several forms, text first: how many a batch holds can't be read from its first part."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"text": str(row), "x": data()[0][row], "y": data()[1][row]}


def test_evaluate_counts_rows_and_not_what_is_in_them():
    def step(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    made = make_job(rows=Texts(), training_step=step)
    source = DatasetSource(Texts())
    parts = np.split(np.arange(20), [8, 16])
    samples, sums = made.evaluate([(len(part), source.take(part)) for part in parts], {})
    assert samples == 20
    total, weight = sums["loss"]
    inputs, targets = data()
    assert total / weight == pytest.approx(F.cross_entropy(net()(inputs), targets).item(), abs=1e-12)


def test_an_evaluation_that_draws_random_numbers_changes_none_of_the_training():
    """However often it is broken off and made again."""
    found = []
    for evaluations in (0, 1, 2):
        torch.manual_seed(0)
        made = make_job(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double())
        made.advance(2)
        for _ in range(evaluations):
            made.evaluate([(20, data())], {"noise": lambda output, _: torch.rand(1, dtype=output.dtype)})
        made.advance(2)
        found.append(made.collect_results().rows["loss"].tolist())
    assert found[0] == found[1] == found[2]


def test_evaluate_is_exact_for_parts_of_any_size_and_leaves_the_training_alone():
    def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.argmax(1) == target).double().mean()

    def both(output: torch.Tensor, target: torch.Tensor) -> tuple[float, int]:
        return float((output.argmax(1) == target).sum()), len(target)

    inputs, targets = data()
    model = nn.Sequential(net(), nn.Dropout(0.5))
    made, other = make_job(model), make_job(nn.Sequential(net(), nn.Dropout(0.5)))
    batches = [(len(x), (x, y)) for x, y in zip(inputs.split(7), targets.split(7), strict=True)]
    samples, sums = made.evaluate(batches, {"mean": accuracy, "pair": both})
    with torch.no_grad():
        expected = float(accuracy(net()(inputs), targets))
    assert samples == 20
    assert sums["mean"][0] / sums["mean"][1] == pytest.approx(expected)
    assert sums["pair"] == (pytest.approx(20 * expected), 20)
    assert model.training
    made.advance(3)
    other.advance(3)
    state = get_state(other)
    assert all(torch.equal(value, state[name]) for name, value in get_state(made).items())


def test_no_data_on_this_rank_adds_nothing():
    assert make_job().evaluate([], {"accuracy": len}) == (0, {"loss": (0.0, 0.0), "accuracy": (0.0, 0.0)})


def test_a_metric_per_sample_is_refused():
    with pytest.raises(TypeError, match=r"metric 'hits' returned a tensor of shape \(20,\); it must return one number"):
        make_job().evaluate([(20, data())], {"hits": lambda out, y: out.argmax(1) == y})


def test_metrics_beside_a_step_are_refused():
    made = make_job(training_step=lambda model, batch: model(batch[0]).sum())
    with pytest.raises(ValueError, match="metrics need output and target, which training_step= keeps to itself"):
        made.evaluate([(20, data())], {"size": len})


def test_a_job_draws_random_numbers_of_its_own():
    made, other = (make_job(nn.Sequential(net(), nn.Dropout(0.5))) for _ in range(2))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    made.advance(5)
    assert torch.equal(torch.get_rng_state(), before)
    other.advance(2)
    torch.rand(7)
    other.advance(3)
    state = get_state(other)
    assert all(torch.equal(value, state[name]) for name, value in get_state(made).items())


def test_the_state_is_a_copy_with_whatever_modules_add_to_it():
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    made = make_job(Extra(4, 3).double())
    state = get_state(made)
    assert state["_extra_state"] == {"version": 3}
    kept = state["weight"].clone()
    made.advance(2)
    assert torch.equal(state["weight"], kept)


def test_the_largest_gradients_are_kept_number_by_number():
    made = make_job()
    made.track_max_gradients()
    made.advance(4)
    found = made.max_gradients
    assert found is not None
    assert found.keys() == dict(net().named_parameters()).keys()
    assert all((value >= 0).all() and value.any() for value in found.values())


def test_where_ranks_ask_each_other_for_the_time():
    assert _choose_vote_steps(1) == set()
    assert _choose_vote_steps(2) == {1}
    assert _choose_vote_steps(3) == {1, 2}
    assert _choose_vote_steps(1000) == {15, 125, 250, 375, 500, 625, 750, 875}
    assert all(
        len(_choose_vote_steps(k)) <= 8 and all(0 < at < k for at in _choose_vote_steps(k)) for k in range(1, 300)
    )


def test_a_dispatch_that_somebody_waits_for_ends_where_ranks_decide():
    made = make_job()
    made.advance(64, should_end_early=lambda: made.step >= 15)
    assert (made.step, made.collect_results().end_reason) == (16, "time")
    made.advance(64, should_end_early=lambda: made.step >= 32)  # the question was asked at step 31
    assert (made.step, made.collect_results().end_reason) == (40, "time")
    made.advance(64, should_end_early=lambda: True)  # what was sent ahead is not begun
    assert (made.step, made.collect_results().end_reason) == (40, "time")
    made.advance(1, explain=True, should_end_early=lambda: True)  # whoever asked for one step to be taken apart gets it
    assert made.step == 41
    assert made.step_report is not None


BAD_OPTIMIZERS = {
    "no optimiser": (lambda params: None, TypeError, r"optimizer\(params\) returned NoneType; it must return"),
    "other parameters": (
        lambda params: torch.optim.SGD(net().parameters(), lr=1),
        ValueError,
        "the optimizer holds 4 parameters, not all of them the model's. Build it from the `params`",
    ),
    "a closure": (torch.optim.LBFGS, ValueError, r"LBFGS\.step\(\) needs a closure .* such as SGD or AdamW"),
    "none": (lambda params: torch.optim.SGD([], lr=1), ValueError, "empty parameter list"),
}


@pytest.mark.parametrize("name", BAD_OPTIMIZERS)
def test_what_is_no_optimiser_of_this_model_is_refused(name):
    factory, kind, message = BAD_OPTIMIZERS[name]
    with pytest.raises(kind, match=message):
        make_optimizer(factory, net())


def test_the_optimiser_gets_what_is_to_be_trained():
    model = net()
    model[0].requires_grad_(False)
    held = make_optimizer(sgd, model).param_groups[0]["params"]
    assert {id(p) for p in held} == {id(p) for p in model[2].parameters()}

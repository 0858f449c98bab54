"""A job in this process, without a process group: dispatches, evaluations, state, and optimizers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dtkit.engine.data.sources import DatasetSource
from dtkit.engine.dispatch_votes import choose_vote_steps
from dtkit.engine.observe.call_output import log
from dtkit.engine.state.shards import join_state_dict
from dtkit.strategies.averaging import ParameterAveraging
from dtkit.strategies.base import make_optimizer
from dtkit.strategies.data_parallel import DataParallel
from tests.support.in_process_job import data, make_job, net, sgd

if TYPE_CHECKING:
    from dtkit.engine.job import Job


def get_state(made: Job) -> dict[str, Any]:
    return join_state_dict([made.state_dict_parts()])


def test_a_dispatch_returns_one_row_per_step_and_the_next_one_continues():
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


def test_results_that_could_not_be_collected_are_collected_again(monkeypatch: pytest.MonkeyPatch):
    """Checksums take memory, which an engine may lack; its steps are taken all the same."""
    made = make_job()
    made.advance(3)
    with monkeypatch.context() as patch:
        patch.setattr(made._worker, "compute_fingerprint", fail_for_want_of_memory)
        with pytest.raises(MemoryError):
            made.collect_results(fingerprint=True)
    assert made.collect_results().rows["step"].tolist() == [0, 1, 2]


def fail_for_want_of_memory() -> None:
    raise MemoryError


def test_dispatches_of_any_length_give_the_same_parameters():
    one, other = make_job(), make_job()
    one.advance(10)
    for k in (1, 2, 3, 4):
        other.advance(k)
    state = get_state(other)
    assert all(torch.equal(value, state[name]) for name, value in get_state(one).items())


def test_parameter_groups_keep_their_lr_ratios_when_the_lr_changes():
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


def test_a_nan_loss_ends_the_dispatch_before_the_update_and_is_reported():
    inputs, targets = data()
    inputs[12] = math.nan
    made = make_job(rows=(inputs, targets), shuffle=None, batch_size=4)
    made.advance(20)
    found = made.collect_results()
    assert found.end_reason == "nonfinite"
    assert math.isnan(found.nonfinite.loss)
    assert "in the inputs, 1 of this rank's" in found.nonfinite.bad_rows
    assert "namely row 12 (column 0: nan)" in found.nonfinite.bad_rows
    assert 0 < found.nonfinite.largest_parameter < 10
    assert found.step == made.step == len(found.rows) < 20
    before = get_state(made)
    assert all(value.isfinite().all() for value in before.values())
    made.advance(1)  # the same step again
    assert made.collect_results().end_reason == "nonfinite"
    assert all(torch.equal(value, before[name]) for name, value in get_state(made).items())


def test_a_job_with_ruined_parameters_reports_their_size():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)).double()
    model[1].weight.data.mul_(1e200).mul_(1e200)
    made = make_job(model=model)
    made.advance(1)
    assert made.collect_results().nonfinite.largest_parameter == math.inf


def test_infinite_gradients_of_a_zero_weight_loss_report_no_loss():
    """A loss of 0 / 0 does not mean a bad sample; a hook makes the gradients infinite."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        output.register_hook(lambda gradient: gradient * math.inf)
        return output.sum() * 0, 0

    made = make_job(loss=loss)
    made.advance(1)
    found = made.collect_results()
    assert (found.end_reason, found.nonfinite.loss, found.nonfinite.bad_rows) == ("nonfinite", None, "")


def test_finite_gradients_with_an_overflowing_norm_do_not_end_the_dispatch():
    made = make_job(nn.Linear(4, 3), (torch.full((20, 4), 1e25), data()[1]), loss=lambda out, y: out.mean() * 1e5)
    made.advance(1)
    assert made.collect_results().end_reason == "done"


@pytest.mark.parametrize("share", [0.9, 0.1, 1.1])
def test_gradients_are_clipped_as_torch_does(share: float):
    inputs, targets = data()
    reference = net()
    F.cross_entropy(reference(inputs), targets).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), math.inf))
    model = net()
    job = make_job(model, loss=F.cross_entropy, batch_size=20, strategy=DataParallel(clip_grad_norm=share * norm))
    job.advance(1)
    torch.nn.utils.clip_grad_norm_(reference.parameters(), share * norm)
    sgd(reference.parameters()).step()
    for trained, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(trained, expected, rtol=0, atol=1e-6)


def test_a_sum_with_its_weight_trains_like_its_mean():
    def summed(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return F.cross_entropy(output, target, reduction="sum"), len(target)

    trained = []
    for loss in (F.cross_entropy, summed):
        model = net()
        make_job(model, loss=loss).advance(3)
        trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(trained[0], trained[1], rtol=0, atol=1e-12)


def test_an_averaging_forgets_the_weights_of_the_steps_before_it():
    job = make_job(strategy=ParameterAveraging(every=2))
    weights = []
    for _ in range(3):
        job.advance(1)
        weights.append([rank.averaging_weight for rank in job._worker._rank_workers])
    assert weights == [[3, 3], [0, 0], [3, 3]]


class Texts(torch.utils.data.Dataset):
    """Samples that begin with a text, so the first part of a batch doesn't give its size."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"text": str(row), "x": data()[0][row], "y": data()[1][row]}


def test_evaluate_counts_rows_regardless_of_their_contents():
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


def test_random_numbers_drawn_in_an_evaluation_do_not_change_the_training():
    """An interrupted evaluation is repeated, so the number of evaluations must make no difference."""
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


def test_evaluate_is_exact_for_parts_of_any_size_and_does_not_change_training():
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


def test_a_rank_without_data_adds_nothing_to_an_evaluation():
    assert make_job().evaluate([], {"accuracy": len}) == (0, {"loss": (0.0, 0.0), "accuracy": (0.0, 0.0)})


def test_a_metric_per_sample_is_refused():
    with pytest.raises(TypeError, match=r"metric 'hits' returned a tensor of shape \(20,\); it must return one number"):
        make_job().evaluate([(20, data())], {"hits": lambda out, y: out.argmax(1) == y})


def test_metrics_with_a_training_step_are_refused():
    made = make_job(training_step=lambda model, batch: model(batch[0]).sum())
    with pytest.raises(ValueError, match=r"metrics= need output and target.*return loss, \{'accuracy': acc"):
        made.evaluate([(20, data())], {"size": len})


def test_an_evaluation_has_the_numbers_that_a_training_step_returns_or_logs():
    def step(model, batch):
        loss = model(batch[0]).square().mean()
        log(rows=float(len(batch[0])), loss=7.0)
        return loss, {"hits": (torch.tensor(6.0), 4)}

    samples, sums = make_job(training_step=step).evaluate([(20, data()), (20, data())], {})
    assert samples == 40
    assert sums["rows"] == (20.0 * 40, 40.0)
    assert sums["hits"] == (12.0, 8.0)
    assert sums["loss"][0] != 7.0 * 40


def test_a_job_uses_its_own_random_state():
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


def test_the_state_is_a_copy_and_includes_extra_state():
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


def test_ranks_vote_at_most_eight_times_within_a_dispatch():
    assert choose_vote_steps(1) == set()
    assert choose_vote_steps(2) == {1}
    assert choose_vote_steps(3) == {1, 2}
    assert choose_vote_steps(1000) == {15, 125, 250, 375, 500, 625, 750, 875}
    assert all(len(choose_vote_steps(k)) <= 8 and all(0 < at < k for at in choose_vote_steps(k)) for k in range(1, 300))


def test_a_dispatch_that_should_end_early_ends_after_the_next_vote():
    made = make_job()
    made.advance(64, should_end_early=lambda: made.step >= 15)
    assert (made.step, made.collect_results().end_reason) == (16, "time")
    made.advance(64, should_end_early=lambda: made.step >= 32)  # the vote at step 31 was too early
    assert (made.step, made.collect_results().end_reason) == (40, "time")
    made.advance(64, should_end_early=lambda: True)  # a dispatch sent ahead does not begin
    assert (made.step, made.collect_results().end_reason) == (40, "time")
    made.advance(1, explain=True, should_end_early=lambda: True)  # a step to be explained is always taken
    assert made.step == 41
    assert made.step_report is not None


BAD_OPTIMIZERS = {
    "no optimiser": (lambda params: None, TypeError, r"optimizer= returned NoneType; it must return"),
    "other parameters": (
        lambda params: torch.optim.SGD(net().parameters(), lr=1),
        ValueError,
        "the optimizer holds 4 parameters, not all of them the model's. Build it from the `params`",
    ),
    "a closure": (torch.optim.LBFGS, ValueError, r"LBFGS\.step\(\) needs a closure .* such as SGD or AdamW"),
    "none": (lambda params: torch.optim.SGD([], lr=1), ValueError, "empty parameter list"),
}


@pytest.mark.parametrize("name", BAD_OPTIMIZERS)
def test_an_optimizer_that_does_not_fit_the_model_is_refused(name):
    factory, kind, message = BAD_OPTIMIZERS[name]
    with pytest.raises(kind, match=message):
        make_optimizer(factory, net())


def test_text_as_a_learning_rate_has_a_hint():
    with pytest.raises(TypeError) as caught:
        make_optimizer(lambda params: torch.optim.SGD(params, lr="0.1"), net())
    assert caught.value.__notes__ == ["An option of the optimizer is text. Give a number without quotes, as in lr=0.1"]


def test_the_optimizer_gets_only_trainable_parameters():
    model = net()
    model[0].requires_grad_(False)
    held = make_optimizer(sgd, model).param_groups[0]["params"]
    assert {id(p) for p in held} == {id(p) for p in model[2].parameters()}

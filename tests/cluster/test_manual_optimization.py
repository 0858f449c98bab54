"""Training steps with several losses and optimizers, compared with a plain loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dtkit
from dtkit.types import State
from tests.support import small
from tests.support.gan import ROWS, Gan, judge, make_optimizers, make_points, train_gan
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cluster


def train(cluster: dtkit.Cluster, step: Any = train_gan, **options: Any) -> dtkit.Run:
    defaults: dict[str, Any] = {"training_step": step, "loss": None, "optimizer": make_optimizers}
    return small.train(cluster, Gan(), make_points(), **(defaults | options))


def check_equal(run: dtkit.Run, expected: nn.Module) -> None:
    for (name, p), q in zip(run.model.named_parameters(), expected.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-12, name


@pytest.mark.parametrize("clip", [None, 0.05])
def test_gan_trains_as_in_a_plain_loop(cluster2: dtkit.Cluster, clip: float | None):
    run = train(cluster2, batch_size=ROWS, steps=5, strategy=dtkit.DataParallel(clip_grad_norm=clip))
    run.wait(60)
    expected = Gan()
    optimizers = [_Clipping(optimizer, clip) for optimizer in make_optimizers(expected)]
    losses = [train_gan(expected, make_points(), optimizers)[0].item() for _ in range(5)]
    check_equal(run, expected)
    steps, means = run.history.loss()
    assert list(steps) == list(range(5))
    assert means == pytest.approx(losses)
    assert len(run.history.scalar("fake")[0]) == 5


class _Clipping:
    """Optimizer that clips its own gradients before each step."""

    def __init__(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
        self.zero_grad, self._optimizer, self._max_norm = optimizer.zero_grad, optimizer, max_norm

    def step(self) -> None:
        if self._max_norm is not None:
            parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self._max_norm)
        self._optimizer.step()


def test_rank_without_samples_takes_part_in_every_update(cluster2: dtkit.Cluster):
    run = train(cluster2, epochs=2)  # each epoch ends with one sample for two ranks
    run.wait(60)
    assert 0 in run.history.column("samples")
    verification = run.verify(8)
    assert verification.verdict == "PASS", verification.text()


def check_equals_undisturbed(cluster: dtkit.Cluster, run: dtkit.Run) -> None:
    """Check that a completed run has the parameters of one that trained without interruption, bit by bit."""
    parameters = {name: p.clone() for name, p in run.model.named_parameters()}
    undisturbed = train(cluster, steps=run.status.step)
    undisturbed.wait(60)
    for name, p in undisturbed.model.named_parameters():
        assert torch.equal(parameters[name], p), name


@pytest.mark.slow
def test_gan_continues_from_a_checkpoint(cluster2: dtkit.Cluster, tmp_path: Path):
    train(cluster2, steps=3, checkpoint_dir=tmp_path, checkpoint_every=3).wait(60)
    resumed = train(cluster2, steps=6, resume_from=tmp_path)
    resumed.wait(60)
    check_equals_undisturbed(cluster2, resumed)


@pytest.mark.slow
def test_lost_engine_is_replaced_during_a_gan_training(cluster2: dtkit.Cluster):
    run = train(cluster2, steps=200)
    wait_until(lambda: run.status.step > 5)
    run.inject_fault("kill", 1)
    run.wait(60)
    parameters = {name: p.clone() for name, p in run.model.named_parameters()}
    undisturbed = train(cluster2, steps=200)
    undisturbed.wait(60)
    for name, p in undisturbed.model.named_parameters():
        assert (parameters[name] - p).abs().max() < 1e-12, name


@pytest.mark.slow
def test_learning_rate_set_in_a_pause_reaches_both_optimizers(cluster2: dtkit.Cluster):
    """It is the first optimizer's, and the second one's changes in proportion."""
    run = train(cluster2, batch_size=ROWS, steps=8, start=False)
    run.step(3)
    run.set(lr=0.02)
    run.resume()
    run.wait(60)
    expected = Gan()
    optimizers = make_optimizers(expected)
    for step in range(8):
        if step == 3:
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] *= 2
        train_gan(expected, make_points(), optimizers)
    check_equal(run, expected)
    assert run.history.column("lr")[::2].tolist() == [0.01] * 3 + [0.02] * 5


@pytest.mark.slow
def test_gan_paused_while_it_runs_ends_as_without_a_pause(cluster2: dtkit.Cluster):
    run = train(cluster2, steps=300)
    wait_until(lambda: run.status.step > 5)
    run.pause()
    wait_until(lambda: run.status.state is State.PAUSED)
    assert run.status.step < 300
    run.resume()
    run.wait(60)
    check_equals_undisturbed(cluster2, run)


@pytest.mark.slow
def test_dashboard_of_a_gan_has_its_curves_and_rates(cluster2: dtkit.Cluster, tmp_path: Path):
    run = train(cluster2, steps=6)
    run.wait(60)
    lines = [line for axes in run.figure().axes for line in axes.lines]
    (fake,) = (line for line in lines if line.get_gid() == "scalar fake")
    assert len(fake.get_xdata()) == 6
    run.report(tmp_path / "report.html")
    assert "fake" in (tmp_path / "report.html").read_text()
    assert (run.history.column("lr") == 0.01).all()  # of the first optimizer


@pytest.mark.slow
def test_step_with_networks_of_the_notebook_is_refused(cluster2: dtkit.Cluster):
    gan = Gan()

    def step(model: Any, batch: Any, optimizers: Any) -> Any:
        return train_gan(gan, batch, optimizers)

    run = train(cluster2, step, steps=4)
    with pytest.raises(
        dtkit.errors.EngineError, match=r"found no gradient at any of its parameters.*by their own names"
    ):
        run.wait(60)
    small.check_usable(cluster2)


def test_ranks_that_update_different_optimizers_raise(cluster2: dtkit.Cluster):
    def step(model: Any, batch: Any, optimizers: Any) -> Any:
        loss = judge(model.discriminator(model.generator(batch[1])), 1.0)
        loss.backward()
        optimizers[torch.distributed.get_rank()].step()
        return loss

    run = train(cluster2, step, steps=4)
    with pytest.raises(dtkit.errors.EngineError, match=r"optimizers\[0\].step\(\) and optimizers\[1\].step\(\) at the"):
        run.wait(60)
    small.check_usable(cluster2)


def test_nonfinite_gradients_before_the_first_update_change_nothing(cluster2: dtkit.Cluster):
    def step(model: Any, batch: Any, optimizers: Any) -> Any:
        loss = judge(model.discriminator(batch[0]), 1.0) * float("inf")
        loss.backward()
        optimizers[1].step()
        return loss

    run = train(cluster2, step, steps=4)
    with pytest.raises(dtkit.errors.NonFiniteError, match="gradients over all ranks are not finite"):
        run.wait(60)
    check_equal(run, Gan())
    run.stop()


@pytest.mark.slow
def test_nonfinite_gradients_between_updates_are_named(cluster2: dtkit.Cluster):
    def step(model: Any, batch: Any, optimizers: Any) -> Any:
        judge(model.discriminator(batch[0]), 1.0).backward()
        optimizers[1].step()
        loss = judge(model.discriminator(model.generator(batch[1])), 1.0) * float("inf")
        loss.backward()
        optimizers[0].step()
        return loss

    run = train(cluster2, step, steps=4)
    with pytest.raises(dtkit.errors.EngineError, match=r"gradients of optimizers\[0\] are not finite, after another"):
        run.wait(60)
    small.check_usable(cluster2)


@pytest.mark.slow
def test_random_numbers_of_a_step_are_not_comparable(cluster2: dtkit.Cluster):
    def step(model: Any, batch: Any, optimizers: Any) -> Any:
        return train_gan(model, (batch[0], torch.randn_like(batch[1])), optimizers)

    run = train(cluster2, step, steps=4)
    run.wait(60)
    verification = run.verify(4)
    assert verification.verdict == "NOT COMPARABLE"
    assert "draws random numbers" in verification.text()


def test_what_would_update_by_itself_is_refused(cluster2: dtkit.Cluster):
    run = train(cluster2, steps=2)
    run.wait(60)
    with pytest.raises(ValueError, match="evaluate"):
        run.evaluate(make_points())
    with pytest.raises(dtkit.errors.RunError, match="updates itself"):
        run.explain_step()
    assert run.status.state is State.COMPLETED


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[
            ({"strategy": strategy}, "needs whole gradients on each rank")
            for strategy in (
                dtkit.Sharded(),
                dtkit.Pipeline(2, 2),
                dtkit.TensorParallel(2),
                dtkit.NaiveDataParallel(),
                dtkit.ParameterAveraging(),
            )
        ],
        ({"strategy": dtkit.DataParallel(accumulate=2)}, "call backward\\(\\) several times"),
        ({"strategy": dtkit.DataParallel(precision="bf16")}, "use torch.autocast"),
        ({"validation": make_points()}, "would update the model on validation data"),
    ],
)
def test_options_that_the_step_decides_itself_are_refused(
    cluster2: dtkit.Cluster, options: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        train(cluster2, steps=2, **options)

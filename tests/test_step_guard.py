"""Failed steps: either undone completely or kept completely."""

from __future__ import annotations

import random
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dtkit.engine.data.worker_context import WorkerContext
from dtkit.engine.observe.clock import make_clock
from dtkit.engine.observe.phase_timer import PhaseTimer
from dtkit.strategies import averaging
from dtkit.strategies.averaging import ParameterAveraging
from dtkit.strategies.loss import Loss
from tests.support.in_process_job import CPU, data, make_job, net, sgd

if TYPE_CHECKING:
    from collections.abc import Callable


def noisy() -> nn.Module:
    """A net whose steps draw random numbers, and keep statistics."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()


def state(made: Any) -> list[torch.Tensor]:
    return [value.clone() for value in made._worker.model.state_dict().values()]


def undisturbed(steps: int, **how: Any) -> list[torch.Tensor]:
    made = make_job(noisy(), **how)
    made.advance(steps)
    return state(made)


class Faulty:
    """A function that raises once, in the call with the given number."""

    def __init__(self, at: int, error: BaseException) -> None:
        self._left, self._error = at, error

    def __call__(self) -> None:
        self._left -= 1
        if self._left == -1:
            raise self._error


def make_faulty_loss(at: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a loss that raises once, in the call with the given number."""
    fault = Faulty(at, RuntimeError("no loss here"))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        fault()
        return F.cross_entropy(output, target)

    return loss


def test_a_step_that_fails_before_its_update_is_undone_and_repeated():
    fault = Faulty(2, RuntimeError("no loss here"))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        fault()  # forward has drawn numbers and changed statistics by now
        return F.cross_entropy(output, target)

    made = make_job(noisy(), loss=loss)
    with pytest.raises(RuntimeError, match="no loss here"):
        made.advance(5)
    assert (made.step, made.partially_updated) == (2, False)
    made.advance(3)
    for found, expected in zip(state(made), undisturbed(5, loss=F.cross_entropy), strict=True):
        assert torch.equal(found, expected)


class Counting(nn.Module):
    """Writes its buffers in three ways, and counts in a plain attribute; its output depends on all of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = net()
        for name in ("in_place", "as_data", "replaced"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))
        self.register_buffer("expanded", torch.ones(1, dtype=torch.float64).expand(3))
        self.num_forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.in_place += 1
        self.as_data.data.add_(1)
        self.replaced = self.replaced + 1
        self.num_forwards += 1
        count = self.in_place + self.as_data + self.replaced + self.num_forwards
        result: torch.Tensor = self.inner(x) * self.expanded / (1 + 0.1 * count)
        return result


@pytest.mark.parametrize("failed_at", [0, 5])
def test_undoing_a_step_restores_buffers_and_counts_of_modules(failed_at: int):
    loss = make_faulty_loss(failed_at)
    made, undisturbed = make_job(Counting(), loss=loss), make_job(Counting(), loss=F.cross_entropy)
    with pytest.raises(RuntimeError, match="no loss here"):
        made.advance(8)
    made.advance(8 - failed_at)
    undisturbed.advance(8)
    for found, expected in zip(state(made), state(undisturbed), strict=True):
        assert torch.equal(found, expected)
    assert made._worker.model.num_forwards == undisturbed._worker.model.num_forwards


@pytest.mark.parametrize("failed_at", [0, 1, 6])
def test_undoing_a_step_restores_the_numbers_of_numpy_and_python(failed_at: int):
    fault = Faulty(failed_at, RuntimeError("no loss here"))

    def draw(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weight = np.random.rand() + random.random()  # noqa: NPY002 - as users' code does
        return F.cross_entropy(output, target) * weight

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        value = draw(output, target)
        fault()
        return value

    made, undisturbed = make_job(loss=loss), make_job(loss=draw)
    with pytest.raises(RuntimeError, match="no loss here"):
        made.advance(8)
    made.advance(8 - failed_at)
    undisturbed.advance(8)
    for found, expected in zip(state(made), state(undisturbed), strict=True):
        assert torch.equal(found, expected)


class Distilled(nn.Module):
    """Follows frozen parameters, which its forward writes in three ways: from the first step, or later."""

    def __init__(self, first_write: int, *, writes_data: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.first_write, self.num_forwards = net(), first_write, 0
        self.writes_data = writes_data
        self.in_place, self.as_data, self.replaced = (
            nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.num_forwards >= self.first_write:
            self.in_place += 1
            if self.writes_data:
                self.as_data.data.mul_(1.1)
            self.replaced.data = self.replaced.data + 1
        self.num_forwards += 1
        result: torch.Tensor = self.inner(x) / (self.in_place + self.as_data + self.replaced)
        return result


@pytest.mark.parametrize("failed_at", [0, 1, 6])
def test_undoing_a_step_restores_frozen_parameters_that_it_wrote(failed_at: int):
    loss = make_faulty_loss(failed_at)
    made, undisturbed = make_job(Distilled(0), loss=loss), make_job(Distilled(0), loss=F.cross_entropy)
    with pytest.raises(RuntimeError, match="no loss here"):
        made.advance(8)
    assert not made.partially_updated
    made.advance(8 - failed_at)
    undisturbed.advance(8)
    for found, expected in zip(state(made), state(undisturbed), strict=True):
        assert torch.equal(found, expected)


def test_frozen_parameters_written_late_are_copied_from_the_next_dispatch_on():
    loss = make_faulty_loss(9)
    made, undisturbed = (make_job(Distilled(5, writes_data=False), loss=each) for each in (loss, F.cross_entropy))
    for _ in range(3):
        made.advance(3)
    with pytest.raises(RuntimeError, match="no loss here"):
        made.advance(3)
    assert not made.partially_updated
    made.advance(3)
    undisturbed.advance(12)
    for found, expected in zip(state(made), state(undisturbed), strict=True):
        assert torch.equal(found, expected)


def test_a_step_that_wrote_frozen_parameters_without_a_copy_is_partial():
    loss = make_faulty_loss(5)
    made = make_job(Distilled(5), loss=loss)
    with pytest.raises(RuntimeError, match="no loss here"):
        made.advance(8)
    assert (made.step, made.partially_updated) == (5, True)


def test_a_step_that_fails_after_its_update_counts():
    fault = Faulty(2, RuntimeError("too late"))

    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        class Late(torch.optim.lr_scheduler.LambdaLR):
            def step(self, *args: Any) -> None:
                super().step(*args)
                if self.last_epoch:  # its first one is the constructor's
                    fault()

        return Late(optimizer, lambda step: 1 / (1 + step))

    made = make_job(noisy(), lr_scheduler=scheduler)
    with pytest.raises(RuntimeError, match="too late"):
        made.advance(5)
    assert (made.step, made.partially_updated) == (3, False)
    rows = made.collect_results().rows
    assert rows["step"].tolist() == [0, 1, 2]
    assert np.isfinite(rows["loss"]).all()
    assert (rows["step_s"] > 0).all()
    made.advance(2)

    def plain(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    for found, expected in zip(state(made), undisturbed(5, lr_scheduler=plain), strict=True):
        assert torch.equal(found, expected)


def test_a_step_whose_averaging_fails_counts_with_its_loss(monkeypatch: pytest.MonkeyPatch):
    def fail(_: Any) -> None:
        raise RuntimeError("the others are gone")

    monkeypatch.setattr(averaging._AveragingWorker, "_average_parameters", fail)
    setting = WorkerContext(None, CPU, PhaseTimer(make_clock(CPU)), [0])
    worker = ParameterAveraging(every=2).setup(net(), Loss(F.cross_entropy, None), sgd, setting)
    batch = data(4)
    first = worker.step([(4, batch)], [4])
    with pytest.raises(RuntimeError, match="gone"):
        worker.step([(4, batch)], [4])
    assert worker.step_result is not None
    assert 0 < float(worker.step_result.loss) < float(first.loss)


class Breaking(torch.optim.SGD):
    """An optimizer that calls a function during its second step."""

    do: Any = None

    def step(self, closure: Any = None) -> Any:
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken == 2:
            type(self).do()
        return super().step(closure)


def test_a_failing_optimizer_leaves_the_model_partially_updated(monkeypatch: pytest.MonkeyPatch):
    def fail() -> None:
        raise ArithmeticError

    monkeypatch.setattr(Breaking, "do", staticmethod(fail))
    made = make_job(optimizer=lambda parameters: Breaking(parameters, lr=0.1))
    with pytest.raises(ArithmeticError):
        made.advance(5)
    assert (made.step, made.partially_updated) == (1, True)


def test_an_interrupt_waits_for_the_update_to_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Breaking, "do", staticmethod(lambda: signal.raise_signal(signal.SIGINT)))
    made = make_job(optimizer=lambda parameters: Breaking(parameters, lr=0.1))
    with pytest.raises(KeyboardInterrupt):
        made.advance(5)
    assert (made.step, made.partially_updated) == (2, False)
    assert len(made.collect_results().rows) == 2  # type: ignore[arg-type]
    made.advance(1)
    assert made.step == 3


def test_an_interrupt_outside_the_update_takes_effect_at_once():
    fault = Faulty(1, KeyboardInterrupt())
    x, y = data()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        fault()
        return F.cross_entropy(output, target)

    made = make_job(rows=(x, y), loss=loss)
    with pytest.raises(KeyboardInterrupt):
        made.advance(5)
    assert (made.step, made.partially_updated) == (1, False)

"""Updates without the label for profilers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dtkit.strategies.combined_optimizer import CombinedOptimizer
from dtkit.strategies.update import run_update

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _make(kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> torch.optim.Optimizer:
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    p.grad = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    return kind([p], lr=0.1, **options)  # type: ignore[call-arg]


def _read(optimizer: torch.optim.Optimizer) -> list[float]:
    values: list[float] = optimizer.param_groups[0]["params"][0].tolist()
    return values


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """Names of the global hooks that ran, in order."""
    names: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: names.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: names.append("global post")),
    ]
    yield names
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_updates_as_torch_does(kind: type[torch.optim.Optimizer]) -> None:
    ours, reference = _make(kind), _make(kind)
    for _ in range(3):
        run_update(ours)
        reference.step()
    assert _read(ours) == _read(reference)


def _watch(optimizer: torch.optim.Optimizer, calls: list[str]) -> None:
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))


def test_runs_all_hooks_in_torchs_order(calls: list[str]) -> None:
    optimizer = _make()
    _watch(optimizer, calls)
    optimizer.step()
    expected = list(calls)
    calls.clear()
    run_update(optimizer)
    assert calls == expected
    assert set(expected) == {"global pre", "pre", "post", "global post"}


def test_hook_may_change_the_arguments() -> None:
    optimizer = _make()
    closed: list[bool] = []

    def add_closure(_: object, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "closure": lambda: closed.append(True)}

    optimizer.register_step_pre_hook(add_closure)
    run_update(optimizer)
    assert closed == [True]


def test_refuses_a_hooks_other_results() -> None:
    optimizer = _make()
    optimizer.register_step_pre_hook(lambda *_: True)
    with pytest.raises(TypeError, match=r"returned True. Return None, or the pair \(args, kwargs\)"):
        run_update(optimizer)
    assert _read(optimizer) == [1, 1, 1]


def test_a_profiler_sees_the_label() -> None:
    optimizer = _make()
    with torch.profiler.profile() as profile:
        run_update(optimizer)
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}


def test_leaves_out_the_label_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[str] = []
    original = torch.autograd.profiler.record_function.__enter__

    def enter(self: torch.autograd.profiler.record_function) -> Any:
        labels.append(self.name)
        return original(self)

    monkeypatch.setattr(torch.autograd.profiler.record_function, "__enter__", enter)
    optimizer = CombinedOptimizer([_make(), _make()])
    optimizer.step()
    assert labels == ["Optimizer.step#CombinedOptimizer.step"]
    run_update(optimizer)
    assert len(labels) == 1


def _count_calls(step: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    @functools.wraps(step)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return step(*args, **kwargs)

    return wrapper


def test_a_step_that_others_wrap_is_called_as_it_is() -> None:
    class Own(torch.optim.SGD):
        pass

    calls: list[int] = []
    optimizer = _make(Own)
    Own.step = _count_calls(Own.step, calls)  # type: ignore[method-assign]
    run_update(optimizer)
    assert calls == [1]


def test_a_schedule_sees_the_step() -> None:
    optimizer = _make()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run_update(optimizer)
    schedule.step()  # it warns, and so fails here, if it missed the optimizer's step
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)

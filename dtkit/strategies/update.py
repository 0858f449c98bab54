"""An optimizer's update, without a label for profilers that don't run.

torch wraps the `step` of all optimizers in a label and in hooks. The label takes some 20 us in a training, whether or
not a profiler runs. That is a twentieth of a small model's step. So without a profiler, hooks and update are called
here. An optimizer whose `step` was wrapped again, such as by a learning rate's schedule, is called as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dtkit._util.torch_private import (
    get_step_post_hooks,
    get_step_pre_hooks,
    global_step_post_hooks,
    global_step_pre_hooks,
    is_profiling,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def _do_nothing() -> None:
    pass


_WRAPPER_CODE = torch.optim.Optimizer.profile_hook_step(_do_nothing).__code__


def run_update(optimizer: torch.optim.Optimizer) -> None:
    """Update the parameters like `optimizer.step()`, with all hooks. A profiler that runs sees the label."""
    step: Any = type(optimizer).step
    is_wrapped_once = getattr(step, "__code__", None) is _WRAPPER_CODE and "step" not in vars(optimizer)
    if is_wrapped_once and not is_profiling():
        _run_unlabeled(optimizer, step.__wrapped__)
    else:
        optimizer.step()


def _run_unlabeled(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> None:
    args: tuple[Any, ...] = (optimizer,)
    kwargs: dict[str, Any] = {}
    for hook in (*global_step_pre_hooks.values(), *get_step_pre_hooks(optimizer).values()):
        changed = hook(optimizer, args, kwargs)
        if isinstance(changed, tuple) and len(changed) == 2:
            args, kwargs = changed
        elif changed is not None:
            name = type(optimizer).__name__
            raise TypeError(
                f"a hook before {name}.step() returned {changed!r}. Return None, or the pair (args, kwargs)"
            )
    step(*args, **kwargs)
    for hook in (*get_step_post_hooks(optimizer).values(), *global_step_post_hooks.values()):
        hook(optimizer, args, kwargs)

"""torch's optimizers without its compiler, until something compiles.

torch excludes methods of its optimizers from compilation. For that it loads its compiler, `torch._dynamo`, when the
first optimizer is made. This takes a third of an engine's start and 75 MB, though few trainings compile anything.

Without a compiler nothing has to be excluded, so here the optimizers just call these methods. As soon as anything
imports the compiler, torch's own code is back, before the import begins.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import sys
from typing import TYPE_CHECKING, Any

from dtkit._util.garbage import pause_gc

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

COMPILER = "torch._dynamo"
"""Module of torch's compiler."""
_EXCLUDED_FORM = "__dynamo_disable"
"""Attribute of a function with its form that isn't compiled, which torch looks for before it makes one."""


def defer_compiler() -> None:
    """Keep torch's optimizers from loading the compiler. Idempotent, and a no-op once it is loaded."""
    if COMPILER in sys.modules or any(isinstance(finder, _CompilerImport) for finder in sys.meta_path):
        return
    import torch

    watch = _CompilerImport()
    base = torch.optim.Optimizer
    for method in (base.add_param_group, base.load_state_dict, base.state_dict, base.zero_grad):
        watch.defer_exclusion(method)
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, base):
            watch.defer_graph_breaks(kind)
    sys.meta_path.insert(0, watch)


def load_compiler() -> None:
    """Load the compiler, for code of torch that needs it."""
    with pause_gc():
        importlib.import_module(COMPILER)


class _CompilerImport(importlib.abc.MetaPathFinder):
    """Notices an import of the compiler, and gives it back what was deferred. It finds no modules."""

    def __init__(self) -> None:
        self._is_deferred = True
        self._functions: list[Any] = []

    def find_spec(self, fullname: str, _path: Any, _target: ModuleType | None = None) -> None:
        """See :class:`importlib.abc.MetaPathFinder`."""
        if fullname == COMPILER and self._is_deferred:
            self._is_deferred = False
            for function in self._functions:
                vars(function).pop(_EXCLUDED_FORM, None)

    def defer_exclusion(self, method: Any) -> None:
        """Let a method that torch excludes from compilation be called as it is."""
        function = getattr(method, "__wrapped__", None)
        if function is not None:
            setattr(function, _EXCLUDED_FORM, function)
            self._functions.append(function)

    def defer_graph_breaks(self, kind: type[Any]) -> None:
        """Let `step` of an optimizer's class update without graph breaks, which only the compiler needs."""
        from dtkit._util.torch_private import break_graph_around

        step = vars(kind).get("step")
        if getattr(step, "__code__", None) is not break_graph_around(_do_nothing).__code__:
            return  # a step without graph breaks, or one that torch has already put hooks around
        kind.step = self._make_step(step)

    def _make_step(self, step: Any) -> Callable[..., Any]:
        import torch

        update = step.__wrapped__

        @functools.wraps(step)
        def step_without_compiler(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_deferred:
                return step(optimizer, *args, **kwargs)
            with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
                return update(optimizer, *args, **kwargs)

        return step_without_compiler


def _do_nothing() -> None:
    pass

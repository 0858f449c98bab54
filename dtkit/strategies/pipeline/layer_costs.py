"""What the layers of a model cost, and what runs before the first and after the last of them.

The model runs with its layers held apart. Each is copied to the device when its turn comes, is timed there, forward
and backward, and goes again; so a model that is too large for one device is no concern. What comes out of a layer is
cut from what went in: there remain a graph of what ran before the first layer and one of what ran after the last,
and these are timed as well. Nothing is changed in the model, nor are its batch statistics.

Whose parameters are used when is found without numbers, on torch's fake tensors.
"""

from __future__ import annotations

import copy
import functools
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dtkit._util.guard import attempt
from dtkit.engine.dry_run import hollow, nbytes
from dtkit.strategies.pipeline.cut import Costs, chain, numbers
from dtkit.strategies.pipeline.device_copy import copied, on_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROUNDS = 3  # timings of each layer, of which the fastest counts


# -- by time -------------------------------------------------------------------------------------------------


def by_time(
    model: nn.Module,
    inputs: Sequence[Any],
    device: torch.device,
    finish: Callable[[Any], Any] = lambda output: output,
) -> Costs:
    """Seconds of forward and backward of a model's layers on a device.

    `inputs` lie there. `finish` makes a loss of the model's output: the last stage does so, too.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        walk = _Walk(model, device)
        walk.around(inputs, finish)  # the first time through, in which layers are timed
        layers = walk.of_layers()
        befores, afters = zip(*(walk.around(inputs, finish) for _ in range(ROUNDS)), strict=True)
    return Costs(layers, min(befores), min(afters))


class _Walk:
    """A model that runs with its layers held apart."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._layers, self._device = chain(model), device
        self._seconds: dict[int, float] = {}
        self._made: list[Any] = []
        held = outside(model)
        same = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self._view = copy.deepcopy(model, same | on_device(held, device)).train()
        self._own = [p for p in self._view.parameters() if p.requires_grad]
        for (_, layer), (_, seen) in zip(self._layers, chain(self._view), strict=True):
            seen.forward = functools.partial(self._layer, layer)  # of this view alone

    def of_layers(self) -> tuple[float, ...]:
        """What was measured; where one stands in several places, each has its part."""
        missed = [name for name, layer in self._layers if id(layer) not in self._seconds]
        if missed:
            raise ValueError(
                f"{', '.join(missed)} took no part in the model's forward pass, so it is no chain of layers. Leave "
                "out what is not called, name where to cut (split=[...]), or use strategy=dtkit.Sharded()"
            )
        places = [id(layer) for _, layer in self._layers]
        return tuple(self._seconds[key] / places.count(key) for key in places)

    def around(self, inputs: Sequence[Any], finish: Callable[[Any], Any]) -> tuple[float, float]:
        """Seconds of what runs before the first layer, and after the last one."""
        self._calls = 0
        self._given: list[torch.Tensor] = []
        self._leaves: list[torch.Tensor] = []
        self._entered = self._left = begun = self._now()
        output = finish(self._view(*inputs))
        ended = self._now()
        before, after = self._entered - begun, ended - self._left
        return before + self._backward(self._given, []), after + self._backward(_graphs(output), self._leaves)

    def _layer(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """In place of a layer: what it made when it was timed, as if it had been made of nothing."""
        if not self._calls:
            self._entered = self._now()
            self._given = _graphs((args, kwargs))
        if self._calls == len(self._made):
            made, seconds = self._timed(copied(layer, self._device).train(), args, kwargs)
            self._made.append(made)
            self._seconds[id(layer)] = self._seconds.get(id(layer), 0.0) + seconds
        self._leaves, output = _fresh(self._made[self._calls])
        self._calls += 1
        self._left = self._now()
        return output

    def _timed(self, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, float]:
        own, found = [p for p in layer.parameters() if p.requires_grad], []
        for _ in range(ROUNDS):
            leaves, (inputs, named) = _fresh((args, kwargs))
            begun = self._now()
            output = layer(*inputs, **named)
            _differentiate(_graphs(output), own + leaves)
            found.append(self._now() - begun)
        return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output), min(found)

    def _backward(self, made: list[torch.Tensor], leaves: list[torch.Tensor]) -> float:
        """Of what was made: until its gradient has reached the last of the leaves."""
        reached: list[float] = []
        for leaf in leaves:
            leaf.register_hook(lambda _: reached.append(self._now()))  # type: ignore[no-untyped-call]
        begun = self._now()
        _differentiate(made, self._own + leaves)
        ended = self._now()
        return (reached[-1] if reached else ended) - begun

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _graphs(value: Any) -> list[torch.Tensor]:
    """The tensors that can be differentiated."""
    return [leaf for leaf in _tensors(value) if leaf.requires_grad]


def _fresh(value: Any) -> tuple[list[torch.Tensor], Any]:
    """(leaves, the same with copies of them in the place of its tensors), which may be changed in place."""
    leaves: list[torch.Tensor] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf.clone()
        leaves.append(leaf.detach().clone().requires_grad_())
        return leaves[-1].clone()

    return leaves, tree_map(take, value)


def _differentiate(made: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    if made and wanted:
        ones = [torch.ones_like(t) for t in made]
        torch.autograd.grad(made, wanted, ones, retain_graph=True, allow_unused=True)


# -- by parameters -------------------------------------------------------------------------------------------


def by_parameters(model: nn.Module, inputs: Sequence[Any]) -> Costs:
    """Numbers in the parameters of a model's layers, and in those that are used before and after them."""
    return sizes(model, inputs)[0]


def sizes(model: nn.Module, inputs: Sequence[Any]) -> tuple[Costs, tuple[int, ...]]:
    """(:func:`by_parameters`, bytes that come out of each layer); no bytes where that can't be told."""
    around = {id(t): t.numel() for t in outside(model) if isinstance(t, nn.Parameter)}
    nothing: tuple[set[int], tuple[int, ...]] = set(), ()
    # a model that does not run on fake tensors can't be traced either: that is told when it is cut
    # silent: the tracing that follows fails with the same error
    late, outputs = attempt(lambda: _passed(model, inputs), lambda _: nothing)
    after = sum(count for key, count in around.items() if key in late)
    layers = tuple(float(numbers(layer)) for _, layer in chain(model))
    return Costs(layers, float(sum(around.values()) - after), float(after)), outputs


def outside(model: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of what is in no layer."""
    within = {id(m) for _, layer in chain(model) for m in layer.modules()}
    modules = [m for m in model.modules() if id(m) not in within]
    found = [t for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
    return list({id(t): t for t in found}.values())


def _passed(model: nn.Module, inputs: Sequence[Any]) -> tuple[set[int], tuple[int, ...]]:
    """(ids of the parameters that are first used once the last layer has run, bytes that came out of each layer).

    Without numbers.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    before: set[int] = set()
    outputs: list[int] = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng([]):
        view = hollow(model, torch.device("cpu")).train()
        layers = [layer for _, layer in chain(view)]
        with _Uses() as uses:
            for layer in {id(layer): layer for layer in layers}.values():
                layer.register_forward_hook(lambda *found: outputs.append(nbytes(_tensors(found[-1]))))
            layers[-1].register_forward_hook(lambda *_: before.update(uses.seen))
            view(*inputs)
        pairs = zip(model.parameters(), view.parameters(), strict=True)
        late = {id(p) for p, shape in pairs if id(shape) in uses.seen - before}
        return late, tuple(outputs) if len(outputs) == len(layers) else ()


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's modes have no types
    """Which tensors operations were given, by id."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and note what it was given."""
        self.seen.update(map(id, tree_leaves((args, kwargs))))
        return func(*args, **(kwargs or {}))

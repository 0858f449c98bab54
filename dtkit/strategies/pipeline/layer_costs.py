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

from dtkit._util.guard import run_guarded
from dtkit.strategies.meta_copy import copy_to_meta, count_bytes
from dtkit.planning.layer_chain import LayerCosts
from dtkit.strategies.pipeline.cut import count_parameters, find_layer_chain
from dtkit.strategies.pipeline.device_copy import copy_tensors_to_device, copy_to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_TIMINGS = 3  # timings of each layer, of which the fastest counts


# -- by time -------------------------------------------------------------------------------------------------


def measure_seconds(
    model: nn.Module,
    inputs: Sequence[Any],
    device: torch.device,
    compute_loss: Callable[[Any], Any] = lambda output: output,
) -> LayerCosts:
    """Seconds of forward and backward of a model's layers on a device.

    `inputs` lie there. `finish` makes a loss of the model's output: the last stage does so, too.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        walk = _LayerTimer(model, device)
        walk.time_outside_layers(inputs, compute_loss)  # the first time through, in which layers are timed
        layers = walk.collect_layer_seconds()
        befores, afters = zip(
            *(walk.time_outside_layers(inputs, compute_loss) for _ in range(NUM_TIMINGS)), strict=True
        )
    return LayerCosts(layers, min(befores), min(afters))


class _LayerTimer:
    """A model that runs with its layers held apart."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._layers, self._device = find_layer_chain(model), device
        self._seconds_by_layer: dict[int, float] = {}
        self._layer_outputs: list[Any] = []
        held = find_tensors_outside_layers(model)
        same = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self._model_view = copy.deepcopy(model, same | copy_tensors_to_device(held, device)).train()
        self._outside_parameters = [p for p in self._model_view.parameters() if p.requires_grad]
        for (_, layer), (_, seen) in zip(self._layers, find_layer_chain(self._model_view), strict=True):
            seen.forward = functools.partial(self._run_layer, layer)  # of this view alone

    def collect_layer_seconds(self) -> tuple[float, ...]:
        """What was measured; where one stands in several places, each has its part."""
        missed = [name for name, layer in self._layers if id(layer) not in self._seconds_by_layer]
        if missed:
            raise ValueError(
                f"{', '.join(missed)} took no part in the model's forward pass, so it is no chain of layers. Leave "
                "out what is not called, name where to cut (split=[...]), or use strategy=dtkit.Sharded()"
            )
        places = [id(layer) for _, layer in self._layers]
        return tuple(self._seconds_by_layer[key] / places.count(key) for key in places)

    def time_outside_layers(self, inputs: Sequence[Any], compute_loss: Callable[[Any], Any]) -> tuple[float, float]:
        """Seconds of what runs before the first layer, and after the last one."""
        self._num_calls = 0
        self._first_layer_inputs: list[torch.Tensor] = []
        self._last_layer_outputs: list[torch.Tensor] = []
        self._first_layer_start = self._last_layer_end = begun = self._synchronized_time()
        output = compute_loss(self._model_view(*inputs))
        ended = self._synchronized_time()
        before, after = self._first_layer_start - begun, ended - self._last_layer_end
        return before + self._time_backward(self._first_layer_inputs, []), after + self._time_backward(
            _find_differentiable(output), self._last_layer_outputs
        )

    def _run_layer(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """In place of a layer: what it made when it was timed, as if it had been made of nothing."""
        if not self._num_calls:
            self._first_layer_start = self._synchronized_time()
            self._first_layer_inputs = _find_differentiable((args, kwargs))
        if self._num_calls == len(self._layer_outputs):
            made, seconds = self._time_layer(copy_to_device(layer, self._device).train(), args, kwargs)
            self._layer_outputs.append(made)
            self._seconds_by_layer[id(layer)] = self._seconds_by_layer.get(id(layer), 0.0) + seconds
        self._last_layer_outputs, output = _clone_leaves(self._layer_outputs[self._num_calls])
        self._num_calls += 1
        self._last_layer_end = self._synchronized_time()
        return output

    def _time_layer(self, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, float]:
        own, found = [p for p in layer.parameters() if p.requires_grad], []
        for _ in range(NUM_TIMINGS):
            leaves, (inputs, named) = _clone_leaves((args, kwargs))
            begun = self._synchronized_time()
            output = layer(*inputs, **named)
            _run_backward(_find_differentiable(output), own + leaves)
            found.append(self._synchronized_time() - begun)
        return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output), min(found)

    def _time_backward(self, outputs: list[torch.Tensor], leaves: list[torch.Tensor]) -> float:
        """Of what was made: until its gradient has reached the last of the leaves."""
        reached: list[float] = []
        for leaf in leaves:
            leaf.register_hook(lambda _: reached.append(self._synchronized_time()))  # type: ignore[no-untyped-call]
        begun = self._synchronized_time()
        _run_backward(outputs, self._outside_parameters + leaves)
        ended = self._synchronized_time()
        return (reached[-1] if reached else ended) - begun

    def _synchronized_time(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _find_tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _find_differentiable(value: Any) -> list[torch.Tensor]:
    """The tensors that can be differentiated."""
    return [leaf for leaf in _find_tensors(value) if leaf.requires_grad]


def _clone_leaves(value: Any) -> tuple[list[torch.Tensor], Any]:
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


def _run_backward(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    if outputs and inputs:
        ones = [torch.ones_like(t) for t in outputs]
        torch.autograd.grad(outputs, inputs, ones, retain_graph=True, allow_unused=True)


# -- by parameters -------------------------------------------------------------------------------------------


def count_by_layer(model: nn.Module, inputs: Sequence[Any]) -> LayerCosts:
    """Numbers in the parameters of a model's layers, and in those that are used before and after them."""
    return measure_sizes(model, inputs)[0]


def measure_sizes(model: nn.Module, inputs: Sequence[Any]) -> tuple[LayerCosts, tuple[int, ...]]:
    """(:func:`count_by_layer`, bytes that come out of each layer); no bytes where that can't be told."""
    around = {id(t): t.numel() for t in find_tensors_outside_layers(model) if isinstance(t, nn.Parameter)}
    nothing: tuple[set[int], tuple[int, ...]] = set(), ()
    # a model that does not run on fake tensors can't be traced either: that is told when it is cut
    # silent: the tracing that follows fails with the same error
    late, outputs = run_guarded(lambda: _trace_shapes(model, inputs), lambda _: nothing)
    after = sum(count for key, count in around.items() if key in late)
    layers = tuple(float(count_parameters(layer)) for _, layer in find_layer_chain(model))
    return LayerCosts(layers, float(sum(around.values()) - after), float(after)), outputs


def find_tensors_outside_layers(model: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of what is in no layer."""
    within = {id(m) for _, layer in find_layer_chain(model) for m in layer.modules()}
    modules = [m for m in model.modules() if id(m) not in within]
    found = [t for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
    return list({id(t): t for t in found}.values())


def _trace_shapes(model: nn.Module, inputs: Sequence[Any]) -> tuple[set[int], tuple[int, ...]]:
    """(ids of the parameters that are first used once the last layer has run, bytes that came out of each layer).

    Without numbers.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    before: set[int] = set()
    outputs: list[int] = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng([]):
        view = copy_to_meta(model, torch.device("cpu")).train()
        layers = [layer for _, layer in find_layer_chain(view)]
        with _TensorUseMode() as uses:
            for layer in {id(layer): layer for layer in layers}.values():
                layer.register_forward_hook(lambda *found: outputs.append(count_bytes(_find_tensors(found[-1]))))
            layers[-1].register_forward_hook(lambda *_: before.update(uses.used_ids))
            view(*inputs)
        pairs = zip(model.parameters(), view.parameters(), strict=True)
        late = {id(p) for p, shape in pairs if id(shape) in uses.used_ids - before}
        return late, tuple(outputs) if len(outputs) == len(layers) else ()


class _TensorUseMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's modes have no types
    """Which tensors operations were given, by id."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used_ids: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and note what it was given."""
        self.used_ids.update(map(id, tree_leaves((args, kwargs))))
        return func(*args, **(kwargs or {}))

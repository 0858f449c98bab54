"""Costs of a model's layers, and of the code before the first and after the last of them.

The timer copies one layer at a time to the device, and times it there, forward and backward. So a model may be larger
than the device. Detached outputs of layers leave one graph before the first layer and one after the last. These are
timed as well. The model and its batch statistics don't change.

A run on torch's fake tensors shows which parameters are used after the last layer.
"""

from __future__ import annotations

import copy
import functools
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dtkit._util.dispatch_mode import DispatchMode
from dtkit._util.guard import run_guarded
from dtkit._util.torch_private import tree_leaves, tree_map
from dtkit.planning.layer_chain import LayerCosts
from dtkit.strategies.fake_mode import SharedFakeMode
from dtkit.strategies.meta_copy import copy_to_meta, count_bytes
from dtkit.strategies.module_modes import enter_training
from dtkit.strategies.pipeline.cut import count_parameters, find_layer_chain
from dtkit.strategies.pipeline.device_copy import copy_tensors_to_device, copy_to_device
from dtkit.strategies.pipeline.trace_preparation import prepare_for_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.strategies.loss import ModelInputs

NUM_TIMINGS = 3  # the fastest timing of each layer counts


# -- by time -------------------------------------------------------------------------------------------------


def measure_seconds(
    model: nn.Module,
    inputs: ModelInputs,
    device: torch.device,
    compute_loss: Callable[[Any], Any] = lambda output: output,
) -> LayerCosts:
    """Return the seconds of forward and backward of a model's layers on a device.

    `inputs` are on that device. `compute_loss` computes a loss from the model's output, as the last stage does.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        timer = _LayerTimer(model, device)
        timer.time_outside_layers(inputs, compute_loss)  # the first run times the layers
        layers = timer.collect_layer_seconds()
        timings = [timer.time_outside_layers(inputs, compute_loss) for _ in range(NUM_TIMINGS)]
    return LayerCosts(layers, min(before for before, _ in timings), min(after for _, after in timings))


class _LayerTimer:
    """A model that runs with detached layers."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._layers, self._device = find_layer_chain(model), device
        self._seconds_by_layer: dict[int, float] = {}
        self._layer_outputs: list[Any] = []
        outside = find_tensors_outside_layers(model)
        originals = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self._model_view = enter_training(copy.deepcopy(model, originals | copy_tensors_to_device(outside, device)))
        prepare_for_trace(self._model_view)
        self._outside_parameters = [p for p in self._model_view.parameters() if p.requires_grad]
        for (_, layer), (_, view) in zip(self._layers, find_layer_chain(self._model_view), strict=True):
            view.forward = functools.partial(self._run_layer, layer)

    def collect_layer_seconds(self) -> tuple[float, ...]:
        """Return the measured times; a layer that occurs several times is split between its positions."""
        missed = [name for name, layer in self._layers if id(layer) not in self._seconds_by_layer]
        if missed:
            raise ValueError(
                f"{', '.join(missed)} took no part in the model's forward pass, so the layers aren't a chain. Remove "
                "layers that aren't called, name the cuts (split=[...]), or use strategy=dtkit.Sharded()"
            )
        keys = [id(layer) for _, layer in self._layers]
        return tuple(self._seconds_by_layer[key] / keys.count(key) for key in keys)

    def time_outside_layers(self, inputs: ModelInputs, compute_loss: Callable[[Any], Any]) -> tuple[float, float]:
        """Return the seconds of the code before the first layer and after the last one."""
        self._num_calls = 0
        self._first_layer_inputs: list[torch.Tensor] = []
        self._last_layer_outputs: list[torch.Tensor] = []
        self._first_layer_start = self._last_layer_end = started = self._synchronized_time()
        output = compute_loss(inputs.pass_to(self._model_view))
        ended = self._synchronized_time()
        before, after = self._first_layer_start - started, ended - self._last_layer_end
        return before + self._time_backward(self._first_layer_inputs, []), after + self._time_backward(
            _find_differentiable(output), self._last_layer_outputs
        )

    def _run_layer(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return a layer's output, detached; time the layer in the first run."""
        if not self._num_calls:
            self._first_layer_start = self._synchronized_time()
            self._first_layer_inputs = _find_differentiable((args, kwargs))
        if self._num_calls == len(self._layer_outputs):
            layer_output, seconds = self._time_layer(copy_to_device(layer, self._device), args, kwargs)
            self._layer_outputs.append(layer_output)
            self._seconds_by_layer[id(layer)] = self._seconds_by_layer.get(id(layer), 0.0) + seconds
        self._last_layer_outputs, output = _clone_leaves(self._layer_outputs[self._num_calls])
        self._num_calls += 1
        self._last_layer_end = self._synchronized_time()
        return output

    def _time_layer(self, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, float]:
        parameters, timings = [p for p in layer.parameters() if p.requires_grad], []
        for _ in range(NUM_TIMINGS):
            leaves, (inputs, named) = _clone_leaves((args, kwargs))
            started = self._synchronized_time()
            output = layer(*inputs, **named)
            _run_backward(_find_differentiable(output), parameters + leaves)
            timings.append(self._synchronized_time() - started)
        return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output), min(timings)

    def _time_backward(self, outputs: list[torch.Tensor], leaves: list[torch.Tensor]) -> float:
        """Return the seconds until gradients of `outputs` reach the last of the leaves."""
        reached: list[float] = []
        for leaf in leaves:
            leaf.register_hook(lambda _: reached.append(self._synchronized_time()))  # type: ignore[no-untyped-call]
        started = self._synchronized_time()
        _run_backward(outputs, self._outside_parameters + leaves)
        ended = self._synchronized_time()
        return (reached[-1] if reached else ended) - started

    def _synchronized_time(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _find_tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _find_differentiable(value: Any) -> list[torch.Tensor]:
    """Return the tensors that require gradients."""
    return [leaf for leaf in _find_tensors(value) if leaf.requires_grad]


def _clone_leaves(value: Any) -> tuple[list[torch.Tensor], Any]:
    """Return (leaves, `value` with copies of the leaves), so that in-place operations work."""
    leaves: list[torch.Tensor] = []

    def clone(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf.clone()
        leaves.append(leaf.detach().clone().requires_grad_())
        return leaves[-1].clone()

    return leaves, tree_map(clone, value)


def _run_backward(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    if outputs and inputs:
        ones = [torch.ones_like(t) for t in outputs]
        torch.autograd.grad(outputs, inputs, ones, retain_graph=True, allow_unused=True)


# -- by parameters -------------------------------------------------------------------------------------------


def count_by_layer(model: nn.Module, inputs: ModelInputs) -> LayerCosts:
    """Return the sizes of the layers' parameters, and of those used before and after the layers."""
    return measure_sizes(model, inputs)[0]


def measure_sizes(model: nn.Module, inputs: ModelInputs) -> tuple[LayerCosts, tuple[int, ...]]:
    """Return (:func:`count_by_layer`, output bytes of each layer); no bytes if they are unknown."""
    around = {id(t): t.numel() for t in find_tensors_outside_layers(model) if isinstance(t, nn.Parameter)}
    nothing: tuple[set[int], tuple[int, ...]] = set(), ()
    # silent: the tracing that follows raises the same error
    late, outputs = run_guarded(lambda: _trace_shapes(model, inputs), lambda _: nothing)
    after = sum(count for key, count in around.items() if key in late)
    layers = tuple(float(count_parameters(layer)) for _, layer in find_layer_chain(model))
    return LayerCosts(layers, float(sum(around.values()) - after), float(after)), outputs


def find_tensors_outside_layers(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers outside of layers."""
    within = {id(m) for _, layer in find_layer_chain(model) for m in layer.modules()}
    modules = [m for m in model.modules() if id(m) not in within]
    tensors = [t for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
    return list({id(t): t for t in tensors}.values())


def _trace_shapes(model: nn.Module, inputs: ModelInputs) -> tuple[set[int], tuple[int, ...]]:
    """Return (ids of parameters that are first used after the last layer, output bytes of each layer).

    Runs on fake tensors.
    """
    before: set[int] = set()
    outputs: list[int] = []
    with SharedFakeMode(allow_non_fake_inputs=True), torch.random.fork_rng([]):
        view = enter_training(copy_to_meta(model, torch.device("cpu")))
        prepare_for_trace(view)
        layers = [layer for _, layer in find_layer_chain(view)]
        with _TensorUseMode() as uses:
            for layer in {id(layer): layer for layer in layers}.values():
                layer.register_forward_hook(lambda *args: outputs.append(count_bytes(_find_tensors(args[-1]))))
            layers[-1].register_forward_hook(lambda *_: before.update(uses.used_ids))
            inputs.pass_to(view)
        pairs = zip(model.parameters(), view.parameters(), strict=True)
        late = {id(p) for p, shape in pairs if id(shape) in uses.used_ids - before}
        return late, tuple(outputs) if len(outputs) == len(layers) else ()


class _TensorUseMode(DispatchMode):
    """Mode that collects the ids of the operations' arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used_ids: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and add its arguments."""
        self.used_ids.update(map(id, tree_leaves((args, kwargs))))
        return func(*args, **(kwargs or {}))

"""A model cut into stages: slices of a Sequential, or parts of a trace.

A chain in an ``nn.Sequential`` is sliced. torch's exporter traces any other model, and splits the trace where a stage
begins. The parts keep the names of their parameters, by which they get their values. Training and evaluation differ for
dropout or batch normalization. So there are two traces over the same parameters.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import textwrap
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed import pipelining

from dtkit._util.guard import run_guarded
from dtkit._util.torch_private import (
    get_buffer_dict,
    get_module_dict,
    get_parameter_dict,
    is_fake,
    tree_flatten,
)
from dtkit.strategies.fake_mode import SharedFakeMode
from dtkit.strategies.meta_copy import make_empty_like
from dtkit.strategies.module_modes import enter_training, evaluation_mode
from dtkit.strategies.pipeline.cut import find_layer_chain
from dtkit.strategies.pipeline.device_copy import copy_tensors_to_device, copy_to_device
from dtkit.strategies.pipeline.trace_check import run_checked
from dtkit.strategies.pipeline.trace_preparation import prepare_for_trace
from dtkit.strategies.pipeline.value_routing import StageModule, build_routings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dtkit._util.torch_private import TreeSpec
    from dtkit.strategies.loss import ModelInputs
    from dtkit.strategies.pipeline.cut import StageCut


@functools.cache
def preload_exporter() -> None:
    """Trace a small model, so that the memory of torch's exporter doesn't count for a user's model."""
    starts = {"1": pipelining.SplitPoint.BEGINNING}
    pipelining.pipeline(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), (torch.zeros(1, 1),), split_spec=starts)


@dataclasses.dataclass(frozen=True)
class StageModulePair:
    """A stage's modules for training and evaluation: two over the same parameters, or one."""

    training: StageModule
    evaluation: StageModule

    @property
    def module(self) -> nn.Module:
        """Module for training."""
        return self.training.module


def split_model(model: nn.Module, cut: StageCut, inputs: ModelInputs, device: torch.device) -> list[StageModulePair]:
    """Return all stages of a model, for :func:`copy_stages_to_device`.

    A trace needs the strides of results on the device, which may differ from those on the host. It runs on torch's
    fake tensors, so that the model is neither moved nor copied.
    """
    if isinstance(model, nn.Sequential):
        layers = find_layer_chain(model)
        slices = [StageModule(nn.Sequential(OrderedDict(layers[k] for k in stage))) for stage in cut.stages]
        return [StageModulePair(part, part) for part in slices]
    split_points = [cut.layers[start] for start in cut.stage_starts[1:]]
    training = _trace_and_split(enter_training(model), split_points, inputs, device)
    with evaluation_mode(model):
        evaluation = _trace_and_split(model, split_points, inputs, device)
    return [StageModulePair(*pair) for pair in zip(training, evaluation, strict=True)]


def _trace_and_split(
    model: nn.Module, split_points: Sequence[str], inputs: ModelInputs, device: torch.device
) -> list[StageModule]:
    def refuse(error: Exception) -> NoReturn:
        raise ValueError(
            f"{type(model).__name__} can't be traced and cut into stages: {_summarize_error(error)}. dtkit can cut an "
            "nn.Sequential, or a model whose forward has no data-dependent control flow. Wrap its layers in an "
            "nn.Sequential, or use strategy=dtkit.Sharded()"
        ) from error

    def trace() -> tuple[pipelining.Pipe, TreeSpec]:
        starts = dict.fromkeys(split_points, pipelining.SplitPoint.BEGINNING)
        with SharedFakeMode(allow_non_fake_inputs=True) as fake:
            shapes = {id(t): make_empty_like(t, device) for t in (*model.parameters(), *model.buffers())}
            like = inputs.replace_values([make_empty_like(t, device) for t in inputs.values])
        view, marked = (copy.deepcopy(model, dict[int, Any](shapes)) for _ in range(2))
        for module in (view, marked):
            prepare_for_trace(module)
        with fake, torch.random.fork_rng([]):
            output = run_checked(view, like.pass_to) if model.training else like.pass_to(view)
            output_spec = tree_flatten(output)[1]
        return pipelining.pipeline(marked, like.args, like.kwargs, split_spec=starts), output_spec  # changes the model

    pipe, output_spec = run_guarded(trace, refuse)
    if pipe.num_stages != len(split_points) + 1:
        raise ValueError(
            f"{type(model).__name__} was split into {pipe.num_stages} parts instead of {len(split_points) + 1}: "
            f"{', '.join(split_points)} aren't called in order. Name other layers: split=[...]"
        )
    modules = [pipe.get_stage_module(k) for k in range(pipe.num_stages)]
    routings = build_routings(pipe.split_gm, modules)
    return [StageModule(module, routing, output_spec) for module, routing in zip(modules, routings, strict=True)]


_TRACEBACK_LOCATION = re.compile(r'File "([^"]+)", line (\d+), in \w+\s*\n\s*(.+)')


_REPEATED_CALL_SUFFIX = re.compile(r"@\d+")


def _summarize_error(error: BaseException) -> str:
    """Return the first line of an exporter's error, and the last line of the user's code in it."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    first = textwrap.shorten(lines[0], 200, placeholder=" …")
    locations = [location for location in _TRACEBACK_LOCATION.findall(str(error)) if "/torch/" not in location[0]]
    if not locations:
        return first
    path, line, code = locations[-1]
    return f"{first} (at {path.rpartition('/')[2]}:{line}: {code.strip()})"


def copy_stages_to_device(
    pairs: Mapping[int, StageModulePair], model: nn.Module, device: torch.device
) -> dict[int, StageModulePair]:
    """Return copies of some stages of `model` on a device, with one copy of each parameter."""
    copies: dict[int, torch.Tensor] = {}
    return {stage: _copy_pair_to_device(pair, model, device, copies) for stage, pair in pairs.items()}


def _copy_pair_to_device(
    pair: StageModulePair, model: nn.Module, device: torch.device, copies: dict[int, torch.Tensor]
) -> StageModulePair:
    originals, persistent_names = named_tensors(model), set(model.state_dict())

    def copy_module(module: nn.Module) -> nn.Module:
        memo: dict[int, Any] = {}
        for name, shape in named_tensors(module).items():
            original = originals.get(name, shape)
            if is_fake(original):
                raise ValueError(
                    f"{name} of the trace is not a parameter or buffer of {type(model).__name__}, so it has no "
                    "values. Wrap the model's layers in an nn.Sequential, or use strategy=dtkit.Sharded()"
                )
            if id(original) not in copies:
                copies.update(copy_tensors_to_device([original], device))
            memo[id(shape)] = copies[id(original)]
        copied = copy_to_device(module, device, memo)
        restore_model_names(copied)
        for name, buffer in list(copied.named_buffers(remove_duplicate=False)):
            if name not in persistent_names:  # torch's exporter makes buffers of constants
                owner, _, last = name.rpartition(".")
                copied.get_submodule(owner).register_buffer(last, buffer, persistent=False)
        return copied

    training = dataclasses.replace(pair.training, module=copy_module(pair.module))
    if pair.evaluation is pair.training:
        return StageModulePair(training, training)
    return StageModulePair(training, dataclasses.replace(pair.evaluation, module=copy_module(pair.evaluation.module)))


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters and buffers by all of their names in the model."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    return {to_model_name(name): tensor for name, tensor in tensors.items()}


def to_model_name(name: str) -> str:
    """Return the model's name for a name of the trace: the exporter names a layer's second call layer@1."""
    return _REPEATED_CALL_SUFFIX.sub("", name)


def restore_model_names(module: nn.Module) -> None:
    """Register a trace's tensors under their names in the model; repeated layers keep them as attributes."""
    for name, layer in list(module.named_modules()):
        if to_model_name(name) == name:
            continue
        owner = module
        for child in to_model_name(name).split("."):
            if child not in get_module_dict(owner):
                owner.add_module(child, nn.Module())
            owner = owner.get_submodule(child)
        for get_tensors in (get_parameter_dict, get_buffer_dict):
            source: dict[str, Any] = get_tensors(layer)
            for key, tensor in list(source.items()):
                get_tensors(owner).setdefault(key, tensor)
                del source[key]
                vars(layer)[key] = tensor

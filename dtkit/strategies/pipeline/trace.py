"""A model cut into stages: slices of a Sequential, or parts of a trace."""

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
from torch.utils._pytree import tree_flatten

from dtkit._util.guard import run_guarded
from dtkit.strategies.meta_copy import make_empty_like
from dtkit.strategies.pipeline.cut import find_layer_chain
from dtkit.strategies.pipeline.device_copy import copy_tensors_to_device, copy_to_device
from dtkit.strategies.pipeline.value_routing import StageModule, build_routings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.utils._pytree import TreeSpec

    from dtkit.strategies.pipeline.cut import StageCut


@functools.cache
def preload_exporter() -> None:
    """Trace something. What torch's exporter loads by that stays, some 25 MB, and belongs to no model."""
    starts = {"1": pipelining.SplitPoint.BEGINNING}
    pipelining.pipeline(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), (torch.zeros(1, 1),), split_spec=starts)


@dataclasses.dataclass(frozen=True)
class StageModulePair:
    """A contiguous part of a model, to train and to evaluate with: two pieces over the same parameters, or one."""

    training: StageModule
    evaluation: StageModule

    @property
    def module(self) -> nn.Module:
        """That trains."""
        return self.training.module


def split_model(
    model: nn.Module, cut: StageCut, inputs: Sequence[torch.Tensor], device: torch.device
) -> list[StageModulePair]:
    """All parts of a model, to be :func:`shift_slice` to a device: of the layers of a Sequential, or of a trace.

    A trace is made as on the device, where operations may lay out their results in another way than on the host; but
    on torch's fake tensors, so that the model is neither moved nor copied for it, and has no numbers. It is of
    training or of evaluation, so there are two.
    """
    if isinstance(model, nn.Sequential):
        layers = find_layer_chain(model)
        slices = [StageModule(nn.Sequential(OrderedDict(layers[k] for k in stage))) for stage in cut.stages]
        return [StageModulePair(piece, piece) for piece in slices]
    begins = [cut.layers[start] for start in cut.stage_starts[1:]]
    training = _trace_and_split(model.train(), begins, inputs, device)
    try:
        evaluation = _trace_and_split(model.eval(), begins, inputs, device)
    finally:
        model.train()
    return [StageModulePair(*pieces) for pieces in zip(training, evaluation, strict=True)]


def _trace_and_split(
    model: nn.Module, split_points: Sequence[str], inputs: Sequence[torch.Tensor], device: torch.device
) -> list[StageModule]:
    def refuse(error: Exception) -> NoReturn:
        raise ValueError(
            f"{type(model).__name__} can't be traced, and so not be cut into stages: {_summarize_error(error)}. What can be "
            "cut is an nn.Sequential, or a model whose forward has no control flow that depends on the data. Wrap its "
            "layers in an nn.Sequential, or use strategy=dtkit.Sharded()"
        ) from error

    def trace() -> tuple[pipelining.Pipe, TreeSpec]:
        from torch._subclasses.fake_tensor import FakeTensorMode

        starts = dict.fromkeys(split_points, pipelining.SplitPoint.BEGINNING)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            shapes = {id(t): make_empty_like(t, device) for t in (*model.parameters(), *model.buffers(), *inputs)}
        like = tuple(shapes[id(t)] for t in inputs)
        view, marked = (copy.deepcopy(model, dict[int, Any](shapes)) for _ in range(2))
        with fake, torch.random.fork_rng([]):
            form = tree_flatten(view(*like))[1]
        return pipelining.pipeline(marked, like, split_spec=starts), form  # torch marks split points in the model

    pipe, form = run_guarded(trace, refuse)
    if pipe.num_stages != len(split_points) + 1:
        raise ValueError(
            f"{type(model).__name__} came apart into {pipe.num_stages} parts in place of {len(split_points) + 1}: the blocks "
            f"{', '.join(split_points)} are not called one after the other. Name others: split=[...]"
        )
    modules = [pipe.get_stage_module(k) for k in range(pipe.num_stages)]
    found = build_routings(pipe.split_gm, modules)
    return [StageModule(module, route, form) for module, route in zip(modules, found, strict=True)]


_TRACEBACK_LOCATION = re.compile(r'File "([^"]+)", line (\d+), in \w+\s*\n\s*(.+)')


_REPEATED_CALL_SUFFIX = re.compile(r"@\d+")


def _summarize_error(error: BaseException) -> str:
    """Of an exporter's error, and the last line of the user's code that it names."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    first = textwrap.shorten(lines[0], 200, placeholder=" …")
    own = [found for found in _TRACEBACK_LOCATION.findall(str(error)) if "/torch/" not in found[0]]
    if not own:
        return first
    path, line, code = own[-1]
    return f"{first} (at {path.rpartition('/')[2]}:{line}: {code.strip()})"


def copy_pair_to_device(pair: StageModulePair, model: nn.Module, device: torch.device) -> StageModulePair:
    """A copy of a part of `model` on a device, both of its modules over the same new parameters."""
    from torch._subclasses.fake_tensor import is_fake

    whole, lasting = named_tensors(model), set(model.state_dict())
    copies: dict[int, torch.Tensor] = {}

    def lay(module: nn.Module) -> nn.Module:
        memo: dict[int, Any] = {}
        for name, shape in named_tensors(module).items():
            origin = whole.get(name, shape)
            if is_fake(origin):  # it would train on shapes
                raise ValueError(
                    f"{name} of the trace is no parameter or buffer of {type(model).__name__}, so nobody knows its "
                    "numbers. Wrap the model's layers in an nn.Sequential, or use strategy=dtkit.Sharded()"
                )
            if id(origin) not in copies:
                copies.update(copy_tensors_to_device([origin], device))
            memo[id(shape)] = copies[id(origin)]
        made = copy_to_device(module, device, memo)
        restore_model_names(made)
        for name, buffer in list(made.named_buffers(remove_duplicate=False)):
            if name not in lasting:  # a constant in the model's code is a buffer to torch's exporter
                owner, _, last = name.rpartition(".")
                made.get_submodule(owner).register_buffer(last, buffer, persistent=False)
        return made

    training = dataclasses.replace(pair.training, module=lay(pair.module))
    if pair.evaluation is pair.training:
        return StageModulePair(training, training)
    return StageModulePair(training, dataclasses.replace(pair.evaluation, module=lay(pair.evaluation.module)))


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters and buffers, by all of the names that they have in the model."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return {to_model_name(name): t for name, t in (found | dict(module.named_buffers(remove_duplicate=False))).items()}


def to_model_name(name: str) -> str:
    """A name in the model of one in its trace: of a layer that is called again the exporter makes another, layer@1."""
    return _REPEATED_CALL_SUFFIX.sub("", name)


def restore_model_names(module: nn.Module) -> None:
    """Have tensors of a trace stand under their names in the model alone; layers that are called again keep the use."""
    for name, layer in list(module.named_modules()):
        if to_model_name(name) == name:
            continue
        owner = module
        for step in to_model_name(name).split("."):
            if step not in owner._modules:  # noqa: SLF001 - hasattr would find attributes, too
                owner.add_module(step, nn.Module())
            owner = owner.get_submodule(step)
        for kept, there in ((layer._parameters, owner._parameters), (layer._buffers, owner._buffers)):  # noqa: SLF001
            for own, tensor in list(kept.items()):
                there.setdefault(own, tensor)
                del kept[own]
                vars(layer)[own] = tensor


def check_tied_weights(model: nn.Module, parts: Sequence[StageModulePair]) -> None:
    """A parameter in two stages would be two parameters, each trained on its own."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    for tied in names.values():
        found = {
            (name, place) for place, part in enumerate(parts) for name in named_tensors(part.module) if name in tied
        }
        if len({place for _, place in found}) > 1:
            where = ", ".join(f"{name} (stage {place})" for name, place in sorted(found))
            raise ValueError(
                f"{where} are one parameter (tied weights), and stages are on different ranks. Cut the model so that "
                "they are in one stage, untie them, or use strategy=dtkit.Sharded()"
            )


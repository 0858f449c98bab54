"""Making models, optimizers and objects equal on all ranks."""

from __future__ import annotations

import dataclasses
import pickle
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from dtkit._util.formatting import name_type
from dtkit.integrations.horovod.context import get_context
from dtkit.integrations.horovod.process_sets import ProcessSet, global_process_set
from dtkit.integrations.horovod.torch.asynchronous import broadcast_async_, synchronize
from dtkit.integrations.horovod.torch.operations import allgather, broadcast_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite parameters with those of rank `root_rank`.

    params : ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``. Entries that aren't tensors
        stay as they are.
    """
    if isinstance(params, dict):
        named = sorted(params.items())
    elif isinstance(params, (str, bytes, torch.Tensor)) or not hasattr(params, "__iter__"):
        raise ValueError(f"params is {name_type(params)}; give model.state_dict() or model.named_parameters()")
    else:
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    handles = [
        broadcast_async_(tensor, root_rank, name, process_set)
        for name, tensor in named
        if isinstance(tensor, torch.Tensor)
    ]
    for handle in handles:
        synchronize(handle)


@dataclasses.dataclass(frozen=True)
class _Placeholder:
    """Stands for a tensor in a nested container; the tensors follow one by one."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Overwrite an optimizer's state and options, such as the learning rate, with those of rank `root_rank`.

    As in Horovod, parameters of an optimizer without state get gradients of zero.
    """
    del model  # Horovod used it to find sparse parameters
    if not optimizer.state:
        _fill_gradients(optimizer)
    is_root = get_context().rank == root_rank
    tensors: list[torch.Tensor] = []

    def remove(tensor: torch.Tensor) -> _Placeholder:
        tensors.append(tensor.detach().cpu().contiguous())
        return _Placeholder(tuple(tensor.shape), tensor.dtype)

    def restore(value: _Placeholder) -> torch.Tensor:
        tensors.append(torch.empty(value.shape, dtype=value.dtype))
        return tensors[-1]

    structure = _replace(optimizer.state_dict(), torch.Tensor, remove) if is_root else None
    # unpickles: sent by a rank of the same script
    structure = broadcast_object(structure, root_rank, "optimizer state")
    state = None if is_root else _replace(structure, _Placeholder, restore)
    broadcast_parameters([(f"optimizer state {k}", tensor) for k, tensor in enumerate(tensors)], root_rank)
    if state is not None:
        optimizer.load_state_dict(state)


def _fill_gradients(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _replace(value: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    """Return a nested container of dicts, lists and tuples with the values of a type replaced."""
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, dict):
        return {key: _replace(entry, kind, replace) for key, entry in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_replace(entry, kind, replace) for entry in value)
    return value


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of rank `root_rank` on every rank. It is pickled by cloudpickle."""
    base = _make_name(name, "object")
    is_root = get_context().rank == root_rank
    data = _to_bytes(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = broadcast_(torch.tensor([len(data)]), root_rank, f"{base}.length", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{base}.data", process_set)
    # unpickles: sent by a rank of the same script
    return obj if is_root else pickle.loads(data.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, in rank order. They are pickled by cloudpickle."""
    base = _make_name(name, "objects")
    data = _to_bytes(obj)
    lengths = allgather(torch.tensor([len(data)]), f"{base}.lengths", process_set).tolist()
    joined = allgather(data, f"{base}.data", process_set)
    # unpickles: sent by ranks of the same script
    return [pickle.loads(part.numpy().tobytes()) for part in torch.split(joined, lengths)]


def _make_name(name: str | None, kind: str) -> str:
    return get_context().make_name(kind, name)


def _to_bytes(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)

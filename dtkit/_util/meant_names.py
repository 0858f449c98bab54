"""What users mean who give the name of a strategy, a loss or an optimizer, as other libraries take it."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_STRATEGIES = {
    "DataParallel()": ("ddp", "dp", "distributeddataparallel", "distributed", "mirrored", "horovod", "replicas"),
    "NaiveDataParallel()": ("naive",),
    "ParameterAveraging()": ("localsgd", "averaging", "diloco"),
    "Pipeline(2, micro_batches=4)": ("pp", "gpipe", "1f1b", "pipelineparallel"),
    "Sharded()": ("fsdp", "fsdp2", "fullshard", "fullyshardeddataparallel", "zero", "zero2", "zero3", "deepspeed"),
    "TensorParallel(2)": ("tp", "megatron"),
}
_LOSSES = {
    "BCEWithLogitsLoss": ("bce", "binarycrossentropy", "binarycrossentropywithlogits", "bcewithlogits"),
    "CrossEntropyLoss": ("ce", "xent", "categoricalcrossentropy", "sparsecategoricalcrossentropy", "softmax"),
    "KLDivLoss": ("kl", "kldivergence", "kullbackleiblerdivergence"),
    "L1Loss": ("mae", "meanabsoluteerror", "absoluteerror"),
    "MSELoss": ("l2", "meansquarederror", "squarederror"),
}
_CALLS_OF_LOSSES = {"KLDivLoss": "KLDivLoss(reduction='batchmean')"}
_MOMENTUM = ("momentum", "nesterov")
_MIN_SIMILARITY = 0.75


def find_strategy(name: object) -> str | None:
    """Return the call that makes the strategy of this name; None for another object or an unknown name."""
    names = {synonym: call for call, synonyms in _STRATEGIES.items() for synonym in synonyms}
    own_names = {_normalize(call.partition("(")[0]): call for call in _STRATEGIES}
    call = _find(name, names | own_names)
    return None if call is None else f"dtkit.{call}"


def find_loss(name: object) -> str | None:
    """Return the call that makes torch's loss of this name; None for another object or an unknown name."""
    if not isinstance(name, str):
        return None
    from torch import nn

    losses = [each for each in dir(nn) if each.endswith("Loss")]
    names = {_normalize(each.removesuffix("Loss")): each for each in losses}
    names |= {synonym: each for each, synonyms in _LOSSES.items() for synonym in synonyms}
    loss = _find(_normalize(name).removesuffix("loss"), names)
    return None if loss is None else f"nn.{_CALLS_OF_LOSSES.get(loss, f'{loss}()')}"


def find_optimizer(name: object) -> str | None:
    """Return the call that makes torch's optimizer of this name; None for another object or an unknown name."""
    if not isinstance(name, str):
        return None
    from torch import optim

    names = {each.lower(): each for each in dir(optim) if isinstance(getattr(optim, each), type)}
    del names["optimizer"]
    if _normalize(name) in _MOMENTUM:
        return "torch.optim.SGD(params, lr=0.1, momentum=0.9)"
    optimizer = _find(name, names)
    return optimizer and f"torch.optim.{optimizer}(params, lr={'0.1' if optimizer == 'SGD' else '0.001'})"


def _find(name: object, values_by_name: Mapping[str, str]) -> str | None:
    """Return the value of this name, or else of the most similar one."""
    if not isinstance(name, str):
        return None
    similar = difflib.get_close_matches(_normalize(name), values_by_name, n=1, cutoff=_MIN_SIMILARITY)
    return values_by_name[similar[0]] if similar else None


def _normalize(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())

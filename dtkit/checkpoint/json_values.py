"""Python values as JSON and back, without loss: what a checkpoint keeps besides tensors.

JSON has no tuples, no keys but strings, no infinities and no numbers of a given type; schedulers and optimisers have
all of them. What JSON lacks is written as an object with one key that begins with "$". Anything else is refused: a
checkpoint holds data, and never instructions how to make an object.
"""

from __future__ import annotations

import collections
import math
from typing import Any

_TAGS = ("$float", "$tuple", "$pairs", "$counter", "$scalar")


class UnsupportedValueError(ValueError):
    """A value that is no plain data."""


def encode(value: Any, where: str) -> Any:
    """The value in JSON's types. Raises Unsavable, naming the place, for what is no plain data."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)) and type(value).__module__ == "builtins":
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, list):
        return [encode(item, f"{where}[{k}]") for k, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, f"{where}[{k}]") for k, item in enumerate(value)]}
    if isinstance(value, dict):
        return _encode_dict(value, where)
    if hasattr(value, "dtype") and hasattr(value, "item") and not getattr(value, "shape", ()):
        return {
            "$scalar": [_get_number_family(value), str(value.dtype).rpartition(".")[2], encode(value.item(), where)]
        }
    raise UnsupportedValueError(f"{where} is a {type(value).__name__}")


def _encode_dict(value: dict[Any, Any], where: str) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    tag = "$counter" if isinstance(value, collections.Counter) else "$pairs"
    return {tag: [[encode(k, f"a key of {where}"), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]}


def _get_number_family(value: Any) -> str:
    """Whose number it is; a tensor also says whether it lies on the CPU."""
    if not type(value).__module__.startswith("torch"):
        return "numpy"
    return "torch cpu" if value.device.type == "cpu" else "torch"


def decode(value: Any, device: Any = None) -> Any:
    """What :func:`encode` was given; numbers of torch that lay on a device lie on `device`."""
    if isinstance(value, list):
        return [decode(item, device) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) != 1 or tag not in _TAGS:
        return {key: decode(item, device) for key, item in value.items()}
    return _decode_tagged(tag, value[tag], device)


def _decode_tagged(tag: str, inner: Any, device: Any) -> Any:
    if tag == "$float":
        return float(inner)
    if tag == "$tuple":
        return tuple(decode(item, device) for item in inner)
    if tag == "$scalar":
        return _decode_scalar(inner[0], inner[1], inner[2], device)
    pairs = {decode(k): decode(v, device) for k, v in inner}
    return collections.Counter(pairs) if tag == "$counter" else pairs


def _decode_scalar(family: str, dtype: str, value: Any, device: Any) -> Any:
    if family == "numpy":
        import numpy as np

        return np.dtype(dtype).type(decode(value))
    import torch

    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise UnsupportedValueError(f"{dtype!r} is no dtype of torch")
    return torch.tensor(decode(value), dtype=kind, device="cpu" if family == "torch cpu" else device)

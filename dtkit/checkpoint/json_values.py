"""Lossless conversion of Python values to JSON and back, for everything in a checkpoint that is not a tensor.

JSON has no tuples, infinities or typed numbers, and its keys are strings. Schedulers and optimizers have all of these.
They are written as an object with one key that begins with "$". Other values are refused, because a checkpoint holds
data only, and no instructions to create objects.
"""

from __future__ import annotations

import collections
import math
from typing import Any

from dtkit._util.formatting import name_type

_TAGS = ("$float", "$tuple", "$pairs", "$counter", "$scalar")


class UnsupportedValueError(ValueError):
    """Raised for a value that is not plain data."""


def encode(value: Any, where: str) -> Any:
    """Return the value in JSON's types. Raises UnsupportedValueError, with `where`, if it is not plain data."""
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
    raise UnsupportedValueError(f"{where} is {name_type(value)}")


def _encode_dict(value: dict[Any, Any], where: str) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    tag = "$counter" if isinstance(value, collections.Counter) else "$pairs"
    return {tag: [[encode(k, f"a key of {where}"), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]}


def _get_number_family(value: Any) -> str:
    """Return the library of a number, and for a tensor whether it is on the CPU."""
    if not type(value).__module__.startswith("torch"):
        return "numpy"
    return "torch cpu" if value.device.type == "cpu" else "torch"


def decode(value: Any, device: Any = None) -> Any:
    """Return the value that :func:`encode` was given. Tensors of a device are created on `device`."""
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
        raise UnsupportedValueError(f"{dtype!r} is not a dtype of torch")
    return torch.tensor(decode(value), dtype=kind, device="cpu" if family == "torch cpu" else device)

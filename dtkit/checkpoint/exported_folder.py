"""Weights from folders of other software: of Hugging Face, an adapter of PEFT, torch's distributed checkpoint.

:mod:`dtkit.checkpoint.export` writes such folders. They hold only a model, so a training that begins from one has a new
optimizer and counts from step 0.
"""

from __future__ import annotations

import copy
import json
import warnings
from typing import TYPE_CHECKING, Any

from dtkit.checkpoint.validation import format_names
from dtkit.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

_MARKER_FILES = {"adapter_config.json": "peft", "config.json": "hf", ".metadata": "dcp"}
_DESCRIPTIONS = {"hf": "Hugging Face's folder", "peft": "PEFT's folder", "dcp": "torch's distributed checkpoint"}
_WEIGHTS, _INDEX, _ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"


def find_format(folder: Path) -> str | None:
    """Return the format of an exported folder, as `export` names it; None for any other folder."""
    return next((name for file, name in _MARKER_FILES.items() if (folder / file).is_file()), None)


def load_exported(folder: Path, model: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """Return (copy of the model with the folder's weights, what was read). Raises CheckpointError if they don't fit."""
    format = find_format(folder)  # noqa: A001 - as users call it
    assert format is not None
    model = copy.deepcopy(model)
    loaders: dict[str, Callable[[Path, Any], None]] = {"hf": _load_hf, "peft": _load_peft, "dcp": _load_dcp}
    try:
        loaders[format](folder, model)
    except CheckpointError:
        raise
    # broad: of several libraries, for files that are damaged or of another model
    except Exception as error:
        raise CheckpointError(f"{folder} can't be read as {_DESCRIPTIONS[format]}: {error}") from error
    return model, _DESCRIPTIONS[format]


def _load_hf(folder: Path, model: torch.nn.Module) -> None:
    from safetensors.torch import load_file

    if (folder / _INDEX).is_file():
        files = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
    else:
        files = [_WEIGHTS]
    missing = set(model.state_dict())
    for file in files:
        state = load_file(folder / file)
        _refuse_unknown(folder, state, model)
        model.load_state_dict(state, strict=False)
        missing -= state.keys()
    _refuse_missing(folder, missing, model)


def _load_peft(folder: Path, model: Any) -> None:
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    if not hasattr(model, "peft_config"):
        raise CheckpointError(
            f"{folder} holds an adapter of PEFT alone, and {type(model).__name__} has none. Give the model with its "
            "adapter: peft.get_peft_model(base, config)"
        )
    result: Any = set_peft_model_state_dict(model, load_file(folder / _ADAPTER))
    if result.unexpected_keys:
        raise CheckpointError(f"{folder} is of another adapter: the model lacks {format_names(result.unexpected_keys)}")


def _load_dcp(folder: Path, model: torch.nn.Module) -> None:
    from torch.distributed import checkpoint as dcp

    reader = dcp.FileSystemReader(folder)  # type: ignore[attr-defined]  # torch exports both by name only
    state = {"model": {name: value for name, value in model.state_dict().items() if hasattr(value, "dtype")}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose
        dcp.load(state, storage_reader=reader, no_dist=True)  # type: ignore[attr-defined]


def _refuse_unknown(folder: Path, state: Mapping[str, Any], model: torch.nn.Module) -> None:
    if unknown := state.keys() - model.state_dict().keys():
        raise CheckpointError(f"{folder} is of another model: {type(model).__name__} lacks {format_names(unknown)}")


def _refuse_missing(folder: Path, missing: set[str], model: torch.nn.Module) -> None:
    """Raise CheckpointError for tensors without weights, unless they share memory with tensors that have some."""
    state = model.state_dict(keep_vars=True)
    loaded = {id(value) for name, value in state.items() if name not in missing}
    if lacking := {name for name in missing if id(state[name]) not in loaded}:
        raise CheckpointError(f"{folder} is of another model: it lacks {format_names(lacking)}")

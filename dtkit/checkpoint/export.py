"""Checkpoints in the formats of others: Hugging Face's folder, an adapter of PEFT, torch's distributed checkpoint.

The exporter reads tensors from the files of all ranks one by one, or as many as fit one output file. So no rank holds
the whole model, and the notebook at most one output file.
"""

from __future__ import annotations

import json
import math
import warnings
from typing import TYPE_CHECKING, Any

import torch

from dtkit.checkpoint.safetensors_file import TORCH_DTYPES, FileReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

FORMATS = ("hf", "peft", "dcp")
_MAX_FILE_BYTES = 2 * 2**30


def check_format(format: str) -> None:  # noqa: A002 - as users type it
    """Raise ValueError for a format that no checkpoint can be exported to."""
    if format not in FORMATS:
        raise ValueError(
            f"format={format!r}; it must be 'hf' (a folder for from_pretrained), 'peft' (the adapter alone) or 'dcp' "
            "(torch.distributed.checkpoint)"
        )


def export(reader: ModelReader, folder: Path, model: Any, format: str) -> None:  # noqa: A002 - as users type it
    """Write a checkpoint's model into `folder`. `model` is one of its kind, for names and configuration."""
    check_format(format)
    needed = {"hf": "config", "peft": "peft_config"}.get(format)
    if needed is not None and not hasattr(model, needed):
        kind = "Hugging Face" if format == "hf" else "PEFT"
        raise ValueError(
            f"format={format!r} needs a model of {kind}, and {type(model).__name__} has no {needed}. Use format='dcp', "
            "or save the state dict: torch.save(run.model.state_dict(), path)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    {"hf": _export_hf, "peft": _export_peft, "dcp": _export_dcp}[format](reader, folder, model)


class ModelReader:
    """Reader of a model's tensors in a checkpoint, each under the first of its names."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
        """`entries` has dtype and shape of each tensor, by all of its names."""
        self._path, self._metadata = path, metadata
        self.aliases: Mapping[str, str] = metadata["facts"]["aliases"].get("model", {})
        self.entries = {name: entry for name, entry in entries.items() if name not in self.aliases}

    def count_bytes(self, name: str) -> int:
        """Return the size of a tensor."""
        entry = self.entries[name]
        return int(math.prod(entry["shape"])) * TORCH_DTYPES[entry["dtype"]].itemsize

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return whole tensors."""
        metadata = self._metadata
        with FileReader(self._path, metadata["index"], list(metadata["files"]), metadata["facts"]) as reader:
            shapes = {name: self.entries[name]["shape"] for name in names}
            return {
                name: reader.read_slice(f"model/{name}", [0] * len(shape), shape).contiguous()
                for name, shape in shapes.items()
            }


def _export_hf(reader: ModelReader, folder: Path, model: Any) -> None:
    from safetensors.torch import save_file

    groups = list(_group_by_size(reader))
    names = (
        ["model.safetensors"]
        if len(groups) == 1
        else [f"model-{k:05}-of-{len(groups):05}.safetensors" for k in range(1, len(groups) + 1)]
    )
    for file, group in zip(names, groups, strict=True):
        save_file(reader.read(group), folder / file, metadata={"format": "pt"})
    if len(groups) > 1:
        index = {
            "metadata": {"total_size": sum(map(reader.count_bytes, reader.entries))},
            "weight_map": {name: file for file, group in zip(names, groups, strict=True) for name in group},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def _group_by_size(reader: ModelReader) -> Iterator[list[str]]:
    """Yield names of tensors that go into one file."""
    group: list[str] = []
    for name in reader.entries:
        if group and sum(map(reader.count_bytes, [*group, name])) > _MAX_FILE_BYTES:
            yield group
            group = []
        group.append(name)
    yield group


def _export_peft(reader: ModelReader, folder: Path, model: Any) -> None:
    trained = [name for name, p in model.named_parameters() if p.requires_grad and name in reader.entries]
    model.save_pretrained(folder, state_dict=reader.read(trained))


def _export_dcp(reader: ModelReader, folder: Path, _model: Any) -> None:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    class Planner(DefaultSavePlanner):
        """Planner of a state dict without memory, which reads each tensor as it is written."""

        def lookup_object(self, index: Any) -> Any:
            """Return a tensor by its name."""
            name = index.fqn.removeprefix("model.")
            first = reader.aliases.get(name, name)
            return reader.read([first])[first]

    state = {
        name: torch.empty(entry["shape"], dtype=TORCH_DTYPES[entry["dtype"]], device="meta")
        for name, entry in reader.entries.items()
    }
    state |= {name: state[first] for name, first in reader.aliases.items()}
    writer = dcp.FileSystemWriter(folder)  # type: ignore[attr-defined]  # torch exports both by name only
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose
        dcp.save({"model": state}, storage_writer=writer, planner=Planner(), no_dist=True)  # type: ignore[attr-defined]

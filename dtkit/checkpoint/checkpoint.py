"""Checkpoints on disk, from which a run can continue. They are complete or absent, and never unpickled.

A checkpoint is a folder ``step-00000100`` with

- ``rank-000.safetensors`` and so on: each rank's tensors under the model's names;
- ``history.jsonl``: the history of the run;
- ``checkpoint.json``: the run's arguments and position, plain values of optimizer and scheduler, the index of tensors,
  and all files' digests.

It is written under another name, with ``checkpoint.json`` last, and renamed once all of it is on disk. A folder of that
name is therefore complete. The next save removes unfinished folders. Reading never executes content of files:
safetensors and JSON hold numbers and text.
"""

from __future__ import annotations

import dataclasses
import html
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting
from dtkit._util.arguments import explain_arguments, hide_own_frames, suggest_arguments
from dtkit._util.attributes import suggest_attributes
from dtkit._util.completion import hide_from_completion
from dtkit._util.table import Table
from dtkit.checkpoint.folders import find_newest, list_folders, parse_new_folder, parse_path
from dtkit.checkpoint.validation import (
    HISTORY_FILE,
    REMEDY,
    find_wrong_sizes,
    format_names,
    read_metadata,
    verify_file,
)
from dtkit.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from dtkit.history.history import History

_MAX_SHOWN_PROBLEMS = 5


@explain_arguments
@suggest_attributes("checkpoint")
@hide_from_completion("check_fits", "frozen_entries", "get_tensor_entries", "summarize")
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Checkpoint:
    """Checkpoint on disk: ``dtkit.Checkpoint("runs/a")`` is the newest one in that folder, or the folder itself.

    ``load_into(model)`` and ``state_dict()`` read the weights without engines. ``cluster.train(resume_from=...)``
    continues the run.
    """

    path: Path
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @hide_own_frames
    def __init__(self, path: str | Path) -> None:
        """Read its metadata. Raises CheckpointError if there is none, or if it can't be read."""
        folder, metadata = _read_newest(parse_path("Checkpoint(path", path))
        object.__setattr__(self, "path", folder)
        object.__setattr__(self, "metadata", metadata)

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return int(self.metadata["step"])

    @property
    def strategy(self) -> str:
        """Strategy of the run, as a user would write it."""
        return str(self.metadata["spec"]["strategy"])

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""
        return int(self.metadata["spec"]["world_size"])

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(int(file["bytes"]) for file in self.metadata["files"].values())

    @property
    def created_at(self) -> float:
        """Time of creation, in seconds since the epoch."""
        return float(self.metadata["created"])

    @property
    def num_parameters(self) -> int:
        """Number of elements in the model's state dict."""
        return sum(math.prod(entry["shape"]) for entry in self.get_tensor_entries().values())

    def get_tensor_entries(self) -> dict[str, Any]:
        """Return {name in the model's state dict: dtype, shape, pieces}, with tied names."""
        index = self.metadata["index"]
        entries = {name.removeprefix("model/"): entry for name, entry in index.items() if name.startswith("model/")}
        aliases = self.metadata["facts"]["aliases"].get("model", {})
        return entries | {name: entries[first] for name, first in aliases.items()}

    @property
    def frozen_entries(self) -> Mapping[str, Any]:
        """Return {name in the model's state dict: dtype, shape} of frozen parameters that were left out."""
        entries: Mapping[str, Any] = self.metadata["facts"]["frozen"]
        return entries

    def verify_files(self) -> list[str]:
        """Return the problems of its files, by their digests; empty if there are none. Reads all of them."""
        with ThreadPoolExecutor(4) as pool:  # digests are computed without the interpreter's lock
            problems = pool.map(lambda item: verify_file(self.path / item[0], item[1]), self.metadata["files"].items())
            return [problem for problem in problems if problem]

    def check_files(self) -> None:
        """Raise CheckpointError if a file is damaged."""
        if problems := self.verify_files():
            raise CheckpointError(f"{self.path} can't be used: {'; '.join(problems)}. {REMEDY}")

    def check_fits(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless names, shapes and dtypes are those of a model's state dict."""
        saved = self.get_tensor_entries() | dict(self.frozen_entries)
        tensors = {name: value for name, value in state.items() if hasattr(value, "dtype")}
        if problems := _compare_tensors(saved, tensors):
            more = len(problems) - _MAX_SHOWN_PROBLEMS
            shown = problems[:_MAX_SHOWN_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
            raise CheckpointError(
                f"{self.path} is of another model ({self.metadata['spec']['name']}): {'; '.join(shown)}. Give the "
                "model that it was made from"
            )

    def load_history(self) -> History:
        """Return the history of the run up to this step."""
        from dtkit.history.history import History

        return History.from_jsonl(self.path / HISTORY_FILE)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the model's weights as tensors on the CPU. Left-out frozen parameters are missing.

        Raises CheckpointError if files are damaged.
        """
        from dtkit.checkpoint.json_values import decode
        from dtkit.checkpoint.safetensors_file import FileReader

        self.check_files()
        facts = self.metadata["facts"]
        state: dict[str, torch.Tensor] = {}
        with FileReader(self.path, self.metadata["index"], list(self.metadata["files"]), facts) as reader:
            aliases = facts["aliases"].get("model", {})
            for name, entry in self.get_tensor_entries().items():
                shape = entry["shape"]
                state[name] = reader.read_slice(f"model/{aliases.get(name, name)}", [0] * len(shape), shape)
        return state | {name: decode(value) for name, value in facts["extra"].items()}

    def load_into(self, model: torch.nn.Module) -> torch.nn.Module:
        """Load the weights into a model, and return it. Raises CheckpointError if they are of another model."""
        self.check_fits(model.state_dict())
        model.load_state_dict(self.state_dict(), strict=not self.frozen_entries)
        return model

    def export(self, folder: str | Path, model: torch.nn.Module, format: str = "hf") -> Path:  # noqa: A002 - a format is one
        """Write the model for other software, and return the folder. `model` gives names and configuration.

        "hf": a folder for ``from_pretrained``, with its config. "peft": the adapter alone. "dcp": torch's distributed
        checkpoint. Raises ValueError for a model of another kind, and CheckpointError if files are damaged.
        """
        from dtkit.checkpoint.export import ModelReader, export

        self.check_fits(model.state_dict())
        self.check_files()
        if self.frozen_entries and format != "peft":
            raise ValueError(
                f"format={format!r} needs the whole model, and {self.path} leaves out {len(self.frozen_entries)} "
                "frozen parameters. Load it into the model and save that: load_into(model).save_pretrained(folder)"
            )
        target = parse_new_folder("export(folder", folder)
        export(ModelReader(self.path, self.metadata, self.get_tensor_entries()), target, model, format)
        return target

    def summarize(self) -> dict[str, str]:
        """Return the rows of its table. The state is judged by the sizes of its files only."""
        spec, num_files = self.metadata["spec"], len(self.metadata["files"])
        return {
            "model": f"{spec['name']}, {self.num_parameters:,} numbers",
            "step": f"{self.step} of {spec['steps']}, epoch {self.step // spec['steps_per_epoch']}",
            "made by": f"{self.strategy} on {formatting.format_count(self.world_size, 'rank')}",
            "optimizer": str(spec["optimizer"]),
            "size": f"{formatting.format_bytes(self.nbytes)} in {formatting.format_count(num_files, 'file')}",
            "age": formatting.format_duration(max(0.0, time.time() - self.created_at)),
            "state": self._describe_state(),
        }

    def _describe_state(self) -> str:
        wrong = find_wrong_sizes(self.path, self.metadata["files"])
        return f"DAMAGED: {format_names(wrong)}" if wrong else "complete, by file sizes (verify_files() reads them)"

    def __repr__(self) -> str:
        return "\n".join([f"Checkpoint {self.path}", Table((), list(self.summarize().items())).to_text("  ")])

    def _repr_html_(self) -> str:
        table = Table((), list(self.summarize().items())).to_html()
        return f"<p>Checkpoint <code>{html.escape(str(self.path))}</code></p>{table}"


def _read_newest(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the newest checkpoint's folder and metadata. A run may remove it meanwhile, since it has a newer one."""
    folder = find_newest(path)
    while True:
        try:
            return folder, read_metadata(folder)
        except CheckpointError:
            newer = find_newest(path)
            if newer == folder:
                raise
            folder = newer


def _compare_tensors(saved: Mapping[str, Any], tensors: Mapping[str, Any]) -> list[str]:
    """Return the differences between a checkpoint's tensors and a model's."""
    problems = []
    if tensors.keys() - saved.keys():
        problems.append(f"it lacks {format_names(tensors.keys() - saved.keys())}")
    if saved.keys() - tensors.keys():
        problems.append(f"the model lacks {format_names(saved.keys() - tensors.keys())}")
    for name in sorted(tensors.keys() & saved.keys()):
        shape, dtype, model_dtype = tuple(saved[name]["shape"]), saved[name]["dtype"], _format_dtype(tensors[name])
        if shape != tuple(tensors[name].shape):
            problems.append(f"{name} has shape {shape} in it and {tuple(tensors[name].shape)} in the model")
        elif dtype != model_dtype:
            problems.append(f"{name} is {dtype} in it and {model_dtype} in the model")
    return problems


def _format_dtype(tensor: Any) -> str:
    from dtkit.checkpoint.safetensors_file import SAFETENSORS_NAMES

    return SAFETENSORS_NAMES.get(tensor.dtype, str(tensor.dtype))


class Checkpoints(list[Checkpoint]):
    """Checkpoints of a folder, oldest first. ``broken`` has the problem of each one that can't be read."""

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = parse_path("list_checkpoints(path", path)
        self.broken: dict[Path, str] = {}
        if not self.path.exists():
            raise CheckpointError(
                f"{self.path} does not exist. Give the folder that run.save or checkpoint_dir was given"
            )
        for folder in list_folders(self.path):
            try:
                self.append(Checkpoint(folder))
            except CheckpointError as error:
                if folder.exists():  # else a run has removed it meanwhile
                    self.broken[folder] = str(error)

    def _build_table(self) -> Table:
        rows = []
        for checkpoint in self:
            summary, size = checkpoint.summarize(), formatting.format_bytes(checkpoint.nbytes)
            numbers = f"{checkpoint.num_parameters:,}"
            name, step = checkpoint.path.name, str(checkpoint.step)
            rows.append([name, step, summary["made by"], numbers, size, summary["age"], summary["state"]])
        rows += [[folder.name, "", "", "", "", "", f"DAMAGED: {problem}"] for folder, problem in self.broken.items()]
        header = ["folder", "step", "made by", "numbers", "size", "age", "state"]
        return Table(header, rows, text_columns=("folder", "made by", "state"))

    def __repr__(self) -> str:
        table = self._build_table()
        return f"checkpoints in {self.path}\n{table.to_text()}" if table.rows else f"no checkpoints in {self.path}"

    def _repr_html_(self) -> str:
        return f"<p>Checkpoints in <code>{html.escape(str(self.path))}</code></p>{self._build_table().to_html()}"


@suggest_arguments
def list_checkpoints(path: str | Path) -> Checkpoints:
    """Return a table of the checkpoints in a folder of `run.save` or ``train(checkpoint_dir=...)``, oldest first.

    It is a list of :class:`~dtkit.Checkpoint`. Its ``broken`` names the problem of each folder that can't be read.
    Raises CheckpointError if the folder does not exist.
    """
    return Checkpoints(path)

"""What an engine can see to be wrong before it begins: with where it is to work, and with a job."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dtkit.engine.data.sources import to_device
from dtkit.errors import ClusterError
from dtkit.strategies.loss import split_batch

if TYPE_CHECKING:
    from pathlib import Path

    from dtkit.engine.data.batches import ShardedBatches
    from dtkit.engine.data.sources import RowSource
    from dtkit.strategies.base import TrainingProgram


def check_batch_norm(
    model: nn.Module, program: TrainingProgram, source: RowSource, batch_source: ShardedBatches
) -> None:
    """Refuse a step that gives some rank one sample, where a BatchNorm1d in training would see a single value.

    Every rank knows all counts, so all refuse together. A BatchNorm1d on (N, C, L) has L values a sample and is let
    through: which of the two a module gets is seen in a forward pass, made only where the question arises.
    """
    modules = {name: m for name, m in model.named_modules() if isinstance(m, nn.BatchNorm1d) and m.training}
    lonely = batch_source.find_step_with_count(1) if modules else None
    if lonely is None or program.loss_fn.training_step is not None:
        return
    flat = _find_modules_with_2d_input(model, modules, source)
    if flat:
        step, rank = lonely
        raise ValueError(
            f"{flat[0]} (BatchNorm1d) can't normalise one sample, and step {step} of each epoch gives rank {rank} "
            f"just one ({batch_source.count_samples(step)} samples by rank). Choose a batch_size that leaves every "
            "rank two samples or none in the last batch, or use LayerNorm or GroupNorm"
        )


def check_sync_batch_norm(
    model: nn.Module, program: TrainingProgram, batch_source: ShardedBatches, device: torch.device
) -> None:
    """Refuse a step that leaves some rank without a sample where statistics are those of all ranks: it would hang."""
    wanted = device.type == "cuda" and getattr(program.strategy, "sync_batch_norm", False)
    names = [name for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]  # noqa: SLF001 - torch names no public base class
    empty = batch_source.find_step_with_count(0) if wanted and names else None
    if empty is not None:
        step, rank = empty
        raise ValueError(
            f"{names[0]} takes its statistics from all ranks, and step {step} of each epoch gives rank {rank} no "
            f"sample ({batch_source.count_samples(step)} samples by rank). Choose another batch_size, or use "
            "DataParallel(sync_batch_norm=False)"
        )


def _find_modules_with_2d_input(model: nn.Module, modules: dict[str, nn.BatchNorm1d], source: RowSource) -> list[str]:
    """The names of those modules that get two-dimensional input."""
    import numpy as np

    flat: list[str] = []

    def make_hook(name: str) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs[0].dim() == 2:
                flat.append(name)

        return hook

    handles = [module.register_forward_pre_hook(make_hook(name)) for name, module in modules.items()]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batch = to_device(source.take(np.arange(min(2, len(source)))), device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(*split_batch(batch)[0])
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return flat


def add_batch_norm_hint(error: ValueError) -> None:
    """Add the remedy to torch's own complaint of a lonely sample, where it could not be seen coming."""
    if "more than 1 value per channel when training" in str(error):
        error.add_note(
            "A batch normalisation in training can't normalise one sample, and this step gave one to this rank. "
            "Choose a batch_size that leaves every rank two samples or none, or use LayerNorm or GroupNorm"
        )


def check_folder_writable(folder: Path) -> None:
    """Raise ClusterError where this engine can't write to the cluster's folder: on another host it may not be there."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ClusterError(
            f"{socket.gethostname()} can't write to {folder}, where the ranks meet. On several hosts that must be a "
            "folder which the notebook and all engines see: dtkit.Cluster.from_client(client, "
            "folder='/shared/dtkit'), say"
        )

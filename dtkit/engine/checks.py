"""Checks of an engine's folder, and of a job before it starts."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from dtkit._util.guard import run_guarded
from dtkit._util.torch_private import BatchNormBase
from dtkit.engine.data.item_checksum import compute_item_checksum
from dtkit.engine.data.sample_seeds import SampleSeeds
from dtkit.engine.data.sources import to_device
from dtkit.errors import ClusterError
from dtkit.strategies.module_backup import undo_module_writes
from dtkit.strategies.module_modes import module_eval_mode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dtkit.engine.comm.process_group import Group
    from dtkit.engine.data.batches import ShardedBatches
    from dtkit.engine.data.iterable import IterableBatches
    from dtkit.engine.data.sources import RowSource
    from dtkit.strategies.base import TrainingProgram
    from dtkit.strategies.loss import Loss


_UNKNOWN = -1  # instead of a checksum
_CPU = torch.device("cpu")


def check_batch_norm(
    model: nn.Module,
    program: TrainingProgram,
    make_sample_batch: Callable[[int], Any],
    batch_source: ShardedBatches | IterableBatches,
    device: torch.device = _CPU,
) -> None:
    """Raise ValueError if a BatchNorm would see a single value of a channel, because some step gives it one sample.

    Micro-batches divide the samples of a rank once more. Where a pipeline pads them, it repeats the one sample, whose
    variance is zero. Every rank knows all counts, so all raise together. A BatchNorm on (N, C, L) has L values for
    each sample, and is accepted. A forward pass shows which case it is. It runs only if some step gives one sample.
    """
    if is_sync_batch_norm(program, device):
        return
    modules = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, BatchNormBase) and not isinstance(m, nn.SyncBatchNorm) and m.training
    }
    num_parts = program.strategy.num_micro_batches
    single = batch_source.find_step_with_count(range(1, 2 * num_parts)) if modules else None
    if single is None or program.loss_fn.training_step is not None:
        return
    flat = _find_modules_with_one_value(program.loss_fn, model, modules, make_sample_batch(2))
    if flat:
        raise ValueError(
            _describe_single_sample(f"{flat[0]} ({type(modules[flat[0]]).__name__})", program, batch_source, single)
        )


def _describe_single_sample(
    module: str, program: TrainingProgram, batch_source: ShardedBatches | IterableBatches, single: tuple[int, int]
) -> str:
    """Return why a module can't train: `single` is the step and the rank (or replica) with too few samples."""
    (step, rank), num_parts = single, program.strategy.num_micro_batches
    counts = batch_source.count_samples(step)
    start = f"{module} can't normalize one sample, and step {step} of each epoch gives"
    is_last = step == batch_source.steps_per_epoch - 1
    drop = "Use drop_last=True, which leaves out the last batch, or choose" if is_last else "Choose"
    if num_parts == 1:
        return (
            f"{start} rank {rank} just one ({counts} samples by rank). {drop} a batch_size that leaves every rank two "
            "samples or none in the last batch, or use LayerNorm or GroupNorm"
        )
    option = "micro_batches" if program.strategy.pipeline_schedule is not None else "accumulate"
    owner = f"replica {rank}" if len(counts) > 1 else "the model"
    return (
        f"{start} {owner} {counts[rank]} samples for {option}={num_parts}, so a micro-batch has just one. {drop} "
        f"another batch_size or a smaller {option}: each micro-batch needs two samples, which makes {2 * num_parts}. "
        "LayerNorm and GroupNorm need one"
    )


def is_sync_batch_norm(program: TrainingProgram, device: torch.device) -> bool:
    """Return whether the strategy makes all batch normalizations take their statistics from all ranks."""
    return device.type == "cuda" and bool(getattr(program.strategy, "sync_batch_norm", False))


def check_same_rows(source: RowSource, seed: int, group: Group) -> None:
    """Raise ValueError on all ranks if they have different rows by the same numbers. A collective.

    A function that loads the data may load only this rank's part. Rows that are random each time are not compared.
    """

    def compute_checksum() -> int:
        samples = [SampleSeeds(seed).take(source, np.array([row]), step=0) for row in (0, len(source) - 1)]
        return compute_item_checksum([len(source), *samples])

    checksums = torch.zeros(group.world_size, dtype=torch.int64)
    # silent: the step that needs a row which raises reports it
    checksums[group.rank] = checksum = run_guarded(compute_checksum, lambda _: _UNKNOWN)
    found = set(group.all_reduce(checksums).tolist())
    if _UNKNOWN not in found and len(found) > 1 and not group.all_reduce_any(compute_checksum() != checksum):
        raise ValueError(
            "ranks have different rows by the same numbers, as if the data were divided already, and dtkit would "
            "divide them once more: most rows would be left out. Let the function that loads the data return all rows "
            "on each rank, or give data=lambda rank, world_size: samples, a stream that isn't divided again"
        )


def check_embeddings(model: nn.Module, num_replicas: int) -> None:
    """Raise ValueError for a trained embedding with `max_norm` that several replicas would change differently."""
    if num_replicas == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and (
            module.max_norm is not None and module.weight.requires_grad
        ):
            raise ValueError(
                f"{name or 'the model'} has max_norm={module.max_norm}: a forward pass rescales the rows that it "
                "looks up. Each rank looks up others, so the copies of the model would differ. Leave max_norm "
                "out and divide in forward, or use strategy=dtkit.Pipeline() or dtkit.TensorParallel()"
            )


def check_sync_batch_norm(
    model: nn.Module, program: TrainingProgram, batch_source: ShardedBatches | IterableBatches, device: torch.device
) -> None:
    """Raise ValueError if SyncBatchNorm would wait for a rank that has no sample in some step."""
    wanted = is_sync_batch_norm(program, device)
    names = [name for name, m in model.named_modules() if isinstance(m, BatchNormBase)]
    empty = batch_source.find_step_with_count({0}) if wanted and names else None
    if empty is not None:
        step, rank = empty
        raise ValueError(
            f"{names[0]} takes its statistics from all ranks, and step {step} of each epoch gives rank {rank} no "
            f"sample ({batch_source.count_samples(step)} samples by rank). Choose another batch_size, or use "
            "DataParallel(sync_batch_norm=False)"
        )


def _find_modules_with_one_value(
    loss: Loss, model: nn.Module, modules: dict[str, BatchNormBase], batch: Any
) -> list[str]:
    """Return the names of the modules whose input has one value of each sample and channel."""
    flat: list[str] = []

    def make_hook(name: str) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs[0].numel() == inputs[0].shape[0] * inputs[0].shape[1]:
                flat.append(name)

        return hook

    handles = [module.register_forward_pre_hook(make_hook(name)) for name, module in modules.items()]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batch = to_device(batch, device)
    try:
        with undo_module_writes(model), module_eval_mode(model):
            loss.split_batch(batch)[0].pass_to(model)
    finally:
        for handle in handles:
            handle.remove()
    return flat


def add_batch_norm_hint(error: Exception) -> None:
    """Add the remedy to torch's error about a single sample, if counts aren't known in advance."""
    if "more than 1 value per channel when training" in str(error):
        error.add_note(
            "A batch normalization in training can't normalize one sample, and this step gave this rank one sample. "
            "Choose a batch_size that leaves every rank, and each micro-batch, two samples or none, or "
            "use LayerNorm or GroupNorm"
        )


def check_folder_writable(folder: Path) -> None:
    """Raise ClusterError if this engine can't write to the cluster's folder. Another host may lack the folder."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ClusterError(
            f"{socket.gethostname()} can't write to {folder}, the cluster's folder. On several hosts the notebook and "
            "all engines must share it, as in dtkit.Cluster.from_client(client, folder='/shared/dtkit')"
        )

"""What an engine can see to be wrong with a job before its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dtkit.engine.sources import to_device
from dtkit.strategies.objective import split

if TYPE_CHECKING:
    from dtkit.engine.data import Stream
    from dtkit.engine.sources import Source
    from dtkit.strategies.objective import Objective


def check_batch_norm(model: nn.Module, objective: Objective, source: Source, stream: Stream, world_size: int) -> None:
    """Refuse a step that gives some rank one sample, where a BatchNorm1d in training would see a single value.

    Every rank knows all counts, so all refuse together. A BatchNorm1d on (N, C, L) has L values a sample and is let
    through: which of the two a module gets is seen in a forward pass, made only where the question arises.
    """
    modules = {name: m for name, m in model.named_modules() if isinstance(m, nn.BatchNorm1d) and m.training}
    lonely = stream.step_with(1) if modules else None
    if lonely is None or objective.step is not None:
        return
    flat = _flat_inputs(model, modules, source)
    if flat:
        step, rank = lonely
        raise ValueError(
            f"{flat[0]} (BatchNorm1d) can't normalise one sample, and step {step} of each epoch gives rank {rank} "
            "just one "
            f"({stream.counts(step)} samples on ranks 0 to {world_size - 1}). Choose a batch_size that leaves every "
            "rank two samples or none in the last batch, or use LayerNorm or GroupNorm"
        )


def _flat_inputs(model: nn.Module, modules: dict[str, nn.BatchNorm1d], source: Source) -> list[str]:
    """The names of those modules that get two-dimensional input."""
    import numpy as np

    flat: list[str] = []

    def noting(name: str) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs[0].dim() == 2:
                flat.append(name)

        return hook

    handles = [module.register_forward_pre_hook(noting(name)) for name, module in modules.items()]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batch = to_device(source.take(np.arange(min(2, len(source)))), device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(*split(batch)[0])
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return flat


def explain(error: ValueError) -> None:
    """Add the remedy to torch's own complaint of a lonely sample, where it could not be seen coming."""
    if "more than 1 value per channel when training" in str(error):
        error.add_note(
            "A batch normalisation in training can't normalise one sample, and this step gave one to this rank. "
            "Choose a batch_size that leaves every rank two samples or none, or use LayerNorm or GroupNorm"
        )

"""A training step without memory: its allocations, by the shapes of its tensors.

torch's fake tensors have shape, dtype and device, but no memory. A step runs on them with the user's code. A tracker
records when an operation creates a storage and when it is freed. So activations are counted, not estimated, also for a
model larger than the machine. (torch's MemTracker works alike.) The tracker also works on real tensors, for models
whose code reads values.

A gradient counts as freed when it is complete: DDP copies it into a bucket, and buckets count as gradients. Allocations
of a backend within one operation are invisible.

The optimizer runs on the meta device. It reads the number of its step, which a fake tensor doesn't have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dtkit._util.dispatch_mode import DispatchMode
from dtkit._util.torch_private import get_storage_id, tree_leaves, tree_map
from dtkit.planning.cost_model import ActivationPeak
from dtkit.strategies.base import make_optimizer
from dtkit.strategies.fake_mode import SharedFakeMode
from dtkit.strategies.meta_copy import copy_to_meta, count_bytes
from dtkit.strategies.module_modes import enter_training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.utils.hooks import RemovableHandle

    from dtkit.strategies.loss import Loss

OPS_WITH_HIDDEN_WORKSPACE = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")
"""Operations of recurrent layers. Their fake results lack the workspace for backward."""


class AllocationTracker(DispatchMode):
    """Mode that counts the bytes of storages that operations create, except for those of known tensors."""

    def __init__(self, known_tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self.has_hidden_workspace = False
        self._tracked_storages: dict[int, object] = {get_storage_id(t.untyped_storage()): t for t in known_tensors}

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and track its results."""
        output = func(*args, **(kwargs or {}))
        self.has_hidden_workspace = (
            self.has_hidden_workspace or func.overloadpacket.__name__ in OPS_WITH_HIDDEN_WORKSPACE
        )
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self._track_storage(leaf.untyped_storage())
        return output

    def _track_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = get_storage_id(storage), storage.nbytes()
        if key in self._tracked_storages:
            return

        def on_freed(_: object) -> None:
            self.live_bytes -= size
            self._tracked_storages.pop(key, None)

        self._tracked_storages[key] = weakref.ref(storage, on_freed)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def find_dense_gradient_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters with gradients of their size, so not those of sparse embeddings."""
    sparse = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and bool(m.sparse)}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in sparse]


# -- allocations of a step -----------------------------------------------------------------------------------


def estimate_peaks(
    model: nn.Module,
    loss_fn: Loss,
    batch: Any,
    row_counts: Sequence[int],
    device: torch.device,
    make_autocast: Callable[[], contextlib.AbstractContextManager[Any]],
) -> list[ActivationPeak]:
    """Run a step on fake tensors for each number of rows; `batch` is a real one of any size."""
    from torch.utils.flop_counter import FlopCounterMode

    length = _get_batch_length(batch)
    loss_fn = dataclasses.replace(loss_fn, check_ignore_index=False)  # this check reads values
    peaks = []
    with SharedFakeMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
        fake_model = enter_training(copy_to_meta(model, device))
        for count in row_counts:
            fake_batch = tree_map(lambda leaf, count=count: _resize_leaf(leaf, length, count, device), batch)
            peaks.append(measure_peak(fake_model, loss_fn, fake_batch, count, make_autocast))
        counter = FlopCounterMode(display=False)  # separate from the tracker, since it decomposes some operations
        with counter:
            measure_peak(fake_model, loss_fn, fake_batch, row_counts[-1], make_autocast)
    peaks[-1] = dataclasses.replace(peaks[-1], flops=counter.get_total_flops())
    return peaks


def measure_peak(
    model: nn.Module,
    loss_fn: Loss,
    batch: Any,
    num_rows: int,
    make_autocast: Callable[[], contextlib.AbstractContextManager[Any]],
) -> ActivationPeak:
    """Return the allocations of forward and backward for one batch, real or fake."""
    inputs = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    with _drop_gradients(model), AllocationTracker([*model.parameters(), *model.buffers(), *inputs]) as tracker:
        with make_autocast():
            loss, _ = loss_fn(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
    return ActivationPeak(
        num_rows, tracker.peak_bytes + count_bytes(inputs), has_hidden_workspace=tracker.has_hidden_workspace
    )


@contextlib.contextmanager
def _drop_gradients(model: nn.Module) -> Iterator[None]:
    def clear_gradient(parameter: torch.Tensor) -> None:
        parameter.grad = None

    trained = [p for p in model.parameters() if p.requires_grad]
    handles = [add_gradient_hook(p, clear_gradient) for p in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def add_gradient_hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call `hook` after each accumulation of the parameter's gradient."""
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call, no-any-return]


def _get_batch_length(batch: Any) -> int:
    """Return the length of the first tensor in a batch."""
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim())
    return next(map(len, tensors), 0)


def _resize_leaf(leaf: Any, batch_length: int, num_rows: int, device: torch.device) -> Any:
    """Return an empty tensor with another number of rows if it has the batch's length; other values unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = (num_rows, *leaf.shape[1:]) if leaf.dim() and len(leaf) == batch_length else leaf.shape
    return torch.empty(shape, dtype=leaf.dtype, device=device)


# -- memory of the optimizer ---------------------------------------------------------------------------------


def estimate_optimizer_bytes(model: nn.Module, factory: Callable[..., Any], device: torch.device) -> tuple[int, int]:
    """Return (bytes of the optimizer's state, temporary bytes of an update), by two updates on the meta device."""
    shapes = copy_to_meta(model)
    optimizer = make_optimizer(factory, shapes)
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = device.type == "cuda"  # torch's default
    for p in find_dense_gradient_parameters(shapes):
        p.grad = torch.empty_like(p)
    return measure_optimizer_bytes(optimizer, list(shapes.parameters()))


def measure_optimizer_bytes(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Run two updates, and return their bytes as in `estimate_optimizer_bytes`. Parameters need gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    with AllocationTracker([*parameters, *gradients]) as tracker:
        optimizer.step()
        state_bytes = count_optimizer_bytes(optimizer)
        optimizer.step()
    return state_bytes, max(0, tracker.peak_bytes - state_bytes)


def count_optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the tensors in an optimizer's state."""
    return count_bytes([leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, torch.Tensor)])

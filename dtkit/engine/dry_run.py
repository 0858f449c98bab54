"""A training step without numbers: what it would allocate, told from shapes alone.

torch's fake tensors have shape, dtype and device, and no memory. A step runs on them as it would run for real, the
user's code included, and a ledger notes each storage that an operation makes and when it goes. So activations are
counted and not estimated, also for a model that is larger than the machine. (torch's MemTracker works in the same
way.) The ledger reads real tensors as well, for models whose code asks for numbers.

In the ledger's books a gradient goes as soon as it is there: DDP copies it into a bucket, and buckets are counted as
gradients. What backends allocate inside of one operation does not show.

The optimiser runs on the meta device: fake tensors would not tell it the number of its step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dtkit.strategies.base import make_optimizer
from dtkit.strategies.meta_copy import copy_to_meta, count_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.utils.hooks import RemovableHandle

    from dtkit.strategies.loss import Loss

OPS_WITH_HIDDEN_WORKSPACE = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")
"""Operations whose fake results are smaller than the real ones: recurrent layers keep a workspace for backward."""


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's modes have no types
    """Bytes of the storages that operations make while it is active; `has_gradient_norm` tensors are not counted."""

    def __init__(self, known_tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self.has_hidden_workspace = False
        self._tracked_storages: dict[int, object] = {t.untyped_storage()._cdata: t for t in known_tensors}  # noqa: SLF001 - a storage's identity

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and note what it made."""
        made = func(*args, **(kwargs or {}))
        self.has_hidden_workspace = (
            self.has_hidden_workspace or func.overloadpacket.__name__ in OPS_WITH_HIDDEN_WORKSPACE
        )
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                self._track_storage(leaf.untyped_storage())
        return made

    def _track_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001 - a storage's identity
        if key in self._tracked_storages:
            return

        def on_freed(_: object) -> None:
            self.live_bytes -= size
            self._tracked_storages.pop(key, None)

        self._tracked_storages[key] = weakref.ref(storage, on_freed)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


# --- models without numbers ---------------------------------------------------------------------------------


def find_dense_gradient_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that get a gradient of their own size: trained, and not in an embedding with sparse ones."""
    sparse = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and bool(m.sparse)}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in sparse]


# --- what a step allocates ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ActivationPeak:
    """Of forward and backward on so many rows, besides parameters and gradients: bytes held at the peak, operations."""

    rows: int
    nbytes: int
    flops: int = 0
    has_hidden_workspace: bool = False
    """Whether there was an operation that does not tell all it allocates."""


def estimate_peaks(
    model: nn.Module,
    loss_fn: Loss,
    batch: Any,
    row_counts: Sequence[int],
    device: torch.device,
    make_autocast: Callable[[], contextlib.AbstractContextManager[Any]],
) -> list[ActivationPeak]:
    """Run a step on fake tensors for each number of `rows`; `batch` is a real one, of any number of rows."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    length = _get_batch_length(batch)
    loss_fn = dataclasses.replace(loss_fn, check_ignore_index=False)  # looking for ignored targets asks for numbers
    found = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
        fake = copy_to_meta(model, device).train()
        for count in row_counts:
            stretched = tree_map(lambda leaf, count=count: _resize_leaf(leaf, length, count, device), batch)
            found.append(measure_peak(fake, loss_fn, stretched, count, make_autocast))
        counter = FlopCounterMode(display=False)  # apart from the ledger: it takes some operations to pieces
        with counter:
            measure_peak(fake, loss_fn, stretched, row_counts[-1], make_autocast)
    found[-1] = dataclasses.replace(found[-1], flops=counter.get_total_flops())
    return found


def measure_peak(
    model: nn.Module,
    loss_fn: Loss,
    batch: Any,
    num_rows: int,
    make_autocast: Callable[[], contextlib.AbstractContextManager[Any]],
) -> ActivationPeak:
    """Forward and backward of one batch, real or fake, under the ledger."""
    inputs = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    with _drop_gradients(model), AllocationTracker([*model.parameters(), *model.buffers(), *inputs]) as ledger:
        with make_autocast():
            loss, _ = loss_fn(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
    return ActivationPeak(
        num_rows, ledger.peak_bytes + count_bytes(inputs), has_hidden_workspace=ledger.has_hidden_workspace
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
    """Call `hook` whenever the parameter's gradient has been accumulated."""
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call, no-any-return]


def _get_batch_length(batch: Any) -> int:
    """Rows of a batch: of the first tensor in it."""
    found = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()), None)
    return 0 if found is None else len(found)


def _resize_leaf(leaf: Any, batch_length: int, num_rows: int, device: torch.device) -> Any:
    """A shape of as many rows, for each tensor that has the batch's length."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = (num_rows, *leaf.shape[1:]) if leaf.dim() and len(leaf) == batch_length else leaf.shape
    return torch.empty(shape, dtype=leaf.dtype, device=device)


# --- what the optimiser keeps -------------------------------------------------------------------------------


def estimate_optimizer_bytes(model: nn.Module, factory: Callable[..., Any], device: torch.device) -> tuple[int, int]:
    """(bytes that the optimiser keeps, bytes that an update holds besides): two updates on the meta device."""
    shapes = copy_to_meta(model)
    optimizer = make_optimizer(factory, shapes)
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = device.type == "cuda"  # what torch chooses where nobody does
    for p in find_dense_gradient_parameters(shapes):
        p.grad = torch.empty_like(p)
    return measure_optimizer_bytes(optimizer, list(shapes.parameters()))


def measure_optimizer_bytes(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Take two steps of an optimiser whose parameters have gradients; see `estimate_optimizer_bytes`."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    with AllocationTracker([*parameters, *gradients]) as ledger:
        optimizer.step()
        kept = count_optimizer_bytes(optimizer)
        optimizer.step()
    return kept, max(0, ledger.peak_bytes - kept)


def count_optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors in an optimiser's state."""
    return count_bytes([leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, torch.Tensor)])

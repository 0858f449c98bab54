"""A model on every rank, with identical parameters and buffers.

The model's code is sent with cloudpickle. Its numbers are sent once to rank 0, which broadcasts them by
torch.distributed. So a larger cluster doesn't take more of the notebook's time.
"""

from __future__ import annotations

import html
import inspect
import sys
import weakref
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting
from dtkit._util.arguments import explain_arguments
from dtkit._util.attributes import suggest_attributes
from dtkit._util.completion import UserNames, hide_constructor, hide_from_completion
from dtkit._util.formatting import name_type
from dtkit._util.table import Table
from dtkit.dashboard.text.progress import show_progress
from dtkit.data.layers import summarize_model
from dtkit.health.frames import classify_file
from dtkit.rpc import pickling
from dtkit.rpc.protocol import ModelOperations, make_call

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.types import ModelSummary


@hide_constructor
@explain_arguments
@suggest_attributes("replicas")
@hide_from_completion("batch_norm_names", "engine_group", "key", "list_modules", "returns_loss", "summary")
class ModelHandle(metaclass=UserNames):
    """One copy of a model per rank, as ``cluster.broadcast(model)`` sent it.

    Pass it to ``cluster.train`` as often as you like: each training begins with the weights that were sent.
    ``checksums`` has each rank's digest of all parameters and buffers; equal digests mean equal bits. It is empty if
    ranks map one file.
    """

    engine_group: EngineGroup
    key: str
    summary: ModelSummary
    batch_norm_names: list[str]
    returns_loss: bool

    def __init__(
        self,
        engine_group: EngineGroup,
        key: str,
        packed: pickling.PackedObject,
        model: torch.nn.Module,
        checksums: Sequence[str],
    ) -> None:
        self.engine_group, self.key = engine_group, key
        self.checksums = tuple(checksums)
        """Digest of all parameters and buffers, by rank."""
        self.name: str = getattr(model, "model_name", type(model).__name__)
        """The model's class, or the name that it was given."""
        self.num_parameters = sum(p.numel() for p in model.parameters())
        """Number of parameters."""
        self.num_trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        """Number of parameters that need gradients."""
        self.nbytes = sum(packed.sizes)
        """Size of parameters and buffers, in bytes."""
        self.summary = summarize_model(model)
        self.batch_norm_names = find_batch_norms(model)
        self.returns_loss = returns_loss(model)
        self._packed = packed
        weakref.finalize(self, engine_group.free_later, key)

    @property
    def is_identical(self) -> bool:
        """Whether all ranks hold the same bits."""
        return len(set(self.checksums)) == 1

    def build_with_state(self, state: Mapping[str, Any]) -> torch.nn.Module:
        """Return a new model in this process, with the parameters and buffers of `state`."""
        model = self.build_model()
        model.load_state_dict(state)
        return model

    def build_model(self) -> torch.nn.Module:
        """Return a new model in this process, as it was when it was sent."""
        model: torch.nn.Module = pickling.unpack_object(
            self._packed.header, [bytearray(b) for b in self._packed.buffers]
        )
        return model

    def list_modules(self) -> set[str]:
        """Return the names of the modules that the model's code needs."""
        return pickling.list_modules(self._packed.header, self._packed.buffers)

    def _format_summary(self) -> str:
        same = "identical" if self.is_identical else "NOT identical"
        size = f"{self.num_parameters:,} parameters, {formatting.format_bytes(self.nbytes)}"
        return f"{self.name} on {formatting.format_count(len(self.checksums), 'node')}, {size}, {same}"

    def __repr__(self) -> str:
        return "\n".join([self._format_summary(), *(f"  node {r}  {c}" for r, c in enumerate(self.checksums))])

    def _repr_html_(self) -> str:
        rows = [(str(rank), checksum) for rank, checksum in enumerate(self.checksums)]
        table = Table(("node", "checksum"), rows, {"checksum"})
        return f"<p>{html.escape(self._format_summary())}</p>{table.to_html()}"


def broadcast(engine_group: EngineGroup, model: Any, *, by_shared_file: bool = False) -> ModelHandle:
    """See :meth:`dtkit.Cluster.broadcast`.

    With `by_shared_file`, the engines of this host hold no copies, and map one file when they need it. That is for
    strategies in which a rank takes only a part of the model.
    """
    check_model(model)
    model = _copy_to_cpu(model)
    key = engine_group.make_key("model")
    packed = engine_group.uploads.pack(model, name="model")
    with show_progress(describe_sending(model, packed.nbytes)):
        if by_shared_file and engine_group.membership.is_single_host:
            payload = engine_group.uploads.upload(packed)
            engine_group.call_all(make_call(ModelOperations.store_model, key=key, payload=payload))
            handle = ModelHandle(engine_group, key, packed, model, ())
            weakref.finalize(
                handle, engine_group.uploads.discard, payload
            ).atexit = False  # the engines may outlive this process
            return handle
        checksums = engine_group.call_all_with_payload(
            lambda payload: make_call(ModelOperations.receive_model, key=key, payload=payload), packed, broadcast=True
        )
    return ModelHandle(engine_group, key, packed, model, checksums)


def describe_sending(model: Any, num_bytes: int) -> str:
    """Return the text of the progress line. It names a library that engines must import, which takes longer than
    sending.
    """
    sending = f"sending {type(model).__name__}, {formatting.format_bytes(num_bytes)}"
    library = next(filter(None, map(_find_library, type(model).__mro__)), None)
    return f"{sending}, to the engines, which import {library} for it" if library else sending


def _find_library(kind: type) -> str | None:
    """Return the library that defines a class; None for the user's own modules, which are sent, and for torch."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    library = kind.__module__.partition(".")[0]
    return library if file and classify_file(file) == "library" and library not in _LOADED_LIBRARIES else None


_LOADED_LIBRARIES = ("torch", "typing", "abc", "__main__")  # engines have imported them, or need no import
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")  # of torch


def check_model(model: Any) -> None:
    """Raise TypeError or ValueError unless the model is an nn.Module whose numbers exist."""
    import torch

    from dtkit._util.torch_private import get_backward_hooks, get_post_accumulate_hooks

    if isinstance(model, type) and issubclass(model, torch.nn.Module):
        raise TypeError(f"model is the class {model.__name__}; give an instance: {model.__name__}(...)")
    if any(kind.__module__.partition(".")[0] == "keras" for kind in type(model).__mro__):
        # with Keras's torch backend it is a torch module, too, but its pickle needs Keras's own registry
        raise TypeError(
            f"model is {model.name} of Keras, which only cluster.train takes, as it is. It sends the model with its "
            "loss and optimizer"
        )
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {name_type(model)}; it must be a torch.nn.Module. Build it in the notebook")
    if type(model).__name__ in _WRAPPERS and type(model).__module__.startswith("torch."):
        raise TypeError(
            f"model is wrapped in {type(model).__name__}, and dtkit distributes it by itself. Give what is inside "
            "(model.module), and choose how by strategy=, as in strategy=dtkit.DataParallel()"
        )
    for name, tensor in _list_tensors(model):
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"{name} of the model has no shape yet (a lazy module), so ranks could not agree on it. Run one batch "
                "through the model first"
            )
        if tensor.is_meta:
            raise ValueError(
                f"{name} of the model is on the meta device and has no numbers; build the model on the CPU"
            )
        if get_backward_hooks(tensor) or get_post_accumulate_hooks(tensor):
            raise ValueError(
                f"{name} has a hook on its gradient (register_hook or register_post_accumulate_grad_hook), which "
                "pickling drops, so the engines would train without it. Remove it, and register it on "
                "the engines' model, with strategy=dtkit.DataParallel(): optimizer=make_optimizer, a function of "
                "`model` that registers the hook and returns the optimizer"
            )


def check_has_loss(model: Any, loss: Any, training_step: Any) -> None:
    """Raise ValueError unless there is exactly one loss: an argument, or the model's own."""
    if (loss is None) != (training_step is None):
        return
    if loss is None and (model.returns_loss if isinstance(model, ModelHandle) else returns_loss(model)):
        return
    name = model.name if isinstance(model, ModelHandle) else type(model).__name__
    raise ValueError(
        "give either loss, a function of (output, target), or training_step, a function of (model, batch) that "
        f"returns the loss; you gave {'neither' if loss is None else 'both'}"
        + (f", and {name} doesn't return its own loss: its forward takes no labels" if loss is None else "")
    )


def check_is_not_manual(training_step: Any) -> None:
    """Raise ValueError if a training step takes the optimizers, since such a step can't be measured on a copy."""
    from dtkit.strategies.loss import takes_optimizers

    if takes_optimizers(training_step):
        raise ValueError(
            "training_step takes (model, batch, optimizers) and updates by itself, so it can't be tried without "
            "training. Give a training_step of (model, batch) that returns the sum of its losses"
        )


def returns_loss(model: torch.nn.Module) -> bool:
    """Return whether a model computes its own loss: its forward takes ``labels``. Wrappers are looked through."""
    import torch

    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.name == "labels" for p in parameters):
        return True
    unwrap = getattr(model, "get_base_model", None)  # of PEFT, whose own forward takes any arguments
    wrapped = None if unwrap is None else unwrap()
    return isinstance(wrapped, torch.nn.Module) and wrapped is not model and returns_loss(wrapped)


def find_batch_norms(model: torch.nn.Module) -> list[str]:
    """Return the names of modules that normalize with statistics of the batch."""
    from dtkit._util.torch_private import BatchNormBase

    names = getattr(model, "batch_norm_names", None)  # of a model whose layers are those of another framework
    if names is not None:
        return list(names)
    return [
        f"{name or 'the model'} ({type(m).__name__})"
        for name, m in model.named_modules()
        if isinstance(m, BatchNormBase)
    ]


def _list_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _copy_to_cpu(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model, or a copy on the CPU if its numbers are on a device."""
    if all(tensor.device.type == "cpu" for _, tensor in _list_tensors(model)):
        return model
    import copy

    return copy.deepcopy(model).cpu()

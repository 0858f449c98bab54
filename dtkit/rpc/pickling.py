"""Pickling for engines: code in one small header, large data in buffers.

An object becomes a *header* and a list of *buffers*. The header has cloudpickle's bytes: the notebook's classes and
functions by value, everything importable by reference. It goes through the controller. Each block of numbers is a
buffer, which is sent in the fastest way (see :mod:`dtkit.rpc.shared_memory`). :func:`unpack_object` builds arrays and
tensors on top of the buffers without a copy.

numpy puts its arrays into buffers by itself (pickle protocol 5). torch does not, so this module does it for tensors.
Identity survives: a tied parameter is one object again, and tensors that share memory share it on the engine too.

Modules that an engine can't import are pickled by value (see :mod:`dtkit.rpc.user_modules`). cloudpickle's registry of
such modules is global, so they are registered only during one dump, under a lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import pickle
import sys
import threading
import types
from typing import TYPE_CHECKING, Any, NoReturn

import cloudpickle
import numpy as np

from dtkit._util.garbage import pause_gc
from dtkit._util.guard import run_guarded
from dtkit.rpc.output_recorders import reduce_collector, register_recorders
from dtkit.rpc.parametrized_modules import reduce_parametrized
from dtkit.rpc.pickle_errors import PICKLE_PROTOCOL, raise_serialization_error
from dtkit.rpc.unpickling import ClassKeepingUnpickler, unpickle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

# locks: while an object is pickled
_REGISTRY_LOCK = threading.RLock()


@dataclasses.dataclass(frozen=True, eq=False)
class PackedObject:
    """Pickled object. Buffers are views of the sender's memory: send them before it changes."""

    header: bytes
    buffers: tuple[memoryview, ...]
    """One-dimensional, contiguous bytes."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each buffer, in order."""
        return tuple(buffer.nbytes for buffer in self.buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of header and buffers."""
        return len(self.header) + sum(self.sizes)


def pack_object(obj: Any, *, by_value: Iterable[types.ModuleType] = (), name: str | None = None) -> PackedObject:
    """Pickle `obj` into a header and buffers.

    `by_value`: modules whose functions and classes are sent as code, because the engine can't import them. `name`: the
    caller's name of the object, for error messages; by default its type or function name. Raises SerializationError,
    which names the smallest part that can't be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    header = _dump_or_refuse(obj, by_value, name, buffers.append)
    return PackedObject(header, tuple(buffer.raw() for buffer in buffers))


def unpack_object(header: bytes | memoryview, buffers: Sequence[Any] = ()) -> Any:
    """Build the object on top of `buffers`, which it keeps alive.

    Arrays and tensors alias writable buffers. On a read-only buffer an array is read-only, and a tensor is a copy,
    because torch has no read-only tensors.
    """
    with pause_gc():
        # unpickles: sent by an engine or the notebook, in a message or a file that it names
        obj = unpickle(header, buffers)
    register_recorders()
    return obj


def dumps(obj: Any, by_value: Iterable[types.ModuleType] = (), *, name: str | None = None) -> bytes:
    """Pickle a small object into one string of bytes. Raises as :func:`pack_object` does."""
    return _dump_or_refuse(obj, by_value, name, None)


def loads(data: bytes | memoryview) -> Any:
    """Load what :func:`dumps` returned."""
    with pause_gc():
        # unpickles: passed by the caller; each caller is marked
        obj = unpickle(data)
    register_recorders()
    return obj


class _ModuleFinder(ClassKeepingUnpickler):
    """Unpickler that records the modules that an object needs."""

    modules: set[str]

    def find_class(self, module: str, name: str) -> Any:
        self.modules.add(module)
        member = super().find_class(module, name)
        return self._import_recorded if member is cloudpickle.cloudpickle.subimport else member

    def _import_recorded(self, module: str) -> types.ModuleType:
        self.modules.add(module)
        return importlib.import_module(module)


def list_modules(header: bytes, buffers: Sequence[Any] = ()) -> set[str]:
    """Return the names of the modules that an object, which this process has pickled, needs to be unpickled."""
    # The caller has pickled it itself, so this runs no code of others.
    finder = _ModuleFinder(io.BytesIO(header), buffers=buffers)
    finder.modules = set()
    finder.load()
    return finder.modules


def _dump_or_refuse(
    obj: Any,
    by_value: Iterable[types.ModuleType],
    name: str | None,
    buffer_callback: Callable[[pickle.PickleBuffer], Any] | None,
) -> bytes:
    def refuse(error: Exception) -> NoReturn:
        raise_serialization_error(obj, name, error, _try_pickle)

    with _register_by_value(by_value):  # a user's __reduce__ may raise anything
        return run_guarded(lambda: _pickle_to_bytes(obj, buffer_callback), refuse)


def _try_pickle(obj: Any) -> None:
    _pickle_to_bytes(obj, lambda _: None)


def _pickle_to_bytes(obj: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None) -> bytes:
    # Each collection would walk over all objects made so far, of which none is garbage.
    with io.BytesIO() as file, pause_gc():
        _Pickler(file, buffer_callback).dump(obj)
        return file.getvalue()


@contextlib.contextmanager
def _register_by_value(modules: Iterable[types.ModuleType]) -> Iterator[None]:
    """Let cloudpickle send `modules` by value within the context. The user's own registrations stay."""
    with _REGISTRY_LOCK:
        before = cloudpickle.list_registry_pickle_by_value()
        added = {module.__name__: module for module in modules if module.__name__ not in before}
        try:
            for module in added.values():
                cloudpickle.register_pickle_by_value(module)
            yield
        finally:
            for name in added.keys() & cloudpickle.list_registry_pickle_by_value():
                cloudpickle.unregister_pickle_by_value(added[name])


class _TensorBlock:
    """Memory that is sent once, even if several tensors view it. It unpickles to the buffer itself."""

    def __init__(self, source: torch.Tensor, data: np.ndarray) -> None:
        self._source = source  # keeps the address from being reused during the dump
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        # A memoryview of a view would crash Python 3.11's garbage collector.
        return _return_buffer, (pickle.PickleBuffer(self._data),)  # type: ignore[arg-type]  # numpy arrays are buffers


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle, with tensors and strided arrays in buffers."""

    def __init__(self, file: io.BytesIO, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None) -> None:
        super().__init__(file, protocol=PICKLE_PROTOCOL, buffer_callback=buffer_callback)
        # If torch was never imported, no object can hold a tensor. Importing it would take two seconds.
        self._torch = sys.modules.get("torch")
        self._blocks: dict[tuple[Any, ...], _TensorBlock] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Return the reduce value of `obj`; cloudpickle decides for most kinds."""
        kind = type(obj)
        if isinstance(obj, types.ModuleType) and sys.modules.get(obj.__name__) is obj and kind is not types.ModuleType:
            # cloudpickle pickles the contents of modules of a subclass, such as torch.distributed.config
            return importlib.import_module, (obj.__name__,)
        if kind is np.ndarray:
            return _reduce_array(obj)
        if kind.__name__ == "CompileableContextVar" and (reduced := reduce_collector(obj)) is not None:
            return reduced
        if kind.__name__.startswith("Parametrized") and (reduced := reduce_parametrized(obj)) is not None:
            return reduced
        if self._torch is not None and kind is self._torch.Tensor and _is_plain_tensor(obj, self._torch):
            return self._reduce_tensor(obj)
        return super().reducer_override(obj)

    def _reduce_tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        order = _get_dense_order(tensor)
        shape = tuple(tensor.shape)
        args = (str(tensor.dtype).removeprefix("torch."), shape, order, tensor.requires_grad)
        return _rebuild_tensor, (self._get_block(tensor, order) if tensor.numel() else None, *args)

    def _get_block(self, tensor: torch.Tensor, order: tuple[int, ...] | None) -> _TensorBlock:
        look = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        key = (tensor.device, tensor.data_ptr(), *look)
        if key not in self._blocks:
            self._blocks[key] = _TensorBlock(tensor, _get_tensor_bytes(tensor, order))
        return self._blocks[key]


def _reduce_array(array: np.ndarray) -> Any:
    """Pickle a strided array as a contiguous one, the only kind that numpy puts into a buffer."""
    if array.flags.forc or array.dtype.hasobject:
        return NotImplemented
    return np.ascontiguousarray(array).__reduce_ex__(PICKLE_PROTOCOL)


def _is_plain_tensor(tensor: torch.Tensor, torch: types.ModuleType) -> bool:
    """Return whether a tensor is only its numbers; torch pickles sparse, quantized, meta tensors and so on."""
    from dtkit._util.torch_private import get_backward_hooks

    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.device.type != "meta"
        and not tensor.__dict__
        and not get_backward_hooks(tensor)
    )


def _get_dense_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions from outermost to innermost in memory; None for the usual order, or with gaps.

    A channels-last or transposed weight keeps its layout, on which its speed and its last bit depend.
    """
    if tensor.is_contiguous():
        return None
    stride = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -stride[dim]))
    return order if tensor.permute(order).is_contiguous() else None


def _get_tensor_bytes(tensor: torch.Tensor, order: tuple[int, ...] | None) -> np.ndarray:
    """Return the numbers as bytes, in memory order. Copies only from a device, or if there are gaps."""
    import torch

    flat = tensor.detach().resolve_conj().resolve_neg()
    if order is not None:
        flat = flat.permute(order)
    data: np.ndarray = flat.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return data


def _return_buffer(buffer: Any) -> Any:
    """Return the object to which a :class:`_TensorBlock` unpickles."""
    return buffer


def _rebuild_tensor(
    buffer: Any,
    dtype: str,
    shape: tuple[int, ...],
    order: tuple[int, ...] | None,
    requires_grad: bool,  # noqa: FBT001 - pickle calls by position
) -> torch.Tensor:
    """Build a tensor on `buffer`, which is None without elements; `order` as in :func:`_get_dense_order`."""
    import torch

    kind = getattr(torch, dtype)
    if buffer is None:
        flat = torch.empty(0, dtype=kind)
    else:
        view = memoryview(buffer)
        flat = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=kind)
    if order is None:
        tensor = flat.view(shape)
    else:
        inverse = sorted(range(len(order)), key=order.__getitem__)
        tensor = flat.view([shape[dim] for dim in order]).permute(inverse)
    return tensor.requires_grad_(requires_grad)

"""How objects cross from the notebook to an engine: the code in band, the bulk beside it.

An object becomes a *skeleton* (cloudpickle bytes: classes and functions of the notebook by value, everything
importable by reference) and a list of *buffers*, one for each block of numbers in it. The skeleton is small
and goes through the controller; the buffers go wherever is fastest (see :mod:`dtkit.rpc.shared_memory`), and
:func:`unpack_object` builds arrays and tensors on top of them without a copy.

numpy puts its arrays out of band by itself (pickle protocol 5). torch does not, so tensors are taken over
here. Identity survives: pickle's memo makes a tied parameter one object again, and two tensors that look at
the same memory in the same way do so on the engine too.

Modules that an engine can't import travel by value (:func:`find_user_modules`), registered with cloudpickle for
the time of one dump and under a lock, since that registry belongs to the whole process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import pickle
import site
import sys
import sysconfig
import threading
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import cloudpickle
import numpy as np

from dtkit._util.guard import return_error, run_guarded
from dtkit.errors import SerializationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

_PICKLE_PROTOCOL = 5
# locks: while an object is pickled
_REGISTRY_LOCK = threading.RLock()


@dataclasses.dataclass(frozen=True, eq=False)
class PackedObject:
    """An object ready to travel. Buffers are views of the sender's memory: send them before it changes."""

    header: bytes
    buffers: tuple[memoryview, ...]
    """C-contiguous, one-dimensional, of bytes."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each buffer."""
        return tuple(buffer.nbytes for buffer in self.buffers)

    @property
    def nbytes(self) -> int:
        """Bytes that travel in all, skeleton and buffers."""
        return len(self.header) + sum(self.sizes)


def pack_object(obj: Any, *, by_value: Iterable[types.ModuleType] = (), name: str | None = None) -> PackedObject:
    """Take `obj` apart into a skeleton and out-of-band buffers.

    `by_value`: modules whose functions and classes travel as code, since the engine can't import them.
    `name`: what the caller calls the object, for error messages; its type or function name by default.
    Raises :class:`~dtkit.errors.SerializationError`, naming the smallest part that can't be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    skeleton = _dump_or_refuse(obj, by_value, name, buffers.append)
    return PackedObject(skeleton, tuple(buffer.raw() for buffer in buffers))


def unpack_object(header: bytes | memoryview, buffers: Sequence[Any] = ()) -> Any:
    """Build the object on top of `buffers`, which it keeps alive.

    Arrays and tensors alias writable buffers. Over a read-only buffer an array is read-only, and a tensor,
    for which torch knows no such state, is a copy.
    """
    # unpickles: sent by an engine or the notebook, in a message or a file that it names
    return pickle.loads(header, buffers=buffers)


def dumps(obj: Any, by_value: Iterable[types.ModuleType] = (), *, name: str | None = None) -> bytes:
    """Everything in one string of bytes: for small things. Raises as :func:`pack` does."""
    return _dump_or_refuse(obj, by_value, name, None)


def loads(data: bytes | memoryview) -> Any:
    """Undo :func:`dumps`."""
    # unpickles: given by the caller, each of which is marked
    return pickle.loads(data)


def _dump_or_refuse(
    obj: Any,
    by_value: Iterable[types.ModuleType],
    name: str | None,
    buffer_callback: Callable[[pickle.PickleBuffer], Any] | None,
) -> bytes:
    def refuse(error: Exception) -> NoReturn:
        path, cause = _find_smallest_failing_part(obj, name or _get_default_name(obj), error)
        raise SerializationError(
            f"{path}: {_get_first_line(cause)}. What is sent to an engine must be picklable. Create it on the "
            f"engine (in the function, or at the first forward), or leave it out of the object's state with "
            f"__getstate__."
        ) from cause

    with _register_by_value(by_value):  # a user's __reduce__ may raise anything
        return run_guarded(lambda: _pickle_to_bytes(obj, buffer_callback), refuse)


def _pickle_to_bytes(obj: Any, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file, buffer_callback).dump(obj)
        return file.getvalue()


@contextlib.contextmanager
def _register_by_value(modules: Iterable[types.ModuleType]) -> Iterator[None]:
    """Have cloudpickle send `incomparable_reasons` by value meanwhile; what the user registered stays registered."""
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
    """Memory that is sent once, however many tensors look at it; unpickles to the buffer itself."""

    def __init__(self, source: torch.Tensor, data: np.ndarray) -> None:
        self._source = source  # keeps the address from being used again during the dump
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        # Not of a memoryview: clearing one that is viewed itself crashes the garbage collector (seen with Python 3.11).
        return _return_buffer, (pickle.PickleBuffer(self._data),)  # type: ignore[arg-type]  # numpy arrays are buffers


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle, with tensors and strided arrays out of band."""

    def __init__(self, file: io.BytesIO, buffer_callback: Callable[[pickle.PickleBuffer], Any] | None) -> None:
        super().__init__(file, protocol=_PICKLE_PROTOCOL, buffer_callback=buffer_callback)
        # Where torch was never imported no object can hold a tensor, and importing it takes two seconds.
        self._torch = sys.modules.get("torch")
        self._blocks: dict[tuple[Any, ...], _TensorBlock] = {}

    def reducer_override(self, obj: Any) -> Any:
        """How `obj` is taken apart; cloudpickle decides for all but plain tensors and strided arrays."""
        kind = type(obj)
        if kind is np.ndarray:
            return _reduce_array(obj)
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
    """Have a strided array sent as a contiguous one, the only kind that numpy sends out of band."""
    if array.flags.forc or array.dtype.hasobject:
        return NotImplemented
    return np.ascontiguousarray(array).__reduce_ex__(_PICKLE_PROTOCOL)


def _is_plain_tensor(tensor: torch.Tensor, torch: types.ModuleType) -> bool:
    """Whether the tensor is its numbers and nothing else; sparse, quantised, meta and so on are torch's."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and tensor.device.type != "meta"
        and not tensor.__dict__
        and not tensor._backward_hooks  # noqa: SLF001 - the one place where torch keeps them
    )


def _get_dense_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions from outermost to innermost in memory, where there are no gaps; None for the usual
    order.

    So a channels-last or transposed weight keeps its layout, on which speed and the last bit depend.
    """
    if tensor.is_contiguous():
        return None
    stride = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -stride[dim]))
    return order if tensor.permute(order).is_contiguous() else None


def _get_tensor_bytes(tensor: torch.Tensor, order: tuple[int, ...] | None) -> np.ndarray:
    """The numbers as bytes, in memory order; a copy only from a device, or where there are gaps."""
    import torch

    flat = tensor.detach().resolve_conj().resolve_neg()
    if order is not None:
        flat = flat.permute(order)
    data: np.ndarray = flat.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return data


def _return_buffer(buffer: Any) -> Any:
    """What a :class:`_TensorBlock` becomes."""
    return buffer


def _rebuild_tensor(
    buffer: Any,
    dtype: str,
    shape: tuple[int, ...],
    order: tuple[int, ...] | None,
    requires_grad: bool,  # noqa: FBT001 - pickle calls by position
) -> torch.Tensor:
    """Build a tensor on `buffer` (None for one without elements); `order` as in :func:`_get_dense_order`."""
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


# --- which part can't be sent ----------------------------------------------------------------------------


def _get_default_name(obj: Any) -> str:
    named = isinstance(obj, type | types.FunctionType | types.MethodType | types.ModuleType)
    return str(obj.__name__) if named else type(obj).__name__


def _get_first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


def _find_pickle_error(obj: Any) -> Exception | None:
    """Why `obj` alone can't be pickled, or None."""

    def fail() -> None:
        _pickle_to_bytes(obj, lambda _: None)

    return run_guarded(fail, return_error)


def _find_smallest_failing_part(obj: Any, path: str, error: Exception) -> tuple[str, Exception]:
    """Follow the parts that fail down to one that fails by itself; its path and its own error."""
    seen = {id(obj)}
    while not isinstance(error.__cause__, RecursionError):  # of a nest that is too deep no part is to blame
        for step, part in _iterate_parts(obj):
            if id(part) in seen:
                continue
            seen.add(id(part))
            cause = _find_pickle_error(part)
            if cause is not None:
                obj, path, error = part, path + step, cause
                break
        else:
            break
    return path, error


def _iterate_parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """The parts that pickle would visit below `obj`, each with how one writes it after the object's name."""
    if isinstance(obj, types.FunctionType):
        yield from _iterate_function_parts(obj)
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
        yield ".__func__", obj.__func__
    elif isinstance(obj, functools.partial):
        yield from ((f".{key}", getattr(obj, key)) for key in ("func", "args", "keywords"))
    elif isinstance(obj, type | types.ModuleType):
        yield from ((f".{key}", value) for key, value in list(vars(obj).items()) if key not in _SKIPPED_ATTRIBUTES)
    elif type(obj) is dict:
        yield from ((f"[{key!r}]", value) for key, value in obj.items())
        yield from ((f" key {key!r}", key) for key in obj)
    elif type(obj) in (list, tuple, set, frozenset):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    else:
        yield from _iterate_object_parts(obj)


_SKIPPED_ATTRIBUTES = frozenset({"__dict__", "__weakref__", "__builtins__", "__loader__", "__spec__"})


def _iterate_function_parts(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield f" (closure variable {name!r})", cell.cell_contents
    for name in sorted(_collect_names(function.__code__)):
        if name in function.__globals__:
            yield f" (global variable {name!r})", function.__globals__[name]
    yield from ((f" (default {i})", value) for i, value in enumerate(function.__defaults__ or ()))
    yield from ((f" (default {key!r})", value) for key, value in (function.__kwdefaults__ or {}).items())
    yield from ((f".{key}", value) for key, value in vars(function).items())


def _collect_names(code: types.CodeType) -> set[str]:
    """Names that `code` and the code nested in it look up."""
    nested = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*(_collect_names(inner) for inner in nested))


def _iterate_object_parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """What the object itself gives to pickle, so that a __getstate__ is respected."""
    # Where this fails it is this object that can't be sent: the caller holds its error.
    # silent: the caller has the error and looks for the part that can't be sent
    reduced = run_guarded(lambda: obj.__reduce_ex__(_PICKLE_PROTOCOL), lambda _: None)
    if not isinstance(reduced, tuple):
        return
    _, args, state, items, pairs = (*reduced, None, None, None, None)[:5]
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            yield from _iterate_attributes(part)
        elif part is not None:
            yield " (its state)", part
    yield from ((f"[{index}]", value) for index, value in enumerate(items or ()))
    yield from ((f"[{key!r}]", value) for key, value in pairs or ())
    for index, value in enumerate(args or ()):
        yield (".__class__" if value is type(obj) else f" (argument {index} of its reduce)"), value


def _iterate_attributes(state: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Attributes by name; a module's children, parameters and buffers as the user reaches them."""
    for key, value in state.items():
        if key in ("_modules", "_parameters", "_buffers") and isinstance(value, dict):
            yield from ((f"[{name}]" if name.isdigit() else f".{name}", part) for name, part in value.items())
        else:
            yield f".{key}", value


# --- which modules must travel by value ------------------------------------------------------------------


def find_user_modules(engine_sys_path: Sequence[str]) -> list[types.ModuleType]:
    """Modules of this process that an engine with `engine_path` as its sys.path can't import, or not as they
    are now.

    Those are the modules in Python source that lie under the current folder (beside the notebook: edited
    while engines live) or that were imported from a folder which the engine doesn't search. Never dtkit, the
    standard library, installed packages or `__main__` (which cloudpickle sends by value anyway).
    """
    here = _make_path_prefix(str(Path.cwd()))
    searched = {_resolve_path(entry) for entry in engine_sys_path if entry}
    found = []
    for name, module in sys.modules.copy().items():
        if not isinstance(module, types.ModuleType) or module.__name__ != name:
            continue
        file = _find_source(module)
        if file is None or name.partition(".")[0] in _NEVER_BY_VALUE:
            continue
        place = _locate_module(name, file)
        if place and (place.file.startswith(here) or place.search_folder not in searched):
            found.append(module)
    return found


# The site's own modules may lie outside of the installation (Debian links one to /etc); each Python runs its own.
_NEVER_BY_VALUE = frozenset({"dtkit", "__main__", "__mp_main__", "sitecustomize", "usercustomize"})


def _find_source(module: types.ModuleType) -> str | None:
    """The Python file of a module, or the folder of a package that has no __init__.py; None for others."""
    file = vars(module).get("__file__")
    if isinstance(file, str):
        return file if file.endswith(".py") else None
    folders = [folder for folder in vars(module).get("__path__") or () if isinstance(folder, str)]
    return folders[0] if folders else None


@dataclasses.dataclass(frozen=True)
class _ModuleLocation:
    file: str
    search_folder: str
    """The folder that is searched when the module is imported by its name."""


@functools.cache
def _locate_module(name: str, file: str) -> _ModuleLocation | None:
    """Where a module lies, or None for one that belongs to an installation."""
    file = _resolve_path(file)
    if file.startswith(_list_installation_prefixes()):
        return None
    stem = file.removesuffix(".py").removesuffix(os.sep + "__init__")
    tail = os.sep + name.replace(".", os.sep)
    root = stem.removesuffix(tail) if stem.endswith(tail) else str(Path(file).parent)
    return _ModuleLocation(file, root or os.sep)


@functools.cache
def _list_installation_prefixes() -> tuple[str, ...]:
    """Folders of the standard library and of installed packages.

    Not simply sys.prefix: in a container Python's prefix is /usr, and people work in /usr/src/app.
    """
    paths = sysconfig.get_paths()
    folders = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    folders += [sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix})]
    return tuple(dict.fromkeys(_make_path_prefix(_resolve_path(folder)) for folder in folders))


def _resolve_path(path: str) -> str:
    return os.path.realpath(path)


def _make_path_prefix(folder: str) -> str:
    """The prefix that every path below `folder` has."""
    return _resolve_path(folder).rstrip(os.sep) + os.sep

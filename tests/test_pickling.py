"""Pickling of objects that the notebook sends to an engine."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import pickle
import subprocess
import sys
import sysconfig
import threading
import types
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

from dtkit.errors import SerializationError
from dtkit.rpc import pickling, shared_memory, user_modules

ROOT = str(Path(__file__).resolve().parent.parent)


def arrive(packed: pickling.PackedObject, kind: type = bytearray):
    """The object as an engine unpacks it; `kind` is bytearray for writable buffers, bytes for read-only ones."""
    return pickling.unpack_object(packed.header, [kind(buffer) for buffer in packed.buffers])


def python(code: str, *args: str, path: str = ROOT, cwd: Path | None = None, data: bytes = b"") -> bytes:
    """The standard output of `code` in a fresh process that searches `path` for modules."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *args],
        env={**os.environ, "PYTHONPATH": path},
        cwd=cwd,
        input=data,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    return ran.stdout


# --- classes ------------------------------------------------------------------------------------------------

seen: list[str] = []


def test_listing_modules_and_loading_leave_classes_of_this_process_as_they_are() -> None:
    class Spy:
        calls: list[str] = []  # noqa: RUF012 - shared on purpose

        def __call__(self) -> None:
            seen.append("global")
            self.calls.append("class")

    attributes = dict(vars(Spy))
    data = pickling.dumps(Spy())
    pickling.list_modules(data)
    loaded = pickling.loads(data)
    assert type(loaded) is Spy
    assert [name for name, value in attributes.items() if vars(Spy)[name] is not value] == []
    seen.clear()
    loaded()
    assert (seen, Spy.calls) == (["global"], ["class"])


def test_a_class_of_another_process_is_updated() -> None:
    code = (
        "import sys; from dtkit.rpc import pickling\n"
        "class Net:\n    scale = 1\n"
        "first = pickling.dumps(Net()); Net.scale = 2; second = pickling.dumps(Net())\n"
        "sys.stdout.buffer.write(len(first).to_bytes(4, 'big') + first + second)"
    )
    data = python(code)
    size = int.from_bytes(data[:4], "big")
    first = pickling.loads(data[4 : 4 + size])
    assert first.scale == 1
    assert pickling.loads(data[4 + size :]).scale == first.scale == 2


# --- buffers ------------------------------------------------------------------------------------------------


def test_large_data_is_sent_out_of_band_without_copies_on_either_side() -> None:
    array, tensor = np.arange(100_000.0), torch.arange(100_000.0)
    packed = pickling.pack_object({"array": array, "tensor": tensor, "name": "x"})
    assert packed.sizes == (800_000, 400_000)
    assert len(packed.header) < 1000
    assert packed.nbytes == len(packed.header) + 1_200_000
    for buffer in packed.buffers:
        assert (buffer.format, buffer.ndim, buffer.c_contiguous) == ("B", 1, True)
    array[0] = tensor[0] = 7  # seen through the views: no copy here
    assert np.frombuffer(packed.buffers[0])[0] == np.frombuffer(packed.buffers[1], np.float32)[0] == 7

    buffers = [bytearray(buffer) for buffer in packed.buffers]
    found = pickling.unpack_object(packed.header, buffers)
    found["array"][1] = found["tensor"][1] = 5  # seen in the buffers: no copy there
    assert np.frombuffer(buffers[0])[1] == np.frombuffer(buffers[1], np.float32)[1] == 5


def test_tensors_use_a_shared_file_and_keep_it_mapped(tmp_path: Path) -> None:
    model = nn.Linear(30, 20)
    packed = pickling.pack_object(model)
    handle = shared_memory.write_buffers(packed.buffers, directories=[str(tmp_path)])
    copy = pickling.unpack_object(packed.header, shared_memory.map_buffers(handle))
    shared_memory.remove_file(handle)
    gc.collect()
    assert torch.equal(copy.weight, model.weight)
    with torch.no_grad():
        copy.weight.zero_()  # copy-on-write
    assert model.weight.abs().sum() > 0


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
        *(torch.complex64, torch.bool, torch.uint8, torch.int8, torch.int64, torch.uint16),
    ],
    ids=str,
)
def test_tensors_of_every_dtype_and_layout_arrive_with_equal_values(dtype: torch.dtype) -> None:
    base = torch.arange(120).reshape(2, 3, 4, 5).to(dtype)
    tensors = [
        torch.ones(()).to(dtype),
        torch.empty((0, 3), dtype=dtype),
        torch.empty((3, 0, 2), dtype=dtype).transpose(0, 2),
        base,
        base.permute(3, 1, 0, 2),
        base.to(memory_format=torch.channels_last),
        base[:, ::2],
        base[1:, 1:2].expand(4, 1, 4, 5),
    ]
    packed = pickling.pack_object(tensors)
    assert len(packed.buffers) == 6  # none for tensors without elements
    for kind in (bytearray, bytes):
        for sent, got in zip(tensors, arrive(packed, kind), strict=True):
            assert (got.dtype, got.shape, got.requires_grad) == (sent.dtype, sent.shape, False)
            assert torch.equal(_raw(got), _raw(sent))
    dense = (got.stride() for got in arrive(packed)[3:6])
    assert list(dense) == [sent.stride() for sent in tensors[3:6]]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of the elements in logical order; comparing floats of eight bits is not built into torch."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_lazily_conjugated_and_negated_tensors_arrive_as_values() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    sent = [z, z.conj(), z.conj().imag]
    for got, tensor in zip(arrive(pickling.pack_object(sent)), sent, strict=True):
        assert torch.equal(got, tensor)


def test_a_read_only_buffer_is_never_written_to() -> None:
    packed = pickling.pack_object((np.zeros(3), torch.zeros(3)))
    buffers = [bytes(buffer) for buffer in packed.buffers]
    array, tensor = pickling.unpack_object(packed.header, buffers)
    tensor[0] = 1
    assert not array.flags.writeable
    assert buffers[1] == bytes(12)


def test_tensors_keep_requires_grad_attributes_layout_and_meta_device() -> None:
    leaf = torch.ones(3, requires_grad=True)
    tagged = torch.ones(3)
    tagged.tag = "mine"
    sparse = torch.eye(3).to_sparse()
    meta = torch.empty(2, 3, device="meta")
    for kind in (bytearray, bytes):
        got = arrive(pickling.pack_object([leaf, tagged, sparse, meta]), kind)
        assert got[0].requires_grad
        assert got[0].is_leaf
        assert got[1].tag == "mine"
        assert torch.equal(got[2].to_dense(), torch.eye(3))
        assert got[3].device.type == "meta"


def test_arrays_of_every_kind_arrive_with_equal_values() -> None:
    arrays = [
        np.arange(10)[::3],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(3.0),
        np.empty((0, 3)),
        np.array(["2020-01-01"], dtype="M8[D]"),
        np.array(["ab", "c"]),
        np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array([1, "a", None], dtype=object),
    ]
    for got, sent in zip(arrive(pickling.pack_object(arrays)), arrays, strict=True):
        assert got.dtype == sent.dtype
        assert np.array_equal(got, sent)
    assert pickling.pack_object(np.zeros(100_000)[::2]).sizes == (400_000,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_tensor_on_a_gpu_arrives_on_the_cpu() -> None:
    got = arrive(pickling.pack_object(nn.Linear(3, 2).cuda()))
    assert got.weight.device.type == "cpu"


# --- identity -----------------------------------------------------------------------------------------------


def test_tied_parameters_are_one_object_and_are_sent_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    model[2].weight = nn.Parameter(model[0].weight.data, requires_grad=False)  # two parameters, one memory
    packed = pickling.pack_object(model)
    assert packed.sizes == (256,)
    got = arrive(packed)
    assert got[1].weight is got[0].weight
    assert got[2].weight is not got[0].weight
    assert got[2].weight.data_ptr() == got[0].weight.data_ptr()
    assert [weight.requires_grad for weight in got.parameters()] == [True, False]
    assert len(list(got.parameters())) == 2


def test_overlapping_tensors_arrive_with_equal_values() -> None:
    base = torch.arange(6)
    got = arrive(pickling.pack_object([base, base[:3], base.view(2, 3), base.view(torch.int32)]))
    for tensor, sent in zip(got, [base, base[:3], base.view(2, 3), base.view(torch.int32)], strict=True):
        assert torch.equal(tensor, sent)


# --- code ---------------------------------------------------------------------------------------------------

NOTEBOOK = """
import sys
import torch
from torch import nn
from dtkit.rpc import pickling as wire

SCALE = 3.0

def helper(x):
    return x * SCALE

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

class Net(Base):
    def __init__(self):
        super().__init__()
        self.extra = torch.ones(1)

    def forward(self, x):
        return helper(self.layer(x)) + self.extra

torch.manual_seed(0)
sys.stdout.buffer.write(wire.dumps((Net(), lambda net, x: net(x).sum())))
"""

ENGINE = """
import sys
import torch
from dtkit.rpc import pickling as wire
net, function = wire.loads(sys.stdin.buffer.read())
loss = function(net, torch.ones(4, 2))
loss.backward()
print(loss.item(), net.layer.weight.grad.tolist())
"""


def test_classes_and_functions_of_a_cell_work_in_another_process() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(2, 1)
    expected = (layer(torch.ones(4, 2)) * 3 + 1).sum().item()
    loss, _, gradient = python(ENGINE, data=python(NOTEBOOK)).decode().partition(" ")
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert gradient.strip() == "[[12.0, 12.0]]"


def test_pickling_arrays_and_functions_does_not_load_torch() -> None:
    code = (
        "import sys, numpy as np; from dtkit.rpc import pickling as wire\n"
        "p = wire.pack_object({'a': np.arange(9)[::2], 'f': lambda x: x}); wire.unpack_object(p.header, p.buffers)\n"
        "assert 'torch' not in sys.modules"
    )
    python(code)


def test_dumps_includes_all_buffers() -> None:
    got = pickling.loads(pickling.dumps({"t": torch.arange(5.0), "a": np.arange(5)[::2], "f": lambda x: x + 1}))
    assert torch.equal(got["t"], torch.arange(5.0))
    assert got["a"].tolist() == [0, 2, 4]
    assert got["f"](1) == 2


# --- what can't be sent -------------------------------------------------------------------------------------

LOCK = threading.Lock()


class Holder:
    def __init__(self, **attributes) -> None:
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = LOCK


class Careful:
    """A class whose state omits one lock but includes another."""

    def __init__(self) -> None:
        self.lock = LOCK
        self.items = (1, [LOCK])

    def __getstate__(self) -> dict:
        return {"items": self.items}


class Refuses:
    def __reduce__(self) -> tuple:
        raise RuntimeError("not\nme")


class Mine(dict):
    pass


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    model[1].encoder = nn.Identity()
    model[1].encoder.lock = LOCK
    return model


def _closure():
    inner = threading.Lock()
    return lambda: inner


def _by_value(function):
    """The function as if a cell had defined it."""
    function.__module__ = "__main__"
    return function


def _uses_global():
    return [LOCK for _ in range(2)]


def _default(lock=LOCK):
    return lock


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        (
            _model(),
            r"^model\[1\]\.encoder\.lock: cannot pickle '_thread.lock' object\. .*Create it on the engine",
        ),
        ([0, {"k": (LOCK,)}], r"^model\[1\]\['k'\]\[0\]: cannot pickle"),
        (Holder(a=Holder(b={1: LOCK})), r"^model\.a\.b\[1\]: "),
        (Slotted(), r"^model\.lock: "),
        (Careful(), r"^model\.items\[1\]\[0\]: "),
        (Refuses(), r"^model: not\. What"),
        (Mine(x=LOCK), r"^model\['x'\]: "),
        ({LOCK: 1}, r"^model key <unlocked.*: cannot pickle"),
        (functools.partial(print, LOCK), r"^model\.args\[0\]: "),
        (_by_value(_closure()), r"^model \(closure variable 'inner'\): "),
        (_by_value(_uses_global), r"^model \(global variable 'LOCK'\): "),
        (_by_value(_default), r"^model \(default lock=\): "),
        (Holder(lock=LOCK).__repr__, r"^model.*\.lock: "),
        ((i for i in "ab"), r"^model: cannot pickle 'generator' object"),
    ],
)
def test_the_error_names_the_part_that_cannot_be_sent(obj, message: str) -> None:
    for send in (pickling.pack_object, pickling.dumps):
        with pytest.raises(SerializationError, match=message) as caught:
            send(obj, name="model")
        assert isinstance(caught.value.__cause__, Exception)


def use_config(settings: Any) -> Any:
    torch.distributed.is_initialized()
    return settings.config


def test_module_of_a_subclass_is_sent_by_name() -> None:
    """cloudpickle also sends torch.distributed.config, since the function has this name as an attribute."""
    config = importlib.import_module("torch.distributed.config")
    assert type(config) is not types.ModuleType
    assert pickling.loads(pickling.dumps(config)) is config
    use_config.__module__ = "__main__"  # as of a notebook, so that the function travels as code
    received = pickling.loads(pickling.dumps(use_config))
    assert received(types.SimpleNamespace(config=3)) == 3


def test_the_error_names_the_type_of_an_unnamed_object() -> None:
    with pytest.raises(SerializationError, match=r"^Holder\.lock: "):
        pickling.pack_object(Holder(lock=LOCK))
    with pytest.raises(SerializationError, match=r"^_default \(default lock=\): "):
        pickling.pack_object(_by_value(_default))


def test_unsendable_cyclic_and_deeply_nested_objects_are_refused() -> None:
    loop = Holder(lock=LOCK)
    loop.me = loop
    with pytest.raises(SerializationError, match=r"^loop\.lock: "):
        pickling.pack_object(loop, name="loop")
    nest: list = []
    for _ in range(100_000):
        nest = [nest]
    with pytest.raises(SerializationError, match=r"^nest: .*recursion"):
        pickling.pack_object(nest, name="nest")


def test_no_module_stays_registered_after_a_failure(tmp_path: Path, beside) -> None:
    module = beside("left_behind", "def f(): return 1")
    with pytest.raises(SerializationError):
        pickling.pack_object([LOCK], by_value=[module])
    assert not cloudpickle.list_registry_pickle_by_value()


# --- modules that an engine can't import --------------------------------------------------------------------


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes and imports a module in a folder that no engine searches."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(name: str, source: str):
        file = tmp_path / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
        importlib.invalidate_caches()
        made.append(name)
        return importlib.import_module(name)

    yield make
    for name in made:
        for loaded in [key for key in sys.modules if key == name or key.startswith(name.split(".")[0] + ".")]:
            del sys.modules[loaded]


MODULE = """
import math
SCALE = 2
class Model:
    def __init__(self):
        super().__init__()
        self.scale = SCALE
    def __call__(self, x):
        return helper(x) * self.scale
def helper(x):
    return math.sqrt(x)
"""


def test_a_module_next_to_the_notebook_is_sent_by_value(beside, tmp_path: Path) -> None:
    module = beside("lesson_models", MODULE)
    engine = [entry for entry in sys.path if entry != str(tmp_path)]
    found = user_modules.find_user_modules(engine)
    assert [each for each in found if each.__name__.startswith("lesson")] == [module]
    data = pickling.dumps((module.Model(), module, lambda: module.helper(9)), user_modules.find_user_modules(engine))
    assert not cloudpickle.list_registry_pickle_by_value()
    code = (
        "import sys; from dtkit.rpc import pickling as wire; m, module, f = wire.loads(sys.stdin.buffer.read())\n"
        "print(m(16), module.helper(4), f(), 'lesson_models' in sys.modules)"
    )
    assert python(code, data=data).decode().split() == ["8.0", "2.0", "3.0", "False"]


@pytest.mark.parametrize("init", [True, False])
def test_a_package_and_its_modules_are_sent_by_value(beside, tmp_path: Path, *, init: bool) -> None:
    if init:
        (tmp_path / "lesson_pack").mkdir()
        (tmp_path / "lesson_pack" / "__init__.py").write_text("from lesson_pack.inner import value")
    inner = beside("lesson_pack.inner", "value = 5\ndef f(): return value + 1")
    package = sys.modules["lesson_pack"]
    engine = [entry for entry in sys.path if entry != str(tmp_path)]
    found = user_modules.find_user_modules(engine)
    assert {package, inner} <= set(found)
    data = pickling.dumps(lambda: 2 * package.inner.f(), found)
    code = "import sys; from dtkit.rpc import pickling as wire; print(wire.loads(sys.stdin.buffer.read())())"
    assert python(code, data=data).decode().strip() == "12"


def test_a_module_that_engines_can_import_is_sent_by_reference(beside, tmp_path: Path) -> None:
    module = beside("lesson_known", MODULE)
    assert module not in user_modules.find_user_modules([str(tmp_path)])
    assert module not in user_modules.find_user_modules([str(tmp_path / "x" / "..")])
    # ... unless it is in the current folder, where users edit it while engines run.
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        assert module in user_modules.find_user_modules([str(tmp_path)])
    finally:
        os.chdir(here)


def test_installed_packages_and_dtkit_are_never_sent_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")  # everything lies under it
    names = {module.__name__ for module in user_modules.find_user_modules([])}
    tops = {name.partition(".")[0] for name in names}
    assert not tops & {"dtkit", "numpy", "torch", "json", "cloudpickle", "pytest", "__main__"}
    assert __name__ in names
    stdlib = sysconfig.get_path("stdlib")
    assert not [name for name in names if str(sys.modules[name].__file__).startswith(stdlib)]


def test_a_users_module_in_the_place_of_an_installed_one_is_sent(beside, monkeypatch: pytest.MonkeyPatch) -> None:
    user_modules.find_user_modules([])  # which finds that the installed one need not be sent
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    import colorsys

    assert colorsys not in user_modules.find_user_modules([])
    monkeypatch.delitem(sys.modules, "colorsys")
    module = beside("colorsys", MODULE)
    assert module is not colorsys
    assert module in user_modules.find_user_modules([])


def test_a_users_own_pickle_registration_is_kept(beside) -> None:
    module = beside("lesson_registered", MODULE)
    cloudpickle.register_pickle_by_value(module)
    try:
        pickling.dumps(module.helper, [module])
        assert cloudpickle.list_registry_pickle_by_value() == {"lesson_registered"}
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def test_threads_can_pack_the_same_module_at_the_same_time(beside) -> None:
    module = beside("lesson_threads", MODULE)
    by_reference = pickle.dumps(module.helper)
    seen: list[int] = []

    def work() -> None:
        for _ in range(50):
            seen.append(len(pickling.dumps(module.helper, [module])))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(seen) == 200
    assert min(seen) > 2 * len(by_reference)
    assert not cloudpickle.list_registry_pickle_by_value()


def test_garbage_collection_of_a_packed_object_does_not_crash() -> None:
    """Python 3.11 crashes on clearing a memoryview that another view refers to: there must be none."""
    code = """if True:
        import gc, sys, torch
        from dtkit.rpc import pickling as wire

        class Cycle:
            pass

        sys.unraisablehook = lambda event: print(event.exc_value)
        packed = wire.pack_object([torch.zeros(3), torch.zeros(2, 3).T])
        cycle = Cycle()
        cycle.itself, cycle.packed = cycle, packed
        del cycle, packed
        gc.collect()
        gc.collect()
        print("alive")
    """
    assert python(code) == b"alive\n"


def test_modules_that_an_object_needs_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "models_of_a_user.py").write_text("class Net: pass\n")
    (tmp_path / "helpers_of_a_user.py").write_text("def help(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    models, helpers = importlib.import_module("models_of_a_user"), importlib.import_module("helpers_of_a_user")
    code = "def loss(): return helpers.help()"
    scope = {"helpers": helpers, "__name__": "__main__"}
    exec(code, scope)
    packed = pickling.pack_object([models.Net(), scope["loss"], np.zeros(3)])
    assert {"models_of_a_user", "helpers_of_a_user"} <= pickling.list_modules(packed.header, packed.buffers)


class CollectorWatch:
    """Whether garbage was collected while this was pickled and unpickled."""

    seen: list[bool] = []  # noqa: RUF012 - emptied by the test

    def __reduce__(self) -> Any:
        self.seen.append(gc.isenabled())
        return self._build, ()

    @classmethod
    def _build(cls) -> CollectorWatch:
        cls.seen.append(gc.isenabled())
        return cls()


def test_no_garbage_is_collected_while_many_objects_are_pickled():
    CollectorWatch.seen.clear()
    pickling.loads(pickling.dumps(CollectorWatch()))
    packed = pickling.pack_object(CollectorWatch())
    pickling.unpack_object(packed.header, packed.buffers)
    assert CollectorWatch.seen == [False] * 4
    assert gc.isenabled()
    with pytest.raises(SerializationError):
        pickling.dumps(threading.Lock())
    assert gc.isenabled()

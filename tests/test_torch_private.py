"""Private names of torch: each resolves, a missing one has a clear error, and no other file uses any."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dtkit._util import torch_private
from dtkit._util.torch_private import PRIVATE_NAMES, PrivateName

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Python's and numpy's, and ipykernel's answer to a request to end
KNOWN_ELSEWHERE = {"_replace", "_fields", "_exit", "_getframe", "_current_frames", "_mmap", "_shutdown_message"}
# transformers', which output_recorders.py does without where a version lacks them
KNOWN_ELSEWHERE |= {"_CAN_RECORD_REGISTRY", "_can_record_outputs"}
LOOKUPS = {"getattr", "setattr", "hasattr", "delattr", "vars"}


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_every_name_resolves_with_the_installed_torch(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")  # TensorFlow may be missing
    entry = PRIVATE_NAMES[name]
    assert getattr(torch_private, name) is not None or entry.is_optional
    assert entry.feature
    assert entry.why


def test_importing_the_table_does_not_load_torch():
    code = "import sys, dtkit._util.torch_private; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize(
    "entry",
    [
        PrivateName("torch", "_gone", "Gradient norms", "why"),
        PrivateName("torch._gone", "name", "Gradient norms", "why"),
        PrivateName("torch", "Tensor._gone", "Gradient norms", "why", "method"),
        PrivateName("torch", "Tensor._gone", "Gradient norms", "why", "key"),
        PrivateName("torch.nn", "Module", "Gradient norms", "why", requires=("_gone",)),
    ],
    ids=["attribute", "module", "method", "key", "member"],
)
def test_the_error_for_a_missing_name_has_feature_version_and_remedy(
    entry: PrivateName, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(PRIVATE_NAMES, "gone", entry)
    with pytest.raises(ImportError, match=r"Gradient norms need torch.*which torch 2\.\d+\S* .*Install a torch from"):
        from dtkit._util.torch_private import gone  # noqa: F401


def test_a_missing_optional_name_is_none():
    assert PrivateName("torch", "Tensor._gone", "Features", "why", is_optional=True).load() is None


def test_an_unknown_name_raises_an_import_error():
    with pytest.raises(ImportError, match="no_such_name"):
        from dtkit._util.torch_private import no_such_name  # noqa: F401


def test_private_members_are_functions_that_take_the_instance():
    import torch

    tensor = torch.zeros(4)
    tensor.add_(1)
    assert torch_private.count_inplace_writes(tensor) == 1
    assert torch_private.is_view(tensor[:2])
    assert not torch_private.is_view(tensor)


def test_no_other_file_uses_a_private_name(root: Path):
    paths = [path for path in sorted((root / "dtkit").rglob("*.py")) if path.name != "torch_private.py"]
    trees = {path.relative_to(root): ast.parse(path.read_text()) for path in paths}
    methods = {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    uses = [
        f"{path}:{line} uses {name}"
        for path, tree in trees.items()
        for line, name in _find_private_uses(tree)
        if name not in methods
    ]
    assert uses == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch._C",
        "from torch._C import x",
        "from torch.utils import _pytree",
        "tensor._version",
        "torch._foreach_norm(x)",
        "self.loader._iterator",
        "getattr(module, '_set_pg_timeout', None)",
        "vars(module)['_world']",
    ],
)
def test_the_scan_finds_each_form_of_use(code: str):
    assert len(list(_find_private_uses(ast.parse(code)))) == 1


def test_the_scan_permits_private_names_that_a_class_defines():
    code = "class A:\n    def make(cls):\n        new = cls()\n        new._x = 1\n    def f(self): self._x = 2"
    assert list(_find_private_uses(ast.parse(code))) == []


def _find_private_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of other packages' private names: by import, attribute, or lookup of a string.

    A file may use private names that it defines itself, and those that its classes inherit.
    """
    defined = set(_find_definitions(tree)) | KNOWN_ELSEWHERE
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names if _is_private_path(alias.name))
            case ast.ImportFrom(module=module, names=names):
                paths = [f"{module}.{alias.name}" for alias in names]
                yield from ((node.lineno, path) for path in paths if _is_private_path(path))
            case ast.Attribute(value=value, attr=name) if _is_private(name) and name not in defined:
                if ast.unparse(value) not in ("self", "cls", "super()"):
                    yield node.lineno, name
            case ast.Call(func=ast.Name(id=function), args=[owner, ast.Constant(value=str(name)), *_]):
                if function in LOOKUPS and _is_private(name) and name not in defined and ast.unparse(owner) != "self":
                    yield node.lineno, name
            case ast.Subscript(value=ast.Call(func=ast.Name(id="vars")), slice=ast.Constant(value=str(name))):
                if _is_private(name) and name not in defined:
                    yield node.lineno, name


def _find_definitions(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a file's functions, and of attributes that its methods set."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_private_path(path: str) -> bool:
    """Return whether a part of a module's path is private; dtkit's own modules may be."""
    return not path.startswith("dtkit.") and any(map(_is_private, path.split(".")))

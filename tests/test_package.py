"""The package as a whole: its public names, its layers, and the files that install it."""

from __future__ import annotations

import ast
import graphlib
import os
import re
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING, NamedTuple

import pytest

import dtkit
from tests.support.syntax import find_marker_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

VIEWS = {"IPython", "ipyparallel", "ipywidgets", "anywidget", "matplotlib"}
FORBIDDEN = {  # a file or folder of dtkit/, the longest match counts -> what it never imports, however late
    "engine": VIEWS,
    "strategies": VIEWS,
    "dashboard": {"torch", "ipyparallel"},
    "training": {"torch", "ipyparallel"},
    "training/verify.py": {"ipyparallel"},
    "training/launch.py": {"ipyparallel"},
    "training/state_dict.py": {"ipyparallel"},
    "history": {"torch", "ipyparallel", "matplotlib"},
    "schedules": {"torch", "ipyparallel"},
    "messages.py": {"torch", "ipyparallel", "numpy"},
    "types.py": {"torch", "ipyparallel", "numpy"},
    "mesh.py": {"torch", "ipyparallel"},
    "planning/cost_model.py": {"torch", "ipyparallel", "numpy"},
    "cluster/transport.py": set(),
    "cluster/locked_view.py": set(),
    "cluster/launchers": set(),
    "": {"ipyparallel"},
}
CONDA_NAMES = {"torch": "pytorch-cpu", "matplotlib": "matplotlib-base"}


# -- public names ----------------------------------------------------------------------------------------


def test_dunder_all_lists_the_public_names():
    assert list(dtkit.__all__) == sorted(set(dtkit.__all__))
    assert [name for name in dir(dtkit) if not name.startswith("_")] == list(dtkit.__all__)


@pytest.mark.parametrize("name", getattr(dtkit, "__all__", ()))
def test_every_public_name_resolves(name: str):
    found = getattr(dtkit, name)
    assert getattr(found, "__module__", "dtkit").split(".")[0] == "dtkit"


def test_a_cluster_completes_to_two_dozen_names():
    """A further one needs room: what users need once belongs to a part of the cluster, not to its front."""
    assert len([name for name in dir(dtkit.Cluster) if not name.startswith("_")]) <= 24


def test_an_unknown_name_raises_an_attribute_error():
    with pytest.raises(AttributeError, match="clutser"):
        dtkit.clutser  # noqa: B018 - the access is the test


def test_importing_dtkit_imports_no_heavy_packages():
    heavy = {"torch", "matplotlib", "ipyparallel", "IPython"}
    code = f"import sys, dtkit; print(*{heavy} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert out.stdout.split() == []


def test_a_cluster_imports_ipyparallel_after_its_fork_server_has_started():
    """The server loads torch meanwhile, on another core."""
    code = """
import sys, dtkit
from dtkit.cluster.forkserver import client
def stop(self):
    sys.exit("ipyparallel" in sys.modules)
client.ForkServerClient.start = stop
dtkit.Cluster(1, device="cpu")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_data_parallelism_loads_no_dtensors():
    """They take torch more than a second, which a notebook after a restart would wait for in dtkit.attach()."""
    code = "import sys, dtkit.strategies.data_parallel as s; sys.exit('torch.distributed.tensor' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_import_warns_about_an_unrelated_distribution_named_dtkit(tmp_path: Path, root: Path):
    info = tmp_path / "dtkit-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dtkit\nVersion: 9.9\n")
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{tmp_path}"}
    out = subprocess.run(
        [sys.executable, "-c", "import dtkit"],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "the unrelated distribution `dtkit` 9.9 is installed next to `dtkit-jupyter`" in out.stderr
    assert "pip uninstall -y dtkit dtkit-jupyter" in out.stderr


def test_a_missing_module_is_reported_as_missing_parts_of_dtkit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(dtkit._HOMES, "lost", "not_there")
    with pytest.raises(ImportError, match="parts of dtkit are missing"):
        dtkit.lost  # noqa: B018 - the access is the test


def test_version_equals_the_one_in_pyproject(project: dict):
    assert dtkit.__version__ == project["version"]


# -- the layers ------------------------------------------------------------------------------------------


class Import(NamedTuple):
    """One imported module; `at_once` where it happens when the importing module is imported."""

    module: str
    line: int
    at_once: bool


@pytest.fixture(scope="module")
def imports(root: Path) -> dict[str, list[Import]]:
    """What each file of dtkit imports, by its path within dtkit/."""
    folder = root / "dtkit"
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}
    return {name: list(_imports(ast.parse(path.read_text()), _package(name))) for name, path in files.items()}


def test_no_file_imports_what_its_layer_forbids(imports: dict[str, list[Import]]):
    crossed = [
        f"dtkit/{file}:{found.line} imports {found.module}"
        for file, all_of_it in imports.items()
        for found in all_of_it
        if found.module.split(".")[0] in FORBIDDEN[_layer(file)]
    ]
    assert crossed == []


def test_no_file_imports_what_its_layer_forbids_through_another_file(imports: dict[str, list[Import]]):
    """Importing a file must not load what its layer forbids by way of dtkit's other files."""
    crossed = []
    for file in imports:
        banned = FORBIDDEN[_layer(file)] if _layer(file) else set()
        for reached in _reached(file, imports):
            for found in imports[reached]:
                if found.at_once and found.module.split(".")[0] in banned:
                    crossed.append(f"dtkit/{file} brings in {found.module}, by dtkit/{reached}:{found.line}")
    assert crossed == []


def test_the_import_walk_finds_each_form_of_import():
    code = """
import torch.nn as nn
from ..engine import comm
if TYPE_CHECKING:
    from . import base
def late():
    from matplotlib.figure import Figure
"""
    assert list(_imports(ast.parse(code), "dtkit.strategies")) == [
        Import("torch.nn", 2, at_once=True),
        Import("dtkit.engine", 3, at_once=True),
        Import("dtkit.engine.comm", 3, at_once=True),
        Import("dtkit.strategies", 5, at_once=False),
        Import("dtkit.strategies.base", 5, at_once=False),
        Import("matplotlib.figure", 7, at_once=False),
        Import("matplotlib.figure.Figure", 7, at_once=False),
    ]


def _layer(file: str) -> str:
    """The longest entry of FORBIDDEN that holds the file."""
    return max((place for place in FORBIDDEN if not place or f"{file}/".startswith(f"{place}/")), key=len)


def _package(file: str) -> str:
    """The package that a file's relative imports start from."""
    return ".".join(["dtkit", *file.split("/")[:-1]])


def _imports(node: ast.AST, package: str, *, at_once: bool = True) -> Iterator[Import]:
    """All imports below `node`, in order; of `from a import b` both a and a.b, which may be a module."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_once) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            module = _base(child, package)
            names = [module, *(f"{module}.{alias.name}" for alias in child.names)]
            yield from (Import(name, child.lineno, at_once) for name in names)
        else:
            late = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _imports(child, package, at_once=at_once and not late and not for_types)


def _base(node: ast.ImportFrom, package: str) -> str:
    """The full name of the module or package that `from ... import` names."""
    start = package.rsplit(".", node.level - 1)[0] if node.level else ""
    return ".".join(part for part in (start, node.module) if part)


def _reached(file: str, imports: dict[str, list[Import]]) -> set[str]:
    """The file and all files of dtkit that importing it imports, at once."""
    reached, todo = set(), [file]
    while todo:
        current = todo.pop()
        if current in reached or current not in imports:
            continue
        reached.add(current)
        for found in imports[current]:
            if found.at_once and found.module.startswith("dtkit."):
                stem = found.module.removeprefix("dtkit.").replace(".", "/")
                todo += [f"{stem}.py", f"{stem}/__init__.py"]
    return reached


# -- habits ----------------------------------------------------------------------------------------------


def test_a_missing_and_a_stale_marker_are_found(tmp_path: Path):
    code = "def f():\n    # sleeps: why\n    sleep(1)\n    sleep(2)\n# sleeps: why\nx = 1\n"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text(code)
    found = find_marker_errors(tmp_path / "code", _is_sleep, "sleeps")
    assert found == ["code/a.py:4 needs '# sleeps: why'", "code/a.py:6 has a stale '# sleeps:'"]


@pytest.mark.parametrize(
    "code",
    [
        "try: f()\nexcept Exception: pass",
        "try: f()\nexcept (ValueError, BaseException) as error: raise KeyError from error",
        "try: f()\nexcept builtins.Exception: pass",
        "try: f()\nexcept: pass",
        "try: f()\nexcept kinds: pass",
        "with contextlib.suppress(OSError, Exception): f()",
        "class Quiet:\n def __exit__(self, *error) -> bool: return True",
    ],
)
def test_each_way_to_catch_all_errors_is_found(code: str):
    assert any(map(_is_broad, ast.walk(ast.parse(code))))


@pytest.mark.parametrize(
    "code",
    [
        "try: f()\nexcept BaseException:\n    tidy()\n    raise",
        "try: f()\nexcept (OSError, psutil.Error): pass",
        "with contextlib.suppress(OSError): f()",
        "class Open:\n def __exit__(self, *error) -> None: self.close()",
    ],
)
def test_handlers_that_name_errors_or_reraise_are_not_broad(code: str):
    assert not any(map(_is_broad, ast.walk(ast.parse(code))))


@pytest.mark.parametrize(
    ("code", "silent"),
    [
        ("run_guarded(work, lambda _: None)", True),
        ("run_guarded(work, lambda error: [])", True),
        ("guard.run_guarded_in_thread(work, report=lambda error: 0)", True),
        ("threading.Thread(target=run_guarded, args=(work, lambda error: None))", True),
        ("run_guarded(work, lambda error: log(error))", False),
        ("run_guarded_in_thread(work, return_error)", False),
    ],
)
def test_report_functions_that_ignore_the_error_are_found(code: str, silent: bool):  # noqa: FBT001 - a row of the table
    assert any(map(_is_silent, ast.walk(ast.parse(code)))) == silent


def _is_broad(node: ast.AST) -> bool:
    """Whether this catches any error: what cleans up and ends in a bare `raise` doesn't."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):  # one that returns something may swallow the error
        return node.name in {"__exit__", "__aexit__"} and ast.unparse(node.returns or ast.Constant("?")) != "None"
    if isinstance(node, ast.Call) and _last_name(node.func) == "suppress":
        return any(map(_names_any_error, node.args))
    if not isinstance(node, ast.ExceptHandler):
        return False
    if isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None:
        return False
    return node.type is None or _names_any_error(node.type)


def _names_any_error(kinds: ast.expr) -> bool:
    """Whether Exception or BaseException is among these, or may be: a variable holds what it is given."""
    names = [_last_name(kind) for kind in (kinds.elts if isinstance(kinds, ast.Tuple) else [kinds])]
    return any(name in {"Exception", "BaseException"} or not name.lstrip("_")[:1].isupper() for name in names)


def _is_silent(node: ast.AST) -> bool:
    """Whether this hands over a function to report an error to that doesn't look at it."""
    if not isinstance(node, ast.Call):
        return False
    given = [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
    if not {"run_guarded", "run_guarded_in_thread"} & {_last_name(value) for value in given}:
        return False
    lambdas = (found for value in given[1:] for found in ast.walk(value) if isinstance(found, ast.Lambda))
    return any(_ignores_its_argument(found) for found in lambdas)


def _ignores_its_argument(function: ast.Lambda) -> bool:
    used = {name.id for name in ast.walk(function.body) if isinstance(name, ast.Name)}
    return any(argument.arg not in used for argument in function.args.args)


def _last_name(node: ast.expr) -> str:
    """`suppress` of `contextlib.suppress`."""
    return ast.unparse(node).rsplit(".", 1)[-1]


def _is_sleep(node: ast.AST) -> bool:
    """Whether this calls a sleep, or Playwright's, for longer than 0."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func).rsplit(".", 1)[-1]
    yields = bool(node.args) and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
    return name in {"sleep", "wait_for_timeout"} and not yields


@pytest.mark.parametrize(
    ("folder", "sees", "marker"),
    [
        ("dtkit", _is_broad, "broad"),
        ("dtkit", _is_silent, "silent"),
        ("tests", _is_sleep, "sleeps"),
    ],
    ids=["broad excepts", "silent reports", "sleeps"],
)
def test_each_broad_except_silent_report_and_sleep_gives_a_reason(
    root: Path, folder: str, sees: Callable[[ast.AST], bool], marker: str
):
    assert find_marker_errors(root / folder, sees, marker) == []


# -- what installs it ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def test_binder_has_every_dependency_in_the_same_range(root: Path, project: dict):
    wanted = {_split(line) for line in [*project["dependencies"], *project["optional-dependencies"]["lab"]]}
    lines = (root / "binder" / "environment.yml").read_text().splitlines()
    there = {_split(line.strip(" -")) for line in lines if line.lstrip().startswith("- ")}
    assert {(CONDA_NAMES.get(name, name), versions) for name, versions in wanted} <= there


@pytest.mark.parametrize("script", ["binder/postBuild", "binder/start", ".ci/run"])
def test_scripts_are_executable_and_valid_bash(root: Path, script: str):
    path = root / script
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", path], check=True, timeout=10)


def test_binder_starts_with_one_thread_per_process(root: Path):
    seen = subprocess.run(
        [root / "binder" / "start", "printenv", "OMP_NUM_THREADS", "MKL_NUM_THREADS"],
        env={"PATH": os.environ["PATH"]},
        check=True,
        capture_output=True,
        text=True,
        timeout=10,
    )
    assert seen.stdout.split() == ["1", "1"]


def test_constraints_pin_every_dependency_exactly(root: Path, project: dict):
    lines = (root / "binder" / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\d.]+(\.?post\d+)?", pin)] == []
    pinned = {_normal(pin.split("==")[0]) for pin in pins}
    extras = project["optional-dependencies"]
    asked = [_split(line)[0] for line in [*project["dependencies"], *extras["lab"], *extras["dev"]]]
    assert {_normal(name) for name in asked} - {project["name"]} <= pinned
    assert "torch==2.13.0" in pins


def _split(requirement: str) -> tuple[str, str]:
    """("torch", ">=2.11") of "torch>=2.11"; an extra in brackets is left out."""
    name = re.match(r"[\w.-]+", requirement)[0]
    return name, re.sub(r"^\[.*?\]", "", requirement[len(name) :]).replace(" ", "")


def _normal(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


# -- packages, circles, sizes --------------------------------------------------------------------------------

LAYERS = [  # bottom to top; the longest entry that fits a module counts
    "_util",
    "types",
    "messages",
    "errors",
    "mesh",
    "schedules",
    "health",
    "data.sharding",
    "data.step_counts",
    "data.partition",
    "data.partition_view",
    "data.columns",
    "history",
    "checkpoint",
    "explain",
    "planning.layer_chain",
    "planning.cost_model",
    "planning.plan",
    "planning.memory_report",
    "rpc",
    "dashboard",
    "engine.comm",
    "engine.observe",
    "engine.data",
    "engine.state",
    "strategies",
    "engine",
    "data",
    "planning",
    "training",
    "cluster",
    "integrations",
    "lessons",
    "testing",
    "dtkit",
    "demo",
]


@pytest.fixture(scope="module")
def graph(root: Path, imports: dict[str, list[Import]]) -> dict[str, set[str]]:
    """What each module of dtkit imports from dtkit, without the leading "dtkit."; late and type-only imports too."""
    modules = {_module(file) for file in imports}
    trees = {file: ast.parse((root / "dtkit" / file).read_text()) for file in imports}
    return {_module(file): _targets(tree, _package(file), modules) - {_module(file)} for file, tree in trees.items()}


def _targets(tree: ast.AST, package: str, modules: set[str]) -> set[str]:
    """Return which modules a file imports. A name that isn't a module counts for its package's `__init__`."""
    targets = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, package)
            names = {f"{base}.{alias.name}" for alias in node.names}
            targets |= {name if name.removeprefix("dtkit.") in modules else base for name in names}
    return {target.removeprefix("dtkit.") for target in targets if target.split(".")[0] == "dtkit"} & modules


def test_an_import_counts_for_its_module_and_else_for_its_package():
    code = "from dtkit.rpc import payload\nfrom dtkit import errors"
    assert _targets(ast.parse(code), "dtkit", {"dtkit", "errors", "rpc", "rpc.payload"}) == {"rpc.payload", "errors"}
    code = "from dtkit import errors, Run\nfrom . import send\nimport dtkit.mesh, torch"
    assert _targets(ast.parse(code), "dtkit.rpc", {"dtkit", "errors", "rpc", "mesh"}) == {
        "dtkit",
        "errors",
        "rpc",
        "mesh",
    }


def test_modules_import_only_from_their_own_or_lower_layers(graph: dict[str, set[str]]):
    up = [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in others
        if _height(other) > _height(module)
    ]
    assert up == []


def test_no_modules_import_each_other_in_a_circle(graph: dict[str, set[str]]):
    sorter = graphlib.TopologicalSorter(graph)
    sorter.prepare()  # raises CycleError with the circle


def test_no_file_or_class_is_too_long(root: Path):
    long = []
    for path in sorted((root / "dtkit").rglob("*.py")):
        text = path.read_text()
        name = path.relative_to(root).as_posix()
        long += [f"{name}: {text.count(chr(10))} lines"] * (text.count("\n") > 400)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                long += [f"{name}: {node.name} has {length} lines"] * (length > 400)
                functions = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
                methods = [part.name for part in functions if not part.decorator_list]  # a property is an attribute
                public = {method for method in methods if not method.startswith("_")}
                long += [f"{name}: {node.name} has {len(public)} public methods"] * (len(public) > 25)
    assert long == []


def _module(file: str) -> str:
    """Return "rpc.payload" for "rpc/payload.py", "rpc" for "rpc/__init__.py", and "dtkit" for "__init__.py"."""
    return file.removesuffix(".py").removesuffix("__init__").replace("/", ".").rstrip(".") or "dtkit"


def _height(module: str) -> int:
    """Return a module's place in LAYERS."""
    fits = [entry for entry in LAYERS if f"{module}.".startswith(f"{entry}.")]
    return LAYERS.index(max(fits, key=len)) if fits else len(LAYERS)

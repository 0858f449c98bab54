"""Modules that are pickled by value, because engines can't import them."""

from __future__ import annotations

import dataclasses
import functools
import os
import site
import sys
import sysconfig
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def find_user_modules(engine_sys_path: Sequence[str]) -> list[types.ModuleType]:
    """Return the imported modules that an engine with this sys.path can't import in their current form.

    These are Python files below the current folder, which the user may edit while engines live. Files in folders that
    the engine doesn't search are also among them. They never include dtkit, the standard library and installed
    packages, nor `__main__`, which cloudpickle sends by value anyway.
    """
    current_folder = _make_path_prefix(str(Path.cwd()))
    searched_folders = {_resolve_path(entry) for entry in engine_sys_path if entry}
    modules = []
    for name, module in sys.modules.copy().items():
        if _known_on_engines.get(name) is module:
            continue
        location = _locate(name, module)
        if location is None:
            _known_on_engines[name] = module
        elif location.file.startswith(current_folder) or location.search_folder not in searched_folders:
            modules.append(module)
    return modules


_known_on_engines: dict[str, Any] = {}
"""Modules found to be installed. There are thousands, and a training asks several times."""


def _locate(name: str, module: Any) -> _ModuleLocation | None:
    """Return where an entry of sys.modules is, or None if it need not be sent in any folder."""
    if not isinstance(module, types.ModuleType) or module.__name__ != name:
        return None
    file = _find_source(module)
    if file is None or name.partition(".")[0] in _NEVER_BY_VALUE:
        return None
    return _locate_module(name, file)


# Each Python runs its own site modules, which may be outside of the installation.
_NEVER_BY_VALUE = frozenset({"dtkit", "__main__", "__mp_main__", "sitecustomize", "usercustomize"})


def _find_source(module: types.ModuleType) -> str | None:
    """Return a module's Python file, or the folder of a package without __init__.py; None for other modules."""
    file = vars(module).get("__file__")
    if isinstance(file, str):
        return file if file.endswith(".py") else None
    folders = [folder for folder in vars(module).get("__path__") or () if isinstance(folder, str)]
    return folders[0] if folders else None


@dataclasses.dataclass(frozen=True)
class _ModuleLocation:
    file: str
    search_folder: str
    """Folder that is searched when the module is imported by its name."""


@functools.cache
def _locate_module(name: str, file: str) -> _ModuleLocation | None:
    """Return where a module is, or None if it is installed."""
    file = _resolve_file(file)
    if file.startswith(_list_installation_prefixes()):
        return None
    stem = file.removesuffix(".py").removesuffix(os.sep + "__init__")
    tail = os.sep + name.replace(".", os.sep)
    root = stem.removesuffix(tail) if stem.endswith(tail) else str(Path(file).parent)
    return _ModuleLocation(file, root or os.sep)


@functools.cache
def _list_installation_prefixes() -> tuple[str, ...]:
    """Return the folders of the standard library and of installed packages.

    sys.prefix isn't specific enough: in a container it is /usr, and people work in /usr/src/app.
    """
    paths = sysconfig.get_paths()
    folders = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    folders += [sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix})]
    return tuple(dict.fromkeys(_make_path_prefix(_resolve_path(folder)) for folder in folders))


def _resolve_path(path: str) -> str:
    return os.path.realpath(path)


def _resolve_file(path: str) -> str:
    """Resolve a path, with its folder only once: there are thousands of modules in hundreds of folders."""
    if os.path.islink(path):  # noqa: PTH114 - a Path takes several times as long
        return _resolve_path(path)
    folder, separator, name = path.rpartition(os.sep)
    return _resolve_folder(folder) + separator + name


@functools.cache
def _resolve_folder(path: str) -> str:
    return _resolve_path(path)


def _make_path_prefix(folder: str) -> str:
    """Return the prefix of every path below `folder`."""
    return _resolve_path(folder).rstrip(os.sep) + os.sep

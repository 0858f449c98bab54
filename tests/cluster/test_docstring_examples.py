"""Examples in the docstrings of public names run as they stand, on real engines."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import dtkit
from dtkit.dashboard.figures.custom_panels import remove_panel
from tests.support import small

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_EXAMPLE = re.compile(r"::\n\n((?:(?: {4}.*)?\n)+)")
_NEED_EXAMPLE = {
    "Cluster",
    "Cluster.broadcast",
    "Cluster.partition",
    "Cluster.train",
    "History",
    "Run",
    "Run.dashboard",
    "Run.evaluate",
    "Run.report",
    "attach",
    "compare",
    "log",
}


def list_docstrings() -> Iterator[tuple[str, str]]:
    """Yield the docstrings of public names and of their public members, by name."""
    for name in dtkit.__all__:
        obj = getattr(dtkit, name)
        yield name, inspect.getdoc(obj) or ""
        for member in dir(obj) if inspect.isclass(obj) else ():
            if not member.startswith("_"):
                yield f"{name}.{member}", inspect.getdoc(inspect.getattr_static(obj, member)) or ""


def list_examples() -> dict[str, str]:
    """Return the code of each docstring that has some."""
    found = {name: _EXAMPLE.findall(f"{text}\n") for name, text in list_docstrings()}
    return {name: textwrap.dedent("\n".join(blocks)) for name, blocks in found.items() if blocks}


EXAMPLES = list_examples()


def test_the_names_that_a_newcomer_meets_first_have_an_example():
    assert _NEED_EXAMPLE - set(EXAMPLES) == set()
    assert {name: code for name, code in EXAMPLES.items() if not 2 <= len(code.strip().splitlines()) <= 8} == {}


def run_code(code: str, names: dict[str, Any]) -> None:
    """Run the code of a cell, which may await."""
    compiled = compile(code, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(compiled, names)
    if inspect.iscoroutine(result):
        asyncio.run(result)


@pytest.fixture(scope="module")
def example_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dtkit.Cluster]:
    """The only cluster in a runtime folder, so that `attach` finds it; in a folder for what examples write."""
    with pytest.MonkeyPatch.context() as patch:
        folder: Path = tmp_path_factory.mktemp("examples")
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
        patch.chdir(folder)
        with dtkit.Cluster(2, threads=1) as cluster:
            yield cluster


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(example_cluster: dtkit.Cluster, name: str):
    other = small.train(example_cluster, steps=2, name="other")
    other.wait(60)
    run = small.train(example_cluster, steps=40, start=False)
    run.step(2)
    X, y = small.data()
    names = {"__name__": "__main__", "cluster": example_cluster, "run": run, "other": other, "model": small.net()}
    names |= {"X": X, "y": y, "sgd": small.sgd, "dtkit": dtkit, "torch": torch, "nn": nn, "os": os}
    run_code(EXAMPLES[name], names)
    for each in (run, names["run"]):
        each.stop(60)
    remove_panel("Loss of rank 0")

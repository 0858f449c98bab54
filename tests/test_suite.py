"""The test suite itself: imports between modules, names of tests, and the cases that `make test` chooses."""

from __future__ import annotations

import ast
import itertools
from typing import TYPE_CHECKING

import pytest

from tests.support.pairwise import choose_covering, pairs_of

if TYPE_CHECKING:
    from pathlib import Path

LONGEST_NAME = 80


def list_imports(path: Path) -> list[str]:
    """Return the modules, and the names out of modules, that a file imports."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


def test_no_module_imports_a_test_module(root: Path):
    importing = {
        str(path.relative_to(root)): name
        for path in (root / "tests").rglob("*.py")
        for name in list_imports(path)
        if name.startswith("tests.") and any(part.startswith("test_") for part in name.split("."))
    }
    assert importing == {}


def test_names_of_tests_are_short(root: Path):
    names = [
        node.name
        for path in (root / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert [name for name in names if len(name) > LONGEST_NAME] == []


@pytest.mark.parametrize("factors", [[2, 2, 2], [3, 4, 2], [4, 4, 4, 2]], ids=str)
def test_the_pairwise_choice_covers_each_pair_with_fewer_cases_than_the_product(factors: list[int]):
    product = list(itertools.product(*([f"{k}.{value}" for value in range(n)] for k, n in enumerate(factors))))
    candidates = [pairs_of(values) for values in product]
    chosen = choose_covering(candidates)
    assert set().union(*(candidates[index] for index in chosen)) == set().union(*candidates)
    assert len(chosen) < len(product)

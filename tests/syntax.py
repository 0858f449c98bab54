"""The syntax trees of a folder's files, for tests of what no file may do."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def nodes(folder: Path) -> Iterator[tuple[str, ast.AST]]:
    """All syntax nodes of a folder's files, each with "file: function", the innermost one around it."""
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder.parent).as_posix()
        for function, node in within(ast.parse(path.read_text())):
            yield f"{name}: {function}", node


def within(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """All nodes of one tree, each with the name of the innermost function around it."""
    todo: list[tuple[str, ast.AST]] = [("module", tree)]
    while todo:
        function, node = todo.pop()
        yield function, node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        todo += [(function, child) for child in ast.iter_child_nodes(node)]

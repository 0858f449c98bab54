"""The syntax trees of a folder's files, for tests of what no file may do without saying why."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Place(NamedTuple):
    """A syntax node, and the line that its statement begins on."""

    node: ast.AST
    line: int


def places(tree: ast.AST) -> Iterator[Place]:
    """All nodes of a tree, each with the first line of the innermost statement around it."""
    todo = [Place(tree, 0)]
    while todo:
        node, line = todo.pop()
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            line = min([node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", []))])
        yield Place(node, line)
        todo += [Place(child, line) for child in ast.iter_child_nodes(node)]


def nodes(folder: Path) -> Iterator[ast.AST]:
    """All nodes of a folder's files."""
    for path in sorted(folder.rglob("*.py")):
        yield from ast.walk(ast.parse(path.read_text()))


def unmarked(folder: Path, sees: Callable[[ast.AST], bool], marker: str) -> list[str]:
    """Lines that do what `sees` looks for and aren't marked, and lines that are marked and don't do it.

    A mark is a comment right above the statement that begins with "marker: " and gives the reason.
    """
    found = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        seen = {place.line for place in places(ast.parse(text)) if sees(place.node)}
        marked = set(_marked(text.splitlines(), marker))
        found += [f"{path.relative_to(folder.parent)}:{line} needs '# {marker}: why'" for line in sorted(seen - marked)]
        found += [
            f"{path.relative_to(folder.parent)}:{line} has a stale '# {marker}:'" for line in sorted(marked - seen)
        ]
    return found


def _marked(lines: list[str], marker: str) -> Iterator[int]:
    """The numbers of the lines below each comment that gives a reason."""
    for index, line in enumerate(lines):
        if re.match(rf"\s*# {marker}: \S", line):
            below = index + 1
            while lines[below].lstrip().startswith("#"):
                below += 1
            yield below + 1

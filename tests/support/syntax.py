"""Syntax trees of a folder's files, for tests of statements that need a marker comment."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Place(NamedTuple):
    """A syntax node and the first line of its statement."""

    node: ast.AST
    line: int


def iterate_places(tree: ast.AST) -> Iterator[Place]:
    """Yield all nodes of a tree, each with the first line of its innermost statement."""
    todo = [Place(tree, 0)]
    while todo:
        node, line = todo.pop()
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            line = min([node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", []))])
        yield Place(node, line)
        todo += [Place(child, line) for child in ast.iter_child_nodes(node)]


def iterate_nodes(folder: Path) -> Iterator[ast.AST]:
    """Yield all nodes of a folder's files."""
    for path in sorted(folder.rglob("*.py")):
        yield from ast.walk(ast.parse(path.read_text()))


def find_marker_errors(folder: Path, matches: Callable[[ast.AST], bool], marker: str) -> list[str]:
    """Return the statements that match without a marker, and the markers without a matching statement.

    A marker is a comment above the statement that begins with "marker: " and gives the reason.
    """
    errors = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        matching = {place.line for place in iterate_places(ast.parse(text)) if matches(place.node)}
        marked = set(_iterate_marked_lines(text.splitlines(), marker))
        errors += [
            f"{path.relative_to(folder.parent)}:{line} needs '# {marker}: why'" for line in sorted(matching - marked)
        ]
        errors += [
            f"{path.relative_to(folder.parent)}:{line} has a stale '# {marker}:'" for line in sorted(marked - matching)
        ]
    return errors


def _iterate_marked_lines(lines: list[str], marker: str) -> Iterator[int]:
    """Yield the number of the line below each marker comment."""
    for index, line in enumerate(lines):
        if re.match(rf"\s*# {marker}: \S", line):
            next_line = index + 1
            while lines[next_line].lstrip().startswith("#"):
                next_line += 1
            yield next_line + 1

"""Every block of Python in the README runs, in order, as the cells of one notebook: what it shows is what works."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tests.notebook import execute

if TYPE_CHECKING:
    from pathlib import Path

    from nbformat import NotebookNode

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "bash", ""}  # of these only python is executed; a picture in text has no language


def blocks(root: Path) -> list[tuple[str, str]]:
    """(language, source) of all fenced blocks."""
    return FENCE.findall((root / "README.md").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def done(root: Path, tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    path = tmp_path_factory.mktemp("readme") / "readme.ipynb"
    cells = [new_code_cell(source.rstrip("\n")) for language, source in blocks(root) if language == "python"]
    nbformat.write(new_notebook(cells=cells), path)
    return execute(path, timeout=120)


def said(done: NotebookNode, source: str) -> str:
    """All that the one cell with `source` printed and showed, as text."""
    (cell,) = [cell for cell in done.cells if source in cell.source]
    return "".join(
        "".join(output.get("text", "")) + output.get("data", {}).get("text/plain", "") + "\n" for output in cell.outputs
    )


def test_no_block_escapes_the_test(root: Path):
    found = blocks(root)
    assert {language for language, _ in found} == LANGUAGES
    assert (root / "README.md").read_text(encoding="utf-8").count("```") == 2 * len(found)


def test_its_targets_and_files_exist(root: Path):
    readme, makefile = ((root / name).read_text(encoding="utf-8") for name in ("README.md", "Makefile"))
    for target in re.findall(r"^make (\w+)", readme, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    local = [link for link in re.findall(r"\]\(([^)]+)\)", readme) if not link.startswith("https://")]
    hosted = re.findall(r"/HEAD/([^)?]+)|/HEAD\?urlpath=lab/tree/([^)]+)", readme)
    named = local + [a or b for a, b in hosted]
    assert "notebooks/01_quickstart.ipynb" in named
    assert "notebooks/images/dashboard.png" in named
    assert [name for name in named if not (root / name).is_file()] == []


@pytest.mark.notebook
def test_the_example_does_what_it_says(done: NotebookNode):
    assert len(set(re.findall(r"rank \d+\s+([0-9a-f]{8,})", said(done, "cluster.broadcast(")))) == 1
    (kept,) = [cell for cell in done.cells if cell.source.startswith("run = cluster.train(")]
    assert [set(output.data) for output in kept.outputs] == [{"image/png", "text/plain"}]
    assert "completed" in kept.outputs[0].data["text/plain"]
    assert "PASS" in said(done, "run.verify()")


@pytest.mark.notebook
def test_a_lost_engine_is_replaced(done: NotebookNode):
    assert "node 1 replaced: all go on from step 20" in said(done, "struck.history.events")


@pytest.mark.notebook
def test_own_loops_do_what_they_say(done: NotebookNode):
    first, second = re.search(r"\[([\d.]+), ([\d.]+)\]", said(done, "least_squares")).groups()
    assert first == second
    assert "[2.0, 2.0]" in said(done, "own_group=True")
    px = said(done, "%%px")
    assert "rank 0 of 2" in px
    assert "rank 1 of 2" in px

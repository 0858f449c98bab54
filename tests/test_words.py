"""Pictures and tables say node; code, errors and prose say rank. No view mixes the two words."""

import ast
import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Text

import dtkit
from dtkit import lessons
from dtkit._util.formatting import name_nodes
from dtkit.data.partition import Partition
from tests.support.plans import make_benchmark, make_plan
from tests.support.step_reports import make_explanation

ROOT = Path(dtkit.__file__).parent
VIEWS = sorted(
    [
        *(ROOT / "dashboard").rglob("*.py"),
        ROOT / "data" / "partition_view.py",
        ROOT / "data" / "broadcast.py",
        ROOT / "history" / "chrome_trace.py",
        ROOT / "lessons" / "drawings.py",
    ]
)
ERRORS_OF_VIEWS = ("so ranks could not agree",)
"""Errors that are raised by files with views. Errors are code."""


def list_texts(tree):
    """Return strings that aren't docstrings, with the word rank; but not names of columns, which are code."""
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        parent = parents[node]
        if isinstance(parent, ast.Expr) or not re.search(r"\branks?\b", node.value, re.IGNORECASE):
            continue
        is_name = node.value in ("rank", "ranks", "--rank")
        if is_name and isinstance(parent, ast.Subscript | ast.Dict | ast.For | ast.comprehension):
            continue
        if is_name and isinstance(parent, ast.Call) and getattr(parent.func, "attr", "") == "get":
            continue
        if is_name and isinstance(parent, ast.Tuple) and ast.unparse(parent) in COLUMNS:
            continue
        yield node.value


COLUMNS = ("('rank', 'i4')", "('rank', 'stage', 'micro_batch')")
"""Tuples of columns of arrays."""


@pytest.mark.parametrize("path", VIEWS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_view_has_a_text_about_ranks(path):
    texts = [t for t in list_texts(ast.parse(path.read_text())) if not any(error in t for error in ERRORS_OF_VIEWS)]
    if path.name == "drawings.py":
        texts = [text for text in texts if text != "ranks"]  # the argument that an error names
    assert texts == []


@pytest.mark.parametrize("path", sorted((ROOT / "dashboard/live/static").rglob("*.js")), ids=lambda path: path.name)
def test_no_text_of_the_live_view_is_about_ranks(path):
    code = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.DOTALL)
    literals = re.findall(r'"[^"\n]*"|`[^`]*`', re.sub(r"\$\{[^`{}]*\}", "", code))
    assert [text for text in literals if re.search(r"(?<!data-)\branks?\b(?! ===)", text)] == []


def read_figure(figure):
    """Return all texts of a figure."""
    figure.canvas.draw()
    return " | ".join(text.get_text() for text in figure.findobj(Text))


def read_html(view):
    """Return what a reader sees of a view's tables and pictures, alternative texts included."""
    return html.unescape(re.sub(r"data:image[^\"']*", "", view._repr_html_()))


def make_partition():
    return Partition(40, 2, labels=np.repeat([0, 1], 20), by="contiguous")


def make_schedule():
    return dtkit.Schedule("F0 F1 B0 B1\n. F0 B0 F1 B1")


FIGURES = {
    "explanation": lambda: make_explanation().figure(),
    "plan": lambda: make_plan().figure(),
    "benchmark": lambda: make_benchmark().figure(),
    "partition": lambda: make_partition().figure(),
    "schedule": lambda: make_schedule().figure(),
}
TABLES = {"explanation": make_explanation, "plan": make_plan, "benchmark": make_benchmark, "partition": make_partition}
DRAWINGS = {
    "data parallel": lessons.draw_data_parallel,
    "ring": lessons.draw_ring_all_reduce,
    "pipeline": lessons.draw_pipeline,
    "tensor parallel": lessons.draw_tensor_parallel,
    "FSDP": lessons.draw_fsdp,
}


@pytest.mark.filterwarnings("ignore:the classes of rank")
@pytest.mark.parametrize("kind", FIGURES)
def test_a_figure_says_node_and_not_rank(kind):
    text = read_figure(FIGURES[kind]())
    assert "node" in text
    assert not re.search(r"\branks?\b", text, re.IGNORECASE), text


@pytest.mark.filterwarnings("ignore:the classes of rank")
@pytest.mark.parametrize("kind", TABLES)
def test_a_table_says_node_and_not_rank(kind):
    for text in (read_html(TABLES[kind]()), str(TABLES[kind]())):
        assert not re.search(r"\branks?\b", text, re.IGNORECASE), text


def test_names_of_ranks_become_names_of_nodes():
    assert (
        name_nodes("Ranks wait: rank 1 ranks last, and frank stays") == "Nodes wait: node 1 nodes last, and frank stays"
    )


@pytest.mark.parametrize("kind", DRAWINGS)
def test_a_drawing_of_a_lesson_says_node_and_not_rank(kind):
    text = DRAWINGS[kind]()._repr_html_()
    assert "node" in text.lower()
    assert not re.search(r"\branks?\b", text, re.IGNORECASE), text


def test_one_notebook_says_once_how_ranks_and_nodes_relate():
    prose = {
        path.name: "".join("".join(c["source"]) for c in json.loads(path.read_text())["cells"])
        for path in sorted((ROOT.parent / "notebooks").glob("*.ipynb"))
    }
    relation = re.compile(r"call it\s+a \*node\*|call a rank|node 1 is rank 1")
    assert [name for name, text in prose.items() if relation.search(text)] == ["01_quickstart.ipynb"]
    assert "node 1 is rank 1" in prose["01_quickstart.ipynb"]

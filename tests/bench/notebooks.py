"""The time of each notebook next to the time that it says, and whether two engines win where the quickstart says so."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.pairs import Sample, report
from tests.support.notebook import execute

if TYPE_CHECKING:
    from nbformat import NotebookNode

FOLDER = Path(__file__).parents[2] / "notebooks"
CELL_S = 300
MINUTES = {"a": 1.0, "one": 1.0, "one to two": 2.0, "about two": 2.0}
TOLERANCE = 1.1
"""A minute or two is no exact time."""
STATED = re.compile(rf"\band ({'|'.join(sorted(MINUTES, key=len, reverse=True))}) minutes?\b")
RATIO = re.compile(r"750 samples per update: ratio (\S+) \(three rounds: (\S+) to (\S+)\)")


def notebooks() -> bool:
    """Measure all notebooks, without TensorFlow where that is not installed."""
    met = [measure(path) for path in sorted(FOLDER.glob("*.ipynb"))]
    return all(met)


def measure(path: Path) -> bool:
    start_s = time.monotonic()
    done = execute(path, CELL_S)
    seconds = time.monotonic() - start_s
    most = 60 * TOLERANCE * read_stated_minutes(done)
    met = report(f"seconds of notebook {path.stem}", Sample([seconds]), unit="s", most=most)
    return met and (not path.stem.startswith("01") or check_win(done))


def read_stated_minutes(notebook: NotebookNode) -> float:
    text = " ".join(cell.source for cell in notebook.cells[:4] if cell.cell_type == "markdown")
    (stated,) = STATED.findall(" ".join(text.split()))[:1]
    return MINUTES[stated]


def check_win(notebook: NotebookNode) -> bool:
    """Report how many times as fast two engines are with 750 samples. They need two cores that nothing else uses."""
    printed = "".join(
        output.get("text", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream"
    )
    (found,) = RATIO.findall(printed)
    return report("two engines over one process, 750 samples", Sample([float(value) for value in found]), least=1.1)

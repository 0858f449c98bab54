"""What an open dashboard costs a training: JupyterLab in a real Chromium, on the same cores as the engines.

Short and long steps are two parts, each of which ends within three minutes on two idle cores.
"""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import sync_playwright

from tests.bench.pairs import alternate, ratios, report
from tests.bench.work import LONG, SHORT
from tests.support.chromium import FLAGS, find_chromium
from tests.support.lab import Lab, Look
from tests.support.server import jupyterlab

LEAST_RATIO = 0.98
PAIRS = 5
CELL_TIMEOUT_S = 300
_SETUP = """\
import time
import torch
import dtkit
from tests.bench.work import WORKS, optimizer

work = WORKS[{name!r}]
cluster = dtkit.Cluster(2)
part, model = cluster.partition(work.data(), seed=0), cluster.broadcast(work.model())

def measure(show):
    run = cluster.train(
        model, part, loss=torch.nn.CrossEntropyLoss(), optimizer=optimizer, batch_size=work.batch,
        steps=work.warm + work.steps, start=False,
    )
    if show:
        display(run)
    run.step(work.warm)
    start = time.perf_counter()
    run.resume()
    run._driver.wait(600)  # like run.wait(), without its text progress
    print("steps/s:", work.steps / (time.perf_counter() - start))
"""


def browser_short() -> bool:
    """Compare short steps with the dashboard open in JupyterLab with the same steps without a dashboard."""
    return _compare(SHORT)


def browser_long() -> bool:
    """Compare long steps with the dashboard open in JupyterLab with the same steps without a dashboard."""
    return _compare(LONG)


def _compare(name: str) -> bool:
    with (
        tempfile.TemporaryDirectory() as folder,
        jupyterlab(Path(folder) / "lab") as server,
        sync_playwright() as playwright,
    ):
        chromium = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        try:
            lab = Lab(chromium.new_page(), server, Look().theme)
            return _measure(lab, name)
        finally:
            chromium.close()


def _measure(lab: Lab, name: str) -> bool:
    """Measure one training, in a notebook of its own."""
    print(name, flush=True)
    sources = (_SETUP.format(name=name), "measure(show=True)", "measure(show=False)", "cluster.close()")
    cells = [new_code_cell(source) for source in sources]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    lab.open(new_notebook(cells=cells, metadata={"kernelspec": kernel}))
    _run_cell(lab, 0)
    shown, hidden = (functools.partial(_read_rate, lab, index) for index in (1, 2))
    with_dashboard, without = alternate(shown, hidden, PAIRS)
    _run_cell(lab, 3)
    lab.close()
    return report(
        f"steps per second with the dashboard in a browser, {name}",
        ratios(with_dashboard, without),
        least=LEAST_RATIO,
    )


def _read_rate(lab: Lab, index: int) -> float:
    """Run a cell that measures, and return the steps per second that it printed."""
    _run_cell(lab, index)
    found = re.search(r"steps/s: (\S+)", lab.text(index))
    if found is None:
        raise RuntimeError(f"the cell printed no rate: {lab.text(index)[:500]}")
    rate = float(found[1])
    lab.page.evaluate("() => window.jupyterapp.commands.execute('notebook:clear-cell-output')")
    return rate


def _run_cell(lab: Lab, index: int) -> None:
    lab.run_cell(index)
    lab.wait_idle(CELL_TIMEOUT_S)

"""What an open dashboard costs a training: JupyterLab in a real Chromium, on the same cores as the engines.

Short and long steps are two parts. In one training, the dashboard is shown and hidden again in turn. A window with it
begins when the browser has compiled the page's code, half a minute after anybody was at the page. It ends before the
first picture for the saved notebook is drawn, and is compared with the windows before and after. Each part also prints
the processor time of all processes but the engines, which a loaded machine changes less.
"""

from __future__ import annotations

import itertools
import re
import statistics
import tempfile
import time
from pathlib import Path

from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import sync_playwright

from tests.bench.pairs import Sample, ratios, report
from tests.bench.processor_time import mark_processes, read_processor_times
from tests.bench.work import LONG, SHORT
from tests.support.chromium import FLAGS, find_chromium
from tests.support.lab import Lab, Look
from tests.support.server import jupyterlab

LEAST_RATIO = 0.98
PAIRS = 7
WINDOW_S = 20.0
FIRST_MS = 33_000  # while the browser compiles code that runs often, and somebody may be at a page that was just opened
CELL_TIMEOUT_S = 300
SHOWN_MS = 60_000
POLL_MS = 250
_SETUP = """\
import asyncio, time
import torch
import dtkit
from dtkit.dashboard import display as displays
from tests.bench.work import WORKS, optimizer

work = WORKS[{name!r}]
cluster = dtkit.Cluster(2)
part, model = cluster.partition(work.data(), seed=0), cluster.broadcast(work.model())
run = cluster.train(
    model, part, loss=torch.nn.CrossEntropyLoss(), optimizer=optimizer, batch_size=work.batch, steps=10**7, start=False,
)
run.step(work.warm)
run.resume()

async def wait_for_rows():
    before = run.status.step
    while run.status.step == before:
        await asyncio.sleep(0.01)
    return run.status.step, time.perf_counter()

async def measure():
    (first, began), _ = await wait_for_rows(), await asyncio.sleep({seconds})
    last, ended = await wait_for_rows()
    print("steps/s:", (last - first) / (ended - began))

def hide():
    displays._displays.pop(run).close()
"""
_CELLS = ("display(run)", "hide()", "await measure()", "run.stop(); cluster.close()")
_SHOW, _HIDE, _MEASURE, _CLOSE = range(1, 5)
_IS_SHOWN = """() => [...document.querySelectorAll("[data-testid=dtkit-dashboard]")].some(
  (view) => view.getClientRects().length && view.dataset.state === "running" && view.dataset.step > 0)"""


def browser_short() -> bool:
    """Compare short steps with the dashboard open in JupyterLab with the same steps without a dashboard."""
    return _compare(SHORT)


def browser_long() -> bool:
    """Compare long steps with the dashboard open in JupyterLab with the same steps without a dashboard."""
    return _compare(LONG)


def _compare(name: str) -> bool:
    mark_processes()
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
    """Measure one training, in a notebook of its own: windows with the dashboard, each between two without it."""
    print(name, flush=True)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [new_code_cell(source) for source in (_SETUP.format(name=name, seconds=WINDOW_S), *_CELLS)]
    lab.open(new_notebook(cells=cells, metadata={"kernelspec": kernel}))
    _run_cell(lab, 0)
    shown_ms: list[dict[str, float]] = []
    hidden_ms: list[dict[str, float]] = []
    shown: list[float] = []
    hidden = [_read_rate(lab, hidden_ms)]
    for _ in range(PAIRS):
        _run_cell(lab, _SHOW)
        lab.page.wait_for_function(_IS_SHOWN, timeout=SHOWN_MS, polling=POLL_MS)
        # sleeps: the browser compiles code that runs often, and takes nobody for a reader
        lab.page.wait_for_timeout(FIRST_MS)
        shown.append(_read_rate(lab, shown_ms))
        _run_cell(lab, _HIDE)
        _clear(lab, _SHOW)
        hidden.append(_read_rate(lab, hidden_ms))
        print(f"  {shown[-1]:.4g} steps/s, {hidden[-2]:.4g} before and {hidden[-1]:.4g} after", flush=True)
    _run_cell(lab, _CLOSE)
    lab.close()
    for kind in sorted({kind for times in (*shown_ms, *hidden_ms) for kind in times} - {"engines"}):
        both = [Sample([times.get(kind, 0.0) for times in each]) for each in (shown_ms, hidden_ms)]
        print(f"  processor time, ms a second, {kind}: {both[0]} with the dashboard, {both[1]} without")
    neighbors = [statistics.mean(pair) for pair in itertools.pairwise(hidden)]
    return report(
        f"steps per second with the dashboard in a browser, {name}",
        ratios(Sample(shown), Sample(neighbors)),
        least=LEAST_RATIO,
    )


def _read_rate(lab: Lab, times_ms: list[dict[str, float]]) -> float:
    """Return the steps per second of a window. Append the milliseconds of each kind of process a second."""
    lab.select(_SHOW)  # and so in sight
    before, began = read_processor_times(), time.perf_counter()
    _run_cell(lab, _MEASURE)
    after, ended = read_processor_times(), time.perf_counter()
    found = re.search(r"steps/s: (\S+)", lab.text(_MEASURE))
    if found is None:
        raise RuntimeError(f"the cell printed no rate: {lab.text(_MEASURE)[:500]}")
    _clear(lab, _MEASURE)
    times_ms.append({kind: 1000 * (after[kind] - before.get(kind, 0.0)) / (ended - began) for kind in after})
    return float(found[1])


def _clear(lab: Lab, index: int) -> None:
    lab.select(index)
    lab.page.evaluate("() => window.jupyterapp.commands.execute('notebook:clear-cell-output')")


def _run_cell(lab: Lab, index: int) -> None:
    """Run a cell, and look for its end only now and then: by default, Playwright looks in each frame of the page."""
    lab.run_cell(index)
    lab.page.wait_for_function("() => window.dtkitLab.idle()", timeout=1000 * CELL_TIMEOUT_S, polling=POLL_MS)
    lab.wait_idle()

"""What an open dashboard costs a training: JupyterLab in a real Chromium, on the same cores as the engines.

Short and long steps are two parts. The measured window begins when the page shows the dashboard. Besides steps per
second, each part prints the processor time of all processes but the engines, which a loaded machine changes less.
"""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import sync_playwright

from tests.bench.pairs import Sample, alternate, ratios, report
from tests.bench.processor_time import mark_processes, read_processor_times
from tests.bench.work import LONG, SHORT
from tests.support.chromium import FLAGS, find_chromium
from tests.support.lab import Lab, Look
from tests.support.server import jupyterlab

LEAST_RATIO = 0.98
PAIRS = 5
STEPS = {SHORT: 24_000, LONG: 300}  # ten seconds
CELL_TIMEOUT_S = 300
SHOWN_MS = 60_000
POLL_MS = 250
_SETUP = """\
import asyncio, time
import torch
import dtkit
from dtkit.dashboard.display import wait_until_replaced
from tests.bench.work import WORKS, optimizer

work = WORKS[{name!r}]
cluster = dtkit.Cluster(2)
part, model = cluster.partition(work.data(), seed=0), cluster.broadcast(work.model())

run = None

def prepare(show):
    global run
    if run is not None:
        wait_until_replaced(run, 60)  # its picture for the saved notebook is drawn after its end
    run = cluster.train(
        model, part, loss=torch.nn.CrossEntropyLoss(), optimizer=optimizer, batch_size=work.batch,
        steps=work.warm + {steps}, start=False,
    )
    if show:
        display(run)
    run.step(work.warm)

async def measure():
    start = time.perf_counter()
    run.resume()
    await asyncio.to_thread(run._driver.wait, 600)  # like `await run`, without its text progress
    print("steps/s:", {steps} / (time.perf_counter() - start))
"""
_CELLS = ("prepare(show=True)", "prepare(show=False)", "await measure()", "cluster.close()")
_SHOWN, _HIDDEN, _MEASURE, _CLOSE = range(1, 5)
_IS_SHOWN = """() => [...document.querySelectorAll("[data-testid=dtkit-dashboard]")].some(
  (view) => view.getClientRects().length && view.dataset.state === "paused")"""


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
    """Measure one training, in a notebook of its own."""
    print(name, flush=True)
    setup = _SETUP.format(name=name, steps=STEPS[name])
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [new_code_cell(source) for source in (setup, *_CELLS)]
    lab.open(new_notebook(cells=cells, metadata={"kernelspec": kernel}))
    _run_cell(lab, 0)
    shown_ms: list[dict[str, float]] = []
    hidden_ms: list[dict[str, float]] = []
    shown = functools.partial(_read_rate, lab, STEPS[name], _SHOWN, shown_ms)
    hidden = functools.partial(_read_rate, lab, STEPS[name], _HIDDEN, hidden_ms)
    with_dashboard, without = alternate(shown, hidden, PAIRS)
    _run_cell(lab, _CLOSE)
    lab.close()
    for kind in sorted({kind for times in (*shown_ms, *hidden_ms) for kind in times} - {"engines"}):
        both = [Sample([times.get(kind, 0.0) for times in each]) for each in (shown_ms, hidden_ms)]
        print(f"  processor time, ms a second, {kind}: {both[0]} with the dashboard, {both[1]} without")
    return report(
        f"steps per second with the dashboard in a browser, {name}",
        ratios(with_dashboard, without),
        least=LEAST_RATIO,
    )


def _read_rate(lab: Lab, num_steps: int, cell: int, times_ms: list[dict[str, float]]) -> float:
    """Train once, and return the steps per second. Append the milliseconds of each kind of process a second."""
    _run_cell(lab, cell)
    if cell == _SHOWN:
        lab.page.wait_for_function(_IS_SHOWN, timeout=SHOWN_MS, polling=POLL_MS)
    before = read_processor_times()
    _run_cell(lab, _MEASURE)
    after = read_processor_times()
    found = re.search(r"steps/s: (\S+)", lab.text(_MEASURE))
    if found is None:
        raise RuntimeError(f"the cell printed no rate: {lab.text(_MEASURE)[:500]}")
    rate = float(found[1])
    seconds = num_steps / rate
    times_ms.append({kind: 1000 * (after[kind] - before.get(kind, 0.0)) / seconds for kind in after})
    for index in (cell, _MEASURE):
        lab.select(index)
        lab.page.evaluate("() => window.jupyterapp.commands.execute('notebook:clear-cell-output')")
    return rate


def _run_cell(lab: Lab, index: int) -> None:
    """Run a cell, and look for its end only now and then: by default, Playwright looks in each frame of the page."""
    lab.run_cell(index)
    lab.page.wait_for_function("() => window.dtkitLab.idle()", timeout=1000 * CELL_TIMEOUT_S, polling=POLL_MS)
    lab.wait_idle()

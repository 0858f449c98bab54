"""Costs of the live dashboard: kernel CPU and bytes per update, and the speed of a training next to a browser."""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import sync_playwright

from dtkit.dashboard.live.messages import MessageBuilder
from tests.bench.pairs import PAIRS, Sample, alternate, ratios, report
from tests.support.chromium import FLAGS, find_chromium
from tests.support.fake_source import FakeSource
from tests.support.lab import Lab
from tests.support.server import jupyterlab

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtkit.dashboard.live.messages import Message

UPDATES, STEPS_AN_UPDATE = 100, 10
CLICKS, WATCHED_S = 7, 15.0

SETUP = """
import asyncio, time, torch, dtkit
from torch import nn
cluster = dtkit.Cluster({engines}, threads=1)
torch.manual_seed(0)
layers = [nn.Linear(64, 512), nn.ReLU()]
for _ in range(3):
    layers += [nn.Linear(512, 512), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(512, 10))
data = torch.randn(8192, 64), torch.randint(10, (8192,))
def train(steps, **more):
    return cluster.train(model, data, loss=nn.CrossEntropyLoss(), steps=steps, batch_size=512 * {engines},
                         optimizer=lambda p: torch.optim.SGD(p, lr=0.001), **more)
async def speed(show, seconds=6.0):
    run = train(10_000_000)
    if show:
        run.dashboard()
    await asyncio.sleep(seconds)
    steps = run.stop()
    print("speed", steps / run.status.elapsed_s)
"""
WATCH = """
run = train(10_000_000)
updates = []
run.subscribe(lambda: updates.append((run.status.step, time.time())))
run
"""
REPORT = """
import json
print(json.dumps({"updates": updates, "pauses": [e.time for e in run.history.events if e.kind == "pause"]}))
run.stop()
"""
_OBSERVE = """() => {
  const root = document.querySelector("[data-testid=dtkit-dashboard]");
  window.drawn = [];
  const note = () => window.drawn.push([Number(root.dataset.step), Date.now() / 1000]);
  new MutationObserver(() => requestAnimationFrame(note))
    .observe(root, { attributes: true, attributeFilter: ["data-step"] });
}"""


def dashboard() -> bool:
    """Measure all parts."""
    return all(
        [
            measure_updates(4, 3.0, 10_000),
            measure_updates(256, 10.0, None),
            measure_opening(),
            *measure_in_browser(1),
            *measure_in_browser(2),
        ]
    )


# -- in the kernel alone ------------------------------------------------------------------------------------------


def measure_updates(ranks: int, most_ms: float, most_bytes: int | None) -> bool:
    """Measure the CPU of composing an update as JSON, and its bytes, with all panels shown."""
    source = FakeSource(ranks=ranks, steps=100_000, strips=True)
    source.advance(600)
    builder = MessageBuilder(source)
    _measure_size(builder.build_snapshot())
    cpu_ms, sizes = [], []
    for _ in range(UPDATES):
        source.advance(STEPS_AN_UPDATE)
        gc.collect()  # garbage of the fake run
        start = time.thread_time()
        size = _measure_size(builder.build_change())
        cpu_ms.append(1000 * (time.thread_time() - start))
        sizes.append(size)
    met = report(f"kernel CPU an update, {ranks} nodes", Sample(cpu_ms), unit="ms", most=most_ms)
    sent = Sample([max(sizes)])
    if most_bytes is None:
        print(f"      bytes of the largest update, {ranks} nodes: {sent}")
        return met
    return report(f"bytes of the largest update, {ranks} nodes", sent, most=most_bytes) and met


def _measure_size(message: Message) -> int:
    return len(json.dumps(message.content)) + sum(map(len, message.buffers))


def measure_opening() -> bool:
    """Measure the first message for a run of 100,000 steps, which a newly opened page gets."""
    source = FakeSource(ranks=4, steps=100_000)
    source.advance(100_000)
    seconds = []
    for _ in range(PAIRS):
        start = time.perf_counter()
        _measure_size(MessageBuilder(source).build_snapshot())
        seconds.append(time.perf_counter() - start)
    return report("opening a run of 100,000 steps, in the kernel", Sample(seconds), unit="s", most=1.0)


# -- in a real browser --------------------------------------------------------------------------------------------


def measure_in_browser(engines: int) -> list[bool]:
    """Measure delays and the loss of training speed. With one engine on two cores, one core is spare."""
    with _lab() as lab:
        cells = [
            SETUP.format(engines=engines),
            WATCH,
            REPORT,
            *(f"await speed({k % 2 == 1})" for k in range(2 * PAIRS)),
        ]
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        lab.open(new_notebook(cells=[new_code_cell(cell) for cell in cells], metadata={"kernelspec": kernel}))
        _run_cell(lab, 0)
        met = _measure_delays(lab) if engines == 1 else []
        cell_indices = iter(range(3, 3 + 2 * PAIRS))
        shown, hidden = alternate(
            lambda: _measure_speed(lab, next(cell_indices)), lambda: _measure_speed(lab, next(cell_indices)), PAIRS
        )
        spare = "a core to spare" if engines == 1 else "no core to spare"
        share = ratios(shown, hidden)
        if engines == 1:
            return [*met, report(f"speed with an open dashboard, {spare}", share, least=0.98)]
        print(f"      speed with an open dashboard, {spare}: {share}", flush=True)
        return met


@contextlib.contextmanager
def _lab() -> Iterator[Lab]:
    """Run JupyterLab in Chromium during the block."""
    with tempfile.TemporaryDirectory() as folder, jupyterlab(Path(folder) / "lab") as server:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
            lab = Lab(browser.new_page(viewport={"width": 1400, "height": 1000}), server, "JupyterLab Light")
            yield lab
            lab.close()
            browser.close()


def _run_cell(lab: Lab, cell: int) -> None:
    lab.run_cell(cell)
    lab.wait_idle(timeout=240)


def _measure_speed(lab: Lab, cell: int) -> float:
    """Return the steps per second that the cell prints."""
    _run_cell(lab, cell)
    lab.wait_text(cell, "speed")
    return float(lab.text(cell).split("speed ")[1].split()[0])


def _measure_delays(lab: Lab) -> list[bool]:
    """Measure from the end of a dispatch to its picture, and from a click on Pause to the last step."""
    lab.run_cell(1)
    lab.page.wait_for_function("() => Number(document.querySelector('.dtkit')?.dataset.step) > 20", timeout=120_000)
    lab.page.evaluate(_OBSERVE)
    lab.page.wait_for_function(
        "(seconds) => window.drawn.length > 1 && window.drawn.at(-1)[1] - window.drawn[0][1] > seconds",
        arg=WATCHED_S,
        timeout=120_000,
    )
    drawn = lab.page.evaluate("() => window.drawn")
    clicks = [_click(lab) for _ in range(CLICKS)]
    _run_cell(lab, 2)
    lab.wait_text(2, "updates")
    report_data: dict[str, Any] = json.loads(lab.text(2).splitlines()[0])
    first_seen = {}
    for step, at in report_data["updates"]:
        first_seen.setdefault(step, at)
    shown = [1000 * (at - first_seen[step]) for step, at in drawn if step in first_seen]
    pauses = [at - clicked for clicked, at in zip(clicks, report_data["pauses"], strict=True)]
    return [
        report("from the end of a dispatch to its picture", Sample(shown), unit="ms", most=300),
        report("from a click on Pause to the last step", Sample(pauses), unit="s", most=1.5),
    ]


def _click(lab: Lab) -> float:
    """Press Pause, wait until the run is paused, and resume. Return the time of the click."""
    page = lab.page
    at: float = page.evaluate(
        "() => { document.querySelector('[data-testid=pause]').click(); return Date.now() / 1000; }"
    )
    page.wait_for_function("() => document.querySelector('.dtkit').dataset.state === 'paused'", timeout=30_000)
    page.evaluate("() => document.querySelector('[data-testid=resume]').click()")
    page.wait_for_function("() => document.querySelector('.dtkit').dataset.state === 'running'", timeout=30_000)
    return at

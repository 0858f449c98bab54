"""What the live dashboard costs: kernel CPU and bytes an update, and a training's speed beside an open browser."""

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
from tests.support.chromium import FLAGS, chromium
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
landed = []
run.subscribe(lambda: landed.append((run.status.step, time.time())))
run
"""
LANDED = """
import json
print(json.dumps({"landed": landed, "pauses": [e.time for e in run.history.events if e.kind == "pause"]}))
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
    """Every part of it."""
    return all([updates(4, 3.0, 10_000), updates(256, 10.0, None), opening(), *in_a_browser(1), *in_a_browser(2)])


# -- in the kernel alone ------------------------------------------------------------------------------------------


def updates(ranks: int, most_ms: float, most_bytes: int | None) -> bool:
    """CPU of composing an update and making JSON of it, and its bytes, with everything shown."""
    source = FakeSource(ranks=ranks, steps=100_000, strips=True)
    source.advance(600)
    feed = MessageBuilder(source)
    _size(feed.build_snapshot())
    spent, sizes = [], []
    for _ in range(UPDATES):
        source.advance(STEPS_AN_UPDATE)
        gc.collect()  # the made-up run's own garbage
        begun = time.thread_time()
        size = _size(feed.build_change())
        spent.append(1000 * (time.thread_time() - begun))
        sizes.append(size)
    met = report(f"kernel CPU an update, {ranks} nodes", Sample(spent), unit="ms", most=most_ms)
    sent = Sample([max(sizes)])
    if most_bytes is None:
        print(f"      bytes of the largest update, {ranks} nodes: {sent}")
        return met
    return report(f"bytes of the largest update, {ranks} nodes", sent, most=most_bytes) and met


def _size(message: Message) -> int:
    return len(json.dumps(message.content)) + sum(map(len, message.buffers))


def opening() -> bool:
    """A run of 100,000 steps, as a page that is opened now gets it."""
    source = FakeSource(ranks=4, steps=100_000)
    source.advance(100_000)
    taken = []
    for _ in range(PAIRS):
        begun = time.perf_counter()
        _size(MessageBuilder(source).build_snapshot())
        taken.append(time.perf_counter() - begun)
    return report("opening a run of 100,000 steps, in the kernel", Sample(taken), unit="s", most=1.0)


# -- in a real browser --------------------------------------------------------------------------------------------


def in_a_browser(engines: int) -> list[bool]:
    """How soon things are seen and done, and what training loses; with a core to spare for one engine of two cores."""
    with _lab() as lab:
        cells = [
            SETUP.format(engines=engines),
            WATCH,
            LANDED,
            *(f"await speed({k % 2 == 1})" for k in range(2 * PAIRS)),
        ]
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        lab.open(new_notebook(cells=[new_code_cell(cell) for cell in cells], metadata={"kernelspec": kernel}))
        _finish(lab, 0)
        met = _seen(lab) if engines == 1 else []
        following = iter(range(3, 3 + 2 * PAIRS))
        shown, hidden = alternate(lambda: _speed(lab, next(following)), lambda: _speed(lab, next(following)), PAIRS)
        spare = "a core to spare" if engines == 1 else "no core to spare"
        share = ratios(shown, hidden)
        if engines == 1:
            return [*met, report(f"speed with an open dashboard, {spare}", share, least=0.98)]
        print(f"      speed with an open dashboard, {spare}: {share}", flush=True)
        return met


@contextlib.contextmanager
def _lab() -> Iterator[Lab]:
    """JupyterLab in Chromium, for as long as the block runs."""
    with tempfile.TemporaryDirectory() as folder, jupyterlab(Path(folder) / "lab") as server:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
            lab = Lab(browser.new_page(viewport={"width": 1400, "height": 1000}), server, "JupyterLab Light")
            yield lab
            lab.close()
            browser.close()


def _finish(lab: Lab, cell: int) -> None:
    lab.run_cell(cell)
    lab.wait_idle(timeout=240)


def _speed(lab: Lab, cell: int) -> float:
    """Steps a second, as the cell printed them."""
    _finish(lab, cell)
    lab.wait_text(cell, "speed")
    return float(lab.text(cell).split("speed ")[1].split()[0])


def _seen(lab: Lab) -> list[bool]:
    """From the end of a dispatch to its picture, and from a click on Pause to the last step."""
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
    _finish(lab, 2)
    lab.wait_text(2, "landed")
    found: dict[str, Any] = json.loads(lab.text(2).splitlines()[0])
    first = {}
    for step, at in found["landed"]:
        first.setdefault(step, at)
    shown = [1000 * (at - first[step]) for step, at in drawn if step in first]
    pauses = [at - clicked for clicked, at in zip(clicks, found["pauses"], strict=True)]
    return [
        report("from the end of a dispatch to its picture", Sample(shown), unit="ms", most=300),
        report("from a click on Pause to the last step", Sample(pauses), unit="s", most=1.5),
    ]


def _click(lab: Lab) -> float:
    """Press Pause, wait until it is, and resume; returns when it was pressed."""
    page = lab.page
    at: float = page.evaluate(
        "() => { document.querySelector('[data-testid=pause]').click(); return Date.now() / 1000; }"
    )
    page.wait_for_function("() => document.querySelector('.dtkit').dataset.state === 'paused'", timeout=30_000)
    page.evaluate("() => document.querySelector('[data-testid=resume]').click()")
    page.wait_for_function("() => document.querySelector('.dtkit').dataset.state === 'running'", timeout=30_000)
    return at

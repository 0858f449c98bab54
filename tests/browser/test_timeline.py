"""A pipeline's timeline live in JupyterLab, measured on real engines, with the plan outlined behind it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Locator, expect

from tests.support.lab import Lab, Look

if TYPE_CHECKING:
    from nbformat import NotebookNode

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TRAINING_S = 60
CELLS = (
    """
import time
import torch
from torch import nn
import dtkit

class Slow(nn.Module):
    # Layer of a declared cost: it sleeps in its forward and backward pass.
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x):
        time.sleep(0.01)
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: time.sleep(0.01))
        return y

cluster = dtkit.Cluster(2, threads=1, lease=5)
""",
    """
run = cluster.train(
    nn.Sequential(Slow(), Slow(), Slow(), Slow()),
    (torch.randn(256, 256), torch.randn(256, 256)),
    loss=nn.MSELoss(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    batch_size=64,
    steps=100_000,
    strategy=dtkit.Pipeline(2, 4, schedule="ZBVZeroBubble", balance_by="parameters"),
)
run
""",
)


def notebook() -> NotebookNode:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=[new_code_cell(source.strip()) for source in CELLS], metadata={"kernelspec": kernel})


def get_box(path: Locator) -> dict[str, float]:
    """Return the bounding box of a path."""
    bounds: dict[str, float] = path.evaluate(
        "(el) => { const { x, y, width, height } = el.getBBox(); return { x, y, width, height }; }"
    )
    return bounds


@pytest.mark.parametrize(
    "look",
    [Look("JupyterLab Light", 1400, 1700), Look("JupyterLab Dark", 760, 1900)],
    indirect=True,
    ids=["light-wide", "dark-narrow"],
)
def test_planned_schedule_is_outlined_behind_the_measured_one(lab: Lab, tmp_path: Path, look: Look):
    lab.open(notebook())
    lab.run_all()
    lab.wait_text(1, "dtkit-live", timeout=TRAINING_S)
    lab.select(1)
    dashboard = lab.cell(1).get_by_test_id("dtkit-dashboard")
    panel = dashboard.get_by_test_id("timeline-panel")
    expect(panel).to_be_visible(timeout=TRAINING_S * 1000)
    lab.page.wait_for_function(
        "() => Number(document.querySelector('.dtkit').dataset.step) > 3", timeout=TRAINING_S * 1000
    )
    dashboard.get_by_test_id("pause").click()
    expect(dashboard).to_have_attribute("data-state", "paused", timeout=TRAINING_S * 1000)
    shots = Path(os.environ.get("DTKIT_SCREENSHOTS", tmp_path))
    panel.scroll_into_view_if_needed()
    lab.screenshot(shots / f"timeline-{look.width}.png")

    boxes = panel.locator(".dtk-strip-boxes path")
    kinds = set(boxes.evaluate_all("(all) => all.map((el) => el.dataset.phase)"))
    assert kinds >= {"forward", "backward input", "backward weight", "send", "receive", "waiting"}
    legend = panel.locator(".dtk-legend li").all_text_contents()
    assert kinds | {"planned"} == set(legend)

    plan = panel.locator(".dtk-strip-plan path")
    assert plan.evaluate("(el) => getComputedStyle(el).fill") == "none"
    assert plan.evaluate("(el) => getComputedStyle(el).stroke") != "none"
    assert len(re.findall("M", plan.get_attribute("d") or "")) == 2 * 2 * 4 * 3  # F, I and W of two stages a rank
    layers = panel.locator("svg > g").evaluate_all("(all) => all.map((el) => el.getAttribute('class'))")
    assert layers.index("dtk-strip-plan") < layers.index("dtk-strip-boxes")
    forward = get_box(panel.locator(".dtk-strip-boxes [data-phase=forward]"))
    outline = get_box(plan)
    assert outline["y"] < forward["y"]  # visible above and below the measured boxes
    assert outline["y"] + outline["height"] > forward["y"] + forward["height"]

    note = panel.locator("h3 .dtk-note")
    expect(note).to_have_text(re.compile(r"bubble \d+ % measured, \d+(\.\d)? % by simulation"))
    svg = panel.locator("svg.dtk-chart").bounding_box()
    drawn = panel.locator(".dtk-strip-boxes [data-phase=forward]").get_attribute("d") or ""
    first = re.match(r"M([\d.]+),(\d+)h([\d.]+)v(\d+)", drawn)
    assert svg is not None
    assert first is not None
    x, y, width, height = map(float, first.groups())
    lab.page.mouse.move(svg["x"] + x + width / 2, svg["y"] + y + height / 2)
    expect(note).to_have_text(re.compile(r"^node 0: forward · micro-batch 0 · stage 0 · [\d.]+ ms$"))

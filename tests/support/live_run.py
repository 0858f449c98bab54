"""A run that goes on until it is stopped, and its dashboard in JupyterLab."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from tests.support.lab import Lab

WAIT_MS = 60_000
TRAIN = """
import torch, dtkit
from torch import nn

cluster = dtkit.Cluster(2, threads=1)
data = torch.randn(640, 8), torch.randint(3, (640,))
run = cluster.train(nn.Linear(8, 3), data, loss=nn.CrossEntropyLoss(),
                    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), batch_size=64, steps=1_000_000)
"""


def get_dashboard(lab: Lab, cell: int) -> Locator:
    """Return the dashboard below a cell."""
    return lab.cell(cell).get_by_test_id("dtkit-dashboard")


def wait_for_step(lab: Lab, cell: int, above: int) -> int:
    """Wait until the dashboard below a cell shows a later step, and return it."""
    lab.select(cell)
    dashboard = get_dashboard(lab, cell)
    expect(dashboard).to_be_visible(timeout=WAIT_MS)
    element = dashboard.element_handle()
    lab.page.wait_for_function(
        "([element, above]) => Number(element.dataset.step) > above", arg=[element, above], timeout=WAIT_MS
    )
    return int(dashboard.get_attribute("data-step") or -1)

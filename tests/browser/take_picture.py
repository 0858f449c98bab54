"""The README's picture: `python -m tests.browser.take_picture` trains in JupyterLab and takes its dashboard, twice.

It writes notebooks/images/dashboard.png and dashboard-dark.png. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from tests.support.chromium import FLAGS, find_chromium
from tests.support.lab import Lab
from tests.support.server import jupyterlab

IMAGES = Path(__file__).resolve().parents[2] / "notebooks" / "images"
THEMES = {"JupyterLab Light": "dashboard.png", "JupyterLab Dark": "dashboard-dark.png"}
WINDOW = {"width": 1440, "height": 2200}
"""CSS pixels, in which the upper panels are on a screen, and all of the dashboard is in sight."""
MARGIN = 12
"""CSS pixels below the last panel of the picture."""
SCALE = 2
COLORS = 96
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
STEPS = 600, 1000
"""Enough steps for curves with a form, and between the pictures for speed without the work that another theme makes."""

TRAIN = """
import torch
from sklearn.datasets import load_digits
from torch import nn

import dtkit

X, y = load_digits(return_X_y=True)
X = (X / 16).astype("float32").reshape(-1, 1, 8, 8)


class ConvNet(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
        )


torch.manual_seed(0)
cluster = dtkit.Cluster(2, threads=1, lease=5)
run = cluster.train(
    ConvNet(),
    (X[300:], y[300:]),
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.4),
    batch_size=256,
    epochs=400,
    validation=(X[:300], y[:300]),
    metrics={"accuracy": lambda output, target: (output.argmax(1) == target).float().mean()},
)
run
"""


def write_small_png(picture: bytes, path: Path) -> None:
    """Write a picture with a palette, in a third of the bytes."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)


def take_upper_panels(page: Page) -> bytes:
    """Return a picture of the dashboard down to the times of a step."""
    dashboard, last = (page.get_by_test_id(name).bounding_box() for name in ("dtkit-dashboard", "time-panel"))
    assert dashboard is not None
    assert last is not None
    clip = {
        "x": dashboard["x"],
        "y": dashboard["y"],
        "width": dashboard["width"],
        "height": last["y"] + last["height"] + MARGIN - dashboard["y"],
    }
    return page.screenshot(clip=clip, animations="disabled")  # type: ignore[arg-type]


def main() -> None:
    """Take the picture in both themes, from one run, near the `STEPS`."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,  # a closing cluster removes its own files
        jupyterlab(Path(folder) / "lab") as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        page = browser.new_context(viewport=WINDOW, device_scale_factor=SCALE).new_page()
        lab = Lab(page, server, "JupyterLab Light")
        lab.open(new_notebook(cells=[new_code_cell(TRAIN)], metadata={"kernelspec": KERNEL}))
        for command in ("application:toggle-left-area", "statusbar:toggle"):
            lab.command(command)
        lab.run_all()
        dashboard = lab.cell(0).get_by_test_id("dtkit-dashboard")
        expect(dashboard).to_have_attribute("data-state", "running", timeout=60_000)
        lab.select(0)
        for step, (theme, name) in zip(STEPS, THEMES.items(), strict=True):
            lab.set_theme(theme)
            page.wait_for_function(
                "(step) => document.querySelector('[data-testid=dtkit-dashboard]').dataset.step > step",
                arg=step,
                timeout=240_000,
            )
            write_small_png(take_upper_panels(page), IMAGES / name)
        lab.close()
        browser.close()


if __name__ == "__main__":
    main()

"""The how-to pages' pictures: `python -m tests.browser.take_how_to_pictures [NAME ...]` runs their code in JupyterLab.

It writes notebooks/images/NAME.png and NAME-dark.png. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import dataclasses
import io
import re
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image, ImageChops
from playwright.sync_api import sync_playwright

from tests.browser.take_picture import IMAGES, KERNEL, SCALE, write_small_png
from tests.support.chromium import FLAGS, find_chromium
from tests.support.lab import CellFailedError, Lab
from tests.support.server import jupyterlab

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

DOCS = Path(__file__).resolve().parents[2] / "docs"
SET_UP, SET_UP_LINK = "how-to/index", "(index.md#set-up)"
THEMES = {"JupyterLab Light": ".png", "JupyterLab Dark": "-dark.png"}
WINDOW = {"width": 1020, "height": 4000}
"""CSS pixels, hardly wider than the text of a page, in which all outputs of a page are on screen."""
MARGIN = 2
"""CSS pixels around a picture."""
CELL_S = 180
HIDE_EARLIER_OUTPUTS = """(part) => {
  let other = part.closest(".jp-OutputArea-child");
  while ((other = other.previousElementSibling)) other.style.visibility = "hidden";
}"""


@dataclasses.dataclass(frozen=True)
class Picture:
    """Place of a picture: the output of a page's block, or a part of it."""

    page: str
    block: int = 0
    part: str = ".jp-OutputArea-output:visible >> nth=-1"
    """Selector within the output. The default is the value of the last line."""
    last: str | None = None
    """Selector of the last thing that is in the picture; without it, all is."""
    is_long: bool = False
    """Whether the picture is so long that half of the resolution has to do."""
    file: str | None = None
    """HTML file in the notebook's folder, of which the picture is taken instead."""


DASHBOARD = "[data-testid=dtkit-dashboard]"
SECOND_TABLE = "table >> nth=1"
TIMES = "[data-testid=time-panel]"
PICTURES = {
    "options": Picture("how-to/options", part=DASHBOARD, last=TIMES),
    "log-numbers": Picture("how-to/log-numbers", part=DASHBOARD, last=TIMES),
    "memory": Picture("how-to/memory", last=SECOND_TABLE),
    "several-runs": Picture("how-to/several-runs"),
    "resume": Picture("how-to/resume", block=2, part=DASHBOARD, last=TIMES),
    "pause": Picture("how-to/pause", part=DASHBOARD, last=TIMES),
    "errors": Picture("how-to/errors", part=DASHBOARD, last="[data-testid=loss-chart]"),
    "hang": Picture("how-to/hang", block=2),
    "lost-engine": Picture("how-to/lost-engine", part=DASHBOARD, last="[data-testid=gradient-norm-chart]"),
    "lost-engine-log": Picture("how-to/lost-engine", part="[data-testid=log]"),
    "speed": Picture("how-to/speed", block=1),
    "speed-figure": Picture("how-to/speed", block=2, is_long=True),
    "report": Picture("how-to/report", file="report.html"),
    "data": Picture("guides/data"),
    "search": Picture("guides/map-and-search", block=1),
    "explain": Picture("guides/inside-a-step", block=1, last=SECOND_TABLE),
}


def read_blocks(page: str) -> list[str]:
    """Return the Python blocks of a page, after that of the set-up if the page goes on from it."""
    needs_set_up = SET_UP_LINK in (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return [*(_read_own_blocks(SET_UP) if needs_set_up else []), *_read_own_blocks(page)]


def _read_own_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)


def take_page(lab: Lab, page: str, pictures: dict[str, Picture]) -> None:
    """Run the blocks of one page, and take all of its pictures."""
    skipped = len(read_blocks(page)) - len(_read_own_blocks(page))
    cells = [new_code_cell(source.rstrip("\n")) for source in [*read_blocks(page), "cluster.close()"]]
    lab.open(new_notebook(cells=cells, metadata={"kernelspec": KERNEL}))
    for command in ("application:toggle-left-area", "statusbar:toggle"):
        lab.command(command)
    for index in range(skipped + 1 + max(picture.block for picture in pictures.values())):
        lab.run_cell(index)
        with suppress(CellFailedError):  # a page may show an error
            lab.wait_idle(CELL_S)
    for theme, ending in THEMES.items():
        lab.set_theme(theme)
        # sleeps: two updates of a dashboard in its new colors
        lab.page.wait_for_timeout(2000)
        for name, picture in pictures.items():
            placed = dataclasses.replace(picture, block=skipped + picture.block)
            write_small_png(take_part(lab, placed, theme), IMAGES / f"{name}{ending}")
    lab.set_theme("JupyterLab Light")
    lab.run_cell(len(cells) - 1)
    lab.wait_idle()


def take_part(lab: Lab, picture: Picture, theme: str) -> bytes:
    """Return a picture in a theme."""
    if picture.file is not None:
        return take_file(lab, picture.file, theme)
    lab.select(picture.block)
    output = lab.cell(picture.block).locator(".jp-Cell-outputWrapper")
    part = output.locator(picture.part)
    part.evaluate(HIDE_EARLIER_OUTPUTS)  # the feet of their last line would be in the margin
    last = output.locator(picture.last) if picture.last else part
    taken = cut_empty_rows(take_between(lab.page, part, last))
    return halve(taken) if picture.is_long else taken


def take_between(page: Page, first: Locator, last: Locator) -> bytes:
    """Return a picture of what lies between the top of the first and the bottom of the last element."""
    box, end = first.bounding_box(), last.bounding_box()
    assert box is not None
    assert end is not None
    height = end["y"] + end["height"] - box["y"] + 2 * MARGIN
    clip = {"x": box["x"] - MARGIN, "y": box["y"] - MARGIN, "width": box["width"] + 2 * MARGIN, "height": height}
    return page.screenshot(clip=clip, animations="disabled")  # type: ignore[arg-type]


def take_file(lab: Lab, file: str, theme: str) -> bytes:
    """Return a picture of the top of an HTML file that the notebook has written."""
    page = lab.page.context.browser.new_page(  # type: ignore[union-attr]
        viewport={"width": WINDOW["width"], "height": 1000},
        device_scale_factor=SCALE,
        color_scheme="dark" if "Dark" in theme else "light",
    )
    page.goto((lab.folder / file).as_uri())
    page.wait_for_load_state("load")
    picture = page.screenshot(animations="disabled")
    page.close()
    return picture


def cut_empty_rows(picture: bytes) -> bytes:
    """Cut rows of one color from the bottom, such as the room below a widget."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    background = Image.new("RGB", image.size, image.getpixel((2, 2)))  # type: ignore[arg-type]
    filled = ImageChops.difference(image, background).getbbox()
    bottom = image.height if filled is None else min(image.height, filled[3] + MARGIN * SCALE)
    stream = io.BytesIO()
    image.crop((0, 0, image.width, bottom)).save(stream, "png")
    return stream.getvalue()


def halve(picture: bytes) -> bytes:
    """Return a picture with half of the width and height."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    stream = io.BytesIO()
    image.resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS).save(stream, "png")
    return stream.getvalue()


def main(names: list[str]) -> None:
    """Take the pictures with these names, or all."""
    chosen = {name: PICTURES[name] for name in names or PICTURES}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,  # a closing cluster removes its own files
        jupyterlab(Path(folder) / "lab") as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        page = browser.new_context(viewport=WINDOW, device_scale_factor=SCALE).new_page()  # type: ignore[arg-type]
        lab = Lab(page, server, "JupyterLab Light")
        for source in dict.fromkeys(picture.page for picture in chosen.values()):
            print(source, flush=True)
            take_page(lab, source, {name: p for name, p in chosen.items() if p.page == source})
        lab.close()
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])

"""The notebooks' first pictures: `python -m tests.browser.take_notebook_pictures [NAME ...]` runs them as committed.

It writes notebooks/images/NAME.png, one output of each notebook, which GitHub shows: notebooks have no outputs there.
Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import base64
import io
import sys

from PIL import Image

from tests.browser.take_picture import COLORS, IMAGES
from tests.support.notebook import execute, list_code_cells

PICTURES = {  # notebook -> a part of the cell whose picture is taken, the last one with such a part
    "02_data_parallel": "comparison.figure()",
    "03_model_parallel": "one_f_one_b, _ = ",
    "04_schedules": '"memory and time of each schedule"',
    "06_beyond_pytorch": '"the ten centers as digits"',
    "07_many_hosts": '"coordinates and host of each rank"',
}
CELL_S = 300


def take(name: str) -> None:
    """Run a notebook, and write its picture with a palette. Pictures without a background keep it transparent."""
    notebook = execute(IMAGES.parent / f"{name}.ipynb", CELL_S)
    cells = [cell for cell in list_code_cells(notebook) if PICTURES[name] in cell.source]
    (*_, picture) = [output.data["image/png"] for output in cells[-1].outputs if "image/png" in output.get("data", {})]
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGBA")
    small = image.quantize(COLORS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    small.save(IMAGES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    for each in sys.argv[1:] or PICTURES:
        print(each, flush=True)
        take(each)

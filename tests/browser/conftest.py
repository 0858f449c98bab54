"""One JupyterLab server and one Chromium for all browser tests; a page and its kernels for each."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import sync_playwright

from tests.browser.lab import Lab, Look
from tests.browser.server import jupyterlab

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

    from tests.browser.server import Server

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--no-sandbox",  # CI and containers run as root, where Chromium's sandbox can't start
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    # Nothing of the browser's own goes out to a network.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def _chromium() -> str:
    """The browser's path: $CHROMIUM, or the first known name on PATH."""
    named = os.environ.get("CHROMIUM")
    for name in (named,) if named else CHROMIUMS:
        if path := shutil.which(name):
            return path
    looked = named or ", ".join(CHROMIUMS)
    pytest.fail(f"no browser: looked for {looked}. `make chromium` installs one; CHROMIUM=/path/to/it names one.")


# Package scope, not session: Playwright keeps an event loop running in this thread for as long as it lives,
# and tests elsewhere start loops of their own.
@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A JupyterLab server; its kernels run the Python of the tests."""
    with jupyterlab(tmp_path_factory.mktemp("jupyter") / "lab") as running:
        yield running


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """A headless Chromium."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=_chromium(), args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def look(request: pytest.FixtureRequest) -> Look:
    """The window's size and JupyterLab's theme; parametrize it indirectly for others."""
    return getattr(request, "param", Look())


@pytest.fixture
def page(browser: Browser, look: Look) -> Iterator[Page]:
    """A fresh page. An error that no script of the page caught fails the test."""
    errors: list[str] = []
    context = browser.new_context(viewport={"width": look.width, "height": look.height})
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(f"{error}\n{error.stack or ''}"))
    yield page
    context.close()
    assert not errors, "the page threw:\n" + "\n".join(errors)


@pytest.fixture
def lab(page: Page, server: Server, look: Look) -> Iterator[Lab]:
    """JupyterLab in that page; call `open` first. Its kernels end with the test."""
    lab = Lab(page, server, look.theme)
    yield lab
    lab.close()

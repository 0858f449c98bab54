"""One JupyterLab server and one Chromium for all browser tests; a page and its kernels for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import sync_playwright

from tests.support.chromium import FLAGS, chromium
from tests.support.lab import Lab, Look
from tests.support.server import jupyterlab

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

    from tests.support.server import Server


# Package scope, not session: Playwright keeps an event loop running in this thread for as long as it lives,
# and tests elsewhere start loops of their own.
@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A JupyterLab server; its kernels run the Python of the tests."""
    with jupyterlab(tmp_path_factory.mktemp("jupyter") / "lab") as running:
        yield running


@pytest.fixture(scope="package")
def notebook_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Notebook 7 server."""
    with jupyterlab(tmp_path_factory.mktemp("jupyter") / "notebook", "notebook") as running:
        yield running


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """A headless Chromium."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
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
    # Notebook 7 throws this one at any widget, plain ipywidgets' too.
    known = "schema" if look.app == "notebook" else None
    page.on("pageerror", lambda e: errors.append(f"{e}\n{e.stack or ''}") if known not in str(e).split("'") else None)
    yield page
    context.close()
    assert not errors, "the page threw:\n" + "\n".join(errors)


@pytest.fixture
def lab(page: Page, look: Look, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """JupyterLab (or Notebook 7) in that page; call `open` first. Its kernels end with the test."""
    server: Server = request.getfixturevalue("notebook_server" if look.app == "notebook" else "server")
    lab = Lab(page, server, look.theme, look.app)
    yield lab
    lab.close()

"""One JupyterLab server and one Chromium for all browser tests; each test has its page and kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import sync_playwright

from tests.support.chromium import FLAGS, find_chromium
from tests.support.lab import Lab, Look
from tests.support.server import jupyterlab

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

    from tests.support.server import Server


# Package scope instead of session: Playwright keeps an event loop running in this thread,
# and other tests start event loops.
@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """JupyterLab server, whose kernels use the Python of the tests."""
    with jupyterlab(tmp_path_factory.mktemp("jupyter") / "lab") as running:
        yield running


@pytest.fixture(scope="package")
def notebook_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Notebook 7 server."""
    with jupyterlab(tmp_path_factory.mktemp("jupyter") / "notebook", "notebook") as running:
        yield running


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def look(request: pytest.FixtureRequest) -> Look:
    """Size of the window and JupyterLab's theme; change them by indirect parametrization."""
    return getattr(request, "param", Look())


@pytest.fixture
def page(browser: Browser, look: Look) -> Iterator[Page]:
    """New page. An uncaught error of its scripts fails the test."""
    errors: list[str] = []
    context = browser.new_context(viewport={"width": look.width, "height": look.height})
    page = context.new_page()
    # Notebook 7 throws this error for all widgets.
    known = "schema" if look.app == "notebook" else None
    page.on("pageerror", lambda e: errors.append(f"{e}\n{e.stack or ''}") if known not in str(e).split("'") else None)
    yield page
    context.close()
    assert not errors, "the page threw:\n" + "\n".join(errors)


@pytest.fixture
def lab(page: Page, look: Look, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """JupyterLab (or Notebook 7) in the page; call `open` first. Its kernels end with the test."""
    server: Server = request.getfixturevalue("notebook_server" if look.app == "notebook" else "server")
    lab = Lab(page, server, look.theme, look.app)
    yield lab
    lab.close()

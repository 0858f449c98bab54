"""Path and options of the browser for tests."""

from __future__ import annotations

import os
import shutil

import pytest

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--no-sandbox",  # CI and containers run as root, where Chromium's sandbox can't start
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    # The browser itself must not use the network.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def find_chromium() -> str:
    """Return the browser's path: $CHROMIUM, or the first known name on PATH."""
    named = os.environ.get("CHROMIUM")
    for name in (named,) if named else CHROMIUMS:
        if path := shutil.which(name):
            return path
    names = named or ", ".join(CHROMIUMS)
    pytest.fail(f"found no browser among {names}; run `make chromium`, or set CHROMIUM to its path.")

"""The browser of the tests: where it is and how it is started."""

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
    # Nothing of the browser's own goes out to a network.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium() -> str:
    """The browser's path: $CHROMIUM, or the first known name on PATH."""
    named = os.environ.get("CHROMIUM")
    for name in (named,) if named else CHROMIUMS:
        if path := shutil.which(name):
            return path
    looked = named or ", ".join(CHROMIUMS)
    pytest.fail(f"no browser: looked for {looked}. `make chromium` installs one; CHROMIUM=/path/to/it names one.")

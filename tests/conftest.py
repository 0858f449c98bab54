"""What every test shares. Keep it small: a fixture that one file needs lives in that file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before any test imports torch: on two cores, each process that takes both slows all the others down.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parent.parent

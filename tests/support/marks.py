"""Pytest marks for single parameter sets."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any, id: str | None = None) -> Any:  # noqa: A002 - as pytest.param has it
    """Return a parameter set that only `make test-all` runs."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)

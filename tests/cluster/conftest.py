"""One cluster of two engines for all tests that leave it usable; each test checks that by using it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import dtkit

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def cluster2() -> Iterator[dtkit.Cluster]:
    """Two engines, shared by the tests of this folder."""
    with dtkit.Cluster(2) as cluster:
        yield cluster

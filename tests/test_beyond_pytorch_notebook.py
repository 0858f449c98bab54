"""Notebook 06 as committed: Keras, a Horovod script, a search and k-means, and every claim holds."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from tests.support.notebook import (
    ExecutedNotebook,
    check_claims,
    check_memory,
    check_nothing_is_left,
    execute_and_watch,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.notebook, pytest.mark.slow]


@pytest.fixture(scope="module")
def done(root: Path) -> ExecutedNotebook:
    if importlib.util.find_spec("keras") is None:  # an import would need its backend
        pytest.skip("Keras is not installed")
    return execute_and_watch(root / "notebooks/06_beyond_pytorch.ipynb")


def test_every_claim_holds(done: ExecutedNotebook):
    check_claims(done, least=7)


def test_the_notebook_shows_its_pictures(done: ExecutedNotebook):
    for source in ("shuffle=None", "axes = plt.subplots"):
        assert any("image/png" in output.get("data", {}) for output in done.outputs(source)), source


def test_the_notebook_leaves_nothing_behind(done: ExecutedNotebook, root: Path):
    check_nothing_is_left(done)
    assert not list((root / "notebooks").glob("horovod_*"))


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="Binder has no TensorFlow")
def test_the_notebook_fits_in_the_memory_of_binder(done: ExecutedNotebook):
    check_memory(done)

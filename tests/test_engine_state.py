"""Data of an engine, without a process group."""

from __future__ import annotations

import pytest

from dtkit.engine.ops.state import EngineState
from dtkit.errors import EmptyEnginesError


def test_rows_that_the_engine_has_not_are_an_error_with_the_remedy():
    with pytest.raises(EmptyEnginesError, match=r"Place the rows again, by cluster\.partition"):
        EngineState().get_data("data-1")

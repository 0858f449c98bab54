"""Rows of a batch that are not finite, named by their place in the user's data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from dtkit.engine.bad_rows import describe_bad_rows

ROWS = np.array([40, 7, 99, 3, 12, 55])


def make(*shape: int, bad: dict[tuple[int, ...], float] | None = None) -> torch.Tensor:
    made = torch.zeros(shape)
    for place, number in (bad or {}).items():
        made[place] = number
    return made


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ((make(6, 3), torch.zeros(6, dtype=torch.long)), ""),
        (
            (make(6, 3, bad={(2, 1): math.nan}), make(6)),
            "in the inputs, 1 of this rank's 6 rows of the step is not finite, namely row 99 (column 1: nan)",
        ),
        (
            (make(6, 3), make(6, bad={(1,): math.inf, (4,): math.nan})),
            "in the targets, 2 of this rank's 6 rows of the step are not finite, the first is row 7 (inf as float32)",
        ),
        ((make(6, 2, 4, bad={(5, 1, 3): -math.inf}), make(6)), "row 55 (position (1, 3): -inf as float32)"),
        ((make(6, 2), make(6, 2, bad={(0, 1): math.nan}), make(6)), "row 40 (array 1, column 1: nan)"),
        ({"x": make(6, 2, bad={(3, 0): math.nan}), "labels": make(6)}, "in the inputs, 1 of this rank's 6"),
        ({"x": make(6, 2), "labels": make(6, bad={(3,): math.nan})}, "row 3 ('labels', nan)"),
        (make(6, 2, bad={(3, 0): math.nan}), "row 3 (column 0: nan)"),
        ((make(2, 2, bad={(0, 0): math.nan}), make(6)), ""),  # not a row a sample
        (
            (make(6, 3, bad={(2, 1): 1e38, (4, 0): -1e20}), make(6)),
            "inputs, 2 of this rank's 6 rows of the step have numbers too large to square, the first is row 99 (column",
        ),
        ((make(6), make(6, bad={(3,): 1e38})), "1 of this rank's 6 rows of the step has numbers too large to square"),
        ((make(6, 3, bad={(2, 1): 1e18}), make(6)), ""),
        ((make(6, 3, bad={(2, 1): 1e4}).half(), make(6)), ""),
        (
            (make(6, 3, bad={(2, 1): 1e38, (4, 0): math.nan}), make(6)),
            "1 of this rank's 6 rows of the step is not fini",
        ),
    ],
)
def test_the_first_bad_row_is_named_with_its_column(batch: Any, text: str):
    found = describe_bad_rows([(6, batch)], ROWS)
    assert text in found
    assert bool(found) == bool(text)


def test_rows_are_counted_over_micro_batches():
    batches = [(4, (make(4, 2), make(4))), (2, (make(2, 2, bad={(1, 1): math.nan}), make(2))), (0, None)]
    assert "1 of this rank's 6 rows of the step is not finite, namely row 55 (column 1: nan)" in describe_bad_rows(
        batches, ROWS
    )


def test_a_sample_of_a_stream_has_its_place_in_the_step():
    found = describe_bad_rows([(6, (make(6, 2, bad={(2, 1): math.nan}), make(6)))], None)
    assert "namely sample 2 of this step (column 1: nan)" in found

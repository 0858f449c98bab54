"""Items of a stream that are whole batches: how many rows they have, and their samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dtkit.engine.data.whole_batches import count_common_rows, split_rows

X, Y = torch.arange(6.0).reshape(3, 2), np.arange(3)


@pytest.mark.parametrize(
    ("item", "rows"),
    [
        ((X, Y), 3),
        ({"x": X, "y": Y}, 3),
        ([X], 3),
        (X, 3),
        ((X, Y[:2]), None),
        ((X, 1), None),
        ((X, torch.ones(())), None),
    ],
)
def test_rows_are_counted_where_all_parts_have_as_many(item: Any, rows: int | None):
    assert count_common_rows(item) == rows


def test_batches_are_taken_apart_into_samples():
    assert [(x.tolist(), int(y)) for x, y in split_rows((X, Y))] == [([0, 1], 0), ([2, 3], 1), ([4, 5], 2)]
    assert [sample["x"].tolist() for sample in split_rows({"x": X})] == [[0, 1], [2, 3], [4, 5]]
    assert [sample.tolist() for sample in split_rows(X)] == [[0, 1], [2, 3], [4, 5]]


def test_parts_with_different_numbers_of_rows_are_refused():
    with pytest.raises(ValueError, match=r"shape \(3, 2\), shape \(2,\)\)\. Yield samples instead"):
        split_rows((X, Y[:2]))

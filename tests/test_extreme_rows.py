"""Rows far behind the first ones that model or loss refuse, found before anything is sent."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from dtkit.data import extreme_rows
from dtkit.data.extreme_rows import complete_rows, find_extreme_rows
from dtkit.errors import FirstBatchError
from tests.support.small import data, net, train

if TYPE_CHECKING:
    import dtkit

INPUTS, TARGETS = data()


def put(array: torch.Tensor, row: int, value: float) -> torch.Tensor:
    """Return a copy with another number in the row."""
    changed = array.clone()
    changed.view(len(array), -1)[row, -1] = value
    return changed


class Words(nn.Module):
    """Classifier of rows of 4 words out of 10."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.line = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.line(self.table(words).mean(1))


def mask(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.nan_to_num(), target)


class Filled(nn.Module):
    """Model that takes missing numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.line(inputs.nan_to_num())


WORDS = torch.arange(4 * len(INPUTS)).reshape(-1, 4) % 10


@pytest.mark.parametrize(
    ("model", "rows", "expected"),
    [
        (
            net(),
            (INPUTS, put(TARGETS, 50, -1)),
            r"with rows \d+ and 50 fails.*lie between -1 and 2.*from 0; rows without",
        ),
        (
            net(),
            (INPUTS, put(TARGETS, 50, 3)),
            r"between 0 and 3, and the model's last layer has 3 outputs; .* row 50 is the first with another one, 3\.",
        ),
        (
            net(),
            (INPUTS, torch.arange(64) // 20 % 3 + 1),
            r"The targets lie between 1 and 3.*Number the classes from 0, as in y - 1",
        ),
        (
            net(),
            (INPUTS, torch.arange(64).flip(0) // 20 % 3 + 1),
            r"^the first batch fails,.*The targets lie between 1 and 3.*as in y - 1",
        ),
        (net(), (INPUTS, put(put(TARGETS, 50, 3), 60, -100)), r"The targets lie between 0 and 3.*Linear\(\.\.\., 4\)"),
        (Words(), (put(WORDS, 40, 10), TARGETS), r"Inputs of this batch lie between 0 and 10.*have 10 rows"),
        (Words(), {"words": put(WORDS, 40, 10), "labels": TARGETS}, r"Inputs of this batch lie between 0 and 10"),
        (net(), pd.DataFrame(INPUTS.numpy()).assign(y=put(TARGETS, 50, 3).numpy()), r"lie between 0 and 3"),
    ],
    ids=["negative", "large", "from 1", "first rows of 1 to 3", "large and ignored", "embedding", "dict", "table"],
)
def test_number_out_of_range_in_a_late_row_is_refused(
    cluster: dtkit.Cluster, model: nn.Module, rows: Any, expected: str
):
    options = {"target": "labels" if isinstance(rows, dict) else "y"} if not isinstance(rows, tuple) else {}
    with pytest.raises(FirstBatchError) as caught:
        train(cluster, model, rows, **options)
    assert re.search(expected, str(caught.value), re.DOTALL), caught.value
    train(cluster, start=False).stop()


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_late_number_that_is_not_finite_is_refused_with_its_row(cluster: dtkit.Cluster, value: float):
    expected = rf"a number in the inputs of row 60 \(column 3: {value}.*\) is not finite, and so is the loss"
    with pytest.raises(ValueError, match=expected):
        train(cluster, rows=(put(INPUTS, 60, value).numpy(), TARGETS.numpy()))
    with pytest.raises(ValueError, match=r"in the targets of row 60 \(column 0: "):
        train(cluster, nn.Linear(4, 1), (INPUTS, put(torch.rand(64, 1), 60, value)), loss=nn.MSELoss())


@pytest.mark.parametrize("row", [0, 3, 7, 8])
def test_a_number_of_the_first_rows_that_is_not_finite_is_refused_too(cluster: dtkit.Cluster, row: int):
    with pytest.raises(ValueError, match=rf"in the inputs of row {row} \(column 3: nan\)"):
        train(cluster, rows=(put(INPUTS, row, math.nan), TARGETS))
    train(cluster, Filled(), (put(INPUTS, row, math.nan), TARGETS), start=False).stop()


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of a Dataset whose second one is not finite."""

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return put(INPUTS, 1, math.nan)[row], TARGETS[row]


@pytest.mark.parametrize("kind", ["Dataset", "samples", "partition"])
def test_a_first_row_that_is_not_finite_is_refused_in_all_data_with_a_trial(cluster: dtkit.Cluster, kind: str):
    arrays = put(INPUTS, 1, math.nan), TARGETS
    rows = {
        "Dataset": Samples,
        "samples": lambda: list(zip(*arrays, strict=True)),
        "partition": lambda: cluster.partition(arrays),
    }[kind]()
    with pytest.raises(ValueError, match=r"in the inputs of row 1 \(column 3: nan\) is not finite, and so is the loss"):
        train(cluster, rows=rows)
    train(cluster, Filled(), rows, start=False).stop()
    if kind == "Dataset":
        with pytest.raises(ValueError, match=r"in the inputs of row 1 \(column 3: nan\)"):
            train(cluster, validation=rows)
        train(cluster, rows=rows, sampler=torch.utils.data.SubsetRandomSampler(range(2, 40)), start=False).stop()


def test_late_rows_of_validation_data_are_tried_too(cluster: dtkit.Cluster):
    with pytest.raises(FirstBatchError, match=r"the first batch of validation= with rows \d+ and 50 fails"):
        train(cluster, validation=(INPUTS, put(TARGETS, 50, 3)))
    with pytest.raises(ValueError, match=r"row 60 \(column 3: nan\)"):
        train(cluster, validation=(put(INPUTS, 60, math.nan), TARGETS))


@pytest.mark.parametrize(
    ("model", "rows", "options"),
    [
        (net(), (INPUTS, put(TARGETS, 50, -100)), {}),  # which the loss ignores
        (Filled(), (put(INPUTS, 60, math.nan), TARGETS), {}),
        (net(), (INPUTS, put(TARGETS, 50, 3)), {"sampler": torch.utils.data.SubsetRandomSampler(range(40))}),
        (net(), (INPUTS, put(TARGETS, 50, 3)), {"loss": lambda out, y: nn.functional.cross_entropy(out, y % 3)}),
    ],
    ids=["ignored", "filled", "left out", "converted"],
)
def test_late_number_that_the_training_takes_is_not_refused(
    cluster: dtkit.Cluster, model: nn.Module, rows: Any, options: dict[str, Any]
):
    train(cluster, model, rows, start=False, **options).stop()


def test_extreme_rows_are_those_of_the_smallest_largest_and_first_bad_number():
    floats = torch.zeros(30, 2)
    floats[20, 1], floats[25, 0] = math.inf, math.nan
    whole = torch.zeros(30, 2, 2, dtype=torch.uint8)
    whole[7, 1, 0], whole[0] = 9, 1
    assert find_extreme_rows([floats, whole, torch.ones(30, dtype=torch.bool)]) == [1, 7, 20]
    assert find_extreme_rows([torch.full((9,), 3e38)]) == []  # though the sum is infinite
    np.testing.assert_array_equal(complete_rows([1, 20], 4), [1, 20, 0, 2])
    np.testing.assert_array_equal(complete_rows([1, 20, 21], 2), [1, 20, 21])


def test_only_the_small_ones_of_large_arrays_are_searched(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(extreme_rows, "_MAX_BYTES", 100)
    floats = torch.full((30, 2), math.nan)
    assert find_extreme_rows([floats, torch.arange(10)]) == [0, 9]

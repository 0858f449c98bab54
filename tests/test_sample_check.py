"""Errors of a Dataset for its first rows: told in the notebook, unless only engines may have what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dtkit.errors import FirstBatchError
from tests.support.small import data, train

if TYPE_CHECKING:
    from collections.abc import Callable

    import dtkit

INPUTS, TARGETS = data()


class Samples(torch.utils.data.Dataset):
    """Dataset whose samples a function makes."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, row: int) -> Any:
        return self.make(row)


def refuse_second(row: int) -> Any:
    if row == 1:
        raise ValueError("no such picture")
    return INPUTS[row], TARGETS[row]


def raise_as_torch_does(row: int) -> Any:
    raise RuntimeError(
        "Caught UnicodeDecodeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "rows.py", line 4, in read\nUnicodeDecodeError: no text'
    )


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (raise_as_torch_does, ": UnicodeDecodeError: no text\nthe Dataset raised this for row 0\n"),
        (refuse_second, "ValueError: no such picture\nthe Dataset raised this for row 1\n"),
        (lambda row: (INPUTS[row + len(INPUTS)], TARGETS[row]), "the Dataset raised this for row 0"),
        (lambda row: (INPUTS[row, : 3 + row], TARGETS[row]), "((3,) and (4,), in samples 0 and 1 of the batch)"),
        (lambda row: None, "Sample 0 of the batch is None. Each must be a pair"),
        (
            lambda row: (INPUTS[row], TARGETS[row])[: 2 - row],
            "Sample 0 of the batch is (Tensor, Tensor), and sample 1 is (Tensor)",
        ),
    ],
    ids=["worker", "error", "index", "shapes", "None", "parts"],
)
def test_errors_of_the_first_samples_are_told_in_the_notebook(
    cluster: dtkit.Cluster, make: Callable[[int], Any], expected: str
):
    with pytest.raises(FirstBatchError, match=r"^the first batch fails, before the training starts: ") as caught:
        train(cluster, None, Samples(make))
    assert expected in str(caught.value)


def test_error_of_a_sample_shows_the_users_own_line(cluster: dtkit.Cluster):
    with pytest.raises(FirstBatchError, match='raise ValueError\\("no such picture"\\)'):
        train(cluster, None, Samples(refuse_second))


def test_errors_of_the_first_samples_of_validation_data_are_told_too(cluster: dtkit.Cluster):
    with pytest.raises(FirstBatchError, match=r"(?s)^the first batch of validation= fails, .* for row 1"):
        train(cluster, validation=Samples(refuse_second))


def read_file(row: int) -> Any:
    return Path(f"/nowhere/{row}.png").read_bytes()  # a file that only engines may have


def ask_for_rank(row: int) -> Any:
    return INPUTS[row] + torch.distributed.get_rank(), TARGETS[row]


def ask_for_worker(row: int) -> Any:
    return INPUTS[row] + torch.utils.data.get_worker_info().id, TARGETS[row]


@pytest.mark.parametrize("make", [read_file, ask_for_rank, ask_for_worker])
def test_samples_that_only_engines_may_load_are_left_to_them(cluster: dtkit.Cluster, make: Callable[[int], Any]):
    train(cluster, None, Samples(make), start=False)


def check_size(samples: list[Any]) -> Any:
    if len(samples) < 8:
        raise ValueError("too few samples")
    return torch.stack([inputs for inputs, _ in samples]), torch.stack([target for _, target in samples])


def test_collate_fn_that_refuses_few_samples_is_left_to_the_engines(cluster: dtkit.Cluster):
    train(cluster, None, Samples(lambda row: (INPUTS[row], TARGETS[row])), collate_fn=check_size, start=False)

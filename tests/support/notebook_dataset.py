"""A Dataset as a cell of a notebook defines it: its file does not exist."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from tests.support import small

CELL_FILE = "/tmp/ipykernel_469/2338072836.py"
CELL = """
class Rows(Dataset):
    def __len__(self):
        return len(inputs)

    def __getitem__(self, row):
        if row == {bad}:
            {statement}
        return inputs[row], targets[row]
"""
BAD_LINE = 8
"""Line of the cell that raises."""


def make_notebook_dataset(statement: str, bad: int) -> Dataset[Any]:
    """Return the small data as a Dataset that runs a statement, which raises, for the row `bad`."""
    inputs, targets = small.data()
    names = {"__name__": "__main__", "Dataset": Dataset, "inputs": inputs, "targets": targets}
    exec(compile(CELL.format(statement=statement, bad=bad), CELL_FILE, "exec"), names)
    dataset: Dataset[Any] = names["Rows"]()  # type: ignore[operator]
    return dataset

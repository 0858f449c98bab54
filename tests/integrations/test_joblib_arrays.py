"""Arguments of joblib's tasks in shared memory, without engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse

from dtkit._util.process import ProcessId
from dtkit.integrations.joblib.shared_arrays import ArrayShare, SharedArray, load_arrays
from dtkit.rpc import pickling
from dtkit.rpc.payload import make_payload

VALUES = np.ones((512, 1024))


def make_share() -> tuple[ArrayShare, list[Any]]:
    """Return a share, and the list of payloads that exist."""
    payloads: list[Any] = []

    def upload(packed: pickling.PackedObject) -> Any:
        payloads.append(make_payload(packed, ProcessId.from_pid()))
        return payloads[-1]

    def discard(payload: Any) -> None:
        payload.discard()
        payloads.remove(payload)

    uploads = SimpleNamespace(pack=pickling.pack_object, upload=upload, discard=discard)
    return ArrayShare(SimpleNamespace(uploads=uploads)), payloads  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        np.array,
        np.asfortranarray,
        pd.DataFrame,
        lambda values: pd.Series(values[0].repeat(512)),
        scipy.sparse.csr_array,
    ],
)
def test_a_large_argument_is_placed_once(make: Any):
    share, payloads = make_share()
    value = make(VALUES)
    share.begin_call()
    calls = [share.replace((np.sum, (value, "text"), {"value": value, "axis": 0})) for _ in range(3)]
    share.begin_call()  # such as the fit of the best model, with the same rows
    calls.append(share.replace((np.sum, (value, "text"), {})))
    assert len(payloads) == 1
    assert all(isinstance(call[1][0], SharedArray) for call in calls)
    _, (loaded, text), kwargs = load_arrays(calls[0])
    assert (type(loaded), text, kwargs["axis"]) == (type(value), "text", 0)
    assert float(np.asarray(loaded.sum()).sum()) == float(np.asarray(value.sum()).sum())
    share.discard()
    assert payloads == []


def test_an_array_that_was_changed_is_placed_again_by_the_next_call():
    share, payloads = make_share()
    value = VALUES.copy()
    for factor in (1.0, 3.0):
        value *= factor
        share.begin_call()
        _, (loaded,), _ = load_arrays(share.replace((np.sum, (value,), {})))
        assert loaded.sum() == factor * VALUES.sum()
    assert len(payloads) == 2
    share.discard()
    assert payloads == []


def test_small_arguments_and_objects_stay_in_the_message():
    share, payloads = make_share()
    values = (np.ones(3), np.array([object()] * 200_000), pd.DataFrame({"a": [1]}), None, [VALUES])
    assert share.replace((np.sum, values, {}))[1] == values
    assert payloads == []

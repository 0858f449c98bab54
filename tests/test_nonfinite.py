"""Attribution of a non-finite step to ranks, from their reports."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

from dtkit.dashboard.summary.notices import list_error_lines
from dtkit.errors import NonFiniteError
from dtkit.messages import DispatchResult, NonFiniteLocations, NonFiniteReport
from dtkit.training.nonfinite import build_nonfinite_failures, choose_remedy

NODES = [SimpleNamespace(rank=rank, host=f"host{rank}") for rank in range(4)]


def make_result(loss: float | None, *report: Any, step: int = 5) -> DispatchResult:
    return DispatchResult(None, step, 0.1, "nonfinite", NonFiniteReport(loss, *report))


def build_failure_messages(*ranks: tuple[float | None, NonFiniteLocations]) -> dict[int, str]:
    """{rank: message} for each rank's (loss, nonfinite values of its stages)."""
    advances = [make_result(loss, astray) for loss, astray in ranks]
    failures = build_nonfinite_failures(5, advances, NODES)
    assert {(f.kind, f.step, f.host) for f in failures} == {("nonfinite", 5, f"host{f.rank}") for f in failures}
    assert all("run.resume() takes the same step again" in f.message for f in failures)
    return {f.rank: f.message for f in failures}


def test_ranks_with_nonfinite_losses_are_named():
    messages = build_failure_messages((1.0, ()), (math.nan, ()), (2.0, ()), (math.inf, ()))
    assert list(messages) == [1, 3]
    assert "this rank's loss is nan" in messages[1]
    assert "this rank's loss is inf" in messages[3]


def test_rows_that_are_not_finite_are_named_and_have_their_own_remedy():
    advances = [
        make_result(1.0),
        make_result(math.nan, (), "in the targets, 1 of 4 rows"),
    ]
    (failure,) = build_nonfinite_failures(5, advances, NODES)
    assert failure.rank == 1
    assert "not finite: in the targets, 1 of 4 rows\nAll ranks paused" in failure.message
    assert "- repair or scale these rows, or leave them out, and train again" in failure.message
    (failure,) = build_nonfinite_failures(5, advances, NODES, ruined_step=3)
    assert "in the targets, 1 of 4 rows\nThe loss grew since step 3" in failure.message


@pytest.mark.parametrize(
    ("step", "largest", "large_loss", "message"),
    [
        (
            5,
            2e38,
            (3, math.inf),
            r"reach 2e\+38, so they are ruined .* loss was inf at step 3\.\n- train .* before step 3",
        ),
        (
            5,
            math.inf,
            None,
            r"parameters are not finite, so they are ruined already\.\n- train again with a lower learning",
        ),
        (
            5,
            1e14,
            (0, 3e36),
            r"loss was 3e\+36 at step 0, before any update\.\n- repair the data of that step, or the model",
        ),
        (0, 1e14, None, "reach 1e[+]14 before the first update: with them, no learning rate helps"),
        (
            0,
            1e5,
            None,
            "before the first update, so the learning rate has no part in it.\n- repair the data, the loss or",
        ),
        (5, 1e5, (3, math.inf), "parameters are as after the step before.\n- lower the learning rate"),
    ],
)
def test_parameters_that_are_too_large_are_called_ruined(step, largest, large_loss, message):
    advances = [make_result(math.inf, (), "", largest, step=step)]
    (failure,) = build_nonfinite_failures(step, advances, NODES, large_loss=large_loss)
    assert re.search(message, failure.message)
    assert choose_remedy(step, advances, None) == ("train" if largest > 1e10 else "lr" if step else "data")


def test_failure_with_finite_losses_lists_the_losses_of_all_ranks():
    messages = build_failure_messages((1.0, ()), (None, ()), (2.5, ()))
    assert list(messages) == [0]
    assert "though every rank's loss is (1, 2.5)" in messages[0]


def test_the_first_stage_with_a_nonfinite_output_is_named_not_the_last():
    every = tuple((stage, "gradient") for stage in (0,))
    messages = build_failure_messages(
        (None, every), (None, ((1, "output"), (1, "gradient"))), (None, ((2, "output"),)), (math.nan, ())
    )
    assert list(messages) == [1]
    assert "outputs of this rank's stage 1 (its inputs are stage 0's, which are finite)" in messages[1]


def test_failure_of_the_first_stage_names_rows_of_data_as_its_inputs():
    messages = build_failure_messages((None, ((0, "output"), (2, "output"))), (math.nan, ((1, "output"),)))
    assert list(messages) == [0]
    assert "stage 0 (its inputs are rows of data)" in messages[0]


def test_failure_of_the_last_stage_names_its_loss():
    messages = build_failure_messages((None, ((0, "gradient"),)), (math.nan, ((1, "gradient"),)))
    assert list(messages) == [1]
    assert "this rank's loss is nan" in messages[1]


@pytest.mark.parametrize(("last", "rank"), [(1, 1), (0, 0)])
def test_nonfinite_gradients_are_attributed_to_the_last_affected_stage(last: int, rank: int):
    ranks: list[tuple[float | None, NonFiniteLocations]] = [(None, ((0, "gradient"),)), (0.7, ())]
    if last:
        ranks[1] = (0.7, ((1, "gradient"),))
    messages = build_failure_messages(*ranks)
    assert list(messages) == [rank]
    assert f"those of this rank's stage {last}" in messages[rank]


@pytest.mark.parametrize(
    ("step", "end"),
    [
        (120, "learning rate, or resume_from= a checkpoint from before step 120"),
        (0, "learning rate"),
    ],
)
def test_a_loss_that_exploded_before_has_another_remedy(step: int, end: str):
    advances = [make_result(math.inf)]
    (failure,) = build_nonfinite_failures(5, advances, NODES, ruined_step=step)
    assert f"since step {step}, so the parameters are ruined already." in failure.message
    assert failure.message.endswith(f"{end}\n- run.resume() would fail again; run.stop() ends this run")
    assert "run.set(" not in failure.message


@pytest.mark.parametrize(
    ("step", "bad_rows", "ruined", "remedy"),
    [(5, "", None, "lr"), (5, "row 3", None, "data"), (5, "", 7, "train"), (0, "", None, "data")],
)
def test_the_error_knows_its_remedy(step: int, bad_rows: str, ruined: int | None, remedy: str):
    advances = [make_result(math.nan, (), bad_rows)]
    assert choose_remedy(step, advances, ruined) == remedy


def test_a_view_shows_the_whole_remedy_and_names_the_error_once():
    advances = [make_result(math.nan)] * 4
    error = NonFiniteError(build_nonfinite_failures(5, advances, NODES))
    first, *remedies = list_error_lines(error)
    assert first == (
        "NonFiniteError: nodes 0, 1, 2 and 3 on host0, host1, host2, host3, step 5: the gradients over all nodes are "
        "not finite, and this node's loss is nan"
    )
    assert remedies == [
        "- lower the learning rate, or repair the data or the loss",
        "- run.set(lr=...) sets a rate, run.resume() takes the same step again, run.stop() ends the run",
    ]
    assert list_error_lines(error, has_ended=True) == [first, remedies[0]]  # nothing else helps an ended run
    assert str(error).count("- lower the learning rate") == 1


def test_ranks_with_losses_of_their_own_have_one_list_of_remedies():
    error = NonFiniteError(build_nonfinite_failures(5, [make_result(math.nan), make_result(math.inf)], NODES))
    assert [line[:8] for line in str(error).splitlines()] == [
        "rank 0 o",
        "rank 1 o",
        "All rank",
        "- lower ",
        "- run.se",
    ]

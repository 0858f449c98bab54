"""The verdict of a verification, from two state dicts and the largest gradients."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from dtkit.rpc.verification import MAX_SHOWN_DIFFERENCES
from dtkit.strategies.incomparable_modules import find_incomparable_modules, summarize_modules
from dtkit.training.verify import compare_states, find_unexplained, judge_rounding
from tests.support.verification import verify_changed_state

CELLS = """
import tests.support.verification as support
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="NoColor")
shell.run_cell("from tests.support.verification import verify_changed_state\\n"
    "def verify():\\n    global found\\n    found = verify_changed_state()\\n    found.show()\\n    return found",
    store_history=True)
for cell in ("verify()", "found", "verify()\\nfound"):
    print("---")
    shell.run_cell(cell, store_history=True)
"""


def test_a_cell_shows_the_result_of_verify_once():
    done = subprocess.run([sys.executable, "-c", CELLS], capture_output=True, text=True, timeout=60, check=True)
    _, same_cell, later_cell, with_name = done.stdout.split("---\n")
    assert same_cell.startswith("PASS: 20 steps on 2 ranks")
    assert "Verification(" not in same_cell + with_name
    assert later_cell.strip() == "Out[3]: Verification(PASS, largest difference 0, tolerance 1e-12)"


def test_a_script_prints_a_line_for_a_pass_and_all_of_another_result(capsys: pytest.CaptureFixture[str]):
    passed, failed = verify_changed_state(), verify_changed_state({"w": 0.5})
    passed.show()
    assert capsys.readouterr().out == "verify: PASS, largest difference 0, tolerance 1e-12\n"
    failed.show()
    assert capsys.readouterr().out == f"{failed.text()}\n"


def test_equal_parameters_pass():
    found = verify_changed_state()
    assert found
    assert (found.verdict, found.max_difference, found.dtype) == ("PASS", 0.0, "float64")
    assert found.text().startswith("PASS: 20 steps on 2 ranks against one process, float64")
    assert found.differences == {"w": 0, "b": 0, "count": 0}


@pytest.mark.parametrize(
    ("dtype", "by", "verdict"),
    [
        (torch.float64, 0.9e-12, "PASS"),
        (torch.float64, 1.2e-12, "FAIL"),
        (torch.float32, 0.9e-5, "PASS"),
        (torch.float32, 1.2e-5, "FAIL"),
        (torch.bfloat16, 0.9e-2, "PASS"),
        (torch.bfloat16, 2e-2, "FAIL"),
    ],
)
def test_the_tolerance_follows_the_dtype(dtype, by, verdict):
    found = verify_changed_state({"b": [0, by]}, dtype=dtype)
    assert found.verdict == verdict
    assert bool(found) == (verdict == "PASS")
    if verdict == "FAIL":
        assert "worst: b, " in found.text()


def test_a_reference_without_gradients_is_compared_in_the_dtype_of_its_parameters():
    """Parameter averaging's one process trains a model for each rank, and has no gradients of the mean."""
    state = {"w": torch.ones(2, dtype=torch.float64), "count": torch.tensor(3)}
    found = compare_states(state, state, {}, (), 5, 2)
    assert (found.verdict, found.dtype, found.tolerance) == ("PASS", "float64", 1e-12)


def test_a_differing_step_count_fails():
    assert verify_changed_state({"count": 1}).verdict == "FAIL"


@pytest.mark.parametrize("name", ["w", "b"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nonfinite_value_in_any_parameter_fails(name, value):
    found = verify_changed_state({name: value})
    assert found.verdict == "FAIL"
    assert found.max_difference == math.inf


def test_equal_infinities_pass():
    mask = {"mask": torch.tensor([0.0, -math.inf])}
    assert compare_states(mask, mask, {}, (), 1, 2).verdict == "PASS"


def test_elements_with_zero_gradient_are_reported_and_get_a_wider_tolerance():
    gradients = {"w": torch.tensor([1.0, 1e-14, 1.0], dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
    found = verify_changed_state({"w": [0, 5e-11, 0]}, gradients)
    assert found.verdict == "PASS"
    assert found.max_difference == 0
    assert found.zero_gradient == {"w": (1, pytest.approx(5e-11, rel=1e-4))}
    line = (
        "  1 number in w differs by up to 5e-11, within a wider bound of 1e-10: their true gradient is 0, and "
        "only rounding changes them"
    )
    assert line in found.text().splitlines()
    assert verify_changed_state({"w": [0, 5e-10, 0]}, gradients).verdict == "FAIL"
    assert (
        verify_changed_state({"w": [5e-11, 0, 0]}, gradients).verdict == "FAIL"
    )  # other elements have the narrow tolerance


def test_numbers_of_zero_gradient_count_only_if_they_differ():
    """An image of one pixel uses one number of nine in each filter, so the others are equal, and no news."""
    gradients = {"w": torch.tensor([1.0, 0, 0], dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    found = verify_changed_state({"w": [0, 5e-11, 0]}, gradients)
    assert found.zero_gradient == {"w": (1, pytest.approx(5e-11, rel=1e-4))}
    assert "  1 number in w differs by up to 5e-11" in found.text()


def test_numbers_of_zero_gradient_do_not_hide_others_of_the_same_parameter():
    gradients = {"w": torch.tensor([1.0, 0, 1.0], dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    found = verify_changed_state({"w": [3e-12, 5e-11, 0]}, gradients)
    assert found.verdict == "FAIL"
    assert found.differences["w"] == pytest.approx(3e-12, rel=1e-3)
    assert found.zero_gradient == {"w": (1, pytest.approx(5e-11, rel=1e-4))}


def test_large_parameters_are_compared_to_their_last_number():
    """They are compared in parts, each of which may have numbers of zero gradient."""
    reference = {"w": torch.zeros(3, 33_000, dtype=torch.float64)}
    state, gradients = {"w": reference["w"].clone()}, {"w": torch.ones_like(reference["w"])}
    for row, column in ((0, 0), (1, 5), (2, -2)):
        state["w"][row, column], gradients["w"][row, column] = 3e-11 + 1e-11 * row, 0.0
    found = compare_states(state, reference, gradients, (), 20, 2)
    assert (found.verdict, found.differences["w"], found.zero_gradient) == ("PASS", 0, {"w": (3, pytest.approx(5e-11))})
    state["w"][2, -1] = -2.0
    assert compare_states(state, reference, gradients, (), 20, 2).differences["w"] == 2


def test_elements_with_zero_gradient_of_all_parameters_are_one_line():
    gradients = {"w": torch.tensor([1.0, 0, 1], dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    found = verify_changed_state({"w": [0, 5e-11, 0], "b": [1e-11, 0]}, gradients)
    lines = [line for line in found.text().splitlines() if "true gradient" in line]
    assert lines == [
        (
            "  2 numbers in w and 1 other parameter differ by up to 5e-11, within a wider bound of 1e-10: their true "
            "gradient is 0, and only rounding changes them"
        )
    ]


def test_zero_gradients_beyond_their_bound_are_named_in_both_forms():
    gradients = {"w": torch.tensor([1.0, 0, 1], dtype=torch.float64)}
    found = verify_changed_state({"w": [0, 5e-10, 0]}, gradients)
    assert "differs by up to 5e-10, beyond a wider bound of 1e-10" in found.text()
    assert repr(found) == "Verification(FAIL, largest difference 5e-10 where the true gradient is 0, bound 1e-10)"


@pytest.mark.parametrize(("change", "count"), [(None, 0), ({"w": [0, 0.9e-12, 0]}, 1)])
def test_zero_gradients_within_the_tolerance_of_all_are_not_mentioned(change, count):
    gradients = {"w": torch.tensor([1.0, 0, 1], dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
    found = verify_changed_state(change, gradients)
    assert found.zero_gradient.get("w", (0, 0))[0] == count
    assert "gradient" not in found.text()


def test_the_short_form_of_a_pass_by_float64_says_so():
    in_float32 = verify_changed_state({"b": [0, 2.2e-5]}, dtype=torch.float32)
    found = judge_rounding(in_float32, verify_changed_state({"b": [0, 2**-48]}), "")
    short = "Verification(PASS in float64: largest difference 3.6e-15; float32 differs by 2.2e-05, which is rounding)"
    assert repr(found) == short
    assert str(found) == found.text()  # the lines that `verify` prints
    assert str(found).startswith("PASS: 20 steps on 2 ranks against one process, float32\n")


def test_a_notebook_shows_a_verification_with_the_largest_differences_first():
    found = verify_changed_state({"b": [0, 0.25]})
    page = found._repr_html_()
    assert page.startswith("<p><strong>FAIL</strong>: 20 steps on 2 ranks against one process, float64</p><ul>")
    assert "<summary>differences: at most 0.25, in b</summary>" in page
    assert list(found.make_differences_table().rows) == [("b", "0.25"), ("w", "0"), ("count", "0")]


def test_a_large_model_has_rows_for_its_largest_differences():
    found = verify_changed_state()
    found = dataclasses.replace(found, differences={f"layer{k}": float(k) for k in range(100)})
    table = found.make_differences_table()
    assert table.rows[0] == ("layer99", "99")
    assert len(table.rows) == MAX_SHOWN_DIFFERENCES
    assert f"and {100 - MAX_SHOWN_DIFFERENCES} smaller differences" in found._repr_html_()


def test_the_short_form_of_a_verdict_without_a_comparison_has_no_difference():
    found = verify_changed_state({"w": 1.0}, modules=("1 (BatchNorm1d): why",))
    found = dataclasses.replace(found, max_difference=math.nan)
    assert repr(found) == "Verification(NOT COMPARABLE)"


@pytest.mark.parametrize(
    ("float64_difference", "unexplained", "verdict", "note"),
    [
        (1e-14, "", "PASS", "it is rounding in float32"),
        (1e-14, "b", "FAIL", "rounding doesn't explain b"),
        (2e-9, "", "FAIL", "rounding in float32 doesn't explain it"),
        (2e-3, "", "FAIL", "rounding in float32 doesn't explain it"),
        (math.inf, "", "FAIL", "rounding in float32 doesn't explain it"),
    ],
)
def test_only_a_difference_that_vanishes_in_float64_is_rounding(float64_difference, unexplained, verdict, note):
    in_float32 = verify_changed_state({"b": [0, 2e-3]}, dtype=torch.float32)
    in_float64 = verify_changed_state({"b": [0, float64_difference]})
    found = judge_rounding(in_float32, in_float64, unexplained)
    assert found.verdict == verdict
    assert note in found.text()
    assert found.max_difference == in_float32.max_difference  # float64 decides, and float32 is reported


def test_a_model_that_computes_in_float32_anyway_proves_nothing_in_float64():
    in_float32 = verify_changed_state({"b": [0, 2e-3]}, dtype=torch.float32)
    in_float64 = dataclasses.replace(verify_changed_state(), dtype="float32", tolerance=1e-5)
    found = judge_rounding(in_float32, in_float64, "")
    assert found.verdict == "FAIL"
    assert "still computes in float32" in found.text()


def test_zero_gradients_beyond_their_bound_are_judged_by_float64_too():
    gradients = {"w": torch.tensor([1.0, 1e-14, 1.0]), "b": torch.ones(2)}
    in_float32 = verify_changed_state({"w": [0, 5e-3, 0]}, gradients, dtype=torch.float32)
    assert in_float32.verdict == "FAIL"
    assert judge_rounding(in_float32, verify_changed_state(), "").verdict == "PASS"


@pytest.mark.parametrize(
    ("difference", "moved", "is_rounding"),
    [
        ([0, 0, 1e-2, 0, 0], 1e-8, True),  # one number with a small gradient, which goes anywhere
        ([1e-2] * 5, 2e-3, True),
        ([1e-2] * 5, 0.9e-3, False),
        ([2e-5] * 5, 1e-8, False),
        ([0.9e-5] * 5, 1e-8, True),  # within the tolerance
        ([0, 0, math.nan, 0, 0], 1e-2, False),
        ([0, 0, math.inf, 0, 0], 1e-2, False),
    ],
)
def test_medians_show_whether_float32_alone_moves_a_parameter_as_far(difference, moved, is_rounding):
    reference, count = torch.ones(5), torch.tensor([3, 4])
    state = {"w": reference + torch.tensor(difference), "count": count}
    in_float64 = {"w": reference.double() + moved, "count": count}
    found = find_unexplained(state, {"w": reference, "count": count}, in_float64, tolerance=1e-5)
    assert found == ("" if is_rounding else "w")


def test_a_differing_integer_is_not_rounding():
    reference = {"count": torch.tensor([3, 4, 5])}
    assert find_unexplained({"count": torch.tensor([3, 4, 6])}, reference, reference, tolerance=1e-5) == "count"


def test_a_small_gradient_does_not_count_as_zero():
    gradients = {"w": torch.tensor([1.0, 1e-9, 1.0], dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
    found = verify_changed_state({"w": [0, 5e-11, 0]}, gradients)
    assert found.verdict == "FAIL"
    assert not found.zero_gradient


def test_a_training_within_the_tolerance_passes_whatever_could_differ():
    found = verify_changed_state({"w": 0.9e-12}, modules=("1 (BatchNorm1d): each rank normalizes",))
    assert found.verdict == "PASS"
    assert not found.incomparable_reasons
    assert "BatchNorm1d" not in found.text()


def test_a_not_comparable_verdict_blames_no_rounding_and_names_the_worst_parameter():
    """A gradient of zero in one process may be another on the ranks."""
    gradients = {"w": torch.tensor([1.0, 0, 1], dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
    found = verify_changed_state({"w": [0, 0.2, 0], "b": 0.1}, gradients, modules=("1 (BatchNorm1d): why",))
    assert found.text().splitlines()[1:] == [
        "  largest difference of the parameters 0.2, tolerance 1e-12",
        "  worst: w, 0.2",
        "  1 (BatchNorm1d): why",
    ]
    assert repr(found) == "Verification(NOT COMPARABLE, largest difference 0.2, tolerance 1e-12)"


def test_batch_norm_of_micro_batches_is_told():
    found = dataclasses.replace(verify_changed_state(), num_micro_batches=4)
    assert "BatchNorm normalizes each of 4 micro-batches by itself, and the one process does so too" in found.text()
    assert "micro-batches" not in verify_changed_state().text()


@pytest.mark.parametrize(
    ("num_replicas", "is_pipeline", "reason"),
    [(2, False, "each rank normalizes"), (2, True, "each rank normalizes"), (1, True, "copies"), (1, False, None)],
)
def test_batch_norm_differs_between_replicas_and_by_copies_in_micro_batches(num_replicas, is_pipeline, reason):
    lines = summarize_modules(nn.BatchNorm1d(2), num_replicas=num_replicas, is_pipeline=is_pipeline)
    assert len(lines) == (reason is not None)
    assert all(reason in line for line in lines)


def test_a_not_comparable_verdict_names_the_modules():
    found = verify_changed_state({"w": 1.0}, modules=("1 (BatchNorm1d): each rank normalizes",))
    assert found.verdict == "NOT COMPARABLE"
    assert not found
    assert "1 (BatchNorm1d)" in found.text()


def test_extra_state_is_not_compared():
    state = {"w": torch.ones(1), "_extra_state": {"version": 1}}
    assert compare_states(state, state, {"w": torch.ones(1)}, (), 1, 2).verdict == "PASS"


def test_the_report_is_escaped_in_html():
    found = verify_changed_state({"w": 1.0}, modules=("<b> (Dropout)",))
    assert "<b>" not in found._repr_html_()


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (nn.BatchNorm1d(4), True),
        (nn.BatchNorm2d(4), True),
        (nn.SyncBatchNorm(4), False),
        (nn.LayerNorm(4), False),
        (nn.GroupNorm(2, 4), False),
        (nn.Dropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.Dropout2d(0.1), True),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
        (nn.MultiheadAttention(4, 2), False),
        (nn.LSTM(4, 4, num_layers=2, dropout=0.5), True),
        (nn.LSTM(4, 4), False),
        (nn.RReLU(), True),
        (nn.AlphaDropout(0.2), True),
    ],
)
def test_modules_whose_results_depend_on_the_number_of_processes_are_found(module, named):
    found = list(find_incomparable_modules(nn.Sequential(nn.Linear(4, 4), module)))
    assert bool(found) == named
    if named:
        assert found[0][:2] == ("1", type(module).__name__)


def test_an_incomparable_module_can_be_the_model_itself():
    assert summarize_modules(nn.Dropout(0.5)) == ("the model (Dropout): each rank draws its own random numbers",)


def test_modules_of_one_kind_take_one_line():
    layers = [nn.BatchNorm1d(2) for _ in range(20)]
    (line,) = summarize_modules(nn.Sequential(*layers))
    assert line.startswith("0, 1 and 18 more (BatchNorm1d): each rank normalizes")
    assert len(summarize_modules(nn.Sequential(*layers, nn.Dropout(0.5)))) == 2

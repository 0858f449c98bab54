"""The verdict of a verification, from two state dicts and the largest gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dtkit.training.verify import compare_states, find_incomparable_modules, summarize_modules
from tests.support.verification import verify_changed_state


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
    assert "  1 number in w: the true gradient is zero, so the optimizer follows rounding there" in found.text()
    assert verify_changed_state({"w": [0, 5e-10, 0]}, gradients).verdict == "FAIL"
    assert (
        verify_changed_state({"w": [5e-11, 0, 0]}, gradients).verdict == "FAIL"
    )  # other elements have the narrow tolerance


def test_elements_with_zero_gradient_of_all_parameters_are_one_line():
    gradients = {"w": torch.tensor([1.0, 0, 1], dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    found = verify_changed_state({"w": [0, 5e-11, 0]}, gradients)
    lines = [line for line in found.text().splitlines() if "true gradient" in line]
    assert lines == [
        (
            "  3 numbers in w and 1 other parameter: the true gradient is zero, so the optimizer follows rounding "
            "there, and they differ by 5e-11 at most (bound 1e-10)"
        )
    ]


def test_elements_with_zero_gradient_that_are_equal_are_called_so():
    gradients = {"w": torch.tensor([1.0, 0, 1], dtype=torch.float64)}
    assert "and they are equal to the last bit\n" in f"{verify_changed_state({}, gradients).text()}\n"


def test_a_small_gradient_does_not_count_as_zero():
    gradients = {"w": torch.tensor([1.0, 1e-9, 1.0], dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
    found = verify_changed_state({"w": [0, 5e-11, 0]}, gradients)
    assert found.verdict == "FAIL"
    assert not found.zero_gradient


def test_a_not_comparable_verdict_names_the_modules():
    found = verify_changed_state({"w": 1.0}, modules=("1 (BatchNorm1d): each rank normalizes",))
    assert found.verdict == "NOT COMPARABLE"
    assert not found
    assert "1 (BatchNorm1d)" in found.text()


def test_extra_state_is_not_compared():
    state = {"w": torch.ones(1), "_extra_state": {"version": 1}}
    assert compare_states(state, state, {"w": torch.ones(1)}, (), 1, 2).verdict == "PASS"


def test_the_report_is_escaped_in_html():
    found = verify_changed_state(modules=("<b> (Dropout)",))
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

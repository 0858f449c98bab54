"""Invalid options of strategies raise errors with the value, the rule and the remedy."""

from __future__ import annotations

import pytest
import torch

import dtkit
from dtkit.strategies import gradients
from dtkit.strategies.loss import LOSS_IS_MEAN, LOSS_IS_WEIGHTED_SUM


@pytest.mark.parametrize("name", ["find_unused_parameters", "sync_batch_norm"])
def test_flag_options_need_a_bool(name):
    with pytest.raises(TypeError, match=f"{name}='no'; it must be True or False, such as {name}=True"):
        dtkit.DataParallel(**{name: "no"})
    with pytest.raises(TypeError, match=f"{name}=0; it must be True or False, such as {name}=False"):
        dtkit.DataParallel(**{name: 0})


def test_compile_is_a_bool_or_one_of_torchs_modes():
    assert dtkit.DataParallel(compile="reduce-overhead").compile == "reduce-overhead"
    with pytest.raises(ValueError, match="compile='fast'; it must be one of 'reduce-overhead', 'max-autotune'"):
        dtkit.DataParallel(compile="fast")
    with pytest.raises(TypeError, match="compile=0; it must be True or False, such as compile=False"):
        dtkit.DataParallel(compile=0)


def test_split_needs_a_list_of_names():
    with pytest.raises(TypeError, match=r"split='24'; it must be a list of names, such as split=\['24'\]"):
        dtkit.Pipeline(2, 4, split="24")
    with pytest.raises(TypeError, match=r"split=\[2\]; names are strings, such as split=\['2'\]"):
        dtkit.Pipeline(2, 4, split=[2])
    with pytest.raises(TypeError, match="split is an int; it must be a list of names"):
        dtkit.Pipeline(2, 4, split=2)
    assert dtkit.Pipeline(2, 4, split=["2"]).split == ("2",)


def test_outer_optimizer_checks_its_options():
    with pytest.raises(ValueError, match=r"lr=-1; it must be a finite number above 0\. Usual is lr=0\.7$"):
        dtkit.OuterSGD(lr=-1)
    with pytest.raises(TypeError, match=r"lr=None; it must be a number above 0, such as lr=1\.0"):
        dtkit.OuterSGD(lr=None)
    with pytest.raises(ValueError, match="momentum=1; it must be 0 or more and less than 1"):
        dtkit.OuterSGD(momentum=1)
    with pytest.raises(TypeError, match=r"momentum='0\.9'; it must be a number"):
        dtkit.OuterSGD(momentum="0.9")
    with pytest.raises(TypeError, match="nesterov=None; it must be True or False"):
        dtkit.OuterSGD(nesterov=None)


def test_mesh_errors_name_the_options_of_the_strategy():
    with pytest.raises(ValueError, match=r"replicas 1 x stages 3 = 3, but there are 2 ranks.*replicas 1 x stages 2"):
        dtkit.Pipeline(3, 4).build_mesh(2)
    with pytest.raises(ValueError, match=r"replicas 1 x tp_size 3 = 3, but there are 4 ranks"):
        dtkit.TensorParallel(3).build_mesh(4)
    with pytest.raises(ValueError, match=r"replicas 3 x shards 1 = 3, but there are 4 ranks"):
        dtkit.Sharded(replicas=3).build_mesh(4)


# -- functions of gradients --------------------------------------------------------------------------------------


def test_all_reduce_flat_sums_once_and_keeps_unused_gradients_none():
    parameters = [torch.zeros(2, 3, dtype=torch.float64), torch.zeros(4, dtype=torch.float64), torch.zeros(1)]
    local = [torch.ones(2, 3, dtype=torch.float64), None, None]
    remote = [torch.ones(2, 3), torch.full((4,), 5.0), None]
    calls = []

    def all_reduce(flat):
        calls.append(flat.numel())
        flat += torch.cat([torch.tensor([1.0, 1.0, 0.0]), *(torch.ones(6), torch.full((4,), 5.0), torch.zeros(1))])

    sums = gradients.all_reduce_flat(parameters, local, all_reduce)
    assert calls == [3 + 6 + 4 + 1]
    assert torch.equal(sums[0], local[0] + remote[0])
    assert torch.equal(sums[1], remote[1].double())
    assert sums[2] is None


def test_fused_scaling_equals_scaling_one_by_one():
    fused = [torch.arange(3.0), torch.ones(2, 2)]
    mixed = [torch.arange(3.0), torch.ones(2, 2, dtype=torch.float64), torch.ones(2).to_sparse()]
    gradients.scale_(fused, 0.5)
    gradients.scale_(mixed, torch.tensor(0.5, dtype=torch.float64))
    gradients.scale_([], 0.5)
    assert torch.equal(fused[0], mixed[0])
    assert torch.equal(fused[1], mixed[1].float())
    assert torch.equal(mixed[2].to_dense(), torch.full((2,), 0.5))


def test_scale_does_not_round_the_factor():
    exact = [torch.ones(2, dtype=torch.float64)]
    gradients.scale_(exact, 1 / 3)
    assert exact[0].tolist() == [1 / 3, 1 / 3]


def test_sum_squares_and_clip_factor_match_their_formulas():
    squares = gradients.sum_squares(
        [torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0], dtype=torch.float64).to_sparse()]
    )
    assert torch.allclose(squares, torch.tensor([25.0, 5.0], dtype=torch.float64))
    assert gradients.compute_clip_factor(5.0, None) == gradients.compute_clip_factor(5.0, 5.0) == 1.0
    assert gradients.compute_clip_factor(5.0, 1.0) == 1 / (5 + 1e-6)


def test_weight_factor_of_zero_is_finite():
    assert float(gradients.compute_weight_factor(torch.tensor(4.0, dtype=torch.float64))) == 0.25
    zero = torch.tensor(0.0, dtype=torch.float64)
    assert float(gradients.compute_weight_factor(zero)) < float("inf")
    assert float(zero) > 0


def test_loss_form_is_unchanged_without_a_group():
    assert gradients.agree_on_loss_form(LOSS_IS_MEAN, None) == LOSS_IS_MEAN
    assert gradients.agree_on_loss_form(LOSS_IS_WEIGHTED_SUM, None) == LOSS_IS_WEIGHTED_SUM


class _Disagreeing:
    def all_reduce(self, votes):
        votes += 1


def test_loss_forms_that_differ_between_ranks_raise():
    with pytest.raises(TypeError, match="a scalar on some ranks and a"):
        gradients.agree_on_loss_form(LOSS_IS_MEAN, _Disagreeing())

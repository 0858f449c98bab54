"""Functions of transformers for the routers' loss: which are known, and where they are found."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

import dtkit
from dtkit.strategies import router_loss

pytest.importorskip("transformers")

from dtkit.data.loss_check import describe_parts
from dtkit.strategies.loss import Loss
from tests.support.hugging_face import make_llama, make_mixtral, make_samples

KNOWN = ["mixtral", "qwen2_moe", "nllb_moe"]


def load_function(name: str) -> Any:
    return vars(importlib.import_module(f"transformers.models.{name}.modeling_{name}"))[router_loss.FUNCTION_NAME]


@pytest.mark.parametrize("name", [*KNOWN, "doge", "switch_transformers"])
def test_functions_that_compute_the_same_loss_are_known(name: str):
    assert router_loss._is_known(load_function(name)) == (name in KNOWN)


def test_functions_are_found_in_modules_of_the_model_and_of_the_step():
    def step(_model: Any, _batch: Any) -> Any:
        return load_balancing_loss_func  # noqa: F821 - as imported by a user

    (namespace,) = router_loss.find_namespaces(make_mixtral())
    assert namespace["__name__"] == "transformers.models.mixtral.modeling_mixtral"
    assert router_loss.find_namespaces(make_llama(), step) == []
    step.__globals__[router_loss.FUNCTION_NAME] = load_function("mixtral")
    try:
        assert router_loss.find_namespaces(make_llama(), step) == [step.__globals__]
    finally:
        del step.__globals__[router_loss.FUNCTION_NAME]


def test_trial_compares_the_routers_loss_where_ranks_do_not_share_it():
    model, batch = make_mixtral(), default_collate(make_samples(8, "mixtral"))
    namespace = router_loss.find_namespaces(model)[0]
    original = namespace[router_loss.FUNCTION_NAME]
    assert describe_parts(Loss(), model, batch, shares_router_losses=True) is None
    assert "routers' loss" in (describe_parts(Loss(), model, batch) or "")
    assert namespace[router_loss.FUNCTION_NAME] is original


@pytest.mark.parametrize("mask", [None, torch.tensor([[1, 1, 1], [1, 0, 0]])], ids=["whole", "padded"])
def test_sums_of_parts_give_the_loss_of_the_whole(mask: torch.Tensor | None):
    torch.manual_seed(0)
    gates = tuple(torch.randn(6, 4) for _ in range(2))
    parts = [
        router_loss._compute_sums([g[rows] for g in gates], 4, 2, None if mask is None else mask[k : k + 1])
        for k, rows in enumerate((slice(3), slice(3, 6)))
    ]
    loss = router_loss._compute_loss(parts[0] + parts[1], 4)
    assert float(loss) == pytest.approx(float(load_function("mixtral")(gates, 4, 2, mask)), rel=1e-6)


def test_mixture_of_experts_is_known_by_its_config():
    assert router_loss.is_in_model(make_mixtral())
    assert not router_loss.is_in_model(make_llama())


def test_pipeline_refuses_the_routers_loss():
    with pytest.raises(ValueError, match=r"adds the routers' loss .*output_router_logits = False"):
        dtkit.Pipeline(2, 2).check_model(make_mixtral())

"""Arguments of `cluster.train_xgboost` that are refused in the notebook."""

from __future__ import annotations

from typing import Any

import pytest

from dtkit.integrations.xgboost.checks import check_arguments, check_options

xgboost = pytest.importorskip("xgboost")

ROWS = ([[0.0]], [1.0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"params": None}, "params=None; give XGBoost's parameters by name"),
        ({"num_boost_round": "3"}, "num_boost_round='3'; it must be a number of rounds, at least 1"),
        ({"num_boost_round": 2.5}, r"num_boost_round=2\.5; it must be"),
        ({"num_boost_round": 0}, "num_boost_round=0; it must be"),
        ({"evals": [ROWS]}, "evals is a list; give validation data by name"),
        ({"evals": {"train": ROWS}}, "evals has the name 'train', which is that of the training data"),
        ({"evals": None, "early_stopping_rounds": 2}, "early_stopping_rounds needs evals"),
        ({"early_stopping_rounds": 0}, "early_stopping_rounds=0; it must be a number of rounds"),
    ],
)
def test_arguments_of_another_kind_are_refused(changed: dict[str, Any], message: str):
    good = {"params": {}, "num_boost_round": 3, "evals": {"validation": ROWS}, "early_stopping_rounds": None}
    check_arguments(**good)
    with pytest.raises((TypeError, ValueError), match=message):
        check_arguments(**(good | changed))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callbacks": []}, "callbacks= can't be given"),
        ({"verbose_eval": True}, "verbose_eval= can't be given"),
        ({"maximise": True}, r"no argument maximise=; did you mean maximize=\?"),
        ({"zzz": 1}, "no argument zzz=; it takes custom_metric"),
        ({"xgb_model": "file"}, "xgb_model='file'; give the result of a training, or a booster"),
    ],
)
def test_options_that_xgboost_lacks_or_dtkit_sets_are_refused(options: dict[str, Any], message: str):
    check_options({"custom_metric": print, "xgb_model": xgboost.Booster()}, xgboost)
    with pytest.raises(TypeError, match=message):
        check_options(options, xgboost)

"""Boosted trees by XGBoost, on the engines: see :meth:`dtkit.Cluster.train_xgboost`."""

from dtkit.integrations.xgboost.result import BoostingResult
from dtkit.integrations.xgboost.training import get_last_result

__all__ = ["BoostingResult", "get_last_result"]

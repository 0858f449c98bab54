"""Traditional models on engines next to one process: a search over forests, and boosted trees."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any

import joblib
import numpy as np
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import GridSearchCV

import dtkit
from tests.bench.pairs import alternate, ratios, report

if TYPE_CHECKING:
    from collections.abc import Callable

PAIRS = 5


def forests() -> bool:
    """Compare a search on 1, 2 and 4 engines with joblib's local processes, as many as engines."""
    met = True
    for engines in (1, 2, 4):
        print(f"forests, {engines} engines against {engines} local processes, seconds", flush=True)
        with dtkit.Cluster(engines, threads=1) as cluster:
            local, ours = _search_with(engines), _search_on(cluster)
            local(), ours()  # both load their libraries
            measured, reference = alternate(lambda: _measure(ours), lambda: _measure(local), PAIRS)  # noqa: B023
        met &= report(
            f"time of a search against local processes, {engines} engines", ratios(measured, reference), most=1.2
        )
    return met


def _make_search() -> Any:
    settings = {"max_depth": [4, 8, 12], "min_samples_leaf": [1, 2]}
    return GridSearchCV(RandomForestClassifier(60, random_state=0), settings, cv=4)


def _search_with(n_jobs: int) -> Callable[[], Any]:
    def search() -> None:
        with joblib.parallel_config("loky", n_jobs=n_jobs):  # as in ours, the last fit of the best forest uses it too
            _make_search().fit(*load_digits(return_X_y=True))

    return search


def _search_on(cluster: dtkit.Cluster) -> Callable[[], Any]:
    def search() -> None:
        with cluster.joblib():
            _make_search().fit(*load_digits(return_X_y=True))

    return search


def _measure(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def xgboost() -> bool:
    """Compare boosted trees on 1 and 2 engines with one process of as many threads."""
    if importlib.util.find_spec("xgboost") is None:
        print("  xgboost is not installed: it is not measured")
        return True
    import xgboost as library

    generator = np.random.default_rng(0)
    X = generator.normal(size=(200_000, 32)).astype("float32")
    y = (X[:, 0] * X[:, 1] + X[:, 2] > 0).astype("float32")
    params = {"objective": "binary:logistic", "max_depth": 6, "tree_method": "hist"}
    matrix = library.DMatrix(X, y)  # with its bins after the first training, as dtkit keeps those of a partition
    met = True
    for engines in (1, 2):
        print(f"xgboost, {engines} engines against one process of {engines} threads, seconds", flush=True)
        with dtkit.Cluster(engines, threads=1) as cluster:
            part = cluster.partition((X, y), seed=0)
            first = _measure(lambda: cluster.train_xgboost(params, part, 50))  # noqa: B023
            fresh = _measure(lambda: library.train({**params, "nthread": engines}, library.DMatrix(X, y), 50))  # noqa: B023
            print(f"  the first training of a matrix: {first:.3g} against {fresh:.3g}")
            measured, reference = alternate(
                lambda: _measure(lambda: cluster.train_xgboost(params, part, 50)),  # noqa: B023
                lambda: _measure(lambda: library.train({**params, "nthread": engines}, matrix, 50)),  # noqa: B023
                PAIRS,
            )
        met &= report(
            f"time of 50 rounds against one process, {engines} engines", ratios(measured, reference), most=1.5
        )
    return met

"""scikit-learn's parallel work on engines: equal results, errors, interrupts, lost engines."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import joblib
import numpy as np
import pytest
import scipy.sparse
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import GridSearchCV

import dtkit
from dtkit.integrations.joblib import backend
from tests.support.small import check_usable
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.cluster


def test_search_and_forest_equal_local_ones(cluster2: dtkit.Cluster):
    X, y = load_digits(return_X_y=True)
    settings = {"max_depth": [2, 4], "min_samples_leaf": [1, 3]}
    forest = RandomForestClassifier(10, random_state=0)
    local = GridSearchCV(forest, settings, cv=3).fit(X, y)
    with cluster2.joblib():
        found = GridSearchCV(forest, settings, cv=3).fit(X, y)
        trees = RandomForestClassifier(10, random_state=0).fit(X, y)
    assert found.best_params_ == local.best_params_
    np.testing.assert_array_equal(found.cv_results_["mean_test_score"], local.cv_results_["mean_test_score"])
    np.testing.assert_array_equal(trees.predict_proba(X), forest.fit(X, y).predict_proba(X))
    check_usable(cluster2)


def describe_array(array: np.ndarray) -> tuple[int, float, bool, int]:
    return os.getpid(), float(array.sum()), array.flags.writeable, array.__array_interface__["data"][0] % 1


def test_large_arrays_lie_in_shared_memory_once(cluster2: dtkit.Cluster):
    large = np.ones((512, 1024))
    before = {path.name for path in os.scandir("/dev/shm")}
    with cluster2.joblib():
        results = joblib.Parallel()(joblib.delayed(describe_array)(large) for _ in range(8))
        placed = [
            path for path in os.scandir("/dev/shm") if path.name not in before and path.stat().st_size >= large.nbytes
        ]
        assert len(placed) == 1
    assert [result[1:3] for result in results] == [(large.sum(), False)] * 8
    assert {result[0] for result in results} == {node.pid for node in cluster2.nodes}
    assert not any(path.name in {p.name for p in placed} for path in os.scandir("/dev/shm"))


@pytest.mark.slow
def test_an_array_that_was_changed_between_two_calls_is_placed_again(cluster2: dtkit.Cluster):
    large = np.ones((512, 1024))
    before = {path.name for path in os.scandir("/dev/shm")}
    with cluster2.joblib():
        for factor in (1.0, 1.0, 3.0):
            large *= factor
            results = joblib.Parallel()(joblib.delayed(describe_array)(large) for _ in range(4))
            assert [result[1] for result in results] == [factor * 512 * 1024] * 4
        placed = [path for path in os.scandir("/dev/shm") if path.name not in before]
        assert sum(path.stat().st_size >= large.nbytes for path in placed) == 2
    assert not any(path.stat().st_size >= large.nbytes for path in os.scandir("/dev/shm") if path.name not in before)


def sum_table(table: Any) -> float:
    return float(np.asarray(table.sum()).sum())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["frame", "sparse"])
def test_tables_and_sparse_matrices_lie_in_shared_memory_once(cluster2: dtkit.Cluster, kind: str):
    values = np.ones((512, 1024))
    table = pytest.importorskip("pandas").DataFrame(values) if kind == "frame" else scipy.sparse.csr_array(values)
    before = {path.name for path in os.scandir("/dev/shm")}
    with cluster2.joblib():
        assert joblib.Parallel()(joblib.delayed(sum_table)(table) for _ in range(8)) == [values.sum()] * 8
        placed = [path for path in os.scandir("/dev/shm") if path.name not in before]
        assert sum(path.stat().st_size >= values.nbytes for path in placed) == 1


def list_loaded(names: list[str]) -> list[str]:
    return [name for name in names if name in sys.modules]


def test_libraries_are_loaded_before_the_first_task_and_progress_is_by_node(
    cluster2: dtkit.Cluster, monkeypatch: pytest.MonkeyPatch
):
    shown: list[str] = []

    @contextlib.contextmanager
    def show_progress(_text: str) -> Iterator[Any]:
        yield SimpleNamespace(update=shown.append)

    monkeypatch.setattr(backend, "show_progress", show_progress)
    names = ["sklearn.ensemble", "sklearn.model_selection"]
    with cluster2.joblib():
        loaded = joblib.Parallel(batch_size=1)(joblib.delayed(list_loaded)(names) for _ in range(6))
    assert loaded == [names] * 6
    assert any(re.fullmatch(r"joblib: \d tasks \(node 0: \d, node 1: \d\)", text) for text in shown), shown


def fail_for(number: int) -> int:
    if number == 3:
        raise ValueError("planted")
    return number


def test_error_of_a_task_is_raised_and_later_tasks_run(cluster2: dtkit.Cluster):
    with cluster2.joblib():
        with pytest.raises(dtkit.errors.EngineError, match="ValueError: planted"):
            joblib.Parallel()(joblib.delayed(fail_for)(k) for k in range(6))
        assert joblib.Parallel()(joblib.delayed(fail_for)(k) for k in range(2)) == [0, 1]
    check_usable(cluster2)


def wait_for_a_minute(flag: Path) -> None:
    flag.touch()
    # sleeps: under test: a task that an interrupt must end
    time.sleep(60)


@pytest.mark.slow
def test_interrupt_ends_the_tasks_on_the_engines(cluster2: dtkit.Cluster, tmp_path: Path):
    flag = tmp_path / "flag"

    def interrupt() -> None:
        wait_until(flag.exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), cluster2.joblib():
        joblib.Parallel()(joblib.delayed(wait_for_a_minute)(flag) for _ in range(4))
    assert time.monotonic() - start < 30
    thread.join(10)
    check_usable(cluster2)


def die_once(flag: Path, number: int) -> int:
    if number == 2 and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.slow
def test_task_of_a_killed_engine_is_computed_again(tmp_path: Path):
    with dtkit.Cluster(2, threads=1) as cluster:
        with cluster.joblib():
            results = joblib.Parallel()(joblib.delayed(die_once)(tmp_path / "flag", k) for k in range(6))
        assert results == list(range(6))
        check_usable(cluster)


def test_joblib_is_refused_during_a_run(cluster2: dtkit.Cluster):
    from tests.support import small

    run = small.train(cluster2, steps=small.LONG)
    with pytest.raises(dtkit.errors.RunError, match="needs all engines"):
        cluster2.joblib()
    run.stop()


def nest() -> list[Any]:
    return joblib.Parallel(n_jobs=2)(joblib.delayed(os.getpid)() for _ in range(2))


def test_parallel_calls_within_a_task_stay_on_its_engine(cluster2: dtkit.Cluster):
    with cluster2.joblib():
        results = joblib.Parallel(n_jobs=2)(joblib.delayed(nest)() for _ in range(2))
    assert all(first == second for first, second in results)

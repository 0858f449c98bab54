"""``cluster.search`` on real engines, with Optuna and without."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import dtkit
from dtkit.errors import ItemError
from dtkit.integrations.search import driver, get_last_result
from tests.support import small

pytestmark = pytest.mark.cluster


def parabola(trial: Any) -> float:
    return (trial.params["x"] - 2) ** 2 + trial.params["y"]


def test_a_grid_needs_no_optuna(cluster2: dtkit.Cluster):
    result = cluster2.search(parabola, {"x": [0, 1, 2, 3], "y": [5, 1]})
    assert (result.best_params, result.best_value) == ({"x": 2, "y": 1}, 1.0)
    assert len(result.trials) == 8
    assert {trial.rank for trial in result.trials} == {0, 1}
    assert len(cluster2.search(parabola, {"x": [0, 1, 2], "y": [1]}, n_trials=2, seed=0).trials) == 2


def fit(trial: Any, offset: float) -> float:
    x = trial.suggest_float("x", -10, 10)
    kind = trial.suggest_categorical("kind", ["good", "bad"])
    depth = trial.suggest_int("depth", 1, 3)
    trial.set_user_attr("pid", os.getpid())
    return (x - 2) ** 2 + (100 if kind == "bad" else 0) + depth + offset


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_optuna_chooses_parameters_of_trials_on_engines(cluster2: dtkit.Cluster):
    optuna = pytest.importorskip("optuna")
    result = cluster2.search(fit, n_trials=30, seed=0, args=[0.5])
    study = result.study
    assert isinstance(study, optuna.Study)
    assert [t.value for t in study.trials] == [t.value for t in result.trials]
    assert [t.params for t in study.trials] == [t.params for t in result.trials]
    assert (result.best_value, result.best_params) == (study.best_value, study.best_params)
    assert result.best_value < 20  # chance alone has a median of about 140
    assert len({t.user_attrs["pid"] for t in study.trials}) == 2


def learn(trial: Any, steps: int) -> float:
    """Report the rate of the trial at each step: the higher, the worse."""
    from dtkit.integrations.search import TrialPruned

    for step in range(steps):
        trial.report(trial.number, step)
        if trial.should_prune():
            raise TrialPruned
    return float(trial.number)


def test_a_pruner_ends_bad_trials(cluster2: dtkit.Cluster):
    optuna = pytest.importorskip("optuna")
    pruner = optuna.pruners.ThresholdPruner(upper=2.5, n_warmup_steps=1)
    study = optuna.create_study(pruner=pruner)
    result = cluster2.search(learn, n_trials=6, study=study, args=[4])
    assert [trial.state for trial in result.trials] == ["complete"] * 3 + ["pruned"] * 3
    assert [len(trial.reports) for trial in result.trials] == [4, 4, 4, 2, 2, 2]
    assert [len(trial.intermediate_values) for trial in study.trials] == [4, 4, 4, 2, 2, 2]
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 3 + ["PRUNED"] * 3


def fail_some(trial: Any) -> float:
    if trial.number in (1, 2):
        raise ValueError(f"trial {trial.number} diverged")
    return float("nan") if trial.number == 3 else trial.number


def test_failed_trials_are_in_the_result(cluster2: dtkit.Cluster):
    optuna = pytest.importorskip("optuna")
    result = cluster2.search(fail_some, n_trials=5, study=optuna.create_study(direction="maximize"))
    assert [trial.state for trial in result.trials] == ["complete", "failed", "failed", "failed", "complete"]
    assert "trial 1 diverged" in str(result.trials[1].error)
    assert result.best_value == 4.0
    assert [trial.state.name for trial in result.study.trials].count("FAIL") == 3
    small.check_usable(cluster2)


def fail_all(trial: Any) -> float:
    raise ValueError("never works")


def test_a_search_without_any_result_raises_the_error(cluster2: dtkit.Cluster):
    with pytest.raises(ItemError, match="never works"):
        cluster2.search(fail_all, {"x": [1, 2, 3]})
    with pytest.raises(ItemError, match="never works"):
        cluster2.search(fail_all, {"x": [1, 2, 3]}, on_error="raise")
    small.check_usable(cluster2)


def kill_first(trial: Any, folder: str) -> float:
    x = trial.suggest_float("x", 0, 1)
    trial.report(x, 0)
    mark = Path(folder, f"{trial.number}")
    if trial.number == 1 and not mark.exists():
        mark.write_text(repr(x))
        os.kill(os.getpid(), signal.SIGKILL)
    return x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # Optuna's: a value was reported before
def test_a_trial_on_a_lost_engine_is_repeated_with_its_parameters(tmp_path: Path):
    pytest.importorskip("optuna")
    with dtkit.Cluster(2, threads=1) as cluster:
        result = cluster.search(kill_first, n_trials=4, seed=0, args=[str(tmp_path)])
        assert [trial.state for trial in result.trials] == ["complete"] * 4
        assert repr(result.trials[1].value) == (tmp_path / "1").read_text()
        small.check_usable(cluster)


def spin(trial: Any) -> float:
    while True:
        pass


def return_or_spin(trial: Any) -> float:
    while trial.params["x"] == 2:
        pass
    return float(trial.params["x"])


@pytest.mark.slow
def test_trials_of_a_search_that_was_ended_are_kept(cluster2: dtkit.Cluster, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(TimeoutError):
        cluster2.search(return_or_spin, {"x": [0, 1, 2]}, timeout=5.0)
    result = get_last_result()
    assert result is not None
    assert [trial.state for trial in result.trials] == ["complete", "complete", "failed"]
    assert (result.best_params, result.best_value) == ({"x": 0}, 0.0)
    assert "get_last_result() has the trials" in capsys.readouterr().out
    small.check_usable(cluster2)


def test_a_search_that_takes_too_long_is_ended(cluster2: dtkit.Cluster):
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study()
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="spin: 0 items"):
        cluster2.search(spin, n_trials=5, study=study, timeout=1.0)
    assert time.monotonic() - start < 20
    assert [trial.state.name for trial in study.trials] == ["FAIL", "FAIL"]
    assert not list(cluster2.folder.glob("search-*"))
    small.check_usable(cluster2)


def train_net(trial: Any, X: Any, y: Any) -> float:
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=trial.suggest_float("lr", 1e-4, 1.0, log=True))
    for epoch in range(5):
        loss = nn.functional.cross_entropy(net(X), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trial.report(loss.item(), epoch)
    return loss.item()


def test_trials_on_engines_are_equal_to_those_in_one_process(cluster2: dtkit.Cluster):
    """The oracle is the same training in the notebook, at the rate that was chosen."""
    optuna = pytest.importorskip("optuna")
    data = small.data()
    result = cluster2.search(train_net, n_trials=4, seed=1, args=data)
    for trial in result.trials:
        assert train_net(optuna.trial.FixedTrial(trial.params), *data) == pytest.approx(trial.value, rel=1e-6)


def test_a_notebook_shows_the_trials_while_they_run(cluster2: dtkit.Cluster, monkeypatch: pytest.MonkeyPatch):
    shown: list[dict[str, str]] = []
    monkeypatch.setattr(driver, "in_notebook", lambda: True)
    monkeypatch.setattr(driver.UpdatableDisplay, "show", lambda _, data: shown.append(data))
    result = cluster2.search(parabola, {"x": range(40), "y": [0]})
    assert shown[-1] == {"text/html": result.format_html(), "text/plain": repr(result)}
    assert "40 complete; best 0 (trial 2)" in shown[-1]["text/plain"]
    assert "running" in shown[0]["text/plain"]

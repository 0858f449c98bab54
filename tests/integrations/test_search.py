"""The parts of a search without a cluster: choices, results, and the channel between engine and notebook."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest

from dtkit.integrations.search.channel import EngineEnd, NotebookEnd, TrialStart
from dtkit.integrations.search.driver import _choose_study, search
from dtkit.integrations.search.result import SearchResult
from dtkit.integrations.search.studies import GridStudy, GridTrial, OptunaStudy
from dtkit.integrations.search.trial import Trial, TrialPruned, run_trial
from dtkit.integrations.search.trial_record import TrialRecord
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SPACE = {"lr": [0.1, 0.01], "width": [4, 8, 16]}


# -- choices ---------------------------------------------------------------------------------------------------


def test_a_grid_has_each_combination_once():
    study = GridStudy(SPACE, "minimize", None, None)
    trials = [study.ask() for _ in range(len(study))]
    assert [trial.params for trial in trials] == [{"lr": lr, "width": w} for lr in (0.1, 0.01) for w in (4, 8, 16)]
    assert [trial.number for trial in trials] == list(range(6))


def test_some_of_a_grid_are_different_and_repeatable():
    def choose(seed: int) -> list[Any]:
        study = GridStudy(SPACE, "minimize", 4, seed)
        return [tuple(study.ask().params.values()) for _ in range(len(study))]

    assert len(set(choose(1))) == 4
    assert choose(1) == choose(1)
    assert choose(1) != choose(2)


@pytest.mark.parametrize("space", [{"lr": 0.1}, {"lr": []}, {"lr": "ab"}])
def test_a_space_without_choices_is_refused(space: Any):
    with pytest.raises(ValueError, match=r"space\['lr'\]="):
        GridStudy(space, "minimize", None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, None, "minimize", None, None), "n_trials= is missing"),
        ((SPACE, None, "minimize", 0, None), "n_trials=0"),
        ((SPACE, None, "least", None, None), "direction='least'"),
        ((SPACE, object(), "minimize", None, None), "space= and study= are given"),
        ((SPACE, None, "minimize", None, "x"), "seed='x'; it must be an integer from 0 up"),
        (([("lr", [1])], None, "minimize", None, None), r"space=\[.*give lists of choices by name"),
        ((None, 3, "minimize", 2, None), r"study=3 is an int; give Optuna's"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        _choose_study(*arguments)


def test_an_objective_that_cannot_be_called_is_refused():
    group: Any = SimpleNamespace(check_open=bool)
    with pytest.raises(TypeError, match=r"the function is an int, which can't be called; .* cluster\.search\("):
        search(group, 3, SPACE, bool)  # type: ignore[arg-type]


def test_a_misspelled_option_names_the_right_one():
    group: Any = SimpleNamespace(check_open=bool)
    with pytest.raises(TypeError, match=r"search\(\) has no argument n_trial=; did you mean n_trials=\?"):
        search(group, len, SPACE, bool, n_trial=3)  # type: ignore[call-arg]


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(ImportError, match=r"dtkit-jupyter\[optuna\].*space="):
        OptunaStudy.create("minimize", 0)


# -- the channel -----------------------------------------------------------------------------------------------


class Answering:
    """Answers a trial's questions on a thread, by a GridTrial."""

    def __init__(self, folder: Path, trial: GridTrial) -> None:
        self.start = TrialStart(trial.number, dict(trial.params), str(folder), attempt=0)
        self.calls: list[tuple[str, list[Any]]] = []
        self._trial = trial
        self._end = NotebookEnd(self.start, self._call)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def _call(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        self.calls.append((method, args))
        return getattr(self._trial, method)(*args, **kwargs)

    def _work(self) -> None:
        while not self._stop.wait(0.001):
            self._end.answer()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)


def test_a_trial_asks_its_study(tmp_path: Path):
    with Answering(tmp_path, GridTrial(3, {"lr": 0.1, "width": 8, "act": "relu"})) as notebook:
        trial = Trial(notebook.start)
        assert trial.suggest_float("lr", 0.0, 1.0, log=True) == 0.1
        assert trial.suggest_int("width", 1, 9) == 8
        assert trial.suggest_categorical("act", ["relu", "tanh"]) == "relu"
        trial.report(0.5, 2)
        assert trial.should_prune() is False
        with pytest.raises(ValueError, match="'depth' is not in space="):
            trial.suggest_int("depth", 1, 2)
        trial.set_user_attr("note", [1])
        wait_until(lambda: len(notebook.calls) == 7, 10)
    assert notebook.calls[3] == ("report", [0.5, 2])
    assert list(tmp_path.iterdir()) == []  # all questions and answers were read


class PrunedTrial(GridTrial):
    def should_prune(self) -> Any:
        return np.bool_(True)


def test_a_pruner_may_answer_with_a_numpy_bool(tmp_path: Path):
    with Answering(tmp_path, PrunedTrial(0, {})) as notebook:
        assert Trial(notebook.start).should_prune() is True


def test_only_methods_of_trials_can_be_called(tmp_path: Path):
    start = TrialStart(0, {}, str(tmp_path), attempt=0)
    notebook = NotebookEnd(start, lambda *_: pytest.fail("called"))
    engine = EngineEnd(start)
    engine.tell("__class__")
    assert notebook.answer()
    with pytest.raises(ValueError, match="no method"):
        notebook._compute({"method": "storage", "args": [], "kwargs": {}})


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (lambda _: 3, ("complete", 3.0)),
        (lambda trial: trial.params["lr"], ("complete", 0.5)),
        (lambda _: _raise(TrialPruned()), ("pruned", None)),
    ],
)
def test_outcomes_of_an_objective(objective: Callable[..., Any], expected: Any, tmp_path: Path):
    assert run_trial(TrialStart(0, {"lr": 0.5}, str(tmp_path), 0), objective) == expected


@pytest.mark.parametrize("value", [None, "1", (1, 2), True])
def test_an_objective_must_return_a_number(value: Any, tmp_path: Path):
    with pytest.raises(TypeError, match="must return a number"):
        run_trial(TrialStart(0, {}, str(tmp_path), 0), lambda _: value)


def _raise(error: Exception) -> None:
    raise error


# -- results ---------------------------------------------------------------------------------------------------


def make_result(direction: str = "minimize") -> SearchResult:
    result = SearchResult("fit", direction, None)
    result.trials = [
        TrialRecord(0, 0, "complete", 0.5, {"lr": 0.1}, seconds=1.0),
        TrialRecord(1, 1, "complete", 0.25, {"lr": 0.01}, {0: 0.6, 1: 0.25}, seconds=2.0),
        TrialRecord(2, 0, "pruned", None, {"lr": 1.0}, {0: 9.0}, seconds=0.5),
        TrialRecord(3, 1, "failed", None, {"lr": 2.0}),
        TrialRecord(4, 1, "complete", math.nan, {"lr": 3.0}),
        TrialRecord(5, 0, "running", None, {"lr": 4.0}),
    ]
    return result


def test_best_trial_of_each_direction():
    result = make_result()
    assert (result.best_value, result.best_params, result.best_trial.number) == (0.25, {"lr": 0.01}, 1)
    assert make_result("maximize").best_trial.number == 0
    with pytest.raises(ValueError, match="no trial is complete: no trial yet"):
        SearchResult("fit", "minimize", None).best_value  # noqa: B018 - the access is the test


def test_the_table_has_running_trials_first_then_the_best():
    lines = make_result().format_text().splitlines()
    assert lines[0] == "search fit: 3 complete, 1 pruned, 1 failed, 1 running; best 0.250 (trial 1)"
    assert [line.split()[0] for line in lines[2:5]] == ["5", "1", "0"]
    assert "lr" in lines[1]


def test_the_table_of_many_trials_is_short():
    result = make_result()
    result.trials = [TrialRecord(k, 0, "complete", float(k), {"lr": k}) for k in range(30)]
    assert repr(result).endswith("... and 18 trials more")


def test_a_result_as_table_and_figure():
    pandas = pytest.importorskip("pandas")
    table = make_result().to_pandas()
    assert isinstance(table, pandas.DataFrame)
    assert table["params_lr"].tolist() == [0.1, 0.01, 1.0, 2.0, 3.0, 4.0]
    figure = make_result().figure()
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["Trials", "On the way"]
    assert "<img" in make_result()._repr_html_()
    assert SearchResult("fit", "minimize", None).figure().axes

"""Errors of misspelled attributes: the name that was meant, once, and a property's own errors untouched."""

from __future__ import annotations

import copy
import pickle
import traceback

import pytest

import dtkit
from dtkit._util.attributes import _OTHER_OWNERS, ELSEWHERE, describe_missing, suggest_attributes
from dtkit.history.history import History
from dtkit.planning.plan import Plan
from dtkit.training.run import Run
from tests.support.fake_source import FakeSource


@suggest_attributes("thing")
class Thing:
    """Has a name, and a property that fails."""

    def __init__(self) -> None:
        self.name = "a"

    def resume(self) -> None:
        """Do nothing."""

    @property
    def broken(self) -> int:
        """A mistake of its own."""
        missing: object = self.name
        return missing.real_mistake  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "names", "hint"),
    [
        ("shutdown", ["close", "repair"], "did you mean it.close?"),
        ("fit", ["train", "plan"], "did you mean it.train?"),
        ("to_df", ["to_pandas"], "did you mean it.to_pandas?"),
        ("fit", ["plan", "sum"], "it has plan, sum"),
    ],
)
def test_a_name_of_another_library_is_translated(name: str, names: list[str], hint: str):
    assert describe_missing("it", name, names) == f"it has no attribute {name!r}; {hint}"


@pytest.mark.parametrize(("name", "meant"), [("nmae", "name"), ("resum", "resume")])
def test_the_error_names_what_was_meant_once(name: str, meant: str):
    with pytest.raises(AttributeError) as caught:
        getattr(Thing(), name)
    assert str(caught.value) == f"thing has no attribute '{name}'; did you mean thing.{meant}?"
    shown = "".join(traceback.format_exception(caught.value))  # Python adds suggestions of its own
    assert shown.lower().count("did you mean") == 1


def test_notebooks_show_the_error_without_own_frames():
    with pytest.raises(AttributeError) as caught:
        dtkit.History().losss  # type: ignore[attr-defined]  # noqa: B018 - the access is the test
    shown = "\n".join(caught.value._render_traceback_())  # type: ignore[attr-defined]  # IPython's protocol
    assert "did you mean history.loss?" in shown
    assert "_util/attributes.py" not in shown


def test_an_unlike_name_lists_what_there_is():
    with pytest.raises(AttributeError, match="thing has no attribute 'xyzzy'; it has broken, name, resume"):
        Thing().xyzzy  # type: ignore[attr-defined]  # noqa: B018 - the access is the test


def test_the_error_of_a_property_is_its_own():
    with pytest.raises(AttributeError, match="real_mistake"):
        Thing().broken  # noqa: B018 - the access is the test


def test_protocols_look_for_names_without_a_suggestion():
    thing = pickle.loads(pickle.dumps(copy.deepcopy(Thing())))
    assert thing.name == "a"
    assert not hasattr(thing, "_repr_html_")
    assert getattr(thing, "sizes", None) is None


@pytest.mark.parametrize(
    ("cls", "name", "meant"),
    [
        (dtkit.Run, "resum", "run.resume"),
        (dtkit.Run, "histroy", "run.history"),
        (Plan, "fiting", "plan.fitting"),
        (dtkit.Partition, "size", "partition.sizes"),
        (dtkit.Cluster, "trian", "cluster.train"),
        (dtkit.History, "losss", "history.loss"),
    ],
)
def test_what_users_hold_has_suggestions(cls: type, name: str, meant: str):
    with pytest.raises(AttributeError, match=f"did you mean {meant}\\?"):
        getattr(cls.__new__(cls), name)


def test_the_package_has_suggestions():
    with pytest.raises(AttributeError, match=r"dtkit has no attribute 'compar'; did you mean dtkit\.compare\?"):
        dtkit.compar  # noqa: B018 - the access is the test


@pytest.mark.parametrize(("name", "meant"), [("Trian", "train"), ("train", "train"), ("serch", "search")])
def test_methods_of_the_cluster_are_suggested_for_the_package(name: str, meant: str):
    with pytest.raises(AttributeError, match=rf"dtkit has no attribute '{name}'; did you mean cluster\.{meant}\?"):
        getattr(dtkit, name)


def test_what_the_package_suggests_of_the_cluster_exists():
    _, names = _OTHER_OWNERS["dtkit"]
    assert set(names) <= set(dir(dtkit.Cluster))


def test_name_of_the_same_letters_is_preferred():
    assert describe_missing("run", "stpe", ["status", "step", "stop"]) == (
        "run has no attribute 'stpe'; did you mean run.step?"
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("loss", "run.history.loss()"),
        ("metrics", "run.history.evaluations"),
        ("scalars", 'run.history.scalar("name")'),
        ("df", "run.history.to_pandas()"),
        ("epochs", "run.spec"),
        ("show", "run.figure()"),
        ("predict", "run.model"),
    ],
)
def test_names_that_newcomers_try_on_a_run_lead_to_where_it_is(name: str, meant: str):
    assert describe_missing("run", name, dir(Run)) == f"run has no attribute {name!r}; did you mean {meant}?"


@pytest.mark.parametrize(("name", "meant"), ELSEWHERE["cluster"].items())
def test_faults_are_injected_by_a_run_instead_of_the_cluster(name: str, meant: str):
    assert describe_missing("cluster", name, dir(dtkit.Cluster)).endswith(f"did you mean {meant}?")
    assert not hasattr(dtkit.Cluster, name)
    assert hasattr(Run, meant.removeprefix("run.").partition("(")[0])


@pytest.mark.parametrize(("name", "meant"), ELSEWHERE["dtkit"].items())
def test_names_of_torch_lead_to_the_strategy(name: str, meant: str):
    with pytest.raises(AttributeError, match=f"did you mean {meant}"):
        getattr(dtkit, name)
    assert meant.removeprefix("dtkit.") in dtkit.__all__


@pytest.mark.parametrize(("owner", "cls"), [("run", Run), ("history", History)])
def test_what_errors_suggest_exists_and_what_they_are_for_does_not(owner: str, cls: type):
    source = FakeSource(ranks=1)
    for name, meant in ELSEWHERE[owner].items():
        assert not hasattr(cls, name), name
        first, *others = meant.removeprefix(f"{owner}.").split(".")
        attribute = first.partition("(")[0]
        assert hasattr(cls, attribute) or hasattr(source.history, attribute), meant
        if attribute == "history":
            assert hasattr(source.history, others[0].partition("(")[0]), meant

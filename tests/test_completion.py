"""Names that the Tab key offers behind dtkit's objects."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.completer import IPCompleter, provisionalcompleter

import dtkit
from dtkit._util.completion import hide_from_completion
from dtkit._util.tab_key import find_names, use_dir
from dtkit.dashboard.compare import Comparison
from dtkit.data.broadcast import ModelHandle
from dtkit.testing.fake_transport import FakeTransport
from tests.support import small


def list_shown(obj: object) -> list[str]:
    return [name for name in dir(obj) if not name.startswith("_")]


def test_launchers_and_strategies_offer_their_options_and_what_users_call():
    assert list_shown(dtkit.SSH(["a:2"])) == ["count_agents", "hosts", "python", "script", "ssh_options"]
    for strategy, others in ((dtkit.DataParallel(), []), (dtkit.TensorParallel(2), ["plan_for"])):
        fields = [field.name for field in dataclasses.fields(strategy)]
        assert list_shown(strategy) == sorted(fields + others)


def test_run_and_history_offer_nothing_that_only_dtkit_calls():
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster:
        run = small.train(cluster, start=False)
        offered = [list_shown(each) for each in (cluster, run, run.history)]
        run.stop()
    for names, users, internal in zip(
        offered,
        (["train", "partition"], ["pause", "verify", "placement"], ["to_pandas", "scalar"]),
        (["refresh_nodes", "from_transport"], ["lifecycle", "post", "subscribe"], ["append", "close_run_log"]),
        strict=True,
    ):
        assert set(users) <= set(names)
        assert not set(internal) & set(names)


@pytest.fixture
def user_objects():
    """One object of each kind that a user holds, by the name of its class in the reference."""
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster:
        handle, partition = cluster.broadcast(small.net()), cluster.partition(small.data())
        run = small.train(cluster, handle, partition, start=False)
        yield {
            "Cluster": cluster,
            "Run": run,
            "History": run.history,
            "Partition": partition,
            "EarlyStopping": dtkit.EarlyStopping(),
            "dtkit.data.broadcast.ModelHandle": handle,
        }
        run.stop()


def read_excluded(name: str) -> set[str]:
    """Return the names that the reference leaves out of a class."""
    pages = "".join(page.read_text() for page in (Path(__file__).parents[1] / "docs/reference").glob("*.md"))
    (options,) = re.findall(rf"^\.\. autoclass:: {re.escape(name)}\n((?:   :.*\n)*)", pages, re.MULTILINE)
    return {word for line in re.findall(":exclude-members: (.*)", options) for word in line.split(", ")}


def find_undocumented(obj: object) -> list[str]:
    """Return the names behind an object that have no docstring in its class."""
    pycode = pytest.importorskip("sphinx.pycode")
    described = {
        name
        for kind in type(obj).__mro__
        if kind.__module__.startswith("dtkit")
        for _, name in pycode.ModuleAnalyzer.for_module(kind.__module__).find_attr_docs()
    }
    described |= set(re.findall(r"^    (\w+)$", type(obj).__doc__ or "", re.MULTILINE))  # parameters
    static: dict[str, Any] = {name: inspect.getattr_static(type(obj), name, None) for name in list_shown(obj)}
    return [name for name, member in static.items() if name not in described and not (member and member.__doc__)]


def test_each_name_behind_an_object_is_in_the_reference_or_hidden(user_objects):
    for name, obj in user_objects.items():
        assert not read_excluded(name) & set(list_shown(obj)), name
        assert find_undocumented(obj) == [], name


def read_help(kind: type) -> tuple[str, set[str]]:
    """Return what `help` prints of a class, and the names of its members."""
    text = pydoc.plain(pydoc.render_doc(kind))
    return text, set(re.findall(r"^ \|  (\w+)(?:\(|$| =)", text, re.MULTILINE))


def test_help_shows_what_is_for_users(user_objects):
    kinds = {name: type(obj) for name, obj in user_objects.items() if name != "EarlyStopping"}
    kinds["dtkit.dashboard.compare.Comparison"] = Comparison
    for name, kind in kinds.items():
        text, members = read_help(kind)
        assert len(members) > 2, name
        assert not (read_excluded(name) | {"__dir__", "__getattr__", "__init__"}) & members, name
        assert not [word for word in ("lambda self", "Protocol", "refuse", "engine_group") if word in text], name


def list_arguments_of_any_type() -> list[str]:
    """Return the public functions, and methods of public classes, whose help names an argument without its type."""
    functions = {name: getattr(dtkit, name) for name in dtkit.__all__ if inspect.isfunction(getattr(dtkit, name))}
    for kind in (dtkit.Cluster, dtkit.Run, dtkit.lessons.Lesson):
        members = ((name, getattr(kind, name)) for name in dir(kind) if not name.startswith("_"))
        functions |= {
            f"{kind.__name__}.{name}": member
            for name, member in members
            if inspect.isfunction(member) or inspect.ismethod(member)
        }
        functions[kind.__name__] = kind
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        f"{name}({argument.name})"
        for name, function in functions.items()
        for argument in inspect.signature(function).parameters.values()
        if argument.kind in named and str(argument.annotation) in ("Any", "Callable[..., Any] | None")
    ]


def test_help_names_the_type_of_each_argument_but_of_data_in_any_form():
    assert sorted(list_arguments_of_any_type()) == [
        "Cluster.from_client(client)",  # ipyparallel's, which only one module may import
        "Cluster.partition(data)",
        "Cluster.plan(data)",
        "Cluster.train(data)",
        "Cluster.train(validation)",
        "Cluster.train_xgboost(data)",
        "Run.evaluate(data)",
    ]


@pytest.mark.parametrize("kind", [dtkit.Run, dtkit.History, ModelHandle, Comparison])
def test_help_shows_no_constructor_of_objects_that_dtkit_makes(kind: type):
    assert f"{kind.__name__}(" not in read_help(kind)[0].partition("\n |")[2].replace(f"dtkit.{kind.__name__}(", "")
    assert inspect.signature(kind) == inspect.Signature()


def test_help_names_what_was_defined_for_a_class():
    assert dtkit.EarlyStopping.__dir__.__name__ == "__dir__"
    assert dtkit.EarlyStopping.__dir__.__doc__ == "Return the names for users."


def test_the_tab_key_offers_what_dir_lists(user_objects):
    completer = IPCompleter(shell=None, namespace={"it": None}, use_jedi=True)
    for obj in user_objects.values():
        completer.namespace = {"it": obj}
        with provisionalcompleter():
            offered = {completion.text for completion in completer.completions("it.", 3)}
        assert {name for name in offered if not name.startswith("_")} == set(list_shown(obj))


def complete(text: str, **namespace: Any) -> set[str]:
    """Return what the Tab key of IPython offers behind a text, with jedi and dtkit's matcher."""
    completer = IPCompleter(shell=None, namespace=namespace, use_jedi=True)
    shell: Any = SimpleNamespace(Completer=completer, user_ns=namespace)
    use_dir(shell)
    use_dir(shell)  # as a second import does
    with provisionalcompleter():
        return {completion.text for completion in completer.completions(text, len(text))}


def test_the_tab_key_offers_names_for_users_behind_attributes_and_modules(user_objects):
    run = user_objects["Run"]
    assert complete("run.history.", run=run) == set(list_shown(run.history))
    assert complete("print(run.history.ev", run=run) == {"evaluations", "events"}
    assert complete("run.no", run=run) == {"nodes", "note"}
    assert "linecache" not in complete("dtkit.errors.", dtkit=dtkit)
    assert "FirstBatchError" in complete("except dtkit.errors.F", dtkit=dtkit)
    assert "TYPE_CHECKING" not in complete("dtkit.types.", dtkit=dtkit)


def test_a_shell_without_matchers_stays_as_it_is():
    use_dir(SimpleNamespace())
    use_dir(SimpleNamespace(Completer=SimpleNamespace()))


def test_a_completion_asks_no_engine(user_objects):
    run = user_objects["Run"]
    assert find_names("run.model.", {"run": run}) == ({}, "")
    assert find_names("f(run).history.", {"run": run}) == ({}, "")
    assert find_names("other.x", {"other": object()}) == ({}, "x")


def test_a_name_to_hide_must_exist():
    with pytest.raises(AssertionError, match="Any has no gone"):

        @hide_from_completion("gone")
        class Any:
            pass


def test_earlier_runs_show_what_is_left_of_them():
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster:
        assert repr(cluster.earlier_runs) == "EarlierRuns(no paused run was replaced, 0 runs kept for verify())"
        first = small.train(cluster, start=False)
        first.step()
        small.train(cluster, start=False).stop()
        assert repr(cluster.earlier_runs) == "EarlierRuns(replaced=Sequential, 1 run kept for verify())"

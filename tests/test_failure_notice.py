"""The line about a run that failed although nobody looked at it, with fake engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import nn

import dtkit
from dtkit._util import notebook
from dtkit.errors import EngineError, NonFiniteError
from dtkit.testing.fake_transport import FakeTransport
from dtkit.training import failure_notice
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = torch.zeros(64, 2), torch.zeros(64, dtype=torch.int64)
WHOLE = "; the run as the last line of a cell shows its views, and its `.exception` the whole error\n"


@pytest.fixture
def engines() -> FakeTransport:
    return FakeTransport(2)


@pytest.fixture
def cluster(engines: FakeTransport) -> Iterator[dtkit.Cluster]:
    with dtkit.Cluster.from_transport(engines, device="cpu") as cluster:
        yield cluster


def train(cluster: dtkit.Cluster, **options: Any) -> dtkit.Run:
    settings = {"loss": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD, "batch_size": 16, "steps": 40}
    return cluster.train(nn.Linear(2, 2), ROWS, **(settings | options))


def fail(cluster: dtkit.Cluster, engines: FakeTransport) -> dtkit.Run:
    """Return a run that has paused at step 5, since rank 1's loss was NaN."""
    engines.inject_nonfinite(5, [1], always=True)
    run = train(cluster)
    wait_until(lambda: run.status.state.value == "paused", 10)
    return run


def test_a_script_is_told_of_an_error_that_nobody_saw_when_the_cluster_is_closed(cluster, engines, capsys):
    run = fail(cluster, engines)
    assert capsys.readouterr().err == ""
    cluster.close()
    told = capsys.readouterr().err
    assert told.startswith(f"dtkit: the run {run.spec.name} ")
    assert " on rank 1: NonFinite: the gradients over all ranks are not finite" in told
    assert told.endswith(WHOLE)
    assert told.count("\n") == 1
    failure_notice.print_pending()
    assert capsys.readouterr().err == ""


def test_the_next_training_tells_of_the_last_ones_error(cluster, engines, capsys):
    fail(cluster, engines)
    train(cluster, start=False)
    assert "paused at step 5 on rank 1" in capsys.readouterr().err


@pytest.mark.parametrize("look", ["wait", "repr", "exception"])
def test_an_error_that_was_seen_is_not_told_again(cluster, engines, capsys, look):
    run = fail(cluster, engines)
    if look == "wait":
        with pytest.raises(NonFiniteError):
            run.wait(10)
    elif look == "repr":
        assert "NonFiniteError" in repr(run)
    else:
        assert isinstance(run.exception, EngineError)
    failure_notice.print_pending()
    assert capsys.readouterr().err == ""


def test_another_error_of_a_run_is_told_too(cluster, engines, capsys):
    run = fail(cluster, engines)
    failure_notice.print_pending()
    first = run._driver.progress.exception
    run.resume()
    wait_until(lambda: run._driver.progress.exception not in (None, first), 10)
    wait_until(lambda: run.status.state.value == "paused", 10)
    failure_notice.print_pending()
    assert capsys.readouterr().err.count("paused at step 5 on rank 1") == 2


def test_a_run_has_the_name_that_its_views_show(cluster):
    assert train(cluster, start=False, name="warm-up").name == "warm-up"
    unnamed = train(cluster, start=False)
    assert unnamed.name == "Linear"
    assert repr(unnamed).startswith(f"{unnamed.name} ·")


@pytest.mark.parametrize(("names", "is_named"), [(["q"], True), (["q", "again"], False), (["q", "_1"], True)])
def test_the_line_names_the_users_variable_if_it_is_the_only_one(
    cluster, engines, capsys, monkeypatch, names, is_named
):
    shell = InteractiveShell()
    monkeypatch.setattr(failure_notice, "get_shell", lambda: shell)
    shell.user_ns.update(dict.fromkeys(names, fail(cluster, engines)))
    failure_notice.print_pending()
    told = capsys.readouterr().err
    assert told.endswith("; `q` shows its views, q.exception the whole error\n" if is_named else WHOLE)


def test_a_notebook_is_told_below_the_next_cell(cluster, engines, capsys, monkeypatch):
    shell = InteractiveShell()
    monkeypatch.setattr(failure_notice, "get_shell", lambda: shell)
    assert notebook.get_shell() is None
    fail(cluster, engines)
    shell.run_cell("1 + 1;")
    assert "paused at step 5 on rank 1" in capsys.readouterr().err
    shell.run_cell("1 + 1;")
    assert capsys.readouterr().err == ""

"""Warnings of what makes a cluster slow, and the remedy for misspelled arguments."""

from __future__ import annotations

import dataclasses
import inspect
import re
import time
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import nn

import dtkit
from dtkit._util import resources
from dtkit._util.process import ProcessId
from dtkit.cluster import cluster_file, reaper
from dtkit.cluster import start as starting
from dtkit.cluster.devices import plan_devices, warn_of_too_many_engines
from dtkit.errors import ClusterWarning
from dtkit.rpc.captured import LARGE_BYTES, warn_of_large_functions
from dtkit.testing.fake_transport import FakeTransport
from dtkit.testing.in_process import InProcessTransport
from tests.support import small

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LARGE = np.zeros(LARGE_BYTES + 1, dtype=np.uint8)


def use_large() -> int:
    return LARGE.nbytes


def test_function_that_takes_much_along_is_warned_of():
    also = np.zeros(10, dtype=np.uint8)
    with pytest.warns(UserWarning, match=r"^call takes along LARGE \(52.4 MB\), also \(10 B\), and each call"):
        warn_of_large_functions("call", [use_large, lambda: also, print, None])
    warn_of_large_functions("call", [lambda: also])


def test_more_engines_than_cores_are_warned_of():
    cores = resources.count_cores()
    warn_of_too_many_engines(plan_devices(cores, "cpu", None))
    with pytest.warns(ClusterWarning, match=rf"^{cores + 1} engines share {cores} cores?: they train correctly"):
        warn_of_too_many_engines(plan_devices(cores + 1, "cpu", None))


def make_info(folder: Path, notebook: ProcessId) -> cluster_file.ClusterInfo:
    return cluster_file.ClusterInfo(folder, 1, notebook, ProcessId.from_pid(), (0, 1), (), 0.0, {})


def test_clusters_that_compete_are_warned_of(tmp_path: Path):
    own, left = ProcessId.from_pid(), ProcessId(1, 0.0)
    advice = r"already has a with 2 engines; close it first with its close\(\), or, .*dtkit.attach\('a'\).close\(\)$"
    with pytest.warns(ClusterWarning, match=advice):
        cluster_file.warn_of_unused([make_info(tmp_path / "a", own)])
    (tmp_path / "b").mkdir()
    reaper.write_members(tmp_path / "b", [], lease_s=60, job_lease_s=1800)
    mine = dataclasses.replace(make_info(tmp_path / "b", left), started_at=time.time() - 300)
    advice = r"b still has 2 engines of a notebook in this folder that has ended. They were started 5 min 0 s ago, and "
    with pytest.warns(ClusterWarning, match=advice + r"end 1 min 0 s after it. dtkit.attach\('b'\) takes them over"):
        cluster_file.warn_of_unused([mine])


class NotStartedError(Exception):
    """Stands for the start of engines, before which all warnings come."""


def refuse_start(*_arguments: object, **_options: object) -> None:
    raise NotStartedError


def test_a_start_warns_of_clusters_that_compete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    running = [make_info(tmp_path / "a", ProcessId.from_pid())]
    monkeypatch.setattr(cluster_file, "find_running", lambda _folder: running)
    monkeypatch.setattr(starting, "start_engines", refuse_start)
    with pytest.warns(ClusterWarning, match="already has a with 2 engines"), pytest.raises(NotStartedError):
        dtkit.Cluster(1)


def test_a_start_warns_once_of_more_engines_than_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cluster_file, "find_running", lambda _folder: [])
    monkeypatch.setattr(starting, "start_engines", refuse_start)
    with pytest.warns(ClusterWarning) as caught, pytest.raises(NotStartedError):
        dtkit.Cluster(resources.count_cores() + 1, device="cpu")
    assert len([warning for warning in caught if "they train correctly" in str(warning.message)]) == 1


def test_a_training_and_a_task_warn_once_of_what_their_functions_take_along():
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target) * (LARGE[0] + 1)

    with dtkit.Cluster.from_transport(InProcessTransport(), device="cpu", threads=1) as cluster:
        with pytest.warns(UserWarning, match=r"^train takes along LARGE \(52.4 MB\)") as caught:
            small.train(cluster, loss=loss, steps=1).wait(60)
        assert len([warning for warning in caught if "takes along" in str(warning.message)]) == 1
        with pytest.warns(UserWarning, match=r"takes along LARGE \(52.4 MB\)"):
            assert cluster.run(use_large) == [LARGE.nbytes]


@pytest.mark.parametrize("change", [{"directory": "/other"}, {"environment": "/other/venv"}], ids=str)
def test_engines_of_other_folders_and_environments_are_not_warned_of(tmp_path: Path, change: dict[str, str]):
    info = dataclasses.replace(make_info(tmp_path / "b", ProcessId(1, 0.0)), **change)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cluster_file.warn_of_unused([info])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"thread": 1}, r"^Cluster\(\) has no argument thread=; did you mean threads=\?"),
        ({"zzz": 1}, r"^Cluster\(\) has no argument zzz=; it takes n, launcher, "),
    ],
)
def test_misspelled_argument_names_the_right_one(options: dict[str, int], message: str):
    with pytest.raises(TypeError, match=message):
        dtkit.Cluster(2, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: dtkit.DataParallel(bucket_mb=3),
            r"^DataParallel\(\) has no argument bucket_mb=; did you mean",
        ),
        (
            lambda: dtkit.Cluster.train(None, None, None, clip_grad_norm=1.0),
            r"clip_grad_norm=; it is an option of the strategy, as in strategy=dtkit\.DataParallel\(clip_grad_norm=",
        ),
        (
            lambda: dtkit.Cluster.train(None, None, None, clip=1.0),
            r"argument clip=; it is an option of the strategy, as in strategy=dtkit\.DataParallel\(clip_grad_norm=",
        ),
        (
            lambda: dtkit.Cluster.train(None, None, None, lr=0.1),
            r"lr=; it is an option of the optimizer, as in optimizer=lambda params: torch\.optim\.SGD\(params, lr=",
        ),
        (lambda: dtkit.DataParallel(clip=1.0), r"argument clip=; did you mean clip_grad_norm=\?"),
        (lambda: dtkit.Pipeline(stage=2), r"^Pipeline\(\) has no argument stage=; did you mean stages=\?"),
        (lambda: dtkit.Sharded(precison="bf16"), r"^Sharded\(\) has no argument precison=; did you mean precision=\?"),
        (
            lambda: dtkit.EarlyStopping(patients=2),
            r"^EarlyStopping\(\) has no argument patients=; did you mean",
        ),
        (lambda: dtkit.attach(nme="a"), r"^attach\(\) has no argument nme=; did you mean name=\?"),
    ],
)
def test_misspelled_option_names_the_right_one(make: Callable[[], object], message: str):
    with pytest.raises(TypeError, match=message):
        make()


def test_misspelled_arguments_of_a_run_name_the_right_one():
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster:
        with pytest.raises(TypeError, match="optimiser=; did you mean optimizer="):
            small.train(cluster, optimiser=None)
        run = small.train(cluster, start=False)
        with pytest.raises(TypeError, match=r"^Run.set\(\) has no argument learning_rate=; did you mean lr=\?"):
            run.set(learning_rate=0.1)
        with pytest.raises(TypeError, match=r"^Run.set\(\) has no argument rate_of=; it takes lr, timeout"):
            run.set(rate_of=0.1)
        with pytest.raises(TypeError, match=r"^Run.evaluate\(\) has no argument metric=; did you mean metrics=\?"):
            run.evaluate(small.data(), metric={})
        run.stop()


def test_constructors_keep_their_signatures_for_tooltips():
    assert next(iter(inspect.signature(dtkit.DataParallel).parameters)) == "accumulate"
    assert next(iter(inspect.signature(dtkit.EarlyStopping).parameters)) == "patience"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda cluster, x, y: cluster.train(nn.Linear(4, 3), x, y, epochs=1),
            r"takes only model and data .* Tensor of shape \(64,\) as .* one tuple: cluster.train\(model, \(X, y\), \.",
        ),
        (
            lambda cluster, x, y: cluster.partition(x.numpy(), y.numpy()),
            r"got the ndarray of shape \(64,\) as argument 2; give data as one tuple: cluster.partition\(\(X, y\), ",
        ),
        (
            lambda cluster, x, y: cluster.plan(nn.Linear(4, 3), x, y, batch_size=8, optimizer=small.sgd),
            r"only model and data .* as argument 3; give data as one tuple: cluster.plan\(model, \(X, y\), \.",
        ),
        (
            lambda cluster, x, y: cluster.plan(nn.Linear(4, 3), (x, y), 64),
            r"got the int as argument 3; give it by name, as in batch_size=",
        ),
        (
            lambda cluster, x, y: cluster.train(nn.Linear(4, 3), (x, y), small.sgd),
            r"got the function as argument 3; give it by name, as in optimizer=.*; help\(dtkit.Cluster.train\) lists",
        ),
        (lambda cluster, x, y: cluster.broadcast(nn.Linear(4, 3), "cpu"), "got the str as argument 2; leave it out"),
    ],
    ids=["train", "partition", "plan", "plan with a number", "optimizer", "broadcast"],
)
def test_too_many_arguments_without_a_name(call: Callable[..., object], message: str):
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster:
        with pytest.raises(TypeError, match=message) as caught:
            call(cluster, *small.data())
    shown = "".join(caught.value._render_traceback_())  # type: ignore[attr-defined]  # IPython's protocol
    assert "_util" not in shown
    assert __file__ in shown


def test_a_missing_argument_is_named():
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster:
        with pytest.raises(TypeError, match=r"^Cluster.train\(\) needs model, data; data is missing. help\(dtkit.Clus"):
            cluster.train(nn.Linear(2, 2), epochs=1)
        with pytest.raises(TypeError, match="optimizer; data, batch_size and optimizer are missing"):
            cluster.plan(nn.Linear(2, 2))


MISTAKES: dict[str, Callable[[dtkit.Cluster, dtkit.Run], object]] = {
    "a call without an argument": lambda cluster, _: cluster.train(nn.Linear(2, 2)),
    "a result in place of a function": lambda cluster, _: cluster.run(None),
    "an unknown fault": lambda _, run: run.inject_fault("explode", 1),
    "a step of a running run": lambda _, run: run.step(),
    "an optimizer in place of a function": lambda cluster, _: cluster.plan(
        nn.Linear(2, 2), small.data(), batch_size=4, optimizer=3, loss=nn.MSELoss()
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_shown_with_the_callers_frames_alone(name: str):
    with dtkit.Cluster.from_transport(FakeTransport(2), device="cpu") as cluster:
        run = small.train(cluster, steps=100_000)
        try:
            MISTAKES[name](cluster, run)
        except Exception as error:  # noqa: BLE001 - shown, as IPython does with any
            shown = (
                "".join(error._render_traceback_()) if hasattr(error, "_render_traceback_") else "as Python shows it"
            )
        run.stop()
    files = {file.rpartition("/")[2] for file in re.findall(r'File "([^"]+)"', shown)}
    assert files == {"test_warnings.py"}
    assert len(shown.splitlines()) <= 15


@pytest.mark.parametrize(
    ("strategy", "example"),
    [(dtkit.Pipeline, "Pipeline(stages=2, micro_batches=8)"), (dtkit.TensorParallel, "TensorParallel(2)")],
)
def test_a_strategy_without_its_size_has_an_example(strategy: Callable[[], object], example: str):
    with pytest.raises(TypeError, match=re.escape(f" is missing, as in dtkit.{example}. help(dtkit.")):
        strategy()

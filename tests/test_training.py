"""Arguments that `train` refuses before anything is sent, tested with a transport that only records requests."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re
import sys
import sysconfig
import threading
import types
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import dtkit
from dtkit.data.broadcast import ModelHandle, describe_sending
from dtkit.messages import Reply, Request
from dtkit.planning.cost_model import AvailableMemory
from dtkit.rpc.handshake import get_handshake
from dtkit.training.config import TrainConfig
from dtkit.types import Failure
from tests.support.small import data, net, sgd

if TYPE_CHECKING:
    from collections.abc import Iterator

NODE = {"host": "here", "pid": 1, "device": "cpu", "memory_total": 4, "memory_free": 2, "threads": 1}

ROOM = AvailableMemory(free_bytes=10**9, swap_bytes=0, job_bytes=0, limit_bytes=None)


class Notes:
    """A transport that answers the requests of an opening cluster and records all others."""

    hosts = None

    def __init__(self, ranks: int = 2) -> None:
        self.engine_ids = list(range(ranks))
        self.asked: list[str] = []
        self.refuse: str | None = None

    def send(self, rank: int, message: bytes, listen: Any = None) -> Future[Reply]:
        request: Request = pickle.loads(message)
        self.asked.append(request.op)
        answer: Future[Reply] = Future()
        answer.set_result(self._reply(rank, request))
        return answer

    def _reply(self, rank: int, request: Request) -> Reply:
        if request.op == self.refuse:
            return Reply(failure=Failure(rank, "here", "ValueError", "not here", "", kind="refused"))
        answers = {
            "handshake": get_handshake(),
            "join_group": NODE,
            "build_job": 0.1,
            "load_data": 64,
            "receive_model": "5eed",
            "measure_available_memory": ROOM,
        }
        return Reply(answers.get(request.op))

    def interrupt(self, ranks: Any) -> None:
        """Nothing runs here."""

    def find_lost_ranks(self) -> list[int]:
        return []

    def track_processes(self, pids: Any) -> None:
        """It has no processes."""

    def close(self) -> None:
        """Nothing was started here."""


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def cluster(notes: Notes) -> Iterator[dtkit.Cluster]:
    with dtkit.Cluster.from_transport(notes, device="cpu") as made:
        notes.asked.clear()
        yield made


def train(cluster: dtkit.Cluster, model: Any = None, rows: Any = None, **options: Any) -> dtkit.Run:
    settings = {"loss": nn.CrossEntropyLoss(), "optimizer": sgd, "batch_size": 16, "steps": 4} | options
    return cluster.train(net() if model is None else model, data() if rows is None else rows, **settings)


def test_train_and_its_config_have_the_same_arguments_and_defaults():
    parameters = list(inspect.signature(dtkit.Cluster.train).parameters.values())[3:]  # without self, model, data
    assert {p.name: p.default for p in parameters} == {
        field.name: field.default for field in dataclasses.fields(TrainConfig)
    }


def test_valid_training_sends_data_then_model_then_builds_the_job(cluster, notes):
    run = train(cluster, start=False, seed=np.int64(3), batch_size=np.int32(16), steps=None, epochs=np.int64(2))
    assert [op for op, after in zip(notes.asked, [*notes.asked[1:], ""], strict=True) if op != after] == [
        "load_data",
        "receive_model",
        "build_job",
    ]
    assert (run.spec.batch_size, run.spec.steps, run.spec.steps_per_epoch, run.spec.seed) == (16, 8, 4, 3)
    assert (run.spec.samples, run.spec.world_size, run.spec.epochs) == (64, 2, 2.0)
    assert (run.spec.loss, run.spec.optimizer, run.spec.name) == ("CrossEntropyLoss", "sgd", "Sequential")
    assert run.spec.strategy == "DataParallel()"
    assert run.lr == 0.1
    assert run.status.state is dtkit.types.State.PAUSED
    run.stop()


GATE = threading.Lock()


def holds_a_lock(output: torch.Tensor, target: torch.Tensor, gate: Any = GATE) -> torch.Tensor:
    return output.mean()


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    # name -> (what is given, the error, value ... rule ... remedy)
    "batch_size 0": ({"batch_size": 0}, ValueError, "batch_size=0; it must be at least 1"),
    "batch_size below 0": ({"batch_size": -4}, ValueError, "batch_size=-4; it must be at least 1"),
    "batch_size of no number": ({"batch_size": "16"}, TypeError, "batch_size='16'; it must be an integer"),
    "batch_size True": ({"batch_size": True}, TypeError, "batch_size=True; it must be an integer"),
    "batch_size over the data": (
        {"batch_size": 65},
        ValueError,
        "batch_size=65 is more than the 64 samples there are; .* over all ranks. Use at most 64",
    ),
    "batch_size under the ranks": (
        {"batch_size": 1},
        ValueError,
        "batch_size=1 is less than the 2 ranks; .* Use at least 2",
    ),
    "epochs and steps": ({"epochs": 1}, ValueError, "epochs=1, steps=4: say how long to train by one of them"),
    "neither": ({"steps": None}, ValueError, "epochs=None, steps=None: say how long"),
    "epochs 0": ({"epochs": 0, "steps": None}, ValueError, "epochs=0; it must be at least 1"),
    "half a step": ({"steps": 0.5}, TypeError, "steps=0.5; it must be an integer"),
    "shuffle True": ({"shuffle": True}, ValueError, "True: rows are shuffled by default, so leave shuffle= out"),
    "a seed of text": ({"seed": "x"}, ValueError, "seed='x'; it must be an integer from 0 up. Use seed=0"),
    "loss and step": (
        {"training_step": lambda m, b: b},
        ValueError,
        "give either loss.* or training_step.*you gave both",
    ),
    "neither loss nor step": ({"loss": None}, ValueError, "give either loss.* or training_step.*you gave neither"),
    "a loss's name": ({"loss": "mse"}, TypeError, r"loss='mse' can't be called; .* as in loss=nn.MSELoss\(\)"),
    "a loss that can't be called": ({"loss": 3}, TypeError, r"loss=3 can't be called; .* loss=nn.CrossEntropyLoss\(\)"),
    "an optimizer's name": (
        {"optimizer": "adam"},
        TypeError,
        r"optimizer='adam'; .*: optimizer=lambda params: torch.optim.Adam\(params, lr=0.001\)",
    ),
    "a share as validation": (
        {"validation": 0.2},
        TypeError,
        r"validation=0.2; .*Split the rows yourself: n = int\(0.8 \* len\(X\)\), .*validation=\(X\[n:\], y\[n:\]\)",
    ),
    "a rate of validations without data": (
        {"validation_every": 2},
        ValueError,
        r"validation_every=2, but no data to evaluate: give validation=",
    ),
    "no epochs between validations": ({"validation_every": 0}, ValueError, "validation_every=0; it must be at least 1"),
    "a loss class": ({"loss": nn.MSELoss}, TypeError, r"loss=MSELoss is a class; give an instance: loss=MSELoss\(\)"),
    "a step class": (
        {"loss": None, "training_step": nn.MSELoss},
        TypeError,
        "training_step=MSELoss is a class; give an instance",
    ),
    "a loss that sums": (
        {"loss": nn.MSELoss(reduction="sum")},
        ValueError,
        "reduction='sum'; dtkit needs the mean over samples, or a pair .* Use reduction='mean'",
    ),
    "an optimiser": (
        {"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1)},
        TypeError,
        "optimizer is an SGD; it must be a function from parameters .*optimizer=lambda params",
    ),
    "a metric that can't be called": (
        {"metrics": {"accuracy": 1}},
        TypeError,
        r"metrics\['accuracy'\] is an int; it must be a function of \(output, target\)",
    ),
    "metrics beside a step": (
        {"loss": None, "training_step": lambda m, b: b, "metrics": {"a": len}},
        ValueError,
        "metrics= need output and target, .*return loss, .*accuracy",
    ),
    "a strategy class": (
        {"strategy": dtkit.DataParallel},
        TypeError,
        r"strategy=DataParallel is a class; give an instance: strategy=DataParallel\(\)",
    ),
    "a strategy's name": ({"strategy": "fsdp"}, TypeError, r"strategy='fsdp'; .*not a name: .*dtkit.Sharded\(\)"),
    "no strategy of ours": ({"strategy": "xyz"}, TypeError, r"strategy='xyz'; .*such as dtkit.DataParallel\(\)"),
    "a model class": ({"model": nn.Identity}, TypeError, "model is the class Identity; give an instance"),
    "no model": ({"model": sgd}, TypeError, "model is a function; it must be a torch.nn.Module"),
    "a lazy model": ({"model": nn.LazyLinear(3)}, ValueError, "has no shape yet .* Run one batch"),
    "a model on meta": (
        {"model": nn.Linear(4, 3, device="meta")},
        ValueError,
        "no numbers; build the model on the CPU",
    ),
    "nothing to train": (
        {"model": nn.ReLU()},
        ValueError,
        "ReLU has no parameter that requires a gradient: it has no p",
    ),
    "frozen": (
        {"model": net().requires_grad_(False)},
        ValueError,
        r"no parameter .*: all 67 of them are frozen, .* requires_grad_\(True\) on the layers",
    ),
    "fewer samples than ranks": (
        {"rows": tuple(a[:1] for a in data()), "batch_size": 1},
        ValueError,
        "1 samples don't suffice for 2 ranks.* Give more samples, or use at most 1 engines",
    ),
    "unequal lengths": (
        {"rows": (data()[0], data()[1][:60])},
        ValueError,
        "arrays of 64, 60 rows .* Cut them to the same length",
    ),
    "no arrays": ({"rows": ()}, ValueError, r"arrays of shapes \[\]; each must have rows"),
    "an array of no dimension": ({"rows": (torch.zeros(()),)}, ValueError, r"arrays of shapes \[\(\)\]"),
    "text": ({"rows": (data()[0], np.array(["a"] * 64))}, TypeError, r"data\[1\] has dtype <U1; .*Encode it first"),
    "objects": ({"rows": (data()[0], [1] * 64)}, TypeError, r"data\[1\] is a list; .* numpy.asarray"),
    "a dict": ({"rows": {"x": 1}}, TypeError, r"data\['x'\] is an int; each part must be a numpy array"),
    "text as data": ({"rows": "file.csv"}, ValueError, "'file.csv' is not supported"),
    "a loss that can't be pickled": (
        {"loss": holds_a_lock},
        dtkit.errors.SerializationError,
        "lock",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_argument_is_refused_before_anything_is_sent(cluster, notes, name):
    options, kind, message = REFUSED[name]
    with pytest.raises(kind, match=re.compile(message, re.DOTALL)):
        train(cluster, **options)
    assert notes.asked == []
    assert cluster.current_run is None


def test_a_refused_call_leaves_the_last_run_unchanged(cluster):
    run = train(cluster, start=False)
    with pytest.raises(ValueError, match="batch_size=0"):
        train(cluster, batch_size=0)
    assert cluster.current_run is run
    assert run.status.state is dtkit.types.State.PAUSED
    run.stop()


def test_a_batchmean_loss_is_accepted(cluster):
    train(cluster, loss=nn.KLDivLoss(reduction="batchmean"), start=False).stop()


def test_partitions_and_replicas_of_another_cluster_are_refused(cluster, notes):
    with dtkit.Cluster.from_transport(Notes(), device="cpu") as other:
        part, copies = other.partition(data()), other.broadcast(net())
        with pytest.raises(ValueError, match=r"was not made by this cluster.* Make it with cluster.partition\(data\)"):
            train(cluster, rows=part)
        with pytest.raises(ValueError, match=r"was broadcast on another cluster; give the model, or cluster.broadcast"):
            train(cluster, copies)
        frozen = other.broadcast(net().requires_grad_(False))
        assert isinstance(frozen, ModelHandle)
        with pytest.raises(ValueError, match="Sequential has no parameter that requires a gradient"):
            train(other, frozen)
    assert notes.asked == []


def test_a_batch_size_larger_than_the_partition_is_refused(cluster, notes):
    part = cluster.partition(data())
    notes.asked.clear()
    with pytest.raises(ValueError, match="batch_size=65 is more than the 64 samples"):
        train(cluster, rows=part, batch_size=65)
    assert notes.asked == []


def test_a_failed_build_leaves_the_cluster_free(cluster, notes):
    notes.refuse = "build_job"
    with pytest.raises(dtkit.errors.EngineError, match="ValueError: not here"):
        train(cluster)
    assert cluster.current_run is None
    notes.refuse = None
    train(cluster, start=False).stop()


def test_a_broadcast_model_is_shown_as_identical_replicas(cluster):
    model = net()
    copies = cluster.broadcast(model)
    assert copies.is_identical
    assert repr(copies).startswith("Sequential on 2 nodes, 67 parameters, ")
    assert "identical" in copies._repr_html_()


def test_a_closed_cluster_refuses_to_train(cluster):
    cluster.close()
    for call in (lambda: train(cluster), lambda: cluster.partition(data()), lambda: cluster.broadcast(net())):
        with pytest.raises(dtkit.errors.ClusterClosedError, match="was closed; start another one"):
            call()


def test_the_progress_of_sending_names_the_library_that_engines_import_for_a_model(
    monkeypatch: pytest.MonkeyPatch,
):
    class LibraryNet(nn.Module):
        """A model of a library."""

    class OwnNet(LibraryNet):
        """A subclass that a notebook defines."""

    LibraryNet.__module__, OwnNet.__module__ = "library.models.net", "__main__"
    module = types.ModuleType("library.models.net")
    module.__file__ = f"{sysconfig.get_path('purelib')}/library/models/net.py"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert describe_sending(nn.Linear(2, 2), 24) == "sending Linear, 24 B"
    for model in (LibraryNet(), OwnNet()):
        name = type(model).__name__
        assert describe_sending(model, 24) == f"sending {name}, 24 B, to the engines, which import library for it"
    module.__file__ = "/home/me/library/models/net.py"  # a module of the user, which is sent with the model
    assert describe_sending(LibraryNet(), 24) == "sending LibraryNet, 24 B"


@pytest.mark.parametrize(("given", "mode"), [(False, None), (None, None), ("global", "global")])
def test_no_shuffle_is_false_as_in_a_data_loader_or_none(given: str | bool | None, mode: str | None):  # noqa: FBT001 - as typed
    assert TrainConfig(shuffle=given).shuffle == mode

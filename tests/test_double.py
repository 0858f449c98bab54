"""Engine doubles: the real session in this process, and fake engines with the same reply types."""

from __future__ import annotations

import contextlib
import inspect
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

import dtkit
from dtkit.engine.ops.benchmarks import BenchmarkOps
from dtkit.engine.ops.group import GroupOps
from dtkit.engine.session import Session
from dtkit.errors import CheckpointError
from dtkit.messages import Request
from dtkit.rpc import user_modules
from dtkit.rpc.protocol import OPERATIONS, SUBJECTS, Call, GroupOperations, JobOperations, make_call
from dtkit.testing.fake_engine import FakeEngine, FakeResults
from dtkit.testing.fake_ops import make_operations
from dtkit.testing.fake_transport import FakeTransport
from dtkit.testing.in_process import InProcessTransport
from dtkit.types import State
from tests.support.small import accuracy, data, net, sgd, train

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from dtkit.messages import Reply

STEPS = 5
LIMIT_S = 60.0


def test_call_carries_the_operation_and_its_arguments():
    call = make_call(JobOperations.advance, job="job-1", step=3, steps=2)
    assert (call.operation, call.args) == ("advance", {"job": "job-1", "step": 3, "steps": 2})


def test_engine_and_fake_engine_serve_every_operation():
    real, fake = Session().operations, make_operations(FakeEngine(0, FakeResults(1, 0.1)))
    assert set(real) == set(fake) == set(OPERATIONS)


def test_operations_take_keywords_only():
    for name, operation in OPERATIONS.items():
        parameters = list(inspect.signature(getattr(operation.subject, name)).parameters.values())[1:]
        assert {parameter.kind for parameter in parameters} <= {inspect.Parameter.KEYWORD_ONLY}, name
    assert sum(len(subject.__abstractmethods__) for subject in SUBJECTS) == len(OPERATIONS)  # no name comes twice


def test_an_implementation_that_lacks_an_operation_cannot_be_created():
    class Incomplete(GroupOperations):
        """Implements nothing."""

    with pytest.raises(TypeError, match="abstract"):
        Incomplete()  # type: ignore[abstract]
    assert issubclass(GroupOps, GroupOperations)


def test_operations_that_survive_a_broken_group_are_marked():
    independent = {name for name, operation in OPERATIONS.items() if operation.is_independent}
    assert independent == {
        "job_status",
        "export_state",
        "export_snapshot",
        "export_model",
        "return_ownership",
        "warm_up",
    }
    any_owner = {name for name, operation in OPERATIONS.items() if operation.accepts_any_owner}
    assert any_owner == {"handshake", "acquire_ownership", "join_group"}
    unlimited = {name for name, operation in OPERATIONS.items() if operation.has_unlimited_memory}
    assert unlimited > {"join_group", "leave_group", "release", "job_status"}
    assert not unlimited & set(BenchmarkOps.__dict__)


class Recorded:
    """A transport that records the type of each operation's value."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.types: dict[str, set[str]] = {}
        self._ops: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, rank: int, message: bytes, listen: Any = None) -> Future[Reply[Any]]:
        content = pickle.loads(message)
        requests = content if isinstance(content, tuple) else (content,)
        future: Future[Any] = self._transport.send(rank, message, listen)
        future.add_done_callback(lambda done: self._record([request.op for request in requests], done.result()))
        return future

    def _record(self, ops: list[str], reply: Any) -> None:
        for op, one in zip(ops, reply if isinstance(reply, list) else [reply], strict=True):
            if one.failure is None:
                self.types.setdefault(op, set()).add(describe(one.value))


def describe(value: Any) -> str:
    """Return the type of a value, with those of a tuple's parts and the keys of a dict."""
    if type(value) is tuple:
        return f"({', '.join(map(describe, value))})"
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return f"dict({', '.join(sorted(value))})"
    return type(value).__name__


def use_everything(transport: Any, folder: Path) -> dict[str, set[str]]:
    """Train, evaluate, measure and plan; return the types of the values by operation."""
    recorded = Recorded(transport)
    with dtkit.Cluster.from_transport(recorded, device="cpu", threads=1) as cluster:
        cluster.refresh_nodes()
        assert cluster.run(len, "abc") == [3]
        part = cluster.partition(data())
        run = train(cluster, rows=part, steps=STEPS, validation=data(), start=False)
        assert run.profile(2).num_steps == 2
        run.resume()
        run.wait(LIMIT_S)
        assert run.status.state is State.COMPLETED
        assert run.status.step == STEPS
        assert run.model is not None
        run.evaluate(data())
        run.memory()
        run.placement()
        run.efficiency()
        run.inject_delay(0, 1.0)
        with contextlib.suppress(CheckpointError):  # fake engines have no state
            run.save(folder / "checkpoint")
        cluster.plan(net(), data(), batch_size=8, optimizer=sgd, loss=nn.CrossEntropyLoss())
        run.release()
    return recorded.types


def test_evaluation_with_the_metrics_of_the_run_does_not_pickle_them_again(monkeypatch: pytest.MonkeyPatch):
    """The search for modules that engines can't import takes a third of a short evaluation."""
    searches: list[int] = []
    find = user_modules.find_user_modules
    monkeypatch.setattr(user_modules, "find_user_modules", lambda paths: (searches.append(1), find(paths))[1])
    with dtkit.Cluster.from_transport(InProcessTransport(), device="cpu", threads=1) as cluster:
        held_out = cluster.partition(data())
        run = train(cluster, steps=STEPS, validation=held_out, metrics={"accuracy": accuracy})
        run.wait(LIMIT_S)
        before = len(searches)
        evaluation = run.evaluate(held_out)
        assert len(searches) == before
        assert evaluation.values == run.evaluate(held_out, {"accuracy": accuracy}).values
        assert "accuracy" in evaluation.values
        assert run.evaluate(held_out, {}).values == {"loss": evaluation.values["loss"]}


def test_fake_engine_replies_with_the_types_of_the_real_one(tmp_path: Path):
    real, fake = use_everything(InProcessTransport(), tmp_path), use_everything(FakeTransport(1), tmp_path)
    assert set(real) == set(fake)
    assert len(real) > len(OPERATIONS) / 2
    may_be_none = {"measure_layers"}
    different = {op: (real[op], fake[op]) for op in real if real[op] != fake[op] and op not in may_be_none}
    assert different == {}


@pytest.fixture(params=[InProcessTransport, lambda: FakeTransport(1)], ids=["real", "fake"])
def cluster(request):
    with dtkit.Cluster.from_transport(request.param(), device="cpu", threads=1) as opened:
        yield opened


def test_stale_requests_are_refused_by_both_doubles(cluster: dtkit.Cluster):
    run = train(cluster, start=False)
    run.step(3)
    group, job = cluster._engine_group, run._driver.progress.plan.job
    owner, generation = group.membership.config.owner_id, group.membership.generation

    def send(call: Call[Any], owner: int = owner, generation: int = generation) -> Reply[Any]:
        request = Request(call.operation, owner, generation, call.args)
        return group.transport.send(0, pickle.dumps(request)).result(LIMIT_S)

    def refusal(reply: Reply[Any]) -> str:
        assert reply.failure is not None
        assert reply.failure.kind == "refused"
        return reply.failure.message

    advance = make_call(JobOperations.advance, job=job, step=3, steps=1)
    assert "has taken this cluster over" in refusal(send(advance, owner - 1))
    assert "has taken this cluster over" in refusal(send(make_call(GroupOperations.acquire_ownership, owner=owner - 1)))
    assert "before the group was formed again" in refusal(send(advance, generation=generation - 1))
    assert "the job is at step 3, the call is for step 2" in refusal(
        send(make_call(JobOperations.advance, job=job, step=2, steps=1))
    )
    assert "it was released" in refusal(send(make_call(JobOperations.advance, job="other", step=3, steps=1)))
    assert send(make_call(JobOperations.job_status, job=job), generation=generation - 1).unwrap().step == 3


def test_a_failure_of_user_code_breaks_the_group_and_the_next_call_forms_it_again(cluster: dtkit.Cluster):
    with pytest.raises(dtkit.errors.EngineError, match="modulo by zero"):
        cluster.run(divmod, 1, 0)
    assert cluster.run(divmod, 7, 2) == [(3, 1)]

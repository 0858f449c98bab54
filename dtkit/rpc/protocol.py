"""Operations that the notebook calls on engines: one typed signature each, for both sides.

The notebook writes ``make_call(JobOperations.advance, job=..., steps=...)``; mypy checks the arguments and the reply's
type. Engines (:mod:`dtkit.engine.ops`) and the double for tests (:mod:`dtkit.testing`) subclass the same classes, so
mypy rejects a signature that differs. A :class:`Call` is sent as the operation's name and its keyword arguments.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from dtkit.rpc.measurements import BenchmarkOperations, ProfileOperations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from dtkit._util.process import ProcessId
    from dtkit.history.engine_outbox import EvaluationSums
    from dtkit.messages import (
        CheckpointReport,
        DispatchResult,
        EngineDescription,
        EngineInventory,
        GroupSpec,
        JobPosition,
        OutputItem,
        SnapshotReport,
    )
    from dtkit.planning.memory_report import MemoryUsage
    from dtkit.rpc.clocks import ClockReading
    from dtkit.rpc.job_plan import JobDefinition, LoadingOptions
    from dtkit.rpc.payload import Payload
    from dtkit.rpc.reference import Reference
    from dtkit.rpc.script import Script

P = ParamSpec("P")
R = TypeVar("R")
_Operation = TypeVar("_Operation", bound="Callable[..., Any]")


@dataclasses.dataclass(frozen=True)
class Call(Generic[R]):
    """One operation with its arguments. Its reply is an R."""

    operation: str
    args: dict[str, Any]


def make_call(operation: Callable[Concatenate[Any, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
    """Return the call of an operation. All arguments are passed by keyword."""
    assert not args
    return Call(operation.__name__, kwargs)


# -- properties of operations ---------------------------------------------------------------------------------

_ANY_OWNER: set[str] = set()
_INDEPENDENT: set[str] = set()
_UNLIMITED_MEMORY: set[str] = set()


def any_owner(operation: _Operation) -> _Operation:
    """Mark an operation that engines accept from every notebook; it checks the owner itself if necessary."""
    _ANY_OWNER.add(operation.__name__)
    return operation


def independent(operation: _Operation) -> _Operation:
    """Mark an operation that needs no process group: engines accept it in every generation."""
    _INDEPENDENT.add(operation.__name__)
    return operation


def unlimited_memory(operation: _Operation) -> _Operation:
    """Mark an operation for recovery: it must work even if a failed call has used up the memory limit."""
    _UNLIMITED_MEMORY.add(operation.__name__)
    return operation


# -- operations -----------------------------------------------------------------------------------------------


class GroupOperations(ABC):
    """Ownership of an engine, and its process group."""

    @any_owner
    @abstractmethod
    def handshake(self) -> dict[str, object]:
        """Return versions, host and import path: see :func:`dtkit.rpc.handshake.get_handshake`."""

    @any_owner
    @unlimited_memory
    @abstractmethod
    def acquire_ownership(self, *, owner: int) -> EngineInventory:
        """Belong to another notebook from now on, and keep everything. Return the engine's inventory."""

    @independent
    @unlimited_memory
    @abstractmethod
    def return_ownership(self, *, owner: int) -> None:
        """Belong to the former notebook again, because the new owner could not take over the cluster."""

    @any_owner
    @unlimited_memory
    @abstractmethod
    def join_group(
        self,
        *,
        spec: GroupSpec,
        owner: int,
        file_owner: ProcessId | None,
        step_timeout: float | None,
        ranks_changed: bool = False,
    ) -> EngineDescription:
        """Form the process group. If ranks have changed, all jobs end."""

    @unlimited_memory
    @abstractmethod
    def leave_group(self) -> None:
        """Leave the group and free everything. The engine continues without a notebook."""

    @unlimited_memory
    @abstractmethod
    def node_info(self) -> EngineDescription:
        """Return the engine's row of the cluster's table."""

    @abstractmethod
    def read_clock(self, *, rounds: int = 9) -> list[ClockReading]:
        """Return the engine's clocks before and after several barriers."""

    @independent
    @abstractmethod
    def warm_up(self) -> None:
        """Load the modules that the first step needs, then activate the memory limit."""


class FunctionOperations(ABC):
    """Calls of the user's functions."""

    @abstractmethod
    def call_function(self, *, payload: Payload) -> tuple[Payload | None, list[OutputItem]]:
        """Call ``fn(*args, **kwargs)``; return its result and its output. No result after a failure."""

    @abstractmethod
    def open_torchrun_store(self) -> int:
        """Open a store for the process group of a script; return its port."""

    @abstractmethod
    def run_script(self, *, script: Script, port: int, restart_count: int) -> tuple[Payload | None, list[OutputItem]]:
        """Run a script in a fresh process, in torchrun's environment with the `port` of a store. Return as
        `call_function`.
        """


class DataOperations(ABC):
    """Data on the engines."""

    @abstractmethod
    def load_data(self, *, key: str, payload: Payload, sizes: Sequence[int] | None) -> int | None:
        """Store data under `key`; return the number of rows, or None for a stream of unknown length.

        With the `sizes` of all shards the payload is (data, rows of all shards), else a function that loads the data.
        """

    @abstractmethod
    def set_shards(self, *, key: str, indices: np.ndarray, sizes: Sequence[int]) -> None:
        """Set which rows of stored data belong to which shard."""

    @unlimited_memory
    @abstractmethod
    def release(self, *, keys: Sequence[str]) -> None:
        """Free data, models and jobs. Unknown keys are ignored."""

    @abstractmethod
    def repartition(self) -> None:
        """Partition all data into as many shards as there are ranks now."""

    @abstractmethod
    def export_data(self) -> Payload:
        """Return all data and models, for a new engine."""

    @abstractmethod
    def import_data(self, *, payload: Payload) -> None:
        """Store the data that another engine has exported."""


class ModelOperations(ABC):
    """Models on the engines, as they were sent."""

    @abstractmethod
    def store_model(self, *, key: str, payload: Payload) -> None:
        """Store a model that is mapped from a file when a job needs it."""

    @abstractmethod
    def receive_model(self, *, key: str, payload: Payload) -> str:
        """Store a model in memory; return the checksum of its state."""

    @independent
    @abstractmethod
    def export_model(self, *, key: str) -> Payload:
        """Return a model as it was sent."""


class JobOperations(ABC):
    """Models in training."""

    @abstractmethod
    def build_job(
        self, *, job: str, definition: JobDefinition, reference: Reference | None = None, uninitialized: bool = False
    ) -> float:
        """Build a job; return its learning rate.

        A `reference` trains on all shards by itself. An `uninitialized` job is at no step until its state is
        restored.
        """

    @abstractmethod
    def rebuild_job(self, *, job: str, definition: JobDefinition, payloads: Sequence[Payload]) -> tuple[int, float]:
        """Build a job again with the survivors' state; return its step and its learning rate."""

    @independent
    @unlimited_memory
    @abstractmethod
    def job_status(self, *, job: str) -> JobPosition:
        """Return the rank's position in a job."""

    @abstractmethod
    def advance(
        self,
        *,
        job: str,
        step: int,
        steps: int,
        lr: float | None = None,
        shares: Sequence[float] | None = None,
        explain: bool = False,
        fingerprint: bool = False,
        read_until: int = 0,
    ) -> tuple[DispatchResult, list[OutputItem]]:
        """Take steps of a job, which must be at `step`. Return the result and the output.

        `lr` and `shares`, each rank's part of the batch, apply from this dispatch on. The notebook has read all results
        from before the step `read_until`, so the engine removes them from disk.
        """

    @abstractmethod
    def evaluate(
        self,
        *,
        job: str,
        data: str,
        metrics: bytes,
        batch_size: int,
        loading: LoadingOptions | None = None,
        step: int | None = None,
    ) -> EvaluationSums:
        """Evaluate a job on the rank's shard of `data`.

        With a `step` the job must be at that step. The result is stored for a notebook that takes over the run.
        """

    @abstractmethod
    def inject_delay(self, *, job: str, factor: float) -> None:
        """Make the rank's computation take `factor` times as long."""

    @abstractmethod
    def memory_usage(self, *, job: str) -> MemoryUsage:
        """Return the memory that a job takes on this rank."""

    @abstractmethod
    def model_placement(self, *, job: str) -> Any:
        """Return the strategy's table of the parts of the model and their ranks, or None."""

    @abstractmethod
    def state_dict_parts(self, *, job: str, callback: int | None = None) -> Payload:
        """Return the rank's part of the model's state dict, or of one callback's model. A collective."""

    @abstractmethod
    def reference_report(self, *, job: str) -> Payload:
        """Return the :class:`~dtkit.rpc.reference.ReferenceReport` of a reference."""


class StateOperations(ABC):
    """Checkpoints and snapshots of a job, and its state after a failure."""

    @abstractmethod
    def save_checkpoint(
        self, *, job: str, step: int, folder: str, token: str, from_snapshot: bool = False, may_stage: bool = False
    ) -> CheckpointReport:
        """Copy the state of a job, which must be at `step`, and begin to write it.

        With `from_snapshot` the snapshot that was just taken is written, if there is one. With `may_stage`, a rank
        that doesn't see the folder writes into its host's private one.
        """

    @abstractmethod
    def restore_checkpoint(
        self, *, job: str, folder: str, index: Mapping[str, Any], files: Sequence[str], facts: Mapping[str, Any]
    ) -> tuple[int, float, dict[str, tuple[Any, Any]]]:
        """Restore the state of a job that has just been built.

        Returns the step, the learning rate, and optimizer options by name: (the checkpoint's, the one given).
        """

    @abstractmethod
    def restore_weights(
        self,
        *,
        job: str,
        step: int,
        folder: str,
        index: Mapping[str, Any],
        files: Sequence[str],
        facts: Mapping[str, Any],
    ) -> None:
        """Put the weights of a checkpoint back into a job, which must be at `step` and stays there."""

    @abstractmethod
    def take_snapshot(self, *, job: str, step: int) -> SnapshotReport:
        """Copy the state of a job, which must be at `step`, into this rank's and a peer's memory."""

    @independent
    @abstractmethod
    def export_state(self, *, job: str, scope: str) -> Payload:
        """Return the rank's state of a job: see :func:`dtkit.engine.state.survivors.export_state`."""

    @independent
    @abstractmethod
    def export_snapshot(self, *, job: str, step: int, ranks: Sequence[int]) -> Payload:
        """Return the snapshot of these ranks' parts as of `step`."""


# -- the table ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Operation:
    """Properties of an operation, as its markers set them."""

    subject: type
    accepts_any_owner: bool
    is_independent: bool
    has_unlimited_memory: bool


SUBJECTS: tuple[Any, ...] = (
    GroupOperations,
    FunctionOperations,
    DataOperations,
    ModelOperations,
    JobOperations,
    StateOperations,
    BenchmarkOperations,
    ProfileOperations,
)
OPERATIONS = {
    name: Operation(subject, name in _ANY_OWNER, name in _INDEPENDENT, name in _UNLIMITED_MEMORY)
    for subject in SUBJECTS
    for name in subject.__abstractmethods__
}
"""All operations by name."""


def bind_operations(*implementations: object) -> dict[str, Callable[..., Any]]:
    """Return the methods that implement operations, by the operation's name."""
    return {
        name: getattr(implementation, name)
        for implementation in implementations
        for name, operation in OPERATIONS.items()
        if isinstance(implementation, operation.subject)
    }

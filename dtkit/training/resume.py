"""A checkpoint to resume from: checks before anything is sent, and a description of differences for the log."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting
from dtkit.checkpoint import exported_folder, folders
from dtkit.checkpoint.checkpoint import Checkpoint
from dtkit.checkpoint.folders import Lineage, get_run_lineage
from dtkit.checkpoint.json_values import UnsupportedValueError, decode, encode
from dtkit.checkpoint.remote_files import placed_on_hosts
from dtkit.checkpoint.validation import HISTORY_FILE
from dtkit.data.broadcast import ModelHandle
from dtkit.errors import CheckpointError
from dtkit.mesh import Mesh
from dtkit.rpc.job_plan import BY_SAMPLER, IN_ORDER
from dtkit.rpc.protocol import StateOperations, make_call

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.types import RunSpec

    OverriddenOptions = Mapping[str, tuple[Any, Any]]  # {option: (the checkpoint's value, the user's value)}


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that was checked and from which training can resume."""

    checkpoint: Checkpoint

    @property
    def step(self) -> int:
        """Steps that were taken before it."""
        return self.checkpoint.step

    @property
    def last_callback_step(self) -> int:
        """The step of the last call of callbacks."""
        return int(self.checkpoint.metadata.get("called", self.step))

    @property
    def last_evaluation_step(self) -> int:
        """The step of the last evaluation."""
        return int(self.checkpoint.metadata.get("evaluated", self.step))

    @property
    def elapsed_s(self) -> float:
        """Seconds that the run took until the checkpoint, without pauses; 0 if an earlier version wrote it."""
        return float(self.checkpoint.metadata.get("elapsed_s", 0.0))

    @property
    def lineage(self) -> Lineage:
        """The runs that led to it, its own last."""
        return get_run_lineage(self.checkpoint.metadata)

    def check_steps_left(self, spec: RunSpec) -> None:
        """Raise ValueError if no step is left."""
        if spec.steps <= self.step:
            raise ValueError(
                f"{self.checkpoint.path} is at step {self.step:,}, and this training has {spec.steps:,} steps in "
                f"all. Ask for more than {self.step:,}: steps= and epochs= count from the very start"
            )

    def restore_job(self, engine_group: EngineGroup, job: str) -> tuple[float, OverriddenOptions]:
        """Restore the state on all ranks, in a new job.

        Returns the learning rate, and the optimizer's options that differ from the arguments of `train`.
        """
        with self._make_readable(engine_group) as folders:
            calls = [
                make_call(StateOperations.restore_checkpoint, job=job, folder=folder, **self._contents)
                for folder in folders
            ]
            results = engine_group.call_all(calls)
        return results[0][1], {name: pair for rank in reversed(results) for name, pair in rank[2].items()}

    def restore_weights(self, engine_group: EngineGroup, job: str, step: int) -> None:
        """Put the weights back on all ranks, in a job that stays at `step`."""
        with self._make_readable(engine_group) as folders:
            calls = [
                make_call(StateOperations.restore_weights, job=job, step=step, folder=folder, **self._contents)
                for folder in folders
            ]
            engine_group.call_all(calls)

    @property
    def _contents(self) -> dict[str, Any]:
        """Arguments of both operations: what the checkpoint's files have."""
        head = self.checkpoint.metadata
        return {"index": head["index"], "files": list(head["files"]), "facts": head["facts"]}

    @contextlib.contextmanager
    def _make_readable(self, engine_group: EngineGroup) -> Iterator[list[str]]:
        """Yield the folder that each rank sees, also where hosts don't see the notebook's."""
        hosts, world_size = engine_group.transport.hosts, engine_group.world_size
        folder = self.checkpoint.path.absolute()
        if hosts is None:
            yield [str(folder)] * world_size
            return
        names = [name for name in self.checkpoint.metadata["files"] if name != HISTORY_FILE]
        with placed_on_hosts(hosts.checkpoint_files, folder, names, world_size) as folders:
            yield [folders.get(rank, str(folder)) for rank in range(world_size)]

    def restore_callbacks(self, callbacks: Sequence[Any]) -> None:
        """Restore the state of callbacks that have the same class and the same place in the list."""
        for callback, saved in zip(callbacks, self.checkpoint.metadata.get("callbacks", ()), strict=False):
            if saved is not None and saved["class"] == type(callback).__name__:
                callback.load_state_dict(decode(saved["state"]))

    def describe(self, spec: RunSpec, mesh: Mesh, overridden: OverriddenOptions) -> str:
        """Return lines for the log: from which step the run continues, and how it differs from one that never ended."""
        head = self.checkpoint.metadata
        before, now = head["spec"], dataclasses.asdict(spec)
        notes = [f"goes on from {self.checkpoint.path.name}"]
        strategy_now = f"{spec.strategy} on {formatting.format_count(spec.world_size, 'rank')}"
        strategy_before = f"{self.checkpoint.strategy} on {formatting.format_count(self.checkpoint.world_size, 'rank')}"
        if strategy_now != strategy_before:
            notes.append(f"made by {strategy_before}, now {strategy_now}: the state is the same")
        changed = [name for name in _ROW_ORDER_FIELDS if before[name] != now[name]]
        if not changed and before["steps_per_epoch"] != now["steps_per_epoch"]:  # by drop_last
            changed = ["steps_per_epoch"]
        if changed:
            changes = ", ".join(f"{name}={now[name]!r} was {before[name]!r}" for name in changed)
            notes.append(f"rows come in another order ({changes})")
        elif before["world_size"] != now["world_size"] and spec.shuffle not in ("global", IN_ORDER, BY_SAMPLER):
            notes.append("each rank has other rows now, so the rows of a step differ from here on")
        if strategy_now != strategy_before:
            notes.append(_describe_rank_state(head, spec, mesh))
        if before["loss"] != spec.loss:
            notes.append(f"loss={spec.loss} was {before['loss']}")
        notes.append(_describe_overridden(overridden))
        return "; ".join(note for note in notes if note)


def _describe_overridden(overridden: OverriddenOptions) -> str:
    """Return a text with the options of the checkpoint that replace the user's."""
    if not overridden:
        return ""
    options = ", ".join(
        f"{name}={now!r} ({user_value!r} was given)" for name, (now, user_value) in sorted(overridden.items())
    )
    change = "; run.set(lr=...) changes the learning rate" if "lr" in overridden else ""
    return f"the optimizer goes on with the checkpoint's {options}{change}"


_ROW_ORDER_FIELDS = ("samples", "batch_size", "shuffle", "seed")


def _describe_rank_state(metadata: Any, spec: RunSpec, mesh: Mesh) -> str:
    """Return a text about state that belongs to single ranks."""
    facts = metadata["facts"]
    notes = []
    averaged = any(rank_facts["optimizers"] for rank_facts in facts["per_rank"].values())
    other_world = metadata["spec"]["world_size"] != spec.world_size
    if averaged and (other_world or not spec.strategy.startswith(facts["layout"]["strategy"])):
        notes.append("the ranks' optimizer states became their mean")
    if mesh.num_replicas > Mesh(facts["layout"]["mesh"]).num_replicas:
        notes.append("replicas that there were not draw random numbers of their own (dropout)")
    return ", ".join(notes)


def load_start(path: str | os.PathLike[str] | None, model: Any) -> tuple[Any, ResumePoint | None]:
    """Return the start of a training: the model, and the checkpoint at a path, or None for an exported model."""
    if path is None:
        return model, None
    folder = folders.parse_path("resume_from", path)
    if exported_folder.find_format(folder) is None:
        return model, _load_resume_point(folder, model)
    built = model.build_model() if isinstance(model, ModelHandle) else model
    loaded, description = exported_folder.load_exported(folder, built)
    print(f"resume_from: weights of {description} {folder}; the optimizer and the steps start again")  # noqa: T201
    return loaded, None


def _load_resume_point(path: Path, model: Any) -> ResumePoint:
    """Return the checkpoint at a path, after checking its files and that it fits the model. Raises CheckpointError."""
    checkpoint = Checkpoint(path)
    checkpoint.check_fits((model.build_model() if isinstance(model, ModelHandle) else model).state_dict())
    checkpoint.check_files()
    return ResumePoint(checkpoint)


def collect_callback_states(callbacks: Sequence[Any]) -> list[dict[str, Any] | None]:
    """Return the state of callbacks that have ``state_dict`` and ``load_state_dict``; None for others."""
    states: list[dict[str, Any] | None] = []
    for callback in callbacks:
        if not (hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")):
            states.append(None)
            continue
        name = type(callback).__name__
        try:
            states.append({"class": name, "state": encode(callback.state_dict(), f"the state of {name}")})
        except UnsupportedValueError as error:
            raise CheckpointError(f"{error}: a checkpoint holds tensors, numbers and text only") from None
    return states

"""Going on from a checkpoint: what is checked before anything travels, and what will be different, said in a line."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dtkit._util import formatting
from dtkit.checkpoint.checkpoint import Checkpoint, Lineage, get_lineage
from dtkit.checkpoint.json_values import UnsupportedValueError, decode, encode
from dtkit.cluster.broadcast import ModelHandle
from dtkit.errors import CheckpointError
from dtkit.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dtkit.cluster.cluster import Cluster
    from dtkit.types import RunSpec

    OverriddenOptions = Mapping[str, tuple[Any, Any]]  # {option: (as the checkpoint has it, as it was given)}


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that was looked at, and can be gone on from."""

    checkpoint: Checkpoint

    @property
    def step(self) -> int:
        """Steps that were taken."""
        return self.checkpoint.step

    @property
    def last_callback_step(self) -> int:
        """The step after which callbacks were called last."""
        return int(self.checkpoint.metadata.get("called", self.step))

    @property
    def last_evaluation_step(self) -> int:
        """The step after which held-out data were evaluated last."""
        return int(self.checkpoint.metadata.get("evaluated", self.step))

    @property
    def lineage(self) -> Lineage:
        """The runs that led to it; none where it was saved by hand."""
        return get_lineage(self.checkpoint.metadata)

    def check_steps_left(self, spec: RunSpec) -> None:
        """Raise ValueError where nothing would be left to do."""
        if spec.steps <= self.step:
            raise ValueError(
                f"{self.checkpoint.path} stands after step {self.step}, and this training has {spec.steps} steps in "
                f"all. Ask for more than {self.step}: steps= and epochs= count from the very start"
            )

    def restore_job(self, cluster: Cluster, job: str) -> tuple[float, OverriddenOptions]:
        """Have all ranks of a job that was just made take over the state.

        Returns the learning rate, and which of the optimiser's options had been given otherwise.
        """
        head = self.checkpoint.metadata
        where: dict[str, Any] = {"folder": str(self.checkpoint.path.absolute()), "files": list(head["files"])}
        found = cluster.call_all("restore_checkpoint", job=job, index=head["index"], facts=head["facts"], **where)
        return float(found[0][1]), {name: pair for rank in reversed(found) for name, pair in rank[2].items()}

    def restore_callbacks(self, callbacks: Sequence[Any]) -> None:
        """Give callbacks their state again: those of the same class, at the same place of the list."""
        for callback, saved in zip(callbacks, self.checkpoint.metadata.get("callbacks", ()), strict=False):
            if saved is not None and saved["class"] == type(callback).__name__:
                callback.load_state_dict(decode(saved["state"]))

    def describe(self, spec: RunSpec, mesh: Mesh, overridden: OverriddenOptions) -> str:
        """What the run's log says: where it goes on from, and how it differs from one that never ended."""
        head = self.checkpoint.metadata
        before, now = head["spec"], dataclasses.asdict(spec)
        said = [f"goes on from {self.checkpoint.path.name}"]
        here = f"{spec.strategy} on {formatting.format_count(spec.world_size, 'rank')}"
        there = f"{self.checkpoint.strategy} on {formatting.format_count(self.checkpoint.world_size, 'rank')}"
        if here != there:
            said.append(f"made by {there}, now {here}: the state is the same")
        changed = [name for name in _ROW_ORDER_FIELDS if before[name] != now[name]]
        if changed:
            told = ", ".join(f"{name}={now[name]!r} was {before[name]!r}" for name in changed)
            said.append(f"rows come in another order ({told})")
        elif before["world_size"] != now["world_size"] and spec.shuffle != "global":
            said.append("each rank has other rows now, so the rows of a step differ from here on")
        if here != there:
            said.append(_describe_rank_state(head, spec, mesh))
        if before["loss"] != spec.loss:
            said.append(f"loss={spec.loss} was {before['loss']}")
        said.append(_describe_overridden(overridden))
        return "; ".join(word for word in said if word)


def _describe_overridden(overridden: OverriddenOptions) -> str:
    """Which options are the checkpoint's, though others were given."""
    if not overridden:
        return ""
    told = ", ".join(f"{name}={now!r} ({given!r} was given)" for name, (now, given) in sorted(overridden.items()))
    change = "; run.set(lr=...) changes the learning rate" if "lr" in overridden else ""
    return f"the optimiser goes on with the checkpoint's {told}{change}"


_ROW_ORDER_FIELDS = ("samples", "batch_size", "shuffle", "seed")


def _describe_rank_state(metadata: Any, spec: RunSpec, mesh: Mesh) -> str:
    """What becomes of state that is a rank's own."""
    facts = metadata["facts"]
    found = []
    averaged = any(own["optimizers"] for own in facts["own"].values())
    other_world = metadata["spec"]["world_size"] != spec.world_size
    if averaged and (other_world or not spec.strategy.startswith(facts["layout"]["strategy"])):
        found.append("optimisers' states of the ranks became their mean")
    if mesh.num_replicas > Mesh(facts["layout"]["mesh"]).num_replicas:
        found.append("replicas that there were not draw random numbers of their own (dropout)")
    return ", ".join(found)


def load_resume_point(path: str | Path, model: Any) -> ResumePoint:
    """The checkpoint at a path, once its files and its fit to the model were checked. Raises CheckpointError."""
    found = Checkpoint(path)
    found.check_fits((model.build_model() if isinstance(model, ModelHandle) else model).state_dict())
    found.check_files()
    return ResumePoint(found)


def collect_callback_states(callbacks: Sequence[Any]) -> list[dict[str, Any] | None]:
    """State of callbacks that have any to save: those with ``state_dict`` and ``load_state_dict``."""
    found: list[dict[str, Any] | None] = []
    for callback in callbacks:
        if not (hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")):
            found.append(None)
            continue
        name = type(callback).__name__
        try:
            found.append({"class": name, "state": encode(callback.state_dict(), f"the state of {name}")})
        except UnsupportedValueError as error:
            raise CheckpointError(f"{error}: a checkpoint holds tensors, numbers and text only") from None
    return found

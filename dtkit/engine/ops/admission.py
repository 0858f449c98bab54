"""Refusal of requests that don't match the engine's owner, process group or job, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtkit.errors import RefusedError, SupersededError
from dtkit.rpc.protocol import OPERATIONS

if TYPE_CHECKING:
    from dtkit.messages import Request


def check_admission(request: Request, owner: int, generation: int, *, is_broken: bool) -> None:
    """Raise RefusedError unless the request matches the engine's owner and its process group."""
    operation = OPERATIONS[request.op]
    if operation.accepts_any_owner:
        return
    if request.owner_id != owner:
        raise make_superseded_error()
    if operation.is_independent:
        return
    if request.generation != generation:
        raise RefusedError(
            f"the process group is at generation {generation}, the call is for {request.generation}: it was sent "
            "before the group was formed again"
        )
    if is_broken:
        raise RefusedError(
            "the process group is not formed: an error broke it, or cluster.torchrun took its place. Wait for the "
            "result of that call, then call again"
        )


def check_not_older(owner: int, current_owner: int) -> None:
    """Raise SupersededError if a newer notebook owns the engine."""
    if owner < current_owner:
        raise make_superseded_error()


def make_superseded_error() -> SupersededError:
    """Return the error for a call that did not come from the engine's owner."""
    return SupersededError(
        "another notebook, or this one by attaching again, has taken this cluster over since. "
        "dtkit.attach(name, force=True) takes it back by its name, or dtkit.Cluster.from_client(client)"
    )


def check_job_step(job_step: int, step: int | None) -> None:
    """Raise RefusedError unless a job is at `step`; None stands for any step."""
    if step not in (None, job_step):
        raise RefusedError(f"the job is at step {job_step}, the call is for step {step}")


def make_released_error(job: str) -> RefusedError:
    """Return the error for a job that the engine does not hold."""
    return RefusedError(f"no job {job} on this engine; it was released")

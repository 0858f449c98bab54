"""Checkpoints without engines: this process writes the part of each rank."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dtkit.checkpoint import validation
from dtkit.checkpoint.manager import CheckpointManager, CheckpointPolicy, CheckpointRequest
from dtkit.engine.state import writer
from dtkit.engine.state.shards import ShardedState, TensorShard
from dtkit.history.history import History
from dtkit.types import RunSpec
from tests.support.small import net

if TYPE_CHECKING:
    from pathlib import Path

SPEC = RunSpec("Net", "DataParallel()", 2, 64, 16, 20, 4, "global", 0, "loss", "SGD")


def make_rank_state(rank: int) -> ShardedState:
    """Return the state of one of two ranks: half of the rows of each tensor."""
    shards = {}
    for name, tensor in net().state_dict().items():
        shard = tensor.chunk(2)[rank].contiguous()
        offset = (rank * len(tensor.chunk(2)[0]), *(0 for _ in tensor.shape[1:]))
        shards[f"model/{name}"] = TensorShard(shard, tuple(tensor.shape), offset)
    metadata = {
        "layout": {},
        "values": {},
        "optimizers": {},
        "aliases": {},
        "extra": {},
        "per_rank": {str(rank): {}},
        "frozen": {},
    }
    return ShardedState(shards, metadata)


def make_manager(history: History, path: Path, keep_last: int = 3) -> CheckpointManager:
    manager = CheckpointManager(history, lambda: None)
    manager.policy = CheckpointPolicy(5, path, keep_last)
    manager.describe = lambda: {"spec": {**spec_fields(SPEC)}, "called": 0, "callbacks": []}
    return manager


def spec_fields(spec: RunSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def write_checkpoint(
    path: Path, step: int = 5, keep_last: int | None = None, history: History | None = None
) -> CheckpointRequest:
    """Write a checkpoint on request, with the part of each rank."""
    manager = make_manager(History() if history is None else history, path)
    manager.add_request(CheckpointRequest(path, keep_last))
    return write_due_checkpoint(manager, step)


def write_due_checkpoint(manager: CheckpointManager, step: int) -> CheckpointRequest:
    """Write the checkpoint that is due, with the part of each rank."""
    assert manager.is_due(step, 10**9)
    request = manager.begin_next(step)
    assert request is not None
    assert request.folder is not None
    for rank in range(2):
        assert writer._reserve_report(request.folder, rank) is None
        writer._write_files(request.folder, rank, make_rank_state(rank))
    manager.on_result(request, step, [{"error": None, "seconds": 0.0, "torch": "2", "is_remote": False}] * 2)
    return request


def rewrite_metadata(folder: Path, change: Any) -> None:
    """Change checkpoint.json and update its digest."""
    metadata = json.loads((folder / "checkpoint.json").read_text())
    metadata.pop("digest")
    change(metadata)
    (folder / "checkpoint.json").write_text(
        json.dumps({**metadata, "digest": validation.compute_metadata_digest(metadata)})
    )

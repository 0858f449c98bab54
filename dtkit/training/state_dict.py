"""A model's state dict in parts from several ranks, and how the notebook joins them.

Each rank sends what it holds, so that no rank ever needs room for the whole. A sharded tensor comes as one part from
each rank that holds one, in order. A fused tensor (queries, keys and values) is sharded block by block: a part then has
a part of the first block, a part of the second, and so on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit.engine.state.tensor_part import TensorPart

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.payload import Payload

_INTERRUPT_GRACE_S = 0.1  # after the interrupt of ranks that don't answer


def join_state_dicts(parts: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Return the whole state dict from what each rank sent."""
    import torch

    whole: dict[str, Any] = {}
    parts_by_name: dict[str, list[TensorPart]] = {}
    for part in parts:
        for name, value in (part or {}).items():
            if isinstance(value, TensorPart):
                parts_by_name.setdefault(name, []).append(value)
            else:
                whole[name] = value
    for name, tensor_parts in parts_by_name.items():
        tensor_parts.sort(key=lambda tensor_part: tensor_part.index)
        if [tensor_part.index for tensor_part in tensor_parts] != list(range(len(tensor_parts))):
            raise ValueError(f"{name} came in parts {[p.index for p in tensor_parts]}; one is missing or came twice")
        blocks = [tensor_part.tensor.chunk(tensor_part.fused_blocks, tensor_part.dim) for tensor_part in tensor_parts]
        whole[name] = torch.cat(
            [block for blocks_alike in zip(*blocks, strict=True) for block in blocks_alike], tensor_parts[0].dim
        )
    return whole


def fetch_tensors(engine_group: EngineGroup, op: str, job: str, ranks: list[int] | None = None) -> Mapping[str, Any]:
    """Return named tensors of a job ("state_dict_parts" or "max_gradients"), joined from what each rank sends."""
    return _load_and_join(engine_group.call_all(op, job=job, ranks=ranks))


def fetch_tensors_within(engine_group: EngineGroup, op: str, job: str, timeout: float) -> Mapping[str, Any] | None:
    """Return the same where all ranks send it within `timeout` seconds; else None, and the group is left as it is."""
    replies = engine_group.gather_replies(engine_group.fan_out(op, job=job), timeout, grace_s=_INTERRUPT_GRACE_S)
    sent: list[Any] = [reply.value for reply in replies if reply.failure is None]
    if len(sent) == len(replies):
        return _load_and_join(sent)
    for shipment in sent:
        if shipment is not None:
            shipment.discard()
    return None


def _load_and_join(payloads: Iterable[Payload | None]) -> dict[str, Any]:
    shipments = [shipment for shipment in payloads if shipment is not None]
    try:
        return join_state_dicts(shipment.load() for shipment in shipments)
    finally:
        for shipment in shipments:
            shipment.discard()

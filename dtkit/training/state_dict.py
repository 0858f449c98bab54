"""A model's state dict in parts that lie on several ranks, and how the notebook joins them.

Each rank sends what it holds, so that no rank ever needs room for the whole. A tensor that was cut along a dimension
comes as one piece from each rank that holds a part of it, in order. A tensor that is several in one (queries, keys and
values) was cut in each of them: a piece then has a part of the first, a part of the second, and so on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit.engine.state.tensor_part import TensorPart

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dtkit.cluster.cluster import Cluster
    from dtkit.rpc.payload import Payload

_INTERRUPT_GRACE_S = 0.1  # for an interrupt of those who do not answer




def join_state_dicts(parts: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    """The whole state dict from what each rank sent."""
    import torch

    whole: dict[str, Any] = {}
    cut: dict[str, list[TensorPart]] = {}
    for part in parts:
        for name, value in (part or {}).items():
            if isinstance(value, TensorPart):
                cut.setdefault(name, []).append(value)
            else:
                whole[name] = value
    for name, pieces in cut.items():
        pieces.sort(key=lambda piece: piece.index)
        if [piece.index for piece in pieces] != list(range(len(pieces))):
            raise ValueError(f"{name} came in parts {[p.index for p in pieces]}; one is missing or came twice")
        blocks = [piece.tensor.chunk(piece.fused_blocks, piece.dim) for piece in pieces]
        whole[name] = torch.cat(
            [block for blocks_alike in zip(*blocks, strict=True) for block in blocks_alike], pieces[0].dim
        )
    return whole


def fetch_tensors(cluster: Cluster, op: str, job: str, ranks: list[int] | None = None) -> Mapping[str, Any]:
    """Named tensors of a job ("state_dict_parts" or "max_gradients"), joined from what each rank sends."""
    return _load_and_join(cluster.call_all(op, job=job, ranks=ranks))


def fetch_tensors_within(cluster: Cluster, op: str, job: str, timeout: float) -> Mapping[str, Any] | None:
    """The same, where all ranks give it within so many seconds; else None, and nothing is mended."""
    replies = cluster.gather_replies(cluster.fan_out(op, job=job), timeout, grace_s=_INTERRUPT_GRACE_S)
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

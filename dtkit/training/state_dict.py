"""A model's whole state dict, which the notebook joins from parts that all ranks send.

Each rank sends about as many bytes as the others, and no rank needs memory for the whole model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit._util import timeouts
from dtkit.rpc.protocol import JobOperations, make_call

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.payload import Payload


def fetch_state_dict(
    engine_group: EngineGroup,
    job: str,
    ranks: list[int] | None = None,
    timeout: float | None = None,
    callback: int | None = None,
) -> Mapping[str, Any]:
    """Return the state dict of a job's model, or of the model of one of its callbacks on the engines."""
    call = make_call(JobOperations.state_dict_parts, job=job, callback=callback)
    return _join_parts(engine_group.call_all(call, ranks=ranks, timeout=timeout))


def fetch_state_dict_within(engine_group: EngineGroup, job: str, timeout: float) -> Mapping[str, Any] | None:
    """Return the state dict if all ranks send it within `timeout` seconds; else None. Doesn't form the group again."""
    replies = engine_group.gather_replies(
        engine_group.fan_out(make_call(JobOperations.state_dict_parts, job=job)),
        timeout,
        grace_s=timeouts.FETCH_INTERRUPT_GRACE_S,
    )
    payloads = [reply.unwrap() for reply in replies if reply.failure is None]
    if len(payloads) == len(replies):
        return _join_parts(payloads)
    for payload in payloads:
        payload.discard()
    return None


def _join_parts(payloads: Iterable[Payload]) -> dict[str, Any]:
    from dtkit.engine.state.shards import join_state_dict

    return join_state_dict(load_payloads(payloads))


def load_payloads(payloads: Iterable[Payload]) -> list[Any]:
    """Return the contents of payloads, and free their memory."""
    payloads = list(payloads)
    try:
        return [payload.load() for payload in payloads]
    finally:
        for payload in payloads:
            payload.discard()

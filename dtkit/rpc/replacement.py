"""Replacement of lost ranks by new engines, or continuation without them. All callers use this module."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit.errors import EmptyEnginesError, EngineError, HostLostError
from dtkit.rpc.protocol import DataOperations, GroupOperations, make_call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.payload import Payload
    from dtkit.types import EngineLoss

_MAX_ATTEMPTS = 3


def replace_lost_ranks(
    group: EngineGroup,
    lost_ranks: Sequence[int],
    *,
    shrink: bool = False,
    rebuild: Callable[[], None] | None = None,
    data: Payload | None = None,
    on_further_loss: Callable[[Mapping[int, EngineLoss]], object] = bool,
) -> None:
    """Start new engines at these ranks, with the other engines' data and models. All jobs end.

    With `shrink`, the others continue and take over the lost shards; higher ranks move down. `rebuild` then builds the
    job again. It needs an engine that holds the data. If all engines are new, they get `data`; without, ClusterError is
    raised. If more engines or a host are lost on the way, this tries again, and calls `on_further_loss` with the
    reasons by rank. Those ranks are numbered as before the replacement.
    """
    old_ranks = list(range(group.world_size))
    for attempt in range(_MAX_ATTEMPTS):
        try:
            _replace_or_shrink(group, lost_ranks, data, shrink=shrink)
            is_empty = group.membership.clear_if_all_new()
            if rebuild is not None:
                _check_not_empty(is_empty=is_empty)
                rebuild()
        except (EngineError, HostLostError) as error:
            if shrink:
                old_ranks = [old_rank for rank, old_rank in enumerate(old_ranks) if rank not in lost_ranks]
            failures = error.failures if isinstance(error, EngineError) else ()
            stuck_ranks = {failure.rank for failure in failures if failure.kind == "stuck"}
            # without its host, no engine may have been started for a rank that the caller knows to be lost
            known_ranks = lost_ranks if isinstance(error, HostLostError) else ()
            lost_ranks = sorted({*group.membership.find_lost_ranks(), *stuck_ranks})
            new_ranks = [rank for rank in lost_ranks if rank not in known_ranks]
            losses = group.membership.explain_losses(new_ranks, failures)
            if losses:
                on_further_loss({old_ranks[rank]: loss for rank, loss in losses.items()})
            if not lost_ranks or attempt == _MAX_ATTEMPTS - 1:
                raise
        else:
            break


def _replace_or_shrink(group: EngineGroup, lost_ranks: Sequence[int], data: Payload | None, *, shrink: bool) -> None:
    if not lost_ranks:
        group.membership.form_process_group(ranks_changed=True)
        return
    if shrink:
        group.membership.drop_engines(lost_ranks)
        group.call_all(make_call(DataOperations.repartition))
    else:
        group.membership.replace_engines(lost_ranks)
        group.fan_out(make_call(GroupOperations.warm_up), ranks=lost_ranks)
        _initialize_new_engines(group, data)
    group.record_owner()


def _initialize_new_engines(group: EngineGroup, data: Payload | None) -> None:
    """Copy data and models to the new engines, from an earlier one or, if there is none, from `data`."""
    new_ranks = group.membership.uninitialized_ranks
    old_ranks = [rank for rank in range(group.world_size) if rank not in new_ranks]
    if old_ranks:
        (payload,) = group.call_all(make_call(DataOperations.export_data), ranks=old_ranks[:1])
        group.call_all(make_call(DataOperations.import_data, payload=payload), ranks=sorted(new_ranks))
        payload.discard()
        new_ranks.clear()
    elif data is not None:
        _send_data(group, data)
        new_ranks.clear()


def _send_data(group: EngineGroup, data: Payload) -> None:
    """Send stored data to all engines, once to each host."""
    hosts = group.membership.hosts
    if hosts is None or data.inline_buffers is None:
        group.call_all(make_call(DataOperations.import_data, payload=data))
        return
    places = hosts.write_buffers(data.inline_buffers)
    try:
        payload = dataclasses.replace(data, inline_buffers=None, host_buffers=places)
        group.call_all(make_call(DataOperations.import_data, payload=payload))
    finally:
        hosts.remove_buffers(places)  # engines have mapped them


def _check_not_empty(*, is_empty: bool) -> None:
    if is_empty:
        raise EmptyEnginesError(
            "all engines ended, and with them the training since its last checkpoint. The new engines are empty. Train "
            "again with cluster.train(...), from a checkpoint with resume_from=path. To lose less next time, write "
            "checkpoints: checkpoint_dir='checkpoints/first', checkpoint_every=1000"
        )

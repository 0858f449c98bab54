"""``cluster.torchrun``: a script, or a function, in a fresh process for each rank."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dtkit._util import timeouts
from dtkit.rpc.protocol import FunctionOperations, make_call
from dtkit.rpc.script import Script, parse_script
from dtkit.training.elastic_script import SCRIPT_NOTE, ElasticTask
from dtkit.training.task import Task, check_callable, get_name, start_on_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dtkit.rpc.engine_group import EngineGroup
    from dtkit.rpc.payload import Payload
    from dtkit.rpc.protocol import Call
    from dtkit.training.elastic_script import ElasticPolicy


class ScriptTask(Task):
    """A script. Once a rank has failed, the others are ended as under torchrun: they wait for it in vain."""

    note = SCRIPT_NOTE
    unknown_position = "ended without a traceback"
    first_grace_s = timeouts.SCRIPT_FAILURE_GRACE_S


def submit_script(
    engine_group: EngineGroup,
    main: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    repair: Callable[[], object] | None = None,
    policy: ElasticPolicy | None = None,
) -> Task:
    """See :meth:`dtkit.Cluster.torchrun`; `repair` replaces engines that are gone.

    `policy` is for scripts that use Horovod, and None for others.
    """
    script = parse_script(main, args, dict(kwargs), has_horovod=policy is not None)
    if script is None:
        check_callable(engine_group, main)
    engine_group.check_open()
    engine_group.membership.ensure_formed()
    port, count = _open_rendezvous_store(engine_group), next(engine_group.torchrun_attempts)

    def make_script_call(payload: Payload, **fields: Any) -> Call[Any]:
        function = Script(get_name(main), payload=payload, has_horovod=policy is not None)
        to_run = dataclasses.replace(function if script is None else script, **fields)
        return make_call(FunctionOperations.run_script, script=to_run, port=port, restart_count=count)

    name, function_call = get_name(main) if script is None else script.title, (main, args, dict(kwargs))
    if policy is None or not engine_group.membership.is_single_host:  # hosts share no folder
        return start_on_all_ranks(ScriptTask(engine_group, name, repair), function_call, make_script_call)
    task = ElasticTask(engine_group, name, repair, policy)
    payload = engine_group.uploads.upload(engine_group.uploads.pack(function_call, name=name))
    folder = str(task.folder.path)
    task.start(payload, lambda slot: make_script_call(payload, shared_folder=folder, slot=slot))
    return task


def _open_rendezvous_store(engine_group: EngineGroup) -> int:
    """Open a store for a script's own group, and return its port. Rank 0 may have to finish a long call first."""
    return int(
        engine_group.unwrap(
            engine_group.gather_replies(
                engine_group.fan_out(make_call(FunctionOperations.open_torchrun_store), ranks=[0]),
                timeouts.TASK_TIMEOUT_S,
            )
        )[0]
    )

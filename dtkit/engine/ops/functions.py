"""Calls of the user's functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtkit.engine.observe.call_output import CallOutput, activate_output
from dtkit.rpc.pickle_errors import RESULT_NAME
from dtkit.rpc.protocol import FunctionOperations

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.engine.ops.state import EngineState
    from dtkit.messages import OutputItem
    from dtkit.rpc.payload import Payload
    from dtkit.rpc.script import Script


class FunctionOps(FunctionOperations):
    """See :class:`~dtkit.rpc.protocol.FunctionOperations`."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._torchrun_store: Any = None  # open as long as this refers to it

    def call_function(self, *, payload: Payload) -> tuple[Payload | None, list[OutputItem]]:
        """Call ``fn(*args, **kwargs)``; return its result and its output."""
        state = self._state
        output = state.call_output = CallOutput(state.publish)

        def work() -> Any:
            fn, args, kwargs = payload.load()
            return fn(*args, **kwargs)

        with activate_output(output):
            value = self._run(work)
        return state.pack(value, name=RESULT_NAME), output.items

    def _run(self, work: Callable[[], Any]) -> Any:
        """Run a function in the group of the cluster, with the environment variables of its rank."""
        from dtkit.engine.comm import torchrun

        spec = self._state.spec
        assert spec is not None
        with torchrun.set_environment(torchrun.make_rank_environment(spec)):
            return self._state.run_abortable(work)

    def open_torchrun_store(self) -> int:
        """Open a store for the process group of a script; return its port."""
        from dtkit.engine.comm import torchrun

        self._torchrun_store, port = torchrun.open_store(self._state.get_group().world_size)
        return port

    def run_script(self, *, script: Script, port: int, restart_count: int) -> tuple[Payload | None, list[OutputItem]]:
        """Run a script in a fresh process; return its result and its output."""
        from dtkit.engine import script_process
        from dtkit.engine.comm import torchrun

        state, spec = self._state, self._state.spec
        assert spec is not None
        output = state.call_output = CallOutput(state.publish)
        with activate_output(output):
            environment = torchrun.make_torchrun_environment(spec, port, restart_count)
            value = script_process.run_script(script, environment, output)
        return state.pack(value, name=RESULT_NAME), output.items

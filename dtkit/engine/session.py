"""The session of an engine process: it admits requests, and looks up their operations.

Requests come through :mod:`dtkit.engine.server`. Before any collective, the session refuses requests of another owner,
for another generation of the process group, or for another step than the job's.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from dtkit.engine.observe import error_report
from dtkit.engine.ops.admission import check_admission
from dtkit.engine.ops.benchmarks import BenchmarkOps
from dtkit.engine.ops.data import DataOps, ModelOps
from dtkit.engine.ops.functions import FunctionOps
from dtkit.engine.ops.group import GroupOps
from dtkit.engine.ops.job_state import StateOps
from dtkit.engine.ops.jobs import JobOps
from dtkit.engine.ops.profiles import ProfileOps
from dtkit.engine.ops.state import EngineState
from dtkit.engine.script_interrupt import ScriptInterrupt
from dtkit.engine.script_process import ScriptError
from dtkit.errors import RefusedError
from dtkit.messages import Reply
from dtkit.rpc.protocol import OPERATIONS, bind_operations
from dtkit.types import Failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtkit.messages import OutputItem, Request


class Session:
    """One engine: its state, and the operations on it."""

    def __init__(self) -> None:
        state = self.state = EngineState()
        self.operations = bind_operations(
            GroupOps(state),
            FunctionOps(state),
            DataOps(state),
            ModelOps(state),
            JobOps(state),
            StateOps(state),
            BenchmarkOps(state),
            ProfileOps(state),
        )
        """The methods that serve requests, by operation."""

    def serve_request(self, request: Request, publish: Callable[[int, list[OutputItem]], None] | None) -> Any:
        """Return the value of an admitted request. `publish` sends output during the call."""
        state, limit = self.state, self.state.memory_limit
        state.call_output, state.publish = None, publish
        generation, is_broken = (-1, False) if state.group is None else (state.group.generation, state.group.is_broken)
        with limit.suspend() if OPERATIONS[request.op].has_unlimited_memory else limit.enforce():
            check_admission(request, state.owner, generation, is_broken=is_broken)
            return self.operations[request.op](**request.args)

    def make_error_reply(self, error: BaseException, request: Request) -> Reply[Any]:
        """Return what was completed before an error, and the report on it, which the next notebook may need too."""
        value, failure = self._collect_partial_result(request), self._build_failure(error, request)
        name = str(request.args.get("job"))
        if request.op == "advance" and name in self.state.jobs and failure.kind == "error":
            self.state.get_outbox(name).store_failure(failure)
        return Reply(value, failure)

    def _collect_partial_result(self, request: Request) -> Any:
        """Return the completed part of a failed dispatch or call. Its last output often shows the cause."""
        state = self.state
        items = [] if state.call_output is None else state.call_output.items
        name = str(request.args.get("job"))
        if request.op == "advance" and name in state.jobs:
            result = state.jobs[name].collect_results()
            state.get_outbox(name).store_dispatch(result, items)  # for the next notebook, if this one has ended
            return result, items
        return (None, items) if request.op in ("call_function", "run_script") else None

    def _build_failure(self, error: BaseException, request: Request) -> Failure:
        """Return the report on an error that ended a request."""
        from dtkit.engine.comm.process_group import is_lost_peer_error

        job = self.state.jobs.get(str(request.args.get("job")))
        kind = "refused" if isinstance(error, RefusedError) else "error"
        if kind == "error" and self.state.sigint_handler.was_interrupted:  # user code may raise KeyboardInterrupt too
            kind = "interrupted"
        if kind == "error":
            from dtkit.engine.error_hints import add_general_hint

            add_general_hint(error)
        name, details = error_report.name_error(error), error_report.format_traceback(error)
        frames, is_victim = error_report.list_user_frames(error), is_lost_peer_error(error)
        if isinstance(error, ScriptError):  # another process has the error itself
            name, details, is_victim = error.kind, error.details, is_lost_peer_error(RuntimeError(str(error)))
        elif isinstance(error, ScriptInterrupt):
            name, details, frames = KeyboardInterrupt.__name__, error.details or details, error.user_frames
        return Failure(
            rank=self.state.rank,
            host=socket.gethostname(),
            type=name,
            message=error_report.format_message(error),
            traceback=details,
            user_frames=frames,
            step=None if job is None else job.step,
            victim=is_victim,
            kind=kind,
        )


_session = Session()


def get_session() -> Session:
    """Return the session of this process."""
    return _session

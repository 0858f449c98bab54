"""The time constants: their order, their units, and a scan that no other module defines one."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dtkit._util import timeouts
from dtkit.engine.observe import watchdog
from dtkit.engine.ops import jobs
from dtkit.integrations import timeouts as integration_timeouts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

ORDERS = {  # row of the table -> names, each of which is less than the next
    "an engine is stopped": (
        "WATCHDOG_PERIOD_S",
        "MAX_STATUS_AGE_S",
        "WATCHDOG_SILENT_S",
        "STALL_LIMIT_S",
        "HEARTBEAT_TIMEOUT_S",
    ),
    "a script's rank fails": (
        "SCRIPT_POLL_S",
        "SCRIPT_FAILURE_GRACE_S",
        "SCRIPT_INTERRUPT_TIMEOUT_S",
        "FAILURE_GRACE_S",
    ),
    "a rank fails": ("FAILURE_GRACE_S", "HEARTBEAT_TIMEOUT_S", "GATHER_TIMEOUT_S", "REFORM_TIMEOUT_S"),
    "a call takes too long": ("TURN_STATUS_TIMEOUT_S", "TURN_STALLED_S", "TURN_TIMEOUT_S", "MIN_STEP_TIMEOUT_S"),
    "a first step": ("MIN_STEP_TIMEOUT_S", "FIRST_STEP_TIMEOUT_S"),
    "a stall of all ranks": ("STALL_LIMIT_S", "ALL_RANKS_STALL_LIMIT_S", "MIN_STEP_TIMEOUT_S"),
    "a pause": ("PAUSE_GRACE_S", "MAX_PAUSE_GRACE_S", "STUCK_COMMAND_TIMEOUT_S"),
    "a dispatch": ("SLOW_STEP_S", "TARGET_DISPATCH_S", "MAX_DISPATCH_S", "STALL_LIMIT_S"),
    "snapshots": ("MAX_DISPATCH_S", "DEFAULT_SNAPSHOT_INTERVAL_S", "MAX_SNAPSHOT_INTERVAL_S"),
    "replica checks": ("REPLICA_CHECK_INTERVAL_S", "UNSHARED_REPLICA_CHECK_INTERVAL_S"),
    "a notebook ends": ("REAPER_POLL_S", "LOCK_TIMEOUT_S", "LEASE_S", "JOB_LEASE_S"),
    "a checkpoint": (
        "WRITE_POLL_S",
        "REMOTE_WRITE_POLL_S",
        "WRITE_STALL_TIMEOUT_S",
        "PREVIOUS_SAVE_TIMEOUT_S",
        "UNFINISHED_MAX_AGE_S",
    ),
    "a stack dump": ("STACK_DUMP_POLL_S", "STACK_DUMP_TIMEOUT_S", "WATCHDOG_SILENT_S", "STACK_DUMP_INTERVAL_S"),
    "a group's end": ("SHUTDOWN_NOTICE_POLL_S", "PEER_INTERRUPT_S", "SHUTDOWN_NOTICE_TIMEOUT_S"),
    "output": ("OUTPUT_POLL_S", "OUTPUT_PERIOD_S", "OUTPUT_JOIN_TIMEOUT_S", "OUTPUT_IDLE_TIMEOUT_S"),
    "a display": ("LIVE_INTERVAL_S", "PICTURE_INTERVAL_S", "LIVE_UNWATCHED_INTERVAL_S"),
    "a text log": ("LIVE_INTERVAL_S", "LOG_INTERVAL_S"),
    "a saved notebook": (
        "KEPT_PICTURE_FIRST_S",
        "KEPT_PICTURE_BUSY_FIRST_S",
        "KEPT_PICTURE_INTERVAL_S",
    ),
    "a comparison": ("LIVE_INTERVAL_S", "COMPARISON_INTERVAL_S", "PICTURE_INTERVAL_S"),
    "a measurement": ("MAX_ALL_REDUCE_S", "STEPS_BUDGET_S", "MAX_MEASURED_STEP_S"),
}
TIME_NAME = re.compile(r"^_?([A-Z]+_)*(S|MS|TIMEOUT|INTERVAL|PERIOD|GRACE|LEASE)$")
MODULES = timeouts, integration_timeouts
"""The only modules with time constants: dtkit's own, and those that only other frameworks need."""
THRESHOLDS = {"MIN_EXTRA_S"}  # in seconds, but nothing waits for them
WAITING_METHODS = {"wait", "join", "result", "sleep", "get", "acquire", "wait_for"}
WAITING_PARAMETERS = re.compile(r"timeout|lease|grace|interval|period")


@pytest.mark.parametrize("names", ORDERS.values(), ids=ORDERS)
def test_the_time_constants_of_each_table_row_are_in_order(names: tuple[str, ...]):
    seconds = [getattr(timeouts, name) for name in names]
    assert seconds == sorted(set(seconds))


def test_a_stopped_engine_is_noticed_within_ten_seconds():
    assert timeouts.HEARTBEAT_TIMEOUT_S + 2 * timeouts.HEARTBEAT_PERIOD_S < 10


def test_a_watchdog_is_silent_only_after_several_missed_samples():
    assert timeouts.WATCHDOG_SILENT_S > 3 * timeouts.WATCHDOG_PERIOD_S
    assert 2 * timeouts.WATCHDOG_PERIOD_S < timeouts.MAX_STATUS_AGE_S <= timeouts.WATCHDOG_SILENT_S / 2
    assert 2 * timeouts.WATCHDOG_PERIOD_S < timeouts.WATCHDOG_MISSED_SAMPLE_S < timeouts.WATCHDOG_SILENT_S
    assert 2 * timeouts.WATCHDOG_PERIOD_S < timeouts.FRESH_STATUS_TIMEOUT_S < timeouts.WATCHDOG_SILENT_S


def test_stall_samples_are_dropped_before_the_holdoff_ends():
    assert watchdog._NUM_SAMPLES * timeouts.WATCHDOG_PERIOD_S < timeouts.STRAGGLER_HOLDOFF_S


def test_stacks_are_collected_within_four_seconds():
    assert timeouts.FRESH_STATUS_TIMEOUT_S + timeouts.STACK_DUMP_TIMEOUT_S < 4


def test_a_pause_takes_at_most_three_seconds_with_short_steps():
    grace_before, grace_after = timeouts.INTERRUPTED_GATHER_TIMEOUT_S, timeouts.INTERRUPTED_GATHER_TIMEOUT_S
    assert timeouts.MAX_PAUSE_GRACE_S + grace_before + grace_after <= 3
    assert timeouts.INTERRUPTED_GATHER_TIMEOUT_S < timeouts.FAILURE_GRACE_S


def test_the_notebook_waits_longer_than_the_engines():
    assert timeouts.CALL_TIMEOUT_MARGIN_S > timeouts.GATHER_TIMEOUT_S + 2 * timeouts.FAILURE_GRACE_S
    assert timeouts.REFORM_TIMEOUT_S > timeouts.HEARTBEAT_TIMEOUT_S + 2 * timeouts.FAILURE_GRACE_S
    assert jobs.STEP_TIMEOUT_FACTOR * timeouts.SLOW_STEP_S < timeouts.MIN_STEP_TIMEOUT_S


def test_polls_are_shorter_than_what_they_wait_for():
    assert timeouts.REAPER_POLL_S * 10 <= timeouts.LEASE_S
    assert timeouts.LOCK_POLL_S * 10 <= timeouts.LOCK_TIMEOUT_S
    assert timeouts.STATUS_POLL_S * 10 <= timeouts.FRESH_STATUS_TIMEOUT_S
    assert timeouts.WRITE_POLL_S * 10 <= timeouts.WRITE_STALL_TIMEOUT_S
    assert timeouts.PROCESS_POLL_S * 10 <= timeouts.TERM_GRACE_S
    assert max(timeouts.DRIVER_POLL_S, timeouts.REPLY_POLL_S) <= timeouts.WATCHDOG_PERIOD_S
    assert timeouts.SHORT_INTERRUPT_POLL_S < timeouts.INTERRUPT_POLL_S <= 0.5


def test_the_reaper_ends_a_cluster_before_the_wait_for_it_times_out():
    assert timeouts.TERM_GRACE_S + timeouts.KILL_TIMEOUT_S < timeouts.REAPER_EXIT_TIMEOUT_S


@pytest.mark.parametrize("module", MODULES)
def test_every_constant_is_in_seconds_and_has_a_reason(module: ModuleType):
    source = inspect.getsource(module)
    for name, value in vars(module).items():
        if name.isupper():
            assert name.endswith("_S")
            assert isinstance(value, float)
            assert re.search(rf'^{name} = \S+\n"""[A-Z].*\."""$', source, re.MULTILINE), name


def test_every_constant_is_used(root: Path):
    sources = "".join(path.read_text() for path in (root / "dtkit").rglob("*.py"))
    names = [name for module in MODULES for name in vars(module) if name.isupper()]
    assert [name for name in names if f"timeouts.{name}" not in sources] == []


def test_other_frameworks_alone_use_their_constants(root: Path):
    names = [name for name in vars(integration_timeouts) if name.isupper()]
    others = [path for path in (root / "dtkit").rglob("*.py") if "integrations" not in path.parts]
    assert [name for path in others for name in names if name in path.read_text()] == []


def test_no_other_module_defines_a_time_constant(root: Path):
    folder = root / "dtkit"
    assert [
        f"{path.relative_to(folder)}:{line}: {constant}"
        for path in sorted(folder.rglob("*.py"))
        if path not in [Path(inspect.getfile(module)) for module in MODULES]
        for line, constant in _time_constants(ast.parse(path.read_text()))
    ] == []


def test_the_scan_finds_each_form_of_constant():
    code = """
POLL_S = 0.5
A_TIMEOUT, MAX_LINES_PER_S = 3.0, 100
_LEASE: float = 2 * 30.0
def f(timeout: float = 5, *, grace_s=1.0, lease=None):
    event.wait(0.1), thread.join(timeout=5), future.result(0), items.get(3)
"""
    assert [line for line, _ in _time_constants(ast.parse(code))] == [2, 3, 4, 5, 5, 6, 6]


def _time_constants(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each time constant: assigned to a name, a default, or an argument of a wait."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[target], value=value):
                yield from _assigned(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from _assigned(target, value)
            case ast.FunctionDef(args=arguments) | ast.AsyncFunctionDef(args=arguments):
                plain = [*arguments.posonlyargs, *arguments.args]
                defaults = zip(reversed(plain), reversed(arguments.defaults), strict=False)
                for argument, default in [*defaults, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]:
                    if WAITING_PARAMETERS.search(argument.arg) and default is not None and _is_positive(default):
                        yield default.lineno, argument.arg
            case ast.Call(func=ast.Attribute(attr=name), args=args, keywords=keywords) if name in WAITING_METHODS:
                limits = [*args[:1], *(keyword.value for keyword in keywords if keyword.arg == "timeout")]
                if (name != "get" or not args) and any(map(_is_positive, limits)):
                    yield node.lineno, f"{name}()"


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[int, str]]:
    """Yield the time constants of one assignment."""
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=False))
    for name, number in pairs:
        if isinstance(name, ast.Name) and _is_time(name.id) and _is_positive(number):
            yield number.lineno, name.id


def _is_time(name: str) -> bool:
    """Return whether a constant's name says that it is a time to wait."""
    return TIME_NAME.match(name) is not None and "_PER_" not in name and name not in THRESHOLDS


def _is_positive(node: ast.expr) -> bool:
    """Return whether an expression is made of numbers alone, and is more than 0."""
    parts = [part for part in ast.walk(node) if isinstance(part, ast.expr)]
    if not all(isinstance(part, ast.Constant | ast.BinOp | ast.UnaryOp) for part in parts):
        return False
    number = eval(ast.unparse(node))
    return isinstance(number, int | float) and not isinstance(number, bool) and number > 0


def test_cancel_leaves_half_of_its_ten_seconds_to_replace_engines():
    patience_s = timeouts.CANCEL_INTERRUPT_TIMEOUT_S + timeouts.CANCEL_AGAIN_TIMEOUT_S + timeouts.CANCEL_KILL_TIMEOUT_S
    assert patience_s <= 5
    assert timeouts.CANCEL_TIMEOUT_S < 10

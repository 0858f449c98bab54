"""The states of a run: which commands each allows, and which states may follow.

The table is :data:`STATE_TABLE`; drawn::

                             resume, step
    PENDING --start--> PAUSED ----------> RUNNING --last step--> COMPLETED
                       ^ | ^               | | |                   |
                       | | +-pause, error--+ | +--error--> FAILED  |
                       | +------stop---------+--> STOPPED          |
                       +--------------extend---------+-------------+

A cluster that closes ends a run in any state (STOPPED), and so does an error of the driver itself (FAILED). A command
is answered with the step at which it took effect. No command is accepted after the end.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class StateRule:
    """What a state allows."""

    commands: frozenset[str]
    next_states: frozenset[State]


_ALWAYS = frozenset({"pause", "stop", "resume", "lr", "save", "break", "repair", "called", "abandon"})
_ENDS = frozenset({State.STOPPED, State.FAILED})

STATE_TABLE: Mapping[State, StateRule] = {
    State.PENDING: StateRule(_ALWAYS | {"step"}, _ENDS | {State.PAUSED}),
    State.PAUSED: StateRule(_ALWAYS | {"step"}, _ENDS | {State.RUNNING}),
    State.RUNNING: StateRule(_ALWAYS, _ENDS | {State.PAUSED, State.COMPLETED}),
    State.COMPLETED: StateRule(frozenset(), frozenset({State.PAUSED, State.FAILED})),
    State.STOPPED: StateRule(frozenset(), frozenset({State.PAUSED, State.FAILED})),
    State.FAILED: StateRule(frozenset(), frozenset({State.FAILED})),
}
"""The commands that each state allows, and the states that may follow it.

A run that has failed may fail again on the way out. One that has ended otherwise fails only by an error in the driver.
"""

RETRAIN_HINT = "run.exception says why. cluster.train(...) starts again, with resume_from=path from a checkpoint"
"""What to do when a run has failed."""
_EXTEND_HINT = "run.extend(epochs=1) trains on; cluster.train(...) starts again"
ENDED_PHRASES = {State.COMPLETED: "completed", State.STOPPED: "been stopped", State.FAILED: "failed"}
_COMMAND_PHRASES = {
    "pause": "be paused",
    "resume": "be resumed",
    "stop": "be stopped",
    "step": "take a step",
    "lr": "change",
    "abandon": "end",
    "save": "be saved",
    "break": "be interrupted",
    "repair": "be repaired",
}


def describe_refusal(state: State, step: int, command: str) -> str:
    """Return why a run that has ended does not take a command, and what helps."""
    hint = RETRAIN_HINT if state is State.FAILED else _EXTEND_HINT
    return f"this run has {ENDED_PHRASES[state]} at step {step}, so it can't {_COMMAND_PHRASES[command]}. {hint}"

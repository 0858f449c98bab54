"""The states of a run: which commands each allows, and which states may follow.

The table is :data:`STATE_TABLE`; drawn::

                             resume, step
    PENDING --start--> PAUSED ----------> RUNNING --last step--> COMPLETED
                       ^   ^                 |                       |
                       |   +--pause, error---+                       |
                       +----------------extend-----------------------+

    PENDING, PAUSED, RUNNING --stop--> STOPPED --extend--> PAUSED
    PENDING, PAUSED, RUNNING --error--> FAILED

Closing the cluster stops a run that has not ended; an error in the driver makes it FAILED. The answer to a command is
the step at which it took effect. No command is accepted after the end. A run that ended in another notebook goes from
PENDING to its end.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dtkit.types import State

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class StateRule:
    """The commands that a state allows, and the states that may follow."""

    commands: frozenset[str]
    next_states: frozenset[State]


_ACTIVE_COMMANDS = frozenset(
    {"pause", "stop", "resume", "lr", "save", "interrupt", "repair", "callbacks_done", "callback_failed", "abandon"}
)
_ENDS = frozenset({State.STOPPED, State.FAILED})

STATE_TABLE: Mapping[State, StateRule] = {
    State.PENDING: StateRule(_ACTIVE_COMMANDS | {"step"}, _ENDS | {State.PAUSED, State.COMPLETED}),
    State.PAUSED: StateRule(_ACTIVE_COMMANDS | {"step"}, _ENDS | {State.RUNNING}),
    State.RUNNING: StateRule(_ACTIVE_COMMANDS, _ENDS | {State.PAUSED, State.COMPLETED}),
    State.COMPLETED: StateRule(frozenset(), frozenset({State.PAUSED, State.FAILED})),
    State.STOPPED: StateRule(frozenset(), frozenset({State.PAUSED, State.FAILED})),
    State.FAILED: StateRule(frozenset(), frozenset({State.FAILED})),
}
"""The commands that each state allows, and the states that may follow it.

FAILED may follow FAILED: closing the driver can raise a second error. COMPLETED and STOPPED become FAILED only if the
driver itself raises.
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
    "lr": "change its learning rate",
    "abandon": "end",
    "save": "be saved",
    "interrupt": "be interrupted",
    "repair": "be repaired",
    "callback_failed": "be paused",
    "callbacks_done": "continue after its callbacks",
}


def describe_refusal(state: State, step: int, command: str, release: str = "") -> str:
    """Return why a run that has ended doesn't take a command, with a remedy. `release` is that of a released run."""
    hint = RETRAIN_HINT if state is State.FAILED else release or _EXTEND_HINT
    return f"this run has {ENDED_PHRASES[state]} at step {step:,}, so it can't {_COMMAND_PHRASES[command]}. {hint}"

"""Questions of a trial on an engine to its trial in the notebook, as files in the cluster's folder.

An engine serves no other call while it computes, so a message with an answer couldn't reach it. Question n of trial t
is a file ``t.n.question`` of JSON, and its answer ``t.n.answer``.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtkit._util.files import replace_file
from dtkit._util.formatting import name_type
from dtkit._util.guard import run_guarded
from dtkit.integrations import timeouts

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class TrialStart:
    """Description of a trial for an engine."""

    number: int
    params: dict[str, Any]
    """Parameters that have been chosen already."""
    folder: str
    attempt: int
    """Number of earlier attempts at the trial, on engines that were lost."""

    @property
    def name(self) -> str:
        """Beginning of the names of its files."""
        return f"{self.number}-{self.attempt}"


class EngineEnd:
    """An engine's side of a channel."""

    def __init__(self, start: TrialStart) -> None:
        self._prefix, self._num_asked = Path(start.folder) / start.name, 0
        self._pause = threading.Event()

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the trial in the notebook, and return its result. Raises ValueError if the method does."""
        number = self._send(method, args, kwargs, needs_answer=True)
        path = Path(f"{self._prefix}.{number}.answer")
        deadline = time.monotonic() + timeouts.SEARCH_ANSWER_TIMEOUT_S
        while not path.exists():
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"trial.{method}: the notebook has not answered within {timeouts.SEARCH_ANSWER_TIMEOUT_S:.0f} s"
                )
            self._pause.wait(timeouts.SEARCH_POLL_S)
        answer = json.loads(path.read_text())
        path.unlink()
        if "error" in answer:
            raise ValueError(f"trial.{method}: {answer['error']}")
        return answer["value"]

    def tell(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of the trial in the notebook without waiting for it."""
        self._send(method, args, kwargs, needs_answer=False)

    def _send(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, needs_answer: bool) -> int:
        """Write a question; return its number."""
        question = {"method": method, "args": args, "kwargs": kwargs, "needs_answer": needs_answer}
        replace_file(Path(f"{self._prefix}.{self._num_asked}.question"), json.dumps(question))
        self._num_asked += 1
        return self._num_asked - 1


METHODS = ("suggest_float", "suggest_int", "suggest_categorical", "report", "should_prune", "set_user_attr")
"""Methods of a trial in the notebook that an engine may call."""


class NotebookEnd:
    """The notebook's side of a channel."""

    def __init__(self, start: TrialStart, call: Callable[[str, list[Any], dict[str, Any]], Any]) -> None:
        """`call` calls a method of the trial in the notebook, by name."""
        self._prefix, self._call, self._num_answered = Path(start.folder) / start.name, call, 0

    def answer(self) -> bool:
        """Answer the questions that have arrived; return whether there were any."""
        first = self._num_answered
        while (path := Path(f"{self._prefix}.{self._num_answered}.question")).exists():
            question = json.loads(path.read_text())
            path.unlink()
            answer = run_guarded(lambda: self._compute(question), _describe_error)  # noqa: B023 - called at once
            if question["needs_answer"]:
                replace_file(
                    Path(f"{self._prefix}.{self._num_answered}.answer"), json.dumps(answer, default=_unpack_scalar)
                )
            self._num_answered += 1
        return self._num_answered > first

    def _compute(self, question: dict[str, Any]) -> dict[str, Any]:
        if question["method"] not in METHODS:
            raise ValueError(f"a trial has no method {question['method']!r}")
        return {"value": self._call(question["method"], question["args"], question["kwargs"])}


def _describe_error(error: Exception) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}"}


def _unpack_scalar(value: Any) -> Any:
    """Return the number or truth value of a numpy scalar: some of Optuna's pruners answer with one."""
    if not hasattr(value, "item"):
        raise TypeError(f"a study answered with {name_type(value)}, which can't be sent")
    return value.item()

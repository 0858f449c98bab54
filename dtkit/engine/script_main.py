"""Main program of a fresh process for a function: ``python -m dtkit.engine.script_main CALL RESULT``.

It loads a pickled call from a file, and pickles its result, or the error's text, to another one.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import cloudpickle

from dtkit._util.guard import run_guarded


def main(call_path: str, result_path: str) -> None:
    """Call the function. Exits with 1 after an error. The function may raise SystemExit itself."""
    # unpickles: written by this process's engine
    engine_path, pickled = pickle.loads(Path(call_path).read_bytes())
    sys.path[:] = engine_path  # modules that this path lacks were sent by value
    # unpickles: the same file's second part
    payload: Any = pickle.loads(pickled)
    function, args, kwargs = payload.load()
    succeeded, outcome = run_guarded(lambda: (True, function(*args, **kwargs)), _describe_error)
    Path(result_path).write_bytes(cloudpickle.dumps((succeeded, outcome)))
    sys.exit(not succeeded)


def _describe_error(error: Exception) -> tuple[bool, tuple[str, str, str]]:
    frames = error.__traceback__
    while frames and frames.tb_next and _is_own(frames.tb_frame.f_globals):
        frames = frames.tb_next  # the function's own frames follow
    text = "".join(traceback.format_exception(type(error), error, frames))
    return False, (type(error).__name__, str(error), text)


def _is_own(module_globals: dict[str, Any]) -> bool:
    return module_globals is globals() or str(module_globals.get("__name__")).startswith("dtkit.")


if __name__ == "__main__":
    main(*sys.argv[1:])

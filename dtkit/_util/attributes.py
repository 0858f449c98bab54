"""Errors of misspelled attributes: the name that was meant. IPython doesn't show Python's own suggestions."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, TypeVar

from dtkit._util.arguments import hide_own_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_T = TypeVar("_T")

_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("shutdown", "stop", "terminate", "quit", "exit"), ("close",)),
    **dict.fromkeys(("cancel", "abort", "interrupt", "kill"), ("stop",)),
    **dict.fromkeys(("to_df", "to_dataframe", "df", "dataframe"), ("to_pandas",)),
    **dict.fromkeys(("execute", "apply", "call"), ("run",)),
    "fit": ("train",),
    "scatter": ("partition",),
    "plot": ("figure",),
    "continue_training": ("resume",),
    "num_engines": ("world_size",),
    "ranks": ("world_size",),
}
"""Names of other libraries, with those that mean the same here."""

ELSEWHERE: dict[str, dict[str, str]] = {
    "run": {
        **dict.fromkeys(("loss", "losses", "train_loss"), "run.history.loss()"),
        **dict.fromkeys(("scalar", "scalars", "logs", "log", "logged"), 'run.history.scalar("name")'),
        **dict.fromkeys(("metrics", "evaluations", "val_loss", "validation_loss"), "run.history.evaluations"),
        **dict.fromkeys(("throughput", "speed", "samples_per_s"), "run.history.throughput()"),
        **dict.fromkeys(("df", "dataframe", "to_df", "to_dataframe", "to_pandas"), "run.history.to_pandas()"),
        **dict.fromkeys(("learning_rate", "learning_rates"), "run.lr"),
        **dict.fromkeys(("weights", "state_dict", "parameters"), "run.model.state_dict()"),
        **dict.fromkeys(("steps", "epochs", "config", "settings", "optimizer", "strategy", "batch_size"), "run.spec"),
        **dict.fromkeys(("progress", "state", "summary", "elapsed"), "run.status"),
        **dict.fromkeys(("plot", "show"), "run.figure()"),
        **dict.fromkeys(("events", "errors"), "run.history.events"),
        **dict.fromkeys(("predict", "predictions", "forward"), "run.model"),
    },
    "cluster": dict.fromkeys(("kill", "inject_fault"), 'run.inject_fault("kill", rank)'),
    "dtkit": {
        **dict.fromkeys(("DDP", "DistributedDataParallel"), "dtkit.DataParallel"),
        **dict.fromkeys(("FSDP", "FullyShardedDataParallel", "ZeRO"), "dtkit.Sharded"),
    },
    "history": {
        **dict.fromkeys(("metrics", "val_loss", "validation_loss", "validation"), "history.evaluations"),
        **dict.fromkeys(("train_loss", "losses"), "history.loss()"),
        **dict.fromkeys(("scalars", "logs", "logged"), 'history.scalar("name")'),
        **dict.fromkeys(("lr", "learning_rate", "grad_norm"), "history.to_pandas()"),
    },
}
"""What newcomers look for in an object or the package, and where it is. Errors name these before similar spellings."""


_OTHER_OWNERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dtkit": (
        "cluster",
        ("benchmark", "map", "partition", "plan", "run", "search", "stacks", "submit", "torchrun", "train"),
    )
}
"""Owners, with another object and those of its names that newcomers look for in the owner."""


def describe_missing(owner: str, name: str, names: Sequence[str]) -> str:
    """Return the text of an AttributeError: what was probably meant, or all that there is."""
    if elsewhere := ELSEWHERE.get(owner, {}).get(name):
        return f"{owner} has no attribute {name!r}; did you mean {elsewhere}?"
    anagrams = [known for known in names if sorted(known) == sorted(name)]  # letters in another order
    similar = anagrams or difflib.get_close_matches(name, names, n=1)
    similar = [known for known in _OTHER_NAMES.get(name, ()) if known in names] or similar
    meant = f"{owner}.{similar[0]}" if similar else _find_elsewhere(owner, name)
    hint = f"did you mean {meant}?" if meant else f"it has {', '.join(names)}"
    return f"{owner} has no attribute {name!r}; {hint}"


def _find_elsewhere(owner: str, name: str) -> str | None:
    """Return the name of another object that is similar to this one, as users write it."""
    other, names = _OTHER_OWNERS.get(owner, ("", ()))
    similar = difflib.get_close_matches(name.lower(), names, n=1)
    return f"{other}.{similar[0]}" if similar else None


def suggest_attributes(owner: str) -> Callable[[type[_T]], type[_T]]:
    """Decorate a class so that the error for an unknown attribute names the one that was probably meant.

    `owner` is how users write an object of this class, such as "run".
    """

    def decorate(cls: type[_T]) -> type[_T]:
        @hide_own_frames
        def __getattr__(self: object, name: str) -> Any:  # noqa: N807 - `help` shows the function's name
            """Raise AttributeError, which names the attribute that was probably meant."""
            if name.startswith("_") or hasattr(type(self), name):  # a protocol's look, or a property's own error
                return object.__getattribute__(self, name)
            names = [known for known in dir(self) if not known.startswith("_")]
            # Without a name and an object of its own, Python would add a second suggestion.
            raise AttributeError(describe_missing(owner, name, names), name="", obj=None)

        cls.__getattr__ = __getattr__  # type: ignore[attr-defined]  # Python's hook for names that it did not find
        return cls

    return decorate


def suggest_names(module: str, names: Sequence[str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, whose error for an unknown name suggests one."""

    @hide_own_frames
    def refuse(name: str) -> Any:
        if name.startswith("_"):  # a protocol's look
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise AttributeError(describe_missing(module, name, names), name="", obj=None)

    return refuse

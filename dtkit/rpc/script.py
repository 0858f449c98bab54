"""A script that engines run in a fresh process each, as torchrun would."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtkit.rpc.payload import Payload


@dataclasses.dataclass(frozen=True)
class Script:
    """A file, a module, or a function with its arguments."""

    name: str
    """Path of the file, name of the module, or name of the function."""
    args: tuple[str, ...] = ()
    """Command-line arguments."""
    is_module: bool = False
    folder: str = dataclasses.field(default_factory=os.getcwd)
    """Working directory: the notebook's."""
    payload: Payload | None = None
    """The function and its arguments; None for a file or a module."""
    has_horovod: bool = False
    """Whether ``import horovod`` finds dtkit's implementation."""
    shared_folder: str | None = None
    """Path of the :class:`~dtkit.rpc.script_ranks.ScriptFolder`; None for ranks that never change."""
    slot: int = 0
    """The place of the process in that folder's ranks."""

    @property
    def title(self) -> str:
        """Name to show."""
        return self.name if self.is_module or self.payload is not None else Path(self.name).name


def parse_script(
    main: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_horovod: bool = False
) -> Script | None:
    """Return the script that ``cluster.torchrun(main, *args)`` names by a path or by "-m"; None for a function."""
    if not isinstance(main, (str, os.PathLike)):
        return None
    if kwargs:
        raise TypeError(
            f"{', '.join(kwargs)}: a script takes command-line arguments only. Give them as torchrun takes them: "
            "cluster.torchrun('train.py', '--epochs', 3)"
        )
    arguments = tuple(map(str, args))
    if main == "-m":
        if not arguments:
            raise ValueError("'-m' without a module; name one, as in cluster.torchrun('-m', 'package.train')")
        return Script(arguments[0], arguments[1:], is_module=True, has_horovod=has_horovod)
    path = Path(main).expanduser().absolute()
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; give the path of a script, '-m' and a module, or a function")
    return Script(str(path), arguments, has_horovod=has_horovod)

"""Errors that scripts written for Horovod catch by name."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed, on this rank or on another. `elastic.run` then restores the last commit."""


class MismatchError(HorovodInternalError):
    """The ranks gave different things, such as shapes. TensorFlow's operations raise FailedPreconditionError for it."""


class MeetingError(RuntimeError):
    """The ranks can't form a group any more, however often they try."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """The set of hosts changed. dtkit never raises it: ranks change only with a failed collective."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts changed")
        self.skip_sync = skip_sync


class NotInitializedError(ValueError):
    """A function needs `init` first."""

    def __init__(self) -> None:
        super().__init__(
            "Horovod has not been initialized; call hvd.init() first. A function under cluster.run calls it too: "
            "the engines form a new process group after a failure."
        )

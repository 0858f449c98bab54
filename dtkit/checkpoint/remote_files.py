"""Checkpoints whose folder only the notebook's host sees: ranks' files are fetched from other hosts, and sent there."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any, Protocol

from dtkit._util import files
from dtkit.checkpoint import validation
from dtkit.checkpoint.folders import get_report_filename
from dtkit.errors import CheckpointError, ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

CHUNK_BYTES = 8 * 2**20
"""Bytes of one message: long enough for the network, and short enough that agents answer other calls in between."""


class HostFiles(Protocol):
    """Files of checkpoints on the hosts of ranks, by the token of their checkpoint."""

    def list_sizes(self, rank: int, token: str) -> dict[str, int]:
        """Return {name: bytes} on the host of a rank. Raises ClusterError if the host is gone."""
        ...

    def read(self, rank: int, token: str, name: str, offset: int) -> bytes:
        """Return the next bytes of a file, at most `CHUNK_BYTES`; empty at its end."""
        ...

    def remove(self, token: str) -> None:
        """Delete a checkpoint's files on all hosts, without waiting."""
        ...

    def place(self, folder: Path, names: Sequence[str], token: str, num_ranks: int) -> Mapping[int, str]:
        """Send files to hosts that don't see `folder`. Return the folder to use by rank. Raises ClusterError."""
        ...


def read_remote_report(hosts: HostFiles, rank: int, token: str, folder: Path) -> tuple[dict[str, Any] | None, int]:
    """Return a rank's report after fetching its files into `folder`; None while it writes. Also return the bytes that
    it has written, which grow as long as it does.

    Raises CheckpointError if a file changes on the way, and ClusterError if the host is gone.
    """
    sizes = hosts.list_sizes(rank, token)
    if get_report_filename(rank) not in sizes:
        return None, sum(sizes.values())
    report: dict[str, Any] = json.loads(b"".join(_read_file(hosts, rank, token, get_report_filename(rank))))
    for name, entry in report.get("file", {}).items():
        with (folder / name).open("wb") as file:
            for chunk in _read_file(hosts, rank, token, name):
                file.write(chunk)
        files.sync(folder / name)
        if problem := validation.verify_file(folder / name, entry):
            raise CheckpointError(f"rank {rank}: {problem} after it was fetched")
    return report, sum(sizes.values())


def _read_file(hosts: HostFiles, rank: int, token: str, name: str) -> Iterator[bytes]:
    offset = 0
    while chunk := hosts.read(rank, token, name, offset):
        offset += len(chunk)
        yield chunk


@contextlib.contextmanager
def placed_on_hosts(
    hosts: HostFiles, folder: Path, names: Sequence[str], num_ranks: int
) -> Iterator[Mapping[int, str]]:
    """Send a checkpoint's files to the hosts that don't see its folder, as long as the context lasts.

    Gives the folder of each rank. Raises CheckpointError with the host if it has no room or is gone.
    """
    token = os.urandom(8).hex()
    try:
        try:
            folders = hosts.place(folder, names, token, num_ranks)
        except ClusterError as error:
            raise CheckpointError(f"{folder} could not be sent to all hosts: {error}") from error
        yield folders
    finally:
        hosts.remove(token)

"""A second host on this machine, in Linux namespaces: with its own network, name and shared memory.

The two hosts share a network and a folder, as dtkit requires of several hosts. Temporary files are separate. Creating
the host needs root and the tools ip and unshare.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import ipyparallel as ipp
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "otherhost"
_WAIT_S = 60.0
_NEW_NAMESPACES = ("unshare", "--uts", "--mount", "--fork", "--kill-child", "sh", "-c")


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Two engines, the second of them on the other host."""

    client: ipp.Client
    interface: str
    """Name of the network interface between them, on both hosts."""
    folder: Path
    """Folder that both hosts see."""


@contextlib.contextmanager
def engines_on_two_hosts() -> Iterator[Hosts]:
    """Start the other host and an engine on each host."""
    pid = os.getpid()
    interface, subnet = f"dtkit{pid}"[:15], f"10.{200 + pid % 50}.{pid // 50 % 250}"
    with (
        tempfile.TemporaryDirectory(prefix=".dtkit-hosts-", dir=Path.home()) as profile,
        _network(f"dtkit-{pid}", interface, subnet) as namespace,
        ipp.Cluster(
            n=1,
            profile_dir=profile,
            cluster_id=NAME,
            controller_args=[f"--ip={subnet}.1", f"--location={subnet}.1", "--IPController.enable_curve=True"],
            log_level=50,
        ) as client,
    ):
        client.wait_for_engines(1, timeout=_WAIT_S, interactive=False)
        with _engine(namespace, Path(profile)):
            client.wait_for_engines(2, timeout=_WAIT_S, interactive=False)
            yield Hosts(client, interface, Path(profile))


@contextlib.contextmanager
def _network(namespace: str, interface: str, subnet: str) -> Iterator[str]:
    """Create a virtual cable with one end on this host and one in a namespace, both of the same name."""
    if os.getuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("a second host needs root, ip and unshare")
    if Path(sys.prefix).is_relative_to("/tmp"):
        pytest.skip("a second host would not see this Python, which is in /tmp")
    inside = ("ip", "netns", "exec", namespace)
    try:
        try:
            _run("ip", "netns", "add", namespace)
            _run("ip", "link", "add", interface, "type", "veth", "peer", "name", interface, "netns", namespace)
            for prefix, address in (((), f"{subnet}.1/24"), (inside, f"{subnet}.2/24")):
                _run(*prefix, "ip", "addr", "add", address, "dev", interface)
                _run(*prefix, "ip", "link", "set", interface, "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system refuses a second network: {error.stderr.decode().strip()}")
        yield namespace
    finally:
        for end in (
            ("netns", namespace),
            ("link", interface),
        ):  # the kernel removes the cable with its namespace, but not at once
            subprocess.run(["ip", end[0], "delete", end[1]], capture_output=True, timeout=_WAIT_S, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_WAIT_S)


@contextlib.contextmanager
def _engine(namespace: str, profile: Path) -> Iterator[None]:
    keys = profile / "security" / f"ipcontroller-{NAME}-engine.json"
    start = (
        f"hostname {NAME} && mount -t tmpfs none /dev/shm && mount -t tmpfs none /tmp && "
        f"exec {sys.executable} -m ipyparallel.engine --profile-dir={profile} --file={keys}"
    )
    command = ["ip", "netns", "exec", namespace, *_NEW_NAMESPACES, start]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()  # unshare ignores SIGTERM; its child ends with it
            process.wait(_WAIT_S)

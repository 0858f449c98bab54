"""ipyparallel over IPv6. ZeroMQ uses it only where a socket asks for it, which ipyparallel's sockets don't.

Usage: ``python -m dtkit.cluster.ipv6 MODULE ARGUMENTS...`` runs one of ipyparallel's modules with sockets that do. The
controller runs that way if agents reach it by IPv6 only, and so do the nannies of its engines. The notebook's own
connection to it stays on loopback.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import runpy
import subprocess
import sys
from typing import Any, BinaryIO

import zmq

_CONTROLLER, _NANNY = "ipyparallel.controller", "ipyparallel.engine.nanny"
_COMMAND = [sys.executable, "-m", __name__]


def is_ipv6(address: str) -> bool:
    """Return whether an address, or a URL with one, is of IPv6."""
    return "[" in address or address.count(":") > 1


def strip_brackets(interface: str) -> str:
    """Return the address in ipyparallel's ``tcp://address`` or ``tcp://[address]``."""
    return interface.rpartition("/")[2].strip("[]")


def list_controller_arguments(address: str) -> list[str]:
    """Return arguments by which a controller listens for agents on an address, and for the notebook on loopback."""
    return [f"--IPController.engine_ip=[{address}]", "--IPController.client_ip=127.0.0.1"]


def get_controller_command() -> list[str]:
    """Return the command that starts a controller for IPv6."""
    return [*_COMMAND, _CONTROLLER]


def allow_ipv6() -> None:
    """Let the ZeroMQ sockets of this process use IPv6 for addresses in brackets."""
    for name in ("bind", "connect"):
        setattr(zmq.Socket, name, _allow_for_brackets(getattr(zmq.Socket, name)))


def allow_ipv6_in_engine() -> None:
    """Let the sockets of this process, which becomes an engine, and those of its nanny use IPv6."""
    from dtkit._util.torch_private import START_NANNY, engine_app

    allow_ipv6()
    setattr(engine_app, START_NANNY, _start_nanny)


def _allow_for_brackets(method: Any) -> Any:
    @functools.wraps(method)
    def call(self: zmq.Socket[Any], address: str, *args: Any, **kwargs: Any) -> Any:
        if "[" in address:
            self.setsockopt(zmq.IPV6, 1)
        return method(self, address, *args, **kwargs)

    return call


def _start_nanny(**arguments: Any) -> tuple[str, subprocess.Popen[bytes]]:
    """Start the process that forwards signals to this engine, as ipyparallel does."""
    nanny = subprocess.Popen(
        [*_COMMAND, _NANNY],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # no signals of the terminal
    )
    assert nanny.stdin is not None
    assert nanny.stdout is not None
    with nanny.stdin as pipe:
        pickle.dump({**arguments, "pid": os.getpid()}, pipe)
    url = _read_line(nanny.stdout)
    if not url:
        raise RuntimeError("the engine's nanny has ended before it could report its address")
    return url, nanny


def _read_line(pipe: BinaryIO | Any) -> str:
    return str(pipe.readline().decode().strip())


def main() -> None:
    """Run the module that the command line names."""
    del sys.argv[0]
    multiprocessing.set_start_method("fork")  # the controller's processes have to inherit the sockets' methods
    allow_ipv6()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

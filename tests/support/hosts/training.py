"""A training whose result one process can check, and what a cluster leaves on the hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import dtkit
from tests.support import oracle
from tests.support.hosts.processes import list_commands
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.hosts.network import Network

_END_S = 30.0


def descend(parameters: Any) -> torch.optim.Optimizer:
    """Take small steps: the oracle's own optimizer amplifies rounding from 1e-15 to 1 within 4,000 steps."""
    return torch.optim.SGD(parameters, lr=0.01)


def make_wide_model() -> nn.Module:
    """Return a model of 1.1 MB, which travels in buffers of its own."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(oracle.FEATURES, 360), nn.Tanh(), nn.Linear(360, 360), nn.Linear(360, 3)).double()


def train(
    cluster: dtkit.Cluster, steps: int = oracle.STEPS, model: nn.Module | None = None, **options: Any
) -> dtkit.Run:
    """Start a training of which no step depends on the number of ranks."""
    arguments = {
        "loss": oracle.mean_loss,
        "optimizer": descend,
        "batch_size": oracle.BATCH,
        "seed": oracle.SEED,
        "shuffle": "global",
        "steps": steps,
    }
    return cluster.train(model or oracle.mlp(), cluster.partition(oracle.data()), **arguments | options)


def train_slowly(cluster: dtkit.Cluster, steps: int, **options: Any) -> dtkit.Run:
    """Train at a pace of some 10 ms, so that a test can disturb the run, and one process soon repeats it."""
    run = train(cluster, steps, start=False, **options)
    run.inject_delay(0, 20)
    run.resume()
    return run


def make_mpi(network: Network, ssh_config: Path, hosts: tuple[str, ...], **options: str) -> dtkit.MPI:
    """Return a launcher that reaches these hosts by SSH, with Open MPI's own traffic on the bridge."""
    bridge = network.interface  # of the same name on each host
    settings = [("plm_rsh_args", f"-F {ssh_config}"), ("oob_tcp_if_include", bridge), ("btl_tcp_if_include", bridge)]
    arguments = tuple(word for name, value in settings for word in ("--mca", name, value))
    return dtkit.MPI(hosts=hosts, arguments=arguments, **{"address": network.address} | options)


def assert_exact(run: dtkit.Run, model: nn.Module | None = None) -> None:
    """Check a run that has ended: as many steps in one process lead to the same weights."""
    alone = oracle.train_in_one_process(
        model or oracle.mlp(), oracle.get_global_rows, optimizer=descend, steps=run.status.step
    )
    assert oracle.max_difference(run.model.state_dict(), alone) <= oracle.BOUND


def assert_nothing_left(network: Network) -> None:
    """Wait until no process and no file of a cluster is on any host."""
    wait_until(lambda: not list_commands(network), _END_S)
    for host in (host for host in network.hosts if host.is_on):
        left = host.run("sh", "-c", "ls -d /tmp/*dtkit* /dev/shm/*dtkit* 2>/dev/null", check=False)
        assert left == "", f"{host.name}: {left}"

"""Slurm on the hosts: munged and slurmctld on this machine, and a slurmd with two pretended GPUs on each host."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

from tests.support.hosts.host import COMMAND_S
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.hosts.host import Host
    from tests.support.hosts.network import Network

PROGRAMS = ("munged", "sbatch", "scontrol", "slurmctld", "slurmd", "squeue")
GPUS_PER_HOST = 2
PARTITION = "train"
URGENT = "urgent"
"""Partition whose jobs end those of the other one."""
SLEEP = ("--output=/dev/null", "--wrap", "sleep 600")
"""Options of sbatch for a job that only takes hosts."""


class Slurm:
    """Slurm's commands and daemons of one network."""

    def __init__(self, network: Network) -> None:
        self.network, self.folder = network, network.folder / "slurm"
        self.config = self.folder / "slurm.conf"
        self.environment = os.environ | {"SLURM_CONF": str(self.config)}

    def call(self, *command: str) -> str:
        """Run one of Slurm's commands, and return what it prints."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=COMMAND_S
        )
        if done.returncode:
            log = (self.folder / "slurmctld.log").read_text()[-2000:]
            raise RuntimeError(f"{' '.join(command)}: {done.returncode}, {done.stdout}{done.stderr}; slurmctld:\n{log}")
        return done.stdout

    def list_jobs(self) -> list[str]:
        """Return the ids of jobs that wait, run or end."""
        return self.call("squeue", "--noheader", "--format=%i").split()

    def end_time_now(self, job: str) -> None:
        """Let the time limit of a job be over. Slurm looks for such jobs each 30 s."""
        self.call("scontrol", "update", f"JobId={job}", f"EndTime={time.strftime('%Y-%m-%dT%H:%M:%S')}")

    def shorten(self, job: str) -> None:
        """Leave a job less than a minute."""
        self.call("scontrol", "update", f"JobId={job}", "TimeLimit=1")

    def preempt(self) -> str:
        """Submit a job that needs all hosts and ends those of the other partition. Return its id."""
        job = self.call("sbatch", "--parsable", f"--partition={URGENT}", "--nodes=3", "--exclusive", *SLEEP)
        return job.strip()

    def wait_until_idle(self) -> None:
        """Wait until all hosts can take jobs."""
        nodes = [host.name for host in self.network.hosts]
        wait_until(lambda: self._list_states() == dict.fromkeys(nodes, "idle"))

    def repair(self) -> None:
        """Cancel all jobs, and wait until each host is usable again."""
        if jobs := self.list_jobs():
            self.call("scancel", *jobs)
            wait_until(lambda: not self.list_jobs())
        states = self._list_states()
        if down := [name for name, state in states.items() if state.startswith(("down", "drain"))]:
            with contextlib.suppress(RuntimeError):  # a node that has come back by itself can't be resumed
                self.call("scontrol", "update", f"nodename={','.join(down)}", "state=resume")
        self.wait_until_idle()

    def _list_states(self) -> dict[str, str]:
        """Return the state of each host, or nothing while slurmctld starts."""
        try:
            lines = self.call("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
        except RuntimeError:
            return {}
        return dict(line.split() for line in lines)

    def write_config(self) -> None:
        """Write the files that the daemons read."""
        for name in ("state", "munge"):
            (self.folder / name).mkdir(parents=True, mode=0o700)
        self.config.write_text(self._format_config())
        gpus = f"NodeName=host[1-{len(self.network.hosts)}] Name=gpu File=/dev/tty[10-{9 + GPUS_PER_HOST}]\n"
        (self.folder / "gres.conf").write_text(gpus)  # any device will do: Slurm only counts them
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)

    def _format_config(self) -> str:
        hosts, folder = self.network.hosts, self.folder
        nodes = "\n".join(
            f"NodeName={host.name} NodeAddr={host.address} CPUs=4 RealMemory=8000 Gres=gpu:{GPUS_PER_HOST}"
            for host in hosts
        )
        return f"""\
ClusterName=dtkit
SlurmctldHost={socket.gethostname()}({self.network.address})
CommunicationParameters=NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=10
KillWait=3
MessageTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1,sched_min_interval=0
{nodes}
PartitionName={PARTITION} Nodes=ALL Default=YES MaxTime=1:00:00 State=UP PriorityTier=1
PartitionName={URGENT} Nodes=ALL MaxTime=1:00:00 State=UP PriorityTier=2 PreemptMode=OFF
"""


@contextlib.contextmanager
def start_slurm(network: Network) -> Iterator[Slurm]:
    """Start all daemons, and end them."""
    slurm = Slurm(network)
    slurm.write_config()
    munge, folder = slurm.folder / "munge", slurm.folder
    munged = [
        *("munged", "--foreground", "--force", f"--socket={munge}/socket", f"--key-file={folder}/munge.key"),
        *(f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"),
    ]
    # slurmctld listens on the address of this machine's name, so that name has to mean the bridge.
    rename = f"mount --bind {network.folder}/etc-hosts /etc/hosts && exec slurmctld -D -c -f {slurm.config}"
    slurmctld = ["unshare", "--mount", "sh", "-c", rename]
    with _run_daemon(munged, folder / "munged.out"), _run_daemon(slurmctld, folder / "slurmctld.out"):

        def start_slurmd(host: Host) -> subprocess.Popen[Any]:
            with (folder / f"{host.name}.out").open("a") as log:
                return host.start("slurmd", "-D", "-N", host.name, "-f", str(slurm.config), stdout=log, stderr=log)

        for host in network.hosts:
            host.add_service(start_slurmd)
        slurm.wait_until_idle()
        yield slurm


@contextlib.contextmanager
def _run_daemon(command: list[str], log: Path) -> Iterator[None]:
    with log.open("w") as file:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # a signal to the tests' process group would end it
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

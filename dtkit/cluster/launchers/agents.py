"""Engines on several hosts: a controller here, an agent on each host, and engines that the agents start."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

from dtkit._util import files, timeouts
from dtkit._util.deadline import wait_until
from dtkit.cluster.devices import plan_host_devices
from dtkit.cluster.launchers.agent_link import AgentLink
from dtkit.cluster.launchers.connection_watcher import ConnectionWatcher
from dtkit.cluster.launchers.host_access import HostAccess
from dtkit.cluster.launchers.hosts import AgentRequest, divide_evenly
from dtkit.cluster.launchers.launcher import Launcher
from dtkit.cluster.launchers.registry import restore_launcher
from dtkit.errors import ClusterError, HostLostError
from dtkit.rpc.handshake import check_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dtkit.cluster.config import LaunchConfig
    from dtkit.cluster.launchers.hosts import AgentJob
    from dtkit.rpc.job_end import JobEnd

_HOSTS_FILE = "hosts.json"
_WAVE = 32
"""Engines that start at once. The controller loses registrations when many arrive together."""


class AgentLauncher(Launcher):
    """Starts engines through one agent per host. To ipyparallel, agents are engines too, but they are never ranks."""

    def __init__(self, config: LaunchConfig, folder: Path) -> None:
        super().__init__(config, folder)
        assert config.hosts is not None
        self._host_launcher = restore_launcher(config.hosts)
        self._jobs: list[AgentJob] = []
        self._agents: list[AgentLink] = []
        self._client: Any = None
        self._agent_by_engine: dict[int, AgentLink] = {}
        self._num_engines: dict[str, int] = {}  # by name of the host
        self._started: list[tuple[AgentLink, int]] = []  # (agent, pid) of the engines that started last
        self._access: HostAccess | None = None
        self._watcher: ConnectionWatcher | None = None

    def start_controller(self) -> None:
        """Start the controller on the address that the hosts reach."""
        self.controller_ip = self._host_launcher.get_controller_address()
        super().start_controller()

    # -- agents -----------------------------------------------------------------------------------------------

    def connect_hosts(self, client: Any, num_engines: int) -> LaunchConfig:
        """Start the agents, or find those of a running cluster. Return the configuration with the engines' devices."""
        self._client = client
        self._watcher = ConnectionWatcher(client, lambda: self._agents, self._agent_by_engine)
        self._watcher.start()
        if (self._folder / _HOSTS_FILE).exists():
            self._find_agents()
            return self._config
        hosts = self._host_launcher.list_hosts(num_engines)
        num_agents = self._host_launcher.count_agents(num_engines)
        self._start_and_wait(self._make_request(num_engines, num_agents, tuple(hosts or ())), self._config.timeout)
        names = [agent.info.host for agent in self._agents]
        shares = self._host_launcher.divide_engines(num_engines, names)
        self._num_engines = dict(zip(names, shares, strict=True))
        self._check_reachable()
        self._write_hosts()
        plan = plan_host_devices(
            [(share, agent.info.cores, agent.info.gpus) for share, agent in zip(shares, self._agents, strict=True)],
            self._config.device,
            self._config.plan.threads,
        )
        self._config = dataclasses.replace(self._config, plan=plan)
        return self._config

    def _make_request(self, num_engines: int, num_agents: int, hosts: tuple[str, ...]) -> AgentRequest:
        connection = json.loads(_find_connection_file(self._folder).read_text())
        return AgentRequest(self._folder, connection, num_engines, num_agents, hosts)

    def _start_and_wait(self, request: AgentRequest, timeout: float) -> None:
        known = set(self._client.ids)
        jobs = self._host_launcher.start_agents(request)
        self._jobs += jobs
        try:
            self._wait_for_agents(jobs, known, request.num_agents, timeout)
            came = [AgentLink(self._client, engine) for engine in sorted(set(self._client.ids) - known)]
            self._introduce(came, request.hosts)
        except BaseException:
            for job in jobs:
                job.cancel()
            self._jobs = [job for job in self._jobs if job not in jobs]
            raise

    def _wait_for_agents(self, jobs: Sequence[AgentJob], known: set[int], expected: int, timeout: float) -> None:
        """Wait until all agents have connected. Waiting in a queue has no limit; an interrupt ends it."""
        ends_at = time.monotonic() + timeout

        def have_come() -> bool:
            return len(set(self._client.ids) - known) >= expected

        while not wait_until(have_come, timeouts.JOB_POLL_S):
            states = [job.get_state() for job in jobs]
            if ended := [state.text for state in states if state.phase == "ended"]:
                raise ClusterError("; ".join(ended))
            waiting = [state.text for state in states if state.phase == "waiting"]
            texts = "; ".join(waiting or [state.text for state in states])
            came = len(set(self._client.ids) - known)
            counted = f"{came} of {expected} hosts are here; " if expected > 1 else ""
            (self.on_queue if waiting else self.on_wait)(counted + texts)
            if waiting:
                ends_at = time.monotonic() + timeout
            elif time.monotonic() > ends_at:
                raise ClusterError(
                    f"{came} of {expected} agents connected within {timeout:g} s; give them longer with timeout=. "
                    f"{texts}"
                )

    def _introduce(self, came: list[AgentLink], hosts: Sequence[str] = ()) -> None:
        """Compare versions, then ask each agent for its host."""
        for agent in came:
            check_versions(agent.call("handshake"), "the agent")
        for agent in came:
            agent.info = agent.call("describe", interface=self._config.interface)
            connections = [job for job in self._jobs if job.host == agent.info.host]
            agent.connection = connections[-1] if connections else None
        order = {name: k for k, name in enumerate(self._num_engines or hosts)}
        came.sort(key=lambda agent: (order.get(agent.info.host, len(order)), agent.info.host))
        agents = [agent for agent in self._agents if agent.is_alive] + came
        names = [agent.info.hostname for agent in agents]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            remedy = self._host_launcher.one_agent_remedy
            raise ClusterError(f"two agents run on {', '.join(twice)}, as `hostname` prints there: {remedy}")
        self._agents = agents  # only now: the caller cancels those that are refused

    def _check_reachable(self) -> None:
        """Raise ClusterError with all addresses if a host can't reach the first one."""
        first, *others = self._agents
        if not others:
            return
        place = first.call("open_store", address=first.info.address, generation=0)
        for agent in others:
            reason = agent.call("try_to_reach", address=place.address, port=place.port)
            if reason is not None:
                raise ClusterError(
                    f"{agent.info.host} can't reach {first.info.host} at {place.address} ({reason}). Name the network "
                    f"between the hosts with interface=. {first.info.host} has {first.call('list_addresses')}; "
                    f"{agent.info.host} has {agent.call('list_addresses')}"
                )

    def _find_agents(self) -> None:
        """Find the agents of a cluster that another notebook started."""
        fields = json.loads((self._folder / _HOSTS_FILE).read_text())
        self._jobs = [self._host_launcher.restore_job(job) for job in fields["jobs"]]
        self._num_engines = fields["num_engines"]
        self._introduce([AgentLink(self._client, engine) for engine in fields["agents"] if engine in self._client.ids])
        by_name = {agent.info.hostname: agent for agent in self._agents}
        engines = fields["engines"].items()
        self._agent_by_engine.update({int(key): by_name[name] for key, name in engines if name in by_name})

    def _write_hosts(self) -> None:
        fields = {
            "jobs": [job.to_json() for job in self._jobs],
            "agents": [agent.engine_id for agent in self._agents],
            "engines": {engine: agent.info.hostname for engine, agent in self._agent_by_engine.items()},
            "num_engines": self._num_engines,
        }
        files.replace_file(self._folder / _HOSTS_FILE, json.dumps(fields))

    @property
    def agents(self) -> list[AgentLink]:
        """The agents that answer, in order of rank."""
        return [agent for agent in self._agents if agent.is_alive]

    # -- engines ----------------------------------------------------------------------------------------------

    def start_engines(self, n: int) -> None:
        """Start engines in waves, and wait for them: a controller registers only so many at once."""
        assert self._client is not None
        counts = self._count_engines()
        if self._replace_agents([agent for agent in self._agents if agent not in counts]):
            counts = self._count_engines()
        self._started = []
        order = self._choose_agents(n, counts)
        try:
            for begin in range(0, len(order), _WAVE):
                known = {*self._client.ids}
                wave = order[begin : begin + _WAVE]
                self._start_wave(wave)
                self._wait_for_engines(known, wave)
        except ClusterError:
            for agent, pid in self._started:  # no rank will have them
                agent.send("kill_engines", pids=[pid])
            raise

    def _count_engines(self) -> dict[AgentLink, int]:
        """Return the number of engines of each agent. An agent that doesn't answer is lost, though the controller may
        not know it yet.
        """
        futures = {agent: agent.send("count_engines") for agent in self._agents}
        counts = {}
        for agent, future in futures.items():
            with contextlib.suppress(ClusterError, concurrent.futures.TimeoutError):
                counts[agent] = future.result(timeouts.AGENT_CALL_TIMEOUT_S)
        return counts

    def _choose_agents(self, n: int, counts: Mapping[AgentLink, int]) -> list[AgentLink]:
        """Return the agent of each new engine: hosts that lack engines in order of rank, then all hosts in turn."""
        agents = list(counts)
        if not agents:
            raise ClusterError("no host is left; close this cluster and start another one")
        chosen = []
        for agent in agents:
            missing = self._num_engines.get(agent.info.host, 0) - counts[agent]
            chosen += [agent] * max(0, missing)
        chosen = chosen[:n]
        return chosen + [agents[k % len(agents)] for k in range(n - len(chosen))]

    def _start_wave(self, wave: Sequence[AgentLink]) -> None:
        environment = self._config.plan.make_environment(0, self._config.memory_limit)
        counts = {agent.engine_id: (agent, wave.count(agent)) for agent in wave}
        self._load_engines([agent for agent, _ in counts.values()], environment)
        futures = [
            (agent, agent.send("start_engines", count=count, environment=environment))
            for agent, count in counts.values()
        ]
        for agent, future in futures:
            self._started += [(agent, pid) for pid in agent.wait_for(future, "start_engines")]

    def _load_engines(self, agents: list[AgentLink], environment: Mapping[str, str]) -> None:
        """Wait until each host has loaded what engines need. Meanwhile its agent serves other calls, too."""
        ends_at = time.monotonic() + self._config.timeout
        while agents:
            if time.monotonic() > ends_at:
                raise ClusterError(
                    f"{', '.join(agent.info.host for agent in agents)}: loading torch for the engines took longer than "
                    f"{self._config.timeout:g} s; give it longer with timeout="
                )
            arguments = {"environment": environment, "timeout": timeouts.JOB_POLL_S}
            futures = [(agent, agent.send("load_engines", **arguments)) for agent in agents]
            agents = [agent for agent, future in futures if not agent.wait_for(future, "load_engines")]

    def _wait_for_engines(self, known: set[int], wave: Sequence[AgentLink]) -> None:
        def find_lost() -> list[AgentLink]:
            return [agent for agent in wave if not agent.is_alive]

        def have_come() -> bool:
            return len(set(self._client.ids) - known) >= len(wave)

        wait_until(lambda: have_come() or bool(find_lost()), self._config.timeout)
        if lost := find_lost():
            raise HostLostError(f"{lost[0].info.host} was lost while its engines started")
        if have_come():
            return
        logs = "; ".join(f"{agent.info.host}: {agent.call('read_logs') or 'no log'}" for agent in self.agents)
        raise ClusterError(
            f"{len(set(self._client.ids) - known)} of {len(wave)} engines connected within {self._config.timeout:g} s; "
            f"give them longer with timeout=, or start fewer. Logs end: {logs}"
        )

    def order_engines(self, engine_ids: Sequence[int]) -> list[int]:
        """Return new engines in the order in which they were started, host by host."""
        links = {engine: AgentLink(self._client, engine) for engine in engine_ids}
        identities = {engine: link.send_identify() for engine, link in links.items()}
        places = {(agent.info.hostname, pid): k for k, (agent, pid) in enumerate(self._started)}
        agent_by_name = {agent.info.hostname: agent for agent in self._agents}
        positions: dict[int, int] = {}
        for engine, future in identities.items():
            hostname, pid = links[engine].wait_for(future, "identify")
            if (hostname, pid) in places:
                positions[engine] = places[hostname, pid]
                self._agent_by_engine[engine] = agent_by_name[hostname]
        self._write_hosts()
        return sorted(positions, key=positions.__getitem__)

    def is_agent(self, engine_id: int) -> bool:
        """Return whether this ipyparallel engine is an agent, not a rank."""
        return any(agent.engine_id == engine_id for agent in self._agents)

    def _replace_agents(self, lost: Sequence[AgentLink]) -> bool:
        """Start a new agent on each host that has lost its own. Where a scheduler chooses the hosts, submit a further
        job.

        Return whether any host had.
        """
        if not lost:
            return False
        if len(lost) == len(self._agents):
            self._check_may_continue()
        self._agents = [agent for agent in self._agents if agent not in lost]
        names = tuple(agent.info.host for agent in lost)
        num_engines = sum(self._num_engines.get(name, 0) for name in names)
        chosen_by_user = self._host_launcher.list_hosts(sum(self._num_engines.values())) is not None
        request = self._make_request(num_engines, len(names), names if chosen_by_user else ())
        self._start_and_wait(request, timeouts.NEW_AGENT_TIMEOUT_S)
        self._remove_ended_jobs()
        if not chosen_by_user:
            for name in names:
                self._num_engines.pop(name)
            new = [agent.info.host for agent in self._agents if agent.info.host not in self._num_engines]
            shares = divide_evenly(num_engines, len(new))
            self._num_engines |= dict(zip(new, shares, strict=True))
        self._write_hosts()
        return True

    def _check_may_continue(self) -> None:
        """Raise ClusterError if a scheduler has ended all jobs for good. Only a user may submit others."""
        reasons = [job.explain_end() for job in self._jobs]
        if reasons and all(reasons):
            raise ClusterError(
                f"no host is left: {'; '.join(map(str, reasons))}. Close this cluster, start another one, and go on "
                "there with cluster.train(..., resume_from=) from the last checkpoint"
            )

    def _remove_ended_jobs(self) -> None:
        ended = [job for job in self._jobs if job.get_state().phase == "ended"]
        self._jobs = [job for job in self._jobs if job not in ended]
        for job in ended:
            job.cancel()  # deletes its log

    # -- the cluster ------------------------------------------------------------------------------------------

    def make_host_access(self, get_engine_id: Callable[[int], int]) -> HostAccess:
        """Return the access to the hosts by rank."""
        self._access = HostAccess(
            self._folder, lambda: self.agents, lambda rank: self._agent_by_engine[get_engine_id(rank)]
        )
        self._access.start()
        return self._access

    def list_pids(self) -> list[int]:
        """Return the pids on this host: the controller's, and those of the processes that connect the agents."""
        return super().list_pids() + [pid for job in self._jobs for pid in job.list_pids()]

    def describe_ended_jobs(self) -> str:
        """Return the states of jobs and connections that have ended, such as a canceled job."""
        return "; ".join(filter(None, (job.describe_end() for job in self._jobs)))

    @property
    def has_time_limits(self) -> bool:
        """Whether a scheduler may end jobs at a time that is known before."""
        return self._host_launcher.has_time_limits

    def list_job_ends(self) -> list[JobEnd]:
        """Return when jobs end that have a time limit."""
        return [end for job in self._jobs if (end := job.get_end()) is not None]

    def end_job_early(self, job: str) -> None:
        """End a job, which a further one replaces."""
        for candidate in self._jobs:
            if (end := candidate.get_end()) is not None and end.job == job:
                candidate.end_early()

    def describe_host(self, engine_id: int) -> str:
        """Return the name of an engine's host; empty if it is unknown."""
        agent = self._agent_by_engine.get(engine_id)
        return "" if agent is None else agent.info.host

    def has_lost_host(self, engine_id: int) -> bool:
        """Return whether the agent of an engine is gone, so that the engine has ended or ends at once."""
        agent = self._agent_by_engine.get(engine_id)
        return agent is not None and not agent.is_alive

    def remove_ended_engines(self) -> None:
        """Do nothing: agents forget their engines."""

    def detach(self) -> None:
        """Stop following the hosts' folders and connections."""
        for thread in (self._access, self._watcher):
            if thread is not None:
                thread.close()

    def end_hosts(self) -> None:
        """End agents and engines, with their files, then what started them."""
        self.detach()
        futures = [agent.send("stop") for agent in self._agents] if self._client is not None else []
        deadline = time.monotonic() + timeouts.AGENT_STOP_TIMEOUT_S
        for future in futures:
            with contextlib.suppress(ClusterError, concurrent.futures.TimeoutError):  # it ends by itself if cut off
                future.result(max(0.0, deadline - time.monotonic()))
        for job in self._jobs:
            job.cancel()

    def stop(self) -> None:
        """Leave the processes of this host to the reaper."""


def _find_connection_file(folder: Path) -> Path:
    """Return ipyparallel's file for engines."""
    return folder / "security" / "ipcontroller-dtkit-engine.json"

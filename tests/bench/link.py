"""Strategies over a slow link: two ranks in two network namespaces, joined by a veth pair of 100 Mbit/s.

The namespaces have no names and belong to a process each. The kernel removes them, and the link with them, when the
last process in them ends: nothing is left behind, however the measurement ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dtkit
from tests.bench import ranks
from tests.bench.pairs import Sample, ratios, report
from tests.bench.work import LINK, WORKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dtkit.engine.comm.process_group import Group

RATE = "100mbit"
BLOCKS = 5  # of `steps` steps of each strategy, in turn
INTERFACE = "dtkit0"
PLAIN, HALF, THIN, AVERAGING = "DataParallel()", "compress='fp16'", "compress='powersgd'", "ParameterAveraging(every=8)"
TOOLS = ("ip", "tc", "unshare", "nsenter")


def link() -> bool:
    """Seconds and bytes per step; what was counted as sent, next to what the interface sent."""
    try:
        with shaped() as prefixes:
            found = ranks.together("tests.bench.link:train", prefixes=prefixes, interface=INTERFACE)
    except NoLinkError as reason:
        print(f"skip  a link of {RATE}: {reason}")
        return True
    return _judge(found)


def _judge(found: list[Any]) -> bool:
    blocks = found[0]
    for name, figures in blocks.items():
        seconds, sent = Sample(figures["seconds"]), Sample(figures["sent"])
        print(f"  {name}: {seconds} s, {sent.median / 1e6:.4g} MB a step")
    plain = Sample(blocks[PLAIN]["seconds"])
    met = True
    for name in (THIN, AVERAGING):
        faster = ratios(plain, Sample(blocks[name]["seconds"]))
        met &= report(f"steps per second over {RATE} against plain gradients, {name}", faster, least=4.0)
    # Headers are 66 bytes of each 1514, and what is received is acknowledged by as many now and then.
    rows = [figures for rank in found for figures in rank.values()]
    counted = Sample([a / b for f in rows for a, b in zip(f["interface"], f["sent"], strict=True)])
    return met & report("bytes that the interface sent, to those counted", counted, least=1.0, most=1.07)


# -- the link -----------------------------------------------------------------------------------------------------


class NoLinkError(Exception):
    """This machine does not let us make one."""


def _check_able() -> None:
    if os.geteuid() != 0:
        raise NoLinkError("network namespaces need root")
    if gone := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise NoLinkError(f"no {', '.join(gone)} on this machine (Debian: iproute2, util-linux)")


@contextlib.contextmanager
def shaped() -> Iterator[list[list[str]]]:
    """For each rank the command to start it by, in a namespace of its own at one end of the link."""
    _check_able()
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(_namespace()) for _ in range(ranks.WORLD_SIZE)]
        inside = [["nsenter", f"--net=/proc/{pid}/ns/net"] for pid in holders]
        one, other = map(str, holders)
        _do("ip", "link", "add", INTERFACE, "netns", one, "type", "veth", "peer", "name", INTERFACE, "netns", other)
        for k, enter in enumerate(inside, 1):
            _do(*enter, "ip", "address", "add", f"10.0.0.{k}/30", "dev", INTERFACE)
            _do(*enter, "ip", "link", "set", INTERFACE, "up")
            shape = f"tbf rate {RATE} burst 256kbit latency 100ms".split()
            _do(*enter, "tc", "qdisc", "add", "dev", INTERFACE, "root", *shape)
        yield inside


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """The id of a process that holds a network namespace open. It ends with its standard input, so with us."""
    with subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as holder:
        try:
            own, limit = _namespace_of("self"), time.monotonic() + 10
            while _namespace_of(holder.pid) in (own, None):
                if holder.poll() is not None or time.monotonic() > limit:
                    raise NoLinkError("unshare made no network namespace (a container without the right to?)")
                # sleeps: polls every 10 ms, for at most 10 s, until a process has left the namespace
                time.sleep(0.01)
            yield holder.pid
        finally:
            holder.kill()


def _namespace_of(process: object) -> str | None:
    try:
        return str(Path(f"/proc/{process}/ns/net").readlink())
    except OSError:  # it has ended
        return None


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        raise NoLinkError(f"{' '.join(command)}: {done.stderr.strip()}")


# -- on each rank -------------------------------------------------------------------------------------------------


def train(group: Group) -> dict[str, Any]:
    """Blocks of steps of every strategy in turn: seconds and bytes per step."""
    work = WORKS[LINK]
    strategies = {
        PLAIN: dtkit.DataParallel(),
        HALF: dtkit.DataParallel(compress="fp16"),
        THIN: dtkit.DataParallel(compress="powersgd"),
        AVERAGING: dtkit.ParameterAveraging(every=8),
    }
    jobs = {name: ranks.job(group, work, strategy) for name, strategy in strategies.items()}
    found: dict[str, Any] = {name: {"seconds": [], "sent": [], "interface": []} for name in jobs}
    for made in jobs.values():
        ranks.take(made, work.warm)
    for _ in range(BLOCKS):
        for name, made in jobs.items():
            before = _transmitted(group)
            rows = ranks.take(made, work.steps)
            transmitted = _transmitted(group) - before
            found[name]["seconds"].append(statistics.fmean(rows["step_s"].tolist()))
            found[name]["sent"].append(statistics.fmean(rows["sent_bytes"].tolist()))
            found[name]["interface"].append(transmitted / work.steps)
    return found


def _transmitted(group: Group) -> int:
    """Bytes that this namespace's interface has sent, with nothing on its way."""
    group.barrier()
    group.barrier()  # the others have ended the first one, so what stood in the queue before it has reached them
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise RuntimeError(f"no interface {INTERFACE} here")

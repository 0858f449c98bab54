"""Strategies over a slow link: two ranks in two network namespaces, joined by a veth pair of 100 Mbit/s.

Each namespace belongs to one process and has no name. The system removes it, and the link, when its last process ends,
so that nothing is left however the measurement ends.
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
BLOCKS = 5  # per strategy, in turn
INTERFACE = "dtkit0"
PLAIN, HALF, THIN, AVERAGING = "DataParallel()", "compress='fp16'", "compress='powersgd'", "ParameterAveraging(every=8)"
TOOLS = ("ip", "tc", "unshare", "nsenter")


def link() -> bool:
    """Measure seconds and bytes per step, and compare the counted bytes with those of the interface."""
    try:
        with create_link() as prefixes:
            blocks_by_rank = ranks.run_on_two_ranks("tests.bench.link:train", prefixes=prefixes, interface=INTERFACE)
    except NoLinkError as error:
        print(f"skip  a link of {RATE}: {error}")
        return True
    return _report(blocks_by_rank)


def _report(blocks_by_rank: list[Any]) -> bool:
    blocks = blocks_by_rank[0]
    for name, figures in blocks.items():
        seconds, sent = Sample(figures["seconds"]), Sample(figures["sent"])
        print(f"  {name}: {seconds} s, {sent.median / 1e6:.4g} MB a step")
    plain = Sample(blocks[PLAIN]["seconds"])
    met = True
    for name in (THIN, AVERAGING):
        faster = ratios(plain, Sample(blocks[name]["seconds"]))
        met &= report(f"steps per second over {RATE} against plain gradients, {name}", faster, least=4.0)
    # Of each 1514 bytes 66 are headers, and received packets are acknowledged.
    rows = [figures for rank in blocks_by_rank for figures in rank.values()]
    counted = Sample([a / b for f in rows for a, b in zip(f["interface"], f["sent"], strict=True)])
    return met & report("bytes that the interface sent, to those counted", counted, least=1.0, most=1.07)


# -- the link -----------------------------------------------------------------------------------------------------


class NoLinkError(Exception):
    """This machine can't create the link."""


def _check_possible() -> None:
    if os.geteuid() != 0:
        raise NoLinkError("network namespaces need root")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise NoLinkError(f"no {', '.join(missing)} on this machine (Debian: iproute2, util-linux)")


@contextlib.contextmanager
def create_link() -> Iterator[list[list[str]]]:
    """Create the link, and return the command prefix that starts each rank at its end."""
    _check_possible()
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(_namespace()) for _ in range(ranks.WORLD_SIZE)]
        inside = [["nsenter", f"--net=/proc/{pid}/ns/net"] for pid in holders]
        first, second = map(str, holders)
        _run("ip", "link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        for k, enter in enumerate(inside, 1):
            _run(*enter, "ip", "address", "add", f"10.0.0.{k}/30", "dev", INTERFACE)
            _run(*enter, "ip", "link", "set", INTERFACE, "up")
            shape = f"tbf rate {RATE} burst 256kbit latency 100ms".split()
            _run(*enter, "tc", "qdisc", "add", "dev", INTERFACE, "root", *shape)
        yield inside


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """Return the id of a process that keeps a network namespace. It ends when this process closes its input."""
    with subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as holder:
        try:
            own, limit = _read_namespace("self"), time.monotonic() + 10
            while _read_namespace(holder.pid) in (own, None):
                if holder.poll() is not None or time.monotonic() > limit:
                    raise NoLinkError("unshare made no network namespace (does the container allow it?)")
                # sleeps: polls every 10 ms, for at most 10 s, until the process is in its new namespace
                time.sleep(0.01)
            yield holder.pid
        finally:
            holder.kill()


def _read_namespace(process: object) -> str | None:
    try:
        return str(Path(f"/proc/{process}/ns/net").readlink())
    except OSError:  # it has ended
        return None


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        raise NoLinkError(f"{' '.join(command)}: {done.stderr.strip()}")


# -- on each rank -------------------------------------------------------------------------------------------------


def train(group: Group) -> dict[str, Any]:
    """Take blocks of steps of each strategy in turn, and return the seconds and bytes per step."""
    work = WORKS[LINK]
    strategies = {
        PLAIN: dtkit.DataParallel(),
        HALF: dtkit.DataParallel(compress="fp16"),
        THIN: dtkit.DataParallel(compress="powersgd"),
        AVERAGING: dtkit.ParameterAveraging(every=8),
    }
    jobs = {name: ranks.make_job(group, work, strategy) for name, strategy in strategies.items()}
    figures: dict[str, Any] = {name: {"seconds": [], "sent": [], "interface": []} for name in jobs}
    for job in jobs.values():
        ranks.take_steps(job, work.warm)
    for _ in range(BLOCKS):
        for name, job in jobs.items():
            before = _read_transmitted_bytes(group)
            rows = ranks.take_steps(job, work.steps)
            transmitted = _read_transmitted_bytes(group) - before
            figures[name]["seconds"].append(statistics.fmean(rows["step_s"].tolist()))
            figures[name]["sent"].append(statistics.fmean(rows["sent_bytes"].tolist()))
            figures[name]["interface"].append(transmitted / work.steps)
    return figures


def _read_transmitted_bytes(group: Group) -> int:
    """Return the bytes that this namespace's interface has sent, once nothing is in transit."""
    group.barrier()
    group.barrier()  # the first barrier ended, so earlier bytes have arrived
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise RuntimeError(f"this namespace has no interface {INTERFACE}")

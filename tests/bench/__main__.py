"""`make bench`: measure dtkit's targets on this machine. Arguments select single parts."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import dtkit
from tests.bench import (
    balance,
    browser,
    bubble,
    cluster,
    compiled,
    dashboard,
    gpu,
    growth,
    keras,
    link,
    losses,
    notebooks,
    overhead,
    plan,
    recovery,
    saving,
    scalars,
    scale,
    speed,
    step,
    strategies,
    trackers,
    traditional,
    verify,
)

if TYPE_CHECKING:
    from collections.abc import Callable

PARTS: dict[str, Callable[[], bool]] = {
    "start": cluster.start,
    "share": cluster.share,
    "verify": verify.verify,
    "plan": plan.plan,
    "step": step.step,
    "throughput": speed.throughput,
    "comm": speed.comm,
    "compiled": compiled.compiled,
    "strategies": strategies.strategies,
    "link": link.link,
    "balance": balance.balance,
    "bubble": bubble.bubble,
    "dashboard": dashboard.dashboard,
    "browser-short": browser.browser_short,
    "browser-long": browser.browser_long,
    "phases": overhead.phases,
    "fingerprint": overhead.fingerprint,
    "stream": overhead.stream,
    "bulk": cluster.bulk,
    "dispatches": cluster.dispatches,
    "exact": cluster.exact,
    "gpu": gpu.gpu,
    "growth": growth.growth,
    "scale": scale.scale,
    "keras": keras.keras,
    "forests": traditional.forests,
    "xgboost": traditional.xgboost,
    "scalars": scalars.scalars,
    "trackers": trackers.trackers,
    "saving": saving.saving,
    "recovery": recovery.recovery,
    "recovery-sizes": recovery.recovery_by_size,
    "detection": recovery.detection,
    "losses": losses.losses,
    "notebooks": notebooks.notebooks,
}


def main(names: list[str]) -> int:
    """Run the parts, and return exit status 1 for a missed target and 2 for an unknown part."""
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"no part {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
        return 2
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}, Python {sys.version.split()[0]}, dtkit {dtkit.__version__}")
    met = [PARTS[name]() for name in names or PARTS]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Settings of a started cluster."""

from __future__ import annotations

import dataclasses
from typing import Any

from dtkit._util import timeouts
from dtkit._util.notebook import in_notebook
from dtkit.cluster.devices import DevicePlan


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """How to start engines, and how long they live."""

    launcher: str
    plan: DevicePlan
    timeout: float
    memory_limit: int | None = None
    lease: float | None = None
    spares: int = 0
    """Engines that are started too, and wait to replace a lost one."""
    keep_alive: bool = False
    """Whether engines outlive a script."""
    hosts: dict[str, Any] | None = None
    """Launcher for several hosts, as its `to_json` describes it; None for a launcher by name."""
    device: str = "auto"
    """Device that the user asked for; the hosts choose among those they have."""
    interface: str | None = None

    def __post_init__(self) -> None:
        spares = self.spares
        if isinstance(spares, bool) or not isinstance(spares, int) or spares < 0:
            raise ValueError(f"spares={spares!r}; it is the number of spare engines to start. Use an integer from 0 up")

    @property
    def lease_s(self) -> float:
        """Seconds that engines live without a notebook."""
        return timeouts.LEASE_S if self.lease is None else self.lease

    @property
    def job_lease_s(self) -> float:
        """Seconds that engines with a job live without a notebook. After a script nobody is there to attach."""
        default_s = timeouts.JOB_LEASE_S if in_notebook() else timeouts.LEASE_S
        return default_s if self.lease is None else self.lease

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> LaunchConfig:
        """Restore a configuration that `dataclasses.asdict` and JSON converted."""
        plan = DevicePlan(**{**fields["plan"], "devices": tuple(fields["plan"]["devices"])})
        return cls(**{**fields, "plan": plan})

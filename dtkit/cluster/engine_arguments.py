"""Command line of ipyparallel's engine, for those that dtkit starts itself."""

from __future__ import annotations

from dtkit._util import timeouts


def make_engine_arguments(max_silence_s: float, heartbeat_period_s: float) -> list[str]:
    """Return arguments: the engine waits for a busy controller, and ends after so many seconds without a heartbeat."""
    max_misses = round(max_silence_s / (heartbeat_period_s + timeouts.HEARTBEAT_CHECK_DELAY_S))
    return [
        f"--IPEngine.timeout={timeouts.REGISTRATION_TIMEOUT_S:.0f}",
        f"--IPEngine.max_heartbeat_misses={max_misses}",
        "--log-level=30",
    ]

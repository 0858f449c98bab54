"""Numbers with units, for people."""

from __future__ import annotations

import re

_FACTORS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def bytes_text(count: float) -> str:
    """1234567 -> "1.2 MB"; powers of a thousand."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def time_text(seconds: float) -> str:
    """0.119 -> "119 ms"; 75 -> "1 min 15 s"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def parse_bytes(value: int | str) -> int:
    """Bytes from a number or from text: "600MB", "1.5 GiB"."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", str(value), re.IGNORECASE)
    if not match or float(match[1]) == 0:
        raise ValueError(
            f"{value!r} is no amount of memory; write a positive number of bytes, or text such as '600MB'"
        )
    return int(float(match[1]) * _FACTORS[(match[2] or "").lower()])

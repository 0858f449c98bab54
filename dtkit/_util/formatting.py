"""Numbers as text, the same in every view (``4,258 samples/s``, ``119 ms``, ``1.2 GB``), and aligned columns."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

UNKNOWN = "—"
"""Text of a number that is not known."""


def _format_significant(value: float) -> str:
    """Return `value` with three significant digits and grouped thousands, never in exponent form.

    A number from 100 to a million has all its digits before the point.
    """
    rounded = float(f"{value:.3g}")
    magnitude = math.floor(math.log10(abs(rounded))) if value else 0  # 99.96 has that of 100
    if magnitude >= 6:
        return f"{rounded:,.0f}"
    return f"{value:,.{max(0, 2 - magnitude)}f}"


def format_rate(value: float | None) -> str:
    """Return samples per second without the unit: ``4,258``, ``12.5``, ``0.31``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else _format_significant(value)


def format_loss(value: float | None) -> str:
    """Return a loss or a metric, as ``number`` of the live view: ``0.503``, ``12.3``, ``1.2e-5``; also ``NaN``."""
    if value is None:
        return UNKNOWN
    if math.isnan(value):
        return "NaN"
    if math.isinf(value) or value == 0:
        return f"{value:g}"
    if not 1e-4 <= abs(value) < 1e7:
        return _format_exponent(value, 2)
    return f"{value:.2g}" if abs(value) < 1e-3 else _format_significant(value)


_MIN_PLAIN_LOSS = 1e-6


def format_losses(values: Sequence[float | None]) -> list[str]:
    """Return losses of one column in one form: small ones have no power of ten where others have none."""
    texts = [format_loss(value) for value in values]
    if all("e" in text for text in texts if text[-1].isdigit()):
        return texts
    return [_spell_out(value) if "e-" in text else text for value, text in zip(values, texts, strict=True)]


def _spell_out(value: float | None) -> str:
    """Return a small number such as ``0.000027`` unless that has too many zeros to be read."""
    if value is None or abs(value) < _MIN_PLAIN_LOSS:
        return format_loss(value)
    return f"{float(f'{value:.2g}'):.7f}".rstrip("0")


def _format_exponent(value: float, digits: int) -> str:
    """Return a number with `digits` significant digits and a power of ten, as the live view does: ``1.46e-6``."""
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


_MAX_PLAIN_RATE_CHARS = 9  # 0.00000146 can't be read at a glance


def format_learning_rate(value: Any) -> str:
    """Return a learning rate, as ``shortRate`` of the live view: ``0.1``, ``0.00005``, ``1.46e-6``."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return f"{value:g}"
    short = float(f"{value:.4g}")
    plain = f"{short:.15f}".rstrip("0").rstrip(".")
    if value < 1e5 and len(plain) <= _MAX_PLAIN_RATE_CHARS and float(plain) == short:
        return plain if short < 1e3 else f"{short:,.10g}"
    return _format_exponent(short, 4)


def format_duration(seconds: float | None) -> str:
    """Return a time: ``350 µs``, ``1.5 ms``, ``119 ms``, ``1.24 s``, ``43 s``, ``2 min 5 s``, ``1 h 3 min``."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds <= 0:
        return "0 s"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 9.95e-3 else f"{seconds * 1e3:.1f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    return _format_long_duration(round(seconds))


def shorten_tick(text: str) -> str:
    """Return the label of an axis without trailing zeros: ``8 s`` for ``8.00 s``, ``0.2`` for ``0.200``."""
    return re.sub(r"\.(\d*?)0+(?=\D*$)", lambda match: f".{match[1]}" if match[1] else "", text)


def format_tick(value: float) -> str:
    """Return a number of an axis, as ``tick`` of the live view: ``0.1``, ``1,500``, ``30k``, ``2.5M``, ``2e-5``."""
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-3:
        return _format_exponent(value, 3)
    if size >= 1e6:
        return f"{float(f'{value / 1e6:.3g}'):g}M"
    return f"{float(f'{value / 1e3:.3g}'):g}k" if size >= 1e4 else f"{value:,.6g}"


def format_time_tick(seconds: float) -> str:
    """Return a time on an axis, in one unit, as ``shortTime`` of the live view: ``30 s``, ``2.5 min``, ``3 h``."""
    if seconds < 60 or (seconds < 120 and seconds % 30):
        return f"{seconds:.3g} s" if seconds else "0"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def format_clock(seconds: float) -> str:
    """Return an elapsed time in whole seconds: ``7 s``, ``2 min 5 s``, ``1 h 3 min``."""
    return _format_long_duration(max(0, int(seconds)))


def format_elapsed(seconds: float | None) -> str:
    """Return how long a run took, the same in every view: ``4.2 s``, ``43 s``, ``2 min 5 s``, ``1 h 3 min``.

    It is rounded down, as a clock shows it: a view that counts does not jump back when the run ends.
    """
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    return f"{int(10 * seconds) / 10:.1f} s" if 0.1 <= seconds < 10 else format_clock(seconds)


def format_run_time(seconds: float) -> str:
    """Return how long a run took, as :func:`format_elapsed`, but also of one that took no tenth of a second."""
    return format_duration(seconds) if 0 < seconds < 0.1 else format_elapsed(seconds)


def format_status(
    state: str, step: int, steps: int, epoch: int, elapsed_s: float, remaining_s: float | None, message: str
) -> str:
    """Return a run's status: ``running, step 31 of 400, epoch 1, 3.1 s elapsed, 12 s left``.

    `epoch` counts from 1. The remaining seconds and the message are left out where there are none.
    """
    parts = [state, f"step {step:,} of {steps:,}", f"epoch {epoch:,}", f"{format_elapsed(elapsed_s)} elapsed"]
    if remaining_s is not None and state in ("running", "paused", "pending"):
        parts.append(f"{format_clock(remaining_s)} left")
    return ", ".join(parts) + (f": {message}" if message else "")


def _format_long_duration(seconds_total: int) -> str:
    """Return whole seconds in their two largest units."""
    minutes, seconds = divmod(seconds_total, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def format_bytes(num_bytes: float | None) -> str:
    """Return bytes in decimal units with up to three digits: ``512 B``, ``4.63 MB``, ``37 MB``, ``1.2 GB``.

    Fewer digits would distort the ratio of two sizes.
    """
    if num_bytes is None or not math.isfinite(num_bytes):
        return UNKNOWN
    if abs(num_bytes) < 999.5:
        return f"{num_bytes:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        num_bytes /= 1000
        if abs(num_bytes) < 999.5:
            return f"{num_bytes:.3g} {unit}"
    return f"{num_bytes:,.0f} TB"


BYTE_UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
"""Units of an axis of bytes, the smallest first."""

SECOND_UNITS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}
"""Units of an axis of seconds, the smallest first."""


def choose_unit(largest: float, units: Mapping[str, float]) -> tuple[str, float]:
    """Return (name, size) of the largest unit that `largest` reaches, so that an axis has short numbers."""
    fitting = [item for item in units.items() if item[1] <= largest]
    return fitting[-1] if fitting else next(iter(units.items()))


def format_percent(fraction: float | None) -> str:
    """Return a part of 1 as a percentage: ``34 %``, ``0.4 %``, ``0 %``."""
    if fraction is None or not math.isfinite(fraction):
        return UNKNOWN
    percent = 100 * fraction
    return f"{percent:.1f} %" if 0.05 <= percent < 0.95 else f"{percent:.0f} %"


def format_count(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 node``, ``4 nodes``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def name_nodes(text: str) -> str:
    """Return a text about ranks with the word node, which pictures, their tables and the log use."""
    return re.sub(r"\b([Rr])ank(s?)\b", lambda found: ("N" if found[1] == "R" else "n") + f"ode{found[2]}", text)


def name_nodes_at_start(text: str) -> str:
    """Return the first line of an error as views show it: only "rank 1" at its start is dtkit's word."""
    return re.sub(r"^(Traceback of )?rank(s?)(?= \d)", r"\1node\2", text.partition("\n")[0])


def sanitize_text(text: str, max_chars: int = 300) -> str:
    """Return text of an engine, safe to show: one line without control characters, of at most `max_chars`."""
    clean = "".join(c if c.isprintable() else " " for c in text[: 2 * max_chars]).strip()
    return clean if len(clean) <= max_chars else clean[: max_chars - 1] + "…"


def format_columns(rows: Sequence[Sequence[str]], left_aligned: Collection[int] = ()) -> list[str]:
    """Return rows as lines, with columns two spaces apart and aligned to the right, or to the left if listed."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if k in left_aligned else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


_BYTE_FACTORS = {
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


def parse_bytes(value: int | str) -> int:
    """Return bytes from a number or from text such as "600MB" or "1.5 GiB"."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", str(value), re.IGNORECASE)
    count = int(float(match[1]) * _BYTE_FACTORS[(match[2] or "").lower()]) if match else 0
    if count < 1:
        raise ValueError(
            f"{value!r} is not an amount of memory; write a positive number of bytes, or text such as '600MB'"
        )
    return count


def name_type(value: object) -> str:
    """Return the name of a value's type with its article, such as ``a list`` or ``an int``."""
    if value is None:
        return "None"
    name = type(value).__name__
    is_spelled = name[:2].isupper()  # as SGD is, or LSTM
    return f"{'an' if name[0] in ('AEFHILMNORSX' if is_spelled else 'aeiouAEIOU') else 'a'} {name}"

"""Format numbers, with only as many digits as their noise justifies."""

import math

MINUS = "\N{MINUS SIGN}"


def rate(value: float | None, noise: float | None = None) -> str | None:
    """Format tokens per second: from 100 on without decimals, below that with three digits. Digits that are smaller than
    the second digit of `noise` become zeros.
    """
    if value is None or not math.isfinite(value):
        return None if value is None else str(value)
    if noise and math.isfinite(noise):
        unit = 10.0 ** (math.floor(math.log10(abs(noise))) - 1)
        value = round(value / unit) * unit
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def with_error(value: float | None, error: float | None, digits: int) -> str | None:
    """Format a mean with its standard error, both rounded to the second significant digit of the error. Without an
    error, format the mean with `digits` decimals.
    """
    if value is None or error is None or not math.isfinite(error):
        return None if value is None else f"{value:,.{digits}f}"
    digits = min(max(1 - math.floor(math.log10(error)), 0), 6) if error else digits
    return f"{value:,.{digits}f} \N{PLUS-MINUS SIGN} {error:,.{digits}f}"


def percent(fraction: float | None, digits: int = 2) -> str | None:
    """Format a difference as a signed percentage. It is truncated as in the paper, so that it never exceeds what was
    measured.
    """
    value = truncated_percent(fraction, digits)
    return None if value is None else f"{'+' if value >= 0 else MINUS}{abs(value):.{digits}f} %"


def digits_of(noise: float | None) -> int:
    """Return how many decimals of a percentage are meaningful, given its noise as a fraction; at most two."""
    if not noise or not math.isfinite(noise):
        return 2
    return min(max(-math.floor(math.log10(100 * noise)), 0), 2)


def truncated_percent(fraction: float | None, digits: int = 2) -> float | None:
    """Convert a fraction to a percentage, truncated to `digits` decimals."""
    if fraction is None or not math.isfinite(fraction * 1e4):
        return None
    return math.floor(round(fraction * 100 * 10**digits, 6)) / 10**digits

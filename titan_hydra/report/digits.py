"""Numbers as text: no more digits than their noise leaves."""
from __future__ import annotations

import math

MINUS = "\N{MINUS SIGN}"


def rate(value: float | None, noise: float | None = None) -> str | None:
    """Tokens per second: whole, or three digits of what is less than 100; no more digits than two of the noise."""
    if value is None or not math.isfinite(value):
        return None if value is None else str(value)
    if noise and math.isfinite(noise):
        unit = 10.0 ** (math.floor(math.log10(abs(noise))) - 1)
        value = round(value / unit) * unit
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def with_error(value: float | None, error: float | None, digits: int) -> str | None:
    """A mean and its standard error, to the second digit of the error; `digits` behind the point where there is none."""
    if value is None or error is None or not math.isfinite(error):
        return None if value is None else f"{value:,.{digits}f}"
    digits = min(max(1 - math.floor(math.log10(error)), 0), 6) if error else digits
    return f"{value:,.{digits}f} \N{PLUS-MINUS SIGN} {error:,.{digits}f}"


def percent(fraction: float | None, digits: int = 2) -> str | None:
    """A difference with its sign, cut after some digits and not rounded: never more than was measured, as the paper does."""
    value = cut(fraction, digits)
    return None if value is None else f"{'+' if value >= 0 else MINUS}{abs(value):.{digits}f} %"


def digits_of(noise: float | None) -> int:
    """Digits of a percentage behind the point that its noise, a fraction, does not touch; two at most."""
    if not noise or not math.isfinite(noise):
        return 2
    return min(max(-math.floor(math.log10(100 * noise)), 0), 2)


def cut(fraction: float | None, digits: int = 2) -> float | None:
    """A fraction as a percentage, cut downwards."""
    if fraction is None or not math.isfinite(fraction * 1e4):
        return None
    return math.floor(round(fraction * 100 * 10 ** digits, 6)) / 10 ** digits

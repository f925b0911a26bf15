"""Numbers, sizes, durations and times as people read them."""

import time

UNKNOWN = "-"


def or_dash(value: float | None, form: str = "") -> str:
    """Format a number; a dash if it is not known."""
    return UNKNOWN if value is None else format(value, form)


def brief(number: float) -> str:
    """Return a number with three digits and K, M, B or T."""
    for unit, sign in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= 0.9995 * unit:
            return f"{number / unit:.3g}{sign}" if number < 999.5 * unit else f"{number / unit:.0f}{sign}"
    return f"{number:.3g}"


def in_bytes(size: float) -> str:
    """Return a number of bytes with the unit that suits it: 512 B, 3.46 MiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size:,.0f} B"


def lasting(seconds: float) -> str:
    """Return a duration with three digits, in the unit that suits it."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.3g} {name}"
    return f"{seconds:,.3g} s"


def on_a_clock(seconds: float | None) -> str:
    """Return a duration to the second: 0:43, 12:05, 3:20:00, 2d 04:10; a dash if it is not known."""
    if seconds is None:
        return UNKNOWN
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def time_of_day(moment: float | None = None) -> str:
    """Return a moment, or the present, as 14:05:30."""
    return time.strftime("%H:%M:%S", time.localtime(moment))


def ago(moment: float) -> str:
    """Return a moment as 14:05 if it is on this day, else with the date."""
    then, now = time.localtime(moment), time.localtime()
    if then[:3] == now[:3]:
        return time.strftime("%H:%M", then)
    return time.strftime("%b %d %H:%M" if then[0] == now[0] else "%Y-%m-%d", then)

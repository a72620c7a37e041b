"""Numbers as a reader wants them: times, memory in powers of two, traffic in powers of ten."""

_MEMORY_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_TRAFFIC_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def duration_text(seconds: float) -> str:
    """Write a duration with three digits.

    >>> duration_text(0.0204), duration_text(3.5), duration_text(4.2e-5)
    ('20.4 ms', '3.5 s', '0.042 ms')
    """
    if abs(seconds) >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"


def memory_text(num_bytes: float) -> str:
    """Write an amount of memory in powers of two.

    >>> memory_text(3 * 2**30), memory_text(1.5 * 2**20), memory_text(12)
    ('3 GiB', '1.5 MiB', '12 B')
    """
    return _in_units(num_bytes, _MEMORY_UNITS)


def traffic_text(num_bytes: float) -> str:
    """Write an amount of traffic in powers of ten.

    >>> traffic_text(1_200_000), traffic_text(999)
    ('1.2 MB', '999 B')
    """
    return _in_units(num_bytes, _TRAFFIC_UNITS)


def memory_unit(num_bytes: float) -> tuple[str, int]:
    """The unit an axis up to `num_bytes` is read in, and its size in bytes.

    >>> memory_unit(5 * 2**20)
    ('MiB', 1048576)
    """
    return next(((name, size) for name, size in _MEMORY_UNITS if num_bytes >= size), ("B", 1))


def time_unit(span_s: float) -> tuple[str, float]:
    """The unit a time axis of this length is read in, and how many of it make a second.

    >>> time_unit(0.4), time_unit(30.0)
    (('ms', 1000.0), ('s', 1.0))
    """
    return ("s", 1.0) if span_s >= 10 else ("ms", 1e3)


def percent_text(fraction: float) -> str:
    """Write a fraction as a percentage.

    >>> percent_text(3 / 11)
    '27.3 %'
    """
    return f"{fraction * 100:.1f} %"


def _in_units(num_bytes: float, units: tuple[tuple[str, int], ...]) -> str:
    for name, size in units:
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.4g} {name}"
    return f"{num_bytes:.0f} B"

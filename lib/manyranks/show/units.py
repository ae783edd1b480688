"""Bytes, seconds, FLOPs and rates as people read them. Below show/, measure.fingerprints.size writes bytes."""

_SIZES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_FLOPS = ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"))
_TIMES = ((365.25 * 86400, "years"), (86400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs"))


def size(n: float) -> str:
    """Writes 1500 as "1.5 kB"; powers of ten."""
    return _scaled(n, _SIZES, "B")


def rate(per_second: float) -> str:
    """Writes 5e10 as "50 GB/s"."""
    return f"{size(per_second)}/s"


def flops(count: float) -> str:
    """Writes 7.2e10 as "72 GFLOP"."""
    return _scaled(count, _FLOPS, "FLOP")


def flop_rate(per_second: float) -> str:
    """Writes 9.89e14 as "989 TFLOP/s"."""
    return f"{flops(per_second)}/s"


def duration(seconds: float) -> str:
    """Writes 0.0032 as "3.2 ms"."""
    return _scaled(seconds, _TIMES, "ns", 1e-9)


def _scaled(value: float, units: tuple, smallest: str, base: float = 1.0) -> str:
    for unit, name in units:
        if abs(value) >= unit * 0.9995:
            return f"{short(value / unit)} {name}"
    return f"{short(value / base)} {smallest}"


def short(value: float) -> str:
    """Writes 1234.5 as "1,234", 0.12345 as "0.123": three significant digits, without zeros that say nothing."""
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def three(value: float) -> str:
    """A number with three digits that count, and never with an exponent: 1,020."""
    return f"{float(f'{value:.3g}'):,.15g}"


def percent(share: float) -> str:
    """Writes 0.318 as "32%", 0.0318 as "3.2%"."""
    return f"{100 * share:.1f}%" if 0.0005 <= share < 0.0995 else f"{100 * share:,.0f}%"


def count(number: float) -> str:
    """Writes 7.64e9 as "7.64B", as papers write the parameters of a model."""
    return size(number).removesuffix("B").replace("G", "B").replace(" ", "")

"""Measures what this machine can do: FLOP/s of matrix products by size and dtype, and bytes/s of its memory."""

import time

import torch

from manyranks.measure import timing

_PROBE = 0.3  # seconds to find out how busy it is
SIZES = (512, 1024, 2048)
LARGE = (2048, 4096, 8192)  # an accelerator's best product is larger than a core's
_ENOUGH, _MOST = 0.01, 1000  # a product is timed so often at once: for so many seconds, or that many calls


def matmul_rate(
    size: int | tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    repeats: int = 5,
) -> float:
    """FLOP/s of one product of m × k with k × n, the median of some repetitions. size: one number, or (m, k, n).

    The factors are random: with zeros or ones a GPU draws less power, and may be faster than with real numbers.
    Raises ValueError for other sizes, and for dtypes that are not floating-point: a complex product has other FLOPs.
    """
    sides = size if isinstance(size, tuple | list) else (size,) * 3
    if len(sides) != 3 or not all(isinstance(side, int) and side >= 1 for side in sides):
        raise ValueError(f"size={size!r}: give one whole number, or three, (m, k, n), each 1 or more")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype!r}: give a floating-point one of torch, as torch.bfloat16")
    m, k, n = sides
    random = torch.Generator(device).manual_seed(0)  # a new one: the caller's goes on as before
    first, second = (torch.randn(shape, generator=random, device=device).to(dtype) for shape in ((m, k), (k, n)))
    out = torch.empty(m, n, dtype=dtype, device=device)

    def products(times: int) -> None:
        for _ in range(times):
            torch.mm(first, second, out=out)

    once = timing.seconds(products, 1, repeats=1, warmup=1, device=device).median
    times = max(1, min(_MOST, round(_ENOUGH / once)))  # else the clock would be a part of what is timed
    return times * 2 * m * k * n / timing.seconds(products, times, repeats=repeats, warmup=0, device=device).median


def peak(
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    sizes: tuple[int, ...] | None = None,
) -> float:
    """FLOP/s of the best square product of a few large sizes: what this device achieves, not what a data sheet says.

    Raises ValueError for no sizes, and as matmul_rate does.
    """
    chosen = (SIZES if torch.device(device).type == "cpu" else LARGE) if sizes is None else sizes
    if not chosen:
        raise ValueError("sizes=(): give one size or more, or leave it out")
    return max(matmul_rate(size, dtype, device) for size in chosen)


def memory_bandwidth(bytes: int = 2**27, device: torch.device | str = "cpu", repeats: int = 5) -> float:
    """Bytes/s of y = 2·x, read and written, for an x of that many bytes: far more than the caches hold.

    Raises ValueError for fewer than 4 bytes, one number, and for what is no whole number.
    """
    if not isinstance(bytes, int) or bytes < 4:
        allowed = "a whole number from 4 up, the size of one number; more than the caches hold to time memory"
        raise ValueError(f"bytes={bytes!r}: give {allowed}")
    x = torch.ones(bytes // 4, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / timing.seconds(torch.mul, x, 2, out=y, repeats=repeats, device=device).median


def slowness() -> float:
    """The seconds that a second of computing takes: 1 on a machine that does nothing else."""
    started, used = time.monotonic(), time.thread_time()
    while time.thread_time() - used < _PROBE:
        pass
    return (time.monotonic() - started) / _PROBE

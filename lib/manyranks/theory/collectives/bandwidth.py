"""Rates of a measured collective, by the convention of nccl-tests."""

from collections.abc import Callable

from manyranks.theory.collectives import checks


def algorithm_bandwidth(bytes: float, seconds: float) -> float:
    """Bytes of the whole tensor a second, as in sent_bytes; nccl-tests' algbw.

    Raises ValueError for a size below 0 or a time that is not above 0. Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    if not (bytes >= 0 and seconds > 0):
        raise ValueError(f"bytes={bytes}, seconds={seconds}: the size must not be negative, the time must be above 0")
    return bytes / seconds


def bus_bandwidth(op: str, bytes: float, seconds: float, n: int) -> float:
    """Bytes/s that a rank's link carries if it does no more than the operation needs; nccl-tests' busbw.

    It can be compared with the link's bandwidth for any n. Of one rank, 0 for the operations that then move nothing.
    Raises ValueError for an unknown operation, n below 1, and as algorithm_bandwidth.
    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md; for gather and scatter src/gather.cu and src/scatter.cu.
    """
    checks.operation(_FACTORS, op)
    if n < 1:
        raise ValueError(f"n={n}: a group has at least 1 rank")
    return algorithm_bandwidth(bytes, seconds) * _FACTORS[op](n)


def least_bytes(op: str, bytes: float, n: int) -> float:
    """Bytes that the rank which sends most cannot do without; `bytes`: as in sent_bytes.

    Those of bus_bandwidth's busiest link, but for gather: its busiest is the link into the root, which sends nothing, while
    every other rank has to send its chunk.
    """
    if n == 1:
        return 0.0
    return bytes / n if op == "gather" else bus_bandwidth(op, bytes, 1.0, n)


def _all_but_own(n: int) -> float:
    return (n - 1) / n


_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": _all_but_own,
    "all_gather": _all_but_own,
    "reduce": lambda n: 1.0,
    "broadcast": lambda n: 1.0,
    "scatter": _all_but_own,
    "gather": _all_but_own,
    "all_to_all": _all_but_own,
}

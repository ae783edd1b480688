"""Accelerators and the links between them: the numbers that decide how a model is split."""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from manyranks.theory import tables
from manyranks.theory.names import Named, lazily, one_of

GB, TB, TFLOPS = 1e9, 1e12, 1e12


@dataclass(frozen=True)
class Accelerator:
    """A chip. Bandwidths are in bytes/s, of links one way; 0 where unknown.

    flops, flops_fp8, flops_fp4: dense FLOP/s in bfloat16 (V100: float16), in 8 and in 4 bits
    memory: bytes
    matmul_fraction: the share of `flops` that the best large matrix product reaches
    processors: that compute tiles of a product (NVIDIA: streaming multiprocessors)
    watts: its limit
    """

    name: str
    flops: float
    memory: float
    memory_bandwidth: float
    scale_up: float  # to its neighbors: NVLink, or all the links of a torus
    nic: float  # its share of the network between nodes
    source: str = field(repr=False)
    flops_fp8: float = 0.0
    matmul_fraction: float = 1.0
    specials: float = 0.0  # exponentials a second
    ampere: float = 1.0  # share of the peak that an A100's instructions reach; 0: nobody uses them here
    processors: int = 0
    reuse: float = 1.0  # multiplications that a product has to do with each number from the cache to be as fast as the peak
    tf32: float = 0.5  # rate of 32-bit products ÷ flops
    flops_fp4: float = 0.0
    watts: float = 0.0

    def __post_init__(self):
        for name in _NUMBERS:
            value = getattr(self, name)
            least = "above 0" if name in _ABOVE_0 else "0 or more"
            if type(value) not in (int, float) or not (value > 0 if name in _ABOVE_0 else value >= 0):
                raise ValueError(f"{name}={value!r} of accelerator {self.name!r}: give a number, {least}")
        if self.matmul_fraction > MOST or self.ampere > 1:
            both = f"matmul_fraction={self.matmul_fraction:.3g}, ampere={self.ampere:.3g}"
            raise ValueError(
                f"accelerator {self.name!r}: {both} are shares of its {self.flops:.3g} FLOP/s, {MOST} and 1 at most"
            )

    @property
    def scaled(self) -> bool:
        """Returns whether products read a scale with each block of numbers, as MXFP8 and NVFP4 need. Chips with 4 bits do."""
        return self.flops_fp4 > self.flops


_NUMBERS = tuple(field.name for field in fields(Accelerator) if field.type in (int, float))
_ABOVE_0 = ("flops", "memory", "memory_bandwidth", "matmul_fraction", "reuse", "tf32")
MOST = 1.2  # a clock above the one that the data sheet counts with


@dataclass(frozen=True)
class Link:
    """A way between two ranks.

    latency: α, seconds
    bandwidth: β, bytes/s one way
    """

    name: str
    latency: float
    bandwidth: float
    source: str = field(default="", repr=False)

    def __post_init__(self):
        numbers = type(self.latency) in (int, float) and type(self.bandwidth) in (int, float)
        if not (numbers and self.latency >= 0 and self.bandwidth > 0):
            given = f"latency={self.latency}, bandwidth={self.bandwidth}"
            raise ValueError(f"link {self.name!r}: {given}: a latency is 0 s or more, a bandwidth above 0 bytes/s")

    def seconds(self, n: float) -> float:
        """T(n) = α + n/β for a message of n bytes. Raises ValueError for a negative size."""
        if n < 0:
            raise ValueError(f"n={n}: a message has 0 bytes or more")
        return self.latency + n / self.bandwidth

    @property
    def half_bandwidth_bytes(self) -> float:
        """The size αβ at which latency and transfer take the same time, so that half of β is reached."""
        return self.latency * self.bandwidth


def fit_link(name: str, sizes: Sequence[float], seconds: Sequence[float]) -> Link:
    """The α and β that fit measured times best, by least squares of the relative error.

    sizes in bytes, seconds for one message. Raises ValueError for fewer than two different sizes, a time that is not
    positive, or times that do not grow with the size.
    """
    if len(set(sizes)) < 2 or len(sizes) != len(seconds):
        given = f"{len(sizes)} sizes, {len(set(sizes))} of them different, and {len(seconds)} times"
        raise ValueError(f"{given}: give one time for each size, and two different sizes or more")
    if min(seconds) <= 0:
        raise ValueError(f"a time of {min(seconds)} s: times must be above 0")
    # Minimize Σ ((α + n/β)/t − 1)², linear in α and 1/β.
    ones = [1 / t for t in seconds]
    slopes = [n / t for n, t in zip(sizes, seconds, strict=True)]
    aa, ab, bb = _dot(ones, ones), _dot(ones, slopes), _dot(slopes, slopes)
    determinant = aa * bb - ab * ab
    latency = (sum(ones) * bb - sum(slopes) * ab) / determinant
    inverse = (aa * sum(slopes) - ab * sum(ones)) / determinant
    if inverse <= 0:
        raise ValueError("the times do not grow with the size: measure larger messages")
    return Link(name, max(latency, 0.0), 1 / inverse, "fitted")


def torus_bisection(dims: Sequence[int], link: float) -> float:
    """Bytes/s that cross the middle of a torus, one way: two faces, for the ring closes, with one link a chip each."""
    return 2 * math.prod(dims) / max(dims) * link


def fat_tree_bisection(chips: int, nic: float) -> float:
    """Bytes/s that cross the middle of a fat tree that is not oversubscribed, one way: half the chips send."""
    return chips / 2 * nic


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


# accelerators.csv, flops_per_exponential: FLOPs of a matrix product in the time of one exponential. The processors' special
# function units do 16 a cycle in every generation, twice as many in Blackwell Ultra, their tensor cores twice the FLOPs of the
# last. H100: 989 against 3.9 TFLOP/s, arXiv 2407.08608, section 3.2. Its processors are those of NVIDIA's white papers and data
# sheets.
# With an A100's instructions an H100 reaches 0.54 of its peak: then FlashAttention-2 runs at 35 % of it, forward and backward
# together, as arXiv 2407.08608 says. Later chips are taken to run them as fast as an H100 does.
_HOPPER, _AMPERE = 989 * TFLOPS, 0.54
# An A100's cache gives each processor 5,120 ÷ 108 bytes a clock, in which it multiplies 1,024 pairs of 2-byte numbers (NVIDIA's
# white paper). A V100 multiplies half as many. An H100 multiplies twice as many, and two of its processors share half of what
# they read. Later chips are taken to be like it.
_REUSE, _SHARED = 1024 * 2 / (5120 / 108), 3 / 4


@functools.cache
def _accelerators() -> Named:
    shares: dict[str, list[float]] = {}
    for row in tables.rows("max_achievable_matmul"):
        shares.setdefault(row["device"], []).append(float(row["efficiency_pct"]) / 100)
    measured = {device: statistics.mean(each) for device, each in shares.items()}  # of two sources the mean
    chips = (_accelerator(row, measured) for row in tables.rows("accelerators"))
    return Named("accelerator", {chip.name: chip for chip in chips})


def _accelerator(row: dict[str, str], measured: dict[str, float]) -> Accelerator:
    def number(column: str, unit: float) -> float:
        return float(row[column] or 0) * unit

    name, flops, fp8 = row["device"], number("bf16_dense_tflops", TFLOPS), tables.value(row["fp8"])
    new = (name, "float4") in _peaks()  # Blackwell and later have special kernels in every stack
    # A chip that nobody measured is taken to reach what the median of the measured ones does.
    reached = measured.get(row["matmul_measured_on"] or name, statistics.median(measured.values()))
    return Accelerator(
        name,
        flops,
        number("hbm_GB", GB),
        number("hbm_TBps", TB),
        number("scaleup_unidir_GBps_per_device", GB),
        number("typical_nic_GBps_per_device", GB),
        row["source"],
        _peaks().get((name, "float8"), flops * (2 if fp8 else 1)),
        reached,
        flops / float(row["flops_per_exponential"]) if row["flops_per_exponential"] else 0.0,
        (0.0 if new else min(1.0, _AMPERE * _HOPPER / flops)) if fp8 else 1.0,
        int(row["processors"] or 0),
        _REUSE * (2 * _SHARED if fp8 else 0.5 if name.startswith("V100") else 1),
        flops_fp4=_peaks().get((name, "float4"), 0.0),
        watts=number("watts", 1),
    )


DTYPES = ("bfloat16", "float16", "float8", "float4", "tf32", "float32", "float64")


def of_device(name: str) -> Accelerator | None:
    """The accelerator that torch.cuda.get_device_name() calls so; None for one whose figures are not in the table.

    Names are compared whole: an "NVIDIA H100 NVL", or a slice of an H100, is another device than the "NVIDIA H100 PCIe".
    """
    if not isinstance(name, str):
        raise ValueError(f"name={name!r}: give the text that torch.cuda.get_device_name() returns")
    said = name.strip().removeprefix("NVIDIA ").removeprefix("Tesla ")
    named = {row["torch_name"]: row["device"] for row in tables.rows("accelerators") if row["torch_name"]}
    return _accelerators()[named[said]] if said in named else None


def peak(accelerator: Accelerator, dtype: str) -> float | None:
    """Dense FLOP/s of matrix products in one of DTYPES, as the data sheet has it; None where no figure is confirmed.

    "float32" is true single precision, which torch uses for float32 matrices on CUDA unless TF32 is allowed; "float64"
    is the matrix cores' rate. Source of each figure: tables/peaks.csv, and the accelerator's own. Raises ValueError
    for other names, and for what is no Accelerator.
    """
    if not isinstance(accelerator, Accelerator):
        raise ValueError(f"accelerator={accelerator!r}: give an Accelerator, as theory.accelerators['H100 SXM']")
    one_of(DTYPES, dtype=dtype)
    chip, flops = accelerator.name, accelerator.flops
    if dtype in ("bfloat16", "float16"):  # as fast as each other, but a V100 lacks the first and a TPU the second
        return None if chip.startswith("V100" if dtype == "bfloat16" else "TPU") else flops
    if dtype == "float8":
        return accelerator.flops_fp8 if accelerator.flops_fp8 > flops else None
    return accelerator.flops_fp4 or None if dtype == "float4" else _peaks().get((chip, dtype))


@functools.cache
def _peaks() -> dict[tuple[str, str], float]:
    return {(row["device"], row["dtype"]): float(row["tflops"]) * TFLOPS for row in tables.rows("peaks")}


# α: a hop of a ring in NCCL's own cost model (src/graph/tuning.cc, hwLat, protocol Simple, the one for large messages).
_NCCL = "α: NCCL src/graph/tuning.cc, hwLat of a ring, Simple"


@functools.cache
def _links() -> Named:
    chips = _accelerators()
    links = (
        Link("NVLink, B200", 3.4e-6, chips["B200 (HGX)"].scale_up, _NCCL),
        Link("NVLink, H100", 3.4e-6, chips["H100 SXM"].scale_up, _NCCL),
        Link("NVLink, A100", 3.4e-6, chips["A100-80GB SXM"].scale_up, _NCCL),
        Link("PCIe 5.0 x16", 5.7e-6, 64 * GB, _NCCL + "; β: PCI-SIG, 32 GT/s × 16 lanes"),
        Link("PCIe 4.0 x16", 5.7e-6, 32 * GB, _NCCL + "; β: PCI-SIG, 16 GT/s × 16 lanes"),
        Link("InfiniBand 400G", 14e-6, chips["H100 SXM"].nic, _NCCL),
        Link("InfiniBand 200G", 14e-6, chips["A100-80GB SXM"].nic, _NCCL),
    )
    return Named("link", {link.name: link for link in links})


__getattr__ = lazily(__name__, accelerators=_accelerators, links=_links)

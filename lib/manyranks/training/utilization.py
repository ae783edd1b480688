"""The share of the ranks' FLOP/s that a training run has used: MFU and HFU."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from manyranks.measure import machine
from manyranks.parallel.collectives.messages import Group
from manyranks.theory import flops, hardware
from manyranks.theory.architecture import ModelShape


@dataclass(frozen=True)
class Peak:
    """FLOP/s of matrix products in one dtype.

    source: whose data sheet, or how it was measured
    """

    flops: float
    device: str
    dtype: str
    source: str


@dataclass(frozen=True)
class Utilization:
    """A run of a model: tokens_per_second and peak count all ranks together.

    seq: tokens of a sequence
    recompute: "none", "selective" or "full"
    flash: whether attention computes its scores again in backward, as scaled_dot_product_attention
        does without dropout
    """

    shape: ModelShape
    seq: int
    tokens_per_second: float
    peak: Peak
    recompute: str = "none"
    flash: bool = True

    def mfu(self, convention: str = "causal") -> float:
        """The FLOPs that the model needs ÷ those that the ranks can do, under a convention
        of theory.flops.CONVENTIONS. Raises ValueError for an unknown one, and as flops.mfu
        does.
        """
        return flops.mfu(**self._run, convention=convention)

    def hfu(self, convention: str = "causal") -> float:
        """Does as mfu, and counts what is computed a second time."""
        how = {"recompute": self.recompute, "flash": self.flash}
        return flops.hfu(**self._run, **how, convention=convention)

    @property
    def _run(self) -> dict[str, object]:
        """The run as of one device that has the peak of all ranks."""
        each = {"shape": self.shape, "seq": self.seq, "peak": self.peak.flops, "gpus": 1}
        return each | {"tokens_per_second": self.tokens_per_second}


def peak(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Peak:
    """Returns a device's peak, from a data sheet if there is one, else measured; it says which.

    A float32 product on a GPU is one of TF32 where torch.backends allows that.
    """
    name, kind = _name(device), _kind(device, dtype)
    chip = hardware.of_device(name)
    if chip and (found := hardware.peak(chip, kind)):
        return Peak(found, name, kind, f"data sheet of {chip.name}")
    measured = machine.peak(dtype, device)
    return Peak(measured, name, kind, "measured: the best of a few large products")


def peak_of_ranks(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    group: Group = None,
) -> Peak:
    """Returns the peak of all ranks of the group together, as each of them calls it.

    They measure at the same time, because ranks on one machine share its cores.
    """
    if not dist.is_initialized():
        return peak(device, dtype)
    dist.barrier(group)
    mine = peak(device, dtype)
    each = torch.zeros(dist.get_world_size(group), dtype=torch.float64, device=device)
    each[dist.get_rank(group)] = mine.flops
    dist.all_reduce(each, group=group)
    return Peak(each.sum().item(), f"{len(each)} × {mine.device}", mine.dtype, mine.source)


def _name(device: torch.device | str) -> str:
    device, threads = torch.device(device), torch.get_num_threads()
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return (
        f"CPU with {threads} thread{'s' if threads > 1 else ''}"
        if device.type == "cpu"
        else str(device)
    )


def _kind(device: torch.device | str, dtype: torch.dtype) -> str:
    on_gpu = torch.device(device).type == "cuda"
    # Not allow_tf32, which raises where TF32 was allowed by this newer setting.
    if on_gpu and dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return str(dtype).removeprefix("torch.").partition("_")[0]  # a float8 is one of several

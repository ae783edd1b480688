"""What chapter 09's explorer shows of a setting: the roof of its chip, the model's parts under it, a step's time, its use."""

import functools
from typing import NamedTuple

from manyranks.show.tensor_explorer import SMALL
from manyranks.theory import ModelShape, Plan, clusters, flops, hardware, kernels, memory, models, roofline, step
from manyranks.theory.cluster import Cluster
from manyranks.theory.names import Named, nearest
from manyranks.theory.roofline import Part, Roof

# name -> the most ranks that share its experts
_DENSE = ("small GPT", "gpt2", "gpt2-xl", "llama3.2-1b", "llama3-8b", "megatron-22b", "llama3-70b", "gpt3-175b", "llama3-405b")
MODELS = Named("model", dict.fromkeys((*_DENSE, "palm-540b"), 1) | {"mixtral-8x7b": 8, "deepseek-v3": 64})
CLUSTERS = ("laptop", "v100-dgx", "a100-dgx", "h100-dgx", "h200-dgx", "b200-dgx", "gb200-nvl72", "mi300x", "h800")
CLUSTERS += ("tpu-v4", "tpu-v5p", "tpu-v6e")
PRECISIONS = ("bf16", "fp8", "fp32")
SEQUENCES, LENGTHS = [2**k for k in range(8)], [2**k for k in range(7, 18)]
TENSOR, DATA = [2**k for k in range(4)], [2**k for k in range(11)]
RECOMPUTE = ("none", "selective", "full")
FLASH = Named("flash attention", {"on": True, "off": False})
CONVENTIONS = tuple(flops.CONVENTIONS)


class Setting(NamedTuple):
    """What the controls say: every one of tp·dp GPUs takes b sequences of s tokens a step; states are sharded (ZeRO-3)."""

    model: str
    cluster: str
    precision: str
    b: int
    s: int
    recompute: str
    flash: str
    tp: int
    dp: int
    convention: str

    @property
    def shape(self) -> ModelShape:
        return SMALL if self.model == SMALL.name else models[self.model]

    @property
    def on(self) -> Cluster:
        return clusters[self.cluster]

    @property
    def gpus(self) -> int:
        return self.tp * self.dp

    @property
    def ep(self) -> int:
        """Ranks that share the experts: as many as there are, up to a number that goes with the model."""
        return min(self.dp, MODELS[self.model])

    @property
    def plan(self) -> Plan:
        more = {"recompute": self.recompute, "flash": FLASH[self.flash], "precision": self.precision, "zero": 3}
        return Plan(dp=self.dp, tp=self.tp, ep=self.ep, seq=self.s, microbatch=self.b, **more)

    @property
    def roof(self) -> Roof:
        """Of matrix products in this precision."""
        chip = self.on.accelerator
        return Roof(kernels.peak(chip, self.precision), chip.memory_bandwidth)

    def step(self) -> step.StepTime:
        """Raises ValueError for degrees that the model does not allow."""
        return _step(self.shape, self.plan, self.on)

    def budget(self) -> dict[str, float]:
        """Seconds of a step by what they are spent on, as theory.roofline.time_budget."""
        return _budget(self.shape, self.plan, self.on)

    def parts(self) -> list[Part]:
        """What a GPU computes in a step; their seconds are the step's computing."""
        return _parts(self.shape, self.plan, self.on)

    def peak(self) -> memory.Peak:
        return _peak(self.shape, self.plan)

    @property
    def fits(self) -> bool:
        return self.peak().total <= self.on.accelerator.memory

    @property
    def possible(self) -> bool:
        """Whether model and chip allow it."""
        try:
            self.check()
        except ValueError:
            return False
        return True

    def check(self) -> None:
        """Raises ValueError for a name that there is not, and for what the model or the chip does not allow."""
        known = {"model": MODELS, "cluster": CLUSTERS, "precision": PRECISIONS, "convention": CONVENTIONS}
        for what, names in known.items():
            if (value := getattr(self, what)) not in names:
                raise ValueError(f"{what} {value!r}: {nearest(value, names)}")
        self._check_precision()
        positions = self.shape.positions
        if 0 < positions < self.s:
            raise ValueError(f"{self.model} has learned positions for {positions:,} tokens, not for {self.s:,}: lower s")
        self.plan.check(self.shape)

    def _check_precision(self) -> None:
        chip = self.on.accelerator
        if self.precision == "fp8" and chip.flops_fp8 <= chip.flops:
            raise ValueError(f"{chip.name} multiplies no faster in 8 bits: take bf16")
        if self.precision == "fp32" and chip.name in hardware.accelerators and not hardware.peak(chip, "tf32"):
            raise ValueError(f"{chip.name} has no confirmed peak in TF32, in which fp32 is multiplied here: take bf16")

    @property
    def mfu(self) -> float:
        """Under the convention, of the peak in this precision."""
        return flops.mfu(*self._run, self.convention)

    @property
    def hfu(self) -> float:
        flash = FLASH[self.flash]
        # Flash attention keeps no scores, so that selective recomputation has no core to run again.
        again = "none" if flash and self.recompute == "selective" else self.recompute
        return flops.hfu(*self._run, again, self.convention, flash)

    @property
    def _run(self) -> tuple:
        return self.shape, self.s, self.step().tokens_per_second, self.gpus, self.roof.peak


@functools.lru_cache(maxsize=16384)
def _step(shape: ModelShape, plan: Plan, on: Cluster) -> step.StepTime:
    return step.estimate(shape, plan, on)


@functools.lru_cache(maxsize=16384)
def _budget(shape: ModelShape, plan: Plan, on: Cluster) -> dict[str, float]:
    return roofline.time_budget(shape, plan, on)


@functools.lru_cache(maxsize=16384)
def _parts(shape: ModelShape, plan: Plan, on: Cluster) -> list[Part]:
    return roofline.parts(shape, plan, on)


@functools.lru_cache(maxsize=16384)
def _peak(shape: ModelShape, plan: Plan) -> memory.Peak:
    return memory.peak(shape, plan)

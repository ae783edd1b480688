"""What the plan board of chapter 10 shows of a setting: a plan, its step and its memory, where its axes lie, the best plans."""

import functools
from typing import NamedTuple

from manyranks.show.nd_axes import Reach
from manyranks.show.tensor_explorer import SMALL
from manyranks.theory import ModelShape, Plan, clusters, memory, models, pipeline, planner, step
from manyranks.theory.cluster import Cluster
from manyranks.theory.names import nearest
from manyranks.theory.planner import Found

MODELS = ("small GPT", "llama3.2-1b", "llama3-8b", "yi-34b", "llama3-70b", "gpt3-175b", "llama3-405b")
MODELS += ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2", "deepseek-v3")
# Trained so: arXiv 2412.19437, section 3.3; 2407.21783, section 3.3.2 (126 layers and two more places on a pipeline's stages).
EIGHT_BITS, EMBEDDING_SLOTS = ("deepseek-v3",), ("llama3-405b",)
CLUSTERS = ("laptop", "v100-dgx", "a100-dgx", "h100-dgx", "h800", "b200-dgx", "gb200-nvl72", "tpu-v5p", "tpu-v6e")
GPUS, BATCHES, LENGTHS = ([2**k for k in powers] for powers in (range(15), range(3, 15), range(7, 18)))
TENSOR, CONTEXT, PIPELINE, EXPERT = ([2**k for k in range(count)] for count in (6, 8, 7, 9))
ALL = 0  # data-parallel ranks
SHARDS = (ALL, *(2**k for k in range(1, 12)))
MICROBATCHES, VIRTUAL = (1, 2, 4, 8), (1, 2, 3, 4, 5, 6, 8)
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zb-v", "dualpipe")
ZERO, RECOMPUTE = (0, 1, 2, 3), ("none", "selective", "full")
BEST = 4  # plans of the planner's that are shown
# What the planner tries here: values of the controls alone, and fewer where there are experts, so that it takes seconds.
_TRIED = {"tp": TENSOR[:5], "pp": PIPELINE, "microbatch": (1, 2, 4), "virtual": (1, 2, 4, 8)}
_WITH_EXPERTS = {"tp": TENSOR[:4], "pp": PIPELINE[:5], "ep": EXPERT[1:], "microbatch": (1, 2), "virtual": (1,)}
_WITH_EXPERTS |= {"schedule": ("1f1b", "dualpipe"), "recompute": ("none", "selective")}


class Task(NamedTuple):
    """What is to be trained, and on what, however it is split."""

    model: str
    cluster: str
    gpus: int
    batch: int
    seq: int

    @property
    def shape(self) -> ModelShape:
        return SMALL if self.model == SMALL.name else models[self.model]

    @property
    def on(self) -> Cluster:
        return clusters[self.cluster]

    @property
    def given(self) -> dict[str, object]:
        """Fields of Plan that are as the model was trained; bf16 where the chip multiplies no faster in 8 bits."""
        chip = self.on.accelerator
        precision = "fp8" if self.model in EIGHT_BITS and chip.flops_fp8 > chip.flops else "bf16"
        return {"precision": precision, "embedding_slots": self.model in EMBEDDING_SLOTS}

    def check(self) -> None:
        """Raises ValueError for a name that there is not, more GPUs than the cluster can have, and too long a sequence."""
        for what, value, known in (("model", self.model, MODELS), ("cluster", self.cluster, CLUSTERS)):
            if value not in known:
                raise ValueError(f"{what} {value!r}: {nearest(value, known)}")
        if self.gpus > (most := self.on.levels[-1].size):
            raise ValueError(f"{self.gpus:,} GPUs: {self.cluster} ends at {most:,}; take no more than these")
        if 0 < self.shape.positions < self.seq:
            raise ValueError(f"{self.model} has learned positions for {self.shape.positions:,} tokens: lower the sequence")

    def best(self) -> tuple[Found, ...]:
        """The planner's plans, the fastest first, only one for each TP, PP and EP; takes seconds the first time."""
        return _best(self)


class Setting(NamedTuple):
    """What the controls say; dp follows from the number of GPUs."""

    task: Task
    tp: int
    cp: int
    pp: int
    ep: int
    dp_shard: int
    microbatch: int
    schedule: str
    virtual: int
    zero: int
    recompute: str

    @property
    def dp(self) -> int:
        """Raises ValueError where the other degrees need another number of GPUs."""
        dp, left = divmod(self.task.gpus, others := self.tp * self.cp * self.pp)
        if left or not dp:
            product = f"TP {self.tp} × CP {self.cp} × PP {self.pp} = {others:,}"
            there, needed = (f"{n:,} GPU{'s' * (n > 1)}" for n in (self.task.gpus, others))
            raise ValueError(f"{product} on {there}: lower one of the three, or take {needed} or more")
        return dp

    @property
    def plan(self) -> Plan:
        """Raises ValueError, in Plan's words, for values that do not go together."""
        task, dp = self.task, self.dp
        if task.batch < dp * self.microbatch:
            each = f"{dp:,} DP ranks × {self.microbatch}" if self.microbatch > 1 else f"{dp:,} DP ranks"
            lower = "a smaller micro-batch, " * (self.microbatch > 1) + "a larger batch, fewer GPUs, or more TP, CP or PP"
            raise ValueError(f"a batch of {task.batch:,} sequences for {each}: some would get none; take {lower}")
        return _plan(self)

    def check(self) -> None:
        """Raises ValueError for what cannot be, in words of the controls or of the plan."""
        self.task.check()
        self.plan.check(self.task.shape)
        m, p = self.plan.microbatches, self.pp
        more = f"raise the batch, or lower PP or DP (with more TP or CP){' or the micro-batch' * (self.microbatch > 1)}"
        if p > 1 and m < (least := pipeline.fewest(self.schedule, p)):
            raise ValueError(
                f"{m} micro-batches for {self.schedule} on PP {p}, which needs {least} or more: {more}, or take 1f1b"
            )
        if p > 1 and self.virtual > 1 and m % p:
            raise ValueError(
                f"{m} micro-batches on PP {p} with v = {self.virtual}, which takes multiples of {p}: {more}, or v = 1"
            )

    @property
    def possible(self) -> bool:
        try:
            self.check()
        except ValueError:
            return False
        return True

    def step(self) -> step.StepTime:
        return _step(self.task.shape, self.plan, self.task.on)

    def peak(self) -> memory.Peak:
        return _peak(self.task.shape, self.plan)

    def memory(self) -> dict[str, int]:
        """Bytes of the fullest GPU by what they are for; their sum is the peak."""
        shape, plan, peak = self.task.shape, self.plan, self.peak()
        each = (memory.states_of(held, plan) for held in set(memory.rank_parameters(shape, plan)))
        states = next(
            one for one in each if one.total == peak.states
        )  # the rank with the most of these may have fewer activations
        named = {"parameters": states.parameters, "gradients": states.gradients, "optimizer": states.optimizer}
        return named | {"activations": peak.activations, "buffers": peak.buffers}

    @property
    def fits(self) -> bool:
        return self.peak().total <= self.task.on.accelerator.memory

    def reaches(self) -> list[Reach]:
        """Of TP, CP, DP, PP, EP and the shards of ZeRO, as the mesh counts ranks: TP innermost, PP outermost."""
        plan = self.plan
        data = plan.tp * plan.cp
        found = [("tp", plan.tp, 1), ("cp", plan.cp, plan.tp), ("dp", plan.dp, data), ("pp", plan.pp, data * plan.dp)]
        found += [("ep", plan.ep, plan.tp), ("shards", plan.shards if plan.zero else 1, plan.tp)]
        return [Reach(*each) for each in found]

    def link(self, reach: Reach) -> str:
        """The slowest link that a group of this axis uses; empty for one rank alone."""
        on = self.task.on
        return on.levels[on.level_of(0, (reach.size - 1) * reach.stride)].link.name if reach.size > 1 else ""


def setting_of(task: Task, plan: Plan) -> Setting:
    """The setting whose plan this is."""
    values = {name: getattr(plan, name) for name in Setting._fields if name not in ("task", "dp_shard")}
    return Setting(task, dp_shard=plan.dp_shard or ALL, **values)


@functools.lru_cache(maxsize=16384)
def _plan(now: Setting) -> Plan:
    degrees = {name: getattr(now, name) for name in ("dp", "pp", "cp", "tp", "ep", "microbatch", "schedule", "virtual")}
    more = {"zero": now.zero, "recompute": now.recompute, "dp_shard": now.dp_shard or None} | now.task.given
    return Plan(**degrees, **more, seq=now.task.seq, batch=now.task.batch)


@functools.lru_cache(maxsize=16384)
def _step(shape: ModelShape, plan: Plan, on: Cluster) -> step.StepTime:
    return step.estimate(shape, plan, on)


@functools.lru_cache(maxsize=16384)
def _peak(shape: ModelShape, plan: Plan) -> memory.Peak:
    return memory.peak(shape, plan)


@functools.lru_cache(maxsize=64)
def _best(task: Task) -> tuple[Found, ...]:
    tried = _TRIED | (_WITH_EXPERTS if task.shape.experts else {})
    plans = planner.search(task.shape, task.on, gpus=task.gpus, seq=task.seq, batch=task.batch, **task.given, **tried)
    kept: dict[tuple, Found] = {}
    for found in plans:
        kept.setdefault((found.plan.tp, found.plan.pp, found.plan.ep), found)
        if len(kept) == BEST:
            break
    return tuple(kept.values())

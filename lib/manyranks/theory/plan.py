"""Plans of how a training step is split over accelerators: the degrees, the batch, and what is kept, sharded or recomputed."""

from collections import namedtuple
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import NamedTuple

from manyranks.theory import tables
from manyranks.theory.architecture import ModelShape
from manyranks.theory.names import concise, one_of, whole
from manyranks.theory.stacks import STACKS, Stack

SCHEDULES = tuple(row["name"] for row in tables.rows("schedules"))
V_SHAPED = ("zb-v", "dualpipe-v")  # two stages a rank, there and back
RECOMPUTE = ("none", "selective", "full")  # each computes more again than the one before
CONTEXT = ("ring", "all-gather", "ulysses")
OFFLOAD = ("none", "optimizer", "all")


class Recipe(NamedTuple):
    """Bytes a parameter of each model state, and of one element of the matrices that a linear layer multiplies.

    matmul: an element's, with its share of the scales.
    block: elements of a matrix that share a scale, 0 where a whole tensor or a tile does.
    """

    parameters: int
    gradients: int
    optimizer: int
    matmul: float = 2
    block: int = 0

    @property
    def rate(self) -> str:
        """Names how fast a chip multiplies a linear layer's matrices, as kernels.peak does."""
        return "fp4" if self.matmul < 1 else "fp8" if self.matmul < 2 else "bf16" if self.matmul == 2 else "fp32"

    @property
    def quantized(self) -> bool:
        """Returns whether linear layers multiply in fewer bits than activations have: attention and the head keep 16."""
        return self.rate in ("fp4", "fp8")

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def reduced(self) -> int:
        """Bytes of one element of a gradient on its way."""
        return min(4, self.gradients)


RECIPES = {
    "bf16": Recipe(2, 2, 12),  # arXiv 1910.02054, section 3.1: half precision, Adam in fp32 with a master copy
    "fp16": Recipe(2, 2, 12),
    "fp32": Recipe(4, 4, 8, matmul=4),
    "bf16-fp32-gradients": Recipe(2, 4, 12),  # Megatron-LM docs/user-guide/features/dist_optimizer.md: 18 bytes
    "fp16-fp32-gradients": Recipe(2, 2, 16),  # the same page: 20 bytes; the fp32 copy of the gradients is sharded too
    "bf16-moments": Recipe(2, 4, 8),  # arXiv 2412.19437, section 3.3.3: fp32 master and gradients, both moments in bf16
    "fp8": Recipe(2, 4, 8, matmul=1),  # the same section: matrices of linear layers in 8 bits
    # Open Compute Project, Microscaling Formats 1.0: 32 numbers share a scale of 8 bits. NVFP4: 16 do, arXiv 2509.25149.
    "mxfp8": Recipe(2, 4, 8, matmul=1 + 1 / 32, block=32),
    "nvfp4": Recipe(2, 4, 8, matmul=1 / 2 + 1 / 16, block=16),
}


# The parts of a plan that caches have as keys. Their fields are Plan's.


class StagePlan(namedtuple("StagePlan", "tp pp ep expert_tp stages schedule embedding_slots")):
    """The part of a plan that decides which parameters a rank holds: plans that agree in it hold the same."""

    __slots__ = ()


class OneRank:
    """The numbers of one rank and one micro-batch, which a Plan and a LayerPlan give: what layers need to know of either."""

    __slots__ = ()

    seq: int
    microbatch: int
    cp: int
    tp: int
    ep: int
    expert_tp: int
    sequence_parallel: bool
    recompute: str
    flash: bool
    context: str
    regather: bool
    precision: str
    stack: str

    @property
    def rank_tokens(self) -> int:
        """T: tokens of one micro-batch on one rank."""
        return self.microbatch * self.seq // self.cp

    @property
    def split_tokens(self) -> float:
        """Tokens that norms, dropouts and additions see on one rank."""
        return self.rank_tokens / (self.tp if self.sequence_parallel else 1)

    @property
    def expert_tokens(self) -> float:
        """Tokens of the ranks that cut an expert together: T where these are the tensor-parallel ones."""
        return self.rank_tokens * self.expert_tp / self.tp

    @property
    def recipe(self) -> Recipe:
        return RECIPES[self.precision]

    @property
    def framework(self) -> Stack:
        return STACKS[self.stack]


class _LayerPlan(NamedTuple):
    """LayerPlan's fields, which are Plan's."""

    cp: int
    tp: int
    ep: int
    expert_tp: int
    seq: int
    microbatch: int
    sequence_parallel: bool
    recompute: str
    precision: str
    overlap: bool
    overlap_tensor: bool
    flash: bool
    context: str
    regather: bool
    offload_layers: int
    stack: str


class LayerPlan(_LayerPlan, OneRank):
    """The part of a plan that decides a layer's time and activations on one rank, whatever other degrees are."""

    __slots__ = ()

    @property
    def groups(self) -> dict[str, tuple[int, int]]:
        """Ranks of the groups to which a rank sends while a micro-batch passes, and the stride from one to the next.

        Tensor-parallel ranks are neighbors, context-parallel ones tp apart. Expert-parallel ranks are etp apart, as in
        Megatron-LM, whose expert ranks count etp first, then ep, then edp; with etp = 1 they are neighbors.
        """
        etp = self.expert_tp
        return {"tp": (self.tp, 1), "cp": (self.cp, self.tp), "ep": (self.ep, etp), "etp": (etp, 1)}


@dataclass(frozen=True)
class Plan(OneRank):
    """A way to train: dp·cp·tp·pp accelerators. ep and etp lay the experts out on the dp·cp·tp ranks of a stage.

    seq: tokens of a sequence
    batch: sequences of the global batch (default: one micro-batch for each data-parallel rank)
    microbatch: sequences a rank takes at a time
    schedule: one of SCHEDULES
    virtual: stages of a rank, interleaved if it has several
    zero: 0 to 3
    dp_shard: ranks that share one copy of the sharded states (HSDP), default all
    reshard_after_forward: ZeRO-3 frees a unit after forward and gathers it again
    recompute: "none", "full", or "selective": attention scores where they are stored, RMSNorms, the product of a gated MLP,
        what latent attention expands
    precision: a key of RECIPES
    overlap: communication runs under compute where nothing forbids it
    overlap_tensor: tensor parallelism's too, under weight gradients
    flash: attention never writes its scores
    context: how keys and values travel between context-parallel ranks
    embedding_slots: the embedding and the head take the place of one layer each when layers are dealt to stages
    offload: states kept in the host's memory, "none", "optimizer" or "all"
    offload_layers: of a rank's layers, how many have their activations wait there for backward
    regather: with sequence parallelism, a column-parallel layer keeps its shard of the input and gathers the rest again in
        backward; False: it keeps what it gathered
    stack: what runs it, a key of STACKS
    etp: expert tensor parallel size, the ranks that cut each routed expert. By default that is tp, and ep divides
        dp·cp. Any other etp gives experts a separate layout, where ep may span tensor-parallel ranks: tp·cp·dp =
        etp·ep·edp, and edp ranks have the same part of the same experts. It needs sequence parallelism. Source: arXiv
        2504.14960, MoE parallel folding.
    Raises ValueError, naming the field, for a value that is not allowed or values that do not go together.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    seq: int = 2048
    batch: int | None = None
    microbatch: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    sequence_parallel: bool = True
    zero: int = 1
    dp_shard: int | None = None
    reshard_after_forward: bool = True
    recompute: str = "selective"
    precision: str = "bf16"
    overlap: bool = True
    overlap_tensor: bool = True
    flash: bool = True
    context: str = "ring"
    embedding_slots: bool = False
    offload: str = "none"
    regather: bool = True
    stack: str = "megatron-core"
    etp: int | None = None
    offload_layers: int = 0

    def __post_init__(self):
        # The fields by kind, and what reads them at once, are at the end of this file.
        for name, value in zip(_WHOLE, _whole_of(self), strict=True):
            if value is not None or name not in ("batch", "dp_shard", "etp"):
                whole(int(name not in ("zero", "offload_layers")), **{name: value})
        for name, value in zip(_FLAGS, _flags_of(self), strict=True):
            if type(value) is not bool:
                raise ValueError(f"{name}={value!r}: must be True or False")
        for (name, known), value in zip(_CHOICES.items(), _choices_of(self), strict=True):
            if not isinstance(value, str) or value not in known:
                one_of(known, **{name: value})
        if self.batch is None:
            object.__setattr__(self, "batch", self.dp * self.microbatch)
        self._check_degrees()

    def _check_degrees(self) -> None:
        if self.zero > 3:
            raise ValueError(f"zero={self.zero}: the stages are 0, 1, 2 and 3")
        if self.framework.data_only and self.tp * self.pp * self.cp * self.ep > 1:
            degrees = ", ".join(f"{name}={getattr(self, name)}" for name in ("tp", "pp", "cp", "ep") if getattr(self, name) > 1)
            raise ValueError(f"{degrees} with stack={self.stack!r}, which has data parallelism only: leave {degrees} out")
        if self.dp % (self.dp_shard or 1):
            divisor = f"replicas × shards = dp, so choose a divisor of {self.dp}"
            raise ValueError(f"dp_shard={self.dp_shard} does not divide dp={self.dp}: {divisor}")
        if self.etp in (None, self.tp):
            self._check_expert_ranks()
        else:
            self._check_folded()
        if self.batch % (self.dp * self.microbatch):
            each = f"dp·microbatch = {self.dp}·{self.microbatch} = {self.dp * self.microbatch}"
            near = multiples(self.batch, self.dp * self.microbatch)
            raise ValueError(f"batch={self.batch} is not a multiple of {each}: give {near}, or lower dp or microbatch")
        if self.seq % self.cp:
            raise ValueError(f"seq={self.seq} is not a multiple of cp={self.cp}: give {multiples(self.seq, self.cp)}")
        if self.virtual > 1 and self.schedule not in ("1f1b", "interleaved"):
            raise ValueError(
                f"virtual={self.virtual} with schedule={self.schedule!r}: only '1f1b' and 'interleaved' take it; set virtual=1"
            )
        if self.pp % 2 and self.pp > 1 and self.schedule == "dualpipe":
            raise ValueError(
                f"pp={self.pp} with schedule='dualpipe', which runs from both ends: give an even pp, or another one"
            )

    def _check_expert_ranks(self) -> None:
        if self.dp * self.cp % self.ep:
            dp_cp = f"dp·cp = {self.dp}·{self.cp} = {self.dp * self.cp}"
            raise ValueError(f"ep={self.ep} does not divide {dp_cp}: choose a divisor of {self.dp * self.cp}")
        if self.shards % self.ep and self.ep % self.shards:
            raise ValueError(f"ep={self.ep} and dp_shard·cp = {self.shards}: choose them so that one divides the other")

    def _check_folded(self) -> None:
        """Checks experts' separate layout. With tp it needs sequence parallelism: Megatron-LM's moe/README.md."""
        if not self.sequence_parallel and self.tp > 1:
            raise ValueError(
                f"etp={self.etp} with tp={self.tp} and sequence_parallel=False: tensor-parallel ranks would all send the same "
                "tokens; say sequence_parallel=True, or leave etp out"
            )
        ranks, each, island = self.tp * self.cp * self.dp, self.etp * self.ep, self.tp * self.shards
        if ranks % each:
            product = f"tp·cp·dp = {self.tp}·{self.cp}·{self.dp} = {ranks}"
            raise ValueError(f"etp·ep = {self.etp}·{self.ep} = {each} does not divide {product}: choose a divisor of {ranks}")
        if island % each and each % island:
            both = f"etp·ep = {each} and tp·dp_shard·cp = {island}"
            raise ValueError(f"{both}: choose them so that one divides the other")

    @property
    def stage_plan(self) -> StagePlan:
        return StagePlan(self.tp, self.pp, self.ep, self.expert_tp, self.stages, self.schedule, self.embedding_slots)

    @property
    def layer_plan(self) -> LayerPlan:
        return LayerPlan._make(_layer_plan(self))

    def __repr__(self) -> str:
        return concise(self, "dp", "pp", "cp", "tp", "seq", "batch")

    @property
    def stride(self) -> int:
        """Ranks from one of a pipeline to the next."""
        return self.tp * self.cp * self.dp

    @property
    def gpus(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def microbatches(self) -> int:
        """m: micro-batches that each pipeline runs in a step."""
        return self.batch // (self.dp * self.microbatch)

    @property
    def tokens(self) -> int:
        """Tokens of the global batch."""
        return self.batch * self.seq

    @property
    def stages(self) -> int:
        """p·v stages that a micro-batch passes; the V-shaped schedules have two a rank."""
        return stages_passed(self.schedule, self.pp, self.virtual)

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO spreads one copy of the states: the data-parallel ones and the context-parallel ones."""
        return (self.dp_shard or self.dp) * self.cp

    @property
    def expert_tp(self) -> int:
        """Ranks that cut each routed expert: etp, or tp where that is left out."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_ranks(self) -> int:
        """edp: ranks of a stage that have the same part of the same experts."""
        return self.tp * self.cp * self.dp // (self.expert_tp * self.ep)

    @property
    def expert_shards(self) -> int:
        """Ranks over which ZeRO spreads one copy of the experts' states: some or all of expert_ranks."""
        return max(1, self.tp * self.shards // (self.expert_tp * self.ep))

    @property
    def stored(self) -> Recipe:
        """The recipe of what a rank stores: with 32-bit shards, 16-bit parameters are only what is gathered."""
        if not self.framework.fp32_shards or (self.zero < 3 and self.shards > 1):
            return self.recipe
        return self.recipe._replace(parameters=0, gradients=4, optimizer=8 if self.precision == "bf16-moments" else 12)

    def check(self, shape: ModelShape, gpus: int | None = None) -> None:
        """Raises ValueError where the plan does not fit the shape, or is not for this number of accelerators."""
        if gpus is not None and (type(gpus) is not int or gpus < 1):
            raise ValueError(f"gpus={gpus!r}: must be a whole number, 1 or more")
        if gpus is not None and gpus != self.gpus:
            degrees = f"dp·cp·tp·pp = {self.dp}·{self.cp}·{self.tp}·{self.pp}"
            raise ValueError(f"{degrees} = {self.gpus} ranks for {gpus} GPUs: choose degrees whose product is {gpus}")
        if self.etp is not None and not shape.experts:
            raise ValueError(f"etp={self.etp}: {shape.name} has no experts; leave etp out")
        if left := why_uncut(shape, self.tp, self.etp):
            raise ValueError(left)
        if self.framework.every_other and self.recompute == "selective" and (shape.experts or shape.latent):
            raise ValueError(
                f"recompute='selective' with stack={self.stack!r} is modeled for dense layers only; for {shape.name} "
                "say recompute='none' or 'full'"
            )
        if self.sequence_parallel and self.seq % (self.cp * self.tp):
            both = f"cp·tp = {self.cp}·{self.tp} = {self.cp * self.tp}"
            other = f"use {multiples(self.seq, self.cp * self.tp)}, or set sequence_parallel=False"
            raise ValueError(f"seq={self.seq} must be a multiple of {both} for sequence parallelism: {other}")
        if self.context == "ulysses" and (left := why_no_ulysses(shape, self.tp, self.cp)):
            raise ValueError(f"Ulysses: {left}; use context='ring'")
        slots = shape.layers + (2 if self.embedding_slots else 0)
        if slots < self.stages:
            lower = f"pp={self.pp}" + (f" or virtual={self.virtual}" if self.virtual > 1 else "")
            raise ValueError(f"{shape.layers} layers of {shape.name} on {self.stages} stages: lower {lower}")
        if self.ep > 1 and not shape.experts:
            raise ValueError(f"ep={self.ep}: {shape.name} has no experts; say ep=1")
        if self.ep > 1 and shape.experts % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide the {shape.experts} routed experts of {shape.name}: choose a divisor"
            )


def stages_passed(schedule: str, p: int, v: int) -> int:
    """Stages that a micro-batch passes on p ranks with v stages each; the V-shaped schedules have two per rank."""
    return p * (2 if schedule in V_SHAPED else v)


def why_uncut(shape: ModelShape, tp: int, etp: int | None = None) -> str:
    """Says what of this shape so many tensor-parallel ranks cannot share evenly, and the way out; empty where they can.

    etp: ranks that cut each routed expert, None for tp.
    """
    if shape.heads % tp:
        return f"tp={tp} does not divide the {shape.heads} heads of {shape.name}: choose a divisor of {shape.heads}"
    if shape.kv_heads % tp and tp % shape.kv_heads:
        return f"tp={tp} and {shape.kv_heads} key/value heads of {shape.name}: one must divide the other"
    dense = shape.ffn if shape.moe_layers < shape.layers else 0
    routed = 0 if etp else shape.expert_ffn
    for name, size in (("ffn", dense), ("expert_ffn", routed), ("shared_ffn", shape.shared_ffn)):
        if size % tp:
            return f"tp={tp} does not divide {name}={size} of {shape.name}: choose a divisor of it and of the heads"
    if shape.expert_ffn % (etp or 1):
        return f"etp={etp} does not divide expert_ffn={shape.expert_ffn} of {shape.name}: choose a divisor of it"
    return ""


def why_no_ulysses(shape: ModelShape, tp: int, cp: int) -> str:
    """Says what keeps Ulysses from giving each of cp ranks whole heads to compute; empty where nothing does."""
    heads, keys = shape.heads // tp, max(1, shape.kv_heads // tp)
    if heads % cp:
        return f"cp={cp} does not divide a rank's {heads} heads"
    if keys % cp and cp % keys:
        return f"cp={cp} and a rank's {keys} key/value heads: one must divide the other"
    return ""


def most_imbalance(experts: int, top_k: int, ranks: int) -> float:
    """Copies of the fullest rank ÷ the mean where every token sends it as many as it can: min(K, E/e) of its K."""
    return ranks * min(top_k, experts // ranks) / top_k


def check_imbalance(shape: ModelShape, plan: Plan, imbalance: float) -> None:
    """Checks the imbalance: copies that come to the fullest of e expert-parallel ranks ÷ their mean.

    Raises ValueError below 1 and for more than most_imbalance.
    """
    most = most_imbalance(shape.experts, shape.top_k, plan.ep) if shape.experts else 1.0
    if type(imbalance) not in (int, float) or not 1 <= imbalance <= most:
        can = f"1 to {most:g} times the mean load" if most > 1 else "the mean load: give 1"
        raise ValueError(f"imbalance={imbalance!r}: with ep={plan.ep} the fullest rank has {can}")


def multiples(value: int, of: int) -> str:
    """The multiples on both sides of a value that is none."""
    below = value // of * of
    return f"{below} or {below + of}" if below else f"{of}"


# Plan's fields by kind, for __post_init__ and layer_plan; a getter reads all of a kind at once.
_WHOLE = tuple(field.name for field in fields(Plan) if field.type in (int, int | None))
_FLAGS = tuple(field.name for field in fields(Plan) if field.type is bool)
_CHOICES = {"schedule": SCHEDULES, "recompute": RECOMPUTE, "precision": RECIPES, "context": CONTEXT, "offload": OFFLOAD}
_CHOICES["stack"] = STACKS
_layer_plan, _choices_of = attrgetter(*LayerPlan._fields), attrgetter(*_CHOICES)
_whole_of, _flags_of = attrgetter(*_WHOLE), attrgetter(*_FLAGS)

"""The settings of a run: the sizes of the small GPT, and how it is trained. Brings in no torch."""

import math
from dataclasses import dataclass, fields

from manyranks.theory.architecture import LatentAttention, ModelShape
from manyranks.theory.names import nearest
from manyranks.theory.plan import RECOMPUTE, Plan

STYLES = ("llama", "gpt2")
SCORES = ("softmax", "sigmoid")
_EXPERTS = ("expert_ffn", "shared_experts", "dense_layers", "capacity", "auxiliary", "bias_speed")


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT, named as in theory's ModelShape; the defaults give 836,736 parameters.

    seq: the longest sequence
    kv_heads: None means heads
    dropout: a probability
    tied: the head is the token embedding
    ffn: None means 4·hidden, and for "llama", whose MLP has three matrices, two thirds of that,
        rounded up to a multiple of 32
    experts: routed ones, in all layers but the first dense_layers; a token goes to top_k of them
        and to every shared one
    expert_ffn: of one of either; None: so that top_k of them are as large as one MLP, but at least
        32
    scores, expert_groups, groups_per_token, capacity, auxiliary, bias_speed: as
        parallel.expert.Router's. Experts need style "llama".
    latent: sizes of multi-head latent attention, as DeepSeek-V2's, instead of kv_heads; None: each
        head has its own matrices for keys and values. It needs style "llama".
    style: "llama" has RMSNorm, rotary positions, a gated SiLU MLP and no biases; "gpt2" has
        LayerNorm, learned positions, a GELU MLP and biases

    Raises ValueError, naming the field, for sizes that are not allowed or do not go together.
    """

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    ffn: int | None = None
    vocab: int = 256
    seq: int = 128
    kv_heads: int | None = None
    dropout: float = 0.0
    style: str = "llama"
    tied: bool = True
    experts: int = 0
    top_k: int = 2
    expert_ffn: int | None = None
    shared_experts: int = 0
    dense_layers: int = 0
    expert_groups: int = 1
    groups_per_token: int = 1
    scores: str = "softmax"
    capacity: float | None = None
    auxiliary: float = 0.0
    bias_speed: float = 0.0
    latent: LatentAttention | None = None

    def __post_init__(self):
        if self.style not in STYLES:
            raise ValueError(f"style={self.style!r}: {nearest(self.style, STYLES)}")
        _check_whole(seq=self.seq, hidden=self.hidden, heads=self.heads)
        if self.hidden % self.heads:
            raise ValueError(
                f"heads={self.heads} does not divide hidden={self.hidden}: give sizes that do"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r}: a probability, 0 or more and below 1")
        self._check_experts()
        if self.latent is not None:
            return self._check_latent()
        head_size = self.shape().head_size
        if head_size % 2 and self.style == "llama":
            raise ValueError(
                f"hidden={self.hidden}, heads={self.heads}: a head has {head_size} numbers, but "
                "rotary positions turn pairs; give sizes whose quotient is even"
            )

    def shape(self) -> ModelShape:
        """The same model for the theory, which counts its parameters, FLOPs and bytes."""
        usual = 4 * self.hidden if self.style == "gpt2" else -(-8 * self.hidden // 96) * 32
        ffn = usual if self.ffn is None else self.ffn
        sizes = (self.layers, self.hidden, ffn, self.heads, self.vocab, self.kv_heads)
        options = {"tied": self.tied, "dropout": self.dropout > 0, "latent": self.latent}
        if self.experts:
            options |= self._experts(ffn)
        if self.style == "gpt2":
            options |= {"gated": False, "norm": "layernorm", "bias": True, "positions": self.seq}
        return ModelShape(f"small {self.style}", *sizes, **options)

    def _check_latent(self) -> None:
        if self.style != "llama":
            raise ValueError(
                f"latent with style={self.style!r}: latent attention has rotary positions and no "
                'biases; say style="llama"'
            )
        self.shape()  # raises for kv_heads, and for what is no LatentAttention
        if self.latent.rope_size % 2:
            raise ValueError(
                f"latent.rope_size={self.latent.rope_size}: rotary positions turn pairs; give an "
                "even size"
            )

    def _check_experts(self) -> None:
        """Checks what shape() does not: it knows sizes only, and divides by top_k."""
        _check_whole(top_k=self.top_k)
        if self.experts and self.style != "llama":
            raise ValueError(
                f"experts={self.experts} with style={self.style!r}: experts are gated and have no "
                'biases; say style="llama"'
            )
        if not self.experts and (given := [name for name in _EXPERTS if getattr(self, name)]):
            raise ValueError(
                f"{given[0]}={getattr(self, given[0])!r} without experts: give experts, or leave "
                "it out"
            )
        if self.scores not in SCORES:
            raise ValueError(f"scores={self.scores!r}: {nearest(self.scores, SCORES)}")
        if self.capacity is not None and not 0 < self.capacity < math.inf:
            raise ValueError(f"capacity={self.capacity!r}: a factor above 0, or None to drop none")
        for name in ("auxiliary", "bias_speed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r}: give 0 or more")

    def _experts(self, ffn: int) -> dict[str, int]:
        """The router's biases are no parameters: no gradient moves them."""
        usual = max(32, ffn // self.top_k // 32 * 32)
        return {
            "experts": self.experts,
            "top_k": self.top_k,
            "expert_ffn": usual if self.expert_ffn is None else self.expert_ffn,
            "shared_experts": self.shared_experts,
            "dense_layers": self.dense_layers,
            "expert_groups": self.expert_groups,
            "groups_per_token": self.groups_per_token,
        }


@dataclass(frozen=True)
class TrainingConfig:
    """Settings for AdamW, with a learning rate that rises for `warmup` steps, then falls.

    batch: sequences of a step, over all ranks
    accumulate: micro-batches that a rank cuts its part of the batch into
    clip: the longest gradient, by its 2-norm over all parameters
    bf16: products in bfloat16, with zero=3 all that computes but the loss; weights and optimizer
        in float32
    seed: of the first weights and of dropout
    zero: the stage of ZeRO, or what the ranks share out: 0 nothing (data parallelism), 1 the
        optimizer's states, 2 also gradients, 3 also parameters (FullyShardedDataParallel)
    recompute: what backward computes again: "selective" attention's core, "full" each layer
    plan: how a step is split over ranks of all axes; None: they share the batch, as above. Where
        there is one, batch, accumulate, zero and recompute are the plan's; bf16 is left out, for
        its precision says it. With cp > 1 "selective" computes nothing more again: attention is
        blockwise

    Raises ValueError, naming the field, for values that are not allowed.
    """

    steps: int = 120
    batch: int = 16
    accumulate: int = 1
    learning_rate: float = 3e-3
    warmup: int = 50
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    bf16: bool = False
    seed: int = 0
    zero: int = 0
    recompute: str = "none"
    plan: Plan | None = None

    def __post_init__(self):
        if self.plan is not None:
            self._take(self.plan)
        _check_whole(steps=self.steps, batch=self.batch, accumulate=self.accumulate)
        _check_whole(least=0, warmup=self.warmup, seed=self.seed, zero=self.zero)
        if self.zero > 3:
            raise ValueError(f"zero={self.zero}: the stages are 0, 1, 2 and 3")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute={self.recompute!r}: {nearest(self.recompute, RECOMPUTE)}")
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be above 0")
        if self.learning_rate == math.inf:
            raise ValueError("learning_rate=inf: give a number, such as 3e-3")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas!r}: give two numbers, each 0 or more and below 1")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay={self.weight_decay!r}: must be 0 or more")

    def _take(self, plan: Plan) -> None:
        """Takes the plan's values for its own fields. They may be given, too, but not be others."""
        taken = {"batch": plan.batch, "accumulate": plan.microbatches}
        taken |= {"zero": plan.zero, "recompute": plan.recompute, "bf16": False}
        usual = {field.name: field.default for field in fields(self)}
        for name, value in taken.items():
            if name == "bf16" and self.bf16:
                raise ValueError("bf16=True with a plan: say precision='bf16' in the plan")
            if (given := getattr(self, name)) not in (usual[name], value):
                raise ValueError(
                    f"{name}={given!r} with a plan, which says {value!r}: leave {name} out, or "
                    "give another plan"
                )
            object.__setattr__(self, name, value)

    def check_ranks(self, ranks: int) -> None:
        """Raises ValueError where a rank would be left without a sequence for a micro-batch."""
        if self.batch < ranks * self.accumulate:
            raise ValueError(
                f"batch={self.batch}: {ranks} ranks with {self.accumulate} micro-batches each need "
                f"{ranks * self.accumulate} sequences a step; give a larger batch, or less of those"
            )


def _check_whole(least: int = 1, **values: object) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: must be a whole number, {least} or more")

"""Floating-point operations of training, counted matrix product by matrix product, and what they say about a run.

A product of m × k with k × n takes 2mnk; backward takes twice what forward does. Unless a convention is named, a causal mask
counts half of the scores: about 6Φ + 6Lhs per token, Φ the parameters that a token meets, without the input embedding.
"""

from typing import NamedTuple

from manyranks.theory import checks
from manyranks.theory.architecture import ModelShape
from manyranks.theory.layer import attended_length
from manyranks.theory.names import Named, one_of


class Convention(NamedTuple):
    """The counting of a paper.

    attention: share of the full score matrix
    embedding: whether Φ has the input embedding, whose rows are only read
    everything: 6Φ of all parameters instead of the products' own
    core_again: forward passes of the attention core that selective recomputation adds
    """

    attention: float
    embedding: bool = False
    everything: bool = False
    core_again: float = 1
    source: str = ""


CONVENTIONS = Named(
    "convention",
    {
        "full": Convention(1, source="every product, the whole score matrix"),
        "causal": Convention(0.5, source="every product, the half of the score matrix that a causal mask leaves"),
        "parameters": Convention(0, embedding=True, everything=True, source="6Φ; arXiv 2001.08361, section 2.1"),
        "palm": Convention(1, embedding=True, everything=True, source="6N + 12LHQT; arXiv 2204.02311, appendix B"),
        # Its hardware FLOPs print s/3h; counting the core's forward once more gives 2s/9h.
        "korthikanti": Convention(1, core_again=3, source="72BLsh²(1 + s/6h + V/12hL), s/3h; arXiv 2205.05198, appendix A"),
        "megatron-sc21": Convention(1, source="96BLsh²(1 + s/6h + V/16Lh), full recomputation; arXiv 2104.04473, eq. 3"),
        "torchtitan": Convention(1, everything=True, source="6(N − embedding) + 12Lhs; torchtitan models/utils.py (01c01c88)"),
        "nemo": Convention(0.5, everything=True, source="6(N − embedding) + 6Lhs; NeMo performance_summary.md"),
    },
)


class Forward(NamedTuple):
    """FLOPs of a token's forward pass, by part."""

    attention: float  # projections
    core: float  # QKᵀ and the product with V
    mlp: float
    router: float
    head: float

    @property
    def layers(self) -> float:
        return self.attention + self.core + self.mlp + self.router


class Product(NamedTuple):
    """A matrix product that a token's row goes through: 1 × k with k × n, `count` times in the whole model."""

    part: str  # the field of Forward that it belongs to
    name: str
    k: float
    n: float
    count: int

    @property
    def flops(self) -> float:
        """The FLOPs of one token, forward."""
        return 2 * self.k * self.n * self.count


def products(shape: ModelShape, seq: int, attended: float = 1.0) -> list[Product]:
    """Every matrix product of one token's forward pass in a sequence of seq tokens; an expert's products once for each
    expert that the token is sent to. attended: share of the score matrix that is computed. Backward has two of the same
    size for each.
    """
    checks.kinds(shape=shape)
    checks.not_negative(seq=seq, attended=attended)
    h, dense, moe = shape.hidden, shape.layers - shape.moe_layers, shape.moe_layers
    routed, shared = moe * shape.top_k, moe * shape.shared_experts
    return [
        *_attention(shape),
        *_core(shape, attended_length(shape, seq, attended)),
        *(_mlp("mlp", h, shape.ffn, shape.gated, dense) if dense else []),
        *([Product("router", "router", h, shape.experts, moe)] if moe else []),
        *(_mlp("expert", h, shape.expert_ffn, shape.gated, routed) if routed else []),
        *(_mlp("shared expert", h, shape.shared_ffn, shape.gated, shared) if shared else []),
        Product("head", "head", h, shape.vocab, 1),
    ]


def _attention(shape: ModelShape) -> list[Product]:
    h, a, c = shape.hidden, shape.heads, shape.latent
    if c is None:
        sizes = {"query": shape.query_size, "key": shape.kv_size, "value": shape.kv_size}
        inputs = [(name, h, size) for name, size in sizes.items()]
        return [Product("attention", *one, shape.layers) for one in (*inputs, ("output", shape.query_size, h))]
    queries = a * (c.nope_size + c.rope_size)
    chain = [("query down", h, c.q_rank), ("query up", c.q_rank, queries)] if c.q_rank else [("query", h, queries)]
    chain += [("key, value down", h, c.kv_rank + c.rope_size), ("key, value up", c.kv_rank, a * (c.nope_size + c.value_size))]
    return [Product("attention", *one, shape.layers) for one in (*chain, ("output", a * c.value_size, h))]


def _core(shape: ModelShape, length: float) -> list[Product]:
    c, count = shape.latent, shape.layers * shape.heads
    value_size = c.value_size if c else shape.head_size
    return [Product("core", "scores", shape.head_size, length, count), Product("core", "values", length, value_size, count)]


def _mlp(name: str, hidden: int, ffn: int, gated: bool, count: int) -> list[Product]:
    into = ("gate", "up") if gated else ("up",)
    sizes = [*((step, hidden, ffn) for step in into), ("down", ffn, hidden)]
    return [Product("mlp", f"{name} {step}", k, n, count) for step, k, n in sizes]


def forward(shape: ModelShape, seq: int, attended: float = 1.0) -> Forward:
    """FLOPs of one token's forward pass in a sequence of seq tokens, the sum of its products by part."""
    sums = dict.fromkeys(Forward._fields, 0.0)
    for product in products(shape, seq, attended):
        sums[product.part] += product.flops
    return Forward(**sums)


def per_token(shape: ModelShape, seq: int, convention: str = "causal") -> float:
    """FLOPs of training on one token: forward and backward, nothing computed twice. Raises ValueError for unknown names."""
    checks.kinds(shape=shape)
    rule = CONVENTIONS[convention]
    parts = forward(shape, seq, rule.attention)
    if not rule.everything:
        return 3 * (parts.layers + parts.head)
    multiplied = shape.vocab * shape.hidden if shape.tied else 0  # the head multiplies by these
    only_read = 0 if rule.embedding else shape.embedding_parameters - multiplied
    return 6 * (shape.active_parameters - only_read) + 3 * parts.core


def hardware_per_token(
    shape: ModelShape, seq: int, recompute: str = "none", convention: str = "causal", flash: bool = False
) -> float:
    """Counts as per_token does, with what recomputation ("none", "selective", "full") runs a second time.

    flash: whether attention is one fused kernel. It keeps no scores and computes them again in its own backward, whatever else
    is recomputed: five products instead of four, which is half a forward of the core more. PyTorch's FlopCounterMode counts
    so, too. Source: arXiv 2307.08691, section 3.1.2.
    """
    parts = forward(shape, seq, CONVENTIONS[convention].attention)
    extra = {"none": 0.0, "selective": CONVENTIONS[convention].core_again * parts.core, "full": parts.layers}
    one_of(extra, recompute=recompute)
    return per_token(shape, seq, convention) + extra[recompute] + (parts.core / 2 if flash else 0.0)


def mfu(shape: ModelShape, seq: int, tokens_per_second: float, gpus: int, peak: float, convention: str = "causal") -> float:
    """Model FLOPs utilization: the FLOPs that the model needs ÷ what all accelerators could do.

    tokens_per_second: of the whole job
    peak: FLOP/s of one accelerator
    Source: arXiv 2204.02311, section 4.1.
    """
    checks.not_negative(tokens_per_second=tokens_per_second)
    if not (gpus >= 1 and peak > 0):
        raise ValueError(f"gpus={gpus}, peak={peak}: both must be above 0")
    return per_token(shape, seq, convention) * tokens_per_second / (gpus * peak)


def hfu(
    shape: ModelShape,
    seq: int,
    tokens_per_second: float,
    gpus: int,
    peak: float,
    recompute: str = "none",
    convention: str = "causal",
    flash: bool = False,
) -> float:
    """Hardware FLOPs utilization: as mfu, counting what is computed twice. Source: arXiv 2204.02311, section 4.1."""
    share = mfu(shape, seq, tokens_per_second, gpus, peak, convention)
    return share * hardware_per_token(shape, seq, recompute, convention, flash) / per_token(shape, seq, convention)


def training(parameters: float, tokens: float) -> float:
    """Counts 6Φ FLOPs per token: 2Φ forward, 4Φ backward; attention's own matmuls are left out.

    Source: Kaplan et al., "Scaling Laws for Neural Language Models", arXiv 2001.08361, section 2.1.
    """
    checks.not_negative(parameters=parameters, tokens=tokens)
    return 6 * parameters * tokens

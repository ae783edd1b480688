"""Floating-point operations of training, counted matrix product by matrix product, and what they say about a run.

A product of m × k with k × n takes 2mnk; backward takes twice what forward does.
"""

from typing import NamedTuple

from manyranks.theory.architecture import ModelShape
from manyranks.theory.names import Named, nearest


class Convention(NamedTuple):
    """What a paper counts. attention: share of the full score matrix; everything: 6Φ of all parameters instead of the products'
    own; embedding: whether Φ has the input embedding, whose rows are only read; core_again: forward passes of the attention
    core that selective recomputation adds.
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


def forward(shape: ModelShape, seq: int, attended: float = 1.0) -> Forward:
    """FLOPs of one token's forward pass in a sequence of seq tokens. attended: share of the score matrix that is computed."""
    _not_negative(seq=seq, attended=attended)
    if shape.latent is None:
        sizes = 2 * shape.head_size
    else:
        sizes = shape.latent.nope_size + shape.latent.rope_size + shape.latent.value_size
    matrices = 3 if shape.gated else 2
    active = shape.top_k * shape.expert_ffn + shape.shared_experts * shape.shared_ffn
    per_moe = matrices * shape.hidden * active
    mlp = (shape.layers - shape.moe_layers) * matrices * shape.hidden * shape.ffn + shape.moe_layers * per_moe
    return Forward(
        2 * shape.layers * attention_weights(shape),
        2 * shape.layers * shape.heads * sizes * seq * attended,
        2 * mlp,
        2 * shape.moe_layers * shape.hidden * shape.experts,
        2 * shape.vocab * shape.hidden,
    )


def attention_weights(shape: ModelShape) -> int:
    """Elements of the matrices of one layer's attention, without biases."""
    if shape.latent:
        return shape.latent.parameters(shape.hidden, shape.heads)
    return shape.hidden * (2 * shape.query_size + 2 * shape.kv_size)


def per_token(shape: ModelShape, seq: int, convention: str = "full") -> float:
    """FLOPs of training on one token: forward and backward, nothing computed twice. Raises ValueError for unknown names."""
    rule = CONVENTIONS[convention]
    parts = forward(shape, seq, rule.attention)
    if not rule.everything:
        return 3 * (parts.layers + parts.head)
    only_read = 0 if rule.embedding else shape.embedding_parameters - shape.tied * shape.vocab * shape.hidden
    return 6 * (shape.active_parameters - only_read) + 3 * parts.core


def hardware_per_token(shape: ModelShape, seq: int, recompute: str = "none", convention: str = "full") -> float:
    """As per_token, with what recomputation ("none", "selective", "full") runs a second time."""
    parts = forward(shape, seq, CONVENTIONS[convention].attention)
    extra = {"none": 0.0, "selective": CONVENTIONS[convention].core_again * parts.core, "full": parts.layers}
    if recompute not in extra:
        raise ValueError(f"recompute={recompute!r}: {nearest(recompute, extra)}")
    return per_token(shape, seq, convention) + extra[recompute]


def mfu(shape: ModelShape, seq: int, tokens_per_second: float, gpus: int, peak: float, convention: str = "full") -> float:
    """Model FLOPs utilisation: the FLOPs that the model needs ÷ what all accelerators could do, between 0 and 1.

    tokens_per_second: of the whole job; peak: FLOP/s of one accelerator. Source: arXiv 2204.02311, section 4.1.
    """
    _not_negative(tokens_per_second=tokens_per_second)
    if gpus < 1 or peak <= 0:
        raise ValueError(f"gpus={gpus}, peak={peak}: both must be above 0")
    return per_token(shape, seq, convention) * tokens_per_second / (gpus * peak)


def hfu(
    shape: ModelShape,
    seq: int,
    tokens_per_second: float,
    gpus: int,
    peak: float,
    recompute: str = "none",
    convention: str = "full",
) -> float:
    """Hardware FLOPs utilisation: as mfu, counting what is computed twice. Source: arXiv 2204.02311, section 4.1."""
    share = mfu(shape, seq, tokens_per_second, gpus, peak, convention)
    return share * hardware_per_token(shape, seq, recompute, convention) / per_token(shape, seq, convention)


def training(parameters: float, tokens: float) -> float:
    """6Φ FLOPs a token: 2Φ forward, 4Φ backward; attention's own matmuls are left out.

    Source: Kaplan et al., "Scaling Laws for Neural Language Models", arXiv 2001.08361, section 2.1.
    """
    _not_negative(parameters=parameters, tokens=tokens)
    return 6 * parameters * tokens


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if value < 0:
            raise ValueError(f"{name}={value}: cannot be negative")

"""What the functions of this exercise are given; help(Model) shows a class's fields."""

from typing import NamedTuple


class Model(NamedTuple):
    """Sizes of a GPT. The first dense_layers of its layers have an MLP, all others experts.

    heads share hidden evenly. gated: whether an MLP, or an expert, has three matrices, or only up and down. A token goes to
    top_k of the experts, and to each of the shared_experts, which are as large.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gated: bool
    vocab: int
    dense_layers: int
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0


class Layer(NamedTuple):
    """FLOPs of one layer's forward pass. products: with weights; scores: QKᵀ and the product with V; learns: whether its
    weights get gradients.
    """

    products: int
    scores: int
    learns: bool


class Row(NamedTuple):
    """A row of a data sheet: FLOP/s of one chip; sparse: whether half of each matrix is zero there."""

    flops: float
    sparse: bool


class Run(NamedTuple):
    """A training run. shapes: name -> shape of each parameter, once; tied: whether the head's matrix is the embedding's.

    sequences, accumulate: of one replica, a micro-batch, and micro-batches a step; chips: of one replica; seconds: a step.
    """

    shapes: dict[str, tuple[int, ...]]
    tied: bool
    layers: int
    hidden: int
    seq: int
    sequences: int
    accumulate: int
    replicas: int
    chips: int
    seconds: float
    weights_dtype: str
    products_dtype: str


class Span(NamedTuple):
    """A time of the rank's clock, in seconds. kind: "matmul", "other", "calls" or "wait"; call: which one a wait is for."""

    name: str
    kind: str
    started: float
    finished: float
    call: int | None = None


class Operator(NamedTuple):
    """A kernel. flops: 0 for what is no product; reads, writes: bytes of each tensor, by its name."""

    name: str
    flops: int
    reads: dict[str, int]
    writes: dict[str, int]

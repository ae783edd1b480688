"""The work of one rank in one layer for one micro-batch, kernel by kernel.

T: tokens of the micro-batch on this rank (b·s/c); t: tensor-parallel degree. Norms, dropouts and residual additions see T
tokens on every tensor-parallel rank, or T/t with sequence parallelism. Fused as Megatron-LM fuses them: bias with GeLU;
bias, dropout and addition; scale, mask and softmax.
Source of the split: arXiv 2205.05198, sections 4.1 and 4.2.
"""

from typing import NamedTuple

from manyranks.theory.architecture import ModelShape
from manyranks.theory.plan import OneRank
from manyranks.theory.stacks import ATTENTION

# Parts that selective recomputation runs again in addition to the attention core: arXiv 2412.19437, section 3.2.3.
CHEAP = ("rmsnorm", "product", "latent")
# A kernel here stands for what a module launches. Those of routing are a dozen operators each: the router's scores, its choice
# and its losses; counting, sorting and padding the copies; undoing it. The number was chosen on Megatron-Bridge's Qwen3-30B.
OPERATORS = {"route": 12}
FLASH_BACKWARD = 2.5  # five products instead of two: the scores are computed again; arXiv 2307.08691, section 3.1.2


class Kernel(NamedTuple):
    """A kernel of one rank and one micro-batch.

    weights: elements of the weight that it multiplies with
    sizes: m, n, k of a matrix product, and how many such products there are
    """

    part: str  # "attention", "core", "mlp", "product", "rmsnorm", "head", "route", …
    flops: float
    bytes: float
    rate: str = "bf16"  # of the FLOPs: or "fp8", "fp32"
    weights: float = 0.0
    specials: float = 0.0  # exponentials
    reach: float = 0.0  # share of the peak that its products reach, with an A100's instructions; 0: what every product does
    sizes: tuple[float, ...] = ()
    tiles: float = 0.0  # of unequal length, which are computed in the order of their length: blocks of rows under a causal mask


def matmul(part: str, m: float, n: float, k: float, itemsize: float = 2, count: float = 1, rate: str = "bf16") -> Kernel:
    """`count` products of m × k with k × n: 2mnk FLOPs each, every matrix read or written once."""
    moves = itemsize * count * (m * k + k * n + m * n)
    return Kernel(part, 2 * count * m * n * k, moves, rate, count * k * n, sizes=(m, n, k, count))


def moved(part: str, elements: float, reads_and_writes: float) -> Kernel:
    """A kernel that only moves memory.

    reads_and_writes: bytes of one element that pass between the chip and its memory
    """
    return Kernel(part, 0, elements * reads_and_writes)


def attended_length(shape: ModelShape, seq: int, attended: float) -> float:
    """Tokens that one token looks at, a mean over the layers: attended · seq, but in a layer with a window at most that."""
    windowed = shape.window_layers / shape.layers
    return (1 - windowed) * attended * seq + windowed * min(attended * seq, shape.window or seq)


class PartKernels(NamedTuple):
    """The kernels of a part of a stage.

    backward: gradients of inputs and of weights, and what has to be computed again first
    weights: the kernels of forward whose backward makes a weight's gradient
    core, core_backward: the kernels of attention's core, which are also in forward and backward
    """

    forward: list[Kernel]
    backward: list[Kernel]
    weights: list[Kernel]
    core: list[Kernel]
    core_backward: list[Kernel]


def work(shape: ModelShape, plan: OneRank, part: str, imbalance: float = 1.0) -> PartKernels:
    """Lists the kernels of a part of a stage, "dense" or "moe" (a layer), "head" or "embedding"."""
    if part == "embedding":
        once = embedding(shape, plan)
        return PartKernels([once], [once, once], [], [], [])
    there = head(shape, plan) if part == "head" else forward(shape, plan, part == "moe", imbalance)
    back = [] if part == "head" else again(there, plan)
    back += [gradient for kernel in there for gradient in gradients(kernel, plan)]
    core = [kernel for kernel in there if kernel.part == "core"]
    weights = [kernel for kernel in there if kernel.flops and kernel.part != "core"]
    return PartKernels(there, back, weights, core, [gradient for kernel in core for gradient in gradients(kernel, plan)])


def launches(work: list[Kernel]) -> int:
    """Counts how often the host launches something for these kernels: once for each; but see OPERATORS."""
    return sum(OPERATORS.get(kernel.part, 1) for kernel in work)


def forward(shape: ModelShape, plan: OneRank, moe: bool, imbalance: float = 1.0) -> list[Kernel]:
    """Kernels of one layer's forward pass.

    moe: whether the layer has experts
    imbalance: see experts
    """
    feed_forward = experts(shape, plan, imbalance) if moe else mlp(shape, plan)
    return attention(shape, plan) + feed_forward + norms(shape, plan)


def gradients(kernel: Kernel, plan: OneRank) -> list[Kernel]:
    """A product's backward is two like it, and one of them adds to the gradient of its weight; what only moves memory
    reads one tensor more."""
    if kernel.specials:
        # The exponentials again, and as many multiplications and subtractions for the scores' gradients.
        twice = {"flops": FLASH_BACKWARD * kernel.flops, "bytes": 2 * kernel.bytes, "specials": 2 * kernel.specials}
        return [kernel._replace(**twice, reach=ATTENTION[plan.framework.attention].backward if kernel.reach else 0.0)]
    if kernel.flops:
        added = kernel.weights * (2 * min(4, plan.recipe.gradients) - plan.recipe.matmul)
        m, n, k, count = kernel.sizes
        of_input = kernel._replace(sizes=(m, k, n, count))
        return [of_input, kernel._replace(bytes=kernel.bytes + added, sizes=(k, n, m, count))]
    return [Kernel(kernel.part, 0, 1.5 * kernel.bytes)]


def again(kernels: list[Kernel], plan: OneRank) -> list[Kernel]:
    """The kernels of forward that backward runs again."""
    if plan.recompute == "selective" and plan.framework.every_other:
        products = [kernel for kernel in kernels if kernel.flops and kernel.part != "core"]
        return products[1::2] + [kernel for kernel in kernels if not kernel.flops]
    return [kernel for kernel in kernels if recomputed(kernel, plan)]


def again_flops(shape: ModelShape, plan: OneRank) -> float:
    """Counts the FLOPs per token, in all layers, of the products that run again."""
    counts = {True: shape.moe_layers, False: shape.layers - shape.moe_layers}
    each = {moe: again(forward(shape, plan, moe), plan) for moe, count in counts.items() if count}
    return plan.tp * sum(counts[moe] * kernel.flops for moe, kernels in each.items() for kernel in kernels) / plan.rank_tokens


def recomputed(kernel: Kernel, plan: OneRank) -> bool:
    if plan.recompute == "selective":
        return kernel.part in CHEAP or (kernel.part == "core" and not plan.flash)
    return plan.recompute == "full"


def linear(part: str, m: float, n: float, k: float, plan: OneRank) -> list[Kernel]:
    """A linear layer in the plan's precision; matrices of 8 or 4 bits are first written from 16-bit activations, and read."""
    if plan.recipe.quantized:
        size, rate = plan.recipe.matmul, plan.recipe.rate
        once = 2 + size * (plan.framework.moved.quantized - 2)
        return [matmul(part, m, n, k, size, rate=rate), moved("quantize", m * (n + k), once)]
    return [unquantized(part, m, n, k, plan)]


def unquantized(part: str, m: float, n: float, k: float, plan: OneRank, count: float = 1) -> Kernel:
    """`count` products in the plan's precision, but in 16 bits where linear layers' are in 8."""
    if plan.recipe.rate == "fp32":
        return matmul(part, m, n, k, 4, count, "fp32")
    return matmul(part, m, n, k, count=count)


def attention(shape: ModelShape, plan: OneRank) -> list[Kernel]:
    """Projections, rotary positions, core. With fewer key/value heads than tensor-parallel ranks, each of these has one."""
    T, t, h = plan.rank_tokens, plan.tp, shape.hidden
    if shape.latent is not None:
        return latent_attention(shape, plan)
    queries, keys = shape.heads * shape.head_size, 2 * shape.kv_heads * shape.head_size
    width = (queries + max(keys, keys * t // shape.kv_heads if t > shape.kv_heads else 0)) / t
    rotary = [] if shape.positions else [moved("rotary", T * (queries + keys / 2) / t, plan.framework.moved.rotary)]
    return [
        *linear("attention", T, width, h, plan),
        *rotary,
        *core(shape, plan, shape.head_size, shape.head_size),
        *linear("attention", T, h, queries / t, plan),
    ]


def latent_attention(shape: ModelShape, plan: OneRank) -> list[Kernel]:
    """Queries, keys and values from short latent vectors. Source: arXiv 2412.19437, section 2.1.1."""
    T, t, h, a, c = plan.rank_tokens, plan.tp, shape.hidden, shape.heads, shape.latent
    key_size = c.nope_size + c.rope_size
    queries = linear("latent", T, a * key_size / t, c.q_rank or h, plan)
    return [
        *(linear("attention", T, c.q_rank, h, plan) if c.q_rank else []),
        *queries,
        *linear("attention", T, c.kv_rank + c.rope_size, h, plan),
        *linear("latent", T, a * (c.nope_size + c.value_size) / t, c.kv_rank, plan),
        moved("latent", T * a * 2 * key_size / t, 8),  # rotary positions, and joining their part to the other
        *core(shape, plan, key_size, c.value_size),
        *linear("attention", T, h, a * c.value_size / t, plan),
    ]


def core(shape: ModelShape, plan: OneRank, key_size: int, value_size: int) -> list[Kernel]:
    """Softmax(QKᵀ)V. With flash attention the masked half is skipped and no score reaches the memory."""
    T, heads = plan.rank_tokens, shape.heads / plan.tp
    if plan.flash:
        length = attended_length(shape, plan.seq, 0.5)
        moved_once = 2 * T * (heads + shape.kv_heads / plan.tp) * (key_size + value_size)  # blocks.attention_bytes_once
        rate = "fp32" if plan.recipe.rate == "fp32" else "bf16"
        flops = 2 * T * length * heads * (key_size + value_size)
        whole = Kernel("core", flops, moved_once, rate, specials=T * length * heads)
        if plan.framework.attention == "own":
            return [whole]
        one = ATTENTION[plan.framework.attention]
        diagonal, tiles = 1 + one.block / plan.seq, T * heads / one.block
        return [whole._replace(flops=diagonal * flops, specials=diagonal * whole.specials, reach=one.forward, tiles=tiles)]
    scores = T * plan.seq * heads
    rows = plan.seq / plan.cp
    softmax = [moved("core", scores, plan.framework.moved.softmax), *([moved("core", scores, 5)] if shape.dropout else [])]
    return [
        _product(rows, plan.seq, key_size, heads, plan),
        *softmax,
        _product(rows, value_size, plan.seq, heads, plan),
    ]


def _product(m: float, n: float, k: float, heads: float, plan: OneRank) -> Kernel:
    """Makes a product of activations with activations, for every head: no weight."""
    return unquantized("core", m, n, k, plan, plan.microbatch * heads)._replace(weights=0.0)


def mlp(
    shape: ModelShape, plan: OneRank, ffn: int | None = None, rows: float | None = None, cut: int | None = None
) -> list[Kernel]:
    """The feed-forward part.

    rows: of its input, default T
    ffn: default the dense layer's
    cut: ranks that share it, or t
    """
    rows = plan.rank_tokens if rows is None else rows
    width = (ffn or shape.ffn) / (cut or plan.tp)
    into = 2 if shape.gated else 1
    # Where it clamps what comes in, that's two operators more, and one that joins both halves again. Source: Megatron-LM,
    # weighted_bias_quick_geglu_impl.
    gated = plan.framework.moved.gated + (16 if shape.clamped else 0)
    return [
        *linear("mlp", rows, into * width, shape.hidden, plan),
        moved("product", rows * width, gated) if shape.gated else moved("gelu", rows * width, 4),
        *linear("mlp", rows, shape.hidden, width, plan),
    ]


def experts(shape: ModelShape, plan: OneRank, imbalance: float = 1.0) -> list[Kernel]:
    """Router, permutation, the rank's experts on the tokens sent to it, shared experts.

    Router and permutation see the tokens of all ranks that cut an expert together: T with etp = tp, and T/t with etp = 1.
    Shared experts are cut over tp, as the dense part is. Source: Megatron-LM, megatron/core/transformer/moe/README.md.

    imbalance: copies that come to this rank ÷ what would come under a balanced load.
    """
    T, h = plan.expert_tokens, shape.hidden
    routed, local = T * shape.top_k, shape.experts / plan.ep
    grouped = mlp(shape, plan, shape.expert_ffn, imbalance * routed, plan.expert_tp)
    loaded = [_of_experts(kernel, local, plan.recipe.matmul) for kernel in grouped]
    shared = shape.shared_experts * shape.shared_ffn
    # Summed on arrival; Megatron sorts it first, where it was computed. Tokens that travel in 8 bits do so in DeepEP's kernels.
    back = moved("route", routed * h, 4 if plan.framework.sends_8_bits else 4 + 4 * imbalance)
    padded = [moved("pad", imbalance * routed * h, 4)] if plan.recipe.quantized and plan.framework.pads else []
    return [
        unquantized("route", T, shape.experts, h, plan),
        moved("route", (1 + imbalance) / 2 * routed * h, 4 * sent_bytes(plan)),  # to be sent, and on arrival
        *padded,
        *loaded,
        *(added_biases(imbalance * routed * h, local) if shape.bias else []),
        *padded,
        back,
        *(mlp(shape, plan, shared) if shared else []),
    ]


def added_biases(elements: float, local: float) -> list[Kernel]:
    """The biases of local experts' last products, times the router's weights, which are in 32 bits: for each expert a product
    and an addition; then all in one, and in 16 bits. Source: Megatron-LM, TEGroupedMLP._apply_bias."""
    each = [moved("bias", elements / local, 4), moved("bias", elements / local, 10)] * round(local)
    return [*each, moved("bias", elements, 8), moved("bias", elements, 6)]


def sent_bytes(plan: OneRank) -> int:
    """Counts the bytes of an element on its way to an expert: results come back in 16 bits."""
    return 1 if plan.recipe.quantized and plan.framework.sends_8_bits else 2


def _of_experts(kernel: Kernel, local: float, item: float) -> Kernel:
    """The same rows, multiplied with the weights of `local` experts instead of one."""
    if not kernel.flops:
        return kernel
    m, n, k, _ = kernel.sizes
    moves, weights = kernel.bytes + (local - 1) * kernel.weights * item, local * kernel.weights
    return kernel._replace(weights=weights, bytes=moves, sizes=(m / local, n, k, local))


def norms(shape: ModelShape, plan: OneRank) -> list[Kernel]:
    """A layer's norms and its two residual additions, fused with bias and dropout."""
    elements = plan.split_tokens * shape.hidden
    norm = [moved(shape.norm, elements, _norm_bytes(shape, plan))] * shape.norms_per_layer
    return norm + [moved("residual", elements, 7 if shape.dropout else 6)] * 2


def _norm_bytes(shape: ModelShape, plan: OneRank) -> float:
    return plan.framework.moved.norm if shape.norm == "rmsnorm" else 4


def head(shape: ModelShape, plan: OneRank) -> list[Kernel]:
    """The last norm, logits and the loss over them, in 32 bits."""
    T, columns = plan.rank_tokens, shape.vocab / plan.tp
    return [
        moved(shape.norm, plan.split_tokens * shape.hidden, _norm_bytes(shape, plan)),
        unquantized("head", T, columns, shape.hidden, plan),
        moved("head", T * columns, 14),
    ]


def embedding(shape: ModelShape, plan: OneRank) -> Kernel:
    """A row for each token, read and written; backward moves twice as much."""
    return moved("embedding", plan.rank_tokens * shape.hidden, 4)

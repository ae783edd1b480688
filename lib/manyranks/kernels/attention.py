"""FlashAttention: softmax(QKᵀ)V without ever writing the scores. A program keeps a tile of queries, and walks along the keys.

B batch, A heads, G key/value heads, S queries, T keys, D head size. Each row's log-sum-exp is all that backward needs to make
its probabilities again. Source: FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2.
"""

import torch

from manyranks.kernels import checks
from manyranks.measure.interpreter import tl, triton

FORWARD, BACKWARD = {"num_warps": 8, "num_stages": 2}, {"num_warps": 8, "num_stages": 1}


@triton.jit
def _tile(x, strides, i, j, rows, columns):
    """x[i, j] of a matrix in memory, for a column of indices i and a row of indices j; 0 beyond its edges."""
    return tl.load(x + i * strides[2] + j * strides[3], mask=(i < rows) & (j < columns), other=0.0)


@triton.jit
def _scores(q, k_turned, mask, mask_strides, i, j, S, T, scale, shift, CAUSAL: tl.constexpr, MASKED: tl.constexpr):
    """Scores of the queries i against the keys j, -inf where a query may not see a key. Query i sees keys up to i + shift."""
    seen = (i < S) & (j < T)
    if CAUSAL:
        seen = seen & (j <= i + shift)
    if MASKED:
        seen = seen & (tl.load(mask + i * mask_strides[2] + j * mask_strides[3], mask=seen, other=0) != 0)
    return tl.where(seen, tl.dot(q, k_turned, input_precision="ieee") * scale, -float("inf"))


@triton.jit
def forward_kernel(
    q, k, v, mask, out, lse, q_strides, k_strides, v_strides, mask_strides, out_strides,
    A, S, T, D, GROUP, scale, shift,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, HEAD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    b, a = head // A, head % A
    k += b * k_strides[0] + a // GROUP * k_strides[1]
    v += b * v_strides[0] + a // GROUP * v_strides[1]
    mask += b * mask_strides[0] + a * mask_strides[1]
    first = tl.program_id(1) * QUERIES
    rows = first + tl.arange(0, QUERIES).to(tl.int64)
    i, d = rows[:, None], tl.arange(0, HEAD)[None, :]
    queries = _tile(q + b * q_strides[0] + a * q_strides[1], q_strides, i, d, S, D)
    most = tl.full((QUERIES,), -float("inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, HEAD), tl.float32)
    end = tl.minimum(T, first + QUERIES + shift) if CAUSAL else T
    for start in range(0, end, KEYS):
        columns = start + tl.arange(0, KEYS).to(tl.int64)
        keys = _tile(k, k_strides, columns[:, None], d, T, D)
        scores = _scores(queries, tl.trans(keys), mask, mask_strides, i, columns[None, :], S, T, scale, shift, CAUSAL, MASKED)
        higher = tl.maximum(most, tl.max(scores, axis=1))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # a row that has seen no key yet
        powers = tl.exp(scores - base[:, None])
        shrink = tl.exp(most - base)
        total = total * shrink + tl.sum(powers, axis=1)
        values = _tile(v, v_strides, columns[:, None], d, T, D)
        sums = sums * shrink[:, None] + tl.dot(powers.to(values.dtype), values, input_precision="ieee")
        most = higher
    total = tl.where(total == 0.0, 1.0, total)  # a row that sees no key at all: 0 from 0 / 1, and a log-sum-exp of -inf
    result = sums / total[:, None]
    to = out + b * out_strides[0] + a * out_strides[1] + i * out_strides[2] + d * out_strides[3]
    tl.store(to, result.to(out.dtype.element_ty), mask=(i < S) & (d < D))
    tl.store(lse + head * S + rows, most + tl.log(total), mask=rows < S)


@triton.jit
def _slopes(queries, keys, values, grads, row_lse, row_delta, mask, mask_strides, i, j, S, T, scale, shift,
            CAUSAL: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The probabilities P, made again from the log-sum-exp, and the gradient of the scores: P · (dO Vᵀ − delta) · scale."""
    scores = _scores(queries, tl.trans(keys), mask, mask_strides, i, j, S, T, scale, shift, CAUSAL, MASKED)
    finite = tl.where(row_lse == -float("inf"), 0.0, row_lse)
    powers = tl.exp(scores - finite[:, None])
    slopes = powers * (tl.dot(grads, tl.trans(values), input_precision="ieee") - row_delta[:, None]) * scale
    return powers, slopes


@triton.jit
def keys_kernel(
    q, k, v, grad, mask, lse, delta, d_k, d_v, q_strides, k_strides, v_strides, grad_strides, mask_strides,
    A, S, T, D, GROUP, scale, shift,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, HEAD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    groups = A // GROUP
    head = tl.program_id(0).to(tl.int64)
    b, g = head // groups, head % groups
    first = tl.program_id(1) * KEYS
    columns = first + tl.arange(0, KEYS).to(tl.int64)
    d = tl.arange(0, HEAD)[None, :]
    keys = _tile(k + b * k_strides[0] + g * k_strides[1], k_strides, columns[:, None], d, T, D)
    values = _tile(v + b * v_strides[0] + g * v_strides[1], v_strides, columns[:, None], d, T, D)
    k_sums = tl.zeros((KEYS, HEAD), tl.float32)
    v_sums = tl.zeros((KEYS, HEAD), tl.float32)
    begin = tl.maximum(0, first - shift) // QUERIES * QUERIES if CAUSAL else 0  # the first queries that see these keys
    for a in range(g * GROUP, g * GROUP + GROUP):
        for start in range(begin, S, QUERIES):
            rows = start + tl.arange(0, QUERIES).to(tl.int64)
            i = rows[:, None]
            queries = _tile(q + b * q_strides[0] + a * q_strides[1], q_strides, i, d, S, D)
            grads = _tile(grad + b * grad_strides[0] + a * grad_strides[1], grad_strides, i, d, S, D)
            row_lse = tl.load(lse + (b * A + a) * S + rows, mask=rows < S, other=0.0)
            row_delta = tl.load(delta + (b * A + a) * S + rows, mask=rows < S, other=0.0)
            its_mask = mask + b * mask_strides[0] + a * mask_strides[1]
            powers, slopes = _slopes(queries, keys, values, grads, row_lse, row_delta, its_mask, mask_strides,
                                     i, columns[None, :], S, T, scale, shift, CAUSAL, MASKED)  # fmt: skip
            v_sums += tl.dot(tl.trans(powers).to(grads.dtype), grads, input_precision="ieee")
            k_sums += tl.dot(tl.trans(slopes).to(queries.dtype), queries, input_precision="ieee")
    to = head * T * D + columns[:, None] * D + d
    tl.store(d_k + to, k_sums.to(d_k.dtype.element_ty), mask=(columns[:, None] < T) & (d < D))
    tl.store(d_v + to, v_sums.to(d_v.dtype.element_ty), mask=(columns[:, None] < T) & (d < D))


@triton.jit
def queries_kernel(
    q, k, v, grad, mask, lse, delta, d_q, q_strides, k_strides, v_strides, grad_strides, mask_strides,
    A, S, T, D, GROUP, scale, shift,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, HEAD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    b, a = head // A, head % A
    k += b * k_strides[0] + a // GROUP * k_strides[1]
    v += b * v_strides[0] + a // GROUP * v_strides[1]
    mask += b * mask_strides[0] + a * mask_strides[1]
    first = tl.program_id(1) * QUERIES
    rows = first + tl.arange(0, QUERIES).to(tl.int64)
    i, d = rows[:, None], tl.arange(0, HEAD)[None, :]
    queries = _tile(q + b * q_strides[0] + a * q_strides[1], q_strides, i, d, S, D)
    grads = _tile(grad + b * grad_strides[0] + a * grad_strides[1], grad_strides, i, d, S, D)
    row_lse = tl.load(lse + head * S + rows, mask=rows < S, other=0.0)
    row_delta = tl.load(delta + head * S + rows, mask=rows < S, other=0.0)
    sums = tl.zeros((QUERIES, HEAD), tl.float32)
    end = tl.minimum(T, first + QUERIES + shift) if CAUSAL else T
    for start in range(0, end, KEYS):
        columns = start + tl.arange(0, KEYS).to(tl.int64)
        keys = _tile(k, k_strides, columns[:, None], d, T, D)
        values = _tile(v, v_strides, columns[:, None], d, T, D)
        _, slopes = _slopes(queries, keys, values, grads, row_lse, row_delta, mask, mask_strides,
                            i, columns[None, :], S, T, scale, shift, CAUSAL, MASKED)  # fmt: skip
        sums += tl.dot(slopes.to(keys.dtype), keys, input_precision="ieee")
    tl.store(d_q + head * S * D + i * D + d, sums.to(d_q.dtype.element_ty), mask=(i < S) & (d < D))


def forward(q_BASD, k_BGTD, v_BGTD, mask_BAST=None, causal=False, shift=0, queries=64, keys=64):
    """Attends, and returns the output and each row's log-sum-exp, -inf for a row that sees no key.

    Takes flash_attention's arguments, unchecked, and isn't differentiable.
    """
    B, A, S, D = q_BASD.shape
    out_BASD = torch.empty((B, A, S, D), dtype=q_BASD.dtype, device=q_BASD.device)
    lse_BAS = torch.empty((B, A, S), dtype=torch.float32, device=q_BASD.device)
    if out_BASD.numel():
        sizes, flags = _sizes(q_BASD, k_BGTD, mask_BAST, causal, shift, queries, keys)
        mask = q_BASD if mask_BAST is None else mask_BAST
        strides = [each.stride() for each in (q_BASD, k_BGTD, v_BGTD, mask, out_BASD)]
        grid = checks.grid(B * A, triton.cdiv(S, queries))
        forward_kernel[grid](q_BASD, k_BGTD, v_BGTD, mask, out_BASD, lse_BAS, *strides, *sizes, *flags, **FORWARD)
    return out_BASD, lse_BAS


def backward(q_BASD, k_BGTD, v_BGTD, out_BASD, lse_BAS, grad_BASD, mask_BAST=None, causal=False, shift=0, queries=64, keys=64):
    """Gradients of queries, keys and values, from what forward returned and the gradient of its output.

    The output and the log-sum-exp may come from more keys than these, as in ring attention, where the gradients of all blocks
    add up.
    """
    B, A, S, _ = q_BASD.shape
    G, T = k_BGTD.shape[1:3]
    delta_BAS = (grad_BASD.float() * out_BASD.float()).sum(-1)
    d_q, d_k, d_v = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q_BASD, k_BGTD, v_BGTD))
    if out_BASD.numel() and T:
        sizes, flags = _sizes(q_BASD, k_BGTD, mask_BAST, causal, shift, queries, keys)
        mask = q_BASD if mask_BAST is None else mask_BAST
        strides = [each.stride() for each in (q_BASD, k_BGTD, v_BGTD, grad_BASD, mask)]
        read = (q_BASD, k_BGTD, v_BGTD, grad_BASD, mask, lse_BAS, delta_BAS)
        keys_kernel[checks.grid(B * G, triton.cdiv(T, keys))](*read, d_k, d_v, *strides, *sizes, *flags, **BACKWARD)
        queries_kernel[checks.grid(B * A, triton.cdiv(S, queries))](*read, d_q, *strides, *sizes, *flags, **BACKWARD)
    return d_q, d_k, d_v


def _sizes(q, k, mask, causal, shift, queries, keys):
    (_, A, S, D), (_, G, T, _) = q.shape, k.shape
    sizes = (A, S, T, D, A // G, D**-0.5, shift)
    return sizes, (causal, mask is not None, max(16, triton.next_power_of_2(D)), queries, keys)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, causal, shift, queries, keys):
        out, lse = forward(q, k, v, mask, causal, shift, queries, keys)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.rest = (causal, shift, queries, keys)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, mask, out, lse = ctx.saved_tensors
        return *backward(q, k, v, out, lse, grad, mask, *ctx.rest), None, None, None, None, None


def flash_attention(
    q_BASD: torch.Tensor,
    k_BGTD: torch.Tensor,
    v_BGTD: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    shift: int = 0,
    queries: int = 64,
    keys: int = 64,
) -> torch.Tensor:
    """Computes softmax(QKᵀ / √D) V; neither pass ever writes the scores.

    q_BASD: float32, bfloat16 or float16; any strides.
    k_BGTD, v_BGTD: the same dtype, with as many heads or a divisor of them.
    mask: True where a query may see a key, of a shape that expands to B × A × S × T.
    causal: query i sees keys up to i + shift. With shift 0 it's PyTorch's is_causal.
    queries, keys: of a tile, powers of two from 16.
    Returns B × A × S × D, 0 in rows that see no key, and backward works on it.
    Raises ValueError for other shapes, dtypes or tiles.
    """
    checks.same(q_BASD=q_BASD, k_BGTD=k_BGTD, v_BGTD=v_BGTD)
    checks.shape("q_BASD", q_BASD, None, None, None, None)
    B, A, S, D = q_BASD.shape
    checks.shape("k_BGTD", k_BGTD, B, None, None, D)
    checks.shape("v_BGTD", v_BGTD, *k_BGTD.shape)
    G, T = k_BGTD.shape[1:3]
    if not G or A % G:
        raise ValueError(f"{A} heads of queries and {G} of keys: the second must divide the first")
    if not D:
        raise ValueError("the head size is 0: give 1 or more")
    checks.block(queries=queries, keys=keys)
    if type(shift) is not int or type(causal) is not bool:
        raise ValueError(f"causal={causal!r}, shift={shift!r}: give True or False, and a whole number")
    if mask is not None:
        checks.same((torch.bool,), mask=mask)
        try:
            mask = mask.expand(B, A, S, T)
        except RuntimeError:
            raise ValueError(f"mask has shape {tuple(mask.shape)}: give one that expands to {B} × {A} × {S} × {T}") from None
    return _FlashAttention.apply(q_BASD, k_BGTD, v_BGTD, mask, causal, shift, queries, keys)

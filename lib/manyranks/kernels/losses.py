"""The loss over a vocabulary without its logits: they are made tile by tile, used, and made again in backward.

Source: "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009.
"""

import torch

from manyranks.kernels import checks
from manyranks.measure.interpreter import tl, triton

OPTIONS = {"num_warps": 8, "num_stages": 2}


@triton.jit
def _logits(hidden, weight, i, j, T, V, H, hidden_strides, weight_strides, STEP: tl.constexpr):
    """A tile of logits: the tokens i (a column) against the words j (a row); -inf where there is no such word."""
    sums = tl.zeros((i.shape[0], j.shape[1]), tl.float32)
    for start in range(0, H, STEP):
        h = start + tl.arange(0, STEP)
        across, down = h[None, :], h[:, None]
        x = tl.load(hidden + i * hidden_strides[0] + across * hidden_strides[1], mask=(i < T) & (across < H), other=0.0)
        w = tl.load(weight + j * weight_strides[0] + down * weight_strides[1], mask=(down < H) & (j < V), other=0.0)
        sums = tl.dot(x, w, sums, input_precision="ieee")
    return tl.where(j < V, sums, -float("inf"))


@triton.jit
def loss_kernel(
    hidden, weight, targets, lse, chosen, T, V, H, hidden_strides, weight_strides,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    i, inside = tokens[:, None], tokens < T
    target = tl.load(targets + tokens, mask=inside, other=-1)
    most = tl.full((TOKENS,), -float("inf"), tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    found = tl.zeros((TOKENS,), tl.float32)
    for start in range(0, V, WORDS):
        j = (start + tl.arange(0, WORDS).to(tl.int64))[None, :]
        logits = _logits(hidden, weight, i, j, T, V, H, hidden_strides, weight_strides, STEP)
        higher = tl.maximum(most, tl.max(logits, axis=1))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(logits - higher[:, None]), axis=1)
        found += tl.sum(tl.where(j == target[:, None], logits, 0.0), axis=1)
        most = higher
    tl.store(lse + tokens, most + tl.log(total), mask=inside)
    tl.store(chosen + tokens, found, mask=inside)


@triton.jit
def gradient_kernel(
    hidden, weight, targets, lse, scale, d_hidden, d_weight, T, V, H, ignore, hidden_strides, weight_strides,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    words = tl.program_id(1).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    i, j, inside = tokens[:, None], words[None, :], tokens < T
    logits = _logits(hidden, weight, i, j, T, V, H, hidden_strides, weight_strides, STEP)
    target = tl.load(targets + tokens, mask=inside, other=ignore)[:, None]
    row_lse = tl.load(lse + tokens, mask=inside, other=0.0)
    slope = tl.exp(logits - row_lse[:, None]) - tl.where(j == target, 1.0, 0.0)
    slope = tl.where((j < V) & (target != ignore), slope, 0.0).to(hidden.dtype.element_ty)  # between -1 and 1, for 16 bits
    factor = tl.load(scale)  # 1 / tokens, and what the loss is multiplied with
    for start in range(0, H, STEP):
        h = (start + tl.arange(0, STEP))[None, :]
        x = tl.load(hidden + i * hidden_strides[0] + h * hidden_strides[1], mask=(i < T) & (h < H), other=0.0)
        w = tl.load(weight + words[:, None] * weight_strides[0] + h * weight_strides[1],
                    mask=(words[:, None] < V) & (h < H), other=0.0)  # fmt: skip
        to_hidden = tl.dot(slope, w, input_precision="ieee") * factor
        to_weight = tl.dot(tl.trans(slope), x, input_precision="ieee") * factor
        tl.atomic_add(d_hidden + i * H + h, to_hidden, mask=(i < T) & (h < H), sem="relaxed")
        tl.atomic_add(d_weight + words[:, None] * H + h, to_weight, mask=(words[:, None] < V) & (h < H), sem="relaxed")


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TH, weight_VH, targets_T, ignore, tiles):
        (t, h), v = hidden_TH.shape, weight_VH.shape[0]
        lse_T, chosen_T = torch.empty(2, t, dtype=torch.float32, device=hidden_TH.device)
        strides = hidden_TH.stride(), weight_VH.stride()
        if t:
            grid = (triton.cdiv(t, tiles[0]),)
            loss_kernel[grid](hidden_TH, weight_VH, targets_T, lse_T, chosen_T, t, v, h, *strides, *tiles, **OPTIONS)
        counted_T = targets_T != ignore
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, lse_T)
        ctx.ignore, ctx.tiles = ignore, tiles
        return torch.where(counted_T, lse_T - chosen_T, 0.0).sum() / counted_T.sum()

    @staticmethod
    def backward(ctx, d_loss):
        hidden_TH, weight_VH, targets_T, lse_T = ctx.saved_tensors
        (t, h), v = hidden_TH.shape, weight_VH.shape[0]
        scale = (d_loss / (targets_T != ctx.ignore).sum()).float()
        inputs = hidden_TH, weight_VH
        d_hidden, d_weight = (torch.zeros(each.shape, dtype=torch.float32, device=each.device) for each in inputs)
        if t:
            grid = checks.grid(triton.cdiv(t, ctx.tiles[0]), triton.cdiv(v, ctx.tiles[1]))
            strides = hidden_TH.stride(), weight_VH.stride()
            made = (targets_T, lse_T, scale, d_hidden, d_weight)
            gradient_kernel[grid](*inputs, *made, t, v, h, ctx.ignore, *strides, *ctx.tiles, **OPTIONS)
        return d_hidden.to(hidden_TH.dtype), d_weight.to(weight_VH.dtype), None, None, None


def cross_entropy(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_T: torch.Tensor,
    ignore: int = -100,
    tokens: int = 32,
    words: int = 64,
    step: int = 32,
) -> torch.Tensor:
    """Computes the mean cross-entropy of softmax(hidden · weightᵀ) without ever writing the logits.

    hidden_TH: one row per token; float32, bfloat16 or float16.
    weight_VH: the head's weight, one row per word; the same dtype.
    targets_T: each token's word, int64; `ignore` leaves the token out.
    tokens, words: of a tile of logits, powers of two from 16.
    step: elements of H read at a time, a power of two from 16.
    Returns a scalar in float32 that backward works on. Backward makes the logits again; its sums are atomic, so they may differ
    in their last bits from run to run on a GPU. The targets are checked, for which the host waits for the GPU.
    Raises ValueError for other shapes, dtypes, targets or tiles.
    """
    checks.same(hidden_TH=hidden_TH, weight_VH=weight_VH)
    checks.shape("hidden_TH", hidden_TH, None, None)
    checks.shape("weight_VH", weight_VH, None, hidden_TH.shape[1])
    checks.same((torch.int64,), targets_T=targets_T)
    checks.shape("targets_T", targets_T, len(hidden_TH))
    checks.block(tokens=tokens, words=words, step=step)
    wrong = (targets_T != ignore) & ((targets_T < 0) | (targets_T >= len(weight_VH)))
    if wrong.any():
        raise ValueError(f"targets_T has {targets_T[wrong][0]}: words are 0 to {len(weight_VH) - 1}, or ignore={ignore}")
    return _CrossEntropy.apply(hidden_TH, weight_VH, targets_T.contiguous(), ignore, (tokens, words, step))

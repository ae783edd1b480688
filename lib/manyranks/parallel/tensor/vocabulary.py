"""A vocabulary cut into t parts: the embedding, and a loss that never has all logits.

    B batch   S sequence   H hidden size   N = B·S tokens, flat
    V vocabulary   W = ⌈V/t⌉ what a rank has of it; where t does not divide V, the last
                   rows of the last ranks are padding: zeros that take no part
    t ranks of the group

Rank r has the tokens r·W … r·W + W − 1. Source: Shoeybi et al., "Megatron-LM", arXiv
1909.08053, section 3.
"""

import math
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from manyranks.parallel.collectives.messages import Group
from manyranks.parallel.tensor.cuts import Cut, padded, rank, size
from manyranks.parallel.tensor.layers import (
    How,
    all_reduce,
    reduce_out,
    reduce_scatter_out,
)

# Exponentials are made for so many parts of the rows, one after another: beside the logits
# there is 1/16 of them, in 32 bits, and no second tensor of their size.
_PARTS = 16
_REDUCTIONS = ("mean", "sum", "none")


class VocabParallelEmbedding(nn.Module):
    """nn.Embedding, of whose V rows each rank has ⌈V/t⌉: looked up there, then summed.

    weight: [W, H]; rows beyond V are zeros and get no gradient. how: see layers.How; with
    sequence_parallel a rank gets its shard of the sequence. The first weights are
    nn.Embedding's, cut: the same at every t.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, group: Group = None, **how):
        super().__init__()
        whole = nn.Embedding(num_embeddings, embedding_dim)
        self._take(whole, How(group, **how), None)

    @classmethod
    def of(cls, embedding: nn.Embedding, how: How, cut: Cut | None = None) -> Self:
        """This rank's part of an existing one.

        cut: of its rows, None for ⌈V/t⌉

        Raises ValueError for an option of nn.Embedding that needs all rows, and for options
        of How that do not go together.
        """
        for name in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
            value = getattr(embedding, name)
            if value is not None and value is not False:  # padding_idx may be 0
                raise ValueError(
                    f"an embedding with {name}={value}: it needs all rows; leave it out"
                )
        own = cls.__new__(cls)
        nn.Module.__init__(own)
        own._take(embedding, how, cut)
        return own

    def _take(self, whole: nn.Embedding, how: How, cut: Cut | None) -> None:
        rows, self.embedding_dim = whole.weight.shape
        self.num_embeddings, self.how = rows, how.check()
        self.cut = cut or padded(rows, size(how.group), rank(how.group))
        self.weight = self.cut.part(whole.weight)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """x_BSH, or its shard x_BsH: one all-reduce, or one reduce-scatter.

        The gradient needs none, or one all-gather. Raises IndexError for tokens that are
        not 0 … V − 1, ValueError for a sequence that t does not divide.
        """
        self._check(tokens_BS)
        start, stop = self.cut.span
        elsewhere_BS = (tokens_BS < start) | (tokens_BS >= stop)
        x_BSH = F.embedding((tokens_BS - start).masked_fill_(elsewhere_BS, 0), self.weight)
        x_BSH = x_BSH.masked_fill_(elsewhere_BS[..., None], 0)
        leave = reduce_scatter_out if self.how.sequence_parallel else reduce_out
        return leave(x_BSH, self.how.group)

    def _check(self, tokens_BS: Tensor) -> None:
        wrong = tokens_BS[(tokens_BS < 0) | (tokens_BS >= self.num_embeddings)]
        if wrong.numel():
            raise IndexError(
                f"token {wrong[0].item()}: this embedding has {self.num_embeddings} rows; "
                f"give tokens from 0 to {self.num_embeddings - 1}"
            )

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, here {len(self.weight)}, {self.embedding_dim}"


def vocab_parallel_cross_entropy(
    logits_BSW: Tensor,
    targets_BS: Tensor,
    group: Group = None,
    vocab: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """F.cross_entropy where each rank has W columns of the logits, in fp32 or better.

    The same number on all ranks, by two small all-reduces: the maxima of B·S rows; then
    their sums of exponentials, and their targets' logits. No rank has, at any time, a
    tensor of more than B·S·W elements: for backward the logits stay, and it makes one more
    of their size and dtype, their gradient.

    vocab: V, where it is not t·W
    targets_BS: 0 … V − 1, or ignore_index, the same on all ranks; their mean is over those
        that count, nan where none does
    reduction: "mean", "sum", or "none", flat

    No second derivatives.
    Raises ValueError, before any message, for sizes that do not go together, targets
    outside the vocabulary and another reduction.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: give one of {', '.join(_REDUCTIONS)}")
    vocab = logits_BSW.shape[-1] * size(group) if vocab is None else vocab
    cut = padded(vocab, size(group), rank(group))
    _check_sizes(logits_BSW, targets_BS, cut, vocab)
    logits_NW, targets_N = logits_BSW.reshape(-1, cut.longest), targets_BS.reshape(-1)
    counts_N = targets_N != ignore_index
    _check_targets(targets_N[counts_N], vocab)
    loss_N = _CrossEntropy.apply(logits_NW, targets_N, counts_N, cut, group)
    if reduction == "none":
        return loss_N
    return loss_N.sum() if reduction == "sum" else loss_N.sum() / counts_N.sum()


class _CrossEntropy(torch.autograd.Function):
    """log Σ exp(logit) − the target's logit; its gradient is softmax − one-hot."""

    @staticmethod
    def forward(
        ctx, logits_NW: Tensor, targets_N: Tensor, counts_N: Tensor, cut: Cut, group: Group
    ) -> Tensor:
        start, stop = ctx.span = cut.span
        own_NW = logits_NW[:, : stop - start]  # without padding
        max_N = _row_maxima(own_NW, group)
        sums_N = [(x - m).exp_().sum(-1) for x, m in _by_rows(own_NW, max_N[:, None])]
        place_N, here_N = _places(targets_N, ctx.span)
        # With its maximum taken off, too, the target's logit keeps its digits in the sum.
        target_N = logits_NW.gather(1, place_N[:, None])[:, 0] - max_N
        target_N = target_N.where(here_N, 0)
        sum_N, target_N = all_reduce(torch.stack([torch.cat(sums_N), target_N]), group)
        log_N = sum_N.log()
        ctx.save_for_backward(logits_NW, targets_N, counts_N, max_N + log_N)
        return (log_N - target_N).where(counts_N, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_N: Tensor) -> tuple:
        logits_NW, targets_N, counts_N, log_N = ctx.saved_tensors
        start, stop = ctx.span
        place_N, here_N = _places(targets_N, ctx.span)
        grad_N = grad_N.where(counts_N, 0)
        grad_NW = torch.empty_like(logits_NW)
        columns = [x_N[:, None] for x_N in (log_N, grad_N, place_N, here_N.to(log_N.dtype))]
        for made, x, log, scale, place, one in _by_rows(grad_NW, logits_NW, *columns):
            made.copy_((x - log).exp_().scatter_add_(1, place, -one).mul_(scale))
        grad_NW[:, stop - start :] = 0  # padding
        return grad_NW, None, None, None, None


def _row_maxima(own_NW: Tensor, group: Group) -> Tensor:
    """Each row's largest logit on any rank, in 32 bits or more."""
    if own_NW.shape[1]:  # a small vocabulary's last ranks may have nothing but padding
        max_N = own_NW.amax(-1)
    else:
        max_N = own_NW.new_full(own_NW.shape[:1], -math.inf)
    max_N = max_N.to(torch.promote_types(max_N.dtype, torch.float32))
    if size(group) > 1:
        dist.all_reduce(max_N, dist.ReduceOp.MAX, group=group)
    return max_N


def _places(targets_N: Tensor, span: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The column of each target's logit, and whether this rank has it; if not, 0."""
    here_N = (targets_N >= span[0]) & (targets_N < span[1])
    return (targets_N - span[0]).long().where(here_N, 0), here_N


def _by_rows(*tensors: Tensor):
    """The same few rows of each tensor, part after part."""
    rows = max(1, -(-len(tensors[0]) // _PARTS))
    return zip(*(x.split(rows) for x in tensors), strict=True)


def _check_sizes(logits_BSW: Tensor, targets_BS: Tensor, cut: Cut, vocab: int) -> None:
    t, columns = len(cut.spans), logits_BSW.shape[-1]
    if columns != cut.longest:
        raise ValueError(
            f"logits of {columns} columns with vocab={vocab} on {t} ranks: each rank's are "
            f"{cut.longest}, the vocabulary / {t} rounded up"
        )
    if targets_BS.shape != logits_BSW.shape[:-1]:
        raise ValueError(
            f"targets of shape {tuple(targets_BS.shape)} for logits of shape "
            f"{tuple(logits_BSW.shape)}: give one for each row of logits, "
            f"{tuple(logits_BSW.shape[:-1])}"
        )
    if targets_BS.is_floating_point() or not logits_BSW.is_floating_point():
        raise ValueError(
            f"logits are {logits_BSW.dtype} and targets {targets_BS.dtype}: give logits as "
            "floating-point numbers, and targets as whole ones, a token each"
        )


def _check_targets(targets_N: Tensor, vocab: int) -> None:
    wrong = targets_N[(targets_N < 0) | (targets_N >= vocab)]
    if wrong.numel():
        raise ValueError(
            f"target {wrong[0].item()}: the vocabulary has {vocab} tokens; give 0 to "
            f"{vocab - 1}, or ignore_index where none is to count"
        )

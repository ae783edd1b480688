"""parallel.tensor.vocabulary: embedding and loss, cut by tokens, are one process's, and nobody has all logits."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyranks.measure.memory import saved_bytes
from manyranks.parallel.tensor import VocabParallelEmbedding, vocab_parallel_cross_entropy
from manyranks.parallel.tensor.cuts import own_part, padded
from manyranks.parallel.tensor.layers import How
from tests.ranks.test_tensor import off, random

DOUBLE = torch.float64


def cut(vocab: int, dim: int = 0):
    return padded(vocab, dist.get_world_size(), dist.get_rank(), dim)


def looked_up() -> list[float]:
    """Gaps of outputs and gradients, for vocabularies; 3 leaves nothing but padding to a fourth rank."""
    found = []
    for vocab in (3, 7, 10, 16):
        for how in (How(), How(sequence_parallel=True)):
            whole, own = nn.Embedding(vocab, 5, dtype=DOUBLE), own_part if how.sequence_parallel else torch.clone
            whole.weight.data = random(vocab, 5)
            ours, outer_BSH = VocabParallelEmbedding.of(whole, how), random(3, 12, 5, seed=1)
            tokens_BS = torch.arange(36).view(3, 12) % vocab
            x_BSH, y = whole(tokens_BS), ours(tokens_BS)
            assert torch.equal(y, own(x_BSH)), "one rank's row plus zeros is exact"
            x_BSH.backward(outer_BSH)
            y.backward(own(outer_BSH))
            found += [off(ours.weight, cut(vocab).own(whole.weight)), off(ours.weight.grad, cut(vocab).own(whole.weight.grad))]
    return found


def test_the_embedding_and_its_gradient_are_those_of_one_process(shared_worlds):
    assert max(max(found) for found in shared_worlds.run(looked_up)) < 1e-12


# The loss


def own_columns(logits_NV: torch.Tensor, filling: float = math.nan) -> torch.Tensor:
    """This rank's logits, as a leaf; what they are filled up with must take no part."""
    c = cut(logits_NV.shape[-1], 1)
    shard = c.own(logits_NV.detach())
    shard[:, c.span[1] - c.span[0] :] = filling
    return shard.requires_grad_()


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """nan and inf are equal to themselves."""
    assert a.shape == b.shape
    differ = (a != b) & ~(a.isnan() & b.isnan())
    return (a - b)[differ].abs().nan_to_num(math.inf).max().item() if differ.any() else 0.0


def differences(logits_NV: torch.Tensor, targets_N: torch.Tensor, **options) -> tuple[float, float, list[float]]:
    """To F.cross_entropy: of the loss, and of the logits' gradient, made twice; the loss."""
    whole, shard = logits_NV.clone().requires_grad_(), own_columns(logits_NV)
    before = shard.detach().clone()
    expected = F.cross_entropy(whole, targets_N, **options)
    found = vocab_parallel_cross_entropy(shard, targets_N, vocab=whole.shape[1], **options)
    outer = random(*expected.shape) + 2.5
    expected.backward(outer)
    grads = [torch.autograd.grad(found, shard, outer, retain_graph=True)[0] for _ in range(2)]
    assert gap(shard.detach(), before) == 0, "the logits have changed"
    gaps = [gap(grad, cut(whole.shape[1], 1).own(whole.grad)) for grad in grads]  # zeros where there is padding
    return gap(found.detach(), expected.detach()), max(gaps), found.detach().flatten().tolist()


@st.composite
def cases(draw):
    """Any vocabulary, also of fewer tokens than ranks; rows, also none; logits that overflow alone, and some −∞."""
    vocab, rows = draw(st.integers(1, 20)), draw(st.integers(0, 20))
    logits = st.sampled_from([0.0, 1.5, -2.25, 700.0, -745.0, 1e4, -1e4, -math.inf])
    numbers = draw(st.lists(logits, min_size=vocab * rows, max_size=vocab * rows))
    ignored = draw(st.sampled_from([-100, 0, vocab - 1]))
    targets = draw(st.lists(st.sampled_from([*range(vocab), ignored]), min_size=rows, max_size=rows))
    reduction = draw(st.sampled_from(["mean", "sum", "none"]))
    return vocab, numbers, targets, ignored, reduction


ROWS = [math.sin(5 * k) for k in range(7 * 6)]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
@example(case=(7, ROWS, [-100] * 6, -100, "mean"))  # none counts: nan, as PyTorch's
@example(case=(7, ROWS, [2, 3, 6, 5, 0, 2], 2, "mean"))
@example(case=(7, ROWS, [2, 3, 6, 5, 0, -100], -100, "none"))
def test_the_loss_and_its_gradient_are_those_of_one_process_for_any_logits(shared_world, case):
    vocab, numbers, targets, ignored, reduction = case

    def compare():
        logits_NV = torch.tensor(numbers, dtype=DOUBLE).view(len(targets), vocab)
        # A row without any finite logit has no softmax; PyTorch's own gradient of it is nan in places.
        logits_NV[logits_NV.isinf().all(-1)] = 0
        targets_N = torch.tensor(targets, dtype=torch.long)
        return differences(logits_NV, targets_N, reduction=reduction, ignore_index=ignored)

    ranks = shared_world.run(compare)
    for loss, gradient, same in ranks:
        assert loss < 1e-10  # of up to 20 · 2·10⁴
        assert gradient < 1e-12
        assert str(same) == str(ranks[0][2])  # to the bit; nan, too


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_short_logits_are_computed_with_in_32_bits(shared_worlds, dtype):
    def compare():
        logits_NV, targets_N = (4 * random(32, 50)).to(dtype), torch.arange(32)
        shard = own_columns(logits_NV)
        loss = vocab_parallel_cross_entropy(shard, targets_N, vocab=50, reduction="sum")
        loss.backward()
        whole = logits_NV.double().requires_grad_()
        exact = F.cross_entropy(whole, targets_N, reduction="sum")
        exact.backward()
        mine = own_columns(whole.grad, 0.0).detach()
        near = torch.allclose(shard.grad.double(), mine, rtol=max(torch.finfo(dtype).eps, 4e-6), atol=2e-6)
        return loss.dtype, shard.grad.dtype, abs(loss.item() - exact.item()) / exact.item(), near

    for of_loss, of_gradient, relative, near in shared_worlds.run(compare):
        assert (of_loss, of_gradient) == (torch.float32, dtype)
        assert relative < 1e-6
        assert near, "a gradient is further off than its own rounding"


class Largest(TorchDispatchMode):
    """`.bytes`: of the largest tensor that an operator inside has returned."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.bytes = max([self.bytes, *(x.untyped_storage().nbytes() for x in tensors)])
        return result


ROWS, COLUMNS = 128, 512  # of each rank
VECTORS = 12 * 8 * ROWS  # what there is for a row: a maximum, a sum, a place, …


def by_ours(logits, targets, vocab):
    return vocab_parallel_cross_entropy(logits, targets, vocab=vocab)


def memory_of(dtype: torch.dtype, backward: bool) -> tuple:
    """The largest tensor, and what is saved for backward; while the measurement counts the peak."""
    vocab = COLUMNS * dist.get_world_size()
    logits_NW = torch.zeros(ROWS, COLUMNS, dtype=dtype, requires_grad=True)
    targets_N = torch.arange(ROWS) % vocab
    with Largest() as largest:
        found = by_ours(logits_NW, targets_N, vocab)
        if backward:
            found.backward()
    saved = None if backward else saved_bytes(by_ours, logits_NW, targets_N, vocab)
    return largest.bytes, saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_rank_s_logits_and_they_are_there_once_forward_and_twice_backward(shared_worlds, dtype):
    logits = ROWS * COLUMNS * dtype.itemsize
    scratch = ROWS * COLUMNS // 16 * 4  # exponentials of 1/16 of the rows, in 32 bits
    for backward in (False, True):
        m = shared_worlds.measure(memory_of, dtype, backward, memory=True)
        for rank, (largest, saved) in enumerate(m.results):
            assert largest == logits
            copies = 2 if backward else 1
            assert copies * logits < m.peak_bytes[rank] <= copies * logits + scratch + VECTORS
            assert backward or logits <= saved <= logits + VECTORS


def test_a_process_without_torch_distributed_has_all_of_it():
    assert not dist.is_initialized()
    logits_BSV, targets_BS = random(2, 4, 11).requires_grad_(), torch.arange(8).view(2, 4)
    assert torch.autograd.gradcheck(lambda x: vocab_parallel_cross_entropy(x, targets_BS), logits_BSV)
    whole = nn.Embedding(11, 5)
    assert torch.equal(VocabParallelEmbedding.of(whole, How())(targets_BS), whole(targets_BS))

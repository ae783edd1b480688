"""parallel.tensor.vocabulary: an embedding and a loss cut by tokens are those of one process, and nobody has all logits."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import manyranks as mr
from manyranks.measure.memory import saved_bytes
from manyranks.parallel.tensor import VocabParallelEmbedding, copy_in, vocab_parallel_cross_entropy
from manyranks.parallel.tensor.cuts import padded
from manyranks.parallel.tensor.layers import How
from manyranks.theory import collectives

VOCABULARIES = [3, 7, 10, 16]  # on 4 ranks the first one's last rank has nothing but padding
DOUBLE = torch.float64


def cut(vocab: int):
    return padded(vocab, dist.get_world_size(), dist.get_rank())


def gathered(shard: torch.Tensor, vocab: int, dim: int) -> torch.Tensor:
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, shard.contiguous())
    return padded(vocab, len(shards), 0, dim).whole(shards)


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """nan and inf are equal to themselves."""
    assert a.shape == b.shape
    differ = (a != b) & ~(a.isnan() & b.isnan())
    return (a - b)[differ].abs().nan_to_num(math.inf).max().item() if differ.any() else 0.0


# The embedding.


def pair(vocab: int, **how) -> tuple[nn.Embedding, VocabParallelEmbedding]:
    torch.manual_seed(0)
    whole = nn.Embedding(vocab, 5, dtype=DOUBLE)
    return whole, VocabParallelEmbedding.of(whole, How(**how))


def looked_up(vocab: int, sequence_parallel: bool) -> float:
    """The largest difference of outputs and gradients; here, not from here, is what the output's gradient is made of."""
    whole, ours = pair(vocab, sequence_parallel=sequence_parallel)
    n, rank = dist.get_world_size(), dist.get_rank()
    tokens_BS = torch.cat([torch.arange(vocab), torch.randint(vocab, (36 - vocab,))]).view(3, 12)
    outer_BSH = torch.randn(3, 12, 5, dtype=DOUBLE)
    x_BSH, y = whole(tokens_BS), ours(tokens_BS)
    part = slice(rank * 12 // n, (rank + 1) * 12 // n) if sequence_parallel else slice(None)
    assert torch.equal(y, x_BSH[:, part]), "one rank's row plus zeros is exact"
    (x_BSH * outer_BSH).sum().backward()
    (y * outer_BSH[:, part]).sum().backward()
    (own,) = cut(vocab).spans[rank]
    assert ours.weight.shape == (-(-vocab // n), 5)
    assert not ours.weight[own[1] - own[0] :].any()
    assert not ours.weight.grad[own[1] - own[0] :].any()
    return gap(gathered(ours.weight.grad, vocab, 0), whole.weight.grad)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_embedding_and_its_gradient_are_those_of_one_process(shared_worlds, vocab, sequence_parallel):
    assert max(shared_worlds.run(looked_up, vocab, sequence_parallel)) < 1e-12


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_embedding_sends_one_sum_forward_and_nothing_or_one_gather_backward(shared_worlds, sequence_parallel):
    def both():
        ours = pair(10, sequence_parallel=sequence_parallel)[1]
        ours(torch.arange(12).view(1, 12) % 10).sum().backward()

    m, n = shared_worlds.measure(both), shared_worlds.size
    size = 12 * 5 * 8
    ops = [[call.op for call in m.calls[rank]] for rank in range(n)]
    assert ops == [(["send", "recv"] * (n - 1) + ["all_gather"] if sequence_parallel else ["all_reduce"])] * n
    assert list(m.payload_bytes.values()) == [2 * (n - 1) * size // n] * n


def test_the_first_rows_are_those_of_one_process_at_every_degree(shared_worlds):
    def rows():
        torch.manual_seed(3)
        return gathered(VocabParallelEmbedding(10, 4).weight.detach(), 10, 0)

    torch.manual_seed(3)
    alone = nn.Embedding(10, 4).weight.detach()
    assert all(torch.equal(found, alone) for found in shared_worlds.run(rows))


def test_a_frozen_embedding_stays_frozen(shared_world):
    def learns():
        return VocabParallelEmbedding.of(nn.Embedding(7, 2).requires_grad_(False), How()).weight.requires_grad

    assert shared_world.run(learns) == [False] * 3


@pytest.mark.parametrize("token", [-1, 10, 11])
def test_a_token_outside_the_vocabulary_is_an_index_error_on_every_rank(shared_world, token):
    def look():
        with pytest.raises(IndexError, match=rf"^token {token}: this embedding has 10 rows; .* 0 to 9$"):
            pair(10)[1](torch.tensor([[0, token]]))

    m = shared_world.measure(look)
    assert not any(m.calls.values())


@pytest.mark.parametrize("option", [{"padding_idx": 0}, {"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}])
def test_an_embedding_with_an_option_that_needs_all_rows_is_refused(option):
    with pytest.raises(ValueError, match=rf"an embedding with {next(iter(option))}="):
        VocabParallelEmbedding.of(nn.Embedding(7, 2, **option), How())


# The loss.


def own_columns(logits_BSV: torch.Tensor, filling: float = math.nan) -> torch.Tensor:
    """This rank's logits, as a leaf; what they are filled up with must take no part."""
    c = cut(logits_BSV.shape[-1])._replace(dim=logits_BSV.dim() - 1)
    start, stop = c.span
    shard = c.own(logits_BSV.detach())
    shard[..., stop - start :] = filling
    return shard.requires_grad_()


def differences(logits_BSV, targets_BS, outer=None, **options) -> tuple[float, float]:
    """Of the loss, and of the logits' gradient, to F.cross_entropy; outer: the loss's own gradient."""
    vocab = logits_BSV.shape[-1]
    whole, shard = logits_BSV.clone().requires_grad_(), own_columns(logits_BSV)
    expected = F.cross_entropy(whole.reshape(-1, vocab), targets_BS.reshape(-1), **options)
    found = vocab_parallel_cross_entropy(shard, targets_BS, vocab=vocab, **options)
    outer = torch.full_like(expected, 2.5) if outer is None else outer
    (expected * outer.view_as(expected)).sum().backward()
    (found * outer.view_as(found)).sum().backward()
    start, stop = cut(vocab).span
    assert not shard.grad[..., stop - start :].any(), "padding got a gradient"
    return gap(found.detach(), expected.detach()), gap(gathered(shard.grad, vocab, logits_BSV.dim() - 1), whole.grad)


def compared(vocab: int, reduction: str, ignore_index: int) -> float:
    torch.manual_seed(vocab)
    logits_BSV, targets_BS = 3 * torch.randn(3, 6, vocab, dtype=DOUBLE), torch.randint(vocab, (3, 6))
    targets_BS[0, :2] = targets_BS[2, 5] = ignore_index
    outer = torch.randn(18, dtype=DOUBLE) if reduction == "none" else None
    return max(differences(logits_BSV, targets_BS, outer, reduction=reduction, ignore_index=ignore_index))


@pytest.mark.parametrize("ignore_index", [-100, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_loss_and_its_gradient_are_those_of_one_process(shared_worlds, vocab, reduction, ignore_index):
    assert max(shared_worlds.run(compared, vocab, reduction, ignore_index)) < 1e-12


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_where_no_target_counts_the_mean_is_nan_as_pytorch_s(shared_world, reduction):
    def ignored():
        logits_BSV, targets_BS = torch.randn(2, 3, 7, dtype=DOUBLE), torch.full((2, 3), -100)
        shard = own_columns(logits_BSV)
        loss = vocab_parallel_cross_entropy(shard, targets_BS, vocab=7, reduction=reduction)
        loss.sum().backward()
        return loss.detach(), bool(shard.grad.any()), differences(logits_BSV, targets_BS, reduction=reduction)

    for loss, any_gradient, gaps in shared_world.run(ignored):
        assert loss.isnan() if reduction == "mean" else not loss.any()
        assert not any_gradient
        assert gaps == (0, 0)


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


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_so_they_are_for_any_logits(shared_world, case):
    vocab, numbers, targets, ignored, reduction = case

    def compare():
        logits_NV = torch.tensor(numbers, dtype=DOUBLE).view(len(targets), vocab)
        # A row without any finite logit has no softmax; PyTorch's own gradient of it is nan in places.
        logits_NV[logits_NV.isinf().all(-1)] = 0
        targets_N = torch.tensor(targets, dtype=torch.long)
        return differences(logits_NV, targets_N, reduction=reduction, ignore_index=ignored)

    for loss, gradient in shared_world.run(compare):
        assert loss < 1e-10  # of up to 20 · 2·10⁴
        assert gradient < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_short_logits_are_computed_with_in_32_bits(shared_worlds, dtype):
    def compare():
        torch.manual_seed(1)
        logits_BSV, targets_BS = (4 * torch.randn(4, 8, 50)).to(dtype), torch.randint(50, (4, 8))
        shard = own_columns(logits_BSV)
        loss = vocab_parallel_cross_entropy(shard, targets_BS, vocab=50, reduction="sum")
        loss.backward()
        whole = logits_BSV.double().requires_grad_()
        exact = F.cross_entropy(whole.flatten(0, 1), targets_BS.flatten(), reduction="sum")
        exact.backward()
        mine = own_columns(whole.grad, 0.0).detach()
        near = torch.allclose(shard.grad.double(), mine, rtol=max(torch.finfo(dtype).eps, 4e-6), atol=2e-6)
        return loss.dtype, shard.grad.dtype, abs(loss.item() - exact.item()) / exact.item(), near

    for of_loss, of_gradient, relative, near in shared_worlds.run(compare):
        assert (of_loss, of_gradient) == (torch.float32, dtype)
        assert relative < 1e-6
        assert near, "a gradient is further off than its own rounding"


def test_the_loss_sends_two_small_sums_forward_and_nothing_backward(shared_worlds):
    def both():
        torch.manual_seed(0)
        logits_BSV = torch.randn(2, 30, 48)
        vocab_parallel_cross_entropy(own_columns(logits_BSV), torch.randint(48, (2, 30)), vocab=48).backward()

    m, n = shared_worlds.measure(both), shared_worlds.size
    rows = 2 * 30
    for rank in range(n):
        assert [(call.op, call.bytes) for call in m.calls[rank]] == [("all_reduce", 4 * rows), ("all_reduce", 8 * rows)]
        expected = [collectives.sent_bytes("all_reduce", k * rows, 4, n)[rank] for k in (1, 2)]
        assert m.payload_bytes[rank] == sum(expected)


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


def by_all_logits(logits, targets, vocab):
    """What a tensor-parallel model should not do."""
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits.detach())
    parts[dist.get_rank()] = logits
    return F.cross_entropy(torch.cat(parts, -1), targets)


def memory_of(loss, dtype: torch.dtype, backward: bool) -> tuple:
    """The largest tensor, and what is saved for backward; while the measurement counts the peak."""
    vocab = COLUMNS * dist.get_world_size()
    logits_NW = torch.zeros(ROWS, COLUMNS, dtype=dtype, requires_grad=True)
    targets_N = torch.arange(ROWS) % vocab
    with Largest() as largest:
        found = loss(logits_NW, targets_N, vocab)
        if backward:
            found.backward()
    saved = None if backward else saved_bytes(loss, logits_NW, targets_N, vocab)
    return largest.bytes, saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_rank_s_logits_and_they_are_there_once_forward_and_twice_backward(shared_worlds, dtype):
    logits = ROWS * COLUMNS * dtype.itemsize
    scratch = ROWS * COLUMNS // 16 * 4  # exponentials of 1/16 of the rows, in 32 bits
    for backward in (False, True):
        m = shared_worlds.measure(memory_of, by_ours, dtype, backward, memory=True)
        for rank, (largest, saved) in enumerate(m.results):
            assert largest == logits
            copies = 2 if backward else 1
            assert copies * logits < m.peak_bytes[rank] <= copies * logits + scratch + VECTORS
            assert backward or logits <= saved <= logits + VECTORS


def test_the_same_count_sees_that_a_loss_has_all_logits(shared_worlds):
    m, n = shared_worlds.measure(memory_of, by_all_logits, torch.float32, False, memory=True), shared_worlds.size
    logits = ROWS * COLUMNS * 4
    assert [largest for largest, _ in m.results] == [n * logits] * n
    assert min(m.peak_bytes.values()) > (n + 1) * logits


def test_backward_can_be_run_again_and_leaves_the_logits(shared_world):
    def twice():
        torch.manual_seed(0)
        logits_NV = torch.randn(5, 9)
        shard = own_columns(logits_NV)
        before = shard.detach().clone()
        loss = vocab_parallel_cross_entropy(shard, torch.arange(5), vocab=9)
        grads = [torch.autograd.grad(loss, shard, retain_graph=True)[0] for _ in range(2)]
        return torch.equal(*grads) and grads[0].any() and torch.equal(shard.detach(), before)

    assert all(shared_world.run(twice))


def test_all_ranks_get_the_same_bits(shared_worlds):
    def loss():
        torch.manual_seed(0)
        logits_NV = torch.randn(50, 40)
        return vocab_parallel_cross_entropy(own_columns(logits_NV), torch.randint(40, (50,)), vocab=40).item()

    assert len(set(shared_worlds.run(loss))) == 1


def test_a_process_without_torch_distributed_has_all_of_it():
    assert not dist.is_initialized()
    torch.manual_seed(0)
    logits_BSV, targets_BS = torch.randn(2, 4, 11, dtype=DOUBLE, requires_grad=True), torch.randint(11, (2, 4))
    loss = vocab_parallel_cross_entropy(logits_BSV, targets_BS)
    assert gap(loss, F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())) < 1e-12
    assert torch.autograd.gradcheck(lambda x: vocab_parallel_cross_entropy(x, targets_BS), logits_BSV)
    whole, ours = pair(11)
    assert torch.equal(ours(targets_BS), whole(targets_BS))


def test_a_group_of_one_sends_nothing(shared_world):
    def alone():
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        embedding = VocabParallelEmbedding(7, 4, group)
        logits_BSV = embedding(torch.arange(6).view(2, 3)) @ embedding.weight.T
        vocab_parallel_cross_entropy(logits_BSV, torch.arange(6).view(2, 3), group).backward()
        return embedding.weight.grad.shape

    m = shared_world.measure(alone)
    assert m.results == [(7, 4)] * 3
    assert not any(m.payload_bytes.values())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_groups_of_a_world_know_nothing_of_each_other(sequence_parallel):
    """Ranks 0 and 2, and ranks 1 and 3, with other numbers and sizes: a common sum cannot be right."""

    def of_my_group():
        group = dist.new_group([dist.get_rank() % 2, dist.get_rank() % 2 + 2], use_local_synchronization=True)
        other, place = dist.get_rank() % 2, dist.get_rank(group)
        torch.manual_seed(other)
        whole = nn.Embedding(5 + other, 4, dtype=DOUBLE)
        tokens_BS = torch.randint(5 + other, (2, 4 + 4 * other))
        ours = VocabParallelEmbedding.of(whole, How(group, sequence_parallel))
        found, expected = ours(tokens_BS), whole(tokens_BS)
        gaps = [gap(found, expected.chunk(2, 1)[place] if sequence_parallel else expected)]
        logits_BSV = expected.detach() @ whole.weight.detach().T * 10
        logits_BSW = padded(5 + other, 2, place, dim=2).own(logits_BSV)
        loss = vocab_parallel_cross_entropy(logits_BSW, tokens_BS, group, vocab=5 + other, reduction="sum")
        return [*gaps, gap(loss, F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS.flatten(), reduction="sum"))]

    with mr.World(4, backend="gloo", timeout=30) as four:
        assert all(max(gaps) < 1e-12 for gaps in four.run(of_my_group))


def test_they_are_pytorch_s_own(shared_worlds):
    """RowwiseParallel of an nn.Embedding, ColumnwiseParallel of the head, and loss_parallel."""

    def theirs_and_ours():
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor import parallel as tp

        torch.manual_seed(0)
        model = nn.ModuleDict({"tokens": nn.Embedding(24, 6), "head": nn.Linear(6, 24, bias=False)}).double()
        tokens_BS, targets_BS = torch.randint(24, (2, 5)), torch.randint(24, (2, 5))
        targets_BS[0, 0] = -100
        ours = VocabParallelEmbedding.of(model.tokens, How())
        c = cut(24)
        head_WH = nn.Parameter(c.own(model.head.weight.detach()))
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {
            "tokens": tp.RowwiseParallel(input_layouts=Replicate()),
            "head": tp.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        theirs = tp.parallelize_module(model, mesh, plan)
        with tp.loss_parallel():
            logits = theirs.head(theirs.tokens(tokens_BS))
            expected = F.cross_entropy(logits.flatten(0, 1), targets_BS.flatten())
            expected.backward()
        x_BSH = ours(tokens_BS)
        loss = vocab_parallel_cross_entropy(x_BSH @ head_WH.T, targets_BS)
        loss.backward()  # the term of x's gradient that this rank makes; theirs is summed
        return gap(loss.detach(), expected.full_tensor().detach()), gap(head_WH.grad, theirs.head.weight.grad.to_local())

    assert max(g for gaps in shared_worlds.run(theirs_and_ours) for g in gaps) < 1e-12


LOGITS, TARGETS = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("logits", "targets", "options", "said"),
    [
        (LOGITS, TARGETS, {"vocab": 13}, r"logits of 4 columns with vocab=13 on 3 ranks: each rank's are 5"),
        (LOGITS, TARGETS, {"vocab": 9}, "each rank's are 3"),
        (LOGITS, TARGETS[:1], {}, r"targets of shape \(1, 3\) for logits of shape \(2, 3, 4\)"),
        (LOGITS, TARGETS + 12, {}, "target 12: the vocabulary has 12 tokens"),
        (LOGITS, TARGETS + 11, {"vocab": 11}, "target 11: the vocabulary has 11 tokens"),
        (LOGITS, TARGETS - 1, {}, "target -1: .* give 0 to 11, or ignore_index"),
        (LOGITS, TARGETS.float(), {}, "targets torch.float32"),
        (LOGITS.long(), TARGETS, {}, "logits are torch.int64"),
        (LOGITS, TARGETS, {"reduction": "max"}, "reduction='max': give one of mean, sum, none"),
    ],
)
def test_a_wrong_argument_is_an_error_before_any_message(shared_world, logits, targets, options, said):
    def call():
        with pytest.raises(ValueError, match=said):
            vocab_parallel_cross_entropy(logits, targets, **options)

    assert not any(shared_world.measure(call).calls.values())


def train(group: dist.ProcessGroup | None, steps: int = 20) -> torch.Tensor:
    """The losses of an embedding that is the head, too."""
    torch.manual_seed(0)
    tied = VocabParallelEmbedding(10, 6, group).double()
    optimizer = torch.optim.AdamW(tied.parameters(), lr=0.05, weight_decay=0.1)
    losses = []
    for _ in range(steps):
        tokens_BS = torch.randint(10, (4, 7))
        x_BSH = copy_in(tied(tokens_BS[:, :-1]).tanh(), group)
        loss = vocab_parallel_cross_entropy(x_BSH @ tied.weight.T, tokens_BS[:, 1:], group, vocab=10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    start, stop = tied.cut.span
    assert not tied.weight[stop - start :].any(), "padding has changed"
    return torch.tensor(losses, dtype=DOUBLE)


def test_20_steps_with_a_tied_head_are_those_of_one_process(shared_worlds):
    def both():
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return train(None), train(alone)

    for ours, one in shared_worlds.run(both):
        assert gap(ours, one) < 1e-12
        assert ours[-1] < ours[0] - 0.1

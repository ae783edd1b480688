"""parallel.context as people call it: under checkpoints, with frozen inputs, in few bits; its order; a rank that fails."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint as pytorch_s

import manyranks as mr
from manyranks.parallel.checkpointing import checkpoint
from manyranks.parallel.collectives.messages import Members, wait
from manyranks.parallel.context import ring_attention, shard
from manyranks.parallel.context.apply import ATTENTION
from tests.ranks.test_tensor_overlapped import hidden, open_messages
from tests.unit.attention_reference import draw, full, gap

KINDS = [kind for kind in ATTENTION if kind != "ring-ulysses"]  # which is Ulysses around a ring
BITS = torch.bfloat16


def own_qkv(dtype: torch.dtype = torch.float64, learns: str = "qkv", seq: int = 24) -> list[Tensor]:
    """This rank's part of a sequence, as leaves."""
    own = partial(shard, layout="zigzag", rank=dist.get_rank(), n=dist.get_world_size(), dim=2)
    return [own(draw(2, 6, seq, 4, seed=k)).to(dtype).requires_grad_(name in learns) for k, name in enumerate("qkv")]


def parts(attend, **how) -> dict[str, Tensor | None]:
    """The output and the gradients."""
    qkv = own_qkv(**how)
    o = attend(*qkv)
    o.float().sum().backward() if o.dtype == BITS else o.square().sum().backward()
    return {"o": o.detach()} | {name: x.grad for name, x in zip("qkv", qkv, strict=True)}


def differences(ours: dict, right: dict) -> float:
    return gap([(ours[name], right[name]) for name in right])


def with_strides_of(make, attention, *qkv: Tensor) -> Tensor:
    return attention(*map(make, qkv))


def as_heads_of_the_gpt(x_BASD: Tensor) -> Tensor:
    return x_BASD.transpose(1, 2).contiguous().transpose(1, 2)


def as_an_image(x_BASD: Tensor) -> Tensor:
    """As torch.cat makes heads of 2 numbers, for it takes them for the channels of an image."""
    return x_BASD.contiguous(memory_format=torch.channels_last)


def before_another(attention, *qkv: Tensor) -> Tensor:
    o = attention(*qkv)
    attention(*(x.detach() + 1 for x in qkv))
    return o


def of_two_parts(attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two forward passes, then two backward passes."""
    return torch.cat([attention(q[:, h], k[:, h], v[:, h]) for h in (slice(3), slice(3, 6))], 1)


WAYS = {
    "checkpoint": lambda attention: partial(checkpoint, attention),
    "PyTorch's checkpoint": lambda attention: partial(pytorch_s, attention, use_reentrant=False),
    "PyTorch's older checkpoint": lambda attention: partial(pytorch_s, attention, use_reentrant=True),
    "the GPT's strides": lambda attention: partial(with_strides_of, as_heads_of_the_gpt, attention),
    "an image's strides": lambda attention: partial(with_strides_of, as_an_image, attention),
    "before another": lambda attention: partial(before_another, attention),
    "of two parts": lambda attention: partial(of_two_parts, attention),
}


def every_way() -> dict[str, float]:
    """Each way to call each attention, against a plain call."""
    found = {}
    for kind in KINDS:
        attention = partial(ATTENTION[kind], tile=5)
        plain = parts(attention)
        for name, way in WAYS.items():
            found[f"{kind}, {name}"] = differences(parts(way(attention)), plain)
        for learns in ("q", "k", "v", "kv"):
            some = parts(attention, learns=learns)
            assert [name for name in "qkv" if some[name] is not None] == list(learns)
            found[f"{kind}, {learns}"] = differences(some, {name: plain[name] for name in f"o{learns}"})
        with torch.no_grad():
            found[f"{kind}, no gradients"] = differences({"o": attention(*own_qkv())}, {"o": plain["o"]})
    return found


def test_gradients_are_the_same_however_it_is_called(shared_world):
    for found in shared_world.run(every_way):
        assert {name: error for name, error in found.items() if not error < 1e-12} == {}
        assert len(found) == len(KINDS) * (len(WAYS) + 5)


def twice() -> list[str]:
    """Backward again, and a gradient of a gradient."""
    said = []
    for kind in KINDS:
        qkv = own_qkv()
        o = ATTENTION[kind](*qkv, tile=5).square().sum()
        first, second = (torch.autograd.grad(o, qkv, retain_graph=True) for _ in range(2))
        assert all(map(torch.equal, first, second))
        (of_q,) = torch.autograd.grad(o, qkv[:1], create_graph=True)
        with pytest.raises(RuntimeError) as error:
            of_q.sum().backward()
        said.append(str(error.value))
    return said


def test_backward_can_be_run_again_but_not_differentiated(shared_world):
    for said in shared_world.run(twice):
        assert all("once_differentiable" in each for each in said)


# Precision


def in_few_bits() -> dict[str, float]:
    """How often its own rounding the output is off, and how many eps the gradients; inputs in few bits, or under autocast."""
    eps, found = torch.finfo(BITS).eps, {}
    own = partial(shard, layout="zigzag", rank=dist.get_rank(), n=dist.get_world_size(), dim=2)
    exact = [draw(2, 6, 96, 4, seed=k).to(BITS).double().requires_grad_() for k in range(3)]
    expected = full(*exact)
    expected.sum().backward()
    for kind in KINDS:
        ours = parts(ATTENTION[kind], dtype=BITS, seq=96)
        with torch.autocast("cpu", BITS):
            assert differences(parts(ATTENTION[kind], dtype=BITS, seq=96), ours) == 0
        right = own(expected.detach())
        found[f"{kind}, o"] = ((ours["o"] - right).abs() / (right.abs() * eps / 2 + 1e-6)).max().item()
        for name, x in zip("qkv", exact, strict=True):
            assert ours[name].dtype == BITS
            off = (ours[name] - own(x.grad)).abs().max() / x.grad.abs().max()
            found[f"{kind}, {name}"] = (off / eps).item() / 2
    return found


def test_sums_over_blocks_and_ranks_are_made_in_32_bits(shared_world):
    m = shared_world.measure(in_few_bits)
    for found in m.results:
        assert {name: error for name, error in found.items() if not error < 1.02} == {}


def test_keys_and_values_travel_in_their_dtype_and_gradients_in_32_bits(shared_world):
    def step():
        parts(ring_attention, dtype=BITS)

    m = shared_world.measure(step)
    assert [c.dtype for c in m.calls[0] if c.op == "send"] == ["bfloat16"] * 3 + ["float32", "bfloat16", "float32"][1:] + [
        "float32"
    ]


# The order of events


def step() -> None:
    parts(partial(ring_attention, tile=5))


def test_the_next_block_is_requested_before_the_current_one_is_computed(shared_worlds):
    """And what a block has collected leaves while the next is looked at; only the last gradients, on their way home, do not."""
    n, program = shared_worlds.size, shared_worlds.measure(step, flops=True).program
    for rank in program.ranks:
        assert hidden(rank) == [True] * (3 * (n - 1) - 1) + [False]
        assert open_messages(rank) == min(2, n - 1)


def test_a_ring_that_waits_first_would_be_noticed(shared_world):
    def waits_first():
        post = Members.post
        Members.post = lambda self, *message: wait(post(self, *message)) or []
        try:
            step()
        finally:
            Members.post = post

    program = shared_world.measure(waits_first, flops=True).program
    assert not any(any(hidden(rank)) for rank in program.ranks)


def test_each_message_has_a_whole_block_comes_from_the_rank_before_and_goes_to_the_rank_after(shared_worlds):
    n, m = shared_worlds.size, shared_worlds.measure(step)
    for rank in range(n):
        assert {c.bytes for c in m.calls[rank] if c.op == "send"} == {2 * 8 * 2 * 6 * 24 // n * 4}
        assert [c.peer for c in m.calls[rank] if c.op == "send"] == [(rank + 1) % n] * (3 * (n - 1))
        assert [c.peer for c in m.calls[rank] if c.op == "recv"] == [(rank - 1) % n] * (3 * (n - 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_fails_ends_the_others_wait(kind):
    def failing(backward: bool):
        qkv = own_qkv()
        if not backward and dist.get_rank() == 1:
            raise KeyError("forward")
        o = ATTENTION[kind](*qkv)
        if dist.get_rank() == 1:
            o.register_hook(lambda grad: {}["backward"])
        o.sum().backward()

    for backward in (False, True):
        with mr.World(2, backend="gloo", timeout=30) as world, pytest.raises(mr.RankFailed, match="rank 1"):
            world.run(failing, backward)

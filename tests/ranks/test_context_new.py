"""parallel.context.latent, .states and .dynamic: on ranks the outputs and gradients of one process; bytes as theory counts."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from manyranks.parallel.context import absorbed_attention, dynamic, latent_attention, linear_attention, shard
from manyranks.theory import context, models
from tests.conftest import matrix
from tests.ranks.test_context_traffic import check_calls
from tests.unit.attention_reference import differences, draw, full, gap, mask_of, wrong

DEGREES = pytest.mark.parametrize("shared_worlds", matrix([1, 2, 3, 4], [3]), indirect=True, scope="module")
BATCH, HEADS, SEQ = 2, 4, 24
LATENT, ROTARY, OWN, VALUE = 7, 2, 3, 4  # a query has 3 + 2 numbers


def leaves(*shapes: tuple) -> list[Tensor]:
    return [draw(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def cut_to(layout: str):
    return lambda x: shard(x, layout, dist.get_rank(), dist.get_world_size(), dim=x.shape.index(SEQ))


def latents(heads: int = HEADS) -> tuple[list[Tensor], list[Tensor]]:
    tokens = (BATCH, HEADS, SEQ, OWN + ROTARY), (BATCH, SEQ, LATENT), (BATCH, SEQ, ROTARY)
    found = leaves(*tokens, (heads, OWN, LATENT), (heads, VALUE, LATENT))
    return found[:3], found[3:]


def expanded(q: Tensor, c: Tensor, r: Tensor, up_k: Tensor, up_v: Tensor, documents_BT: Tensor | None = None) -> Tensor:
    """One process that makes all keys and values first."""
    k, v = (c[:, None] @ up.mT for up in (up_k, up_v))
    k = torch.cat((k, r[:, None].expand(-1, k.shape[1], -1, -1)), -1)
    mask = mask_of(SEQ, True, documents_BT)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def of_latents() -> dict[str, float]:
    documents, found = torch.tensor([[0] * 7 + [1] * 17]), {}
    cases = [(latent_attention, "zigzag", HEADS, None), (latent_attention, "striped", 2, documents)]
    for attend, layout, heads, mask in [*cases, (absorbed_attention, "zigzag", HEADS, None)]:
        calls = partial(attend, layout=layout, documents_BT=mask, tile=5), partial(expanded, documents_BT=mask)
        tokens, ups = latents(heads)
        found[f"{attend.__name__}, {layout}"] = differences(*calls, tokens, cut_to(layout), ups)
    return found


@DEGREES
def test_latent_attention_is_that_of_one_process_that_expands_all(shared_worlds):
    assert wrong(shared_worlds.run(of_latents)) == []


def latent_step(dtype: torch.dtype) -> None:
    tokens, ups = latents()
    own = [cut_to("zigzag")(x.detach()).to(dtype).requires_grad_() for x in tokens]
    latent_attention(*own, *(up.to(dtype) for up in ups)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_latents_travel_in_the_bytes_of_theory(shared_world, dtype):
    """DeepSeek-V3's are a 71st of its keys and values."""
    expected = context.latent_ring(BATCH, SEQ, LATENT, ROTARY, 3, dtype.itemsize).both
    check_calls(shared_world.measure(latent_step, dtype), expected)
    heads, c = models["deepseek-v3"].heads, models["deepseek-v3"].latent
    assert context.latent_ring(1, 4096, c.kv_rank, c.rope_size, 8).forward.bytes == 7 * 2 * 512 * 576
    assert heads * (c.nope_size + c.rope_size + c.value_size) / 576 == pytest.approx(71.1, abs=0.1)


def recurrent(q: Tensor, k: Tensor, v: Tensor, log_decay_BAS: Tensor) -> Tensor:
    """One process, token by token."""
    state_BADV, outputs = torch.zeros(BATCH, HEADS, OWN, VALUE, dtype=q.dtype), []
    for t in range(SEQ):
        state_BADV = log_decay_BAS[:, :, t, None, None].exp() * state_BADV + k[:, :, t, :, None] * v[:, :, t, None, :]
        outputs.append(q[:, :, t, None] @ state_BADV)
    return torch.cat(outputs, 2)


def of_states() -> dict[str, float]:
    *qkv, decay = leaves(*[(BATCH, HEADS, SEQ, size) for size in (OWN, OWN, VALUE)], (BATCH, HEADS, SEQ))
    whole = [*qkv, (-decay.detach().abs()).requires_grad_()]
    ways = {f"chunks of {c}": partial(linear_attention, chunk=c) for c in (1, 5, 64)}
    return {name: differences(attend, recurrent, whole, cut_to("contiguous")) for name, attend in ways.items()}


@DEGREES
def test_linear_attention_is_the_recurrence_of_one_process(shared_worlds):
    assert wrong(shared_worlds.run(of_states)) == []


def states_step(seq: int) -> None:
    qkv = [torch.randn(BATCH, HEADS, seq, size, requires_grad=True) for size in (OWN, OWN, VALUE)]
    linear_attention(*qkv, torch.zeros(BATCH, HEADS, seq)).sum().backward()


@DEGREES
def test_states_are_as_many_bytes_for_any_sequence(shared_worlds):
    expected = context.states(BATCH, HEADS, OWN, VALUE, shared_worlds.size).both
    for seq in (3, 70):
        check_calls(shared_worlds.measure(states_step, seq), expected)


LENGTHS = [3, 50, 9, 17, 1, 2, 21, 8, 5, 12, 7, 4]
MOST = {1: 50, 2: 26, 3: 18, 4: 14}  # tokens of a rank: 50 need all ranks, 17 half of 4
VOCABULARY, WIDTH, QUERY_HEADS, KV_HEADS = 11, 8, 4, 2


class Small(torch.nn.Module):
    """A vocabulary, positions, one attention and a head."""

    def __init__(self):
        super().__init__()
        sizes = (VOCABULARY, WIDTH), (64, WIDTH), (WIDTH, 16), (8, VOCABULARY)
        self.table, self.places, self.qkv, self.head = (torch.nn.Parameter(x.detach()) for x in leaves(*sizes))

    def forward(self, tokens_BS: Tensor, positions_S: Tensor, attend) -> Tensor:
        x_BSHD = ((self.table[tokens_BS] + self.places[positions_S]) @ self.qkv).unflatten(-1, (-1, 2))
        q, k, v = x_BSHD.transpose(1, 2).split((QUERY_HEADS, KV_HEADS, KV_HEADS), 1)
        return attend(q, k, v).transpose(1, 2).flatten(2) @ self.head


def documents_of(lengths: list[int]) -> list[Tensor]:
    return [(draw(length + 1, seed=length) * 100).long() % VOCABULARY for length in lengths]


def one_by_one(model: Small, documents: list[Tensor]) -> Tensor:
    """One process, a document at a time: the mean of all tokens."""
    logits_TV = torch.cat([model(each[None, :-1], torch.arange(len(each) - 1), full)[0] for each in documents])
    return F.cross_entropy(logits_TV, torch.cat([each[1:] for each in documents]))


def plans(n: int) -> dict[str, tuple[list[int], list[dynamic.Micro]]]:
    """Lengths and a plan; in the last one a rank has no work."""
    few = [5] * max(1, n - 1)
    found = {"dynamic": (LENGTHS, dynamic.planned(LENGTHS, n, MOST[n])), "few": (few, dynamic.planned(few, n, 5, [1]))}
    return found | {"in order": (LENGTHS, dynamic.in_order(LENGTHS, n, MOST[n], n))}


def steps() -> dict[str, float]:
    n, found = dist.get_world_size(), {}
    groups = dynamic.make_groups(dynamic.degrees(n))
    for name, (lengths, plan) in plans(n).items():
        one, ours, documents = Small(), Small(), documents_of(lengths)
        for _ in range(2):  # gradients add up
            (expected := one_by_one(one, documents)).backward()
            pairs = [(dynamic.step(ours, documents, plan, groups), expected.detach())]
        found[name] = gap(pairs + [(a.grad, b.grad) for a, b in zip(ours.parameters(), one.parameters(), strict=True)])
    return found


@DEGREES
def test_gradients_of_any_plan_are_those_of_one_process(shared_worlds):
    n = shared_worlds.size
    assert {len(micro.ranks) for micro in plans(n)["dynamic"][1]} == set(dynamic.degrees(n))
    assert wrong(shared_worlds.run(steps)) == []


def sent(plan: list[dynamic.Micro], rank: int) -> int:
    """Bytes in rings."""
    rings = [(len(m.ranks), LENGTHS[i]) for m in plan if rank in m.ranks for i in m.documents]
    counts = [context.ring(1, c * dynamic.tokens(s, c), QUERY_HEADS, KV_HEADS, 2, c, 8) for c, s in rings]
    return sum(count.both.bytes for count in counts)


def take_step(plan: list[dynamic.Micro]) -> None:
    dynamic.step(Small(), documents_of(LENGTHS), plan, dynamic.make_groups([1, 2, 4]))


def test_only_documents_that_several_ranks_share_send_bytes(four):
    for one in (plan := plans(4)["dynamic"][1], fixed := plans(4)["in order"][1]):
        calls = four.measure(take_step, one).calls
        assert [sum(call.bytes for call in calls[r] if call.op == "send") for r in calls] == [sent(one, r) for r in calls]
    assert sent(plan, 0) < 0.6 * sent(fixed, 0)


def test_the_plan_idles_less_than_a_fixed_degree_in_a_loader_s_order():
    lengths, n, most = [120] + [3, 5, 40, 9, 2, 70, 11, 30, 4, 6, 25, 8] * 3, 8, 30
    loads = dynamic.loads(plan := dynamic.planned(lengths, n, most), lengths, n)
    fixed = dynamic.loads(dynamic.in_order(lengths, n, most, 4), lengths, n)
    assert [sum(max(each) - one for one in each) for each in (loads, fixed)] == [940, 7996]
    assert dynamic.planned([40, 4, 4, 4], 4, 40)[0].ranks == range(4)  # one rank has room for it, and would be late
    assert dynamic.loads([dynamic.Micro((0,), range(2))], [4], 3, token=10) == [
        25,
        25,
        0,
    ]
    assert plan == sorted(plan, key=lambda micro: -len(micro.ranks))
    assert all(sum(dynamic.tokens(lengths[i], len(ranks)) for i in own) <= most for own, ranks in plan)
    assert sorted(i for micro in plan for i in micro.documents) == list(range(len(lengths)))


def test_scores_are_those_of_a_zigzag_and_groups_lie_in_each_other():
    for length, c in ((24, 2), (24, 4), (36, 3)):
        assert context.totals(context.document_work([length], c)) == [dynamic.scores(length, c)] * c
    assert (dynamic.scores(7, 1), dynamic.tokens(7, 2)) == (28, 4)
    assert [dynamic.degrees(n) for n in (1, 3, 8, 12)] == [[1], [1, 3], [1, 2, 4, 8], [1, 2, 4, 12]]


def refusals() -> None:
    (q, c, r), (up_k, up_v) = latents()
    groups, plan, one = dynamic.make_groups([1, 3]), dynamic.planned([4, 4], 3, 4), [dynamic.Micro((0,), range(1, 3))]
    calls = {
        "3 + 2 numbers": lambda: latent_attention(q[..., :4], c, r, up_k, up_v),
        "same B and S": lambda: latent_attention(q, c[:, :3], r, up_k, up_v),
        "as many heads": lambda: latent_attention(q, c, r, up_k[:3], up_v),
        "one dtype": lambda: latent_attention(q.float(), c, r, up_k, up_v),
        "multiple of 6": lambda: latent_attention(q[:, :, :5], c[:, :5], r[:, :5], up_k, up_v),
        "[B, A, S]": lambda: linear_attention(q, q, q, q),
        "chunk=0": lambda: linear_attention(q, q, q, q[..., 0], chunk=0),
        "lengths[1]=0": lambda: dynamic.planned([4, 0], 3, 4),
        "give most=14": lambda: dynamic.planned([40], 3, 4),
        "sizes=[1, 3]": lambda: dynamic.planned([4], 4, 4, [1, 3]),
        "for 1: give": lambda: dynamic.step(Small(), documents_of([4]), plan, groups),
        "range(1, 3)": lambda: dynamic.step(Small(), documents_of([4]), one, groups),
    }
    for words, call in calls.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            call()


def test_what_cannot_be_is_refused_before_any_message(shared_world):
    assert set(shared_world.measure(refusals).payload_bytes.values()) == {0}

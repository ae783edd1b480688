"""parallel.context: on ranks that share a sequence, the attention and the gradients of one process, however it's called."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint as pytorch_s

from manyranks.parallel.checkpointing import checkpoint
from manyranks.parallel.context import ATTENTION, LAYOUTS, blockwise_attention, shard
from tests.conftest import matrix
from tests.unit.attention_reference import differences, draw, full, gap, wrong

SEQ, TILE = 24, 5  # 12 tokens of two ranks are cut into tiles of 4
KINDS = [kind for kind in ATTENTION if kind != "ring-ulysses"]  # which is Ulysses around a ring
DOCUMENTS = [[0] * 7 + [1] * 17, [3] + [1] * 11 + [3] * 12]
MASKS = [
    {},
    {"causal": False},
    {"documents": DOCUMENTS},
    {"causal": False, "documents": DOCUMENTS[:1]},
    {"window": 1},
    {"window": 4},
    {"window": 13},
    {"window": 5, "causal": False},
    {"window": 5, "documents": DOCUMENTS},
]


def variants(n: int) -> dict[str, tuple]:
    """Each attention, its group or the shape of its mesh, ranks that share a shard of the ring; 0: one process, all tokens."""
    found = {kind: (ATTENTION[kind], None, 1) for kind in KINDS} | {"blockwise": (blockwise_attention, None, 0)}
    for rings in (r for r in range(1, n + 1) if n % r == 0):
        found[f"ring of {rings}, ulysses of {n // rings}"] = (ATTENTION["ring-ulysses"], (rings, n // rings), n // rings)
    return found


def qkv_of(heads: int, kv_heads: int, seq: int = SEQ, seed: int = 0) -> list[Tensor]:
    return [draw(2, h, seq, 4, seed=seed + k).requires_grad_() for k, h in enumerate((heads, kv_heads, kv_heads))]


def cut_of(layout: str, sharing: int = 1, group=None):
    """From what all tokens have to this rank's."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    return partial(shard, layout=layout, rank=rank, n=n, dim=2, sharing=sharing) if sharing else lambda x: x


def compared(attend, whole: list[Tensor], cut, learn: str = "", **mask) -> float:
    return differences(attend, partial(full, **mask), whole, cut, learn=learn)


def everything(kv_heads: int, layouts: tuple[str, ...], masks: list[dict]) -> dict[str, float]:
    found = {}
    for name, (attention, shape, sharing) in variants(dist.get_world_size()).items():
        where = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))} if shape else {}
        for layout, given in product(layouts, masks):
            mask = {key: value for key, value in given.items() if key != "documents"}
            mask["documents_BT"] = torch.tensor(given["documents"]) if "documents" in given else None
            attend = partial(attention, layout=layout, tile=TILE, **where, **mask)
            found[f"{name}, {layout}, {given}"] = compared(attend, qkv_of(12, kv_heads), cut_of(layout, sharing), **mask)
    return found


@pytest.mark.parametrize("shared_worlds", matrix([1, 2, 3, 4], [3]), indirect=True, scope="module")
def test_output_and_gradients_of_every_variant_are_those_of_full_attention(shared_worlds):
    """The last: fewer key/value heads than ranks."""
    n = shared_worlds.size
    for kv_heads, layouts, masks in (
        ({1: 3, 2: 6, 3: 3, 4: 4}[n], LAYOUTS, MASKS),
        ({1: 1, 2: 1, 3: 1, 4: 2}[n], ("zigzag",), [MASKS[2], MASKS[5]]),
    ):
        assert wrong(results := shared_worlds.run(everything, kv_heads, layouts, masks)) == []
        assert {*map(len, results)} == {len(variants(n)) * len(layouts) * len(masks)}


def in_groups() -> dict[str, float]:
    """In `pairs`, ranks 0 and 2, and 1 and 3, have other numbers, sizes and another mask at the same time. The mesh has them as
    rows: a rank's place is that in the mesh. Ulysses on four ranks gives neighbors copies of the same one of two heads."""
    other, found = dist.get_rank() % 2, {}
    group = dist.new_group([other, other + 2], use_local_synchronization=True)
    for kind in KINDS:
        attend = partial(ATTENTION[kind], group=group, causal=not other, tile=TILE)
        whole = qkv_of(2, 2, SEQ + 4 * other, seed=other)
        found[f"pairs, {kind}"] = compared(attend, whole, cut_of("zigzag", group=group), causal=not other)
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("ring", "ulysses"))
    place = 2 * mesh.get_local_rank("ring") + mesh.get_local_rank("ulysses")
    cut = partial(shard, layout="zigzag", rank=place, n=4, dim=2, sharing=2)
    found["mesh"] = compared(partial(ATTENTION["ring-ulysses"], mesh=mesh, tile=TILE), qkv_of(4, 2), cut)
    found["copies"] = compared(partial(ATTENTION["ulysses"], tile=TILE), qkv_of(4, 2), cut_of("zigzag"))
    return found


def test_groups_know_nothing_of_each_other_and_neighbors_share_a_head(four):
    assert wrong(four.run(in_groups)) == []


# However it's called


def with_strides(make, attend, *qkv: Tensor) -> Tensor:
    return attend(*map(make, qkv))


def before_another(attend, *qkv: Tensor) -> Tensor:
    o = attend(*qkv)
    attend(*(x.detach() + 1 for x in qkv))
    return o


def of_two_parts(attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two forward passes, then two backward passes."""
    return torch.cat([attend(q[:, h], k[:, h], v[:, h]) for h in (slice(3), slice(3, 6))], 1)


WRAPPERS = {
    "checkpoint": lambda attend: partial(checkpoint, attend),
    "PyTorch's checkpoint": lambda attend: partial(pytorch_s, attend, use_reentrant=False),
    "PyTorch's older checkpoint": lambda attend: partial(pytorch_s, attend, use_reentrant=True),
    "the GPT's strides": lambda attend: partial(with_strides, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), attend),
    "an image's strides": lambda attend: partial(
        with_strides, lambda x: x.contiguous(memory_format=torch.channels_last), attend
    ),
    "before another": lambda attend: partial(before_another, attend),
    "of two parts": lambda attend: partial(of_two_parts, attend),
}


def every_way() -> dict[str, float]:
    found = {}
    for kind in (*KINDS, "blockwise"):
        attention, _, sharing = variants(1)[kind]
        attend, cut = partial(attention, tile=TILE), cut_of("zigzag", sharing)
        for name, wrapper in WRAPPERS.items():
            found[f"{kind}, {name}"] = compared(wrapper(attend), qkv_of(6, 6), cut)
        for learn in ("0", "1", "2", "12"):  # of q, k and v
            found[f"{kind}, {learn}"] = compared(attend, qkv_of(6, 6), cut, learn)
        own = [cut(x.detach()).requires_grad_() for x in qkv_of(6, 3)]
        with torch.no_grad():
            alone = attend(*own)
        o = attend(*own)
        assert alone.grad_fn is None
        first, again = (torch.autograd.grad(o.square().sum(), own, retain_graph=True) for _ in range(2))
        found[f"{kind}, again"] = gap([(o, alone), *zip(first, again, strict=True)])
        (of_q,) = torch.autograd.grad(o.square().sum(), own[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            of_q.sum().backward()
    return found


def test_gradients_are_the_same_however_it_is_called_and_are_not_differentiated(shared_world):
    assert wrong(shared_world.run(every_way)) == []


BITS = torch.bfloat16


def in_few_bits() -> dict[str, float]:
    """How often its own rounding the output is off, and how many eps the gradients; autocast changes nothing."""
    eps, found, own = torch.finfo(BITS).eps, {}, cut_of("zigzag")
    exact = [draw(2, 6, 96, 4, seed=k).to(BITS).double().requires_grad_() for k in range(3)]
    expected = full(*exact)
    expected.sum().backward()
    for kind in KINDS:
        both = []
        for on in (False, True):
            qkv = [own(x.detach()).to(BITS).requires_grad_() for x in exact]
            with torch.autocast("cpu", BITS, enabled=on):
                o = ATTENTION[kind](*qkv)
                both.append([o, *torch.autograd.grad(o.float().sum(), qkv)])
        assert all(map(torch.equal, *both))
        (o, *grads), right = both[0], own(expected.detach())
        found[f"{kind}, o"] = ((o - right).abs() / (right.abs() * eps / 2 + 1e-6)).max().item()
        for name, grad, x in zip("qkv", grads, exact, strict=True):
            assert grad.dtype == BITS
            found[f"{kind}, {name}"] = ((grad - own(x.grad)).abs().max() / x.grad.abs().max() / eps).item() / 2
    return found


def test_sums_over_blocks_and_ranks_are_made_in_32_bits(shared_world):
    assert wrong(shared_world.run(in_few_bits), most=1.02) == []

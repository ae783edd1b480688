"""parallel.context: on ranks each of which has a part of a sequence, the attention and gradients of one process."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from manyranks.parallel.context import LAYOUTS, shard
from manyranks.parallel.context.apply import ATTENTION
from tests.conftest import matrix
from tests.unit.attention_reference import draw, full, gap, largest

DEGREES = pytest.mark.parametrize("shared_worlds", matrix([1, 2, 3, 4], [3]), indirect=True, scope="module")
SEQ, TILE = 24, 5  # 12 tokens of two ranks are cut into tiles of 4
DOCUMENTS = [[0] * 7 + [1] * 17, [3] + [1] * 11 + [3] * 12]


def variants(n: int) -> dict[str, tuple]:
    """The attention, its group or the shape of its mesh, and the ranks that share a shard of the ring."""
    found = {kind: (ATTENTION[kind], None, 1) for kind in ("ring", "all-gather", "ulysses")}
    for rings in (r for r in range(1, n + 1) if n % r == 0):
        found[f"ring of {rings}, ulysses of {n // rings}"] = (ATTENTION["ring-ulysses"], (rings, n // rings), n // rings)
    return found


def mesh_of(shape: tuple[int, int] | None):
    return shape and init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))


def qkv_of(heads: int, kv_heads: int, seq: int = SEQ, seed: int = 0) -> list[Tensor]:
    return [draw(2, h, seq, 4, seed=seed + k).requires_grad_() for k, h in enumerate((heads, kv_heads, kv_heads))]


def compared(attend, whole: list[Tensor], cut, **options) -> float:
    """The largest difference of the output and of all gradients to one process with all tokens. cut: gives a rank's part."""
    expected = full(*whole, **options)
    weights = draw(*expected.shape, seed=9)
    right = torch.autograd.grad((expected * weights).sum(), whole)
    own = [cut(x.detach()).requires_grad_() for x in whole]
    o = attend(*own, tile=TILE, **options)
    grads = torch.autograd.grad((o * cut(weights)).sum(), own)
    return gap([(ours, cut(theirs)) for ours, theirs in zip((o, *grads), (expected, *right), strict=True)])


def everything(kv_heads: int, layouts: tuple[str, ...], masks: list[tuple]) -> dict[str, float]:
    n, found = dist.get_world_size(), {}
    for name, (attention, shape, sharing) in variants(n).items():
        where = mesh_of(shape)
        for layout, (causal, documents) in product(layouts, masks):
            attend = partial(at, where, attention, layout=layout)
            cut = partial(shard, layout=layout, rank=dist.get_rank(), n=n, dim=2, sharing=sharing)
            mask = {"causal": causal, "documents_BT": documents and torch.tensor(documents)}
            found[f"{name}, {layout}, {mask}"] = compared(attend, qkv_of(12, kv_heads), cut, **mask)
    return found


def at(where, attention, *qkv: Tensor, **options) -> Tensor:
    return attention(*qkv, where, **options)


MASKS = [(True, None), (False, None), (True, DOCUMENTS), (False, DOCUMENTS[:1])]


@DEGREES
def test_output_and_gradients_of_every_variant_are_those_of_full_attention(shared_worlds):
    n = shared_worlds.size
    for found in shared_worlds.run(everything, {1: 3, 2: 6, 3: 3, 4: 4}[n], LAYOUTS, MASKS):
        assert {case: error for case, error in found.items() if not error < 1e-12} == {}
        assert len(found) == len(variants(n)) * len(LAYOUTS) * len(MASKS)


@DEGREES
def test_so_they_are_with_fewer_key_value_heads_than_ranks(shared_worlds):
    for found in shared_worlds.run(everything, {1: 1, 2: 1, 3: 1, 4: 2}[shared_worlds.size], ("zigzag",), MASKS[2:3]):
        assert {case: error for case, error in found.items() if not error < 1e-12} == {}


def in_pairs() -> list[float]:
    """Ranks 0 and 2, and ranks 1 and 3, at the same time, with other numbers, other sizes and another attention."""
    other, found = dist.get_rank() % 2, []
    group = dist.new_group([other, other + 2], use_local_synchronization=True)
    for kind in ("ring", "all-gather", "ulysses"):
        cut = partial(shard, layout="zigzag", rank=dist.get_rank(group), n=2, dim=2)
        whole = qkv_of(2, 2, SEQ + 4 * other, seed=other)
        found.append(compared(partial(at, group, ATTENTION[kind]), whole, cut, causal=not other))
    return found


def of_a_mesh_of_every_second() -> list[float]:
    """A mesh whose rows are ranks 0 and 2, and 1 and 3: a rank's place is that in the mesh."""
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("ring", "ulysses"))
    place = 2 * mesh.get_local_rank("ring") + mesh.get_local_rank("ulysses")
    cut = partial(shard, layout="zigzag", rank=place, n=4, dim=2, sharing=2)
    return [compared(partial(at, mesh, ATTENTION["ring-ulysses"]), qkv_of(4, 2), cut, causal=True)]


@pytest.mark.parametrize("ranks", [in_pairs, of_a_mesh_of_every_second])
def test_other_groups_than_the_world_know_nothing_of_each_other(four, ranks):
    assert largest(map(largest, four.run(ranks))) < 1e-12

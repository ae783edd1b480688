"""parallel.collectives: results on real ranks, against torch.distributed's, for every layout, dtype, size and group."""

import pytest
import torch
import torch.distributed as dist

import manyranks as mr
from manyranks.parallel import collectives as c
from tests.conftest import matrix

ALL_REDUCES = {
    "ring": c.ring_all_reduce,
    "ring in 3 pieces": lambda x, group=None: c.ring_all_reduce(x, group, pieces=3),
    "tree": lambda x, group=None: c.tree_all_reduce(x, 0, group),
    "naive": lambda x, group=None: c.naive_all_reduce(x, 0, group),
    "recursive doubling": c.recursive_doubling_all_reduce,
    "halving-doubling": c.halving_doubling_all_reduce,
    "hierarchical, 1 node": lambda x, group=None: c.hierarchical_all_reduce(x, dist.get_world_size(group), group),
    "hierarchical, nodes of 1": lambda x, group=None: c.hierarchical_all_reduce(x, 1, group),
    "hierarchical, 2 nodes": lambda x, group=None: c.hierarchical_all_reduce(x, max(1, dist.get_world_size(group) // 2), group),
}
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def sizes(n: int) -> list[int]:
    return [0, 1, n - 1, n, n + 1, 6 * n + 5] if n <= 4 else [0, n - 1, 6 * n + 5]


def layouts(elements: int) -> dict[str, tuple]:
    """Views of `elements` elements of a larger tensor, each in another order or with gaps: how to make one from a row."""
    return {
        "contiguous": lambda row: row.clone(),
        "every second": lambda row: torch.stack([row, row], 1)[:, 0],
        "transposed": lambda row: row.clone().view(*((2, -1) if elements and elements % 2 == 0 else (1, elements))).T,
        "columns of a wider one": lambda row: torch.cat([row.view(-1, 1)] * 3, 1)[:, 1:2],
    }


def values(elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small integers, whose sums are exact in every dtype, in whatever order they are added."""
    generator = torch.Generator().manual_seed(1000 * seed + elements)
    return torch.randint(-9, 10, (elements,), generator=generator).to(dtype)


def own(elements: int, dtype: torch.dtype) -> torch.Tensor:
    return values(elements, dtype, dist.get_rank())


def reduced(row: torch.Tensor, group=None) -> torch.Tensor:
    """The sum, by the backend."""
    total = row.clone()
    dist.all_reduce(total, group=group)
    return total


def gathered(row: torch.Tensor, group=None) -> list[torch.Tensor]:
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    return rows


def every_case(check, group=None) -> list[str]:
    """Lists complaints on this rank: check(row, make) -> complaints; make(row) is a tensor with the row's elements.

    It takes every second combination of sizes, dtypes and layouts, so that each size meets each dtype and each layout.
    More ranks and groups of some ranks differ in who sends what to whom: there each size meets one dtype, and each
    dtype some size.
    """
    wrong, n = [], dist.get_world_size(group)
    few = n > 4 or group is not None
    for i, elements in enumerate(sizes(n)):
        for j, dtype in enumerate(DTYPES):
            if few and (i + j) % len(DTYPES):
                continue
            for name, make in list(layouts(elements).items())[(i + j) % 2 :: 2]:
                complaints = check(own(elements, dtype), make)
                wrong += [f"{elements} elements of {dtype}, {name}: {complaint}" for complaint in complaints]
    return wrong


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(found, wanted)


def all_reduces(group=None) -> list[str]:
    def check(row, make):
        total = reduced(row, group)
        for name, all_reduce in ALL_REDUCES.items():
            if "2 nodes" in name and dist.get_world_size(group) % 2:
                continue
            x = make(row)
            returned = all_reduce(x, group)
            if returned is not x or not same(x, make(total)):
                yield name

    return every_case(check, group)


def rooted(group=None) -> list[str]:
    n, rank = dist.get_world_size(group), dist.get_rank(group)

    def check(row, make):
        rows, total = gathered(row, group), reduced(row, group)
        whole = rows[0]  # for gather: every rank has its chunk of it
        for root in {0, n // 2, n - 1}:
            at_root = rank == root
            for algorithm in ("naive", "tree", "ring"):
                x = make(row)
                getattr(c, f"{algorithm}_broadcast")(x, root, group)
                if not same(x, make(rows[root])):
                    yield f"{algorithm} broadcast from {root}"
                x = make(row)
                getattr(c, f"{algorithm}_reduce")(x, root, group)
                if not same(x, make(total if at_root else row)):
                    yield f"{algorithm} reduce to {root}"
            for algorithm in ("naive", "tree"):
                x = make(row)
                shard = getattr(c, f"{algorithm}_scatter")(x, root, group)
                if not same(shard, make(rows[root]).reshape(-1).tensor_split(n)[rank]) or not same(x, make(row)):
                    yield f"{algorithm} scatter from {root}"
                shard = make(whole).reshape(-1).tensor_split(n)[rank]
                back = getattr(c, f"{algorithm}_gather")(shard, root, group, elements=row.numel())
                if not (same(back, make(whole).reshape(-1)) if at_root else back is None):
                    yield f"{algorithm} gather to {root}"

    return every_case(check, group)


def unrooted(group=None) -> list[str]:
    n, rank = dist.get_world_size(group), dist.get_rank(group)

    def check(row, make):
        rows = [make(r).reshape(-1) for r in gathered(row, group)]
        total = sum(rows)
        x = make(row)
        for pieces in (1, 2, 5):
            shard = c.ring_reduce_scatter(x, group, pieces)
            if not same(shard, total.tensor_split(n)[rank]) or not same(x, make(row)):
                yield f"ring reduce-scatter in {pieces} pieces"
            if not same(c.ring_all_gather(shard, group, row.numel(), pieces), total):
                yield f"ring all-gather in {pieces} pieces"
        if not same(c.pairwise_all_to_all(x, group), torch.cat([r.tensor_split(n)[rank] for r in rows])):
            yield "pairwise all-to-all"
        if not same(x, make(row)):
            yield "the input changed"

    return every_case(check, group)


CHECKS = [all_reduces, rooted, unrooted]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.few(2)
def test_each_result_is_torch_distributed_s(shared_worlds, check):
    assert shared_worlds.run(check) == [[]] * shared_worlds.size


@pytest.mark.parametrize("n", matrix([1, 5, 7], [5]))
def test_each_result_is_right_for_other_numbers_of_ranks(n):
    with mr.World(n, backend="gloo", timeout=60) as world:
        for check in CHECKS:
            assert world.run(check) == [[]] * n


def test_two_groups_work_at_the_same_time():
    def on_halves():
        halves = dist.new_group([0, 3]), dist.new_group([1, 2, 4])
        return [check(halves[dist.get_rank() in (1, 2, 4)]) for check in CHECKS]

    with mr.World(5, backend="gloo", timeout=60) as world:
        assert world.run(on_halves) == [[[]] * 3] * 5


def test_the_check_sees_a_collective_that_is_wrong(shared_world):
    def damaged():
        real, c.ring_reduce_scatter = c.ring_reduce_scatter, lambda *arguments: real(*arguments) + 1
        try:
            return len(unrooted())
        finally:
            c.ring_reduce_scatter = real

    assert all(found > 0 for found in shared_world.run(damaged))


@pytest.mark.parametrize("elements", [1, 5, 1001])
def test_evenly_cut_shards_are_those_of_the_backend_s_own_operations(shared_worlds, elements):
    def compare():
        n = dist.get_world_size()
        x = own(n * elements, torch.int64)
        shard, whole, swapped = x.new_empty(elements), torch.empty_like(x), torch.empty_like(x)
        dist.reduce_scatter_single(shard, x)
        dist.all_gather_single(whole, shard)
        dist.all_to_all_single(swapped, x)
        ours = c.ring_reduce_scatter(x)
        gathered_without_elements = c.ring_all_gather(ours)
        return same(ours, shard), same(gathered_without_elements, whole), same(c.pairwise_all_to_all(x), swapped)

    assert shared_worlds.run(compare) == [(True, True, True)] * shared_worlds.size


@pytest.mark.parametrize("name", [name for name in ALL_REDUCES if "2 nodes" not in name])
def test_floats_are_the_exact_sum_within_rounding_and_the_same_bits_on_all_ranks(shared_worlds, name):
    def of_random_numbers():
        torch.manual_seed(dist.get_rank())
        single, double = torch.randn(1003), torch.randn(1003, dtype=torch.float64)
        exact = reduced(double)
        ALL_REDUCES[name](single)
        ALL_REDUCES[name](double)
        return single.view(torch.int32).tolist(), double.tolist(), (double - exact).abs().max().item()

    results = shared_worlds.run(of_random_numbers)
    assert all(bits == results[0][0] and doubles == results[0][1] for bits, doubles, _ in results)
    assert max(error for _, _, error in results) < 1e-14 * shared_worlds.size


def test_a_strided_view_leaves_what_is_between_its_elements_alone(shared_world):
    def between():
        base = own(60, torch.int64).view(4, 15)
        before, view = base.clone(), base[:, ::3].T
        total = reduced(view.contiguous())
        c.ring_all_reduce(view)
        hidden = torch.ones(15, dtype=torch.bool)
        hidden[::3] = False
        return torch.equal(view, total) and torch.equal(base[:, hidden], before[:, hidden])

    assert all(shared_world.run(between))


def test_a_parameter_that_requires_grad_can_be_broadcast_and_reduced(shared_world):
    def parameter():
        x = torch.nn.Parameter(torch.full((2, 3), float(dist.get_rank())))
        c.tree_broadcast(x, 2)
        c.ring_all_reduce(x)
        return x.tolist(), x.grad_fn is None, c.ring_reduce_scatter(x).requires_grad

    assert shared_world.run(parameter) == [([[6.0] * 3] * 2, True, False)] * 3


def test_a_shard_is_memory_of_its_own(shared_worlds):
    def shards():
        x = own(12, torch.int64)
        made = c.naive_scatter(x), c.tree_scatter(x), c.ring_reduce_scatter(x), c.pairwise_all_to_all(x)
        return all(t.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for t in made) and all(
            t.untyped_storage().nbytes() == t.nbytes for t in made
        )

    assert all(shared_worlds.run(shards))

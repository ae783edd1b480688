"""parallel.collectives: the messages on real ranks are the theory's, one by one; the bytes are exact; the errors come first."""

import itertools

import pytest
import torch
import torch.distributed as dist

import manyranks as mr
from manyranks.parallel import collectives as c
from manyranks.theory.collectives import ALGORITHMS, chunk_sizes, rounds, sent_bytes
from manyranks.timeline import Recv, Wait

SEND, RECEIVE = 96, 48  # gloo's framing a send and a receive, tests/ranks/test_measure.py
# The algorithms of the theory that this package leaves to the reader, as variants of those it has.
NOT_HERE = {(op, a) for op in ("reduce_scatter", "all_gather") for a in ("naive", "pairwise", "halving", "recursive_doubling")}
HERE = [(op, a) for op, algorithms in ALGORITHMS.items() for a in algorithms if (op, a) not in NOT_HERE]
ROOTED = ("broadcast", "scatter", "gather", "reduce")


def sizes(n: int) -> list[int]:
    return [0, 1, n - 1, n, n + 1, 10 * n + 3]


def call(op: str, algorithm: str, elements: int, dtype: torch.dtype, root: int, node: int | None) -> None:
    """The collective of this name, on a tensor of so many elements."""
    collective = getattr(c, f"{algorithm}_{op}")
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.ones(elements, dtype=dtype)
    if "gather" in op:
        shard = x.tensor_split(n)[rank]
        collective(shard, elements=elements) if op == "all_gather" else collective(shard, root, elements=elements)
    elif node is not None:
        collective(x, node)
    elif op in ROOTED or algorithm in ("tree", "naive"):
        collective(x, root)
    else:
        collective(x)


def variants(op: str, algorithm: str, n: int) -> list[tuple[int, int | None]]:
    """Roots and nodes to try."""
    if algorithm == "hierarchical":
        return [(0, node) for node in range(1, n + 1) if n % node == 0]
    return [(root, None) for root in ({0, n - 1} if op in ROOTED or algorithm in ("tree", "naive") else {0})]


def check(world, op: str, algorithm: str, elements: int, root: int, node: int | None, dtype=torch.float32) -> None:
    """Measures one call and compares every message and every byte with the theory."""
    n, case = world.size, (op, algorithm, elements, root, node)
    m = world.measure(call, op, algorithm, elements, dtype, root, node)
    theory = rounds(op, elements, n, algorithm, root, node)
    for rank in range(n):
        expected = {"send": [], "recv": []}
        for number, messages in enumerate(theory):
            for message in messages:
                if message.source == rank:
                    expected["send"].append((number, message.destination, message.count * dtype.itemsize))
                if message.destination == rank:
                    expected["recv"].append((number, message.source, message.count * dtype.itemsize))
        found = {kind: [(x.peer, x.bytes) for x in m.calls[rank] if x.op == kind] for kind in expected}
        assert found == {kind: [e[1:] for e in several] for kind, several in expected.items()}, (case, rank)
        assert {x.op for x in m.calls[rank]} <= {"send", "recv"}, (case, rank)
        # No message is handed over before one of an earlier round.
        order = {kind: iter(several) for kind, several in expected.items()}
        numbers = [next(order[x.op])[0] for x in m.calls[rank]]
        assert numbers == sorted(numbers), (case, rank)
        assert m.sent_bytes is None or m.sent_bytes[rank] == m.payload_bytes[rank] + framing(m.calls[rank]), (case, rank)
    assert list(m.payload_bytes.values()) == sent_bytes(op, elements, dtype.itemsize, n, algorithm, root, node), case
    assert m.divergence is None


def framing(calls) -> int:
    return sum(SEND if x.op == "send" else RECEIVE for x in calls)


def test_every_algorithm_of_the_theory_is_here_but_the_variants_left_out():
    assert {f"{algorithm}_{op}" for op, algorithm in HERE} == set(c.__all__)


@pytest.mark.parametrize(("op", "algorithm"), HERE)
def test_the_messages_are_the_theory_s_and_the_bytes_exact(shared_worlds, op, algorithm):
    for elements, (root, node) in itertools.product(sizes(shared_worlds.size), variants(op, algorithm, shared_worlds.size)):
        check(shared_worlds, op, algorithm, elements, root, node)


@pytest.mark.parametrize("n", [5, 6, 7])
def test_so_they_are_where_ranks_are_folded_in_or_a_tree_is_uneven(n):
    with mr.World(n, backend="gloo", timeout=60) as world:
        for op, algorithm in HERE:
            for root, node in variants(op, algorithm, n):
                check(world, op, algorithm, 2 * n + 3, root, node, torch.bfloat16)


def test_so_they_are_for_a_million_elements(shared_world):
    for op, algorithm in HERE:
        root, node = variants(op, algorithm, shared_world.size)[-1]
        check(shared_world, op, algorithm, 1_000_003, root, node, torch.bfloat16)


@pytest.mark.parametrize("elements", [0, 2, 1_000_003])
@pytest.mark.parametrize("pieces", [2, 5])
def test_pieces_are_more_messages_of_the_same_bytes(shared_worlds, elements, pieces):
    n = shared_worlds.size

    def whole():
        return torch.ones(elements, dtype=torch.bfloat16)

    def shard():
        return whole().tensor_split(n)[dist.get_rank()]

    for op, one in (
        ("all_reduce", lambda: c.ring_all_reduce(whole(), pieces=pieces)),
        ("reduce_scatter", lambda: c.ring_reduce_scatter(whole(), pieces=pieces)),
        ("all_gather", lambda: c.ring_all_gather(shard(), elements=elements, pieces=pieces)),
        ("broadcast", lambda: c.ring_broadcast(whole(), pieces=pieces)),
    ):
        m = shared_worlds.measure(one)
        assert list(m.payload_bytes.values()) == sent_bytes(op, elements, 2, n), op
        messages = {"all_reduce": 2 * (n - 1) * pieces, "broadcast": pieces}.get(op, (n - 1) * pieces)
        assert sum(x.op == "send" for x in m.calls[0]) == messages, op
        assert m.sent_bytes is None or all(m.sent_bytes[r] == m.payload_bytes[r] + framing(m.calls[r]) for r in range(n))


def test_a_piece_is_on_its_way_while_another_is_added(shared_world):
    """In a ring of several pieces, so many receives have been posted and not waited for; by their order, not by a clock."""

    def most_open(instructions) -> int:
        receives, most = set(), 0
        for instruction in instructions:
            if type(instruction) is Recv:
                receives.add(instruction.handle)
            elif type(instruction) is Wait:
                receives.discard(instruction.handle)
            most = max(most, len(receives))
        return most

    def ring(pieces):
        c.ring_reduce_scatter(torch.ones(3_000), pieces=pieces)

    for pieces in (1, 2, 4):
        program = shared_world.measure(ring, pieces).program
        assert [most_open(rank) for rank in program.ranks] == [pieces] * 3


def test_the_peers_in_a_group_are_its_own_ranks():
    def on_two():
        group = dist.new_group([1, 3])
        if dist.get_rank() in (1, 3):
            c.ring_all_reduce(torch.ones(5), group)
            c.tree_broadcast(torch.ones(5), 1, group)

    with mr.World(4, backend="gloo", timeout=30) as world:
        m = world.measure(on_two)
    messages = {r: [(x.op, x.peer, x.bytes) for x in calls if x.op in ("send", "recv")] for r, calls in m.calls.items()}
    first, second = [("send", 3, 8), ("recv", 3, 12), ("send", 3, 12), ("recv", 3, 8)], [("recv", 3, 20)]
    assert messages[1] == first + second
    assert [(op, peer) for op, peer, _ in messages[3]] == [("send", 1), ("recv", 1)] * 2 + [("send", 1)]
    assert messages[0] == messages[2] == []


def wrong_calls() -> list[tuple]:
    n = dist.get_world_size()
    x, shard = torch.ones(8), torch.ones(5)
    rooted = [getattr(c, name) for name in c.__all__ if name.rpartition("_")[2] in ROOTED and "all_" not in name
              and name.removeprefix("ring_") != "reduce_scatter"]  # fmt: skip
    given_x = [getattr(c, name) for name in c.__all__ if "gather" not in name and "hierarchical" not in name]
    return [
        *((f, (x, root), f"root={root}: must be one of the {n} ranks") for f in rooted for root in (-1, n)),
        *((f, ([1.0, 2.0],), "x is a list: give a torch.Tensor") for f in given_x),
        (c.ring_all_gather, ([1.0],), "list: give a torch.Tensor"),
        *((c.hierarchical_all_reduce, (x, node), f"node={node}: .* divide the {n} ranks") for node in (0, -1, n + 1, 2 * n)),
        (c.ring_all_gather, (shard, None, 5 * n + n), "shard of 5 elements: of elements=.* has 6"),
        (c.naive_gather, (shard, 0, None, 1), "shard of 5 elements: of elements=1 "),
        (c.tree_gather, (shard, 0, None, -1), "elements=-1"),
        *((f, (x, None, 0), "pieces=0") for f in (c.ring_all_reduce, c.ring_reduce_scatter)),
        (c.ring_broadcast, (x, 0, None, 0), "pieces=0"),
        (c.ring_all_gather, (x, None, None, 0), "pieces=0"),
        (c.ring_all_reduce, (x[:1].expand(8),), "its elements share memory"),
        (c.tree_reduce, (x.to_sparse(),), "layout"),
    ]


def test_wrong_arguments_raise_value_error_before_any_message(shared_worlds):
    def try_all():
        for function, arguments, text in wrong_calls():
            with pytest.raises(ValueError, match=text):
                function(*arguments)
        return len(wrong_calls())

    m = shared_worlds.measure(try_all)
    assert all(count > 35 for count in m.results)
    assert all(calls == [] for calls in m.calls.values())


def test_a_rank_outside_the_group_is_told_so(shared_world):
    def outside():
        group = dist.new_group([0, 1])
        if dist.get_rank() == 2:
            with pytest.raises(ValueError, match="not in the group"):
                c.ring_all_reduce(torch.ones(3), group)
        return True

    assert shared_world.run(outside) == [True] * 3


def test_uneven_shards_without_elements_are_noticed_where_it_can_be(shared_world):
    """With 4 elements on 3 ranks the first has 2: it may be a shard of 6. Rank 1's 1 cannot be one of elements=6."""

    def gather():
        shard = torch.ones(chunk_sizes(4, 3)[dist.get_rank()])
        if dist.get_rank():
            with pytest.raises(ValueError, match=r"shard of 1 elements: of elements=6 over 3 ranks, rank . has 2"):
                c.ring_all_gather(shard, elements=6)
        return True

    assert shared_world.run(gather) == [True] * 3

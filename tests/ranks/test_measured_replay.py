"""A measured run, replayed on a cluster: the same program, other hardware, and the same timeline each time."""

import pytest
import torch
import torch.distributed as dist

import manyranks as mr
from manyranks import parallel, theory
from manyranks.theory.kernels import DEFAULT
from manyranks.timeline import Collective, Compute, Recv, Send, Wait
from tests.conftest import matrix

H100 = theory.clusters["h100-dgx"]
ELEMENTS = 3_000_000


def all_reduce():
    dist.all_reduce(torch.ones(ELEMENTS))


def overlapped(hidden: int):
    x = torch.ones(hidden, hidden)
    work = dist.all_reduce(torch.ones(ELEMENTS), async_op=True)
    y = x @ x
    work.wait()
    return y.shape


def ring_step():
    rank, n = dist.get_rank(), dist.get_world_size()
    x, y = torch.ones(ELEMENTS), torch.empty(ELEMENTS)
    pair = [dist.P2POp(dist.isend, x, (rank + 1) % n), dist.P2POp(dist.irecv, y, (rank - 1) % n)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()


def train(steps: int = 2):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.25)
    for _ in range(steps):
        model(torch.ones(8, 256)).sum().backward()


def test_an_all_reduce_takes_what_the_theory_says(worlds):
    timeline, n = worlds.measure(all_reduce).replay(H100), worlds.size
    nvlink = H100.levels[0].link
    link = theory.Link("", nvlink.latency, nvlink.bandwidth * DEFAULT.bandwidth)
    theirs = theory.collectives.seconds("all_reduce", 4 * ELEMENTS, n, link)
    assert timeline.makespan == pytest.approx(DEFAULT.overhead + theirs)
    assert [timeline.exposed_communication(r) for r in range(n)] == pytest.approx([timeline.makespan] * n)


def test_an_all_to_all_takes_as_long_as_the_rank_that_receives_most(world):
    def all_to_the_last():
        rank, n = dist.get_rank(), dist.get_world_size()
        sent, received = ([ELEMENTS if to == n - 1 else 0 for to in range(n)], [ELEMENTS if rank == n - 1 else 0] * n)
        dist.all_to_all_single(torch.empty(sum(received)), torch.ones(ELEMENTS), received, sent)

    (call,) = world.measure(all_to_the_last).program.ranks[0][:1]
    assert call == Collective("all_to_all", 4 * ELEMENTS * world.size, tuple(range(world.size)), 0)


@pytest.mark.parametrize("run", [all_reduce, ring_step, train])
def test_two_measurements_give_one_timeline(world, run):
    first, second = (world.measure(run, flops=True).replay(H100) for _ in range(2))
    assert first == second
    assert first.makespan > 0


def test_the_program_has_what_the_ranks_issued_and_waited_for(world):
    program = world.measure(ring_step).program
    assert [type(i) for i in program.ranks[1]] == [Send, Recv, Wait, Wait]
    send, receive, *waits = program.ranks[1]
    assert (send.to, receive.source, send.bytes) == (2, 0, 4 * ELEMENTS)
    assert {wait.handle for wait in waits} == {send.handle, receive.handle}


def test_computing_hides_communication_where_it_did_on_the_ranks(world):
    idle, busy = (world.measure(overlapped, hidden, flops=True).replay(H100) for hidden in (8, 2048))
    assert busy.busy(0) > idle.busy(0)
    assert busy.exposed_communication(0) < idle.exposed_communication(0)
    assert busy.makespan < idle.makespan + busy.busy(0)


def test_computing_is_charged_by_its_flops(world):
    measured = world.measure(overlapped, 1024, flops=True)
    work = [i.work for i in measured.program.ranks[0] if isinstance(i, Compute)]
    assert sum(w.flops for w in work) == measured.flops[0] == 2 * 1024**3
    assert sum(w.bytes for w in work) >= 4 * 3 * 1024**2


def test_without_flops_computing_takes_no_time(world):
    timeline = world.measure(overlapped, 64).replay(H100)
    assert [timeline.busy(r) for r in timeline.ranks] == [0, 0, 0]


def test_the_buckets_of_ddp_travel_during_backward(world):
    world.run(train)
    measured = world.measure(train, flops=True)
    program = measured.program.ranks[0]
    buckets = [i for i in program if isinstance(i, Collective) and i.op == "all_reduce"]
    assert len(buckets) > 4
    assert {i.handle for i in program if isinstance(i, Wait)} >= {i.handle for i in buckets}
    timeline = measured.replay(theory.clusters["a100-dgx"])
    assert timeline.exposed_communication(0) < timeline.busy(0, "communication")


def test_only_the_ranks_that_ran_have_instructions(world):
    def alone():
        return torch.ones(64, 64) @ torch.ones(64, 64)

    program = world.measure(alone, flops=True).program
    assert [len(rank) for rank in program.ranks] == [1, 1, 1]


def test_a_message_from_any_rank_cannot_be_replayed(world):
    def anyone():
        x = torch.zeros(4)
        if dist.get_rank() == 0:
            dist.recv(x)
        elif dist.get_rank() == 1:
            dist.send(x, 0)

    with pytest.raises(ValueError, match="may come from any rank"):
        world.measure(anyone).replay(H100)


def test_ranks_that_diverge_cannot_be_replayed(world):
    def diverge():
        dist.all_reduce(torch.ones(4))
        if dist.get_rank() == 1:
            dist.broadcast(torch.ones(2), src=1, async_op=True)

    with pytest.warns(RuntimeWarning, match="diverge"):
        measured = world.measure(diverge)
    with pytest.raises(ValueError, match="no common order"):
        _ = measured.program


def test_a_cluster_with_too_few_accelerators_is_refused(world):
    with pytest.raises(ValueError, match="on a cluster of 2"):
        world.measure(all_reduce).replay(H100.of(2))


def star(x):
    """Rank 0 receives from all, in the order of their numbers, and then sends to all."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for other in range(1, n):
        if rank == 0:
            dist.recv(x, other)
        elif rank == other:
            dist.send(x, 0)
    for other in range(1, n):
        if rank == 0:
            dist.send(x, other)
        elif rank == other:
            dist.recv(x, 0)


@pytest.mark.parametrize("n", matrix([2, 3, 4], [3]))
def test_the_messages_of_a_run_come_round_by_round(n):
    with mr.World(n, backend="gloo", timeout=30) as world:
        inwards = [((r, 0, 40),) for r in range(1, n)]
        outwards = [((0, r, 40),) for r in range(1, n)]
        assert world.measure(star, torch.zeros(10)).rounds == inwards + outwards
        assert world.measure(ring_step).rounds == [tuple((r, (r + 1) % n, 4 * ELEMENTS) for r in range(n))]


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving_doubling"])
def test_the_rounds_of_a_run_are_those_of_the_theory(algorithm):
    with mr.World(4, backend="gloo", timeout=30) as world:
        function = getattr(parallel.collectives, f"{algorithm}_all_reduce")
        run = world.measure(function, torch.ones(13)).rounds
    theirs = theory.collectives.rounds("all_reduce", 13, 4, algorithm)
    assert run == [tuple(sorted((m.source, m.destination, 4 * m.count) for m in messages)) for messages in theirs]


def test_the_rounds_of_one_pair_keep_their_order_and_collectives_take_none(world):
    def messages():
        rank = dist.get_rank()
        for elements in (1, 2, 3):
            dist.all_reduce(torch.ones(5))
            if rank < 2:
                (dist.send if rank == 0 else dist.recv)(torch.ones(elements), 1 - rank)

    assert world.measure(messages).rounds == [((0, 1, 4),), ((0, 1, 8),), ((0, 1, 12),)]
    assert world.measure(all_reduce).rounds == []


def test_a_work_that_was_done_before_the_next_call_is_still_waited_for_by_itself(world):
    """The recorder lets go of it then, for it holds the tensors; and a wait for an unknown Work would be one for all."""

    def two():
        x = torch.ones(64, 64)
        first = dist.all_reduce(torch.ones(4), async_op=True)
        while not first.is_completed():
            pass
        second = dist.all_reduce(torch.ones(ELEMENTS), async_op=True)
        first.wait()
        x @ x
        second.wait()

    program = world.measure(two, flops=True).program.ranks[0]
    counted = [i for i in program if not isinstance(i, Compute) or i.work.flops]
    found = ["x @ x" if isinstance(i, Compute) else (type(i), i.handle) for i in counted]
    assert found == [(Collective, 0), (Collective, 1), (Wait, 0), "x @ x", (Wait, 1)]


def test_who_waits_for_what_follows_a_call_has_waited_for_the_call(world):
    def average():
        future = dist.all_reduce(torch.ones(4), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / 2).then(lambda done: done.value() + 1).wait()

    measured = world.measure(average)
    assert [type(i) for i in measured.program.ranks[0] if not isinstance(i, Compute)] == [Collective, Wait]
    assert measured.results[0].tolist() == [1 + world.size / 2] * 4

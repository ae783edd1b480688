"""world.measure: calls, bytes and times over our own messages, gloo's collectives, and PyTorch's DDP and FSDP."""

import json
import random
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import manyranks as mr
from manyranks.measure.memory import PeakBytes
from manyranks.theory import collectives

ELEMENTS = 840_000  # divisible by 2, 3, 4, 7 and 8
BYTES = 4 * ELEMENTS
SEND, RECEIVE = 96, 48  # gloo's framing a send and a receive


def all_reduce():
    dist.all_reduce(torch.ones(ELEMENTS))


def all_gather():
    n = dist.get_world_size()
    dist.all_gather_single(torch.empty(ELEMENTS), torch.ones(ELEMENTS // n))


def reduce_scatter():
    n = dist.get_world_size()
    dist.reduce_scatter_single(torch.empty(ELEMENTS // n), torch.ones(ELEMENTS))


def all_to_all():
    dist.all_to_all_single(torch.empty(ELEMENTS), torch.ones(ELEMENTS))


def broadcast():
    dist.broadcast(torch.ones(ELEMENTS), src=0)


def reduce():
    dist.reduce(torch.ones(ELEMENTS), dst=0)


def close_to(measured: dict, expected: list[float]) -> bool:
    return all(e * BYTES <= measured[r] <= e * BYTES * 1.005 + 4096 for r, e in enumerate(expected))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_gloo_sends_what_was_measured_before(n):
    ring, half = [2 * (n - 1) / n] * n, [(n - 1) / n] * n
    tree = {2: [1, 0], 4: [2, 1, 0, 0], 8: [3, 2, 1, 1, 0, 0, 0, 0]}[n]
    expected = {
        all_reduce: (ring, ring),
        all_gather: (half, half),
        all_to_all: (half, half),
        reduce_scatter: (half, ring),  # an all-reduce inside: twice what the operation needs
        broadcast: (tree, tree),
        reduce: ([(n - 1) / n, *[1] * (n - 1)],) * 2,
    }
    with mr.World(n, backend="gloo") as world:
        for operation, (payload, sent) in expected.items():
            m = world.measure(operation)
            assert [m.payload_bytes[r] for r in range(n)] == [round(p * BYTES) for p in payload], operation.__name__
            assert close_to(m.sent_bytes, sent), (operation.__name__, m)
            assert [c.op for c in m.calls[0]] == [operation.__name__]


@pytest.mark.parametrize("elements", [0, 1, 1000])
def test_framing_of_a_message_is_96_bytes_a_send_and_48_a_receive(worlds, elements):
    n = worlds.size

    def pass_on():
        rank = dist.get_rank()
        works = [dist.isend(torch.ones(elements), (rank + 1) % n), dist.irecv(torch.ones(elements), (rank - 1) % n)]
        for work in works:
            work.wait()

    m = worlds.measure(pass_on)
    assert m.payload_bytes == dict.fromkeys(range(n), 4 * elements)
    assert m.sent_bytes == dict.fromkeys(range(n), 4 * elements + SEND + RECEIVE)


def test_a_4_kb_all_reduce_of_4_ranks_is_7728_bytes():
    with mr.World(4, backend="gloo") as world:
        m = world.measure(lambda: dist.all_reduce(torch.ones(1000)))
    assert m.payload_bytes[0] == 6000
    assert m.sent_bytes == dict.fromkeys(range(4), 7728)


@pytest.mark.parametrize("elements", [0, 1, 5, 1001])
def test_nominal_payload_is_the_theory_for_any_size(worlds, elements):
    m = worlds.measure(lambda: dist.all_reduce(torch.ones(elements, dtype=torch.bfloat16)))
    assert list(m.payload_bytes.values()) == collectives.sent_bytes("all_reduce", elements, 2, worlds.size)


def test_calls_say_everything_about_a_message(world):
    def talk():
        rank, x = dist.get_rank(), torch.ones(3, dtype=torch.int64)
        if rank == 0:
            dist.send(x, dst=2)
            dist.isend(x, dst=2).wait()
        if rank == 2:
            dist.recv(x, src=0)
            dist.irecv(x, src=0).wait()

    m = world.measure(talk)
    assert [len(m.calls[r]) for r in range(3)] == [2, 0, 2]
    first, second = m.calls[0]
    line = talk.__code__.co_firstlineno
    assert (first.op, first.bytes, first.dtype, first.peer, first.group, first.ranks) == (
        "send", 24, "int64", 2, "default", (0, 1, 2),
    )  # fmt: skip
    assert (first.sequence, second.sequence) == (0, 1)
    assert (first.is_async, second.is_async) == (False, True)
    assert (first.where, second.where) == (f"test_measure.py, line {line + 3}", f"test_measure.py, line {line + 4}")
    assert m.calls[2][0].peer == 0
    assert first.started < first.finished <= second.started < second.finished


def test_sequence_counts_within_a_group(world):
    def groups():
        pair = dist.new_group([0, 2])
        dist.barrier()
        x = torch.ones(1)
        if dist.get_rank() != 1:
            dist.all_reduce(x, group=pair)
            dist.all_reduce(x, group=pair)
        dist.all_reduce(x)

    calls = world.measure(groups).calls
    in_pair = [c for c in calls[2] if c.ranks == (0, 2)]
    assert [c.sequence for c in in_pair] == [0, 1]
    assert in_pair[0].group != "default"
    last = [calls[r][-1] for r in range(3)]
    assert len({(c.group, c.sequence) for c in last}) == 1


def test_asynchronous_calls_have_their_real_end(world):
    def overlap():
        import time

        small, late = torch.ones(4), dist.get_rank() == 2
        if late:
            time.sleep(0.3)
        work = dist.all_reduce(small, async_op=True)
        message = dist.isend(small, 1) if dist.get_rank() == 0 else dist.irecv(small, 0) if dist.get_rank() == 1 else None
        time.sleep(2)
        work.wait()
        if message:
            message.wait()

    m = world.measure(overlap)
    all_reduces = {r: m.calls[r][0] for r in range(3)}
    assert all(c.is_async for c in all_reduces.values())
    arrived = all_reduces[2].started
    for rank in (0, 1):
        waited = min(s.started for s in m.timeline.of(rank, "compute")) + all_reduces[rank].started
        assert all_reduces[rank].finished >= arrived > waited - 1
        assert all_reduces[rank].finished - all_reduces[rank].started < 1.9  # not the end of the wait, 2 s later
        assert m.calls[rank][1].finished - m.calls[rank][1].started < 1.9


def test_the_timeline_has_compute_and_communication_on_one_clock(world, tmp_path):
    def work():
        x = torch.ones(200, 200)
        for _ in range(20):
            x = x @ x / 200
        dist.all_reduce(x)
        return x @ x

    timeline = world.measure(work).timeline
    assert timeline.ranks == [0, 1, 2]
    assert min(s.started for s in timeline.spans) == 0
    for rank in range(3):
        before, after = timeline.of(rank, "compute")
        (reduced,) = timeline.of(rank, "communication")
        assert before.started <= reduced.started <= reduced.finished <= after.finished
        assert timeline.exposed_communication(rank) <= reduced.seconds + 1e-9
    trace = json.loads(timeline.save(tmp_path / "trace.json").read_text())
    assert {e["pid"] for e in trace["traceEvents"]} == {0, 1, 2}
    assert "all_reduce #0 of 160,000 bytes" in {e["name"] for e in trace["traceEvents"]}


def ddp_step():
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))))
    model(torch.ones(2, 64)).sum().backward()


def test_ddp_is_one_all_reduce_a_bucket(world):
    m = world.measure(ddp_step)
    reduced = [c for c in m.calls[1] if c.op == "all_reduce"]
    assert sum(c.bytes for c in reduced) == 4 * 3 * (64 * 64 + 64)
    assert all(c.is_async and c.where.startswith("test_measure.py") for c in reduced)
    assert all(c.finished is not None for c in reduced)


def test_fully_shard_gathers_twice_and_scatters_once(world):
    def fsdp_step():
        from torch.distributed.fsdp import fully_shard

        model = torch.nn.Linear(63, 63)
        fully_shard(model)
        model(torch.ones(2, 63)).sum().backward()

    m = world.measure(fsdp_step)
    ops = [c.op for c in m.calls[0]]
    assert "all_gather" in ops
    assert ops[-1] == "reduce_scatter"
    assert m.divergence is None


@pytest.mark.filterwarnings("error")
def test_calls_under_inference_mode_and_no_grad_are_seen(world):
    def quiet():
        with torch.inference_mode():
            dist.all_reduce(torch.ones(2))
        with torch.no_grad():
            dist.all_reduce(torch.ones(2))

    assert [c.op for c in world.measure(quiet).calls[0]] == ["all_reduce", "all_reduce"]


def test_calls_that_diverge_without_hanging_are_reported(world):
    def silently_wrong():
        a, b = torch.ones(4), torch.ones(2, 2, dtype=torch.float32)
        for x in (a, b) if dist.get_rank() == 0 else (b, a):
            dist.all_reduce(x)
        x = torch.ones(4, dtype=torch.float32 if dist.get_rank() == 0 else torch.int32)
        dist.all_reduce(x)

    with pytest.warns(RuntimeWarning, match="the ranks' calls diverge"):
        m = world.measure(silently_wrong)
    assert "rank 0's call is all_reduce #2 of 16 bytes of float32" in m.divergence
    assert "rank 1's is all_reduce #2 of 16 bytes of int32" in m.divergence
    assert m.divergence in repr(m)
    with pytest.warns(RuntimeWarning, match="the ranks' calls diverge"):
        world.run(silently_wrong)


def test_a_message_shorter_than_its_buffer_is_reported(world):
    def short():
        if dist.get_rank() == 0:
            dist.send(torch.ones(2), dst=1)
        if dist.get_rank() == 1:
            dist.recv(torch.ones(4), src=0)

    with pytest.warns(RuntimeWarning, match="send #0 of 8 bytes to rank 1 .* recv #0 of 16 bytes from rank 0"):
        world.measure(short)


def test_without_tcp_info_sent_bytes_is_none_and_says_why(world):
    def take_away():
        from manyranks.measure import wire

        wire.TCP_INFO = None

    world.run(take_away)
    m = world.measure(lambda: dist.all_reduce(torch.ones(3)))
    assert m.sent_bytes is None
    assert m.payload_bytes[0] > 0
    assert "sent bytes: not counted; this system (linux) does not count a socket's bytes" in repr(m)


def test_flops_and_peak_bytes_where_asked_for(world):
    def work():
        x = torch.ones(64, 32)
        q = torch.ones(1, 2, 16, 8, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
        return (x @ torch.ones(32, 16)).sum().item()

    m = world.measure(work, flops=True, memory=True)
    matmul, attention = 2 * 64 * 32 * 16, 2 * 2 * 2 * 16 * 16 * 8
    # FlashAttention's backward computes the scores again: 5 matmuls against 2.
    assert m.flops == dict.fromkeys(range(3), matmul + attention + attention * 5 // 2)
    assert all(peak >= 4 * (64 * 32 + 32 * 16 + 64 * 16) for peak in m.peak_bytes.values())
    assert world.measure(work).flops is None


def test_a_program_charges_loading_a_batch_by_what_is_read_not_by_the_corpus(world):
    def load():
        from manyranks import training

        training.corpus.batch(0, 16, 128, dist.get_rank(), 4)

    program = world.measure(load, flops=True).program
    rows = 4 * 129  # bytes: read, written as they are, read again, written as int64
    assert [[step.work for step in rank] for rank in program.ranks] == [[(0, 16 * 8 + 4 * 8 + 11 * rows)]] * 3


def test_peak_bytes_is_the_most_at_one_time(world):
    def steps():
        for _ in range(3):
            x = torch.ones(1000)
            y = x + 1
            del x, y

    m = world.measure(steps, memory=True)
    assert m.peak_bytes == dict.fromkeys(range(3), 8000)


def test_results_are_those_of_run(world):
    assert world.measure(dist.get_rank).results == [0, 1, 2]


def test_a_message_from_any_rank_is_measured(world):
    def gather():
        x = torch.ones(2)
        if dist.get_rank() == 0:
            return [dist.recv(x), dist.recv(x)]
        dist.send(x, dst=0)

    m = world.measure(gather)
    assert sorted(m.results[0]) == [1, 2]
    assert [(c.op, c.peer) for c in m.calls[0]] == [("recv", None)] * 2
    assert all(c.finished is not None for c in m.calls[0])
    assert m.divergence is None


def test_uneven_all_to_all_counts_what_leaves_the_rank(world):
    def uneven():
        rank, n = dist.get_rank(), dist.get_world_size()
        out = torch.empty(n * 1000 * (rank + 1))
        splits = [1000 * (to + 1) for to in range(n)]
        dist.all_to_all_single(out, torch.ones(sum(splits)), [1000 * (rank + 1)] * n, splits)

    m = world.measure(uneven)
    assert m.payload_bytes == {0: 4 * 5000, 1: 4 * 4000, 2: 4 * 3000}
    assert all(m.sent_bytes[r] - m.payload_bytes[r] < 1000 for r in range(3))


def test_a_call_in_a_context_manager_of_torch_has_the_readers_line(world):
    def coalesced():
        from torch.distributed.distributed_c10d import _coalescing_manager

        with _coalescing_manager():
            dist.all_reduce(torch.ones(2))

    line = coalesced.__code__.co_firstlineno
    assert world.measure(coalesced).calls[0][0].where in (f"test_measure.py, line {line + k}" for k in (2, 3, 4))


def test_waiting_for_functional_collectives_is_not_compute(world):
    def functional():
        import time

        from torch.distributed import _functional_collectives as functional_collectives

        if dist.get_rank() == 0:
            time.sleep(1.5)  # rank 1 may start a second later
        functional_collectives.all_reduce(torch.ones(2), "sum", dist.group.WORLD).sum().item()

    world.run(functional)  # its imports take time
    timeline = world.measure(functional).timeline
    assert timeline.busy(1) < timeline.busy(0)
    assert timeline.exposed_communication(1) > 0.3


@pytest.mark.parametrize("flops", [False, True])
@pytest.mark.few(1)
def test_the_wait_at_the_end_of_ddps_backward_is_not_compute(world, flops):
    def late():
        import time

        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        loss = model(torch.ones(1, 8)).sum()
        if dist.get_rank() == 0:
            time.sleep(1.5)  # rank 1 may start a second later
        loss.backward()
        return sum(p.grad.abs().sum().item() for p in model.parameters())

    world.run(late)  # its imports take time
    timeline = world.measure(late, flops=flops).timeline
    assert timeline.busy(1) < timeline.busy(0)
    assert timeline.exposed_communication(1) > 0.3


def test_peak_bytes_sees_storages_that_shrink(world):
    def shrink():
        kept = []
        for _ in range(4):
            x = torch.ones(1000)
            x.untyped_storage().resize_(0)  # as fully_shard frees a gathered layer
            kept.append(x)
            torch.ones(1)

    m = world.measure(shrink, memory=True)
    assert m.peak_bytes == dict.fromkeys(range(3), 4000)


class EachTime(PeakBytes):
    """Asks after every operator."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.most = max(getattr(self, "most", 0), self.live_bytes())
        return result


@pytest.mark.parametrize("seed", range(20))
def test_peak_bytes_is_that_of_asking_after_every_operator(seed):
    chance, kept = random.Random(seed), [torch.ones(100)]
    with PeakBytes() as peak, EachTime(counts=False) as each_time:
        for _ in range(100):
            x = chance.choice(kept)
            storage, full = x.untyped_storage(), x.untyped_storage().nbytes()
            storage.resize_(0)
            storage.resize_(full + 4 * chance.randrange(500))
            x.zero_()
            kept += [x * 2, x[:1], torch.ones(chance.randrange(1, 2000))]
            kept = chance.sample(kept, chance.randrange(1, 8) if len(kept) > 7 else len(kept))
    assert peak.peak_bytes == each_time.most > 0


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_what_gloo_s_thread_has_not_let_go_of_does_not_count(shared_world, op):
    """It has said that the collective is done; without PeakBytes' wait, every tenth of these peaks is a tensor too high."""

    def peaks():
        found = set()
        for _ in range(40):
            with PeakBytes() as peak:
                whole, part = torch.ones(3000), torch.ones(1000)
                if op == "all_reduce":
                    dist.all_reduce(whole)
                elif op == "all_gather":
                    dist.all_gather_single(whole, part)
                elif op == "reduce_scatter":
                    dist.reduce_scatter_single(part, whole)
                else:
                    dist.broadcast(whole, 0)
                del whole, part
                last = torch.ones(7500)  # more than both together, less than with gloo's own
                del last
            found.add(peak.peak_bytes)
        return found

    assert shared_world.run(peaks) == [{30_000}] * 3


def test_a_resized_storage_counts_from_the_operator_that_uses_it_next():
    x = torch.ones(1000)
    storage = x.untyped_storage()
    with PeakBytes() as peak:
        x.mul_(1)
        storage.resize_(0)
        y = torch.ones(1250)
        storage.resize_(4000)
        y.add_(1)
        assert peak.peak_bytes == 5000
        x.zero_()
        assert peak.peak_bytes == 9000


def test_threads_that_wait_for_the_ends_of_messages_are_used_again(world):
    def exchange():
        rank = dist.get_rank()
        for _ in range(50):
            both = dist.isend(torch.ones(1), (rank + 1) % 3), dist.irecv(torch.ones(1), (rank - 1) % 3)
            for work in both:
                work.wait()
        return sum(thread.name == "ends of calls" for thread in threading.enumerate())

    assert 1 <= min(found := world.measure(exchange).results) <= max(found) < 25


def test_a_wait_with_a_timeout_for_a_call_that_a_thread_follows(world):
    """gloo's reduce-scatter has no future: where its end is measured, a thread waits for it."""

    def shard():
        n, rank, own = dist.get_world_size(), dist.get_rank(), torch.empty(1)
        if rank:
            dist.recv(torch.empty(1), src=0)  # rank 0 has waited in vain
        work = dist.reduce_scatter_single(own, torch.ones(n), async_op=True)
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"wasn't over after 0.01 s"):
                work.wait(timedelta(seconds=0.01))
            for other in range(1, n):
                dist.send(torch.ones(1), dst=other)
        work.wait(timedelta(seconds=60))
        return own.item()

    assert world.measure(shard, flops=True).results == [world.size] * world.size

"""NCCL's rules, one by one, and techniques that keep them: tests/strict.py. `make test-strict` runs all of them so."""

import pytest
import torch
import torch.distributed as dist

import manyranks as mr
from manyranks.world.errors import RankFailed, RankHung
from manyranks.world.processes import local
from tests.conftest import INSTALL, matrix
from tests.ranks.composed import alone, assert_equal_to_one_process, trained
from tests.ranks.test_nd_training import CASES, under


@pytest.fixture(scope="module")
def strict():
    """Makes worlds whose ranks go by these rules."""
    with pytest.MonkeyPatch.context() as patch, local._starting:
        patch.setattr(local, "_START", local._START.replace("; serve(", INSTALL))
        patch.setattr(local, "_servers", {})
        yield lambda size: mr.World(size, backend="gloo", timeout=60)
        for server in local._servers.values():
            server.close()


@pytest.fixture(scope="module")
def three(strict):
    with strict(3) as world:
        yield world


def right():
    n, rank = dist.get_world_size(), dist.get_rank()
    x, y = torch.full((3,), float(rank)), torch.empty(3)
    ops = [dist.P2POp(dist.isend, x, (rank + 1) % n), dist.P2POp(dist.irecv, y, (rank - 1) % n)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    total = torch.ones(2)
    work = dist.all_reduce(total, async_op=True)
    early = total.clone()
    work.wait()
    return y[0].item() == (rank - 1) % n, total.tolist(), early.isnan().all().item()


def test_what_keeps_the_rules_runs_and_is_counted_and_who_reads_early_reads_nan(three):
    m = three.measure(right)
    assert m.results == [(True, [3.0, 3.0], True)] * 3
    assert [call.op for call in m.calls[0]] == ["send", "recv", "all_reduce"]


def tags():
    dist.isend(torch.ones(1), (dist.get_rank() + 1) % 3, tag=1)


def from_anyone():
    dist.recv(torch.ones(1))


def another_collective():
    x = torch.ones(4)
    dist.all_reduce(x) if dist.get_rank() else dist.broadcast(x, 0)


def another_size():
    dist.all_reduce(torch.ones(4 + dist.get_rank()))


def early_write():
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    x.zero_()
    work.wait()


def changed_input():
    x, y = torch.ones(4), torch.empty(12)
    work = dist.all_gather_single(y, x, async_op=True)
    x += 1
    work.wait()


def strided():
    dist.all_reduce(torch.ones(4, 4).T[:, :2])


BROKEN = {
    tags: "NCCL has no tags",
    from_anyone: "receives from one rank",
    another_collective: "issued different collectives",
    another_size: "issued different collectives",
    early_write: "an output of allreduce_ was written before",
    changed_input: "an input of _allgather_base_ was changed before",
    strided: "NCCL takes contiguous tensors only",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_who_breaks_a_rule_is_told_so(three, broken):
    with pytest.raises(RankFailed, match=BROKEN[broken]):
        three.run(broken)


def crossed():
    """Each waits for its message, behind one that nobody has asked for yet: gloo's would overtake it."""
    rank = dist.get_rank()
    if rank < 2:
        one, two, other = torch.zeros(1), torch.ones(1), torch.empty(1)
        dist.isend(one, 1 - rank)
        work = dist.irecv(other, 1 - rank)
        work.wait()
        dist.isend(two, 1 - rank)


def test_a_message_that_nobody_receives_holds_up_those_behind_it(three):
    with pytest.raises(RankHung, match="rank 0 waits in recv"):
        three.run(crossed)


@pytest.mark.parametrize("name", ["dualpipe-v", "dp × cp × tp, ZeRO 3", "pp × cp"])
def test_plans_keep_the_rules_and_equal_one_process(strict, name):
    gpt, fields = CASES[name]
    training = under(gpt, fields)
    with strict(training.plan.gpus) as world:
        assert_equal_to_one_process(world.run(trained, gpt, training), gpt, training.batch)


def on_another_default_device(gpt, training):
    """Code that does not say where it makes a tensor makes one without numbers, and mixes it with others in vain."""
    from manyranks.training.trainer import Trainer

    trainer = Trainer(gpt, training, dtype=torch.float64)
    with torch.device("meta"):
        return trainer.run(2), trainer.evaluate(4)


@pytest.mark.parametrize("name", matrix(CASES, ["ep × cp × tp", "dualpipe-v"]))
def test_a_step_makes_no_tensor_on_the_default_device(world_of, name):
    gpt, fields = CASES[name]
    training = under(gpt, fields)
    losses, held_out = world_of(training.plan.gpus).run(on_another_default_device, gpt, training)[0]
    wanted = alone(gpt, training.batch)
    assert losses == pytest.approx(wanted.losses, abs=1e-11)
    assert held_out == pytest.approx(wanted.held_out, abs=1e-11)

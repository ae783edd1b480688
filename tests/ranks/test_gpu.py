"""On a GPU: every tensor that a technique makes is there. Ranks share one GPU over gloo, for NCCL wants one for each rank."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import manyranks as mr
from manyranks.training import trainer as trainer_module
from manyranks.world import collect
from tests.ranks.composed import Run, assert_equal_to_one_process, trained
from tests.ranks.test_nd_training import CASES, under

pytestmark = pytest.mark.gpu(1)


class Received:
    """The work of a receive, which brings what has come to the GPU."""

    def __init__(self, work: dist.Work, here: torch.Tensor, there: torch.Tensor):
        self._work, self._here, self._there = work, here, there

    def wait(self) -> None:
        self._work.wait()
        self._there.copy_(self._here)


@contextmanager
def messages_by_the_cpu():
    """Inside, messages between two ranks go through the CPU's memory: gloo's own know no GPU, its collectives do."""
    send, recv = dist.ProcessGroup.send, dist.ProcessGroup.recv

    def sends(group, tensors, *rest):
        return send(group, [tensor.cpu() for tensor in tensors], *rest)

    def receives(group, tensors, *rest):
        [there] = tensors
        here = torch.empty(there.shape, dtype=there.dtype)
        return Received(recv(group, [here], *rest), here, there)

    with mock.patch.object(dist.ProcessGroup, "send", sends), mock.patch.object(dist.ProcessGroup, "recv", receives):
        yield


def on_gpu(*arguments) -> Run:
    """The trainer's run with its model and batches on the one GPU."""

    def place(group):
        return dist.get_rank(group), dist.get_world_size(group), torch.device("cuda", 0)

    torch.cuda.init()  # else a mesh takes the GPU of the rank's number
    with messages_by_the_cpu(), mock.patch.object(trainer_module, "_place", place):
        run = trained(*arguments)
    return run._replace(boxes=[box._replace(tensor=box.tensor.cpu()) for box in run.boxes])


@pytest.mark.parametrize("name", CASES)
def test_a_plan_on_a_gpu_equals_one_process_on_the_cpu(name, monkeypatch):
    monkeypatch.setattr(collect, "_LOOK", 60.0)  # a rank that waits for a GPU in gloo looks as if nothing moved
    gpt, fields = CASES[name]
    training = under(gpt, fields)
    with mr.World(training.plan.gpus, backend="gloo", timeout=60) as world:
        assert_equal_to_one_process(world.run(on_gpu, gpt, training), gpt, training.batch)

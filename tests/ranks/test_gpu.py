"""On a GPU: every tensor that a technique makes is there. Ranks share one GPU over gloo, for NCCL wants one for each rank."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import manyranks as mr
from manyranks.parallel.expert import ExpertParallel
from manyranks.parallel.expert.families import take_over
from manyranks.parallel.tensor.families import parallelize_transformers
from manyranks.training import trainer as trainer_module
from manyranks.world import collect
from tests.ranks import test_foreign
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
        here = torch.empty(there.shape, dtype=there.dtype, device="cpu")
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


def gap(kind: str, name: str) -> float:
    """How far a model of transformers, cut or with its experts dealt out, is from one process after two steps, on the GPU."""
    torch.cuda.init()
    torch.set_default_device("cuda:0")
    try:
        with messages_by_the_cpu():
            more = {"sliding_window": None} if kind == "sequence" else {}
            alone, model = test_foreign.made(name, **more), test_foreign.made(name, **more)
            loss = test_foreign.loss_of
            test_foreign.learnt(alone, loss)
            if kind == "experts":
                take_over(model)
                model = ExpertParallel(model, "model.layers.*.mlp.experts")
            else:
                model = parallelize_transformers(model, None, sequence_parallel=kind == "sequence")
                loss = model.loss if model.vocabulary else loss
            test_foreign.learnt(model, loss, model.finish, share=kind == "experts")
            whole = model.full_state_dict()
            return max((whole[name].to(p.device) - p.detach()).abs().max().item() for name, p in alone.named_parameters())
    finally:
        torch.set_default_device(None)


FOREIGN = [("tensor", name) for name in ("Llama", "Qwen3", "Gemma3", "Mixtral")]
FOREIGN += [("sequence", name) for name in ("Llama", "Mistral", "Qwen2", "Qwen3")]
FOREIGN += [("experts", name) for name in ("Mixtral", "DeepseekV3", "GptOss")]


@pytest.mark.parametrize(("kind", "name"), FOREIGN)
def test_a_model_of_transformers_on_a_gpu_learns_what_one_process_learns(kind, name):
    with mr.World(2, backend="gloo") as world:
        assert max(world.run(gap, kind, name)) < 1e-6

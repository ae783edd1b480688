"""Techniques inside other modules: what a parent's parameters() gives is what trains, as without the parent."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from manyranks.parallel.context import ContextParallel
from manyranks.parallel.data_parallel import OverlappedDataParallel
from manyranks.parallel.expert import ExpertParallel
from manyranks.parallel.fsdp import FullyShardedDataParallel
from manyranks.parallel.pipeline import schedules
from manyranks.parallel.pipeline.runtime import Pipeline
from manyranks.parallel.pipeline.split import split
from manyranks.parallel.shard import local
from manyranks.parallel.tensor import parallelize
from manyranks.parallel.zero import ZeroOptimizer
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, loss
from manyranks.training.tensor_styles import styles

SIZES = {"layers": 2, "hidden": 12, "heads": 6, "ffn": 12, "vocab": 13, "seq": 12}
STEPS = 3


class Outer(nn.Module):
    """A parent with its own parameter."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body, self.scale = body, nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, *inputs):
        return self.body(*inputs) * self.scale


def gpt(**more) -> GPT:
    return GPT(GPTConfig(**SIZES, **more)).double()


def tensor_parallel() -> nn.Module:
    model = gpt()
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    parallelize(model, mesh, styles(model.config))
    return model


BUILDS = {
    "data parallel": lambda: OverlappedDataParallel(gpt()),
    "context": lambda: ContextParallel(gpt(), "layers.*.attention.core"),
    "expert": lambda: ExpertParallel(gpt(experts=6, expert_ffn=5)),
    "tensor": tensor_parallel,
    "ZeRO-2": gpt,
}


def trained(name: str, nested: bool) -> dict[str, torch.Tensor]:
    """The body's parameters after SGD on all of model.parameters(); the parent's scale stays 1."""
    body = BUILDS[name]()
    model = Outer(body) if nested else body
    learning = [p for n, p in model.named_parameters() if n != "scale"]
    optimizer = (
        ZeroOptimizer(learning, torch.optim.SGD, stage=2, lr=0.1) if name == "ZeRO-2" else torch.optim.SGD(learning, lr=0.1)
    )
    before = [p.detach().clone() for p in learning]
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + (dist.get_rank() if name in ("data parallel", "expert", "ZeRO-2") else 0))
        tokens = torch.randint(13, (2, 13))
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if name == "context":
            inputs, targets = body.shard(inputs), body.shard(targets)
            body.loss(model(inputs), targets).backward()
        elif name == "tensor":
            logits = model(inputs)
            (logits.square().sum() / 100).backward()
        else:
            loss(model(inputs), targets).backward()
        if hasattr(body, "finish"):
            body.finish()
        optimizer.step()
    assert all(not torch.equal(now, was) for now, was in zip(learning, before, strict=True))
    return {n.removeprefix("body."): p.detach() for n, p in model.named_parameters() if n != "scale"}


@pytest.mark.parametrize("name", BUILDS)
def test_a_technique_inside_a_parent_trains_as_without_it(shared_world, name):
    for inside, alone in zip(*(shared_world.run(trained, name, nested) for nested in (True, False)), strict=True):
        assert inside.keys() == alone.keys()
        assert all(torch.equal(inside[key], alone[key]) for key in alone)


@pytest.mark.parametrize("make", [schedules.one_f_one_b, schedules.zb_h1], ids=["1f1b", "zb-h1"])
def test_a_sharded_layer_inside_a_pipeline_s_stage_gets_its_gradients(shared_world, make):
    """Also where a backward has two halves, and the second one makes the weights' gradients."""

    def gaps() -> float:
        schedule, rank = make(3, 4), dist.get_rank()
        alone = [dist.new_group([r]) for r in range(3)][rank]
        model, whole = gpt(tied=False), gpt(tied=False)
        for k, layer in enumerate(model.layers):
            model.layers[k] = FullyShardedDataParallel(layer, alone)
        stages = split(model, 3)
        pipeline = Pipeline({rank: stages[rank]}, schedule, loss=loss)
        torch.manual_seed(0)
        tokens = torch.randint(13, (4, 13))
        pipeline.step(tokens[:, :-1], tokens[:, 1:])
        loss(whole(tokens[:, :-1]), tokens[:, 1:]).backward()
        theirs = {n: p.grad for n, p in whole.named_parameters()}
        ours = {n.replace(".module", ""): p for n, p in model.named_parameters()}
        own = set(stages[rank].parameters())
        found = [(local(p.grad).flatten() - theirs[n].flatten()).abs().max().item() for n, p in ours.items() if p in own]
        assert found
        return max(found)

    assert max(shared_world.run(gaps)) < 1e-12

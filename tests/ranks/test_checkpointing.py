"""parallel.checkpointing on ranks: nothing else changes under data parallelism, ZeRO and FSDP; shared checkpoints."""

from functools import partial, reduce
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils import checkpoint as theirs

import manyranks as mr
from manyranks.measure.memory import saved_bytes
from manyranks.parallel.checkpoint_plan import run_plan
from manyranks.parallel.checkpointing import checkpoint, checkpoint_modules, checkpoint_segments, partitioned_checkpoint
from manyranks.parallel.checkpointing import selective_checkpoint as selective
from manyranks.parallel.data_parallel import OverlappedDataParallel
from manyranks.parallel.fsdp import FullyShardedDataParallel
from manyranks.parallel.recompute_policy import products
from manyranks.parallel.shard import local
from manyranks.parallel.zero import ZeroOptimizer
from manyranks.theory import checkpointing
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, CausalAttention, Layer, loss
from tests.conftest import matrix

pytestmark = pytest.mark.parametrize("shared_worlds", matrix([1, 3, 4], [3]), indirect=True, scope="module")
SIZES = {"layers": 2, "hidden": 16, "heads": 4, "seq": 8, "vocab": 32}


def tied():
    """A GPT of one layer twice, whose head is the embedding."""
    model = GPT(GPTConfig(**SIZES, style="gpt2", dropout=0.2, tied=True))
    model.layers[1] = model.layers[0]
    return model


MODELS = {
    "gpt2": lambda: GPT(GPTConfig(**SIZES, style="gpt2", dropout=0.2, tied=False)),
    "llama": lambda: GPT(GPTConfig(**SIZES, style="llama", tied=False)),
    "tied": tied,
}


# Ways to checkpoint a model from outside. Each changes it in place.


def modules(*kinds, how=checkpoint):
    return lambda model: checkpoint_modules(model, lambda module: isinstance(module, kinds), how)


def layers(run):
    """Between embedding and head, so that the hooks of modules run inside the checkpoint, and in backward again."""

    def change(model):
        model.forward = lambda tokens: model.head(run(model.layers, model.embedding(tokens)))

    return change


def each(how):
    return lambda layers, x: reduce(lambda x, layer: how(layer, x), layers, x)


WAYS = {
    "every layer": modules(Layer),
    "products kept": modules(Layer, how=partial(selective, products)),
    "all but random operators kept": modules(Layer, how=partial(selective, lambda operator: True)),
    "attention's core": modules(CausalAttention),
    "checkpoints in each other": modules(Layer, CausalAttention),
    "the whole model": modules(GPT),
    "around the modules": layers(each(checkpoint)),
    "segments": layers(lambda layers, x: checkpoint_segments(layers, x, 2)),
    "a plan": layers(lambda layers, x: run_plan(checkpointing.nearest(2, 1), layers, x)),
    "torch's": layers(each(partial(theirs.checkpoint, use_reentrant=False))),
}


def overlapped(model):
    wrapped = OverlappedDataParallel(model, bucket_bytes=4000)
    return wrapped, wrapped.finish, lambda: [p.grad for p in model.parameters()]


def sharded(model):
    wrapped = FullyShardedDataParallel(model)
    return wrapped, wrapped.finish, lambda: [p.grad for p in wrapped.parameters()]


def second_stage(model):
    optimizer = ZeroOptimizer(model.parameters(), torch.optim.SGD, stage=2, bucket_bytes=4000, lr=0.1)
    return model, lambda: None, optimizer.gradients


WRAPPERS = {"overlapped": overlapped, "zero 2": second_stage, "fsdp": sharded}


def step(model, way, wrap):
    """The gradients of a step, or of two, for the first is another one than those after it: what a rank prefetches it has seen.

    Each rank has its own tokens and dropout.
    """
    torch.manual_seed(0)
    model, rank, steps = MODELS[model](), dist.get_rank(), 1 + (wrap == "fsdp")
    if way:
        WAYS[way](model)
    wrapped, finish, gradients = WRAPPERS[wrap](model)
    found = []
    for number in range(steps):
        for parameter in (*model.parameters(), *wrapped.parameters()):
            parameter.grad = None
        torch.manual_seed(100 * rank + number)
        tokens = torch.randint(32, (2, 8))
        loss(wrapped(tokens), tokens.roll(-1)).backward()
        finish()
        found += [grad.clone() for grad in gradients()]
    return found


def differing(model, wrap):
    """The ways to checkpoint whose gradients are not those without, to the last bit."""
    reference = step(model, None, wrap)
    assert reference
    return [way for way in WAYS if not equal(step(model, way, wrap), reference)]


def equal(ours, reference):
    return all(torch.equal(local(a), local(b)) for a, b in zip(ours, reference, strict=True))


@pytest.mark.parametrize(("model", "wrap"), matrix(product(MODELS, WRAPPERS), zip(MODELS, WRAPPERS, strict=True)))
def test_every_rank_s_gradients_are_the_same_bit_for_bit(shared_worlds, model, wrap):
    assert shared_worlds.run(differing, model, wrap) == [[]] * shared_worlds.size


SENT = {"overlapped": ("every layer", "a plan", "the whole model"), "zero 2": ("segments",)}
SENT |= {"fsdp": ("every layer", "around the modules")}


@pytest.mark.parametrize("wrap", matrix(SENT, ["overlapped"]))
def test_checkpoints_send_nothing_more(shared_worlds, wrap):
    plain, *others = (shared_worlds.measure(step, "gpt2", way, wrap).payload_bytes for way in (None, *SENT[wrap]))
    assert others == [plain] * len(others)


def with_pytorch_s(inside):
    """Whether a step of layers that fully_shard shards has the gradients that it has without checkpoints."""
    found = []
    for how in (None, inside):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.2), nn.GELU()) for _ in range(3)))
        if how:
            checkpoint_modules(model, lambda module, layers=tuple(model): module in layers)
        for module in (*model, model):
            fully_shard(module)
        if how is False:
            model.forward = partial(checkpoint_segments, tuple(model), count=3)
        model(torch.randn(4, 5)).sum().backward()
        found.append([p.grad.full_tensor() for p in model.parameters()])
    return equal(*found)


def test_what_pytorch_s_fully_shard_shards_is_checkpointed_inside_or_refused(shared_worlds):
    assert shared_worlds.run(with_pytorch_s, True) == [True] * shared_worlds.size
    with pytest.raises(mr.RankFailed, match="calls a module that fully_shard has sharded"):
        shared_worlds.run(with_pytorch_s, False)


def shared_checkpoint(elements: int):
    """Whether a rank saves its share of a tensor that all have, and has the gradients that it has alone."""
    torch.manual_seed(0)
    n, layer = dist.get_world_size(), nn.Sequential(nn.Linear(elements, 5), nn.Dropout(0.3), nn.GELU(), nn.Linear(5, elements))
    x, mask = torch.randn(elements, requires_grad=True), torch.ones(elements, dtype=torch.bool)

    def masked(x, mask):
        return layer(x) * mask

    def gradients(run):
        torch.manual_seed(1)
        return torch.autograd.grad(run(masked, x * 1, mask).sum(), [x, *layer.parameters()])

    share = partial(partitioned_checkpoint, None)
    saved = saved_bytes(share, masked, x, mask, parameters=layer.parameters())
    return saved == 4 * -(-elements // n) + elements, equal(gradients(share), gradients(checkpoint))  # and the mask, whole


@pytest.mark.parametrize("elements", [24, 7, 1])
def test_each_rank_keeps_its_share_of_a_checkpoint(shared_worlds, elements):
    measured, n = shared_worlds.measure(shared_checkpoint, elements), shared_worlds.size
    assert measured.results == [(True, True)] * n
    for calls in measured.calls.values():
        assert [(call.op, call.bytes) for call in calls] == [("all_gather", 4 * -(-elements // n))]

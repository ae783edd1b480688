"""parallel.checkpointing on ranks: nothing else changes under data parallelism, ZeRO and FSDP; shared checkpoints."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils import checkpoint as theirs

import manyranks as mr
from manyranks.measure.memory import saved_bytes
from manyranks.parallel.checkpoint_plan import run_plan
from manyranks.parallel.checkpointing import (
    checkpoint,
    checkpoint_modules,
    checkpoint_segments,
    partitioned_checkpoint,
    selective_checkpoint,
)
from manyranks.parallel.data_parallel import OverlappedDataParallel
from manyranks.parallel.fsdp import FullyShardedDataParallel
from manyranks.parallel.recompute_policy import products
from manyranks.parallel.zero import ZeroOptimizer
from manyranks.theory import checkpointing
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, CausalAttention, Layer, loss
from tests.conftest import matrix

CONFIG = GPTConfig(layers=2, hidden=16, heads=4, seq=8, vocab=32, dropout=0.2, style="gpt2")


# Ways to checkpoint a GPT from outside. Each changes the model in place.


def plain(model):
    pass


def every_layer(model, how=checkpoint):
    checkpoint_modules(model, lambda module: isinstance(module, Layer), how)


def cores(model):
    checkpoint_modules(model, lambda module: isinstance(module, CausalAttention))


def around(model, how=checkpoint):
    """The hooks of modules run inside the checkpoint, and in backward again."""

    def forward(tokens):
        x = model.embedding(tokens)
        for layer in model.layers:
            x = how(layer, x)
        return model.head(x)

    model.forward = forward


def in_segments(model):
    model.forward = lambda tokens: model.head(checkpoint_segments(model.layers, model.embedding(tokens), 2))


def by_plan(model):
    plan = checkpointing.nearest(len(model.layers), 1)
    model.forward = lambda tokens: model.head(run_plan(plan, model.layers, model.embedding(tokens)))


def as_a_whole(model):
    model.forward = partial(checkpoint, model.forward)


WAYS = {
    "every layer": every_layer,
    "products kept": partial(every_layer, how=partial(selective_checkpoint, products)),
    "attention's core": cores,
    "around the modules": around,
    "segments": in_segments,
    "a plan": by_plan,
    "the whole model": as_a_whole,
    "torch's": partial(around, how=partial(theirs.checkpoint, use_reentrant=False)),
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


def step(change, wrap, config=CONFIG):
    """The gradients of a step, or of two, for the first is another one than those after it: what a rank prefetches it has seen.

    Each rank has tokens and dropout of its own.
    """
    model, rank, steps = GPT(config), dist.get_rank(), 1 + (wrap is sharded)
    change(model)
    wrapped, finish, gradients = wrap(model)
    found = []
    for number in range(steps):
        for parameter in (*model.parameters(), *wrapped.parameters()):
            parameter.grad = None
        torch.manual_seed(100 * rank + number)
        tokens = torch.randint(config.vocab, (2, config.seq))
        loss(wrapped(tokens), tokens.roll(-1)).backward()
        finish()
        found += [grad.clone() for grad in gradients()]
    return found


def differing(wrap):
    """The ways to checkpoint whose gradients are not those without, to the last bit."""
    reference, wrong = step(plain, wrap), []
    assert reference
    for name, change in WAYS.items():
        ours = step(change, wrap)
        if not all(torch.equal(a, b) for a, b in zip(ours, reference, strict=True)):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("shared_worlds", matrix([1, 4], [4]), indirect=True, scope="module")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.few(1)
def test_every_rank_s_gradients_are_the_same_bit_for_bit(shared_worlds, wrapper):
    assert shared_worlds.run(differing, WRAPPERS[wrapper]) == [[]] * shared_worlds.size


@pytest.mark.parametrize(
    ("wrapper", "ways"),
    {
        "overlapped": ("every layer", "a plan", "the whole model"),
        "zero 2": ("segments",),
        "fsdp": ("every layer", "around the modules"),
    }.items(),
)
@pytest.mark.few(1)
def test_checkpoints_send_nothing_more(shared_world, wrapper, ways):
    wrap = WRAPPERS[wrapper]
    reference = shared_world.measure(step, plain, wrap).payload_bytes
    for way in ways:
        assert shared_world.measure(step, WAYS[way], wrap).payload_bytes == reference, way


class Twice(nn.Module):
    """One block twice, and a head that is the embedding."""

    def __init__(self, call):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.block, self.call = nn.Embedding(8, 12), nn.Linear(12, 12), call
        self.head = nn.Linear(12, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.call(self.embedding, tokens)
        for _ in range(2):
            x = self.call(lambda x: torch.tanh(self.block(x)), x)
        return self.call(self.head, x)


def directly(function, x):
    return function(x)


def shared_step(call, wrap):
    model = Twice(call)
    wrapped, finish, gradients = wrap(model)
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(8, (2, 5))
    loss(wrapped(tokens), tokens.roll(-1)).backward()
    finish()
    return [grad.clone() for grad in gradients()]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_tied_weights_and_a_block_of_two_checkpoints_add_up(shared_world, wrapper):
    wrap = WRAPPERS[wrapper]
    reference, ours = shared_world.measure(shared_step, directly, wrap), shared_world.measure(shared_step, checkpoint, wrap)
    for mine, expected in zip(ours.results, reference.results, strict=True):
        assert len(mine) == len(expected) > 0
        assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
    if wrapper != "fsdp":  # which gathers a module's parameters each time that the module is called
        assert ours.payload_bytes == reference.payload_bytes


def with_pytorch_s(inside):
    """A step of chain of layers that fully_shard shards, and the gradients without checkpoints."""
    found = []
    for how in (None, inside):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.2), nn.GELU()) for _ in range(3)))
        for layer in model:
            if how:
                checkpoint_modules(layer, lambda module, layer=layer: module is layer)
            fully_shard(layer)
        fully_shard(model)
        x = torch.randn(4, 5)
        if inside is False:
            model.forward = lambda x, layers=model: checkpoint_segments(layers, x, 3)
        model(x).sum().backward()
        found.append([p.grad.full_tensor() for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_pytorch_s_fully_shard_shards_is_checkpointed_inside_or_refused(shared_world):
    assert shared_world.run(with_pytorch_s, True) == [True] * 3
    with pytest.raises(mr.RankFailed, match="calls a module that fully_shard has sharded"):
        shared_world.run(with_pytorch_s, False)


# Checkpoints that a group shares


def shared_checkpoint(elements: int):
    """The bytes that a rank saves of a tensor that all have, and gradients with and without sharing."""
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
    same = all(torch.equal(a, b) for a, b in zip(gradients(share), gradients(checkpoint), strict=True))
    return saved == 4 * -(-elements // n) + elements, same  # and the mask, whole


@pytest.mark.parametrize("elements", [24, 7, 1])
def test_each_rank_keeps_its_share_of_a_checkpoint(shared_worlds, elements):
    measured, n = shared_worlds.measure(shared_checkpoint, elements), shared_worlds.size
    assert measured.results == [(True, True)] * n
    for calls in measured.calls.values():
        assert [(call.op, call.bytes) for call in calls] == [("all_gather", 4 * -(-elements // n))]


def shared_layers(config):
    """Layers whose input all ranks have: gradients with shared checkpoints, with own ones, and without."""
    found, model = [], GPT(config)
    torch.manual_seed(0)
    tokens = torch.randint(config.vocab, (2, config.seq))
    for how in (None, checkpoint, partial(partitioned_checkpoint, None)):
        changed = copy.deepcopy(model)
        if how:
            every_layer(changed, how)
        torch.manual_seed(1)
        loss(changed(tokens), tokens.roll(-1)).backward()
        found.append([p.grad for p in changed.parameters()])
    return [all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)) for other in found[1:]]


def test_a_model_of_shared_checkpoints_has_the_same_gradients(shared_world):
    assert shared_world.run(shared_layers, CONFIG) == [[True, True]] * 3

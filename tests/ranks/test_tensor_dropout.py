"""parallel.tensor: who draws the same masks and who does not, and that recomputation brings them back."""

import copy
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import checkpoint as theirs

from manyranks.parallel.checkpointing import checkpoint, checkpoint_modules, partitioned_checkpoint
from manyranks.parallel.tensor import draw_own_masks, own_randomness, parallelize
from manyranks.training import tensor_styles
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, CausalAttention, Dropout, Layer
from tests.conftest import matrix
from tests.ranks.test_tensor import WAYS

CONFIG = GPTConfig(layers=2, hidden=24, heads=12, ffn=48, vocab=12, seq=12, style="gpt2", dropout=0.3)
EVERY_WAY = pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)


def cut_gpt(how: dict, config: GPTConfig = CONFIG):
    return parallelize(GPT(config, seed=1), None, tensor_styles.styles(config), **how)


def step(model, config: GPTConfig = CONFIG) -> torch.Tensor:
    """The loss. All ranks begin with the same random numbers, as with the same tokens."""
    torch.manual_seed(5)
    tokens = torch.randint(config.vocab, (2, config.seq + 1))
    return model.loss(model(tokens[:, :-1]), tokens[:, 1:])


def masks(how: dict) -> tuple[dict, torch.Tensor]:
    """Each dropout's mask, True or False, where there was something; and the state of the common generator after it."""
    model, found = cut_gpt(how), {}

    def note(name, module, inputs, output):
        there = inputs[0] != 0
        found.setdefault(name, []).append(((output != 0)[there], there.shape))

    for name, module in model.module.named_modules():
        if isinstance(module, Dropout):
            module.register_forward_hook(partial(note, name))
    step(model).backward()
    return found, torch.get_rng_state()


def same(masks: list) -> bool:
    return all(mask.shape == masks[0].shape and torch.equal(mask, masks[0]) for mask in masks)


def all_differ(masks: list) -> bool:
    return all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i] if a.shape == b.shape)


@EVERY_WAY
def test_masks_are_common_outside_the_parallel_part_and_own_inside_and_all_own_with_shards(shared_worlds, how):
    ranks, states = zip(*shared_worlds.run(masks, how), strict=True)
    assert len(ranks[0]) == 1 + 2 * 2
    for name in ranks[0]:
        assert len(ranks[0][name]) == (2 if name.startswith("layers") and "core" not in name else 1)
        for call in zip(*(found[name] for found in ranks), strict=True):
            drawn = [mask for mask, _ in call]
            assert all_differ(drawn) if how or "core" in name else same(drawn), name
            kept = torch.cat(drawn).double().mean().item()
            assert abs(kept - 0.7) < 0.15  # of 288 numbers or more: 5 standard deviations
    for found in ranks:  # and no module's mask is another's
        assert all_differ([mask for calls in found.values() for mask, _ in calls])
    assert same(states)


def in_eval(how: dict) -> bool:
    """No random number is drawn, the loss is that without dropout, and afterwards training draws again."""
    model, plain = cut_gpt(how).eval(), cut_gpt(how, replace(CONFIG, dropout=0.0))
    loss, state = step(model), torch.get_rng_state()
    torch.manual_seed(5)
    torch.randint(CONFIG.vocab, (2, CONFIG.seq + 1))
    assert torch.equal(state, torch.get_rng_state())
    assert loss == step(plain)
    return bool(step(model.train()) != step(plain))


@EVERY_WAY
def test_in_eval_mode_nothing_is_drawn(shared_world, how):
    assert shared_world.run(in_eval, how) == [True] * 3


# Recomputation


def layers(how=checkpoint):
    return partial(checkpoint_modules, which=lambda module: isinstance(module, Layer), how=how)


AGAIN = {
    "every layer": layers(),
    "attention's core": partial(checkpoint_modules, which=lambda module: isinstance(module, CausalAttention)),
    "torch's": layers(partial(theirs.checkpoint, use_reentrant=False)),
    "torch's reentrant": layers(partial(theirs.checkpoint, use_reentrant=True)),
    "the whole model": lambda model: setattr(model, "forward", partial(checkpoint, model.forward)),
    "nothing": lambda model: None,
}
SHARED = {"shared": layers(partial(partitioned_checkpoint, None))}  # of what all ranks have


def differing(how: dict) -> list[str]:
    """Ways to recompute that lead to other gradients than none does, or leave the generator elsewhere."""
    found = {}
    for name, change in (AGAIN if how else AGAIN | SHARED).items():
        model = cut_gpt(how)
        change(model.module)
        step(model).backward()
        model.finish()
        found[name] = [p.grad for p in model.parameters()] + [torch.get_rng_state()]
    expected = found["nothing"]
    assert all(grad is not None for grad in expected)
    return [name for name, got in found.items() if not all(map(torch.equal, got, expected))]


@pytest.mark.parametrize("way", matrix(WAYS, ["plain", "overlap"]))
def test_recomputation_brings_back_all_masks_to_the_bit(shared_worlds, way):
    assert shared_worlds.run(differing, WAYS[way]) == [[]] * shared_worlds.size


# One module


def drawn(fails: bool = False) -> list[torch.Tensor]:
    """Own numbers three times, then a common one."""
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        with suppress(KeyError), own_randomness():
            found.append(torch.rand(4))
            if fails:
                raise KeyError
    return [*found, torch.rand(4)]


def test_own_numbers_differ_by_rank_and_time_and_common_ones_go_on(shared_worlds):
    ranks = shared_worlds.run(drawn)
    assert all_differ([x for found in ranks for x in found[:-1]])
    assert same([found[-1] for found in ranks])
    for again, found in zip(shared_worlds.run(drawn, fails=True), ranks, strict=True):
        assert all(map(torch.equal, again, found))


def copies() -> tuple[bool, ...]:
    """A copy of a module has its rank's masks, and its own mode; to ask for them twice changes nothing."""
    model, x, drawn = nn.Sequential(nn.Dropout(0.5)), torch.ones(64), []
    draw_own_masks(model[0])
    other = copy.deepcopy(model).eval()
    unchanged = torch.equal(other(x), x) and model.training
    other.train()
    twice = nn.Sequential(nn.Dropout(0.5))
    for _ in range(2):
        draw_own_masks(twice[0])
    for one in (model, other, twice):
        torch.manual_seed(0)
        drawn.append(one(x))
    return unchanged, same(drawn), 0 < (drawn[0] == 0).sum() < 64


def test_a_dropout_with_own_masks_is_copied(shared_world):
    assert shared_world.run(copies) == [(True, True, True)] * 3
    assert not dist.is_initialized()
    assert copies() == (True, True, True)

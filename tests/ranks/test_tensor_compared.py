"""parallel.tensor: a cut model is compared with the whole one, fused layers are cut by parts, what is wrong is refused."""

import copy
import gc
import re
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from manyranks.parallel.checkpointing import checkpoint_modules
from manyranks.parallel.tensor import Column, ColumnParallelLinear, How, Row, Vocabulary, column_parallel, parallelize
from manyranks.parallel.tensor.cuts import own_part
from tests.conftest import matrix
from tests.ranks import refused
from tests.ranks.test_tensor import WAYS, gaps, lively, off, random

D = 2  # features of a head
DEGREES = pytest.mark.parametrize("shared_worlds", matrix([2, 3, 4], [2, 3]), indirect=True, scope="module")


class Counts(nn.Module):
    """Attention as OPT, BART and Whisper have it: heads are counted, and −1 stands for the tokens."""

    def __init__(self, t: int):
        super().__init__()
        self.num_heads = 2 * t
        self.q, self.k, self.v, self.out = (nn.Linear(2 * t * D, 2 * t * D) for _ in range(4))
        self.register_buffer("passes", torch.zeros(()))
        self.drop = nn.Dropout(0.5)

    def forward(self, x_BSH):
        self.passes += 1
        q, k, v = (p(x_BSH).view(len(x_BSH), -1, self.num_heads, D).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.drop(self.out(y.flatten(2)))


class Fused(nn.Module):
    """Queries, keys and values end to end, of grouped heads; gate and up end to end; odd sizes; a norm; a tied layer."""

    def __init__(self, t: int, tied: bool = False):
        super().__init__()
        self.t, self.norm = t, nn.RMSNorm(7)
        self.qkv, self.out = nn.Linear(7, 4 * t * D), nn.Linear(2 * t * D, 7, bias=False)
        self.gate_up, self.down = nn.Linear(7, 2 * 3 * t, bias=False), nn.Linear(3 * t, 7)
        if tied:
            self.second = nn.Linear(7, 2 * 3 * t, bias=False)
            self.second.weight = self.gate_up.weight

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (-1, D)).transpose(1, 2)
        each = qkv.shape[1] // 4  # heads of keys and of values: half of the queries'
        q, k, v = qkv.split((2 * each, each, each), 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        for gate_up in [self.gate_up, *([self.second] if hasattr(self, "second") else [])]:
            gate, up = gate_up(x).chunk(2, -1)
            x = x + self.down(F.silu(gate) * up)
        return x


def styles(t: int, tied: bool = False) -> dict:
    table = {"qkv": Column((2 * t, t, t)), "out": Row(2 * t), "gate_up": Column(parts=2), "down": Row()}
    return table | ({"second": Column(parts=2)} if tied else {})


HEADS = {"q": Column(0), "k": Column(0), "v": Column(0), "out": Row(0)}


def heads(t: int) -> dict:
    return {name: type(style)(2 * t) for name, style in HEADS.items()}


CASES = {
    "counts": (Counts, heads, ()),
    "fused": (Fused, styles, ()),
    "tied": (partial(Fused, tied=True), partial(styles, tied=True), ()),
    "frozen": (Fused, styles, ("qkv.weight", "down.bias", "gate_up.weight")),
}


def learnt(way: str) -> dict[str, float]:
    """Two steps against one process: results, gradients, weights."""
    t, found = dist.get_world_size(), {}
    for case, (make, table, frozen) in CASES.items():
        alone, how = lively(make(t)), WAYS[way]
        for name, p in alone.named_parameters():
            p.requires_grad_(name not in frozen)
        features = 2 * t * D if make is Counts else 7
        x = random(2, 12, features)
        tp = parallelize(copy.deepcopy(alone), None, table(t), example=x, **how)
        own = own_part if how else torch.clone
        both = [(model, torch.optim.SGD(model.parameters(), 0.1)) for model in (alone.eval(), tp.eval())]
        for step in range(2):
            y, y_own = alone(x), tp(own(x))
            grad = random(*y.shape, seed=step) / 100
            y.backward(grad)
            y_own.backward(own(grad))
            tp.finish()
            found[f"{case} {step}"] = max(off(y_own, own(y)), *gaps(tp, alone))
            for _, optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        whole = tp.full_state_dict()
        found[case] = max(off(whole[name], p.detach()) for name, p in alone.named_parameters())
        tp.load_full_state_dict(alone.state_dict())
    return found


@DEGREES
@pytest.mark.parametrize("way", ["plain", "sequence", "overlap"])
def test_what_counts_heads_and_what_is_fused_learns_as_in_one_process(shared_worlds, way):
    for found in shared_worlds.run(learnt, way):
        assert {case: gap for case, gap in found.items() if not gap < 1e-12} == {}


def as_it_was() -> list[bool]:
    """What a comparison leaves: mode, buffers, gradients, the common random numbers, and what the first pass is to show."""
    t = dist.get_world_size()
    model, x = lively(Counts(t)), random(2, 5, 2 * t * D)
    model.out.bias.grad = grad = torch.ones_like(model.out.bias)
    model.drop.eval()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    tp = parallelize(model, None, heads(t), example={"x_BSH": x})
    unchanged = [model.training, not model.drop.training, model.passes.item() == 0, model.num_heads == 2]
    unchanged += [model.out.bias.grad is grad, bool((grad == 1).all()), torch.equal(torch.get_rng_state(), state)]
    for p in tp.parameters():
        unchanged.append(p is model.out.bias or p.grad is None)
    return [*unchanged, all(tp._looks), tp._frozen is None]


def test_a_comparison_leaves_nothing_changed(shared_worlds):
    assert all(map(all, shared_worlds.run(as_it_was)))


class Reads(nn.Module):
    """Its features are cut, and it divides by the norm of all of them; or it wants their number."""

    def __init__(self, **more):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(12, 144), nn.Linear(144, 12), nn.LayerNorm(12)
        self.num_heads, self.fails = more.get("num_heads"), more.get("fails")

    def forward(self, x):
        y = self.up(self.norm(x))
        return self.down(y.view(2, 3, 144) if self.fails else y / y.norm(dim=-1, keepdim=True))


X = torch.linspace(-1, 1, 72).view(2, 3, 12)
UP = {"up": Column(), "down": Row()}


def unseen():
    """A norm of heads that learns where nothing before it does: no graph shows that it has features of one rank."""
    model = Reads()
    model.up.requires_grad_(False)
    model.forward = lambda x: model.down(model.norm(model.up(x).unflatten(-1, (-1, 12))).flatten(-2))
    return parallelize(model, None, UP, example=X)


def with_labels():
    class Model(nn.Sequential):
        def forward(self, x, labels=None):
            return self[0](x)

        def generate(self, x):
            return self(x).argmax(-1)

    return parallelize(Model(nn.Linear(12, 24)), None, {"0": Vocabulary()})


def stepped(optimizer, **how):
    model = nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 12))
    early = optimizer(model.parameters(), lr=0.1, **how)
    parallelize(model, None, {"0": Column(), "1": Row()})(X).sum().backward()
    early.step()


REFUSED = {
    "not to be mended": (lambda: parallelize(Reads(num_heads=12), None, UP | {"up": Column(12)}, example=X),
                         r"down gives something else than it did; .*; to divide Reads\.num_heads=12 by t did not help"),
    "it fails": (lambda: parallelize(Reads(fails=True), None, UP, example=[X]), r"the model \(Reads\) fails once .*shape"),
    "halves": (lambda: parallelize(Fused(12), None, styles(12) | {"gate_up": Column()}, example=random(2, 4, 7).float()),
               r"down gives .*; a layer makes 2 times what the next one takes: if .* give it Column\(parts=2\)"),
    "a gradient": (unseen, r"the gradient of norm\.weight is a part of the whole model's that nobody adds up: enter"),
    "no example": (lambda: parallelize(Counts(6), None, heads(6)), r"Counts\.num_heads=12 counts heads .*give example=, "),
    "few heads": (lambda: parallelize(nn.Sequential(nn.Linear(7, 28)), None, {"0": Column((12, 1, 1))}),
                  r"share one of them: give at most 1 ranks"),
    "sizes": (lambda: parallelize(Fused(6), None, {"gate_up": Column(parts=5)}), r"36 features of gate_up do not make"),
    "generate": (lambda: with_labels().module.generate(X), r"generate\(\) while the vocabulary is cut: each rank would choose"),
    "labels": (lambda: with_labels()(X, labels=X), r"labels= while the vocabulary is cut: .*loss\(logits, targets\)"),
    "AdamW": (partial(stepped, torch.optim.AdamW, fused=True), r"AdamW was made before 0 was cut.*: make it after parallelize"),
    "SGD": (partial(stepped, torch.optim.SGD), r"SGD was made before 0 was cut"),
}  # fmt: skip


def test_what_would_be_wrong_is_refused_on_all_ranks_with_what_to_do(shared_worlds):
    for found in shared_worlds.run(refused.said, REFUSED):
        assert {name: found[name] for name, (_, message) in REFUSED.items() if not re.search(message, found[name])} == {}


def others() -> list[bool]:
    """A model beside, one that was dropped, an example that is not wanted."""
    t, model = dist.get_world_size(), nn.Linear(12, 24)
    whole = weakref.ref(model.weight)
    kept = copy.deepcopy(model)
    cut = parallelize(nn.Sequential(model), None, {"0": Column()})
    (kept(X).sum() + cut(X).sum()).backward()
    torch.optim.SGD([*kept.parameters(), *cut.parameters()], 0.1).step()
    del model
    gc.collect()
    counts = parallelize(Counts(t), None, heads(t), example=False)
    return [whole() is None, counts.module.num_heads == 2 * t]


def test_what_is_right_is_not_refused_and_a_dropped_weight_is_gone(shared_worlds):
    assert all(map(all, shared_worlds.run(others)))


# A shard that is kept instead of the whole


def again(way: str) -> list[float]:
    """Two backward passes of one graph, one result unused, under a checkpoint, and with an input that needs no gradient."""
    t, found = dist.get_world_size(), []
    for changed in ("plain", "checkpoint", "no gradient"):
        alone = lively(nn.Sequential(nn.Tanh(), nn.Linear(5, 6 * t), nn.Linear(5, 6 * t, bias=False)))
        first, second = (ColumnParallelLinear.of(copy.deepcopy(alone[k]), How(**WAYS[way])) for k in (1, 2))
        alone.zero_grad()
        both = nn.ModuleList([first, second])
        both.forward = lambda x: column_parallel(x.tanh(), first, second)
        if changed == "checkpoint":
            checkpoint_modules(nn.ModuleList([both]), lambda module: module is both)
        x = random(2, 12, 5).requires_grad_(changed != "no gradient")
        x_own = own_part(x.detach()).requires_grad_(changed != "no gradient")
        y, (ours, _) = alone[1](x.tanh()), both(x_own)
        for k in range(1 if changed == "checkpoint" else 2):
            y.square().sum().backward(retain_graph=not k)
            ours.square().sum().backward(retain_graph=not k)
        found += [off(first.weight.grad, first.cut.own(alone[1].weight.grad))]
        found += [] if x.grad is None else [off(x_own.grad, own_part(x.grad))]
    return found


@pytest.mark.parametrize("way", ["sequence", "kept"])
def test_a_graph_may_be_used_twice_and_in_part(shared_worlds, way):
    assert max(max(found) for found in shared_worlds.run(again, way)) < 1e-12


def overwritten() -> str:
    layer, x = ColumnParallelLinear(4, 12, sequence_parallel=True), torch.ones(1, 2, 4)
    y = layer(x)
    x.add_(1)
    try:
        y.sum().backward()
    except RuntimeError as error:
        return str(error)


def test_an_input_that_was_overwritten_is_an_error(shared_world):
    assert all("changed in place" in said for said in shared_world.run(overwritten))

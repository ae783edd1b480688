"""parallel.tensor: at every degree the outputs, gradients and training of one process."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from manyranks.parallel.checkpointing import checkpoint_modules
from manyranks.parallel.tensor import (
    Column,
    ColumnParallelLinear,
    How,
    Row,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel,
    copy_in,
    gather_in,
    parallelize,
    reduce_out,
    reduce_scatter_out,
)
from manyranks.parallel.tensor.cuts import own_part
from manyranks.training import tensor_styles
from manyranks.training.config import GPTConfig
from manyranks.training.gpt import GPT, MLP, Attention, loss
from tests.conftest import matrix

SP = {"sequence_parallel": True}
WAYS = {"plain": {}, "sequence": SP, "kept": SP | {"regather": False}, "overlap": SP | {"overlap": True}}
DEGREES = pytest.mark.parametrize("shared_worlds", matrix([1, 2, 3, 4], [3]), indirect=True, scope="module")
SIZES = {"layers": 1, "hidden": 24, "heads": 12, "ffn": 36, "seq": 12}
GROUPED = {1: 3, 2: 6, 3: 3, 4: 4}  # key/value heads by degree
FEW = {1: 2, 2: 1, 3: 1, 4: 2}  # so few that several ranks have each
D = 2  # features of a head of the models below


def lively(model: nn.Module) -> nn.Module:
    """The same weights each time, in 64 bits: so large that a wrong one shows, and biases that are not zero."""
    for k, p in enumerate(model.double().parameters()):
        p.data = random(*p.shape, seed=k) / (p.shape[-1] ** 0.5 if p.ndim > 1 else 2)
    return model


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def off(ours: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    if ours is None or expected is None or ours.shape != expected.shape:
        return 0.0 if ours is expected else float("inf")
    return (ours - expected).abs().nan_to_num(float("inf")).max().item() if ours.numel() else 0.0


def gaps(tp: nn.Module, alone: nn.Module) -> list[float]:
    """Each parameter's gradient against the same part of one process's."""
    return compared(tp, *({name: p.grad for name, p in m.named_parameters()} for m in (tp.module, alone)))


def compared(tp: nn.Module, ours: dict, whole: dict) -> list[float]:
    """By names of parameters, what a rank has against its part of what one process has."""
    assert ours.keys() == whole.keys()
    return [
        off(x, tp.cuts[name].own(y) if name in tp.cuts and y is not None else y)
        for (name, x), y in zip(ours.items(), whole.values(), strict=True)
    ]


# Parts of a model


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


def heads(t: int) -> dict:
    return dict.fromkeys("qkv", Column(2 * t)) | {"out": Row(2 * t)}


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


def fused(t: int, tied: bool = False) -> dict:
    table = {"qkv": Column((2 * t, t, t)), "out": Row(2 * t), "gate_up": Column(parts=2), "down": Row()}
    return table | ({"second": Column(parts=2)} if tied else {})


class Case(NamedTuple):
    """make, table: of t; shape: of the input, whose dim 1 is the sequence; frozen: may have "x" in it."""

    make: Callable[[int], nn.Module]
    table: Callable[[int], dict]
    shape: tuple[int, ...] = (2, 12, 24)
    frozen: tuple[str, ...] = ()
    compared: bool = False


def course_s(kind: type, part: str, kv: dict | None = None, frozen: tuple[str, ...] = (), style: str = "llama") -> Case:
    def config(t: int) -> GPTConfig:
        return GPTConfig(**SIZES, style=style, kv_heads=kv and kv[t])

    return Case(lambda t: kind(config(t)), lambda t: tensor_styles.styles_of(config(t), f"layers.*.{part}"), frozen=frozen)


def chain(*shape: int, bias: bool = True, frozen: tuple[str, ...] = ()) -> Case:
    """A case of layers that no module calls together; what they give is changed in place."""
    columns, rows = partial(nn.Linear, 5, 12, bias), partial(nn.Linear, 12, 7, bias)
    table = {"0": Column(), "2": Row()}
    return Case(lambda t: nn.Sequential(columns(), nn.ReLU(inplace=True), rows()), lambda t: table, (*shape, 5), frozen)


CASES = {
    "gpt2 mlp": course_s(MLP, "mlp", style="gpt2"),
    "llama mlp": course_s(MLP, "mlp"),
    "attention": course_s(Attention, "attention", style="gpt2"),
    "attention, grouped": course_s(Attention, "attention", GROUPED),
    "attention, few heads": course_s(Attention, "attention", FEW),
    "attention, frozen": course_s(Attention, "attention", GROUPED, ("query.weight", "value.weight")),
    "chain": chain(2, 12),
    "chain of more dims": chain(2, 12, 3, bias=False),
    "chain of nothing": chain(0, 12),
    "chain, columns frozen": chain(2, 12, frozen=("0.weight",)),
    "chain, rows frozen": chain(2, 12, frozen=("2.weight", "0.bias")),
    "chain, input frozen": chain(2, 12, frozen=("x",)),
    "chain, most frozen": chain(2, 12, frozen=("x", "0.weight", "0.bias")),
    "counts": Case(Counts, heads, (2, 12, -1), compared=True),
    "fused": Case(Fused, fused, (2, 12, 7), compared=True),
    "fused, tied": Case(partial(Fused, tied=True), partial(fused, tied=True), (2, 12, 7)),
    "fused, frozen": Case(Fused, fused, (2, 12, 7), ("qkv.weight", "down.bias", "gate_up.weight"), compared=True),
}


def differences(case: Case) -> dict[str, float]:
    """By way, to one process: output, the input's gradient, each parameter's; and all weights, put together again."""
    t, learns, found = dist.get_world_size(), "x" not in case.frozen, {}
    whole = lively(case.make(t))
    for name, p in whole.named_parameters():
        p.requires_grad_(name not in case.frozen)
    alone = copy.deepcopy(whole).eval()
    x = random(*(2 * t * D if n < 0 else n for n in case.shape)).requires_grad_(learns)
    y = alone(x)
    y.add(1).backward(grad := random(*y.shape, seed=1))
    for way, how in WAYS.items():
        own = own_part if how else torch.clone
        example = x.detach() if case.compared else None
        tp = parallelize(copy.deepcopy(whole), None, case.table(t), example=example, **how).eval()
        x_own = own(x.detach()).requires_grad_(learns)
        y_own = tp(x_own)
        of_y = off(y_own, own(y))
        # Alone a shard is the whole, and what comes back may be x's own memory.
        (y_own.add_(1) if t > 1 else y_own.add(1)).backward(own(grad))
        tp.finish()
        state = tp.full_state_dict()
        assert state.keys() == whole.state_dict().keys()
        weights = [off(state[name], p.detach()) for name, p in whole.named_parameters()]
        found[way] = max(of_y, off(x_own.grad, own(x.grad) if learns else None), *gaps(tp, alone), *weights)
    return found


def blocks() -> dict[str, float]:
    return {f"{name} {way}": gap for name, case in CASES.items() for way, gap in differences(case).items()}


@DEGREES
def test_parts_have_the_output_gradients_and_weights_of_one_process(shared_worlds):
    for found in shared_worlds.run(blocks):
        assert {name: gap for name, gap in found.items() if not gap < 1e-12} == {}


def linears() -> list[float]:
    """Layers made by a seed, from a whole layer's random numbers; and single vectors as input, scattered by no rank."""
    t, found = dist.get_world_size(), []
    linear = (ColumnParallelLinear, nn.Linear, (7, 5 * t)), (RowParallelLinear, nn.Linear, (5 * t, 7))
    for made, kind, sizes in (*linear, (VocabParallelEmbedding, nn.Embedding, (10, 4))):
        layers, states = [], []
        for one in (made, kind):
            torch.manual_seed(6)
            layers.append(one(*sizes).double())
            states.append(torch.get_rng_state())
        ours, whole = layers
        assert torch.equal(*states)
        found.append(off(ours.weight, ours.cut.own(whole.weight)))
        for shape in ((), (5,)) if kind is nn.Linear else ():
            x, part = random(*shape, sizes[0]), slice(*ours.cut.span)
            y, y_own = whole(x), ours(x if ours.cut.dim == 0 else x[..., part])
            found.append(off(y_own, y[..., part] if ours.cut.dim == 0 else y))
    return found


@DEGREES
def test_layers_made_by_a_seed_are_the_cut_of_those_that_one_process_makes(shared_worlds):
    for found in shared_worlds.run(linears):
        assert len(found) == 7
        assert max(found) < 1e-12


def by_hand() -> list[float]:
    """Megatron's f and g written out, on a plain chain, against one process."""
    t, r, found = dist.get_world_size(), dist.get_rank(), []
    rows = slice(r * 12 // t, (r + 1) * 12 // t)
    for enter, leave, own in ((copy_in, reduce_out, torch.clone), (gather_in, reduce_scatter_out, own_part)):
        alone = lively(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6, bias=False)))
        x, grad = random(2, 12, 6).requires_grad_(), random(2, 12, 6, seed=1)
        (y := alone(x)).backward(grad)
        expected = alone[0].weight.grad[rows].clone()
        alone.zero_grad()
        x_own = own(x.detach()).requires_grad_()
        middle = alone[1](enter(x_own) @ alone[0].weight[rows].T + alone[0].bias[rows])
        (y_own := leave(middle @ alone[2].weight[:, rows].T)).backward(own(grad))
        found += [off(y_own, own(y)), off(x_own.grad, own(x.grad)), off(alone[0].weight.grad[rows], expected)]
    return found


@DEGREES
def test_the_mappings_alone_make_a_parallel_chain(shared_worlds):
    assert max(max(found) for found in shared_worlds.run(by_hand)) < 1e-12


# A shard that is kept instead of the whole


def again(way: str) -> list[float]:
    """Two backward passes of one graph, one result unused, under a checkpoint, and with an input that needs no gradient."""
    t, found = dist.get_world_size(), []
    for changed in ("plain", "checkpoint", "no gradient"):
        alone = lively(nn.Sequential(nn.Tanh(), nn.Linear(5, 6 * t), nn.Linear(5, 6 * t, bias=False)))
        first, second = (ColumnParallelLinear.of(copy.deepcopy(alone[k]), How(**WAYS[way])) for k in (1, 2))
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
        found.append(off(first.weight.grad, first.cut.own(alone[1].weight.grad)))
        found += [] if x.grad is None else [off(x_own.grad, own_part(x.grad))]
    return found


@pytest.mark.parametrize("way", ["sequence", "kept", "overlap"])
def test_a_graph_may_be_used_twice_and_in_part(shared_worlds, way):
    assert max(max(found) for found in shared_worlds.run(again, way)) < 1e-12


# The whole GPT


FROZEN = ("embedding.", "layers.0.attention_norm", "layers.0.attention.output.bias", "layers.1.mlp.up.weight")
KINDS = {
    "gpt2": {"style": "gpt2", "vocab": 13},
    "llama": {"style": "llama", "vocab": 13, "tied": False},
    "a head for several ranks": {"style": "llama", "vocab": 17, "kv_heads": 1},
    "fewer tokens than ranks": {"style": "gpt2", "vocab": 2, "tied": False},
    "frozen": {"style": "gpt2", "vocab": 13, "tied": False, "layers": 2},
}
OF_KIND = {"gpt2": WAYS}  # of the others plain ones and with sequence parallelism, for each layer's are above
PLACES = ("gpt2", "a head for several ranks")  # are told the places of their tokens, by name as a caller may


def stepped(model: nn.Module, criterion: Callable, batches: torch.Tensor, places: dict, finish: Callable) -> tuple:
    """A step of two micro-batches, clipped: the losses and the norm, the gradients, the weights."""
    losses, optimizer = [], torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, eps=1e-3)
    for k, tokens in enumerate(batches):
        losses.append(criterion(model(tokens[:, :-1], **places), tokens[:, 1:]) / 2)
        losses[-1].backward()
        finish(k)
    grads = {name: p.grad if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    clip = getattr(model, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_, model.parameters()))
    losses.append(clip(0.6))
    assert losses[-1] > 0.6
    optimizer.step()
    return losses, grads, {name: p.detach() for name, p in model.named_parameters()}


def trained(kind: str) -> dict[str, float]:
    """Distances to one process, by way. In a frozen model the first column-parallel layer's input needs no gradient."""
    config, found = GPTConfig(**SIZES | KINDS[kind]), {}
    whole = lively(GPT(config))
    for name, p in whole.named_parameters():
        p.requires_grad_(not (kind == "frozen" and name.startswith(FROZEN)))
    batches = torch.randint(config.vocab, (2, 3, 13), generator=torch.Generator().manual_seed(0))
    places = {"positions_S": torch.arange(12).flip(0)} if kind in PLACES else {}
    expected = stepped(copy.deepcopy(whole), loss, batches, places, lambda k: None)
    for way in OF_KIND.get(kind, ("plain", "sequence")):
        tp = parallelize(copy.deepcopy(whole), None, tensor_styles.styles(config), **WAYS[way])

        def finish(k: int, tp: nn.Module = tp) -> None:
            with tp.no_sync() if k == 0 else nullcontext():
                tp.finish()

        losses, *named = stepped(tp, tp.loss, batches, places, finish)
        gap = [off(*pair) for pair in zip(losses, expected[0], strict=True)]
        for ours, theirs in zip(named, expected[1:], strict=True):
            gap += compared(tp, {name.removeprefix("module."): value for name, value in ours.items()}, theirs)
        found[way] = max(gap)
    return found


def gpts() -> dict[str, float]:
    return {f"{kind} {way}": gap for kind in KINDS for way, gap in trained(kind).items()}


@DEGREES
def test_the_whole_gpt_trains_as_in_one_process(shared_worlds):
    for found in shared_worlds.run(gpts):
        assert {kind: gap for kind, gap in found.items() if not gap < 1e-12} == {}

"""Exercise 06: f and g, so that no task needs another's answer; what one process computes with; the ranks' groups."""

import gc
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyranks.given.numbers import EXACT, normal, seed_of, whole
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.watch import Watch, gradients
from manyranks.parallel.recomputation import nodes_of

COLLECTIVES, CONTIGUOUS = "what collectives are given", "contiguous tensors"
WEIGHTS = "bytes of weights"
GRAPH = (
    "a torch.autograd.Function's result comes from apply; detach, no_grad, .data and a new tensor that something was "
    "copied into lose the graph"
)
_INPUTS = {"allgather": 1, "allgather_base": 1, "reduce_scatter_base": 1, "alltoall_base": 1}  # their place among arguments


def f(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Returns the tensors as they are; one all-reduce for the gradients of those that need one."""
    return _apply("f", tensors, group)


def g(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Returns their sums over the ranks, by one all-reduce; gradients as they are."""
    return _apply("g", tensors, group)


def _apply(name: str, tensors, group) -> list[Tensor]:
    if not isinstance(tensors, list | tuple) or not all(isinstance(one, Tensor) for one in tensors):
        said = type(tensors).__name__
        raise Stopped(f"{name} was called with a {said}", f"{name} takes a list of tensors: [y] = {name}([x], group)")
    return list(_Sum.apply(group, name == "g", *tensors))


class _Sum(torch.autograd.Function):
    """Sums over the ranks, in forward or in backward."""

    @staticmethod
    def forward(ctx, group, there, *tensors):
        ctx.group, ctx.there = group, there
        return tuple(_summed(tensors, group) if there else [one.view_as(one) for one in tensors])

    @staticmethod
    def backward(ctx, *grads):
        if ctx.there:
            return None, None, *grads
        needed = ctx.needs_input_grad[2:]
        sums = iter(_summed([grad for grad, need in zip(grads, needed, strict=True) if need], ctx.group))
        return None, None, *(next(sums) if need else None for need in needed)


def _summed(tensors: Sequence[Tensor], group) -> list[Tensor]:
    row = torch.cat([one.flatten() for one in tensors])
    dist.all_reduce(row, group=group)
    parts = row.split([one.numel() for one in tensors])
    return [part.view(one.shape) for part, one in zip(parts, tensors, strict=True)]


class WholeMLP(nn.Module):
    """The first U rows of gate_up are the gate's, the other U are up's."""

    def __init__(self, hidden: int, units: int):
        super().__init__()
        self.gate_up, self.down = nn.Linear(hidden, 2 * units, **EXACT), nn.Linear(units, hidden, **EXACT)

    def forward(self, x_SBH: Tensor) -> Tensor:
        gate_SBU, up_SBU = self.gate_up(x_SBH).chunk(2, -1)
        return x_SBH + self.down(F.silu(gate_SBU) * up_SBU)


class WholeAttention(nn.Module):
    """Holds a decoder's attention to a memory."""

    def __init__(self, hidden: int, size: int, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        exact = {"bias": False, **EXACT}
        self.query, self.output = nn.Linear(hidden, heads * size, **exact), nn.Linear(heads * size, hidden, **exact)
        self.key, self.value = (nn.Linear(hidden, kv_heads * size, **exact) for _ in range(2))


class WholeBlock(nn.Module):
    """Holds a block with norm, MLP, dropout and residual connection."""

    def __init__(self, hidden: int, units: int):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(hidden, **EXACT), nn.Linear(hidden, units, **EXACT)
        self.down = nn.Linear(units, hidden, **EXACT)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        nn.init.uniform_(self.norm.bias, -1, 1)


def made(kind: type, sizes: tuple[int, ...], *words) -> nn.Module:
    """Makes one of these classes, the same for these words."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed_of(*words))
        return kind(*sizes)


# Where a rank stands, and what it sees of an answer


class Case(NamedTuple):
    """Groups of t ranks; note: as reports name it; near: whether ranks of a group are neighbors. Each task has its own fields.

    unused: whether rank 1 does not use the second result; alone: whether there is one tensor; heads: of queries, and of keys
    and values; offset: of logits; drops: the p of dropout; strided: whether x and the result's gradient are not
    contiguous; twice: whether two calls come before their backwards, for the judge.
    """

    t: int
    note: str
    unused: bool = False
    alone: bool = False
    heads: tuple[int, int] = (0, 0)
    offset: float = 0.0
    drops: float = 0.0
    strided: bool = False
    near: bool = False
    twice: bool = False

    def groups(self, n: int) -> list[range]:
        """The ranks of each group."""
        many = n // self.t
        return [range(k * self.t, (k + 1) * self.t) if self.near else range(k, n, many) for k in range(many)]

    def at(self, rank: int, n: int) -> tuple[int, int]:
        """The number of a rank's group, and its place there."""
        return next((number, ranks.index(rank)) for number, ranks in enumerate(self.groups(n)) if rank in ranks)


def of_neighbors(cases: Callable[[int], tuple[Case, ...]], n: int) -> list[Case]:
    """Returns the cases in which there are several groups, once more with groups of neighbors; and dropout in pairs."""
    found = [case._replace(near=True, note=f"{case.note}, of neighbors") for case in cases(n) if case.t < n]
    t, pairs = in_pairs(n)
    return found + [case._replace(t=t, note=f"{pairs}{case.note}") for case in cases(n) if case.drops and t < n]


def groups_of(case: Case, share: int = 0) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Returns this rank's group, None for all ranks, and its every `share`-th rank, with this one. All ranks make all."""
    n, rank, found = dist.get_world_size(), dist.get_rank(), {}
    for ranks in map(list, case.groups(n)):
        group = dist.new_group(ranks) if case.t < n else None
        found |= dict.fromkeys(ranks, (group, None))
        for k in range(share):
            found |= dict.fromkeys(ranks[k::share], (group, dist.new_group(ranks[k::share])))
    return found[rank]


def in_pairs(n: int) -> tuple[int, str]:
    """The size of groups that are not the world where there can be some, and what reports say of them."""
    return (2, "in two pairs, ") if n == 4 else (n, "")


def untouched(tensors: list[Tensor], before: list[Tensor]) -> str:
    return "as it was" if all(map(torch.equal, tensors, before)) else "changed"


class Made(TorchDispatchMode):
    """Notes what is made inside, and what collectives are given there: Gloo copies what is not contiguous in silence.

    largest: bytes of the largest tensor that an operator makes; all that a gather fills counts as one; collectives: in words.
    """

    def __init__(self):
        super().__init__()
        self.largest, self.collectives = 0, CONTIGUOUS

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {one.untyped_storage()._cdata for one in _leaves((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        made = [one.untyped_storage() for one in _leaves(result)]
        self.largest = max([self.largest, *(one.nbytes() for one in made if one._cdata not in before)])
        space, _, name = func._schema.name.partition("::")
        name = name.strip("_")
        if space == "c10d" and name == "allgather":
            self.largest = max(self.largest, sum(one.nbytes for one in _leaves(args[0])))
        if space == "c10d" and not all(one.is_contiguous() for one in _leaves(args[_INPUTS.get(name, len(args)) :][:1])):
            self.collectives = f"a tensor for {'all_gather' if 'gather' in name else 'reduce_scatter'} that is not contiguous"
        return result


def _leaves(values_) -> list[Tensor]:
    return [one for one in tree_leaves(values_) if isinstance(one, Tensor) and one.layout == torch.strided]


# What a task is asked: cases of n ranks, and what a rank gets in one

_SHAPES = ((5, 2, 3), (7,), (4, 2, 3))  # the second needs no gradient, and has a drawn place
_S, _T, B, _H, _D, UNITS = 5, 7, 2, 24, 4, 7  # units a rank
_HEADS = {2: ((2, 8, 4), (2, 4, 1)), 3: ((3, 12, 6), (3, 9, 3), (3, 6, 1)), 4: ((4, 8, 2), (2, 8, 4), (2, 4, 1))}
POSITIONS, WORDS = 9, 61  # of logits
SHARD, FEATURES, ROWS = 3, 64, 2  # positions a rank, numbers a position, units a rank: few, so that positions show


def cases_of_both(summing: bool, n: int) -> tuple[Case, ...]:
    t, pairs = in_pairs(n)
    unused = "" if summing else ", one of them not used on one rank"
    second = (Case(t, f"{pairs}three tensors{unused}", unused=not summing),) if t < n or not summing else ()
    return Case(n, "three tensors"), *second, Case(n, "one tensor", alone=True)


def of_both(summing: bool, case: Case, rank: int, n: int, seed: int) -> tuple[Case, list[Tensor], list[Tensor]]:
    """Makes tensors, and the gradients of the results that need one if the rank uses them; one of each isn't contiguous.

    Ranks that sum have different tensors and the same gradients; otherwise it's the other way round.
    """
    number, r = case.at(rank, n)
    own = [(seed, number, what, r if what == ("tensor" if summing else "up") else "all") for what in ("tensor", "up")]
    case = case._replace(twice=seed > 0)
    if case.alone:
        return case, [normal(_SHAPES[2], *own[0])], [normal(_SHAPES[2], *own[1])]
    tensors, ups = ([_turned(_SHAPES[0], *words), normal(_SHAPES[2], *words, i)] for words, i in zip(own, (2, 1), strict=True))
    tensors.insert(seed_of(seed, case) % 3 if seed else 1, normal(_SHAPES[1], *own[0], 1))  # which needs no gradient
    return case, tensors, ups[: 1 if case.unused and r == 1 else 2]


def _turned(shape: tuple[int, ...], *words) -> Tensor:
    """Makes a tensor whose last dimension comes first in memory."""
    return normal(shape[::-1], *words).permute(2, 1, 0)


def cases_of_mlp(n: int) -> tuple[Case, ...]:
    sizes = ((n, ""), in_pairs(n))
    return tuple(Case(t, f"{pairs}{UNITS * t} units") for t, pairs in dict.fromkeys(sizes))


def of_mlp(case: Case, rank: int, n: int, seed: int) -> tuple[Case, list[WholeMLP], Tensor, Tensor]:
    """Makes a whole MLP with wrong numbers in other ranks' units, so that no rank can compute their share."""
    number, r = case.at(rank, n)
    x, up = (normal((_S, B, _H), seed, number, what) for what in ("x", "up"))
    model = made(WholeMLP, (_H, UNITS * case.t), seed, number)
    others = torch.arange(UNITS * case.t) % case.t != r
    _change([model.gate_up.weight, model.gate_up.bias], others.repeat(2), seed, rank)
    _change([model.down.weight.T], others, seed, rank, "down")
    return case, [model], x, up


def _change(weights: list[Tensor], rows: Tensor, *words) -> None:
    """Writes other numbers into these rows."""
    for i, weight in enumerate(weights):
        weight.data[rows] = normal(weight.shape, "others", *words, i)[rows]


def cases_of_attention(n: int) -> tuple[Case, ...]:
    """Returns cases with enough key/value heads, and with some that ranks share; of 4 ranks, these also in two pairs."""
    pairs = {t: "in two pairs, " if t < n else "" for t, _, _ in _HEADS[n]}
    return tuple(Case(t, f"{pairs[t]}{q} heads, {kv} of keys and values", heads=(q, kv)) for t, q, kv in _HEADS[n])


def of_attention(case: Case, rank: int, n: int, seed: int) -> tuple[Case, list[WholeAttention], Tensor, Tensor, Tensor]:
    """Makes a whole attention with wrong numbers in the heads that this rank doesn't use."""
    number, r = case.at(rank, n)
    x, memory, up = (normal((k, B, _H), seed, number, i) for i, k in enumerate((_S, _T, _S)))
    model = made(WholeAttention, (_H, _D, *case.heads), seed, number)
    others = torch.arange(case.heads[0]) % case.t != r
    unused = torch.arange(case.heads[1]) % case.t != r % case.heads[1]  # of keys and values: with fewer than t, all but one
    _change([model.query.weight, model.output.weight.T], others.repeat_interleave(_D), seed, rank)
    _change([model.key.weight, model.value.weight], unused.repeat_interleave(_D), seed, rank, "keys")
    return case, [model], x, memory, up


def cases_of_loss(n: int) -> tuple[Case, ...]:
    """Ordinary logits; and such as overflow, of 4 ranks in two pairs."""
    t, pairs = in_pairs(n)
    return Case(n, f"V = {WORDS}"), Case(t, f"{pairs}logits near ±900", offset=900.0)


def of_loss(case: Case, rank: int, n: int, seed: int) -> tuple[Case, Tensor, Tensor, float]:
    """A rank's logits; all targets, and the z-loss's factor."""
    number, r = case.at(rank, n)
    targets = whole(WORDS, (POSITIONS, B), seed, number)
    targets[-2:, 0] = targets[0, 1] = -100
    targets[0, 0] = 0  # a token, too
    targets[1:3, 1] = torch.tensor([WORDS - 1, WORDS - 2])  # the last ones of ranks, also of those that have one more
    whose_SB1 = torch.arange(POSITIONS * B).view(POSITIONS, B, 1) % case.t  # the rank with the largest logits
    shift_SB1, z = case.offset * (2.0 * (whose_SB1 == r) - 1), (0.05 + seed_of(seed) % 7 / 10) * (1 + (case.offset > 0))
    if seed:  # for the judge no number is near the largest logits of all positions
        shift_SB1 = shift_SB1 + case.offset * (1 - 2 * (torch.arange(POSITIONS).view(-1, 1, 1) % 2))
    mine = len(range(r, WORDS, case.t))
    return case._replace(twice=seed > 0), normal((POSITIONS, B, mine), seed, "logits", rank) * 3 + shift_SB1, targets, z


def cases_of_block(n: int) -> tuple[Case, ...]:
    """Returns cases without dropout on all ranks, with it, with tensors that are not contiguous; of 4, in two pairs."""
    strided = Case(n, "p = 0, x and the result's gradient not contiguous", strided=True)
    pairs = (Case(2, "in two pairs, p = 0"),) if n == 4 else ()
    return Case(n, "p = 0"), Case(n, f"p = {(p := n / 8)}", drops=p), *pairs, strided


def of_block(case: Case, rank: int, n: int, seed: int) -> tuple[Case, list[WholeBlock], Tensor, Tensor]:
    """The block, once more where a second one drops nothing; this rank's positions, and the result's gradient."""
    number, r = case.at(rank, n)
    wholes = [made(WholeBlock, (FEATURES, ROWS * case.t), seed, number) for _ in range(2 if case.drops else 1)]
    for one in wholes:  # whose other units are other numbers
        others = torch.arange(ROWS * case.t) % case.t != r
        _change([one.up.weight, one.up.bias, one.down.weight.T], others, seed, rank)
    return case._replace(twice=seed > 0), wholes, *(_positions(case.strided, seed, rank, what) for what in ("x", "up"))


def _positions(strided: bool, *words) -> Tensor:
    x_sBH = normal((SHARD, B, FEATURES), *words)
    return x_sBH.transpose(0, 1).contiguous().transpose(0, 1) if strided else x_sBH


# What a script does with a module


def module_of(kind: Callable, whole: list[nn.Module], watch: Watch, names: tuple[str, ...], *others) -> tuple:
    """Returns the learner's module, its parameters of these names, and what to report. whole: nobody has it afterwards."""
    watch.mark("__init__")
    watch.weigh(kind)
    size_of_whole = sum(p.nbytes for p in whole[0].parameters())
    module = kind(whole.pop(), *others)
    gc.collect()  # what stands in a cycle is gone only then
    watch.weigh(kind, module)
    if not isinstance(module, nn.Module):
        raise Stopped(f"the class made {kind_of(module)}", "it is a class derived from nn.Module, given above")
    own = dict(module.named_parameters())
    if missing := [name for name in names if name not in own]:
        has = ", ".join(own) or "none"
        raise Stopped(f"it has no parameter {missing[0]}; it has {has}", f"its parameters are {', '.join(names)}")
    if more := [name for name in own if name not in names]:
        raise Stopped(f"it has a parameter {more[0]} more", f"its parameters are {', '.join(names)}, and no others")
    found = {f"the parameter {name}": own[name].detach().clone() for name in names}
    return module, {name: own[name] for name in names}, found | {WEIGHTS: watch.held[-1] - watch.held[-2] + size_of_whole}


def result_of(y, like: Tensor) -> Tensor:
    """Returns the learner's result. Raises Stopped where it has another shape, or backward cannot come to it."""
    if not isinstance(y, Tensor):
        raise Stopped(f"what forward returned is {kind_of(y)}", "it returns a tensor")
    if y.shape != like.shape:
        raise Stopped(
            f"forward returned {list(y.shape)}; right is {list(like.shape)}",
            "every rank returns the result in the shape that the text says, whole or its shard",
        )
    if not y.requires_grad:
        raise Stopped("what forward returned has no graph: backward cannot begin", GRAPH)
    return y


def through(
    module: nn.Module,
    own: dict[str, Tensor],
    inputs: dict[str, Tensor],
    watch: Watch,
    up: Tensor,
    others: tuple = (),
    weighs: bool = False,
) -> dict:
    """Runs forward and backward; returns what to report. others: arguments; weighs: what else has something after forward."""
    before = [one.detach().clone() for one in inputs.values()]
    watch.mark("forward")
    y = result_of(module(*inputs.values(), *others), next(iter(inputs.values())))
    if weighs:
        watch.weigh(*weighs, module, *nodes_of([y]))
    watch.mark("backward")
    y.backward(up)
    given = {" and ".join(inputs): untouched([one.detach() for one in inputs.values()], before)}
    return given | {"the result": y.detach().clone()} | gradients(inputs | own)


def _seeds(t: int) -> tuple[int, ...]:
    """Returns seeds: small ones, where rules like r · t + seed collide, some far from them, and the first one again."""
    far = (7 + 2**k for k in range(8, 20, 2))  # a power of two apart, as r << k is
    return 7, 8, *range(max(7 - t, 3), 7), 0, 104, 107, 1007, 10_007, 100_007, *far, 7


def dropped_by(module: nn.Module, plain: nn.Module, x: Tensor, up: Tensor, watch: Watch, t: int, p: float) -> dict:
    """Returns, for `of_dropout`, masks, gradients, and what they'd be; `plain` has the same weights and drops nothing."""
    seeds, others = _seeds(t), torch.get_rng_state()
    watch.mark("forward")
    result = result_of(module(x, seeds[0]), x)
    watch.mark("backward")
    result.backward(up)
    watch.mark("over")
    got = gradients({"x": x} | dict(module.named_parameters()))
    x.grad = None
    without = plain(x, seeds[0])
    masks = [(result - x).detach(), *((module(x, seed) - x).detach() for seed in seeds[1:])]
    masks = [mask / (without - x).detach() * (1 - p) for mask in masks]
    dropped = up * masks[0].round() / (1 - p)
    without.backward(dropped)
    must = gradients({"x": x} | dict(plain.named_parameters()))
    must["the gradient of x"] += up - dropped
    found = {"random numbers of others": untouched([torch.get_rng_state()], [others]), "dropout": [masks, got, must]}
    return found | {"the result without dropout": without.detach().clone()}


def of_dropout(case, given, found: dict) -> dict:
    """Says, in the process that judges, what a block's dropout makes of its result, and of gradients."""
    if "dropout" not in found:
        return found
    (masks, got, must), p = found["dropout"], case.drops
    clear = all(torch.allclose(mask, mask.round().clamp(0, 1), atol=1e-6) for mask in masks)
    what = "is dropped, or divided by 1 − p" if clear else "is neither dropped nor divided by 1 − p"
    fits = {f"{name}, with dropout": "fits" if torch.allclose(got[name], must[name]) else "does not fit" for name in must}
    dropped = [float((mask.abs() < 1e-6).double().mean()) for mask in masks]
    names = [hashlib.sha256(mask.round().to(torch.int8).numpy().tobytes()).hexdigest()[:12] if clear else "" for mask in masks]
    seen = {"masks": [*zip(_seeds(case.t), names, dropped, strict=True)], "masks' deviations": _deviations(masks[:-1], p)}
    return {name: one for name, one in found.items() if name != "dropout"} | {"each element of the sum": what} | fits | seen


def _deviations(masks: list[Tensor], p: float) -> list[float]:
    """Returns how far the dropped elements' number, and the spread of sums along each dimension, are from chance, in σ."""
    apart_MsBH = p - 1 + torch.stack(masks).round()
    found = [float(apart_MsBH.sum() / (p * (1 - p) * apart_MsBH.numel()) ** 0.5)]
    for dim in range(1, 4):
        spread = apart_MsBH.mean(dim).square().mean() * apart_MsBH.shape[dim] / (p * (1 - p))  # 1 by chance
        found.append(float((spread - 1) * (apart_MsBH.numel() / apart_MsBH.shape[dim] / 2) ** 0.5))
    return found

"""Checks of exercise 06_tensor: f and g, an MLP, attention and a loss cut over ranks, and sequence parallelism.

Ranks are in a group that is the world, or in two pairs: 0 and 2, 1 and 3. All numbers are float64.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.given import tensor as given
from manyranks.given.numbers import normal, seed_of, whole
from manyranks.given.tensor import Case
from manyranks.grade import tensor_looks as looks
from manyranks.grade.check import Task
from manyranks.grade.judges import at_most, by, values
from manyranks.grade.learner import NOTHING_GIVEN, arguments
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.prints import size
from manyranks.measure.watch import Watch, gradient, gradients
from manyranks.parallel.recomputation import nodes_of

_VIEW = f"{looks.COPY}; flatten gives a view where a tensor is contiguous, torch.cat a copy"
_LISTS = (r"\bnot list\b|'list' (and|object)|and 'list'|returned is a list", "f and g return a list: [y] = f([x], group)")


def _task(call: str, points: float, run: Callable, judge: tuple, cases: Callable, advice=(), unexplained="", **more) -> Task:
    more = {"ready": looks.READY, "unexplained": unexplained, **more}
    return Task("06_tensor", call, points, run, judge, cases, part=True, advice=(*advice, *looks.ADVICE), **more)


# Task 1

_SHAPES = ((5, 2, 3), (4, 2, 3), (7,))  # the last needs no gradient
_LIST = "it returns a list with as many tensors, each in the shape of the one that was given"
_USED = "a result that a rank does not use has a gradient of zeros there: it counts, and is sent like any other"


def _of_both(summing: bool, case: Case, rank: int, n: int, seed: int) -> tuple[Case, list[Tensor], list[Tensor]]:
    """Tensors, and the gradients of the results that the rank uses, of which one is not contiguous.

    Who sums has tensors of its own, and the same gradients; else it is the other way round.
    """
    number, r = case.at(rank, n)
    own = [(seed, number, what, r if what == ("tensor" if summing else "up") else "all") for what in ("tensor", "up")]
    shapes = _SHAPES[1:2] if case.alone else _SHAPES
    tensors = [normal(shape, *own[0], i) for i, shape in enumerate(shapes)]
    if case.alone:
        return case, tensors, [normal(_SHAPES[1], *own[1])]
    ups = [normal(_SHAPES[0][::-1], *own[1]).permute(2, 1, 0), normal(_SHAPES[1], *own[1], 1)]
    return case, tensors, ups[: 1 if case.unused and r == 1 else 2]


def _both(own: tuple[Case, list[Tensor], list[Tensor]], function: Callable, watch: Watch) -> dict:
    case, leaves, ups = own
    (group, _), leaves = given.groups_of(case), [leaf.requires_grad_(leaf.dim() > 1) for leaf in leaves]
    tensors = [torch.tanh(leaf) for leaf in leaves]
    before, given_ups = [one.detach().clone() for one in tensors], [one.clone() for one in ups]
    watch.mark("forward")
    results = _listed(function(list(tensors), group), tensors)
    found = {f"result {i}": y.detach().clone() for i, y in enumerate(results)}
    found = {"each tensor that was given": given.untouched(tensors, before)} | found
    watch.mark("backward")
    if lacking := [i for i in range(len(ups)) if not results[i].requires_grad]:
        raise Stopped(f"result {lacking[0]} has no graph", "the results have to be those of a torch.autograd.Function's apply")
    torch.autograd.backward(results[: len(ups)], ups)
    found |= {f"the gradient of tensor {i}": gradient(leaf) for i, leaf in enumerate(leaves) if leaf.requires_grad}
    return {"the gradient that backward was given": given.untouched(ups, given_ups)} | found


def _listed(results, tensors: list[Tensor]) -> list[Tensor]:
    if not isinstance(results, list | tuple) or not all(isinstance(y, Tensor) for y in results):
        lists = isinstance(results, list | tuple) and any(isinstance(y, list | tuple) for y in results)
        one_by_one = "apply takes tensors one by one: apply(group, *tensors); " * lists
        raise Stopped(f"it returned {kind_of(results)}" + " with lists in it" * lists, one_by_one + _LIST)
    if [y.shape for y in results] != [x.shape for x in tensors]:
        raise Stopped(f"it returned tensors of {[list(y.shape) for y in results]}", _LIST)
    return list(results)


def _cases_of_both(summing: bool, n: int) -> tuple[Case, ...]:
    t, pairs = given.in_pairs(n)
    unused = ", one of them not used on one rank" * (not summing)
    second = (Case(t, f"{pairs}three tensors{unused}", unused=not summing),) if t < n or not summing else ()
    return Case(n, "three tensors"), *second, Case(n, "one tensor", alone=True)


_ONE_CALL = looks.traffic(0.5, "makes one all-reduce for all tensors, in its direction")
_JUDGED_BOTH = (values(0.5, "results and gradients are right"), _ONE_CALL)
_ADVICE_OF_BOTH = (
    (r"modified by an inplace operation|a leaf Variable that requires grad", _VIEW),
    (r"'NoneType' object has no attribute|got NoneType|expected Tensor as element", _USED),
)
_CUT = _ADVICE_OF_BOTH, "cut the row in the order in which it was joined, and give each part its tensor's shape"
_F, _G = ((_both, _JUDGED_BOTH, partial(_cases_of_both, summing), *_CUT) for summing in (False, True))
copy_in = _task("copy_in(tensors, group)", 2, *_F, ready=NOTHING_GIVEN, make=partial(_of_both, False))
reduce_out = _task("reduce_out(tensors, group)", 2, *_G, ready=NOTHING_GIVEN, make=partial(_of_both, True))

# Tasks 2 and 3

_VALUES = "shards, results and gradients are right"
_NAMES = "^(?!bytes|mask)"  # of results that are values
_S, _T, _B, _H, _D, _UNITS = 5, 7, 2, 24, 4, 7  # units a rank
_OF_MLP = ("gate.weight", "gate.bias", "up.weight", "up.bias", "down.weight", "down.bias")
_OF_ATTENTION = ("query.weight", "key.weight", "value.weight", "output.weight")


def _of_mlp(case: Case, rank: int, n: int, seed: int) -> tuple[Case, list[given.WholeMLP], Tensor, Tensor]:
    number, _ = case.at(rank, n)
    x, up = (normal((_S, _B, _H), seed, number, what) for what in ("x", "up"))
    return case, [given.made(given.WholeMLP, (_H, _UNITS * case.t), seed, number)], x, up


def _mlp(own: tuple[Case, list[given.WholeMLP], Tensor, Tensor], kind: Callable, watch: Watch) -> dict:
    case, wholes, x, up = own
    module, parameters, found = looks.module_of(kind, wholes, watch, _OF_MLP, given.f, given.g, given.groups_of(case)[0])
    return found | looks.through(module, parameters, {"x": x.requires_grad_()}, watch, up)


def _of_attention(case: Case, rank: int, n: int, seed: int) -> tuple[Case, list[given.WholeAttention], Tensor, Tensor, Tensor]:
    number, _ = case.at(rank, n)
    x, memory, up = (normal((k, _B, _H), seed, number, i) for i, k in enumerate((_S, _T, _S)))
    return case, [given.made(given.WholeAttention, (_H, _D, *case.heads), seed, number)], x, memory, up


def _attention(own: tuple[Case, list[given.WholeAttention], Tensor, Tensor, Tensor], kind: Callable, watch: Watch) -> dict:
    case, wholes, x, memory, up = own
    gets = given.f, given.g, *given.groups_of(case, share=min(case.heads[1], case.t))
    module, parameters, found = looks.module_of(kind, wholes, watch, _OF_ATTENTION, *gets)
    return found | looks.through(module, parameters, {"x": x.requires_grad_(), "memory": memory.requires_grad_()}, watch, up)


def _cases_of_mlp(n: int) -> tuple[Case, ...]:
    sizes = ((n, ""), given.in_pairs(n))
    return tuple(Case(t, f"{pairs}{_UNITS * t} units") for t, pairs in dict.fromkeys(sizes))


_HEADS = {2: ((2, 8, 4), (2, 4, 1)), 3: ((3, 12, 6), (3, 6, 1)), 4: ((4, 8, 2), (2, 8, 4), (2, 4, 1))}


def _cases_of_attention(n: int) -> tuple[Case, ...]:
    """With enough key/value heads, and with some that ranks share; of 4 ranks, these also in two pairs."""
    pairs = {t: "in two pairs, " * (t < n) for t, _, _ in _HEADS[n]}
    return tuple(Case(t, f"{pairs[t]}{q} heads, {kv} of keys and values", heads=(q, kv)) for t, q, kv in _HEADS[n])


_DIMS = (
    r"mat1 and mat2 shapes|must match the size of tensor",
    "a unit is a row of gate and of up, and a column of down: cut these along dim 0, and down along dim 1",
)
_HEAD_DIMS = (
    r"enable_gqa|must match the size of tensor|mat1 and mat2 shapes|is invalid for input of size",
    "a head is D rows of query, key and value, and D columns of output. Rank r has the key/value heads of its query heads: "
    "r, r + t, … where there are t or more, else head r % kv_heads alone",
)
_NO_HEADS = (r"ZeroDivisionError", "this rank has no key/value head: r % kv_heads")
_F_G = "f in front of the units, g behind the product with down, and then, once, its bias and x itself"
_F_G_HEADS = (
    "f in front, for x, memory and shared weights; attend on the rank's heads as on the whole; g behind output, which has the "
    "columns of the rank's query heads"
)
_ONE_EACH = looks.traffic(0.35, "makes one all-reduce forward and one backward")
_ONE_A_GROUP = looks.traffic(0.3, "makes one all-reduce a group, for x and memory, and for shared heads")
_OF_UNITS = (values(0.5, _VALUES, _NAMES), looks.keeps(0.15), _ONE_EACH), _cases_of_mlp, (_LISTS, _DIMS), _F_G
_OF_HEADS = (values(0.6, _VALUES, _NAMES), looks.keeps(0.1), _ONE_A_GROUP), _cases_of_attention
mlp = _task("MLP(whole, f, g, group)", 5, _mlp, *_OF_UNITS, make=_of_mlp)
_ADVICE_OF_HEADS = (_LISTS, _NO_HEADS, _HEAD_DIMS)
attention = _task(
    "Attention(whole, f, g, group, sharers)", 5, _attention, *_OF_HEADS, _ADVICE_OF_HEADS, _F_G_HEADS, make=_of_attention
)

# Task 4

_POSITIONS, _WORDS, _TIMES = 9, 61, 3.0  # of logits; of the loss, before backward
_NO_TOKEN = "a target may be −100, which is no token, but −100 % t is a rank all the same: mask it before you look up a logit"
_IN_BLOCKS = "token k is number k // t on rank k % t, not in a block: not k − r·W on rank k // W"
_RETURNS = "it returns the loss, a tensor without dimensions, the same on all ranks"
_COMPLETE = (
    "no tensor has more elements than this rank's logits: S·B·V/t. Exchange what is left of them after a sum or a maximum; "
    "parts that are gathered into a list count as one tensor"
)


def _of_loss(case: Case, rank: int, n: int, seed: int) -> tuple[Case, Tensor, Tensor, float]:
    """A rank's logits; all targets, and the z-loss's factor."""
    number, r = case.at(rank, n)
    targets = whole(_WORDS, (_POSITIONS, _B), seed, number)
    targets[-2:, 0] = targets[0, 1] = -100
    targets[1:3, 1] = torch.tensor([_WORDS - 1, _WORDS - 2])  # the last ones of ranks, also of those that have one more
    whose_SB1 = torch.arange(_POSITIONS * _B).view(_POSITIONS, _B, 1) % case.t  # the rank with the largest logits
    shift_SB1, z = case.offset * (2.0 * (whose_SB1 == r) - 1), (0.05 + seed_of(seed) % 7 / 10) * (1 + (case.offset > 0))
    mine = len(range(r, _WORDS, case.t))
    return case, normal((_POSITIONS, _B, mine), seed, "logits", rank) * 3 + shift_SB1, targets, z


def _cross_entropy(own: tuple[Case, Tensor, Tensor, float], function: Callable, watch: Watch) -> dict:
    case, logits, targets, z = own
    (group, _), before = given.groups_of(case), (logits.clone(), targets.clone())
    logits.requires_grad_()
    with given.Made(watch) as seen:
        watch.mark("forward")
        loss = function(logits, targets, z, group)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise Stopped(f"it returned {kind_of(loss)}", _RETURNS)
        if not loss.requires_grad:
            raise Stopped("the loss has no graph", "it leads back to logits: by autograd, or by a torch.autograd.Function")
        watch.mark("backward")
        (loss.reshape(()) * _TIMES).backward()
    before = {"logits": given.untouched([logits.detach()], before[:1]), "targets": given.untouched([targets], before[1:])}
    largest = max(seen.largest, 8 * _POSITIONS * _B * -(-_WORDS // case.t))  # as much as the logits may always be made
    found = {"the loss": loss.detach().clone().reshape(()), "bytes of the largest tensor": largest}
    return before | found | gradients({"logits": logits})


def _three(phases: dict[str, list[str]]) -> dict[str, list[str]]:
    """Two sums of S·B numbers may go together."""
    one, two = (f"all_reduce of {many * 8 * _POSITIONS * _B:,} bytes" for many in (1, 2))
    calls = [call.replace(two, one) for call in phases["forward"] for _ in range(2 if two in call else 1)]
    return phases | {"forward": sorted(calls)}


def _cases_of_loss(n: int) -> tuple[Case, ...]:
    """Ordinary logits; and such as overflow, of 4 ranks in two pairs."""
    t, pairs = given.in_pairs(n)
    return Case(n, f"V = {_WORDS}"), Case(t, f"{pairs}logits near ±900", offset=900.0)


_MADE = "it made a tensor of {got}; the largest logits of a rank have {right}"
_SMALL_SUMS = "makes three small all-reduces, and none in backward"
_THREE = (
    "three all-reduces of S·B numbers are enough: the largest logit, the sum of exponentials, the target's logit (the last two "
    "may go together)"
)
_LOSS = (
    "the loss is the mean of log Z − the target's logit + z·(log Z)² over the n targets that count, Z over all ranks' tokens; "
    "a logit's gradient is (p·(1 + 2z·log Z) − [k = y]) / n, times the number that backward is given"
)
_LOOK_UP = ((r"index -\d+ is out of bounds", _NO_TOKEN), (r"is out of bounds|index out of range", _IN_BLOCKS))
_JUDGED_LOSS = (
    values(0.4, "loss and gradients are right", _NAMES),
    at_most(0.4, "makes no tensor larger than a rank's logits", "^bytes", _COMPLETE, 0, _MADE, size),
    looks.traffic(0.2, _SMALL_SUMS, _THREE, _three),
)
_CALL = "cross_entropy(logits_SBW, targets_SB, z, group)"
cross_entropy = _task(_CALL, 4, _cross_entropy, _JUDGED_LOSS, _cases_of_loss, _LOOK_UP, _LOSS, make=_of_loss)

# Task 5

_OF_BLOCK = ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
_SHARD, _FEATURES, _ROWS = 3, 64, 2  # positions a rank, numbers a position, units a rank: few, so that positions show
_POSITION_BYTES = 8 * _SHARD * _B * _FEATURES
_KEPT = "bytes of other ranks' positions"
_GATHERED = (
    "the gathered positions are not kept, neither whole nor in parts: a product with weights keeps its input, so do the gather "
    "and that product in one torch.autograd.Function, which keeps the shard and gathers it again in backward. The norm and "
    "dropout work on shards"
)


def _of_block(case: Case, rank: int, n: int, seed: int) -> tuple[Case, list[given.WholeBlock], Tensor, Tensor]:
    """The block, once more where a second one drops nothing; this rank's positions, and the result's gradient."""
    number, _ = case.at(rank, n)
    wholes = [given.made(given.WholeBlock, (_FEATURES, _ROWS * case.t), seed, number) for _ in range(2 if case.drops else 1)]
    return case, wholes, *(_positions(case.strided, seed, rank, what) for what in ("x", "up"))


def _block(own: tuple[Case, list[given.WholeBlock], Tensor, Tensor], kind: Callable, watch: Watch) -> dict:
    case, wholes, x, up = own
    group, _ = given.groups_of(case)
    module, parameters, found = looks.module_of(kind, wholes, watch, _OF_BLOCK, case.drops, given.f, group)
    x.requires_grad_()
    if case.drops:
        plain = kind(wholes.pop(), 0.0, given.f, group)
        return found | looks.dropped_by(module, plain, x, up, watch, case.t, case.drops)
    if group is not None or case.strided:
        with given.Made(watch):
            return found | looks.through(module, parameters, {"x": x}, watch, up, (1,))
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    single = kind(given.WholeBlock(_FEATURES, _ROWS), 0.0, given.f, alone)  # keeps as much, and none of the others'
    watch.weigh(kind, module, single)
    y = looks.result_of(single(x, 1), x)
    also = (kind, single, *nodes_of([y]))
    watch.weigh(module, *also)
    found |= looks.through(module, parameters, {"x": x}, watch, up, (1,), also)
    before, own_only, all_of_them = watch.held[-3:]
    return found | {_KEPT: max(0, all_of_them - own_only - (own_only - before))}


def _positions(strided: bool, *words) -> Tensor:
    x_sBH = normal((_SHARD, _B, _FEATURES), *words)
    return x_sBH.transpose(0, 1).contiguous().transpose(0, 1) if strided else x_sBH


_BLOCK_SENDS = (
    "y = x + dropout(down(gelu(up(norm(x))))): a gather in front of the units and a reduce-scatter behind them go by ranks, "
    "along the first dim, and are each other's backward; one f for the gradients of norm and of down's bias"
)


def _gathered_once(phases: dict[str, list[str]]) -> dict[str, list[str]]:
    """Who keeps what was gathered gathers once less in backward, and is judged by what he keeps."""
    gathers = [call for call in phases["backward"] if call.startswith("all_gather")]
    return phases | {"backward": sorted([*phases["backward"], *gathers])} if len(gathers) == 1 else phases


def _cases_of_block(n: int) -> tuple[Case, ...]:
    """Without dropout on all ranks, with it, with tensors that are not contiguous; of 4, in two pairs."""
    strided = Case(n, "p = 0, x and the result's gradient not contiguous", strided=True)
    pairs = (Case(2, "in two pairs, p = 0"),) if n == 4 else ()
    return Case(n, "p = 0"), Case(n, f"p = {(p := n / 8)}", drops=p), *pairs, strided


_MORE = "it keeps {got} more than for its own positions after forward; a shard of x has " + size(_POSITION_BYTES)
_SENDS = "gathers and reduce-scatters, and sums norm's and the bias's gradients in one call"
_OWN = "keeps no more than its own positions"
_JUDGED = (
    values(0.4, _VALUES, _NAMES),
    looks.keeps(0.05),
    by(0.2, "drops other elements on each rank, and with each seed", looks.masks_differ),
    looks.traffic(0.2, _SENDS, _BLOCK_SENDS, _gathered_once),
    at_most(0.15, _OWN, f"^{_KEPT}", _GATHERED, _POSITION_BYTES // 2, _MORE, size, grain=2048),
)
_CALLED = ((arguments("forward"), "the check calls block(x_sBH, seed)"),)
_OF = "Block(whole, p, f, group)"
_MORE_OF_BLOCK = {"make": _of_block, "then": looks.of_dropout}
block = _task(_OF, 6, _block, _JUDGED, _cases_of_block, _CALLED, _BLOCK_SENDS, **_MORE_OF_BLOCK)

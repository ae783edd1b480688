"""Checks of exercise 06_tensor: f and g, an MLP, attention and a loss cut over ranks, and sequence parallelism.

Ranks are in a group that is the world, or in two pairs: 0 and 2, 1 and 3. All numbers are float64.
"""

from collections.abc import Callable
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from manyranks.given import tensor as given
from manyranks.given.tensor import Case
from manyranks.grade.check import Task
from manyranks.grade.judges import Judge, Right, Verdict, at_most, both, by_phase, facts, sent, values
from manyranks.grade.learner import NOTHING_GIVEN, Allowed, arguments, refuse_class
from manyranks.grade.trial import Trial
from manyranks.measure.fingerprints import size
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.watch import Watch, gradient, gradients
from manyranks.parallel.recomputation import nodes_of

_ALLOWED = Allowed((f"{given.__name__}.f", f"{given.__name__}.g"))
_GROUP = (
    "the ranks are those of `group`: dist.get_rank(group), dist.get_world_size(group), and group=group in each call; "
    "None means all of them"
)
_COPY = "leave what you are given as it is: sum a copy, or into a new row"
_CONTIGUOUS = "collectives want contiguous tensors, and NCCL refuses others: x.contiguous(), or a copy in a flat row"
_ADVICE = (
    (r"returned an incorrect number of gradients", "backward returns one for each argument of apply, None for the group"),
    (r"modified by an inplace operation|a leaf Variable that requires grad", _COPY),
    (r"view size is not compatible", "what comes need not be contiguous: flatten() or reshape(-1) in place of view(-1)"),
    (r"must be contiguous", _CONTIGUOUS),
    (r"'NoneType' object has no attribute '(size|rank)'", _GROUP),
    (r"[Gg]roup.*(not part|not a member|invalid|default)|Invalid rank|not registered", _GROUP),
    (r"does not require grad and does not have a grad_fn", given.GRAPH),
)
_VIEW = f"{_COPY}; flatten gives a view where a tensor is contiguous, torch.cat a copy"
_LISTS = (r"\bnot list\b|'list' (and|object)|and 'list'|returned is a list", "f and g return a list: [y] = f([x], group)")


def _task(call: str, points: float, run: Callable, judges: tuple, cases: Callable, advice=(), unexplained="", **more) -> Task:
    more = {"allowed": _ALLOWED, "unexplained": unexplained, "more": lambda random: partial(given.of_neighbors, cases), **more}
    return Task("06_tensor", call, points, run, judges, cases, part=True, advice=(*advice, *_ADVICE), **more)


_WHOLE_KEPT = (
    "the whole weights are still there: no attribute may hold them, in whatever form, and a part that is a view keeps all of "
    "its memory: clone() it"
)
_INSTEAD = {  # of all-reduces, where these are all that it takes
    "all_gather": "no rank needs what the others have, only the sum: each computes with its part, and an all-reduce adds up",
    "reduce": "dist.reduce gives the sum to one rank only, and the others need it, too: dist.all_reduce",
    "broadcast": "nothing has to be handed out: what is whole is on all ranks already",
}
_SUMS = (
    "a sum is exchanged where each rank has a part of it, and only there: f is silent in forward and sums gradients, g sums in "
    "forward and is silent in backward"
)


def _traffic(share: float, what: str, hint: str = _SUMS, forward: Callable = list, backward: Callable = list) -> Judge:
    """Judges that each phase's calls are the right answer's. forward, backward: turn two ways that are both right into one."""
    calls = partial(sent, share, what, hint=hint, instead=_INSTEAD | {"": hint}, groups=True)
    phases = by_phase({"__init__": calls(), "forward": calls(alike=forward), "backward": calls(alike=backward)})
    return both(phases, facts(0, "", f"^{given.COLLECTIVES}", _CONTIGUOUS))


def _keeps(share: float) -> Judge:
    says = "{got} are held; its shards have {right}"
    return at_most(share, "holds its shards of the weights only", f"^{given.WEIGHTS}", _WHOLE_KEPT, 512, says, size, grain=512)


def _module(kind: Callable, *args) -> tuple:
    """Returns what `given.module_of` makes of the learner's class. Raises Stopped where that is ready-made."""
    refuse_class(kind if isinstance(kind, type) else type(kind), _ALLOWED)
    return given.module_of(kind, *args)


# Task 1

_LIST = "it returns a list with as many tensors, each in the shape of the one that was given"
_USED = "a result that a rank does not use has a gradient of zeros there: it counts, and is sent like any other"


def _both(own: tuple[Case, list[Tensor], list[Tensor]], function: Callable, watch: Watch) -> dict:
    case, leaves, ups = own
    group, alone = given.groups_of(case, share=case.t)
    tensors = [torch.tanh(leaf.requires_grad_(leaf.dim() > 1)) for leaf in leaves]
    before, given_ups = [one.detach().clone() for one in tensors], [one.clone() for one in ups]
    watch.mark("forward")
    results = _listed(function(list(tensors), group), tensors)
    found = {f"result {i}": y.detach().clone() for i, y in enumerate(results)}
    found = {"each tensor that was given": given.untouched(tensors, before)} | found
    watch.mark("backward")
    used = [i for i, leaf in enumerate(leaves) if leaf.requires_grad][: len(ups)]
    if lacking := [i for i in used if not results[i].requires_grad]:
        raise Stopped(f"result {lacking[0]} has no graph", "results have to be those of a torch.autograd.Function's apply")
    torch.autograd.backward([results[i] for i in used], ups)
    found |= {f"the gradient of tensor {i}": gradient(leaf) for i, leaf in enumerate(leaves) if leaf.requires_grad}
    if case.twice:
        pair = ({"a tensor": leaves[0]}, (group,)), ({"a tensor": leaves[-1]}, (alone,))
        found |= watch.overlapping_calls(lambda x, group: function([x], group)[0], *pair)
    return {"the gradient that backward was given": given.untouched(ups, given_ups)} | found


def _listed(results, tensors: list[Tensor]) -> list[Tensor]:
    if not isinstance(results, list | tuple) or not all(isinstance(y, Tensor) for y in results):
        found, hint = f"it returned {kind_of(results)}", _LIST
        if isinstance(results, list | tuple) and any(isinstance(y, list | tuple) for y in results):
            found, hint = f"{found} with lists in it", f"apply takes tensors one by one: apply(group, *tensors); {hint}"
        raise Stopped(found, hint)
    if [y.shape for y in results] != [x.shape for x in tensors]:
        raise Stopped(f"it returned tensors of {[list(y.shape) for y in results]}", _LIST)
    return list(results)


_SUMMED = "makes one all-reduce for all tensors, in its direction"
_JUDGED_BOTH = values(0.5, "results and gradients are right"), _traffic(0.5, _SUMMED)
_ADVICE_OF_BOTH = (
    (r"modified by an inplace operation|a leaf Variable that requires grad", _VIEW),
    (r"'NoneType' object has no attribute|got NoneType|expected Tensor as element", _USED),
)
_CUT = _ADVICE_OF_BOTH, "cut the row in the order in which it was joined, and give each part its tensor's shape"
_F, _G = ((_both, _JUDGED_BOTH, partial(given.cases_of_both, summing), *_CUT) for summing in (False, True))
copy_in = _task("copy_in(tensors, group)", 2, *_F, allowed=NOTHING_GIVEN, make=partial(given.of_both, False))
reduce_out = _task("reduce_out(tensors, group)", 2, *_G, allowed=NOTHING_GIVEN, make=partial(given.of_both, True))

# Tasks 2 and 3

_VALUES = "shards, results and gradients are right"
_NAMES = "^(?!bytes|mask|what collectives)"  # of results that are values
_OF_MLP = ("gate.weight", "gate.bias", "up.weight", "up.bias", "down.weight", "down.bias")
_OF_ATTENTION = ("query.weight", "key.weight", "value.weight", "output.weight")


def _mlp(own: tuple[Case, list[given.WholeMLP], Tensor, Tensor], kind: Callable, watch: Watch) -> dict:
    case, wholes, x, up = own
    module, parameters, found = _module(kind, wholes, watch, _OF_MLP, given.f, given.g, given.groups_of(case)[0])
    return found | given.through(module, parameters, {"x": x.requires_grad_()}, watch, up)


def _attention(own: tuple[Case, list[given.WholeAttention], Tensor, Tensor, Tensor], kind: Callable, watch: Watch) -> dict:
    case, wholes, x, memory, up = own
    gets = given.f, given.g, *given.groups_of(case, share=min(case.heads[1], case.t))
    module, parameters, found = _module(kind, wholes, watch, _OF_ATTENTION, *gets)
    return found | given.through(module, parameters, {"x": x.requires_grad_(), "memory": memory.requires_grad_()}, watch, up)


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
_F_G = "f before the units, silu(gate) · up; g after the product with down; and then, once, its bias and x itself"
_F_G_HEADS = (
    "f before the heads, for x, memory and shared weights; attend on the rank's heads as on the whole; g after output, which "
    "has the columns of the rank's query heads"
)
_ONE_EACH = _traffic(0.35, "makes one all-reduce forward and one backward")
_ONE_A_GROUP = _traffic(0.3, "makes one all-reduce per group, for x and memory, and for shared heads")
_OF_UNITS = (values(0.5, _VALUES, _NAMES), _keeps(0.15), _ONE_EACH), given.cases_of_mlp, (_LISTS, _DIMS), _F_G
_HEADS = _LISTS, _NO_HEADS, _HEAD_DIMS
_OF_HEADS = (values(0.6, _VALUES, _NAMES), _keeps(0.1), _ONE_A_GROUP), given.cases_of_attention, _HEADS, _F_G_HEADS
mlp = _task("MLP(whole, f, g, group)", 5, _mlp, *_OF_UNITS, make=given.of_mlp)
attention = _task("Attention(whole, f, g, group, sharers)", 5, _attention, *_OF_HEADS, make=given.of_attention)

# Task 4

_TIMES = 3.0  # of the loss, before backward
_NO_TOKEN = "a target may be −100, which is no token, but −100 % t is a rank all the same: mask it before you look up a logit"
_IN_BLOCKS = "token k is number k // t on rank k % t, not in a block: not k − r·W on rank k // W"
_RETURNS = "it returns the loss, a tensor without dimensions, the same on all ranks"
_COMPLETE = (
    "no tensor has more elements than this rank's logits: S·B·V/t. Exchange what is left of them after a sum or a maximum; "
    "parts that are gathered into a list count as one tensor"
)


def _cross_entropy(own: tuple[Case, Tensor, Tensor, float], function: Callable, watch: Watch) -> dict:
    case, logits, targets, z = own
    group, _ = given.groups_of(case)
    before = logits.clone(), targets.clone()
    logits.requires_grad_()
    with given.Made() as seen:
        watch.mark("forward")
        loss = function(logits, targets, z, group)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise Stopped(f"it returned {kind_of(loss)}", _RETURNS)
        if not loss.requires_grad:
            raise Stopped("the loss has no graph", "it leads back to logits: by autograd, or by a torch.autograd.Function")
        watch.mark("backward")
        (loss.reshape(()) * _TIMES).backward()
    before = {"logits": given.untouched([logits.detach()], before[:1]), "targets": given.untouched([targets], before[1:])}
    always = 8 * given.POSITIONS * given.B * -(-given.WORDS // case.t)  # as much as the logits of a rank
    found = {"the loss": loss.detach().clone().reshape(()), "bytes of the largest tensor": max(seen.largest, always)}
    found[given.COLLECTIVES] = seen.collectives
    if case.twice:
        also = {"logits": logits[2:]}, (targets[2:], z, group)
        found |= watch.overlapping_calls(function, ({"logits": logits}, (targets, z, group)), also)
    return before | found | gradients({"logits": logits})


def _three(calls: list[tuple]) -> list[tuple]:
    """Takes apart two sums of S·B numbers that went together."""
    one = 8 * given.POSITIONS * given.B
    return [(op, part, to) for op, count, to in calls for part in ([one, one] if count == 2 * one else [count])]


_MADE = "it made a tensor of {got}; the largest logits of a rank have {right}"
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
    _traffic(0.2, "makes three small all-reduces, and none in backward", _THREE, _three),
)
_SOUGHT = _JUDGED_LOSS, given.cases_of_loss, _LOOK_UP, _LOSS
cross_entropy = _task("cross_entropy(logits_SBW, targets_SB, z, group)", 4, _cross_entropy, *_SOUGHT, make=given.of_loss)

# Task 5

_OF_BLOCK = ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
_POSITION_BYTES = 8 * given.SHARD * given.B * given.FEATURES
_KEPT = "bytes of other ranks' positions"
_GATHERED = (
    "the gathered positions are not kept, neither whole nor in parts: a product with weights keeps its input, so do the gather "
    "and that product in one torch.autograd.Function, which keeps the shard and gathers it again in backward. The norm and "
    "dropout work on shards"
)


def _block(own: tuple[Case, list[given.WholeBlock], Tensor, Tensor], kind: Callable, watch: Watch) -> dict:
    case, wholes, x, up = own
    group, alone = given.groups_of(case, share=case.t)
    module, parameters, found = _module(kind, wholes, watch, _OF_BLOCK, case.drops, given.f, group)
    x.requires_grad_()
    if case.drops:
        plain = kind(wholes.pop(), 0.0, given.f, group)
        return found | given.dropped_by(module, plain, x, up, watch, case.t, case.drops)
    if group is not None or case.strided:
        with given.Made() as seen:
            found |= given.through(module, parameters, {"x": x}, watch, up, (1,))
        return found | {given.COLLECTIVES: seen.collectives}
    single = kind(given.WholeBlock(given.FEATURES, given.ROWS), 0.0, given.f, alone)  # keeps as much, and none of the others'
    watch.weigh(kind, module, single)
    y = given.result_of(single(x, 1), x)
    also = (kind, single, *nodes_of([y]))
    watch.weigh(module, *also)
    found |= given.through(module, parameters, {"x": x}, watch, up, (1,), also)
    before, own_only, all_of_them = watch.held[-3:]
    if case.twice:
        found |= watch.overlapping_calls(module, ({"x": x}, (1,)), ({"x": x[1:]}, (1,)))
    return found | {_KEPT: max(0, all_of_them - own_only - (own_only - before))}


_BLOCK_SENDS = (
    "y = x + dropout(down(gelu(up(norm(x))))): a gather in front of the units and a reduce-scatter behind them go by ranks, "
    "along the first dim, and are each other's backward; one f for the gradients of norm and of down's bias"
)


def _as_scattered(calls: list[tuple]) -> list[tuple]:
    """Counts an all-to-all whose parts are added as a reduce-scatter: it sends as much."""
    return [("reduce_scatter" if op == "all_to_all" else op, *more) for op, *more in calls]


def _gathered_once(calls: list[tuple]) -> list[tuple]:
    """Counts a gather more where the gathered is kept: another judge looks at what's kept."""
    gathers = [call for call in calls if call[0] == "all_gather"]
    return _as_scattered([*calls, *gathers] if len(gathers) == 1 else calls)


_NONE_DROPPED = "nothing was dropped: F.dropout(y, p) or a mask, whatever module.training says"
_READ = "the masks are read from the result: correct that first"
_ODDS = "each element is dropped with probability p, whatever happens to others, and those that stay are divided by 1 − p"
_TOGETHER_DROPPED = "each element is dropped or kept alone: a mask has one number per position, sequence, and feature"
_AGAIN = (
    "the same seed has to give the same mask, however often it is used: a generator of its own, made from the seed, each time"
)
_SAME_RANKS = (
    "each rank has other positions, so it needs a mask of its own: with one seed, or one random state, on all ranks, positions "
    "of different ranks lose the same elements"
)
_SAME_SEEDS = "each step has a seed of its own, which has to count"
_COLLIDES = (
    "each pair of a rank and a seed needs a mask of its own, but here two pairs come to the same number: "
    "seed * t + rank is another number for each pair"
)
_SURE = 6.0  # standard deviations: more than chance makes of elements that are dropped one by one


def _masks_differ(trial: Trial, right: Right) -> Verdict:
    """Compares masks: all differ over ranks and seeds, elements drop one by one, and a seed gives the same mask again."""
    p = trial.case.drops
    for ranks in trial.case.groups(trial.n) if p else ():
        found = {rank: [tuple(one) for one in trial.seen[rank].results["masks"]] for rank in ranks}
        for rank, masks in found.items():
            if not any(dropped for _, _, dropped in masks):
                return Verdict(False, f"rank {rank} dropped no element; p is {100 * p:g} %", _NONE_DROPPED)
            if not masks[0][1]:
                return Verdict(False, f"which elements rank {rank} dropped cannot be told from its result", _READ)
            if masks[0][1] != masks[-1][1]:
                return Verdict(False, f"rank {rank} dropped other elements when seed {masks[0][0]} came again", _AGAIN)
        every = {rank: [mask for _, mask, _ in masks[:-1]] for rank, masks in found.items()}
        for one, other in combinations(ranks, 2):
            if every[one] == every[other]:
                return Verdict(False, f"ranks {one} and {other} dropped the same elements", _SAME_RANKS)
        flat = [(rank, seed, mask) for rank, masks in found.items() for seed, mask, _ in masks[:-1]]
        for (one, first, here), (other, second, there) in combinations(flat, 2):
            if here == there:
                who = f"rank {other} with seed {second} draws the mask of rank {one} with seed {first}"
                return Verdict(False, who, _SAME_SEEDS if one == other else _COLLIDES)
        for rank, masks in found.items():
            apart = trial.seen[rank].results["masks' deviations"]
            if abs(apart[0]) > _SURE or len({dropped for _, _, dropped in masks}) == 1:
                mean = 100 * sum(dropped for _, _, dropped in masks) / len(masks)
                each = " in each mask" if abs(apart[0]) <= _SURE else ""
                return Verdict(False, f"rank {rank} dropped {mean:.3g} % of the elements{each}; p is {100 * p:g} %", _ODDS)
            if max(apart[1:]) > _SURE:
                return Verdict(False, f"rank {rank} dropped elements together, not each alone", _TOGETHER_DROPPED)
    return Verdict(True)


_MORE = "it keeps {got} more than for its own positions after forward; a shard of x has " + size(_POSITION_BYTES)
_SENDS = "gathers and reduce-scatters, and sums norm's and the bias's gradients in one call"
_OWN = "keeps no more than its own positions"
_JUDGED = (
    values(0.4, _VALUES, _NAMES),
    _keeps(0.05),
    Judge(0.2, "drops other elements on each rank, and with each seed", _masks_differ),
    _traffic(0.2, _SENDS, _BLOCK_SENDS, _as_scattered, _gathered_once),
    at_most(0.15, _OWN, f"^{_KEPT}", _GATHERED, _POSITION_BYTES // 2, _MORE, size, grain=2048),
)
_CALLED = given.cases_of_block, ((arguments("forward"), "the check calls block(x_sBH, seed)"),), _BLOCK_SENDS
block = _task("Block(whole, p, f, group)", 6, _block, _JUDGED, *_CALLED, make=given.of_block, then=given.of_dropout)

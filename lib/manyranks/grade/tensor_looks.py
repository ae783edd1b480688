"""How exercise 06's checks see a run: calls by phase, the weights that are held, dropout's masks."""

import gc
import hashlib
from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor, nn

from manyranks.given.tensor import STRIDED, untouched
from manyranks.grade.judges import WAIT, Judge, Right, Verdict, at_most, by
from manyranks.grade.learner import Ready, refuse_class, tensor
from manyranks.grade.trial import Seen, Trial
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.prints import listed, size
from manyranks.measure.watch import Watch, gradients
from manyranks.parallel.recomputation import nodes_of

READY = Ready(("manyranks.given.tensor.f", "manyranks.given.tensor.g"))
GRAPH = (
    "a torch.autograd.Function's result comes from apply; detach, no_grad, .data and a new tensor that something was "
    "copied into lose the graph"
)
GROUP = (
    "the ranks are those of `group`: dist.get_rank(group), dist.get_world_size(group), and group=group in each call; "
    "None means all of them"
)
COPY = "leave what you are given as it is: sum a copy, or into a new row"
ADVICE = (
    (r"returned an incorrect number of gradients", "backward returns one for each argument of apply, None for the group"),
    (r"modified by an inplace operation|a leaf Variable that requires grad", COPY),
    (r"view size is not compatible", "a gradient need not be contiguous: flatten() or reshape(-1) in place of view(-1)"),
    (r"must be contiguous", "collectives want contiguous tensors: x.contiguous(), or a copy in a flat row"),
    (r"'NoneType' object has no attribute '(size|rank)'", GROUP),
    (r"'NoneType' object has no attribute 'wait'", "a call returns something to wait for with async_op=True only"),
    (r"[Gg]roup.*(not part|not a member|invalid|default)|Invalid rank|not registered", GROUP),
    (r"does not require grad and does not have a grad_fn", GRAPH),
)
_WEIGHTS = "bytes of weights"
_WHOLE_KEPT = (
    "the whole weights are still there: no attribute may hold them, in whatever form, and a part that is a view keeps all of "
    "its memory: clone() it"
)
_PHASES = {"made": "when it was made", "forward": "in forward", "backward": "in backward"}
_INSTEAD = {  # of all-reduces, where these are all that it takes
    "all_gather": "no rank needs what the others have, only the sum: each computes with its part, and an all-reduce adds up",
    "reduce": "dist.reduce gives the sum to one rank only, and the others need it, too: dist.all_reduce",
    "broadcast": "nothing has to be handed out: what is whole is on all ranks already",
}
_TOGETHER = "one call for all: put them into one flat row, and cut it again afterwards"
_SUMS = (
    "a sum is exchanged where each rank has a part of it, and only there: f is silent in forward and sums gradients, g sums in "
    "forward and is silent in backward"
)
_NONE_DROPPED = "nothing was dropped: F.dropout(y, p) or a mask, also where the module is not asked for training"
_READ = "the masks are read off the result: put that right first"
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


def _phases(seen: Seen) -> dict[str, list[str]]:
    """What a rank calls when it is made, in forward and in backward, and what it gives to calls that is not contiguous."""
    found: dict[str, list[str]] = {name: [] for name in _PHASES} | {"strided": seen.marks(STRIDED)}
    phase, sent = "made", iter(seen.calls)
    for event in seen.events:
        phase = event.what if event.kind == "mark" and not event.what.startswith(STRIDED) else phase
        call = next(sent, None) if event.kind == "call" else None
        if call and len(call.ranks) > 1 and phase in found:
            op = "reduce_scatter" if call.op == "all_to_all" else call.op  # whose parts are added: it sends as much
            found[phase].append(f"{op} of {call.bytes:,} bytes among ranks {listed([str(r) for r in sorted(call.ranks)])}")
    return {name: sorted(calls) for name, calls in found.items()}


def traffic(share: float, what: str, hint: str = _SUMS, alike: Callable = lambda phases: phases) -> Judge:
    """The calls in each phase are the right answer's. alike: makes two ways that are both right into one."""

    def look(seen: Seen) -> dict[str, list[str]]:
        return alike(_phases(seen))

    def verdict(trial: Trial, right: Right) -> Verdict:
        for rank, (seen, should) in enumerate(zip(trial.seen, right, strict=True)):
            got, must = look(seen), look(should)
            for phase, said in _PHASES.items():
                if got[phase] != must[phase]:
                    there, here = (_counted(its[phase]) for its in (got, must))
                    return Verdict(False, f"rank {rank} called {there} {said}; right is {here}", _why(trial, got, must) or hint)
            if got["strided"]:
                op = got["strided"][0].removeprefix(STRIDED)
                found = f"rank {rank} gave {op} a tensor that is not contiguous"
                return Verdict(False, found, "collectives want contiguous tensors, and NCCL refuses others: x.contiguous()")
        return Verdict(True)

    return by(share, what, verdict, look)


def _counted(calls: list[str]) -> str:
    each = [call + (f" {calls.count(call)} times" if calls.count(call) > 1 else "") for call in dict.fromkeys(calls)]
    return listed(each) if each else "nothing"


def _why(trial: Trial, got: dict[str, list[str]], must: dict[str, list[str]]) -> str:
    """What the calls alone tell."""
    if trial.unwaited:
        return WAIT
    ops = [{call.partition(" ")[0] for phase in _PHASES for call in calls[phase]} for calls in (got, must)]
    if found := next((_INSTEAD[op] for op in sorted(ops[0] - ops[1]) if op in _INSTEAD), ""):
        return found
    both = [[call for phase in _PHASES for call in calls[phase]] for calls in (got, must)]
    totals = [sum(int(call.split()[2].replace(",", "")) for call in calls) for calls in both]
    return _TOGETHER if len(both[0]) > len(both[1]) and totals[0] == totals[1] else ""


def masks_differ(trial: Trial, right: Right) -> Verdict:
    """Over ranks and seeds, no two are alike, and elements drop one by one; the same seed gives the same one again."""
    t, n, p = trial.case.t, trial.n, trial.case.drops
    for number in range(n // t if p else 0):
        ranks = range(number, n, n // t)
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


def keeps(share: float) -> Judge:
    says = "{got} are held; its shards have {right}"
    return at_most(share, "holds its shards of the weights only", f"^{_WEIGHTS}", _WHOLE_KEPT, 512, says, size, grain=512)


def module_of(kind: Callable, whole: list[nn.Module], watch: Watch, names: tuple[str, ...], *others) -> tuple:
    """The learner's, with its parameters of these names, and what to report. whole: one, which nobody has afterwards."""
    refuse_class(kind if isinstance(kind, type) else type(kind), READY)
    watch.mark("made")
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
    return module, {name: own[name] for name in names}, found | {_WEIGHTS: watch.held[-1] - watch.held[-2] + size_of_whole}


def result_of(y, like: Tensor) -> Tensor:
    """The learner's. Raises Stopped where it has another shape, or backward cannot come to it."""
    if tensor(y, "what forward returned").shape != like.shape:
        found = f"forward returned {list(y.shape)}; right is {list(like.shape)}"
        raise Stopped(found, "every rank returns the result in the shape that the text says, whole or its shard")
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
    """Forward and backward: what to report of them. others: arguments; weighs: what else has something after forward."""
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
    """Small ones, where rules like r · t + seed collide, some far from them, and the first one again."""
    return 7, 8, *range(max(7 - t, 3), 7), 0, 104, 107, 1007, 10_007, 100_007, 7


def dropped_by(module: nn.Module, plain: nn.Module, x: Tensor, up: Tensor, watch: Watch, t: int, p: float) -> dict:
    """For `of_dropout`: masks, gradients, and what they'd be; `plain` has the same weights and drops nothing."""
    seeds, others = _seeds(t), torch.get_rng_state()
    watch.mark("forward")
    result = result_of(module(x, seeds[0]), x)
    watch.mark("backward")
    result.backward(up)
    watch.mark("again")
    got, x.grad = gradients({"x": x} | dict(module.named_parameters())), None
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
    """In the process that judges: what a block's dropout makes of its result, and of gradients."""
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
    """Of how many are dropped, and how far sums along each dimension spread, from chance: in standard deviations."""
    apart_MsBH = p - 1 + torch.stack(masks).round()
    found = [float(apart_MsBH.sum() / (p * (1 - p) * apart_MsBH.numel()) ** 0.5)]
    for dim in range(1, 4):
        spread = apart_MsBH.mean(dim).square().mean() * apart_MsBH.shape[dim] / (p * (1 - p))  # 1 by chance
        found.append(float((spread - 1) * (apart_MsBH.numel() / apart_MsBH.shape[dim] / 2) ** 0.5))
    return found

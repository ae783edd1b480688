"""Checks of exercise 04_checkpointing: what comes out, what is held, and what runs when, with checkpoints and without.

All but the last task run on one rank, the last on several.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.given import checkpointing as model
from manyranks.given.checkpointing import HIDDEN, ROWS, Function, Scene, checked
from manyranks.given.numbers import EXACT, normal, seed_of
from manyranks.grade.check import Task
from manyranks.grade.judges import Judge, Right, Verdict, as_bytes, at_most, both, facts, if_done, rank_by_rank, values
from manyranks.grade.learner import Allowed
from manyranks.grade.trial import Seen, Trial
from manyranks.measure.journal import Stopped
from manyranks.measure.watch import Watch

_NO_SEEDS = "forward draws as many random numbers as the function does, from where they are: no seeds and no fork_rng there"
_OTHER_X = "the function's second x is not the first one: leave x as it is, and run the function on the same values again"
_RESTORE = (
    "backward's run draws other random numbers than forward's: keep torch.get_rng_state() from before the first run, and set "
    "it before the second"
)
_BACK = (
    "after backward, random numbers start again from an earlier place: the second run set the old state, so put back "
    "the one from before it"
)
_ADVICE = (  # what Python and torch say with names of the learner's
    (r"'(Function|Layer)' object has no attribute", "function may be any callable: it need not be a module"),
    (r"a gradient different than None at", "backward returns one for each argument of apply, in order: None for the function"),
    (r"One of the differentiated Tensors does", "frozen parameters have no gradient: torch.autograd.backward finds the others"),
    (r"a leaf Variable that requires grad|modified by an inplace", "leave x as it is: work on x.detach()"),
)
_YOURSELF = "call the `checkpoint` that you are given; where none is, write it yourself, with a torch.autograd.Function"
_ALLOWED = Allowed((f"{model.__name__}.Function",), hint=_YOURSELF)
_HANDED = _ALLOWED._replace(given=(*_ALLOWED.given, f"{model.__name__}.Checkpoint"))
_Task = partial(Task, "04_checkpointing", part=True, allowed=_ALLOWED)
_FORWARD, _BACKWARD = "what forward runs", "what backward runs"


def _ran(seen: Seen, should: Seen) -> bool:
    """Tells whether functions ran in forward, and in backward where they must."""
    return all(seen.results.get(k) != "nothing" or should.results.get(k) == "nothing" for k in (_FORWARD, _BACKWARD))


_holds = if_done(_ran, partial(at_most, unit=as_bytes))


def _trains(share: float, what: str, other_x: str = _OTHER_X) -> Judge:
    """Judges the values. Where no mistake explains them: a hint by what else was seen. other_x: on an x that was not kept."""
    judge = values(share, what, "^the (gradient|result|random)|^x|^whether", alone=True)

    def verdict(trial: Trial, right: Right) -> Verdict:
        found = judge.verdict(trial, right)
        if found.ok or found.hint:
            return found
        pairs = [(seen.results, should.results) for seen, should in zip(trial.seen, right, strict=True)]
        if any(seen[_FORWARD] != should[_FORWARD] for seen, should in pairs):
            return found._replace(hint="forward doesn't run what it must: start with the line on that")
        if "drawn after forward" in found.found:  # what else is wrong follows from it
            return found._replace(hint=_NO_SEEDS, firm=True)
        if any(seen[_BACKWARD] != should[_BACKWARD] for seen, should in pairs):
            return found._replace(hint="backward doesn't run what it must: start with the line on that")
        if any(seen.results["another state"] for seen in trial.seen):
            return found._replace(hint=_RESTORE, firm=True)
        if any(seen.results["another x"] for seen in trial.seen):
            return found._replace(hint=other_x)
        return found._replace(hint=_BACK if "drawn after backward" in found.found else "")

    return judge._replace(verdict=verdict)


def _after(one: Judge, other: Judge) -> Judge:
    """Makes the second judge one that judges only where the first is content."""

    def verdict(trial: Trial, right: Right) -> Verdict:
        content = one.verdict(trial, right).ok
        return other.verdict(trial, right) if content else Verdict(None, "not judged, because more than that was kept")

    return other._replace(verdict=verdict)


_KEPT = (
    "keep x and nothing else: where autograd is off, as inside a torch.autograd.Function's forward, the function leaves "
    "nothing; and what backward needs goes into ctx.save_for_backward, not into lists, closures or results"
)
_LET_GO = "after backward it isn't needed: save_for_backward lets it go, attributes of ctx stay"
_X_ONLY = both(_holds(0.35, "keeps x and nothing else", "kept", _KEPT), facts(0, "", "gives"))
_ONCE = "forward runs each function once. Each checkpoint runs its own again when backward comes to it, the last one first"
checkpoint = _Task(
    "checkpoint(function, x)",
    7,
    model.train,
    (
        _trains(0.25, "computes and trains as without a checkpoint"),
        _X_ONLY,
        _after(_X_ONLY, _holds(0.1, "lets x go when backward is over", "held after", _LET_GO)),
        facts(0.3, "runs the function once in forward and once in backward", "runs|gives", _ONCE),
    ),
    make=lambda case, rank, n, seed: model.begun(case, seed),
    cases=(
        Scene("a layer with dropout"),
        Scene("a function that changes before backward", changes=True),
        Scene("under torch.no_grad()", off=True),
        Scene("two results, backward from the first one first", "LL", turns=True),
        Scene("three checkpoints and a head", "LLL", given=True, head=True),
        Scene("a frozen layer in front of a head", "F", given=True, head=True),
    ),
    more=lambda random: [Scene("two calls of a function", twice=True)],
    worlds=(1,),
    advice=_ADVICE,
    unexplained="the gradient of the result goes back through the second run, once, to its x and to all parameters",
)

# Task 2: a chain


def _chain(given: tuple[int, int, Tensor], answer: Callable, watch: Watch) -> dict:
    n, begins, x = given
    torch.manual_seed(begins)
    x.requires_grad_()
    weights = [torch.linspace(0.5 + k / 7, 1.5 + k / 7, HIDDEN, **EXACT).requires_grad_() for k in range(n)]
    bodies = [lambda x, weight=weight: x + 0.3 * nn.functional.dropout(torch.tanh(x * weight), 0.2) for weight in weights]
    layers = [Function(str(k), body, watch) for k, body in enumerate(bodies)]
    leaves = {"x": x} | {f"layer {k}'s weight": weight for k, weight in enumerate(weights)}
    found = model.step(watch, lambda: checked(answer(model.Checkpoint(), list(layers), x), x), layers, leaves)
    return found | _segments([int(name) for name in found["what backward runs"].split(", ") if name != "nothing"], n)


def _segments(again: list[int], n: int) -> dict:
    """Describes the segments that backward ran n layers again in, if it did so segment by segment."""
    ends = [k for k in range(1, len(again)) if again[k] != again[k - 1] + 1]
    runs = [again[first:end] for first, end in pairwise([0, *ends, len(again)])][::-1]
    if [k for run in runs for k in run] != list(range(len(again))):
        return {"the cut into segments": None, "the last segment": None}
    lengths = [len(run) for run in runs if run] + ([n - len(again)] if len(again) < n else [])
    return {
        "what backward runs": "segment after segment, the last one first",
        "the last segment": "in a checkpoint" if len(again) == n else "without a checkpoint",
        "the cut into segments": ", ".join(map(str, lengths)),
    }


_ROOM = 2 * 8 * model.ROWS * HIDDEN  # bytes: of operators that compute
_CHECKPOINTS = (
    "forward runs each layer once, in order. L layers are round(√L) segments, which differ by one at most, the longer ones "
    "first: each but the last is one call of checkpoint, and backward runs the one before the last again, then those before"
)
_INPUTS = "what is kept: the inputs of the segments before the last, and all that the last one's layers keep"
_ONE = "one segment is computed again at a time, and let go when its backward is over"
checkpoint_sqrt = _Task(
    "checkpoint_sqrt(checkpoint, layers, x)",
    4,
    _chain,
    (
        _trains(0.1, "computes and trains as without checkpoints"),
        facts(0.7, "runs each segment but the last again, when its turn comes", "runs|segment", _CHECKPOINTS),
        _holds(0.1, "keeps the segments' inputs, and the last segment", "kept", _INPUTS),
        _holds(0.1, "holds one segment at a time", "fullest", _ONE, _ROOM),
    ),
    cases=("with 10 layers", "with 7 layers", "with 1 layer", "with 2 layers"),  # √10 rounds down, √7 rounds up
    make=lambda case, rank, n, seed: (int(case.split()[1]), seed_of(seed, "begins"), normal((ROWS, HIDDEN), seed)),
    more=lambda random: [f"with {(c := random.randint(3, 5)) ** 2 + k * c + random.randint(1, c)} layers" for k in (0, 1)],
    worlds=(1,),
    allowed=_HANDED,
    advice=(
        (r"'Tensor' object is not callable", "checkpoint(function, x): the function comes first"),
        (
            r"is not a Module subclass",
            "layers are functions, not modules: call one after the other, each with the last one's result",
        ),
        (
            r"(Checkpoint\.__call__|Function\.__call__)\(\) (takes|got|missing)",
            "a checkpoint takes a function of one tensor: bind the segment to it, as by functools.partial(run, segment)",
        ),
        *_ADVICE,
    ),
    unexplained="the next lines say which layers ran, and when: begin there",
)

# Task 3: attention


def _attention(given: tuple[int, Tensor], answer: Callable, watch: Watch) -> dict:
    begins, x = given
    torch.manual_seed(begins)
    before, after = nn.Linear(HIDDEN, 3 * HIDDEN, **EXACT), nn.Linear(HIDDEN, HIDDEN, **EXACT)
    bodies = {"project": before, "core": model.core, "output": after}
    parts = {name: Function(name, body, watch) for name, body in bodies.items()}
    leaves = {"x": x.requires_grad_(), "project's weight": before.weight, "output's weight": after.weight}
    layer, functions = SimpleNamespace(**parts), list(parts.values())
    return model.step(watch, lambda: checked(answer(model.Checkpoint(), layer, x), x), functions, leaves)


_PARTS = (
    "output(core(project(x))), each once in forward, and the core in a checkpoint of its own: it runs again, and nothing else"
)
_NO_SCORES = "what is kept: what project and output need for backward, and the core's input; not its scores"
selective = _Task(
    "selective(checkpoint, layer, x)",
    2,
    _attention,
    (
        _trains(0.15, "computes and trains as without a checkpoint"),
        facts(0.7, "runs the core again, and nothing else", "runs", _PARTS),
        _holds(0.15, "keeps what products with weights need, and no scores", "kept", _NO_SCORES),
    ),
    make=lambda case, rank, n, seed: (seed_of(seed, "begins"), normal((ROWS, HIDDEN), seed)),
    cases=("a layer with attention",),
    worlds=(1,),
    allowed=_HANDED,
    advice=(
        (
            r"'Tensor' object is not callable",
            "checkpoint(function, x): give it layer.core, which it calls itself, and not what the core returns",
        ),
        *_ADVICE,
    ),
    unexplained="the next line says which functions ran, and when: begin there",
)

# Task 4: a choice


def _choose(given: tuple[list, int], choose: Callable, watch: Watch) -> dict:
    layers, budget = given
    try:
        chosen = choose(list(layers), budget)
    except Exception as error:
        fits = model.peak(layers, range(len(layers))) <= budget
        if isinstance(error, Stopped | NotImplementedError) or (fits and not isinstance(error, ValueError)):
            raise
        return {"did": f"raises {'ValueError' if isinstance(error, ValueError) else type(error).__name__}", "chosen": None}
    chosen = None if chosen is None else model.numbers(chosen, len(layers))
    return {"did": f"returns {chosen}", "chosen": chosen}


_FITS = "peak(layers, chosen) says what a choice holds, and must be within the budget: <=, so that what holds just that fits"
_TABLE = (
    "a part of this choice, or another one, is enough: taking layers one after the other, the best by some measure first, can "
    "miss it. Go through the layers once; keep, for each number of bytes that may be held by now, the least FLOPs with which "
    "it can be had, and from which choice"
)
_EVERY = "where nothing fits, raise ValueError: not even what holds least at each layer is within the budget"
choose = _Task(
    "choose(layers, budget)",
    4,
    _choose,
    (
        facts(0.2, "fits the budget", "the choice", _FITS),
        facts(0.7, "recomputes as little as possible", "need not|FLOPs", _TABLE),
        facts(0.1, "raises ValueError where nothing fits", "choose does", _EVERY),
    ),
    cases=model.CHAINS,
    make=lambda case, rank, n, seed: (case.layers, case.budget),
    more=model.drawn,
    then=lambda case, given, results: model.weighed(case, results["did"], results["chosen"]),
    worlds=(1,),
)

# Task 5: shares


def _shared(given: model.Begun, answer: Callable, watch: Watch) -> dict:
    """Runs a step with a group: 4 ranks are two pairs, which have different x."""
    (case, *_, x), n = given, dist.get_world_size()
    pairs = ((0, 1), (2, 3)) if case.near else ((0, 2), (1, 3))
    group = [dist.new_group(pair) for pair in pairs][_pair(case, dist.get_rank())] if n == 4 else None
    return model.train(given, answer, watch, (group,), 8 * -(-x.numel() // dist.get_world_size(group)))


def _pair(case: Scene, rank: int) -> int:
    return rank // 2 if case.near else rank % 2


def _too_many(trial: Trial, rank: int, seen: Seen, should: Seen) -> Verdict | None:
    got, must = ({len(call.ranks) for call in one.calls} for one in (seen, should))
    if got - must:
        return Verdict(False, f"rank {rank} made a call among {max(got)} ranks; its group has {max(must)}", _GROUP)
    strange = {call.bytes for call in seen.calls} - {call.bytes for call in should.calls}
    if "F" in trial.case.layers and strange:  # no other judge looks at what is sent there
        return Verdict(False, f"rank {rank} put {max(strange):,} bytes into a call, which is not a share's size", _GATHERS)


def _scenes(n: int) -> tuple[Scene, ...]:
    t, where = (2, "in two pairs, ") if n == 4 else (n, "")
    return (
        Scene(f"{where}two checkpoints", "LL", rows=(31, 13), hidden=23),  # no t divides their product
        Scene(f"{where}with {t + 1} elements", off=True, near=False, rows=(t + 1,), hidden=1),
        Scene(f"{where}an x that needs no gradient", "FL", given=True, off=True, rows=(396,)),
    )


_GROUP = "gather within the group: dist.get_rank(group), dist.get_world_size(group), and group=group in the call"
_TOGETHER = "what is put together in backward is not x: place r keeps share r, in order, with zeros at the end that are cut off"
_SHARE = "a share has 1/t of x. Is x still in a closure or on ctx? Is the share a view? A slice keeps all of x: clone() it"
_SHARES = _holds(0.3, "keeps shares only", "kept", _SHARE)
_GATHERS = "forward sends nothing; in backward, one all-gather for each checkpoint, to which each rank gives its share"
_WHEN = "each checkpoint, the last one first, gathers once and then runs its function again"
_ROUND = rank_by_rank(
    0.3,
    "makes one all-gather of a share for each checkpoint, in backward",
    _too_many,
    lambda seen: {"ranks": sorted({len(call.ranks) for call in seen.calls})},
)
shared_checkpoint = _Task(
    "shared_checkpoint(function, x, group)",
    5,
    _shared,
    (
        _trains(0.2, "computes and trains as without a checkpoint", _TOGETHER),
        _SHARES,
        _after(_SHARES, _holds(0.1, "lets them go when backward is over", "held after", _LET_GO)),
        both(_ROUND, facts(0, "", "sends", _GATHERS)),
        facts(0.1, "gathers and runs a function when backward comes to it", "runs", _WHEN),
    ),
    make=lambda case, rank, n, seed: model.begun(case, seed, _pair(case, rank) if n == 4 else 0),
    cases=_scenes,
    advice=(
        (r"invalid tensor size|tensor size must", f"the output has t times as many elements as the input; {_GROUP}"),
        (r"'NoneType' object has no attribute '(size|rank)'", "group may be None, for all ranks: ask dist, not the group"),
        *_ADVICE,
        (r"(waits in|to its|called|gave).* all_gather", f"are shares of the same size on all ranks? {_GROUP}"),
    ),
    unexplained="x is not what it was, or the random numbers are not: all but what's kept of x must be as in task 1",
)

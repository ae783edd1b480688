"""Checks of exercise 05_pipeline: tables are verified and replayed on the virtual clock; a step runs on 2, 3 and 4 ranks."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from itertools import accumulate, pairwise
from numbers import Integral

import torch
from torch import Tensor, nn

from manyranks.given.numbers import EXACT, normal, seed_of
from manyranks.given.pipeline import EARLY, HIDDEN, WAITS, WHY, Case, Stage, facts_of, half_loss_of, loss_of
from manyranks.grade.check import Task
from manyranks.grade.judges import Judge, Right, Verdict, around, as_bytes, at_most, facts, failure, parting, sent, values
from manyranks.grade.learner import Allowed, arguments, error_of, items, named, noted, plain
from manyranks.grade.trial import Seen, Trial
from manyranks.measure.fingerprints import Fact, same
from manyranks.measure.flops import WorkCounter
from manyranks.measure.journal import Stopped
from manyranks.measure.watch import Watch, gradients
from manyranks.parallel.pipeline import schedules
from manyranks.parallel.pipeline.schedules import KINDS

_task = partial(Task, "05_pipeline", part=True)

# Tasks 1, 3 and 5: tables

_MEASURED = {"F": 10, "I": 11, "W": 9}
_EACH = "each micro-batch, from 0 to m − 1, has each of its actions once on each stage"
_CANNOT_RUN = {  # words of `verify` -> what to do
    "is missing": f"{_EACH}: where the forwards end, the backwards of those in flight remain",
    "is done twice": _EACH,
    "no such micro-batch": f"{_EACH}; with few micro-batches, the warm-up has no more than there are",
    "no such stage": "with v stages per rank, stages are counted from 0 to v·p − 1",
    "is not this rank's": "stage s is on rank s % p: with p = 2 and v = 2, rank 0 has the stages 0 and 2, rank 1 has 1 and 3",
    "which it needs": "a backward needs its own forward, and a W its own I, before it in the same rank's table",
    "first sends": "micro-batches cross a boundary in one order: each rank takes them as its neighbor gives them",
    "deadlock:": "each of these ranks waits for what another one does later; the first rank warms up with most forwards",
    "the cap is": "an F makes one activation more, and the W (or B) of its micro-batch gives it back: wait with an F for a W",
}
_FIRST = Case(4, 8), Case(2, 4, 2), Case(4, 8, cap=4)  # case of each task: an error there ends its check


def _actions(table, case: Case, call: str, form: str = "") -> list[tuple]:
    """Returns the learner's actions: kinds and whole numbers; halves of a B under a cap only. Raises Stopped for others."""
    found, kinds, fields = [], KINDS if case.cap else ("F", "B"), 3 if case.v else 2
    for item in items(table, f"what {call} returned", form, 1000):
        fits = isinstance(item, tuple | list) and len(item) == fields and item[0] in kinds
        if not (fits and all(isinstance(one, Integral) and abs(one) < 1 << 31 for one in item[1:])):
            raise Stopped(f"{call} has {item!r:.60} among its actions", form)
        found.append((str(item[0]), *map(int, item[1:])))
    return found


def _of_each_rank(name: str, fields: int, form: str) -> Callable:
    """A script that calls the function for each rank, and has the tables."""

    def run(case: Case, function: Callable, watch: Watch) -> dict:
        tables: list[list[tuple]] = []
        for rank in range(case.p):
            call = f"{name}{(*case[:fields], rank)}"
            with noted(watch, "", call, first=case in _FIRST and not tables):
                tables.append(_actions(function(*case[:fields], rank), case, call, form))
        return {"tables": tables} if len(tables) == case.p else {}

    return run


def _judged(case: Case, given: Case, results: Mapping[str, Fact]) -> dict:
    """Returns what is judged of the tables that have come from a rank; nothing else that has come counts."""
    tables = [_actions(table, case, "a table") for table in items(results.get("tables", ()), "tables", "", case.p)]
    return facts_of(case, tables) if len(tables) == case.p else {}


def _can_run(share: float, what: str) -> Judge:
    """Judges that the tables can run."""

    def kind(problem: Fact) -> str:
        return next((words for words in _CANNOT_RUN if words in str(problem)), "")

    def look(seen: Seen) -> dict[str, Fact]:
        traits = {name: trait for name, trait in seen.results.items() if name.startswith("trait")}
        return traits | {"problem": kind(seen.results.get(WHY, ""))}

    def verdict(trial: Trial, right: Right) -> Verdict:
        failed, problem = failure(trial.seen[0]), trial.seen[0].results.get(WHY)
        found = "its tables are missing" if problem is None else f"{problem}"
        return failed or Verdict(problem == "", found, _CANNOT_RUN.get(kind(problem), ""))

    return Judge(share, what, verdict, look)


def _where(applies: Callable[[Case], bool], judge: Judge, *others: Judge) -> Judge:
    """Judges these cases only. others: what they are judged by as well, in the same line."""

    def verdict(trial: Trial, right: Right) -> Verdict:
        found = (one.verdict(trial, right) for one in (judge, *others) if applies(trial.case))
        return next((one for one in found if not one.ok), Verdict(True))

    return judge._replace(verdict=verdict)


_table_task = partial(_task, worlds=(1,), then=_judged)
_AHEAD = "rank r warms up with p − 1 − r forwards, then does one forward and one backward in turn"
_PAIRS = 'return a list of pairs, the kind and the micro-batch, counted from 0: [("F", 0), ("F", 1), ("B", 0), …]'
_HOLDS = facts(0.4, "holds min(m, p − rank) micro-batches", "holds", _AHEAD, needs=1)
_IN_ALL = facts(0.25, "with this memory, waits (p − 1)(F + B) in all", f"^{WAITS}", _AHEAD, needs=2)
one_f_one_b = _table_task(
    call="one_f_one_b(p, m, rank)",
    points=4,
    run=_of_each_rank("one_f_one_b", 2, _PAIRS),
    judges=(
        _where(lambda case: case.m >= case.p, _can_run(0.1, "does each F and each B once, in an order that can run")),
        _where(lambda case: case.m >= case.p, _HOLDS),
        _where(lambda case: case.m >= case.p, _IN_ALL),
        _where(lambda case: case.m < case.p, _can_run(0.15, "does so with fewer micro-batches than ranks"), _HOLDS, _IN_ALL),
        facts(0.1, "takes micro-batches in order", EARLY, "F goes from 0 to m − 1, and so does B", needs=1),
    ),
    cases=tuple(Case(p, m) for p in (4, 1, 2, 3, 8) for m in dict.fromkeys((2 * p, 2 * p + 1, p, 2, 1))),
    more=lambda random: [
        Case(p := random.randint(5, 9), random.randint(m, p * n)) for m, n in ((5, 3), (5, 3), (1, 1), (1, 1))
    ],
)

_OF_STAGES = "rank r warms up with 2(p − 1 − r) + (v − 1)p forwards, then does one forward and one backward in turn"
_TRIPLES = 'return a list of triples, the kind, the stage and the micro-batch: [("F", 0, 0), ("F", 0, 1), …, ("B", 2, 0), …]'
interleaved = _table_task(
    call="interleaved(p, m, v, rank)",
    points=4,
    run=_of_each_rank("interleaved", 3, _TRIPLES),
    judges=(
        _can_run(0.2, "does each F and each B of each stage once, in an order that can run"),
        at_most(0.3, "waits (p − 1)(f + b) in all, f and b of one stage", f"^{WAITS}", _OF_STAGES, needs=1),
        at_most(0.2, "hides messages as far as it can", "messages", _OF_STAGES, needs=2),
        at_most(0.3, "holds (p − r − 1)·2 + (v − 1)p + 1 activations, no more", "holds", _OF_STAGES, needs=2),
    ),
    cases=(Case(2, 4, 2), Case(4, 8, 2), Case(3, 6, 3), Case(4, 4, 2), Case(8, 16, 2), Case(1, 3, 2)),
    more=lambda random: [Case(p := random.randint(3, 7), p * random.randint(1, 4), random.randint(2, 4)) for _ in range(3)],
)


def _under_a_cap(case: Case, function: Callable, watch: Watch) -> dict:
    form = 'return a list of p tables, one per rank, each a list of pairs: [[("F", 0), ("I", 0), ("W", 0), …], …]'
    p, m, _, cap, times = case
    call = f"under_a_cap({p}, {m}, {cap}, times)"
    with noted(watch, "", call, first=case in _FIRST, patient=True):
        tables = items(function(p, m, cap, dict(times)), f"what {call} returned", form, p)
        if len(tables) < p:
            raise Stopped(f"{call} returned {len(tables)} table{'s' if len(tables) != 1 else ''}", form)
        return {"tables": [_actions(table, case, f"{call}[{rank}]", form) for rank, table in enumerate(tables)]}
    return {}


_CAPS = Case(4, 8, cap=4), Case(4, 12, cap=7), Case(4, 8, cap=5), Case(4, 6, cap=2), Case(3, 2, cap=3), Case(1, 3, cap=1)


def _caps(p: int) -> tuple[tuple[int, int], ...]:
    """The least and the largest cap of each kind that the judge draws."""
    return (p, p), (2 * p - 1, 2 * p - 1), (p - 1, p - 1), (1, 1), (p + 1, 2 * p - 2), (2 * p, 3 * p)


under_a_cap = _table_task(
    call="under_a_cap(p, m, cap, times)",
    points=5,
    run=_under_a_cap,
    judges=(
        _where(lambda case: case.cap >= case.p, _can_run(0.1, "can run, and keeps to a cap of p or more")),
        facts(0.25, "with a cap of p, waits less than 1F1B", "1F1B"),
        facts(0.3, "with a cap of p, waits no longer than ZB-H1", "ZB-H1"),
        facts(0.25, "with a cap of 2p − 1, waits no longer than ZB-H2", "ZB-H2"),
        _where(lambda case: case.cap < case.p, _can_run(0.1, "can run, and keeps to a cap below p")),
    ),
    cases=(*_CAPS, Case(8, 16, cap=8, times=_MEASURED), Case(8, 24, cap=15, times=_MEASURED)),
    more=lambda random: [
        Case(p := random.randint(3, 5), random.randint(2 * p, 3 * p), cap=random.randint(*_caps(p)[kind])) for kind in range(6)
    ],
)

# Task 2: a step

_LENGTH, _GPIPE, _UNEQUAL = 6, "GPipe's table", "1F1B's table, 1 to 3 rows per micro-batch, half the loss"
_BACKWARDS = "1F1B's table, the last micro-batch first"


def _table(case: str, rank: int, n: int) -> list[tuple[str, int]]:
    """A rank's actions."""
    if case == _GPIPE:
        return [*(("F", i) for i in range(n)), *(("B", i) for i in reversed(range(n)))]
    m = n + 1 if case == _UNEQUAL else 2 * n + 1
    last = m - 1 if case == _BACKWARDS else 0
    return [(action.kind, abs(last - action.microbatch)) for action in schedules.one_f_one_b(n, m).ranks[rank]]


def _of_stage(case: str, rank: int, n: int, seed: int) -> tuple:
    """Draws what train_step is called with on this rank."""
    actions = _table(case, rank, n)
    rows = [1 + i % 3 if case == _UNEQUAL else 2 for i in range(len(actions) // 2)]
    shapes = [torch.Size((one, _LENGTH, HIDDEN)) for one in rows]
    inputs, goals = ([normal(shape, seed, what, i) for i, shape in enumerate(shapes)] for what in ("input", "target"))
    loss = half_loss_of if case == _UNEQUAL else loss_of
    return Stage(seed, rank), actions, shapes, inputs if rank == 0 else None, goals if rank == n - 1 else None, loss


def _train_step(own: tuple, function: Callable, watch: Watch) -> dict:
    stage, actions, shapes, inputs, goals, loss = own
    before = deepcopy([inputs, goals])
    most = max(accumulate(1 if kind == "F" else -1 for kind, _ in actions))
    result = function(stage, list(actions), shapes, inputs and [*inputs], goals and [*goals], loss)
    found = {
        "whether inputs or targets were changed": not same([inputs, goals], before),
        "whether an input came where another one still lay": stage.overwritten,
        **gradients(dict(stage.named_parameters())),
        "what it computes": stage.computed,
        "the graphs": stage.graphs or None,
        "the inputs": stage.inputs if not inputs and stage.inputs > most + 1 else most,  # the last output may be a variable yet
    }
    if goals:
        number = isinstance(result, float) or (isinstance(result, Tensor) and result.numel() == 1)
        found["the loss"] = float(result) if number else plain(result)
    return found


def _in_order(share: float, what: str, hint: str) -> Judge:
    """Judges the order: it computes what the table says. The right answer's numbers tell which micro-batch an input is."""

    def steps(trial: Trial, rank: int, seen: Seen, right: Right) -> list[str]:
        known = list(zip(_table(trial.case, rank, trial.n), right[rank].results["what it computes"], strict=True))
        names = [(number, i) for (kind, i), (_, number) in known if kind == "F"]
        found = seen.results.get("what it computes", ())
        return [f"{kind} {next((i for other, i in names if same(float(number), other)), '?')}" for kind, number in found]

    def verdict(trial: Trial, right: Right) -> Verdict:
        for rank, seen in enumerate(trial.seen):
            got, must = (steps(trial, rank, one, right) for one in (seen, right[rank]))
            if got != must:
                there, here = (around(its, parting(got, must)) for its in (got, must))
                return Verdict(False, f"rank {rank}: {there}; right is {here}", hint)
        return Verdict(True)

    return Judge(share, what, verdict, lambda seen: {"computed": seen.results["what it computes"]})


_ORDER = "go through `actions` in order, not through a table of your own; a ? is an input that the previous stage didn't send"
_LET_GO = "after a micro-batch's backward, its input, output and loss go: pop them, and send and sum up only what is detached"
_NEIGHBORS = "an output goes to rank + 1, an input's gradient to rank − 1, one message per micro-batch, and nothing else"
_UNLIKE = "only the last rank divides, by m = len(shapes); others call y.backward(grad) and send x.grad, with x a leaf"
_LATER = "a rank waits for what comes later: receive when the table comes to an action that needs it, wait for sends at the end"
_HELD = "holds {name} of {got} micro-batches; with this table it holds {right}"
train_step = _task(
    "train_step(stage, actions, shapes, inputs, targets, loss_fn)",
    7,
    _train_step,
    (
        values(0.25, "gradients and loss are those of one process", "gradient|loss|whether"),
        _in_order(0.15, "computes in the table's order", _ORDER),
        at_most(0.4, "holds the micro-batches that the table holds", "graphs|inputs$", _LET_GO, says=_HELD),
        sent(0.2, "sends b·s·h elements per micro-batch and boundary, each way", "^(?!recv)", hint=_NEIGHBORS),
    ),
    make=_of_stage,
    cases=(_GPIPE, "1F1B's table", _UNEQUAL),
    more=lambda random: (_BACKWARDS,),
    allowed=Allowed(tuple(f"{Stage.__module__}.{name}" for name in ("Stage", "loss_of", "half_loss_of"))),
    advice=((r"waits in (send|recv)", _LATER),),
    unexplained=_UNLIKE,
)

# Task 4: a backward in two halves

_ROWS, _WIDTHS, _SINGLE = 96, (16, 48, 32, 16), ("one micro-batch", "W before I")
_HALVES = (("F", "forward(x)", "y"), ("I", "input_gradient(grad)", "the gradient of x"), ("W", "weight_gradient()", ""))


def _stack(*words, widths: tuple[int, ...] = _WIDTHS, frozen: bool = False) -> nn.ModuleList:
    """The layers. frozen: a weight and a bias do not learn, and a layer has no bias; the others have gradients already."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed_of(*words))
        sizes = enumerate(pairwise(widths))
        layers = nn.ModuleList(nn.Linear(*pair, bias=not (frozen and k == 2), **EXACT) for k, pair in sizes)
    layers[1].weight.requires_grad_(not frozen)
    layers[0].bias.requires_grad_(not frozen)
    for parameter in layers.parameters() if frozen else ():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    return layers


def _stacks(case: str, rank: int, n: int, seed: int) -> tuple[list[nn.ModuleList], list[list[Tensor]]]:
    """The layers, and by step what goes through them: the first stack twice, if there are two."""
    stacks = [_stack(seed)] if case in _SINGLE else [_stack(seed, frozen=True), _stack(seed, 2, widths=(*_WIDTHS, 16))]
    steps = 1 if case == _SINGLE[1] else 2
    return stacks, [[normal((_ROWS, _WIDTHS[0]), seed, step, i) for i in range(2 * len(stacks) - 1)] for step in range(steps)]


def _split(own: tuple[list[nn.ModuleList], list[list[Tensor]]], kind: Callable, watch: Watch) -> dict:
    (stacks, data), found = own, {}
    if len(data) == 1:
        early = kind(list(stacks[0]))
        early.forward(data[0][0])
        return {"what W raises before I": error_of(early.weight_gradient) or "nothing"}
    halves = [kind(list(stack)) for stack in (stacks if len(stacks) == 1 else [stacks[0], *stacks])]
    watch.weigh()
    for step, (letter, call, result) in enumerate(_HALVES):
        work = WorkCounter()
        for i, one in enumerate(halves):
            given, before = ([data[step][i].clone()] if result else [] for _ in range(2))
            with work, named(call):
                got = plain(getattr(one, call.partition("(")[0])(*given))
            if result:  # a copy keeps nothing of the learner's alive
                found[f"{result} of micro-batch {i}"] = got.clone() if isinstance(got, Tensor) else got
                found[f"whether what {letter} gets of micro-batch {i} has changed"] = not torch.equal(*given, *before)
            del given, got, before
        watch.weigh()
        found[f"after {letter}, what is held"] = watch.held[-1] - watch.held[0]
        found[f"the FLOPs of {letter}"] = work.flops
        for k, stack in enumerate(stacks if letter != "F" else ()):
            found |= gradients(dict(stack.named_parameters()), f"after {letter}, stack {k}: the gradient of layer ")
    return found


_PRODUCTS = "F and I are one product per layer, W one for each weight that learns: neither goes through the layers again"
_NEEDED = "after F the layers' inputs and y are needed, after I the inputs and dz, after W nothing; no result leads to a graph"
_LAYERS = "I goes from the last layer to the first: dz = g * (1 - y * y), then g = dz @ weight; W adds dzᵀ @ x and Σ dz"
_MORE = {"room": 2048, "says": "{name} more than before F is {got}; right is {right}", "unit": as_bytes}
split = _table_task(
    call="Split(layers)",
    then=None,
    points=4,
    run=_split,
    judges=(
        values(0.2, "computes as autograd does, weights in W only", "gradient of|^y|^whether what F", alone=True),
        facts(0.4, "I does half of the products, W the other half", "FLOPs", _PRODUCTS, tolerance=0.05),
        at_most(0.3, "keeps what is needed for what comes, no more", "held", _NEEDED, needs=1, **_MORE),
        facts(0.1, "refuses W before I", "before I", "raise RuntimeError if I hasn't run"),
    ),
    make=_stacks,
    cases=(*_SINGLE, "several micro-batches, a frozen weight and a frozen bias"),
    advice=tuple((arguments(call.partition("(")[0]), f"the check calls .{call}") for _, call, _ in _HALVES),
    unexplained=_LAYERS,
)

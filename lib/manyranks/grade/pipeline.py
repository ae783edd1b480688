"""Checks of exercise 05_pipeline: tables are verified and replayed on the virtual clock; a step runs on 2, 3 and 4 ranks."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from numbers import Integral
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from manyranks.grade.check import Task
from manyranks.grade.judges import Judge, Right, Verdict, at_most, by, facts, failure, order, sent, values
from manyranks.grade.trial import Trial, size
from manyranks.grade.watch import Ready, Watch, error_of, items, named, noted, plain
from manyranks.measure.flops import WorkCounter
from manyranks.measure.journal import Stopped
from manyranks.parallel.pipeline import schedules
from manyranks.parallel.pipeline.actions import KINDS, Action, Schedule
from manyranks.parallel.pipeline.program import Times, bubble, program
from manyranks.parallel.pipeline.schedules import looped, one_stage_a_rank
from manyranks.parallel.pipeline.verify import peaks, verify
from manyranks.theory import pipeline as theory
from manyranks.timeline import replay

_EXERCISE, _READY = "05_pipeline", Ready(theirs=("torch.distributed.pipelining",))
_EACH = "each micro-batch, from 0 to m − 1, has each of its actions once on each stage"
_CANNOT_RUN = {  # words of `verify` -> what to do
    "is missing": f"{_EACH}: where the forwards end, the backwards of those in flight remain",
    "is done twice": _EACH,
    "no such micro-batch": f"{_EACH}; with few micro-batches, the warm-up has no more than there are",
    "no such stage": "with v stages a rank, stages are counted from 0 to v·p − 1",
    "is not this rank's": "stage s is on rank s % p: with p = 2 and v = 2, rank 0 has the stages 0 and 2, rank 1 has 1 and 3",
    "which it needs": "a backward needs its own forward, and a W its own I, before it in the same rank's table",
    "first sends": "micro-batches cross a boundary in one order: each rank takes them as its neighbour gives them",
    "deadlock:": "each of these ranks waits for what another one does later; the first rank warms up with most forwards",
    "the cap is": "an F makes one activation more, and the W (or B) of its micro-batch gives it back: wait with an F for a W",
}


def _actions(table, call: str, fields: int, form: str, most: int) -> list[tuple]:
    """The learner's, each with its kind and whole numbers. Raises Stopped for others."""
    found = []
    for item in items(table, f"what {call} returned", form, most):
        if not (isinstance(item, tuple | list) and len(item) == fields and item[0] in KINDS):
            raise Stopped(f"{call} has {item!r:.60} among its actions", form)
        if not all(isinstance(one, Integral) and abs(one) < 1 << 31 for one in item[1:]):
            raise Stopped(f"{call} has {item!r:.60} among its actions", form)
        found.append((item[0], *map(int, item[1:])))
    return found


def _schedule(ranks: list[list[tuple]], m: int, placement: tuple[int, ...]) -> Schedule:
    """Of the ranks' tables. Where an action names no stage, it is the rank's."""
    rows = (tuple(Action(kind, *(stage or [r]), i) for kind, *stage, i in table) for r, table in enumerate(ranks))
    return Schedule("the table", m, placement, tuple(rows))


def _problem(schedule: Schedule, memory: int | None = None) -> str:
    """Why it cannot run; empty where it can."""
    try:
        verify(schedule, memory)
    except ValueError as error:
        return str(error).removeprefix("the table, ")
    return ""


def _facts(key: str, schedule: Schedule, times: Times, memory: int | None = None) -> dict:
    """What is judged of a table; None where it cannot run."""
    problem = _problem(schedule, memory)
    held = peaks(schedule) if not problem else [None] * len(schedule.ranks)
    return {
        f"{key}why it cannot run": problem,
        **{f"{key}what rank {rank} holds": most for rank, most in enumerate(held)},
        f"{key}the seconds that a rank waits": None if problem else round(bubble(replay(program(schedule), times)), 6),
    }


def _can_run(share: float, what: str, key: str = "") -> Judge:
    """The tables whose results have this key can run."""

    def verdict(trial: Trial, right: Right) -> Verdict:
        if failed := failure(trial.seen[0], key):
            return failed
        for name, problem in trial.seen[0].results.items():
            if name.startswith(key) and name.endswith("cannot run") and problem:
                hint = next((hint for words, hint in _CANNOT_RUN.items() if words in problem), "")
                return Verdict(False, name.removesuffix("why it cannot run") + problem, hint)
        return Verdict(True)

    return by(
        share, what, verdict, lambda seen: {name: value for name, value in seen.results.items() if name.startswith("whether")}
    )


_table_task = partial(
    Task,
    _EXERCISE,
    worlds=(1,),
    part=True,
    ready=_READY,
    endless="a table is finite: count down what is left to do, and end when nothing is",
)


class Ranks(NamedTuple):
    """Of a pipeline."""

    p: int

    def __str__(self) -> str:
        return f"with p = {self.p}"


def _one_f_one_b(case: Ranks, function: Callable, watch: Watch) -> dict:
    form = 'return a list of pairs, the kind and the micro-batch, counted from 0: [("F", 0), ("F", 1), ("B", 0), …]'
    p, found = case.p, {}
    for m in dict.fromkeys((2 * p, 4 * p, 2 * p + 1, p, 2, 1)):
        key, ranks = f"{'few: ' * (m < p)}m = {m}: ", []
        for rank in range(p):
            call = f"one_f_one_b({p}, {m}, {rank})"
            with noted(watch, key, call, first=p == 4 and not found and not ranks):
                ranks.append(_actions(function(p, m, rank), call, 2, form, 8 * m + 1000))
        if len(ranks) == p:
            found |= _facts(key, _schedule(ranks, m, one_stage_a_rank(p)), Times(F=1, I=1, W=1))
    return found


one_f_one_b = _table_task(
    name="one_f_one_b",
    points=4,
    run=_one_f_one_b,
    judge=(
        _can_run(0.2, "does each F and each B once, in an order that can run", "m = "),
        facts(0.4, "holds min(m, p − rank) micro-batches", "^m = .*holds")._replace(needs=1),
        facts(0.25, "with this memory, waits (p − 1)(F + B) in all", "^m = .*waits")._replace(needs=2),
        facts(0.15, "does so with fewer micro-batches than ranks", "^few: "),
    ),
    cases=tuple(map(Ranks, (4, 1, 2, 3, 8))),
    call="one_f_one_b(p, m, rank)",
)

_LENGTH, _HIDDEN, _EXACT = 6, 16, {"dtype": torch.float64}
_STEPS = ("GPipe's table", "1F1B's table", "1F1B's table with micro-batches of 1 to 3 rows")


class Layers(nn.Module):
    """One stage of the model: from [b, s, h] to [b, s, h]. It keeps several times its input."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(_HIDDEN, 2 * _HIDDEN, **_EXACT), nn.Linear(2 * _HIDDEN, _HIDDEN, **_EXACT)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return x_BSH + self.down(torch.tanh(self.up(x_BSH)))


def loss_of(y_BSH: Tensor, target_BSH: Tensor) -> Tensor:
    """The mean over the micro-batch."""
    return (y_BSH - target_BSH).square().mean()


class Kept:
    """What autograd's graph holds in place of a tensor: all of one forward are alive as long as something of its graph is."""

    def __init__(self, tensor: Tensor, flight: set):
        self.tensor, self.flight = tensor, flight


class Flight(set):  # a forward of the stage
    __hash__ = object.__hash__


class Stage(nn.Module):
    """Layers that are watched. known: the input of each micro-batch, here.

    Marks "F 3" when micro-batch 3 comes forward and "B 3" when its gradient arrives, "?" where nobody knows the input.
    graphs, inputs: how many were alive at most, inputs that came as messages; reused: whether one lay where another was.
    """

    def __init__(self, layers: Layers, known: list[Tensor], watch: Watch, first: bool):
        super().__init__()
        self.layers, self._known, self._watch, self._first = layers, known, watch, first
        self.calls = self.graphs = self.inputs = self.reused = 0
        self._flights: weakref.WeakSet[Flight] = weakref.WeakSet()
        self._inputs: dict[int, StorageWeakRef] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 60 or not isinstance(x, Tensor):
            raise Stopped(f"the stage was called {self.calls} times, with a {type(x).__name__}", "does a loop not end?")
        self._inputs = {key: ref for key, ref in self._inputs.items() if not ref.expired()}
        storage, flight = x.untyped_storage(), Flight()
        self.reused += storage._cdata in self._inputs
        if not self._first:
            self._inputs[storage._cdata] = StorageWeakRef(storage)
        alike = (i for i, y in enumerate(self._known) if x.shape == y.shape and torch.allclose(x.detach(), y, 1e-9, 1e-9))
        name = next(alike, "?")
        with torch.autograd.graph.saved_tensors_hooks(lambda t: Kept(t.detach(), flight), lambda kept: kept.tensor):
            y = self.layers(x)
        if y.requires_grad:
            self._flights.add(flight)
            y.register_hook(lambda grad: self._watch.mark(f"B {name}"))
        self._watch.mark(f"F {name}")
        self.graphs, self.inputs = max(self.graphs, len(self._flights)), max(self.inputs, len(self._inputs))
        return y


def _train_step(step: str, function: Callable, watch: Watch) -> dict:
    rank, n, unequal = dist.get_rank(), dist.get_world_size(), step == _STEPS[2]
    if step == _STEPS[0]:
        actions = [*(("F", i) for i in range(n)), *(("B", i) for i in reversed(range(n)))]
    else:
        table = schedules.one_f_one_b(n, n + 1 if unequal else 2 * n + 1).ranks[rank]
        actions = [(action.kind, action.microbatch) for action in table]
    rows = [1 + i % 3 if unequal else 2 for i in range(len(actions) // 2)]
    batch, aims = (_random(seed + watch.seed, sum(rows), _LENGTH, _HIDDEN).split(rows) for seed in (71, 72))
    with torch.no_grad():
        known = [x.clone() for x in batch]
        for before in range(rank):
            known = [Layers(61 + before + watch.seed)(x) for x in known]
    stage = Stage(Layers(61 + rank + watch.seed), known, watch, rank == 0)
    inputs = [x.clone() for x in batch] if rank == 0 else None
    targets = [x.clone() for x in aims] if rank == n - 1 else None
    most = max(accumulate(1 if kind == "F" else -1 for kind, _ in actions))
    result = function(stage, list(actions), [x.shape for x in batch], inputs and [*inputs], targets, loss_of)
    found = {f"the gradient of {name}": _gradient(p) for name, p in stage.layers.named_parameters()}
    if rank == n - 1:
        loss = plain(torch.tensor(result, **_EXACT) if isinstance(result, float) else result)
        found["the loss"] = loss.reshape(()) if isinstance(loss, Tensor) and loss.numel() == 1 else plain(result)
    return found | {
        "whether the stage was called": stage.calls > 0,
        "whether inputs were changed": bool(inputs) and not all(map(torch.equal, inputs, batch)),
        "whether one input overwrote another": stage.reused > 0,
        "the graphs": stage.graphs if stage.calls else None,
        "the inputs": max(stage.inputs, most + 1) if stage.calls else None,  # the last output may still be a variable
    }


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **_EXACT)


def _gradient(parameter: Tensor) -> Tensor:
    """A copy; zeros where there is none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


_BOTH_SEND = (
    "a send ends only when the other side receives. Where a rank sends a forward's output down while the next one sends a "
    "gradient up, both wait for ever, as in 1F1B's steady state. Start the send with isend, go on, and wait for it at the end"
)
_DETACHED = (
    "a stage got no gradient to go back from, or has none to hand on. Receive its input into a leaf that wants one, "
    "x.requires_grad_(), keep y with its graph, go back by y.backward(grad), and send x.grad up"
)

train_step = Task(
    _EXERCISE,
    "train_step",
    7,
    _train_step,
    (
        values(0.25, "gradients and loss are those of one process", "gradient|loss|whether"),
        order(0.15, "computes in the table's order", ("mark F ", "mark B ")),
        at_most(
            0.4,
            "holds the micro-batches that the table holds",
            "graphs|inputs$",
            says="holds {name} of {got} micro-batches; with this table it holds {right}",
        ),
        sent(
            0.2,
            "sends b·s·h elements a micro-batch and boundary, each way",
            "^(?!recv)",
            hint="a forward's output goes to rank + 1, the gradient of the input to rank − 1, a message for each micro-batch. "
            "`shapes` says what to receive, and gradients of weights stay where they are: nothing else is sent",
        ),
    ),
    cases=_STEPS,
    call="train_step(stage, actions, shapes, inputs, targets, loss_fn)",
    part=True,
    ready=_READY._replace(given=tuple(f"{__name__}.{name}" for name in ("Stage", "Layers", "loss_of", "Kept"))),
    advice=(
        (r"waits in send[^;]*; rank \d waits in send", _BOTH_SEND),
        (r"'NoneType' .*(no len|not subscriptable|not iterable)", "inputs are on rank 0 only, targets on the last rank only"),
        (r"got NoneType|'NoneType' object has no attribute|Invalid function argument|not require grad", _DETACHED),
        (r"made room for", "micro-batch i has shapes[i] at every boundary, there and back"),
    ),
)


class Loops(NamedTuple):
    """p ranks, m micro-batches, v stages a rank."""

    p: int
    m: int
    v: int

    def __str__(self) -> str:
        return f"with p = {self.p}, m = {self.m}, v = {self.v}"


def _interleaved(case: Loops, function: Callable, watch: Watch) -> dict:
    form = 'return a list of triples, the kind, the stage and the micro-batch: [("F", 0, 0), ("F", 0, 1), …, ("B", 2, 0), …]'
    ranks, (p, m, v), one = [], case, Times(F=1, I=1, W=1)
    for rank in range(p):
        call = f"interleaved({p}, {m}, {v}, {rank})"
        with noted(watch, "", call, first=case == (2, 4, 2) and not ranks):
            ranks.append(_actions(function(p, m, v, rank), call, 3, form, 8 * m * v + 64))
    if len(ranks) < p:
        return {}
    schedule = _schedule(ranks, m, looped(p, v))
    swapped = _schedule([[(kind, i, stage) for kind, stage, i in table] for table in ranks], m, looped(p, v))
    found = _facts("", schedule, one)
    late = _facts("", schedule, replace(one, latency=0.5))["the seconds that a rank waits"]
    first = next((stage for kind, stage, _ in ranks[0] if kind == "B"), 0)
    found["whether backwards begin with a rank's first stage"] = first < p
    found["whether stage and micro-batch are swapped"] = bool(_problem(schedule)) and not _problem(swapped)
    return found | {"with messages of 0.5 s, the seconds that a rank waits": late}


interleaved = _table_task(
    name="interleaved",
    points=4,
    run=_interleaved,
    judge=(
        _can_run(0.2, "does each F and each B of each stage once, in an order that can run"),
        at_most(0.3, "waits (p − 1)(f + b) in all, f and b of one stage", "^the seconds"),
        at_most(0.2, "hides messages as far as it can", "messages")._replace(needs=2),
        at_most(0.3, "holds (p − r − 1)·2 + (v − 1)p + 1 activations, no more", "holds")._replace(needs=2),
    ),
    cases=(Loops(2, 4, 2), Loops(4, 8, 2), Loops(3, 6, 3), Loops(4, 4, 2), Loops(8, 16, 2), Loops(1, 3, 2)),
    call="interleaved(p, m, v, rank)",
)

_ROWS, _WIDTHS, _FLOPS = 96, (16, 48, 32, 16), "the FLOPs of {}"


def _stack(seed: int, frozen: bool = False) -> nn.ModuleList:
    """The layers. frozen: with a weight that does not learn, and a layer without a bias."""
    torch.manual_seed(seed)
    layers = nn.ModuleList(nn.Linear(*pair, bias=not (frozen and k == 2), **_EXACT) for k, pair in enumerate(pairwise(_WIDTHS)))
    layers[1].weight.requires_grad_(not frozen)
    return layers


def _split(case: str, kind: Callable, watch: Watch) -> dict:
    if case == "W before I":
        early = kind(list(_stack(53)))
        early.forward(_random(30, _ROWS, _WIDTHS[0]))
        return {"what W raises before I": error_of(early.weight_gradient) or "nothing"}
    found: dict = {}

    def done(step: str, call: Callable, *arguments):
        with WorkCounter() as work, named(f"{step}{'(x)' if step == 'forward' else ''}"):
            result = call(*arguments)
        found[_FLOPS.format(step)] = found.get(_FLOPS.format(step), 0) + work.flops
        return result

    single = case == "one micro-batch"
    stacks = [_stack(51 + watch.seed)] if single else [_stack(52 + watch.seed, frozen=True), _stack(54 + watch.seed)]
    for parameter in () if single else stacks[0].parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    halves = [kind(list(stack)) for stack in (stacks if single else [stacks[0], *stacks])]
    watch.weigh()
    for i, one in enumerate(halves):
        found[f"y of micro-batch {i}"] = _copied(done("forward", one.forward, _random(10 + i + watch.seed, _ROWS, 16)))
    watch.weigh()
    for i, one in enumerate(halves):
        grad = _random(20 + i + watch.seed, _ROWS, 16)
        found[f"the gradient of micro-batch {i}'s x"] = _copied(done("input_gradient", one.input_gradient, grad))
        del grad
    found |= {f"{name} after I": grad for name, grad in _gradients(stacks).items()} if single else {}
    watch.weigh()
    for one in halves:
        done("weight_gradient", one.weight_gradient)
    watch.weigh()
    held = {f"after {step}, what is held": now - watch.held[0] for step, now in zip("FIW", watch.held[1:], strict=True)}
    return found | _gradients(stacks) | (held if single else {})


def _copied(value) -> Tensor | str:
    """So that what is kept here keeps nothing of the learner's alive; in words where it is no tensor."""
    return found.clone() if isinstance(found := plain(value), Tensor) else found


def _gradients(stacks: list[nn.ModuleList]) -> dict[str, Tensor]:
    named = [
        (f"stack {k}, the gradient of layers[{name.replace('.', '].')}", p)
        for k, stack in enumerate(stacks)
        for name, p in stack.named_parameters()
    ]
    return {name: _gradient(p) for name, p in named}


split = _table_task(
    name="Split",
    points=4,
    run=_split,
    judge=(
        values(0.2, "computes as autograd does, weights in W only", "gradient of|^y", alone=True),
        facts(0.4, "I does half of the products, W the other half", "FLOPs", tolerance=0.05),
        at_most(
            0.3,
            "keeps what is needed for what comes, no more",
            "held",
            room=2048,
            says="{name} more than before F is {got}; right is {right}",
            unit=lambda count: size(round(count)),
        )._replace(needs=1),
        facts(0.1, "refuses W before I", "before I"),
    ),
    cases=("one micro-batch", "W before I", "several micro-batches and a frozen weight"),
    call="Split(layers)",
    a_class=True,
)


class Cap(NamedTuple):
    """p ranks, m micro-batches, at most cap activations a rank; seconds of F, I and W."""

    p: int
    m: int
    cap: int
    F: int = 1
    I: int = 1  # noqa: E741 the field's name of it
    W: int = 1

    def __str__(self) -> str:
        times = "" if self.F == self.I == self.W else f", F, I, W = {self.F}, {self.I}, {self.W} s"
        return f"with p = {self.p}, m = {self.m}, cap = {self.cap}{times}"


def _under_a_cap(case: Cap, function: Callable, watch: Watch) -> dict:
    form = 'return a list of p tables, one a rank, each a list of pairs: [[("F", 0), ("I", 0), ("W", 0), …], …]'
    call = f"under_a_cap({case.p}, {case.m}, {case.cap}, times)"
    with noted(watch, "", call, first=case[:3] == (4, 8, 4), patient=True):
        ranks = items(function(*case[:3], {"F": case.F, "I": case.I, "W": case.W}), f"what {call} returned", form, case.p)
        if len(ranks) < case.p:
            raise Stopped(f"{call} returned {len(ranks)} table{'s' * (len(ranks) != 1)}", form)
        tables = [_actions(table, f"{call}[{rank}]", 2, form, 12 * case.m + 64) for rank, table in enumerate(ranks)]
        kinds = ["".join(kind for kind, _ in table) for table in tables]
        late = max(0, kinds[-1].partition("W")[0].count("I") - 1)  # by how many I the last rank's first W follows its own
        traits = {
            "trait: a whole B": "B" in "".join(kinds),
            "trait: rank 0 begins with one F": kinds[0][1:2] in ("B", "I"),
            "trait: W comes too soon": late < case.p - 1,
            "trait: no deeper warm-up": case.cap >= 2 * case.p - 1 and len(kinds[0]) - len(kinds[0].lstrip("F")) <= case.p,
        }
        schedule = _schedule(tables, case.m, one_stage_a_rank(case.p))
        return traits | _facts("", schedule, Times(case.F, case.I, case.W), case.cap)
    return {}


def _keeps(low: bool) -> Callable[[Trial, Right], Verdict]:
    judge = _can_run(0, "")
    return lambda trial, right: judge.verdict(trial, right) if (trial.case.cap < trial.case.p) == low else Verdict(True)


def _waits(share: float, what: str, paper: str, from_cap: Callable[[int], int], strictly: bool = False) -> Judge:
    """At a cap of from_cap(p) and above, the waiting is that of the paper's schedule at most; strictly: or less."""

    def verdict(trial: Trial, right: Right) -> Verdict:
        case: Cap = trial.case
        if case.cap < from_cap(case.p) or case.m < max(case.p, theory.fewest(paper, case.p)) or case.p == 1:
            return Verdict(True)
        if (got := trial.seen[0].results.get("the seconds that a rank waits")) is None:
            return Verdict(None, "the table cannot run, or not within the cap")
        bound = theory.bubble(paper, case.p, case.m, F=case.F, B=case.I + case.W, W=case.W)
        if got < bound or (got == bound and not strictly):
            return Verdict(True)
        return Verdict(False, f"a rank waits {got:g} s; {paper.upper()} {bound:g} s")

    return by(share, what, verdict, lambda seen: {name: value for name, value in seen.results.items() if "trait" in name})


under_a_cap = _table_task(
    name="under_a_cap",
    points=5,
    run=_under_a_cap,
    judge=(
        by(0.1, "can run, and keeps to a cap of p or more", _keeps(low=False)),
        _waits(0.25, "with a cap of p, waits less than 1F1B", "1f1b", lambda p: p, strictly=True),
        _waits(0.3, "with a cap of p, waits no longer than ZB-H1", "zb-h1", lambda p: p),
        _waits(0.25, "with a cap of 2p − 1, waits no longer than ZB-H2", "zb-h2", lambda p: 2 * p - 1),
        by(0.1, "can run, and keeps to a cap below p", _keeps(low=True)),
    ),
    cases=(
        *(Cap(4, 8, 4), Cap(4, 12, 7), Cap(4, 8, 5), Cap(4, 6, 2), Cap(8, 16, 8, 10, 11, 9), Cap(8, 24, 15, 10, 11, 9)),
        *(Cap(3, 2, 3), Cap(1, 3, 1)),
    ),
    call="under_a_cap(p, m, cap, times)",
)

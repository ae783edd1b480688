"""Functions in chains, a step and real layers, for the checks of exercise 04_checkpointing to run, and to note what happens.

The exercise also gives layers as numbers, and the most that a choice of them holds.
"""

from collections.abc import Callable
from functools import partial
from itertools import count
from numbers import Integral
from random import Random
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from manyranks.given.numbers import EXACT, normal, seed_of, uneven
from manyranks.measure.flops import WorkCounter
from manyranks.measure.journal import Stopped
from manyranks.measure.memory import SavedBytes
from manyranks.measure.watch import Event, Watch, gradients
from manyranks.parallel import checkpointing as library

ROWS, HIDDEN = 192, 24
_SIZE = 8 * ROWS * HIDDEN  # bytes of an input
_SMALL = 20_480  # bytes of random states, 5 kB each, and of losses
_MANY = 60  # calls of one function
_LEAF = "what leaves your function has to be a result of autograd's: of apply, for a torch.autograd.Function"
_ANCHOR = (
    "x needs no gradient here, but parameters do; apply gives a result that needs one only if a tensor among its arguments "
    "does: give it one more, torch.empty(0, requires_grad=True)"
)


class Layer(nn.Module):
    """A feed-forward layer with dropout, whose second product is frozen; keeps 9 times its input."""

    def __init__(self, hidden: int, frozen: bool):
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden, **EXACT).requires_grad_(not frozen)
        self.down = nn.Linear(4 * hidden, hidden, bias=False, **EXACT).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.dropout(torch.tanh(self.up(x)), 0.3)) * 1.5


def core(qkv: Tensor) -> Tensor:
    """Attention's core, [S, 3H] -> [S, H], with two heads and dropout."""
    q_ASD, k_ATD, v_ATD = (part.view(len(part), 2, -1).transpose(0, 1) for part in qkv.chunk(3, 1))
    scores_AST = torch.softmax(q_ASD @ k_ATD.transpose(1, 2), -1)
    return (nn.functional.dropout(scores_AST, 0.2) @ v_ATD).transpose(0, 1).flatten(1)


class Function:
    """A function that marks its calls with its name, and has nothing else: no parameters().

    seen: of each call, a number for its input and one for the random state.
    """

    def __init__(self, name: str, function: Callable, watch: Watch):
        self._name, self._function, self._watch, self.seen = name, function, watch, []

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.seen) == _MANY:
            raise Stopped(f"{self._name} was called {_MANY} times", "does a loop not end?")
        if not isinstance(x, Tensor):
            raise Stopped(f"{self._name} was called with {type(x).__name__}", "it takes x: a tensor, and nothing else")
        self._watch.mark(self._name)
        self.seen.append([crc32(t.detach().contiguous().numpy().tobytes()) for t in (x, torch.get_rng_state())])
        return self._function(x)


class Checkpoint:
    """The checkpoint that tasks 2 and 3 hand out."""

    def __call__(self, function: Callable, x: Tensor) -> Tensor:
        return library.checkpoint(function, x)


def checked(y: Tensor, x: Tensor, learns: bool = True) -> Tensor:
    """The learner's result. Raises Stopped where it is no tensor, or none that backward would come to."""
    if not isinstance(y, Tensor):
        raise Stopped(f"it returned a {type(y).__name__}", "return what function(x) returns: a tensor")
    if learns and torch.is_grad_enabled() and not y.requires_grad:
        raise Stopped("the result needs no gradient: backward never comes to it", _LEAF if x.requires_grad else _ANCHOR)
    return y


def step(
    watch: Watch,
    forward: Callable,
    functions: list[Function],
    leaves: dict[str, Tensor],
    unit: int = _SIZE,
    lets_go: bool = True,
) -> dict:
    """Runs forward, and backward onto gradients that are there. Notes what comes out, what runs and is sent, what is held.

    unit: bytes to round up to, so that random states make no difference; lets_go: whether what backward leaves counts.
    """
    for leaf in leaves.values():
        leaf.grad = torch.ones_like(leaf) if leaf.requires_grad else None
    before, start = watch.weigh_all(first=True), len(watch.events)
    with watch.peak():
        y = forward()
        found = {"the random numbers drawn after forward": torch.rand(3, **EXACT), "the result": y.detach().clone()}
        went = watch.events[start:]
        start = len(watch.events)
        loss, ours = (y * uneven(y.shape)).sum(), y.nbytes
        del y
        kept = _in_units(watch.weigh_all() - before - 2 * ours, unit)
        loss.backward()
    came, held = watch.events[start:], _in_units(watch.weigh_all() - before - ours, unit) if lets_go else 0
    with_gathers = [event._replace(kind="mark", what="a gather") if event.kind == "call" else event for event in came]
    found |= gradients(leaves)
    runs = [function.seen[:2] for function in functions if len(function.seen) > 1]
    return found | {
        "the random numbers drawn after backward": torch.rand(3, **EXACT),
        "what forward runs": _said(went, "mark"),
        "what forward sends": _said(went, "call"),
        "what backward runs": _said(with_gathers, "mark"),
        "what backward sends": _said(came, "call"),
        "what is kept after forward": kept,
        "what is held after backward": held,
        "what is held at the fullest": _in_units(watch.peak_bytes - before, unit),
        "another x": any(first[0] != second[0] for first, second in runs),
        "another state": any(first[1] != second[1] for first, second in runs),
    }


def _in_units(more: int, unit: int) -> int:
    """Bytes, in whole units, but for small things."""
    return max(0, -(-(more - _SMALL) // unit)) * unit


def _said(events: list[Event], kind: str) -> str:
    own = (event for event in events if event.kind == kind)
    return ", ".join(f"{what} of {count:,} bytes" if kind == "call" else what for _, what, count in own) or "nothing"


class Scene(NamedTuple):
    """A chain of checkpoints. layers: "L" for one that learns, "F" for a frozen one; given: whether x is the caller's and needs
    no gradient; head: whether a product follows; off: whether no_grad comes first; changes: whether the function does;
    near: whether neighbors among 4 ranks are a pair; turns: whether backward begins with the first of two; twice: whether two
    calls of the function come before their backwards."""

    note: str
    layers: str = "L"
    given: bool = False
    head: bool = False
    off: bool = False
    changes: bool = False
    near: bool = True
    rows: tuple[int, ...] = (ROWS,)
    hidden: int = HIDDEN
    turns: bool = False
    twice: bool = False


Begun = tuple[Scene, int, nn.ModuleList, nn.Module, Tensor]  # the case, where random numbers begin, a model, its head, x


def begun(case: Scene, seed: int, group: int = 0) -> Begun:
    """Draws what a rank gets; x has its last dimension first in memory. group: the number of the rank's group."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed_of(seed, group))
        model = nn.ModuleList(Layer(case.hidden, kind == "F") for kind in case.layers)
        head = nn.Linear(case.hidden, 2, **EXACT) if case.head else nn.Identity()
    if len(model) > 2:
        model[2].up.weight = model[0].up.weight
    return case, seed_of(seed, "begins", group), model, head, normal((case.hidden, *case.rows), seed, "x", group)


def train(given: Begun, answer: Callable, watch: Watch, group: tuple = (), unit: int = _SIZE) -> dict:
    """Runs a step of a chain. group: what the answer gets in addition to function and x."""
    case, begins, model, head, turned = given
    torch.manual_seed(begins)
    scale = torch.full((case.hidden,), 1.25, requires_grad="F" not in case.layers, **EXACT)
    factors, x = count(1), turned.movedim(0, -1).requires_grad_(not case.given)
    bodies = [lambda x, layer=layer: layer(x) * (scale * (next(factors) if case.changes else 1)) for layer in model]
    names = ("first", "second", "third") if len(model) > 1 else ("function",)
    functions = [Function(name, body, watch) for name, body in zip(names, bodies, strict=False)]
    found: dict = {}

    def forward() -> Tensor:
        h = x if case.given else x * 2
        if case.off:
            before = watch.weigh_all(first=True)
            with torch.no_grad():
                y = checked(answer(functions[0], h, *group), h)
            found["what is kept under no_grad"] = _in_units(watch.weigh_all() - before - y.nbytes, unit)
            found["the result under no_grad"] = (uneven((len(y), 1)) * y).sum(0)  # a copy of all would be held
            found["whether the result under no_grad needs a gradient"] = y.requires_grad
            del y
        if case.turns:
            y, h = (checked(answer(function, x * k, *group), x) for k, function in enumerate(functions, 2))
            (y * uneven(y.shape)).sum().backward()
            return h
        for function, kind in zip(functions, case.layers, strict=True):
            h = checked(answer(function, h, *group), h, kind == "L")
        return head(h)

    parameters = dict(model.named_parameters()) | dict(head.named_parameters("head"))
    state = torch.get_rng_state()
    leaves = {"x": x, "a tensor in the function": scale} | parameters
    found |= step(watch, forward, functions, leaves, unit, not case.given)  # a leaf in x's place may hold its gradient
    if case.twice:
        found |= watch.overlapping_calls(partial(answer, functions[0]), ({"x": x}, group), ({"x": x[1:] / 2}, group))
    if case.given:
        found |= {"whether x needs a gradient": x.requires_grad, "x": x.detach().clone()}
    if "F" in case.layers:  # some come back to the frozen one, and some do not
        del found["what backward runs"], found["what backward sends"]
    if not case.changes:
        return found
    other = x.detach().requires_grad_()
    torch.set_rng_state(state)
    (model[0](other * 2) * scale * uneven(x.shape)).sum().backward()
    first = torch.allclose(x.grad, 1 + other.grad)
    judged = {name: found[name] for name in ("what forward runs", "what backward runs")}
    return judged | {"what gives the gradient of x": "forward's run" if first else "backward's run"}


# Of the task choose


class Cost(NamedTuple):
    """A layer's. forward: FLOPs; input: bytes of its input.

    saved: bytes that it keeps for backward, its input among them.
    """

    forward: int
    input: int
    saved: int


def peak(layers, chosen):
    """The most bytes held at once, where the layers with these numbers are checkpointed."""
    most = held = 0
    for k, layer in enumerate(layers):
        most = max(most, held + layer.saved)  # backward of layer k
        held += layer.input if k in chosen else layer.saved
    return most


class Shape(NamedTuple):
    """A real layer with 32 rows: columns of its input, inside and of its output; how many activations it keeps inside."""

    input: int
    inside: int
    output: int
    times: int

    @property
    def cost(self) -> Cost:
        """Returns what the learner is told of it."""
        kept = self.input + self.inside * self.times
        return Cost(64 * self.inside * (self.input + self.output), 256 * self.input, 256 * kept)


def measured(shapes: tuple[Shape, ...], chosen: list[int]) -> tuple[int, int]:
    """FLOPs of a step of real layers, and the most bytes saved for backward."""
    held: list[int] = []
    x = torch.randn(32, shapes[0].input, requires_grad=True, **EXACT)
    linear = partial(nn.Linear, bias=False, **EXACT)
    model = [nn.Sequential(linear(s.input, s.inside), *[nn.Tanh()] * s.times, linear(s.inside, s.output)) for s in shapes]
    with WorkCounter() as work, SavedBytes(nn.ModuleList(model).parameters()) as saved:
        for k, layer in enumerate(model):
            layer.register_forward_hook(lambda *_: held.append(saved.bytes))
            x = library.checkpoint(layer, x) if k in chosen else layer(x)
        x.sum().backward()
    return work.flops, max(held)


class Chain(NamedTuple):
    """A question for choose. shapes: of real layers, none where they are not run."""

    note: str
    layers: list[Cost]
    budget: int
    shapes: tuple[Shape, ...] = ()

    def __str__(self) -> str:
        return f"with {self.note}"

    @property
    def nothing_fits(self) -> bool:
        """Returns whether the budget is too small even with every layer checkpointed."""
        return peak(self.layers, range(len(self.layers))) > self.budget


def drawn(random: Random) -> list[Chain]:
    """Chains that nobody has seen, with a budget between the least and everything; two are too long to try all choices.

    In the last one all layers are about equally worth choosing, so that guessing and improving does not find the best.
    """
    chains = [
        [Cost(random.randint(7, 60), random.randint(8, 15), random.randint(20, 60)) for _ in range(n)] for n in (12, 11, 10, 40)
    ]
    sizes = ((random.randint(8, 15), random.randint(100, 600)) for _ in range(24))
    chains.append([Cost(10 * (saved - given) + random.randint(0, 9), given, saved) for given, saved in sizes])
    budgets = [(2 * peak(layers, range(len(layers))) + peak(layers, ())) // 3 for layers in chains]
    return [Chain(f"{len(layers)} layers", layers, budget) for layers, budget in zip(chains, budgets, strict=True)]


def _real(note: str, part: float, shapes: tuple[Shape, ...]) -> Chain:
    """Sets the budget to this part of what all layers save; 0: the least that fits; −1: a byte less."""
    layers = [shape.cost for shape in shapes]
    least, most = (peak(layers, chosen) for chosen in (range(len(layers)), ()))
    return Chain(note, layers, int(most * part) if part > 0 else least + int(part), shapes)


_ROWS = (16, 24, 16, 1), (16, 40, 24, 3), (24, 16, 8, 4), (8, 48, 40, 2), (40, 32, 16, 1), (16, 20, 12, 6), (12, 30, 12, 2)
_UNEQUAL = tuple(Shape(*row) for row in _ROWS)
_WIDE = Shape(8, 16, 48, 1), Shape(48, 40, 8, 2), Shape(8, 24, 32, 5), Shape(32, 16, 8, 3), Shape(8, 64, 8, 2)
_COSTS = [Cost(7 + k * 37 % 53, 8 + k * 5 % 7, 20 + k * 29 % 41) for k in range(40)]
CHAINS = (
    _real("7 layers", 5 / 8, _UNEQUAL),
    _real("a budget in which nothing fits", -1, _WIDE),
    Chain("40 layers", _COSTS, 800),  # the third of seven: who tries all choices has a part of the points, a small one
    _real("7 layers and less", 3 / 5, _UNEQUAL),
    _real("5 layers", 3 / 4, _WIDE),
    _real("a budget for everything", 1, _WIDE),
    _real("the least budget", 0, _WIDE),
)

_NUMBERS = (
    "return the numbers of the layers to checkpoint, counted from 0, as a set or a list: {0, 2}; not a list of yes and no"
)
_OF_A_CHOICE = ("what need not be chosen", "the FLOPs that run again")


def weighed(case: Chain, did: str, chosen: object) -> dict:
    """Returns what is judged of the layers that a rank has chosen, and of what choose did."""
    if case.nothing_fits:
        return {"what choose does": did}
    if chosen is None:
        return {"the choice": f"missing, for choose {did}"} | dict.fromkeys(_OF_A_CHOICE)
    chosen = numbers(chosen, len(case.layers))
    again, held = sum(case.layers[k].forward for k in chosen), peak(case.layers, chosen)
    if case.shapes:
        flops, held = measured(case.shapes, chosen)
        again = flops - 3 * sum(layer.forward for layer in case.layers)  # forward, and backward's two products for each
    if held > case.budget:
        return {"the choice": f"{held - case.budget:,} bytes above the budget"} | dict.fromkeys(_OF_A_CHOICE)
    spare = [k for k in chosen if peak(case.layers, {*chosen} - {k}) <= case.budget]
    found = f"{spare} of {chosen}" if spare else "nothing", again
    return {"the choice": "within the budget"} | dict(zip(_OF_A_CHOICE, found, strict=True))


def numbers(chosen, n: int) -> list[int]:
    """Returns the learner's numbers of layers, sorted. Raises Stopped for others."""
    numbers = list(chosen) if hasattr(chosen, "__iter__") else [None]
    if any(isinstance(k, bool) or not isinstance(k, Integral) or not 0 <= k < n for k in numbers):
        raise Stopped(f"choose returned {chosen!r:.60} for {n} layers", _NUMBERS)
    return sorted(set(map(int, numbers)))

"""Checks of exercise 07_context: blocks are merged and a sequence is laid out in one process; rings run on 2, 3 and 4 ranks."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manyranks.given.context import HIDDEN, LARGE, ORDINARY, Case, Drawn, Helpers, Parts, layouts, parts_of
from manyranks.grade.check import Task
from manyranks.grade.judges import at_most, by_phase, calls, facts, sent, values
from manyranks.grade.learner import Allowed, error_of, on_ctx, pair
from manyranks.grade.trial import Sent
from manyranks.measure.fingerprints import form_of, size
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.watch import Watch, gradient

_CHANGED = "what was changed of what is given"
_COPY = "leave what you are given as it is: no operation with _ at its end, and no +=, on a tensor of the caller's"
_ADVICE = (
    ("modified by an inplace operation|a leaf Variable that requires grad", _COPY),
    ("does not require grad and does not have", "backward finds no way back: autograd doesn't see messages"),
)


def _handing(*names: str) -> Allowed:
    return Allowed(tuple(f"{Helpers.__module__}.Helpers.{name}" for name in names))


_task = partial(Task, "07_context", part=True, common=_ADVICE)


def _changed(given: dict[str, Tensor], before: dict[str, Tensor]) -> str:
    return next((name for name, one in given.items() if not one.equal(before[name])), "nothing")


def _tensor(value: Any, shape: torch.Size, what: str, hint: str) -> Tensor:
    """A copy of the learner's. Raises Stopped where it is no tensor of this shape."""
    if not isinstance(value, Tensor):
        raise Stopped(f"{what} is {kind_of(value)}, not a tensor", hint)
    if value.shape != shape:
        raise Stopped(f"{what} has the shape {list(value.shape)}; right is {list(shape)}", hint)
    return value.detach().clone()


def _pair(value: Any, shape: torch.Size, call: str) -> tuple[Tensor, Tensor]:
    hint = "it returns one pair, (o_SBAD, lse_SBA)"
    o, lse = pair(value, call, hint)
    return _tensor(o, shape, "o", hint), _tensor(lse, shape[:-1], "lse", hint)


# Task 1: parts of a result


def _merge(own: tuple[str, dict[str, tuple[Tensor, Tensor]]], function: Callable, watch: Watch) -> dict:
    kind, parts = own
    before = deepcopy(parts)
    o, lse = _pair(function([*parts.values()]), parts["part 0"][0].shape, "merge")
    given, they = (
        {f"{x} of {name}": one for name, p in of.items() for x, one in zip(("o", "lse"), p, strict=True)}
        for of in (parts, before)
    )
    return {f"o of {kind}": o, f"lse of {kind}": lse, f"{_CHANGED}, {kind}": _changed(given, they)}


_FORMULA = "o = Σ wᵢ·oᵢ ÷ Σ wᵢ and lse = m + log Σ wᵢ, with wᵢ = exp(lseᵢ − m) and m the largest lse, for each query and head"
_SAFE = "exp(1000) is no float64: subtract the largest lse of each query and head before exp, and add it to the logarithm"
_NOTHING = (
    "a part whose lse is −∞ has the weight 0. Where all have it, −∞ − (−∞) is NaN: subtract a finite number there. The weights "
    "are then 0, the logarithm of their sum is −∞, and o is 0"
)
_kinds = partial(values, alone=True, part=True)
_MERGED = (
    _kinds(0.4, "merges one part, two and five", ORDINARY, hint=_FORMULA),
    _kinds(0.35, "is safe for large scores", LARGE, hint=_SAFE),
    _kinds(0.25, "is safe for queries that see nothing", HIDDEN, hint=_NOTHING),
)
_PARTS = *(Parts(n, ORDINARY) for n in (2, 5, 1)), Parts(3, LARGE), Parts(3, HIDDEN), Parts(1, HIDDEN)
_PAIRS = (
    "unpack|out of range|must match the size|not supported between|index",
    "parts is a list of pairs, o_SBAD and lse_SBA: lse[..., None] has a place for D",
)
_DRAWN = {"make": lambda case, *where: (case.kind, case.drawn(*where))}
merge = _task("merge(parts)", 3, _merge, _MERGED, _PARTS, advice=(_PAIRS,), worlds=(1,), **_DRAWN)

# Task 2: a layout

_INTEGERS = "int64 of the shape [seq / n]: one position for each of the rank's tokens"
_DRAW = "rank r has chunk N + r of 2N and then chunk N − 1 − r; draw it for N = 3"


def _positions(own: tuple[dict, tuple], function: Callable, watch: Watch) -> dict:
    found, (chunks, odds) = {}, own
    for n, chunk in chunks.items():
        for rank in range(n):
            got = function(2 * n * chunk, rank, n)
            right = torch.empty(2 * chunk, dtype=torch.int64)
            if not isinstance(got, Tensor) or form_of(got) != form_of(right):
                what = form_of(got) if isinstance(got, Tensor) else kind_of(got)
                raise Stopped(f"positions returned {what}; right is a tensor, {form_of(right)}", _INTEGERS)
            found[f"positions of rank {rank} of {n}, {2 * n * chunk} tokens"] = got
    return found | {f"what positions{odd} raises": error_of(function, *odd) or "nothing" for odd in odds}


_REFUSES = "there are 2N chunks of one length: raise a ValueError if 2n doesn't divide seq, and no other error"
_PLACED = (
    values(0.75, "the positions of each rank's tokens are right", "^positions", alone=True, hint=_DRAW),
    facts(0.25, "refuses a length that cannot be cut", "raises", _REFUSES, each_world=True),
)
_SIZES = ("of 1 to 5 ranks",)
_LAID = {"worlds": (1,), "make": lambda case, rank, n, seed: layouts(seed)}
positions = _task("positions(seq, rank, n)", 2, _positions, _PLACED, _SIZES, **_LAID)


def _unshard(own: list[dict[str, Tensor]], function: Callable, watch: Watch) -> dict:
    found, changed = {}, []
    for given in own:
        n, (length, *rest) = len(given), given["part 0"].shape
        shape, hint = torch.Size((n * length, *rest)), "it returns the whole sequence, [N·S, …]"
        before = deepcopy(given)
        got = function([*given.values()])
        found[f"the whole of {n} part{'s' if n > 1 else ''}"] = _tensor(got, shape, "what unshard returned", hint)
        changed.append(_changed(given, before))
    return found | {_CHANGED: next((name for name in changed if name != "nothing"), "nothing")}


_IN_ORDER = values(1.0, "the whole sequence is in order", alone=True, hint=_DRAW)
_ANY = (
    "IndexError|must match|mismatch|not enough values|expand",
    "parts may be any tensors whose first dimension is the sequence, as many as there are ranks",
)
unshard = _task("unshard(parts)", 2, _unshard, (_IN_ORDER,), _SIZES, advice=(_ANY,), worlds=(1,), make=parts_of)

# Task 3: the ring, forward

_FORWARD, _BACKWARD = "forward", "backward"  # what a mark divides


def _ring_forward(own: Drawn, function: Callable, watch: Watch) -> dict:
    case, given, *_ = own
    before = {name: one.clone() for name, one in given.items()}
    q, k, v, *places = given.values()
    helpers = Helpers(watch, [*places], case.weighs)
    watch.weigh()
    o, lse = _pair(function(q, k, v, places, helpers.attend, helpers.merge), q.shape, "ring_forward")
    found = {"o": o, "lse": lse, _CHANGED: _changed(given, before)}
    return found | helpers.work(case.n) | helpers.memory(case)


_MESSAGES = "that's no ring: blocks go from rank to rank with isend and irecv, one at a time, and nothing else is sent"
_SUMS = (
    "a sum over ranks adds what belongs to different tokens: K, V, and their gradients go from rank to rank, by isend and irecv"
)
_LINE = "a ring needs no barrier: a rank that waits for what it receives waits long enough. Leave it out"
_INSTEAD = dict.fromkeys(("all_gather", "broadcast", "all_to_all", "gather"), _MESSAGES) | {"barrier": _LINE}
_INSTEAD |= dict.fromkeys(("all_reduce", "reduce", "reduce_scatter"), _SUMS)
_TO = "K and V go together in one message, N − 1 times, to rank r − 1, modulo N; what came is passed on"
_LATE = (
    "start to send and to receive the next block before you compute with this one, and wait only when all pairs of chunks of "
    "this block are done: isend, irecv, compute, wait"
)
_HIDDEN_PAIR = (
    "a rank's tokens are two chunks: if the first key's position is larger than the last query's, no query of "
    "this pair of chunks sees any key. Leave the pair out"
)
_KEEP = "hold two blocks, the current one and the next, and one result: merge each part into it as it comes"
_HELD = "{got} {name}; right is {right}"
_where = partial(facts, what="computes while the next block is on its way", names="^block ", hint=_LATE)
_SCORES = "computed {got} {name}; {right} are enough"
_least = at_most(
    0.1, "computes no pair of chunks in which nothing is seen", "^scores", _HIDDEN_PAIR, says=_SCORES, unit="{:,}".format
)


def _grouped(n: int) -> tuple[Case, ...]:
    """Grouped heads and tensors that are not contiguous; chunks of one token and large scores."""
    return Case(n, 3, 2, 4, 2, 5, transposed=True), Case(n, 1, 1, 3, 3, 4, strong=300.0)


def _and_long(n: int) -> tuple[Case, ...]:
    """Returns the grouped cases and, on four ranks, one whose blocks can be told from what is small."""
    return _grouped(n) + ((Case(4, 4, 1, 2, 2, 32, weighs=True),) if n == 4 else ())


_TURNED = (
    values(0.35, "output and log-sum-exp are right", f"^o$|^lse$|{_CHANGED}"),
    sent(0.3, "sends K and V N − 1 times to rank r − 1, and nothing else", "^(?!recv)", hint=_TO, instead=_INSTEAD),
    _where(0.15),
    _least,
    at_most(0.1, "holds two blocks and one result", "^parts|^results|^blocks", _KEEP, 1.25, _HELD, "{:.2g}".format, 1),
)
_HALVES = (
    ("has no attribute 'wait'|'NoneType' object is not subscriptable", "after the last hop there is nothing to wait for"),
    ("must match the size|size of tensor", "cut queries, keys, values, and positions into the same two halves"),
)
_EACH_HOP = "attend(q, k, v, positions[r], positions[(r + hop) % N]), or halves of these, merged over N hops"
_CALL = "ring_forward(q_SBAD, k_SBGD, v_SBGD, positions, attend, merge)"
ring_forward = _task(
    *(_CALL, 6, _ring_forward, _TURNED, _and_long),
    **{"advice": _HALVES, "unexplained": _EACH_HOP, "allowed": _handing("attend", "merge"), "make": Case.drawn},
)

# Task 4: the ring, backward


def _gradients(leaves: list[Tensor]) -> dict[str, Tensor]:
    grads = [gradient(leaf) for leaf in leaves]
    return dict(zip(("the gradient of q", "the gradient of k", "the gradient of v"), grads, strict=True))


def _ring(rank: Drawn, kind: Any, watch: Watch) -> dict:
    if not (isinstance(kind, type) and issubclass(kind, torch.autograd.Function)):
        what = "a class of another kind" if isinstance(kind, type) else f"a {type(kind).__name__}"
        raise Stopped(f"Ring is {what}", "it is a class derived from torch.autograd.Function, with two static methods")
    case, given, do, twice = rank
    given["the gradient of o"] = do
    leaves = [given[name].requires_grad_() for name in "qkv"]
    before, places = {name: one.detach().clone() for name, one in given.items()}, [*given.values()][3:-1]
    helpers, own = Helpers(watch, [*places]), [leaf.clone() for leaf in leaves]  # which forward keeps, or nobody
    watch.weigh()
    y = kind.apply(*own, [*places], helpers.ring, helpers.attend_backward)
    found = {"the result": _tensor(y, leaves[0].shape, "what forward returned", "forward calls ring, and returns o")}
    if not y.requires_grad:
        raise Stopped("the result has no graph", "forward returns o as ring gave it, and the class is called by apply")
    given |= dict(zip("qkv", own, strict=True)) if not case.strong > 1 else {}
    del own
    watch.weigh()
    watch.mark(_BACKWARD)
    helpers.begin()
    y.backward(do)
    found |= _gradients(leaves) | {_CHANGED: _changed(given, before)} | helpers.work(case.n, 2)
    if case.strong > 1:
        found["what forward keeps"] = watch.held[1] - watch.held[0] + case.result + case.block
    elif twice:  # the second call has twice as many tokens
        theirs = [(2 * at[:, None] + torch.arange(2)).flatten() for at in places]
        named, more = dict(zip("qkv", leaves, strict=True)), (helpers.ring, helpers.attend_backward)
        others = {name: leaf.repeat_interleave(2, 0) for name, leaf in named.items()}
        found |= watch.overlapping_calls(kind.apply, (named, (places, *more)), (others, (theirs, *more)))
    return found


_HOME = (
    "K and V, and then dK and dV together, go to rank r − 1: N − 1 messages each. A rank's part for its own block stays at home"
)
_SAVES = (
    "keep this rank's q, k, v, o, and lse, with ctx.save_for_backward, and nothing else: no copies, and no block of another "
    "rank. The blocks go round again in backward"
)
_GO_HOME = sent(0.25, "sends K and V and then their gradients, N − 1 times each", "^(?!recv)", hint=_HOME, instead=_INSTEAD)
_RETURNED = (
    values(0.45, "the gradients of q, k and v are right", f"gradient|^the result|{_CHANGED}"),
    by_phase(dict.fromkeys((_FORWARD, _BACKWARD), _GO_HOME)),
    _where(0.1),
    _least,
    at_most(0.1, "keeps q, k, v, o and lse for backward", "keeps", _SAVES, 300, "{name} has {got}; right is {right}", size),
)
_CALLED = on_ctx("Ring.apply(q, k, v, positions, ring, attend_backward)", "do_SBAD")
_PARTS_OF = (
    "dq is a sum over all blocks; dK and dV of a block are sums over all ranks' queries: the owner's part stays at home, the "
    "others' parts come home by message"
)
_CALL = "Ring.apply(q_SBAD, k_SBGD, v_SBGD, positions, ring, attend_backward)"
_OWN = _handing("ring", "attend_backward")
_MORE = {"unexplained": _PARTS_OF, "allowed": _OWN, "make": Case.drawn}
ring = _task(_CALL, 6, _ring, _RETURNED, _grouped, advice=_CALLED, **_MORE)

# Task 5: all-to-alls


def _ulysses(own: Drawn, function: Callable, watch: Watch) -> dict:
    _, given, do, _ = own
    given["the gradient of o"] = do
    leaves = [given[name].requires_grad_() for name in "qkv"]
    before, places = {name: one.detach().clone() for name, one in given.items()}, [*given.values()][3:-1]
    y = function(*leaves, [*places], Helpers(watch, places).attention)
    found = _tensor(y, leaves[0].shape, "what ulysses returned", "it returns o_SBAD: all heads of this rank's tokens")
    watch.mark(_BACKWARD)
    if not y.requires_grad:
        raise Stopped("the result has no graph", f"q, k, and v get no gradients: {_UNSEEN}")
    y.backward(do)
    if watch.scattered:
        return {_OUT: "not contiguous"}
    return {_OUT: "contiguous", "the result": found, **_gradients(leaves), _CHANGED: _changed(given, before)}


def _all(made: list[Sent]) -> list[str]:
    """Adds up what each operation is given, however often it is called."""
    kinds = dict.fromkeys((call.op, call.dtype) for call in made if call.op != "recv")
    total = {kind: sum(call.bytes for call in made if (call.op, call.dtype) == kind) for kind in kinds}
    return [f"{op} of {count:,} bytes of {dtype}" for (op, dtype), count in total.items()]


def _dealt(n: int) -> tuple[Case, ...]:
    """Two key/value heads a rank; fewer key/value heads than ranks, and a result whose gradient is not contiguous."""
    return Case(n, 3, 2, 4 * n, 2 * n, 3), Case(n, 1, 1, 3 * n, 2 if n == 4 else 1, 5, transposed=True)


_OUT = "the out of all-to-alls"
_UNSEEN = "autograd doesn't see dist.all_to_all_single. Write a torch.autograd.Function whose backward sends the gradients back"
_YOURSELF = (
    "a ready-made function isn't an answer: call dist.all_to_all_single or dist.all_to_all yourself, in a "
    "torch.autograd.Function whose backward sends the gradients back"
)
_EXCHANGES = (
    "all-to-alls exchange q, k, v, and the output once, and their gradients once: a rank gets A/N query heads and "
    "max(G, N)/N key/value heads of all tokens"
)
_TO_ALL = calls(0.4, "sends by all-to-all, and no more than it must", _all, _EXCHANGES)
_BOTH_WAYS = by_phase(dict.fromkeys((_FORWARD, _BACKWARD), _TO_ALL))
_EXCHANGED = values(0.6, "the result and the gradients of q, k and v are right"), _BOTH_WAYS
_SHAPED = (
    "cannot be split into|don't multiply up|divisible|shape '.*' is invalid",
    "rank r of N gets A/N query heads and max(G, N)/N key/value heads of all T tokens",
)
_STEPS = "q, k, v: send heads to ranks, sort tokens; attention; the output: tokens in the order of ranks, send back, join heads"
_CALL = "ulysses(q_SBAD, k_SBGD, v_SBGD, positions, attention)"
_ATTENTION = _handing("attention")._replace(hint=_YOURSELF)
_MORE = {"unexplained": _STEPS, "allowed": _ATTENTION, "make": Case.drawn}
ulysses = _task(_CALL, 5, _ulysses, _EXCHANGED, _dealt, advice=(_SHAPED,), **_MORE)

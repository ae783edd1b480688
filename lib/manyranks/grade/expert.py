"""Checks of exercise 08_expert: experts are dealt in turn, choices come first, and ranks have different numbers of tokens.

x_TH: T tokens, H hidden size; experts_KT: K choices of each; E experts, L of them on each of N ranks; S rows leave a rank, R
arrive. A task that needs the answer to another one gets an exchange of the check's, and a way that is drawn.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyranks.given.expert import Case
from manyranks.given.numbers import normal, seed_of, uneven
from manyranks.grade.check import Task
from manyranks.grade.judges import calls, facts, silent, values
from manyranks.grade.learner import NOTHING_GIVEN, Allowed, items, on_ctx, plain, refuse_class, whole
from manyranks.grade.trial import Sent
from manyranks.measure.fingerprints import same
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.watch import Compared, Watch, gradients
from manyranks.parallel.expert import dispatch as ready

_ALLOWED = Allowed((f"{__name__}._handed",))
_GRAPH = "no detach, no no_grad; rows travel by exchange, which all ranks call: what it returns has a graph, even without rows"
_SPLITS = "all_to_all_single(out, x, received, sent): received stands before sent; on the way back they swap"
_TURNED = "those are the numbers of the other list: sent is how many rows go to each rank, received how many come from each"
_ADVICE = (
    ("[Ss]plit sizes|inLengthPerRank|outLength|in->size == out->size|Number of (tensor )?splits", _SPLITS),
    ("::alltoall: invalid tensor size", "dist.all_to_all takes parts of one size: dist.all_to_all_single takes sizes"),
    ("Invalid usage of tensors with different dtypes", "out has the dtype of what comes, float64: rows.new_empty(…) makes it"),
    ("because the unspecified dimension size -1", "a rank may have no tokens: no −1 in view or reshape, say each size"),
    ("waits in all_to_all #", "all ranks have to call it, also one without rows; what r sends to s, s has to expect from r"),
    ("could not infer output dtype", "counts are whole numbers: .double() before a mean"),
    *on_ctx("Exchange.apply(rows_SH, sent, received)"),
    ("an incorrect number of gradients", "backward returns three: the rows' gradient, None, None"),
    ("an invalid gradient at index 0", "backward is forward with sent and received swapped"),
    ("(must|has to) be contiguous", "what is sent has to be contiguous, and out: rows.contiguous(), grad.contiguous()"),
)


def _called(function: Callable, given: dict, more: tuple, form: str, names: tuple[str, ...], graph: bool = False) -> dict:
    """Calls the function; returns what it makes of what is given, and gradients that come back from its first float64 result.

    Floating tensors that are given are leaves. names: of results; form: what they are; graph: whether that one must have one.
    """
    for one in given.values():
        if isinstance(one, Tensor) and one.is_floating_point():
            one.requires_grad_()
    before = deepcopy(given)
    found = function(*given.values(), *more)
    found = [found] if len(names) == 1 else found
    if not isinstance(found, tuple | list) or len(found) != len(names):
        raise Stopped(f"what it returned is {kind_of(found)}", form)
    copies = {name: [*one] if isinstance(one, list | tuple) else plain(one) for name, one in zip(names, found, strict=True)}
    copies = {name: one.clone() if isinstance(one, Tensor) else one for name, one in copies.items()}
    floats = [
        (name, one) for name, one in zip(names, found, strict=True) if isinstance(one, Tensor) and one.is_floating_point()
    ]
    if not floats or (graph and not floats[0][1].requires_grad):
        raise Stopped(f"{floats[0][0]} has no graph" if floats else "what it returned has no float64 tensor", _GRAPH)
    if (end := floats[0][1]).requires_grad:
        up, smooth = uneven(end.shape), all(one.is_contiguous() for one in given.values() if isinstance(one, Tensor))
        end.backward(up if smooth else up.T.contiguous().T)
    return copies | _after(given, before)


def _script(names: str, form: str, results: tuple[str, ...]) -> Callable:
    """Calls the function with tensors of these names, and with what comes after them, as it is."""
    given = names.split()
    return lambda own, function, watch: _called(function, dict(zip(given, own, strict=False)), own[len(given) :], form, results)


def _after(given: dict, before: dict) -> dict:
    """Returns whether what was given is as it was before, and its gradients, zeros where there are none."""
    changed = [f"{name} was changed in place" for name, one in given.items() if not same(one, before[name])]
    leaves = {name: one for name, one in given.items() if isinstance(one, Tensor) and one.requires_grad}
    return {"what is given": (changed or ["as it was"])[0], **gradients(leaves)}


def _handed(hint: str) -> Callable:
    """Makes exchange, as task 3 has it. Ranks compare their numbers first, so that none waits for rows that never come."""
    form, compare = "exchange(rows, sent, received): lists of how many rows go to each rank, and come: .tolist()", Compared()

    def exchange(rows, sent, received) -> Tensor:
        lists = [
            [whole(one, "a number of rows", form) for one in items(value, "a list", form, 99)] for value in (sent, received)
        ]
        if sum(lists[0]) != len(rows):
            found = f"exchange was given {len(rows)} rows, and sent = {lists[0]}"
            raise Stopped(found, _TURNED if sum(lists[1]) == len(rows) else hint)
        compare(*lists, f"{_TURNED[:-1]}? {hint}" if lists[0] == lists[1] else hint)
        return ready.exchange(rows, *lists, None)

    return exchange


_task = partial(Task, "08_expert", part=True, allowed=_ALLOWED, common=_ADVICE)

_PAIR = "it returns (experts_KT, gates_KT), two tensors [K, T]: choices come first; the experts are int64, the gates float64"
_OF_PAIR = "experts_KT", "gates_KT"


def _routed(case: Case, rank: int, n: int, seed: int) -> tuple:
    logits_TE, bias_E = normal((*case.tokens, case.E), seed, case), 0.4 * normal((case.E,), seed, case, "bias") + case.liked
    return logits_TE, bias_E, case.K, case.n, case.limit


_LOGITS = "the gates are made of the logits, without detach or no_grad, also in their sum; the bias only chooses"
_ROUTERS = Case((60,), 12, 3, n=4, limit=2), Case((5,), 8, 2, n=4, limit=2, liked=-1000), Case((6,), 9, 3, n=3, limit=1)
route = _task(
    *("route(logits_TE, bias_E, top_k, n, limit)", 3, _script("logits_TE bias_E", _PAIR, _OF_PAIR)),
    (
        values(0.4, "chooses the right experts", "^experts|given", alone=True),
        facts(0.3, "the gates are right", "^gates|given", "the K chosen experts' scores ÷ their sum, no bias", each_world=True),
        facts(0.3, "the gradients of the logits are right, and the bias has none", "gradient|given", _LOGITS),
    ),
    lambda n: (*_ROUTERS, Case((0,), 8, 2, n=4, limit=2)),
    make=_routed,
    worlds=(1,),
    unexplained="scores = sigmoid(logits); ranks by largest score + bias; the K largest on these; gates = their scores ÷ sum",
)

_KEPT = "a gate that remains is not changed, and its gradient passes: no detach, no no_grad; the others are 0, and have none"
_ITS_OWN = "each rank drops for itself: its own tokens are all that it needs to know"
drop = _task(
    *("drop(experts_KT, gates_KT, experts, factor)", 3, _script("experts_KT gates_KT", _PAIR, _OF_PAIR)),
    (
        values(0.55, "drops the right copies", "^experts|given", alone=True),
        facts(0.3, "the gates and their gradients are right", "gates|given", _KEPT, each_world=True),
        silent(0.15, "asks no other rank", _ITS_OWN, each_world=True),
    ),
    lambda n: (
        Case((16, 18, 13, 11)[:n], 2 * n, 3, factor=3 * n / 16, liked=3),
        Case((11, 0, 6, 13)[:n], n, min(2, n - 1), factor=0.75, liked=1),
    ),
    make=lambda case, rank, n, seed: (*case.mine(rank, seed)[:2], case.E, case.factor),
    unexplained="experts_KT.flatten() in order: a copy that finds C = ⌈factor · T·K / E⌉ of its expert before it is dropped",
)


def _rows(case: Case, rank: int, n: int, seed: int) -> tuple[Tensor, list[int], list[int], bool]:
    """Draws what leaves a rank, how many rows go and come, and whether two calls come before their backwards."""
    *_, goes, comes = case.mine(rank, seed)
    rows_HS = normal((case.H, sum(goes)), seed, "rows", rank)
    return rows_HS.T if case.strided else rows_HS.T.contiguous(), goes, comes, seed > 0


def _exchange(given: tuple[Tensor, list[int], list[int], bool], kind: Any, watch: Watch) -> dict:
    if not (isinstance(kind, type) and issubclass(kind, torch.autograd.Function)):
        raise Stopped("Exchange is no torch.autograd.Function", "write class Exchange(torch.autograd.Function), as it is given")
    refuse_class(kind, NOTHING_GIVEN)
    named = dict(zip(("rows_SH", "sent", "received"), given, strict=False))
    form = "forward returns the rows that arrive, [sum(received), H], those of rank 0 first"
    name = f"with sent = {given[1]} and received = {given[2]}, what forward returned"
    found = _called(kind.apply, named, (), form, (name,), graph=True)
    rows_SH, sent, received, twice = given
    if twice:
        more = {"rows": torch.cat((rows_SH, rows_SH))}, ([2 * one for one in sent], [2 * one for one in received])
        found |= watch.overlapping_calls(kind.apply, ({"rows": rows_SH}, (sent, received)), more)
    return {"the out of each all-to-all": "not contiguous" if watch.scattered else "contiguous"} | found


_ROWS = "one dist.all_to_all_single in forward, of the rows, and one in backward, of their gradients, and nothing else"
exchange = _task(
    *("Exchange.apply(rows_SH, sent, received)", 3, _exchange),
    (
        values(0.6, "the rows and their gradients are right", ""),
        calls(0.4, "sends one all-to-all in each direction, without a row too many", hint=_ROWS),
    ),
    lambda n: (Case((5, 3, 6, 4)[:n], 3 * n, 2, 3), Case((3, 0, 2, 4)[:n], 2 * n, 1, 5, liked=-1000, strided=True)),
    allowed=NOTHING_GIVEN,
    make=_rows,
    unexplained="forward: dist.all_to_all_single(out, rows, received, sent); backward: the same with the two lists swapped",
)


def _traveling(n: int) -> tuple[Case, ...]:
    """Tokens everywhere; dropped copies, and a rank without tokens; all for the last expert, and a rank with nothing at all."""
    first = Case((5, 3, 6, 4)[:n], 3 * n, 2, 3)
    return first, Case((7, 4, 0, 5)[:n], 2 * n, 3, 2, dropped=True), Case((3, 0, 0, 4)[:n], 2 * n, 1, 4, liked=-1000)


_WAY = "order_S", "sent", "received", "sorted_R"
_SIZES = (
    "expert i lives on rank i % N; dropped copies do not travel: −1 is no expert, yet −1 % N is a rank. The counts say "
    "what arrives: all ranks call their all-to-all, also one without tokens; those for rank 0 stand first"
)
_FORM = "it returns (rows_RH, counts_L, Way(…)), also without tokens; counts, order_S, sorted_R: int64; sent, received: lists"


def _dispatch(given: tuple[Tensor, Tensor, int], function: Callable, watch: Watch) -> dict:
    x_TH, experts_KT, experts = given
    named, names = {"x_TH": x_TH, "experts_KT": experts_KT}, ("rows_RH", "counts_L", *(f"way.{name}" for name in _WAY))
    more = experts, _handed(_SIZES)
    return _called(lambda *its: _flat(function(*its)), named, more, _FORM, names, graph=True)


def _flat(found: Any) -> Any:
    """Lists rows_RH, counts_L, and what the way has."""
    fits = isinstance(found, tuple | list) and len(found) == 3
    return [*found[:2], *(getattr(found[2], name, None) for name in _WAY)] if fits else found


def _counts(among: list[Sent]) -> list[str]:
    return [f"whole numbers in call {i}" for i, call in enumerate(among, 1) if "int" in call.dtype]


_COUNTS = "first one dist.all_to_all_single of E counts, int64: no other number has to travel; then the rows in one exchange"
dispatch = _task(
    *("dispatch(x_TH, experts_KT, experts, exchange)", 5, _dispatch),
    (
        values(0.35, "the rows, counts_L and way are right", "rows|counts|way|given"),
        facts(0.1, "the gradient of x is right", "gradient|given", "it is the sum of a token's copies'", each_world=True),
        calls(0.4, "sends E counts and the rows, and no more", hint=_COUNTS),
        calls(0.15, "sends the counts once, and first", _counts, _COUNTS),
    ),
    _traveling,
    make=lambda case, rank, n, seed: (normal((case.tokens[rank], case.H), seed, "x", rank), case.mine(rank, seed)[0], case.E),
    unexplained="copies sorted by (rank, expert there, number); counts; rows by exchange; then what arrives, sorted by expert",
)


def _arrived(case: Case, rank: int, n: int, seed: int) -> tuple[Tensor, Tensor, tuple]:
    """The way is no dispatch's: any copies go in any order, and arrive in any other."""
    experts_KT, gates_KT, goes, comes = case.mine(rank, seed)
    sets = (experts_KT.flatten() >= 0).nonzero()[:, 0], torch.arange(sum(comes))
    order_S, sorted_R = (one[normal((len(one),), seed, rank, i).argsort()] for i, one in enumerate(sets))
    return normal((sum(comes), case.H), seed, "y", rank), gates_KT, (order_S, goes, comes, sorted_R)


def _combine(given: tuple[Tensor, Tensor, tuple], function: Callable, watch: Watch) -> dict:
    way = NamedTuple("Way", [(name, Tensor) for name in _WAY])(*given[2])
    more = (_handed("what was received goes back: exchange(rows, way.received, way.sent)"),)
    form = "it returns out_TH, float64: one row for each of this rank's tokens"
    named = {"y_RH": given[0], "gates_KT": given[1], "way": way}
    return _called(function, named, more, form, ("out_TH",), graph=True)


_RESULTS = "one exchange of all results, back to where their rows came from, and nothing else: gates are where they are needed"
combine = _task(
    *("combine(y_RH, gates_KT, way, exchange)", 4, _combine),
    (
        values(0.5, "each token's results come home, times their gates", "out|given"),
        facts(0.25, "the gradients of y and of the gates are right", "gradient|given", _GRAPH, each_world=True),
        calls(0.25, "sends the results once, and nothing else", hint=_RESULTS),
    ),
    _traveling,
    make=_arrived,
    unexplained="y in the order of arrival; exchange(rows, received, sent); times gates[order_S]; added to token order_S % T",
)


def _loads(case: Case, rank: int, n: int, seed: int) -> tuple[Tensor, Tensor, Tensor, float]:
    probabilities_TE = normal((case.tokens[rank], case.E), seed, "probabilities", rank).softmax(1)
    speed = 0.25 / case.K * (1 + seed_of(seed) % 7)
    return probabilities_TE, case.mine(rank, seed)[0], 0.5 * normal((case.E,), seed, "bias"), speed


def _numbers(among: list[Sent]) -> list[str]:
    return [f"{call.op} of {call.bytes // getattr(torch, call.dtype or 'int8').itemsize} numbers" for call in among]


_ONE_SUM = "one all-reduce of E counts is enough: their sum tells how many tokens there are, and P needs no message"
_STEP = "bias + speed · (1 − count / mean count), with all ranks' counts: an expert with too many copies gets a smaller bias"
_LOSS_AND_BIAS = "it returns (loss, bias_E): a tensor with one number, and one of E numbers"
_E_COUNTS = "all ranks have E counts, 0 for an expert that nobody chose there: bincount(minlength=E)"
balance = _task(
    *("balance(probabilities_TE, experts_KT, bias_E, speed)", 3),
    _script("probabilities_TE experts_KT bias_E", _LOSS_AND_BIAS, ("the loss", "the new bias")),
    (
        values(0.4, "the loss and its gradient are one process's", "the loss|gradient|given"),
        facts(0.3, "the new bias is right, and the same on all ranks", "new bias|given", _STEP, each_world=True),
        calls(0.3, "sends E counts, once", _numbers, _ONE_SUM),
    ),
    lambda n: (Case((5, 3, 6, 4)[:n], 2 * n, 2), Case((4, 0, 7, 2)[:n], 3 * n, 3)),
    advice=(("bytes to its all_reduce|must match the (existing )?size|size of tensor", _E_COUNTS),),
    make=_loads,
    unexplained="counts of all ranks by one all-reduce; f = counts ÷ their sum; P = this rank's sum of probabilities · N ÷ all "
    "tokens; loss = E · Σ f·P; bias + speed · (1 − counts ÷ their mean)",
)
_SHAPES = {"dense": [(3, 2), (5,), (2, 2, 2)], "experts": [(4, 3), (2, 4), (3,)]}


def _own_gradients(case: Case, rank: int, n: int, seed: int) -> tuple[int, dict[str, Tensor | None]]:
    """The second expert parameter has no gradient on rank 0, and the second dense one has none on rank 1."""
    named = {f"{name}[{i}]": shape for name, shapes in _SHAPES.items() for i, shape in enumerate(shapes)}
    every = {name: normal(shape, seed, name, rank) for name, shape in named.items()}
    return case.e, every | {name: None for r, name in ((0, "experts[1]"), (1, "dense[1]")) if r == rank}


def _average(given: tuple[int, dict[str, Tensor | None]], function: Callable, watch: Watch) -> dict:
    (e, grads), rank, n = given, dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(range(k, n, e)) for k in range(e)] if e > 1 else [dist.group.WORLD]
    shapes = [*_SHAPES["dense"], *_SHAPES["experts"]]
    found = {name: nn.Parameter(uneven(shape)) for name, shape in zip(grads, shapes, strict=True)}
    for name, one in found.items():
        one.grad = grads[name]
    before, parameters = deepcopy(found), [*found.values()]
    function(parameters[:3], parameters[3:], groups[rank % e])
    return _after(found, before) | {"without a gradient": [name for name, one in found.items() if one.grad is None]}


def _sums(among: list[Sent]) -> list[str]:
    """Sorts the sums: they may come in any order. Where all ranks are replicas, both may be one call."""
    if len(among) == 2 and len({(call.op, call.ranks) for call in among}) == 1:
        among = [among[0]._replace(bytes=among[0].bytes + among[1].bytes)]
    return sorted(f"{call.op} of {call.bytes:,} bytes of {call.dtype} among {len(call.ranks)} ranks" for call in among)


_NOT_SKIPPED = "a parameter whose .grad is None counts as 0: a rank that skips it sends fewer numbers than the others"
_TWO_SUMS = "dist.all_reduce of one flat row of all that is dense, and of one of all of the rank's experts with group=replicas"
average = _task(
    *("average(dense, experts, replicas)", 3, _average),
    (
        values(0.55, "each gradient is that of the mean of all losses", ""),
        calls(0.45, "sums dense gradients over all ranks, and experts' over their replicas only, once each", _sums, _TWO_SUMS),
    ),
    lambda n: tuple(Case(n=n, e=e) for e in {2: (1, 2), 3: (1, 3), 4: (2, 4)}[n]),
    make=_own_gradients,
    advice=(
        ("'NoneType' object has|of type NoneType|NoneType found|(got|not) NoneType|bytes to its all_reduce", _NOT_SKIPPED),
    ),
    unexplained="dense: the sum over all ranks ÷ N; experts: the sum over the replicas ÷ N; None counts as 0",
)

"""The task dispatch: each copy to the rank of its expert, and rows sorted by expert."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.grade.old.context.task import untouched
from manyranks.grade.old.context.travel import BACKWARD, FORWARD
from manyranks.grade.old.expert import given
from manyranks.grade.old.expert.copies import RIGHT, Copies, Plan, Way, home, in_blocks, travelling, whole
from manyranks.grade.old.expert.ready import own
from manyranks.grade.old.expert.task import ExpertTask, fitting, of, several
from manyranks.grade.old.expert.traffic import Must, Sent, called, messages
from manyranks.grade.old.scripts import Scene, Tensors, Wrong
from manyranks.grade.old.tensor.layout import drawn
from manyranks.grade.old.tensor.task import gradient, telling
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect, Verdict
from manyranks.measure.journal import Stopped

_ROWS, _COUNTS, _ORDER, _SORTED, _GRADIENT = "rows_RH", "counts_L", "way.order_S", "way.sorted_R", "the gradient of x"
_SENT, _RECEIVED = "way.sent", "way.received"
_SHAPE = "it returns (rows_RH, counts_L, Way(order_S, sent, received, sorted_R))"
_NO_WAY = "way is a Way: order_S and sorted_R are tensors, int64; sent and received are lists of N numbers"
_TAKEN = "rows_RH has one row for each copy that came, and dropped copies do not travel"
_NO_ROWS = "a rank has experts also where it has no tokens: it calls the all-to-all of counts and exchange like all others"
_BLOCKS = "those are blocks of neighbours: here experts are dealt, and expert i lives on rank i % N"
_NUMBER_THERE = "expert i is number i // N on its rank: that is what its rows are sorted by there"
_BY_TOKEN = "a copy's number is k·T + t: the place in experts_KT.flatten(), where all first choices come first, not t·K + k"
_WRONG_TOKEN = "those are the rows of other tokens: copy number i is of token i % T, not i // K"
_UNSORTED = "rows_RH stands in the order of the ranks it came from: sort it by expert, with argsort(stable=True)"
_TURNED = "rows_RH is put in the inverse order: row i is what arrived at place sorted_R[i], arrived[sorted_R]"
_UNSTABLE = "rows of one expert stand in another order: by the rank they come from, then as they were sent"
_DROPPED_SENT = "dropped copies do not travel: −1 is no expert, yet −1 % N is a rank"
_SWAPPED = "that is the other list: sent is how many rows go to each rank, received how many come from each"
_RANK_BY_RANK = (
    "the counts stand in the order of experts: an all-to-all sends the first of them to rank 0, so they have to stand rank by "
    "rank, each with its experts"
)
_NO_COUNTS = "no row is expected here: the counts come by an all-to-all that all ranks call, also one that has no tokens"
_PADDED = "those sizes are filled up to the largest: sizes of an all-to-all may differ, so no row is sent that is none"
_OWN_COUNTS = "counts_L is how many rows this rank's experts get from all ranks, not how many copies this rank sends"
_BY_RANK = "counts_L has one number for each of this rank's experts, in their order: the sum over the ranks they come from"
_WAY_BACK = "way.sorted_R is the inverse: row i of rows_RH is what arrived at place sorted_R[i], so rows = arrived[sorted_R]"
_ORDER_BACK = "way.order_S is the inverse: it has the numbers of the copies, in the order in which they were sent"
_TOKENS = "way.order_S has the numbers of copies, k·T + t, not those of tokens"
_NONE = "x has no gradient: no detach, no no_grad, no new tensor that rows were copied into; and rows travel by exchange"
_ONE_COPY = "a token's gradient is the sum of its copies': here only one of them counts, as if written over. Index with x[…]"
_MEAN = "a token's gradient is the sum of its copies', not their mean"
_COUNTS_FIRST = "counts come first: a rank makes room for rows when it knows how many will come"
_GATHERED = (
    "a rank needs to know only how many rows its own experts get: an all-to-all of counts tells each rank its own part, an "
    "all-gather tells everybody everything"
)
_REDUCED = "a sum over ranks does not say how many rows come from each rank: dist.all_to_all_single of the counts does"
_ROWS_GATHERED = "no rank needs all tokens: each copy goes to the rank of its expert, by exchange"
_INT64 = "the counts are int64: one number for each expert, dist.all_to_all_single(coming_E, going_E)"
_MORE_COUNTS = (
    "one message of counts is enough: E numbers, for each rank those of its experts. They say how many rows come for each, so "
    "that no expert's number has to travel with a row"
)
_NOTHING_SAID = "no message says how many rows come: dist.all_to_all_single of the counts, before the rows"
_UNEXPLAINED = (
    "copies sorted by (rank, expert there, number); counts; rows by exchange; what arrives stands by rank, then by expert: "
    "sort it by expert"
)
_WAYS = [
    (_BLOCKS, RIGHT._replace(home=in_blocks)),
    (_NUMBER_THERE, RIGHT._replace(home=lambda expert, n, local: (expert % n, expert % local))),
    (_UNSORTED, RIGHT._replace(sort=None)),
    (_UNSTABLE, RIGHT._replace(sort=lambda row: (row[0], -row[1], row[2]))),
    (_UNSTABLE, RIGHT._replace(sort=lambda row: (row[0], row[2], row[1]))),
    (_UNSTABLE, RIGHT._replace(sort=lambda row: (row[0], -row[1], -row[2]))),
    (_WRONG_TOKEN, RIGHT._replace(token=lambda number, tokens, top_k: number // top_k)),
    (
        _BY_TOKEN,
        RIGHT._replace(number=lambda k, t, tokens, top_k: t * top_k + k, token=lambda number, tokens, top_k: number // top_k),
    ),
]


def _upstream(copies: Copies) -> list[Tensor]:
    """The gradients of the rows, by rank."""
    return [drawn(400 + rank, len(plan.rows), copies.hidden) for rank, plan in enumerate(copies.plans())]


def results(copies: Copies, way: Way = RIGHT) -> list[Tensors]:
    """By rank."""
    leaves, plans = [one.clone().requires_grad_() for one in copies.x], copies.plans(way)
    rows = [_stacked([leaves[source][t] for source, t in plan.rows], copies.hidden) for plan in plans]
    ends = [(one, up) for one, up in zip(rows, _upstream(copies), strict=True) if one.shape == up.shape and one.requires_grad]
    torch.autograd.backward([one for one, _ in ends], [up for _, up in ends])
    return [_named(*parts) for parts in zip(rows, plans, leaves, strict=True)]


def _stacked(rows: list[Tensor], hidden: int) -> Tensor:
    return torch.stack(rows) if rows else torch.zeros(0, hidden, dtype=torch.float64)


def _named(rows: Tensor, plan: Plan, leaf: Tensor) -> Tensors:
    numbers = {_COUNTS: plan.counts, _ORDER: plan.order, _SENT: plan.sent, _RECEIVED: plan.received, _SORTED: plan.sorted}
    return {_ROWS: rows.detach()} | {name: whole(one) for name, one in numbers.items()} | {_GRADIENT: gradient(leaf)}


def _wrong(copies: Copies, right: list[Tensors]) -> Iterator[Wrong]:
    """By rows; where these are right, by what is said of them; then by gradients."""
    plans = copies.plans()
    for hint, way in _WAYS:
        yield Wrong(hint, [{_ROWS: own[_ROWS]} for own in results(copies, way)])
    back = [own[_SORTED].argsort() for own in right]
    yield Wrong(_TURNED, [{_ROWS: own[_ROWS][one][one]} for own, one in zip(right, back, strict=True)])
    for hint, name, make in (
        (_OWN_COUNTS, _COUNTS, lambda own, plan: whole(plan.going)),
        (_BY_RANK, _COUNTS, lambda own, plan: whole(plan.counts).flip(0)),
        (_WAY_BACK, _SORTED, lambda own, plan: own[_SORTED].argsort()),
        (_ORDER_BACK, _ORDER, lambda own, plan: own[_ORDER].argsort()),
    ):
        yield Wrong(hint, [{_ROWS: own[_ROWS], name: make(own, plan)} for own, plan in zip(right, plans, strict=True)])
    tokens = [own[_ORDER] % max(count, 1) for own, count in zip(right, copies.tokens, strict=True)]
    yield Wrong(_TOKENS, [{_ROWS: own[_ROWS], _ORDER: one} for own, one in zip(right, tokens, strict=True)])
    numbered = [own[_ORDER] for own in results(copies, _WAYS[-1][1])]
    yield Wrong(_BY_TOKEN, [{_ROWS: own[_ROWS], _ORDER: one} for own, one in zip(right, numbered, strict=True)])
    yield Wrong(_NONE, [own | {_GRADIENT: torch.zeros_like(own[_GRADIENT])} for own in right])
    yield Wrong(_MEAN, [own | {_GRADIENT: own[_GRADIENT] / copies.top_k} for own in right])
    yield Wrong(_ONE_COPY, [own | {_GRADIENT: one} for own, one in zip(right, _last_copy(copies), strict=True)])


def _last_copy(copies: Copies) -> list[Tensor]:
    """The gradient of x where each copy's is written over those before it, in the order in which they were sent."""
    found, upstream = [torch.zeros_like(one) for one in copies.x], _upstream(copies)
    at = [{} for _ in copies.x]  # source -> number -> gradient
    for plan, up in zip(copies.plans(), upstream, strict=True):
        for (source, t), row in zip(plan.rows, up, strict=True):
            at[source].setdefault(t, []).append(row)
    for rank, tokens in enumerate(at):
        for t, rows in tokens.items():
            found[rank][t] = rows[-1]
    return found


def _with_dropped(back: int, expert: int, n: int, local: int) -> tuple[int, int]:
    """−1 has a rank, too: the last one, or, counted in experts, the one before."""
    return home(expert, n, local) if expert >= 0 else (n - back, 0)


def _explain(copies: Copies, rank: int) -> given.Explain:
    """Of wrong sizes: those that a known mistake gives."""
    plan, blocks = copies.plans()[rank], copies.plans(Way(home=in_blocks))[rank]
    every = [copies.plans(Way(dropped=True, home=partial(_with_dropped, back)))[rank] for back in (1, 2)]
    other = {"sent": plan.received, "received": plan.sent}

    def explain(name: str, numbers: list[int]) -> str:
        if numbers == getattr(blocks, name):
            return _BLOCKS if name == "sent" else _RANK_BY_RANK
        if name == "received" and not any(numbers):
            return _NO_COUNTS
        if numbers == other[name]:
            return _SWAPPED
        if numbers in [getattr(one, name) for one in every]:
            return _DROPPED_SENT
        if len(set(numbers)) == 1 and numbers[0] >= max(getattr(plan, name)):
            return _PADDED
        return ""

    return explain


def _way(value: Any, right: Plan) -> Tensors:
    """The learner's. Raises Stopped where it is none."""
    if any(not hasattr(value, name) for name in ("order_S", "sent", "received", "sorted_R")):
        raise Stopped(f"way is a {type(value).__name__}", _NO_WAY)
    found = {}
    for name, numbers, is_list in (
        (_ORDER, right.order, False),
        (_SENT, right.sent, True),
        (_RECEIVED, right.received, True),
        (_SORTED, right.sorted, False),
    ):
        one = getattr(value, name.removeprefix("way."))
        if is_list:
            if not isinstance(one, list | tuple) or not all(type(number) is int for number in one):
                raise Stopped(f"{name} is no list of whole numbers", _NO_WAY)
            one = whole(list(one))
        found[name] = fitting(one, whole(numbers), name, _NO_WAY)
    return found


def _run(copies: Copies, results: list[Tensors], function: Callable, watch) -> Tensors:
    rank = dist.get_rank()
    plan, right = copies.plans()[rank], results[rank]
    x, experts = copies.x[rank].clone().requires_grad_(), copies.choices[rank].clone()
    exchange = given.exchange(plan.sent, plan.received, _explain(copies, rank))
    with own(watch):
        watch.mark(FORWARD)
        found = several(function(x, experts, copies.experts, exchange), 3, "dispatch", _SHAPE)
        rows = fitting(found[0], right[_ROWS], "rows_RH", _TAKEN if len(x) else _NO_ROWS)
        counts = fitting(found[1], right[_COUNTS], "counts_L", _BY_RANK)
        way = _way(found[2], plan)
        watch.mark(BACKWARD)
        if not found[0].requires_grad:
            raise Stopped("rows_RH has no graph", _NONE)
        found[0].backward(_upstream(copies)[rank])
    untouched(watch, {"x_TH": x, "experts_KT": experts}, {"x_TH": copies.x[rank], "experts_KT": copies.choices[rank]})
    return {_ROWS: rows, _COUNTS: counts} | way | {_GRADIENT: gradient(x)}


@cache
def cases(n: int) -> list[Scene]:
    """All that may travel, one after another."""
    return [_scene(copies) for copies in travelling(n)]


def _scene(copies: Copies) -> Scene:
    right, n, row = results(copies), copies.n, 8 * copies.hidden
    counts = Sent("all_to_all", 8 * copies.experts, "int64", n)
    plans = copies.plans()
    there = [[counts, Sent("all_to_all", row * sum(plan.sent), "float64", n)] for plan in plans]
    back = [[Sent("all_to_all", row * sum(plan.received), "float64", n)] for plan in plans]
    wrong = partial(_wrong, copies, right)
    return Scene(n, partial(_run, copies, right), right, lambda: telling(right, wrong()), Must(there, back), copies.note)


def _counts_first(task: "Dispatching", trial: Trial) -> Verdict:
    """One message of counts, and it is the first."""
    for rank in trial.calls:
        calls = called(trial, rank, FORWARD)
        numbers = [i for i, call in enumerate(calls) if call.dtype.startswith(("int", "uint"))]
        if len(numbers) != 1:
            hint = _MORE_COUNTS if numbers else _INT64 if _floats(calls) else _NOTHING_SAID
            return Verdict(False, f"rank {rank} sent {len(numbers)} messages of int64 counts", hint)
        if numbers != [0]:
            return Verdict(False, f"rank {rank} sent its counts in call {numbers[0] + 1}", _COUNTS_FIRST)
    return Verdict(True)


def _floats(calls: list[Sent]) -> bool:
    """Whether there are two all-to-alls and both are of float64, so one may be of counts."""
    return [(call.op, call.dtype) for call in calls] == 2 * [("all_to_all", "float64")]


@dataclass(frozen=True)
class Dispatching(ExpertTask):
    unexplained: ClassVar[str] = _UNEXPLAINED
    instead: ClassVar[dict[str, str]] = {"all_gather": _GATHERED, "all_reduce": _REDUCED}
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("the rows, counts_L and way are right", 0.35, of(_ROWS, _COUNTS, _ORDER, _SENT, _RECEIVED, _SORTED), True),
        Aspect("the gradient of x is right", 0.1, of(_GRADIENT), each_world=True),
        Aspect("sends E counts and the rows, and no more", 0.4, messages),
        Aspect("sends the counts once, and first", 0.15, _counts_first),
    )

    def why(self, trial: Trial, rank: int, phase: str, got: list[Sent], right: list[Sent]) -> str:
        """Counts and rows differ in their dtype."""
        if [call for call in got if call.op == "all_gather" and call.dtype == "float64"]:
            return _ROWS_GATHERED
        numbers = [call for call in got if "int" in call.dtype]
        if phase == FORWARD and len(got) == len(right) and _floats(got):
            return _INT64
        if phase == FORWARD and numbers and all(call.op == "all_to_all" for call in got):
            if any(call.dtype != "int64" for call in numbers):
                return _INT64
            if sum(call.bytes for call in numbers) != right[0].bytes or len(numbers) > 1:
                return _MORE_COUNTS
        return super().why(trial, rank, phase, got, right)

    def better(self, trial: Trial, hint: str) -> str:
        """What was sent may explain what no known mistake does."""
        return hint or messages(self, trial).hint

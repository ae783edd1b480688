"""The task combine: results back to their tokens, times their gates, added."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.grade.old.context.task import untouched
from manyranks.grade.old.context.travel import BACKWARD, FORWARD
from manyranks.grade.old.expert import given
from manyranks.grade.old.expert.copies import Copies, travelling, whole
from manyranks.grade.old.expert.ready import own
from manyranks.grade.old.expert.task import ExpertTask, fitting, of
from manyranks.grade.old.expert.traffic import Must, Sent, messages
from manyranks.grade.old.scripts import Scene, Tensors, Wrong
from manyranks.grade.old.tensor.layout import drawn
from manyranks.grade.old.tensor.task import gradient, slip, telling
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect
from manyranks.measure.journal import Stopped

_OUT, _Y, _GATES = "out_TH", "the gradient of y", "the gradient of the gates"
_SHAPE = "it returns out_TH, float64: one row for each of this rank's tokens"
_NOT_BACK = (
    "tokens return in the wrong order: y_RH is sorted by expert, and what is sent back has to stand as it arrived. Row i "
    "arrived at place sorted_R[i]: y[sorted_R.argsort()]"
)
_NOT_INVERSE = (
    "tokens return in the wrong order: y[sorted_R] sorts once more. The inverse is y[sorted_R.argsort()], or back[sorted_R] = y"
)
_NOT_HOME = (
    "tokens return in the wrong order: row i that comes home belongs to copy way.order_S[i], which is of token order_S[i] % T"
)
_WRONG_TOKEN = "results are added to other tokens: copy number i is of token i % T, not i // K"
_GATE_ORDER = (
    "the gates stand in another order than the rows: row i that comes home has the gate gates_KT.flatten()[order_S[i]]"
)
_BY_TOKEN = "the gates' numbers are k·T + t: gates_KT.flatten(), not of the transposed"
_TWICE = "the gates are applied twice: each result is multiplied by its gate once"
_NEVER = "the gates are missing: each result counts with its gate"
_DIVIDED = "the gates are divided by their sum again: apply them as they are"
_MEAN = "that is a mean over the copies: the gates are the weights already"
_OVER = "a token's results are written over each other: index_add adds them, out[tokens] = … and out[tokens] += … do not"
_FIRST = "only the first choices count: a token's results are added, of all its choices"
_NO_Y = "y has no gradient: no detach, no no_grad; results travel by exchange, which autograd sees"
_NO_GATES = "the gates have no gradient: their router learns nothing. No detach, no no_grad, no .data"
_NEITHER = "neither y nor the gates have a gradient: out_TH has to be computed from them, without detach and no_grad"
_RAW_Y = "the gradient of y lacks the gates: y's gradient is the gate times that of out"
_SWAPPED = (
    "that is dispatch's direction: what was received goes back, so exchange(rows, way.received, way.sent). Gates stay at home"
)
_NO_TOKENS = (
    "a rank without tokens has experts, too: it sends their results back, so all ranks have to call exchange, and what it "
    "returns is made of what comes, 0 rows"
)
_TRAVEL = "the gates are at home, where the tokens are: they need not travel"
_ONCE = "one exchange is enough: all results go back together"
_UNEXPLAINED = "y in the order of arrival; exchange(rows, received, sent); times gates[order_S]; added to token order_S % T"


class Style(NamedTuple):
    """How results come home; the defaults are right.

    back: of sorted_R, which rows of y are sent; at: of order_S, T and K, the tokens that rows are added to; gate: of gates_KT
    and order_S, the weights; over: whether rows are written over each other; first: whether only first choices count.
    """

    back: Callable[[Tensor], Tensor] = torch.argsort
    at: Callable[[Tensor, int, int], Tensor] = lambda order, tokens, top_k: order % max(tokens, 1)
    gate: Callable[[Tensor, Tensor], Tensor] = lambda gates, order: gates.flatten()[order]
    over: bool = False
    first: bool = False


def _sums(gates: Tensor) -> Tensor:
    """Divided by their sum over choices, 0 where that is 0."""
    return torch.where(gates.sum(0) > 0, gates / gates.sum(0).clamp(min=1e-300), 0.0)


RIGHT = Style()
_STYLES: list[tuple[str, Style]] = [
    (_NOT_INVERSE, Style(back=torch.clone)),
    (_NOT_BACK, Style(back=lambda sorted_R: torch.arange(len(sorted_R)))),
    (_NOT_HOME, Style(at=lambda order, tokens, top_k: torch.arange(len(order)) % max(tokens, 1))),
    (_NOT_HOME, Style(at=lambda order, tokens, top_k: order.argsort() % max(tokens, 1))),
    (_WRONG_TOKEN, Style(at=lambda order, tokens, top_k: order // top_k)),
    (_TWICE, Style(gate=lambda gates, order: gates.flatten()[order] ** 2)),
    (_NEVER, Style(gate=lambda gates, order: torch.ones(len(order), dtype=gates.dtype))),
    (_DIVIDED, Style(gate=lambda gates, order: _sums(gates).flatten()[order])),
    (_MEAN, Style(gate=lambda gates, order: gates.flatten()[order] / len(gates))),
    (_MEAN, Style(gate=lambda gates, order: torch.full((len(order),), 1 / len(gates), dtype=gates.dtype))),
    (_BY_TOKEN, Style(gate=lambda gates, order: gates.T.flatten()[order])),
    (_GATE_ORDER, Style(gate=lambda gates, order: gates.flatten()[: len(order)])),
    (_GATE_ORDER, Style(gate=lambda gates, order: gates.flatten()[gates.flatten() != 0])),
    (_GATE_ORDER, Style(gate=lambda gates, order: gates.flatten()[order.argsort().argsort()])),
    (_OVER, Style(over=True)),
    (_FIRST, Style(first=True)),
]


def _y(copies: Copies) -> list[Tensor]:
    return [drawn(800 + rank, len(plan.rows), copies.hidden) for rank, plan in enumerate(copies.plans())]


def _upstream(copies: Copies) -> list[Tensor]:
    return [drawn(850 + rank, tokens, copies.hidden) for rank, tokens in enumerate(copies.tokens)]


def results(copies: Copies, style: Style = RIGHT) -> list[Tensors]:
    """By rank."""
    plans = copies.plans()
    ys, gates = ([one.clone().requires_grad_() for one in ones] for ones in (_y(copies), copies.gates))
    back = [y[style.back(whole(plan.sorted))].split(plan.received) for y, plan in zip(ys, plans, strict=True)]
    outs = []
    for rank, plan in enumerate(plans):
        home = torch.cat([back[source][rank] for source in range(copies.n)])
        outs.append(_added(home, gates[rank], whole(plan.order), copies, rank, style))
    ends = [(out, up) for out, up in zip(outs, _upstream(copies), strict=True) if out.requires_grad]
    torch.autograd.backward([out for out, _ in ends], [up for _, up in ends])
    return [{_OUT: out.detach(), _Y: gradient(y), _GATES: gradient(gate)} for out, y, gate in zip(outs, ys, gates, strict=True)]


def _added(home: Tensor, gates: Tensor, order: Tensor, copies: Copies, rank: int, style: Style) -> Tensor:
    tokens = copies.tokens[rank]
    out, at = torch.zeros(tokens, copies.hidden, dtype=home.dtype), style.at(order, tokens, copies.top_k)
    rows = style.gate(gates, order)[:, None] * home
    if style.first:
        return out.index_add(0, at[order < tokens], rows[order < tokens])
    if style.over:
        return out.index_put((at,), rows)
    return out.index_add(0, at.clamp(max=max(tokens - 1, 0)), rows)


def _wrong(copies: Copies, right: list[Tensors]) -> Iterator[Wrong]:
    """By results; then by gradients."""
    for hint, style in _STYLES:
        found = results(copies, style)
        yield Wrong(hint, [{_OUT: own[_OUT]} for own in found])
    for hint, names in ((_NEITHER, (_Y, _GATES)), (_NO_Y, (_Y,)), (_NO_GATES, (_GATES,))):
        yield Wrong(hint, [own | {name: torch.zeros_like(own[name]) for name in names} for own in right])
    raw = results(copies, Style(gate=lambda gates, order: torch.ones(len(order), dtype=gates.dtype)))
    yield Wrong(_RAW_Y, [{_OUT: own[_OUT], _Y: other[_Y]} for own, other in zip(right, raw, strict=True)])


def _explain(copies: Copies, rank: int) -> given.Explain:
    plan = copies.plans()[rank]
    other = {"sent": plan.sent, "received": plan.received}
    return lambda name, numbers: _SWAPPED if numbers == other[name] else ""


class Way(NamedTuple):
    """As the exercise has it."""

    order_S: Tensor
    sent: list[int]
    received: list[int]
    sorted_R: Tensor


def _run(copies: Copies, results: list[Tensors], function: Callable, watch) -> Tensors:
    rank = dist.get_rank()
    plan, right = copies.plans()[rank], results[rank]
    y, gates = _y(copies)[rank].requires_grad_(), copies.gates[rank].clone().requires_grad_()
    way = Way(whole(plan.order), list(plan.sent), list(plan.received), whole(plan.sorted))
    exchange = given.exchange(plan.received, plan.sent, _explain(copies, rank))
    with own(watch):
        watch.mark(FORWARD)
        out = function(y, gates, way, exchange)
        found = fitting(out, right[_OUT], "what combine returned", _SHAPE)
        watch.mark(BACKWARD)
        if not out.requires_grad:
            raise Stopped("out_TH has no graph", _NEITHER if len(out) else _NO_TOKENS)
        out.backward(_upstream(copies)[rank])
    before = {"y_RH": _y(copies)[rank], "gates_KT": copies.gates[rank]}
    lists = {"way.order_S": whole(plan.order), "way.sorted_R": whole(plan.sorted)}
    untouched(watch, {"y_RH": y, "gates_KT": gates, **_tensors(way)}, before | lists)
    if (way.sent, way.received) != (plan.sent, plan.received):
        slip(watch, "way.sent or way.received changed")
    return {_OUT: found, _Y: gradient(y), _GATES: gradient(gates)}


def _tensors(way: Way) -> Tensors:
    return {"way.order_S": way.order_S, "way.sorted_R": way.sorted_R}


@cache
def cases(n: int) -> list[Scene]:
    """Those of dispatch."""
    return [_scene(copies) for copies in travelling(n)]


def _scene(copies: Copies) -> Scene:
    right, n, row = results(copies), copies.n, 8 * copies.hidden
    there, back = (
        [[Sent("all_to_all", row * sum(getattr(plan, name)), "float64", n)] for plan in copies.plans()]
        for name in ("received", "sent")
    )
    wrong = partial(_wrong, copies, right)
    return Scene(n, partial(_run, copies, right), right, lambda: telling(right, wrong()), Must(there, back), copies.note)


@dataclass(frozen=True)
class Combining(ExpertTask):
    unexplained: ClassVar[str] = _UNEXPLAINED
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("each token's results come home, times their gates", 0.5, of(_OUT), each_world=True),
        Aspect("the gradients of y and of the gates are right", 0.25, of(_Y, _GATES), each_world=True),
        Aspect("sends the results once, and nothing else", 0.25, messages),
    )

    def why(self, trial: Trial, rank: int, phase: str, got: list[Sent], right: list[Sent]) -> str:
        """Who sends more than results may send gates."""
        if len(got) > len(right) and all(call.op == "all_to_all" for call in got):
            same = sum(call.bytes for call in got) == right[0].bytes
            return _ONCE if same or all(call.bytes == right[0].bytes for call in got) else _TRAVEL
        return super().why(trial, rank, phase, got, right)

    def better(self, trial: Trial, hint: str) -> str:
        """What was sent may explain what no known mistake does."""
        return hint or messages(self, trial).hint

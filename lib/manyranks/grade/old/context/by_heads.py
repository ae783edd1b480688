"""The task ulysses: all-to-alls from all heads of some tokens to some heads of all, and back."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from manyranks.grade.old.compare import sizes
from manyranks.grade.old.context import given
from manyranks.grade.old.context.attention import whole
from manyranks.grade.old.context.ready import READY, YOURSELF
from manyranks.grade.old.context.shards import Shards
from manyranks.grade.old.context.task import ContextTask, tensor_of, untouched, values
from manyranks.grade.old.context.travel import BACKWARD, FORWARD, calls_in
from manyranks.grade.old.scripts import NOTHING, WAIT, Scene, Tensors, Wrong
from manyranks.grade.old.tensor.task import gradient, slip, telling
from manyranks.grade.old.trial import Trial
from manyranks.grade.old.verdict import Aspect, Verdict
from manyranks.measure.calls import Call
from manyranks.measure.journal import Stopped

_Y = "the result"
_NAMES = ("the gradient of q", "the gradient of k", "the gradient of v")
_ORDER = (
    "the tokens stand in the order of ranks, and attention takes them in that of the sequence: sort them by their positions "
    "before, and put the result back afterwards"
)
_NOT_INVERSE = (
    "the tokens are moved the wrong way: with p = torch.cat(positions), token i of those that arrived has the position p[i]: "
    "arrived[p.argsort()] stands in the order of the sequence, and done[p] in that of ranks again"
)
_NOT_BACK = "the result still stands in the order of the sequence: put it back into that of ranks before it is sent"
_NEIGHBOURS = (
    "heads are dealt: rank r has the heads r, r + N, r + 2N, …, not neighbours. x.unflatten(2, (-1, N)) has the rank in its "
    "second new dimension"
)
_HEADS_BACK = "the result's heads stand rank by rank: head j comes from rank j % N, at its place j // N"
_MIXED = (
    "heads and tokens are mixed up: view and reshape take numbers in the order of memory. What goes to one rank has to stand "
    "in the first dimension: movedim or permute, and only then flatten"
)
_COPIES = "where there are fewer key/value heads than ranks, rank r gets the head r % G: repeat, not repeat_interleave"
_FIRST_HEAD = "all ranks use the first key/value head: query head j uses head j % G"
_K_V = "keys and values are swapped"
_OWN = "that is attention to the rank's own tokens: nothing came of the other ranks"
_NONE = (
    "there is no gradient of {what}: autograd does not see dist.all_to_all_single. Write a torch.autograd.Function whose "
    "backward sends the gradients back"
)
_TIMES = (
    "the gradients are N times too large: each number was sent to one rank, and its gradient comes back from that one, once"
)
_DIVIDED = "the gradients are divided by N: they are no means"
_ONE_COPY = "a copied head has the gradient of one of its copies: they add up, as autograd does for repeat"
_FIRST_BACK = "the gradients stand in the order of the sequence, or rank by rank by heads: backward of each exchange undoes it"
_UNEXPLAINED = (
    "q, k and v: heads to ranks, tokens sorted; attention; the result: tokens in the order of ranks, sent back, heads dealt"
)
_GATHERED = "no rank needs all heads of all tokens: an all-to-all gives it its own heads, and sends N times fewer bytes"
_REDUCED = "no number is a sum over ranks here: each was sent to one rank, and its gradient comes back from there"
_REPEATED = "repeat key/value heads only as far as each rank gets one: G heads where G is N or more, else N"
_NOT_BACKWARD = "backward sends as many bytes as forward: the gradients of q, k, v and o take the way back"
_MESSAGES = "an all-to-all is one call: dist.all_to_all_single, or dist.all_to_all with lists"
_ONCE = "four all-to-alls in each direction are enough: q, k, v, and the result"
_LESS = "q, k, v and the result all have to be exchanged"
_SCATTERED = (
    "out is not contiguous: torch.empty_like(x) has the strides of x. Make x contiguous first, or use torch.empty(x.shape, "
    "dtype=x.dtype)"
)
_ROUNDED = "what is sent is {dtype}: float64 has to stay float64 on its way"
_SHAPES = "rank r of N gets A/N query heads and max(G, N)/N key/value heads of all T tokens"
_FACTORS = {1: _TIMES, 2: _TIMES, -1: _DIVIDED, -2: _DIVIDED}  # power of N -> hint; 2: in both exchanges on the way
_ENOUGH = 4  # all-to-alls in each direction


class Must(NamedTuple):
    """bytes: what a rank gives to its all-to-alls in each direction; repeated: with all key/value heads repeated."""

    bytes: int
    repeated: int


class Way(NamedTuple):
    """How it is computed; the defaults are right. All index: tokens by place or heads by number.

    sort, back: of the positions in the order of ranks, how tokens are put before attention and afterwards; deal: of a number of
    heads and n, which heads each rank has; home: of heads joined rank by rank, how they stand in the end; kv: of rank, n and
    how many, the key/value heads where there are fewer than ranks; swapped: whether k and v are; learns: of rank and how many,
    whether the gradients of the rank's copies count.
    """

    sort: Callable[[Tensor], Tensor] = torch.argsort
    back: Callable[[Tensor], Tensor] = torch.clone
    deal: Callable[[int, int], list[list[int]]] = lambda heads, n: [list(range(r, heads, n)) for r in range(n)]
    home: Callable[[Tensor, int], Tensor] = lambda heads, n: heads.argsort()
    kv: Callable[[int, int, int], int] = lambda r, n, heads: r % heads
    swapped: bool = False
    learns: Callable[[int, int], bool] = lambda r, heads: True


def _blocks(heads: int, n: int) -> list[list[int]]:
    return torch.arange(heads).view(n, -1).tolist()


def _unmoved(index: Tensor) -> Tensor:
    return torch.arange(len(index))


RIGHT = Way()
_WAYS = [
    (_ORDER, Way(sort=_unmoved, back=_unmoved)),
    (_ORDER, Way(sort=_unmoved)),
    (_NOT_INVERSE, Way(sort=torch.clone, back=torch.argsort)),
    (_NOT_INVERSE, Way(sort=torch.clone)),
    (_NOT_INVERSE, Way(back=torch.argsort)),
    (_NOT_BACK, Way(back=_unmoved)),
    (_NEIGHBOURS, Way(deal=_blocks)),
    (_NEIGHBOURS, Way(deal=_blocks, home=lambda heads, n: heads.view(n, -1).t().flatten())),
    (_HEADS_BACK, Way(home=lambda heads, n: _unmoved(heads))),
    (_COPIES, Way(kv=lambda r, n, heads: r // (n // heads))),
    (_FIRST_HEAD, Way(kv=lambda r, n, heads: 0)),
    (_K_V, Way(swapped=True)),
]


def _of_kv(way: Way, heads: int, n: int) -> list[list[int]]:
    return way.deal(heads, n) if heads >= n else [[way.kv(r, n, heads)] for r in range(n)]


def results(shards: Shards, way: Way = RIGHT) -> list[Tensors]:
    """By rank: its part of the result, and the gradients."""
    n, p = shards.n, torch.cat(shards.places)
    leaves = [tuple(one.clone().requires_grad_() for one in own) for own in shards.ranks()]
    q, k, v = (torch.cat(parts)[way.sort(p)] for parts in zip(*leaves, strict=True))
    k, v = (v, k) if way.swapped else (k, v)
    own, own_kv = way.deal(shards.heads, n), _of_kv(way, shards.kv_heads, n)
    outputs = []
    for r in range(n):
        copies = (one[:, :, own_kv[r]] for one in (k, v))
        outputs.append(whole(q[:, :, own[r]], *(x if way.learns(r, shards.kv_heads) else x.detach() for x in copies)))
    joined = torch.cat(outputs, 2)[way.back(p)][:, :, way.home(torch.tensor(own).flatten(), n)]
    parts = joined.chunk(n)
    torch.autograd.backward(list(parts), shards.upstream())
    return [
        {_Y: part.detach()} | {name: gradient(leaf) for name, leaf in zip(_NAMES, mine, strict=True)}
        for part, mine in zip(parts, leaves, strict=True)
    ]


def _alone(shards: Shards) -> list[Tensors]:
    """As if a rank's tokens were a sequence."""
    found = []
    for (q, k, v), at in zip(shards.ranks(), shards.places, strict=True):
        order = at.argsort()
        found += [{_Y: whole(q, k, v)}, {_Y: whole(q[order], k[order], v[order])[order.argsort()]}]
    return found


def _mixed(shards: Shards) -> list[Tensors]:
    """Heads of the result as view gives them, of tensors [rank, token, …] without a transposition."""
    found = results(shards)
    outputs = [torch.stack([own[_Y].unflatten(2, (-1, shards.n)).movedim(3, 0)[r] for r in range(shards.n)]) for own in found]
    return [{_Y: output.reshape(own[_Y].shape)} for output, own in zip(outputs, found, strict=True)]


def _viewed(shards: Shards) -> list[Tensors]:
    """What is sent is cut by view, without a transposition."""
    n, p = shards.n, torch.cat(shards.places)
    cut: list[list[Tensor]] = []  # q, k and v, of all ranks' tokens, by the rank that gets them
    for parts in zip(*shards.ranks(), strict=True):
        copied = [x.repeat(1, 1, max(1, n // x.shape[2]), 1).contiguous() for x in parts]
        pieces = [x.view(n, *x.shape[:2], -1, x.shape[3]) for x in copied]
        cut.append([torch.cat([piece[r] for piece in pieces])[p.argsort()] for r in range(n)])
    outputs = torch.stack([whole(*three)[p] for three in zip(*cut, strict=True)], 3)
    return [{_Y: part.flatten(2, 3)} for part in outputs.chunk(n)]


def _wrong(shards: Shards, right: list[Tensors]) -> Iterator[Wrong]:
    """By the result where that is wrong, else by the gradients."""
    for hint, way in _WAYS:
        yield Wrong(hint, [{_Y: own[_Y]} for own in results(shards, way)])
    for first in (0, 1):
        yield Wrong(_OWN, _alone(shards)[first::2])
    yield Wrong(_MIXED, _mixed(shards))
    yield Wrong(_MIXED, _viewed(shards))
    for names in (_NAMES, _NAMES[1:], *((name,) for name in _NAMES)):
        what = names[0] if len(names) == 1 else "q, k and v" if len(names) == 3 else "k and v"
        nothing = [own | {name: torch.zeros_like(own[name]) for name in names} for own in right]
        yield Wrong(_NONE.format(what=what.removeprefix("the gradient of ")), nothing)
    for power, hint in _FACTORS.items():
        times = float(shards.n) ** power
        yield Wrong(hint, [{name: one if name == _Y else one * times for name, one in own.items()} for own in right])
    yield from _copied(shards, right)


def _copied(shards: Shards, right: list[Tensors]) -> Iterator[Wrong]:
    """With the gradients of the first copy, or the last, or with their mean."""
    copies = shards.n // shards.kv_heads
    if copies > 1:
        yield Wrong(_ONE_COPY, [own | {name: own[name] / copies for name in _NAMES[1:]} for own in right])
        yield Wrong(_ONE_COPY, results(shards, Way(learns=lambda r, heads: r < heads)))
        yield Wrong(_ONE_COPY, results(shards, Way(learns=lambda r, heads: r >= shards.n - heads)))


def _run(shards: Shards, function: Callable, watch) -> Tensors:
    watch.refuse(READY, YOURSELF)
    r, places = torch.distributed.get_rank(), shards.places
    leaves = [one.clone().requires_grad_() for one in shards.ranks()[r]]
    arguments = dict(zip(("q", "k", "v"), leaves, strict=True)) | {f"positions[{s}]": at for s, at in enumerate(places)}
    before = {name: one.detach().clone() for name, one in arguments.items()}
    watch.mark(FORWARD)
    y = function(*leaves, [*places], given.attention)
    found = tensor_of(y, leaves[0], "what ulysses returned", "it returns o_SBAD: all heads of this rank's tokens")
    do = shards.upstream()[r]
    watch.mark(BACKWARD)
    if not y.requires_grad:
        raise Stopped("the result has no graph", _NONE.format(what="q, k and v"))
    y.backward(do)
    if watch.scattered:
        slip(watch, "an all-to-all wrote to an out that is not contiguous", _SCATTERED)
    untouched(watch, arguments | {"the gradient of o": do}, before | {"the gradient of o": shards.upstream()[r]})
    return {_Y: found} | {name: gradient(leaf) for name, leaf in zip(_NAMES, leaves, strict=True)}


@cache
def cases(n: int) -> list[Scene]:
    """Two key/value heads a rank; fewer key/value heads than ranks, and a result whose gradient is not contiguous."""
    first = Shards(n, chunk=3, batch=2, heads=4 * n, kv_heads=2 * n, size=3)
    second = Shards(n, chunk=1, batch=1, heads=3 * n, kv_heads=2 if n == 4 else 1, size=5, transposed=True)
    return [_scene(first), _scene(second)]


def _scene(shards: Shards) -> Scene:
    right, n = results(shards), shards.n
    both, repeated = (2 * shards.of_heads(heads) for heads in (max(n, shards.kv_heads), shards.heads))
    q_and_o = 2 * shards.of_heads(shards.heads)
    note = f"{shards.n * shards.tokens} tokens, {shards.heads} query heads, key/value heads: {shards.kv_heads}"
    must = Must(q_and_o + both, q_and_o + repeated)
    return Scene(n, partial(_run, shards), right, lambda: telling(right, _wrong(shards, right)), must, note)


def _traffic(task: "ByHeads", trial: Trial) -> Verdict:
    """All-to-alls only, of the right number of bytes in each direction."""
    must = trial.case.must
    for phase in (FORWARD, BACKWARD):
        for rank in range(trial.case.n):
            calls = calls_in(trial, rank, phase)
            if others := [call for call in calls if call.op != "all_to_all"]:
                return Verdict(False, f"rank {rank} called {others[0].op} in {phase}", _instead(others[0].op))
            total = sum(call.bytes for call in calls)
            if total != must.bytes:
                there, here = sizes(total, must.bytes)
                found = f"rank {rank} gave {there} to {len(calls)} all-to-alls in {phase}; right is {here}"
                return Verdict(False, found, _why(trial, phase, calls))
    if trial.unwaited:
        return Verdict(False, f"rank {trial.unwaited[0][0]} did not wait for its {trial.unwaited[0][1]}", WAIT)
    return Verdict(True)


def _instead(op: str) -> str:
    if op in ("send", "recv"):
        return _MESSAGES
    return _REDUCED if "reduce" in op else _GATHERED


def _why(trial: Trial, phase: str, calls: list[Call]) -> str:
    must, total, dtypes = trial.case.must, sum(call.bytes for call in calls), {call.dtype for call in calls}
    if not total:
        return NOTHING if phase == FORWARD else _NOT_BACKWARD
    if dtypes != {"float64"}:
        return _ROUNDED.format(dtype=min(dtypes - {"float64"}))
    if total < must.bytes:
        return _NOT_BACKWARD if phase == BACKWARD else _LESS
    return _REPEATED if total == must.repeated or len(calls) <= _ENOUGH else _ONCE


@dataclass(frozen=True)
class ByHeads(ContextTask):
    unexplained: ClassVar[str] = _UNEXPLAINED
    advice: ClassVar[tuple[tuple[str, str], ...]] = (
        *ContextTask.advice,
        (r"cannot be split into|don't multiply up|divisible|shape '.*' is invalid", _SHAPES),
    )
    aspects: ClassVar[tuple[Aspect, ...]] = (
        Aspect("the result and the gradients of q, k and v are right", 0.6, values, each_world=True),
        Aspect("sends by all-to-all, and no more than it must", 0.4, _traffic),
    )

    def better(self, trial: Trial, hint: str) -> str:
        """What was sent may explain what no known mistake does."""
        return hint or _traffic(self, trial).hint

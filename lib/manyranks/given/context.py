"""Tensors of a rank, attention, and the answers of earlier tasks, for exercise 07's checks to hand to a learner's functions."""

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from manyranks.given.numbers import drawn, normal
from manyranks.measure.journal import Stopped, kind_of
from manyranks.measure.watch import Watch
from manyranks.parallel.context import merge

ORDINARY, LARGE, HIDDEN = "ordinary parts", "scores near ±1000", "queries that see nothing"
_BLOCK = "computed while the next one is on its way"
_ROWS = "queries, their o, lse and do, and their positions have the same length, and so have keys, values and their positions"
_PAIRS = "merge takes a list of pairs (o_SBAD, lse_SBA), of the same queries"
_SEQUENCE = "attention takes q_TBaD, k_TBgD and v_TBgD of the whole sequence, and g divides a"


def laid_out(seq: int, n: int) -> list[Tensor]:
    """Returns the positions of each rank's tokens."""
    chunks = torch.arange(seq).chunk(2 * n)
    return [torch.cat((chunks[n + rank], chunks[n - 1 - rank])) for rank in range(n)]


_SHAPES = (2,), (), (2, 3), (1,)  # of what a token has
_CHUNKS = {3: 5, 2: 1, 4: 3, 5: 2, 1: 3}
_ODD = ((10, 0, 3), (6, 0, 2), (9, 0, 3), (20, 0, 4), (5, 0, 1))


def layouts(seed: int) -> tuple[dict[int, int], tuple[tuple[int, int, int], ...]]:
    """Returns ranks -> tokens of a chunk, and seq, rank, n where seq cannot be cut: drawn, but for the library's own seed."""
    if not seed:
        return _CHUNKS, _ODD
    draw, odd = drawn(seed), []
    chunks = {n: draw.randint(1, 99) for n in draw.sample(range(2, 9), 5)}
    for n in chunks:
        odd += [(2 * n * draw.randint(1, 9) + more, draw.randrange(n), n) for more in (2, n, draw.randint(1, 2 * n - 1))]
    return chunks, tuple(odd)


def parts_of(case: str, rank: int, n: int, seed: int) -> list[dict[str, Tensor]]:
    """Draws, for each number of ranks, the parts of a sequence in no order that sorting finds."""
    found = []
    for n, chunk in layouts(seed)[0].items():
        sequence = normal((2 * n * chunk, *_SHAPES[n % 4]), seed, n)
        found.append({f"part {r}": sequence[own] for r, own in enumerate(laid_out(len(sequence), n))})
    return found


class Parts(NamedTuple):
    """Pairs of output and log-sum-exp, so many."""

    count: int
    kind: str

    def __str__(self) -> str:
        return f"with {self.count} part{'s' if self.count > 1 else ''}"

    def drawn(self, rank: int, n: int, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Draws parts. LARGE: all but the last near 1000, or all near −1000; HIDDEN: one, two or all see nothing of a row."""
        pairs = [(normal((5, 2, 3, 4), seed, self, i), normal((5, 2, 3), seed, self, i, "lse")) for i in range(self.count)]
        sign_SBA = normal((5, 2, 3), seed, self, "sign").sign()
        for i, (_, lse_SBA) in enumerate(pairs):
            if self.kind == LARGE:
                lse_SBA += 1000 * sign_SBA if i < self.count - 1 else -1000
            elif self.kind == HIDDEN:
                lse_SBA[list(((0, 1, 4), (1, 2), (1, 2, 4))[i]), :, 1:] = -math.inf
        return {f"part {i}": pair for i, pair in enumerate(pairs)}


class Case(NamedTuple):
    """A case of n ranks, two chunks each. strong: what queries are multiplied by; weighs: whether the bytes held are counted.

    transposed: whether keys, values and the result's gradient are not contiguous.
    """

    n: int
    chunk: int
    batch: int
    heads: int
    groups: int
    size: int
    strong: float = 1
    weighs: bool = False
    transposed: bool = False

    def __str__(self) -> str:
        said = f"{2 * self.n * self.chunk} tokens, {self.heads} query and {self.groups} key/value heads"
        return f"{said}, scores near ±1000" if self.strong > 1 else said

    @property
    def result(self) -> int:
        """Bytes of a rank's output."""
        return 16 * self.chunk * self.batch * self.heads * self.size

    @property
    def block(self) -> int:
        """Bytes of a rank's keys and values."""
        return 2 * self.result * self.groups // self.heads

    def drawn(self, rank: int, n: int, seed: int) -> "Drawn":
        """Draws q, k, v and positions; the result's gradient; for the judge, another layer's forward comes before backward."""
        at, heads = laid_out(2 * self.n * self.chunk, self.n), (self.heads, self.groups, self.groups, self.heads)
        shapes = [(2 * self.chunk, self.batch, a, self.size) for a in heads]
        q, k, v, do = (normal(shape, seed, self, i, rank) for i, shape in enumerate(shapes))
        if self.transposed:
            k, v, do = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v, do))
        given = {"q": self.strong * q, "k": k, "v": v} | {f"positions[{s}]": one for s, one in enumerate(at)}
        return self, given, do / self.strong, seed > 0


Drawn = tuple[Case, dict[str, Tensor], Tensor, bool]  # the last: whether two calls come before their backwards


class Helpers:
    """The functions that the exercise gives, and earlier tasks' functions. They note what they are given."""

    def __init__(self, watch: Watch, places: list[Tensor], weighs: bool = False):
        self._watch, self._places, self._weighs = watch, places, weighs
        self._first, self._there = len(watch.events), 0  # event; queries of results that are not merged yet
        self._blocks: dict[int, list[str]] = {}  # whose keys, in order -> of each pair of chunks, where the next block was
        self._scores = self._parts = self._unmerged = 0
        self._late = []  # of each time that was weighed: blocks that are sent, and computed with already

    def attend(self, q_SBAD, k_TBGD, v_TBGD, q_at_S, k_at_T) -> tuple[Tensor, Tensor]:
        """A block of attention."""
        self._note("attend", (q_SBAD, q_at_S), (k_TBGD, v_TBGD, k_at_T))
        return _attend(q_SBAD, k_TBGD, v_TBGD, q_at_S, k_at_T)

    def attend_backward(self, q_SBAD, k_TBGD, v_TBGD, o_SBAD, lse_SBA, do_SBAD, q_at_S, k_at_T) -> tuple[Tensor, ...]:
        """A block's part of the gradients."""
        self._note("attend_backward", (q_SBAD, o_SBAD, lse_SBA, do_SBAD, q_at_S), (k_TBGD, v_TBGD, k_at_T))
        scores_BAST, k_TBAD, v_TBAD = _scores(q_SBAD, k_TBGD, v_TBGD, q_at_S, k_at_T)
        p_BAST = _weights(scores_BAST, lse_SBA.permute(1, 2, 0))
        dp_BAST = torch.einsum("sbad,tbad->bast", do_SBAD, v_TBAD)
        delta_BAS = (do_SBAD * o_SBAD).sum(-1).permute(1, 2, 0)
        ds_BAST = p_BAST * (dp_BAST - delta_BAS[..., None]) / q_SBAD.shape[-1] ** 0.5
        both = (torch.einsum("bast,sbad->tbad", *pair) for pair in ((ds_BAST, q_SBAD), (p_BAST, do_SBAD)))
        dk_TBGD, dv_TBGD = (x.unflatten(2, (-1, k_TBGD.shape[2])).sum(2) for x in both)
        return torch.einsum("bast,tbad->sbad", ds_BAST, k_TBAD), dk_TBGD, dv_TBGD

    def merge(self, parts) -> tuple[Tensor, Tensor]:
        """Answers task 1."""
        listed = isinstance(parts, tuple | list) and parts and all(isinstance(p, tuple | list) and len(p) == 2 for p in parts)
        if not listed or len({getattr(x, "shape", None) for x, _ in parts}) > 1 or not isinstance(parts[0][0], Tensor):
            raise Stopped("merge was given something else than a list of pairs of tensors of one shape", _PAIRS)
        self._parts = max(self._parts, len(parts))
        self._there -= (len(parts) - 1) * len(parts[0][0])
        return _merged(parts)

    def ring(self, q_SBAD, k_SBGD, v_SBGD, positions) -> tuple[Tensor, Tensor]:
        """Answers task 3."""
        r, n = dist.get_rank(), dist.get_world_size()
        kv, total = torch.stack((k_SBGD, v_SBGD)), []
        for hop in range(n):
            coming = torch.empty_like(kv)
            works = [dist.isend(kv, (r - 1) % n), dist.irecv(coming, (r + 1) % n)] if hop < n - 1 else []
            total = [_merged([*total, _attend(q_SBAD, *kv, positions[r], positions[(r + hop) % n])])]
            for work in works:
                work.wait()
            kv = coming
        return total[0]

    def attention(self, q_TBaD, k_TBgD, v_TBgD) -> Tensor:
        """Computes the attention of a whole sequence."""
        q, k, v = (getattr(x, "shape", ()) for x in (q_TBaD, k_TBgD, v_TBgD))
        if not len(q) == len(k) == 4 or k != v or q[:2] != k[:2] or not k[2] or q[2] % k[2]:
            raise Stopped(f"attention was given {', '.join(str([*shape]) for shape in (q, k, v))}", _SEQUENCE)
        return _attend(q_TBaD, k_TBgD, v_TBgD, torch.arange(q[0]), torch.arange(q[0]))[0]

    def _note(self, name: str, queries: tuple, keys: tuple) -> None:
        """Raises Stopped where they do not belong together: q, …, q_at and k, v, k_at."""
        for group in (queries, keys):
            lengths = [str(len(x)) if isinstance(x, Tensor) else kind_of(x) for x in group]
            if len({*lengths}) > 1:
                raise Stopped(f"{name} was given tensors of {', '.join(lengths)} tokens, which belong together", _ROWS)
        q, q_at, k_at = queries[0], queries[-1], keys[-1]
        source = next((s for s, own in enumerate(self._places) if len(k_at) and (own == k_at[0]).any()), -1)
        if source not in self._blocks:
            self._unmerged = max(self._unmerged, self._there)
            if self._weighs:
                self._watch.weigh()
                self._late.append(max(0, self._watch.under_way()[0] - 1))
        self._blocks.setdefault(source, []).append(self._next([*self._blocks, source].index(source) + 1))
        self._scores += len(q_at) * len(k_at)
        self._there += len(q)

    def _next(self, number: int) -> str:
        begun = [event.what for event in self._watch.events[self._first :] if event.kind == "call"]
        if min(begun.count("send"), begun.count("recv")) < number:
            return "computed before the next one was requested"
        return _BLOCK if all(self._watch.under_way()) else "computed after a wait for the next one"

    def begin(self) -> None:
        """Counts messages from now on."""
        self._first = len(self._watch.events)

    def work(self, n: int, most: int = 99) -> dict[str, str | int | None]:
        """Counts the scores of each head, None where none were asked for; says whether blocks hide the next ones' way."""
        missing = [["not computed by the function that the check hands in"]] * n
        found = {"scores of each head": self._scores or None}
        said = [*self._blocks.values()] if self._scores else []
        for i, pairs in enumerate([*said, *missing][: min(most, n - 1)], 1):
            late = next((one for one in pairs if one != _BLOCK), _BLOCK)
            found[f"block {i} of {n}"] = late if late == pairs[0] else "partly computed after a wait for the next one"
        return found

    def memory(self, case: Case) -> dict[str, float]:
        """Measures what is kept. A block that is still on its way out when the next one is computed does not count."""
        found = {"parts in one call of merge": self._parts}
        found["results, not merged, when a block begins"] = self._unmerged / 2 / case.chunk if self._parts else 0.0
        if case.weighs:
            first, *held = self._watch.held
            most = max([count - late * case.block for count, late in zip(held, self._late, strict=True)], default=first)
            found["blocks, with the result"] = (most - first) / case.block
        return found


def _scores(q_SBAD: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, q_at_S: Tensor, k_at_T: Tensor) -> tuple[Tensor, ...]:
    """Scores, −∞ where a query does not see a key; keys and values with one head for each of q's."""
    k_TBAD, v_TBAD = (x.repeat(1, 1, q_SBAD.shape[2] // x.shape[2], 1) for x in (k_TBGD, v_TBGD))
    scores_BAST = torch.einsum("sbad,tbad->bast", q_SBAD, k_TBAD) / q_SBAD.shape[-1] ** 0.5
    return scores_BAST.masked_fill(q_at_S[:, None] < k_at_T, -torch.inf), k_TBAD, v_TBAD


def _attend(q_SBAD: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, q_at_S: Tensor, k_at_T: Tensor) -> tuple[Tensor, Tensor]:
    scores_BAST, _, v_TBAD = _scores(q_SBAD, k_TBGD, v_TBGD, q_at_S, k_at_T)
    lse_BAS = scores_BAST.logsumexp(-1)
    return torch.einsum("bast,tbad->sbad", _weights(scores_BAST, lse_BAS), v_TBAD), lse_BAS.permute(2, 0, 1)


def _weights(scores_BAST: Tensor, lse_BAS: Tensor) -> Tensor:
    return (scores_BAST - lse_BAS.clamp(min=-1e300)[..., None]).exp()


def _merged(parts: Sequence) -> tuple[Tensor, Tensor]:
    return reduce(lambda one, other: merge(*one, *other), map(tuple, parts))

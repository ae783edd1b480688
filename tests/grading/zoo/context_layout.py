"""Wrong answers to positions and unshard of 07_context."""

import torch

from manyranks.parallel import context
from tests.grading.zoo.context_right import places
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
P, U = "positions", "unshard"
CHAPTERS, EARLY = "that is the chapter's layout", "the early chunk comes first"
NEIGHBOURS, STRIPED, ASCEND = "those are neighbours", "tokens are dealt in turn", "inside a chunk, positions ascend"


def cut(numbers):
    """Positions of the chunks with these numbers."""

    def layout(seq, rank, n):
        chunks = torch.arange(seq).chunk(2 * n)
        return torch.cat([chunks[k] for k in numbers(rank, n)])

    return layout


LAYOUTS = {  # name -> says, positions
    "chapters_zigzag": (CHAPTERS, cut(lambda r, n: (r, 2 * n - 1 - r))),
    "chapters_zigzag_late_first": (CHAPTERS, cut(lambda r, n: (2 * n - 1 - r, r))),
    "early_first": (EARLY, cut(lambda r, n: (n - 1 - r, n + r))),
    "neighbours": (NEIGHBOURS, cut(lambda r, n: (2 * r, 2 * r + 1))),
    "striped": (STRIPED, lambda seq, rank, n: torch.arange(rank, seq, n)),
    "descending": (ASCEND, lambda seq, rank, n: torch.cat([half.flip(0) for half in places(seq, n)[rank].chunk(2)])),
    "all_descending": (ASCEND, lambda seq, rank, n: places(seq, n)[rank].sort().values.flip(0)),
}


def checked(layout):
    """That refuses what cannot be cut."""

    def positions(seq, rank, n):
        if seq % (2 * n):
            raise ValueError(f"{seq} tokens on {n} ranks")
        return layout(seq, rank, n)

    return positions


def undone(layout, inverse=True):
    """Puts parts back as if they had been cut so."""

    def unshard(parts):
        joined = torch.cat(parts)
        order = torch.cat([layout(len(joined), rank, len(parts)) for rank in range(len(parts))])
        return joined[order.argsort() if inverse else order]

    return unshard


def named(function, name):
    function.__name__ = function.__qualname__ = name
    return function


for name, (says, layout) in LAYOUTS.items():
    wrong(P, says)(named(checked(layout), name))
    if name != "neighbours":
        wrong(U, says)(named(undone(layout), f"undone_{name}"))


@wrong(P, "it returns a tensor, int64")
def returns_a_list(seq, rank, n):
    return places(seq, n)[rank].tolist()


@wrong(P, "positions returned [5] of float32; hint: int64")
def returns_floats(seq, rank, n):
    chunk = seq // (2 * n)
    first = torch.linspace((n + rank) * chunk, (n + rank + 1) * chunk - 1, chunk)
    return first


@wrong(P, "one position for each of the rank's tokens")
def returns_chunk_numbers(seq, rank, n):
    return torch.tensor([n + rank, n - 1 - rank])


@wrong(P, "one position for each of the rank's tokens")
def returns_the_late_chunk_only(seq, rank, n):
    return checked(cut(lambda r, n: (n + r,)))(seq, rank, n)


@wrong(P, "one position for each of the rank's tokens")
def returns_a_table(seq, rank, n):
    return torch.stack(places(seq, n)[rank].chunk(2))


@wrong(P, "[10] of int32; right is [10] of int64; hint: int64 of the shape")
def returns_int32(seq, rank, n):
    return checked(lambda seq, rank, n: places(seq, n)[rank].int())(seq, rank, n)


@wrong(P, "10 tokens on 3 ranks raised no ValueError; hint: raise a ValueError", right_values=True)
def refuses_with_the_wrong_precedence(seq, rank, n):
    if seq % 2 * n:
        raise ValueError
    return places(seq, n)[rank]


@wrong(P, "6 tokens on 2 ranks raised no ValueError; hint: N divides it, but there are 2N chunks", right_values=True)
def refuses_by_n_only(seq, rank, n):
    if seq % n:
        raise ValueError
    return places(seq, n)[rank]


@wrong(P, "10 tokens on 3 ranks raised no ValueError; hint: raise a ValueError", right_values=True)
def refuses_nothing(seq, rank, n):
    return places(seq, n)[rank]


@wrong(P, "raised no ValueError", right_values=True)
def refuses_by_an_assertion(seq, rank, n):
    assert seq % (2 * n) == 0
    return places(seq, n)[rank]


@wrong(P, "elements are wrong")
def of_two_ranks(seq, rank, n):
    return checked(cut(lambda r, _: (2 + r, 1 - r) if n == 2 else (n, n - 1)))(seq, rank, n)


@wrong(U, "the parts are joined rank by rank")
def joins(parts):
    return torch.cat(parts)


@wrong(U, "the tokens are moved the wrong way")
def takes_the_permutation(parts):
    return undone(lambda seq, rank, n: places(seq, n)[rank], inverse=False)(parts)


wrong(U, CHAPTERS)(named(undone(LAYOUTS["chapters_zigzag"][1], inverse=False), "permuted_chapters_zigzag"))


@wrong(U, "what unshard returned is a list, not a tensor")
def returns_the_parts(parts):
    return parts


@wrong(U, "what unshard returned has the shape [15, 2, 3]; right is [30, 2, 3]")
def returns_the_late_half(parts):
    return torch.cat([part.chunk(2)[0] for part in parts])


@wrong(U, "draw it for N = 3")
def forgets_to_turn_the_early_half(parts):
    late, early = zip(*(part.chunk(2) for part in parts), strict=True)
    return torch.cat((*early, *late))


@wrong(U, CHAPTERS)
def late_half_first(parts):
    late, early = zip(*(part.chunk(2) for part in parts), strict=True)
    return torch.cat((*late, *early[::-1]))


@wrong(U, "part 0 changed; hint: leave what you are given")
def sorts_in_place(parts):
    late, early = zip(*(part.chunk(2) for part in parts), strict=True)
    whole = torch.cat((*early[::-1], *late))
    parts[0].copy_(whole[: len(parts[0])])
    return whole


@wrong(U, "IndexError")
def cuts_by_world_size(parts):
    return torch.cat([parts[i] for i in range(len(parts) + 1)])


@wrong(U, "draw it for N = 3")
def zeros(parts):
    return torch.zeros_like(torch.cat(parts))


READY = "manyranks.parallel.context.positions is not allowed; hint: write it yourself"


def by_the_chapter(seq, rank, n):
    return torch.cat(context.positions("zigzag", seq, n)[n - 1 - rank].flatten().chunk(2)[::-1])


@wrong(P, READY)
def positions_by_the_chapter(seq, rank, n):
    return by_the_chapter(seq, rank, n)


@wrong(U, READY)
def unshard_by_the_chapter(parts):
    n, joined = len(parts), torch.cat(parts)
    order = torch.cat([by_the_chapter(len(joined), rank, n) for rank in range(n)])
    return torch.empty_like(joined).index_copy(0, order, joined)
